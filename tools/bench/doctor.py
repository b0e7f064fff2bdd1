"""Does the doctor name what is wrong, and nothing where nothing is? Every fault, and healthy runs; a confusion matrix.

    uv run python tools/bench/doctor.py                      # all faults on lookup, and 18 healthy runs
    uv run python tools/bench/doctor.py --quick              # six faults and two healthy runs
    uv run python tools/bench/doctor.py --only "groups shuffled" --only "stale engine"

Each fault of trainer/tests/faults.py is done to a healthy run of the bundled policy on lookup. The last column: which of
the metrics that TRL logs (reward, reward_std, frac_reward_zero_std, grad_norm; kl and clip_ratio are 0 in a first step
whatever happens) leave the range of the healthy runs of lookup, widened by half their size on both sides. Exit code 1
if a fault is not named, or a healthy run fails.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainer" / "tests"))

from faults import FAULTS, Fault
from plumbob.trainer import ranks
from plumbob.trainer.cli import quiet_libraries
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes.gradient import gradient_of, norm_of
from plumbob.trainer.doctor.run_probes import examine
from plumbob.trainer.doctor.subject import Subject, load_subject
from plumbob.trainer.rollouts import RunFailed

HEALTHY: dict[str, dict[str, Any]] = {
    "lookup": {"model": "tiny"},
    "gsm8k": {"model": "tiny-gsm8k", "datasets": "synthetic", "max_tokens": 160},
    "musique": {"model": "tiny-musique", "datasets": "synthetic", "env_args": ("hops=2",), "max_tokens": 128},
}
QUICK = (
    "loss mask as attention mask",
    "missing assistant header in the row",
    "groups shuffled",
    "adapter never applied in the engine",
    "gradient clipped to nothing",
    "evaluation and training parse differently",
)


@dataclass(frozen=True)
class Result:
    named: str
    """The first failure's cause, or "none"."""
    evidence: str
    unsure: int
    metrics: dict[str, float]
    seconds: float


def diagnose(config: TrainConfig, fault: Fault | None = None) -> Result:
    started = time.perf_counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subject = load_subject(config, ranks.join(torch.device("cpu")), folder, lambda _: None)
        stack.callback(subject.close)
        if fault is not None:
            fault.inject(stack, subject.run)
        findings = [finding for _, finding in examine(subject)]
        seconds = time.perf_counter() - started
        return Result(*_summary(findings), trl_metrics(subject), seconds)


def _summary(findings: list[Finding]) -> tuple[str, str, int]:
    unsure = sum(f.verdict == "unsure" for f in findings)
    failed = next((f for f in findings if f.cause), None)
    if failed is None:
        return "none", "; ".join(f"{f.check}: {f.evidence}" for f in findings if f.verdict == "unsure"), unsure
    assert failed.cause is not None
    return failed.cause, failed.evidence, unsure


def trl_metrics(subject: Subject) -> dict[str, float]:
    """As TRL names them, of the step that was drawn; none if it fails."""
    try:
        samples = subject.drawn.samples
        rows, advantages = subject.trained_rows(8)
        norm = norm_of(gradient_of(subject, rows, advantages)) if rows else 0.0
    except (RunFailed, RuntimeError):
        return {}
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample.reward)
    deviations = [stdev(rewards) if len(rewards) > 1 else 0.0 for rewards in groups.values()]
    return {
        "reward": fmean(s.reward for s in samples),
        "reward_std": fmean(deviations),
        "frac_reward_zero_std": fmean(d == 0 for d in deviations),
        "grad_norm": norm,
    }


def shown(metrics: dict[str, float], healthy: list[dict[str, float]]) -> str:
    """The metrics outside the range of the healthy ones."""
    if not metrics:
        return "the step fails"
    names = []
    for name, value in metrics.items():
        low, high = min(m[name] for m in healthy), max(m[name] for m in healthy)
        if not low / 1.5 <= value <= high * 1.5:
            names.append(f"{name} {value:.3g}")
    return ", ".join(names) or "no"


def healthy_configs(envs: Sequence[str], seeds: int) -> Iterator[tuple[str, TrainConfig]]:
    for env, peft, seed in itertools.product(envs, (False, True), range(seeds)):
        name = f"healthy {env} {'LoRA' if peft else 'full'} {seed}"
        yield name, TrainConfig(env=env, peft=peft, seed=seed, **HEALTHY[env])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3, help="of the healthy runs")
    parser.add_argument("--only", action="append", help="a fault's name; may be repeated")
    parser.add_argument("--healthy", nargs="*", choices=list(HEALTHY), default=list(HEALTHY), help="environments")
    parser.add_argument("--no-faults", action="store_true")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(1)
    wanted = [] if args.no_faults else args.only or (QUICK if args.quick else [f.name for f in FAULTS])
    wrong, ranges = 0, {False: [], True: []}
    print("| run | expected | named | TRL's metrics show | seconds | evidence |\n|---|---|---|---|---|---|")
    for name, config in healthy_configs(["lookup"] if args.quick else args.healthy, 1 if args.quick else args.seeds):
        result = diagnose(config)
        if config.env == "lookup":
            ranges[config.peft].append(result.metrics)
        wrong += result.named != "none"
        _print(name, "none", result, "")
    for fault in (f for f in FAULTS if f.name in wanted):
        settings = {**HEALTHY["lookup"], **fault.settings}
        result = diagnose(TrainConfig(env="lookup", **settings), fault)
        wrong += result.named != fault.cause
        reference = ranges[bool(fault.settings.get("peft"))]
        _print(fault.name, fault.cause, result, shown(result.metrics, reference) if reference else "")
    print(f"\n{wrong} wrong")
    sys.exit(1 if wrong else 0)


def _print(name: str, expected: str, result: Result, metrics: str) -> None:
    mark = "" if result.named == expected else " **wrong**"
    unsure = f" ({result.unsure} unsure)" if result.unsure else ""
    evidence = result.evidence.replace("|", "/").replace("\n", " ")
    print(
        f"| {name} | {expected} | {result.named}{mark}{unsure} | {metrics} | {result.seconds:.0f} | {evidence} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
