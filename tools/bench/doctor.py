"""Measure how often the doctor names the right cause: every fault, and healthy runs, as a confusion matrix.

    uv run python tools/bench/doctor.py              # all faults, 18 healthy runs and variants, on three environments
    uv run python tools/bench/doctor.py --quick      # six faults and two healthy runs of lookup
    uv run python tools/bench/doctor.py --env gsm8k --only "groups shuffled" --only "stale engine"

Each fault of plumbob.testing.faults is injected into a healthy run of a bundled policy, in each environment where it
can happen. The column for TRL lists the metrics that TRL logs and that leave the range of the environment's healthy
runs, from the lowest value / 1.5 to the highest x 1.5. The metrics are reward, reward_std, frac_reward_zero_std and
grad_norm; kl and clip_ratio are left out because they are always 0 in a first step. The table is written to stdout, the
evidence of each run to stderr. Exit code 1 if a fault is not named, or if a cause is named in a healthy run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from plumbob.testing.faults.catalogue import FAULTS, HEALTHY, VARIANTS, Fault
from plumbob.trainer.cli.loading import quiet_libraries
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.distributed.world import join_world
from plumbob.trainer.doctor.probes.gradient import gradient_of, norm_of
from plumbob.trainer.doctor.run_probes import examine
from plumbob.trainer.doctor.subject import Subject, load_subject
from plumbob.trainer.rollouts.batch import RunFailed

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
    """What the doctor found in one run."""

    named: str
    """The cause that the first failed check names, or "none"."""
    evidence: str
    """The evidence of the first failed check, or of all unsure ones if none failed."""
    unsure: int
    """Number of checks with the verdict "unsure"."""
    metrics: dict[str, float]
    """The metrics that TRL would log, by TRL's names."""
    seconds: float
    """Duration of set-up and probes."""


def diagnose(config: TrainConfig, fault: Fault | None = None) -> Result:
    """Set up a run, inject `fault`, and let the doctor examine it."""
    started = time.perf_counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subject = load_subject(config, join_world(torch.device("cpu")), folder, lambda _: None)
        stack.callback(subject.close)
        if fault is not None:
            fault.inject(stack, subject.run)
        findings = [finding for _, finding in examine(subject)]
        seconds = time.perf_counter() - started
        return Result(*_summary(findings), trl_metrics(subject), seconds)


def _summary(findings: list[Finding]) -> tuple[str, str, int]:
    """The fields `named`, `evidence` and `unsure` of a Result."""
    unsure = sum(f.verdict == "unsure" for f in findings)
    failed = next((f for f in findings if f.cause), None)
    if failed is None:
        return "none", "; ".join(f"{f.check}: {f.evidence}" for f in findings if f.verdict == "unsure"), unsure
    assert failed.cause is not None
    return failed.cause, failed.evidence, unsure


def trl_metrics(subject: Subject) -> dict[str, float]:
    """The metrics of the sampled step by TRL's names; empty if its gradient cannot be computed."""
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


def shown(metrics: dict[str, float], healthy: Sequence[dict[str, float]]) -> str:
    """Cell of the table: the metrics outside the range of healthy runs, widened by a factor of 1.5 on both sides."""
    if not healthy:
        return "?"
    if not metrics:
        return "the step fails"
    names = []
    for name, value in metrics.items():
        low, high = min(m[name] for m in healthy), max(m[name] for m in healthy)
        if not low / 1.5 <= value <= high * 1.5:
            names.append(f"{name} {value:.2g}")
    return ", ".join(names) or "none"


@dataclass
class Bench:
    """Runs the doctor and counts its results. Each row of the table is printed as soon as it is known."""

    runs: int = 0
    wrong: int = 0
    seconds: float = 0.0
    healthy: dict[tuple[str, bool], list[dict[str, float]]] = field(default_factory=dict)
    """(environment, whether with LoRA) -> the metrics of each healthy run by TRL's names."""

    def run(self, name: str, expected: str, config: TrainConfig, fault: Fault | None = None) -> Result:
        result = diagnose(config, fault)
        self.runs, self.seconds = self.runs + 1, self.seconds + result.seconds
        self.wrong += result.named != expected
        verdict = "right" if result.named == expected else f"WRONG, {expected} expected"
        print(f"{name}: {result.named} ({verdict}, {result.seconds:.0f} s): {result.evidence}", file=sys.stderr)
        return result

    def healthy_row(self, env: str, peft: bool, seeds: int) -> None:
        kind = "LoRA" if peft else "full"
        settings = {**HEALTHY[env], "peft": peft}
        results = [
            self.run(f"healthy {env} {kind} {seed}", "none", TrainConfig(env=env, seed=seed, **settings))
            for seed in range(seeds)
        ]
        self.healthy[env, peft] = [r.metrics for r in results]
        names = ", ".join(r.named + (f" ({r.unsure} unsure)" if r.unsure else "") for r in results)
        print(f"| {env} | {kind} | {names} | {fmean(r.seconds for r in results):.0f} |", flush=True)

    def variant_row(self, settings: dict[str, Any]) -> None:
        name = ", ".join(f"{key}={value}" for key, value in settings.items())
        result = self.run(f"healthy lookup {name}", "none", TrainConfig(**{**HEALTHY["lookup"], **settings}))
        unsure = f" ({result.unsure} unsure)" if result.unsure else ""
        print(f"| lookup | {name} | {result.named}{unsure} | {result.seconds:.0f} |", flush=True)

    def fault_row(self, fault: Fault, envs: Sequence[str]) -> None:
        cells, metrics = [], []
        for env in envs:
            if env not in fault.envs:
                cells.append("")
                continue
            settings = fault.settings_in(env)
            result = self.run(f"{fault.name}, {env}", fault.cause, TrainConfig(env=env, **settings), fault)
            cells.append("right" if result.named == fault.cause else f"**{result.named}**")
            metrics.append(shown(result.metrics, self.healthy.get((env, bool(settings.get("peft"))), ())))
        print(f"| {fault.name} | `{fault.cause}` | {' | '.join(cells)} | {' / '.join(metrics)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six faults and two healthy runs of lookup")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds for each kind of healthy run")
    parser.add_argument(
        "--env", action="append", choices=list(HEALTHY), help="an environment to test in; may be repeated; default: all"
    )
    parser.add_argument("--only", action="append", help="name of a fault to inject; may be repeated; default: all")
    parser.add_argument("--no-faults", action="store_true", help="skip the faulty runs")
    parser.add_argument(
        "--no-healthy", action="store_true", help="skip the healthy runs; the column for TRL is then unknown"
    )
    args = parser.parse_args()
    known = [fault.name for fault in FAULTS]
    wanted = [] if args.no_faults else args.only or (QUICK if args.quick else known)
    if unknown := set(wanted) - set(known):
        parser.error(f"there is no fault {min(unknown)!r}; choose from: {', '.join(known)}")
    quiet_libraries()
    torch.set_num_threads(1)
    envs = args.env or (["lookup"] if args.quick else list(HEALTHY))
    bench = Bench()
    if not args.no_healthy:
        print("| healthy run | settings | named, by seed | seconds |\n|---|---|---|---|")
        for env, peft in itertools.product(envs, (False, True)):
            bench.healthy_row(env, peft, 1 if args.quick else args.seeds)
        for settings in VARIANTS if "lookup" in envs and not args.quick else ():
            bench.variant_row(settings)
    if wanted:
        print(f"\n| fault | cause | {' | '.join(envs)} | TRL's metrics that leave the healthy range |")
        print("|---|---|" + "---|" * len(envs) + "---|")
    for fault in FAULTS:
        if fault.name in wanted:
            bench.fault_row(fault, envs)
    print(f"\n{bench.runs} runs, {bench.wrong} named wrongly, {bench.seconds / bench.runs:.1f} s each")
    sys.exit(1 if bench.wrong else 0)


if __name__ == "__main__":
    main()
