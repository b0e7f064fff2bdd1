"""Measure how often the watch names the right cause: real runs with a fault, and healthy ones, as a confusion matrix.

    uv run python tools/bench/watch.py --out runs/watch --first-seed 7 --seeds 2    # 60 runs, half an hour on two cores
    uv run python tools/bench/watch.py --out runs/watch --only healthy
    uv run python tools/bench/watch.py --out runs/watch --record packages/testing/src/plumbob/testing/recorded_runs.json

Thresholds must be tested on other seeds than those they were set on; docs/results/doctor.md lists the latter.

A run whose metrics.jsonl is complete is not run again. The last column lists the metrics that TRL logs (reward, kl,
clip_ratio, frac_reward_zero_std, grad_norm) and that show the fault: the mean of the metric over the first five steps
is below a third of the lowest, or above three times the highest, of the healthy runs of that environment. For a metric
between 0 and 1, its difference to 1 is compared in the same way. Exit code 1 if a run is not named with its own cause
alone, or if any cause is named in a healthy run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from plumbob.trainer.config.options import read_toml
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.watch.history import Row, mean
from plumbob.trainer.watch.watch import evaluation_before, examine, read_metrics

LOOKUP = "lookup --model tiny"
GSM8K = "gsm8k --datasets synthetic --model tiny-gsm8k --max-tokens 128"
MUSIQUE = "musique --datasets synthetic -a hops=2 --model tiny-musique --max-tokens 128"


@dataclass(frozen=True)
class Case:
    """One run, healthy or with a fault."""

    name: str
    flags: str
    """The arguments of `train`, environment first."""
    cause: str | None = None
    """The cause that the watch must name; None for a healthy run."""
    steps: int = 6
    by_traces: bool = False
    """Whether only the traces show the fault; its metrics are then not recorded for the tests."""
    double: str | None = None
    """Name of the double in watch_faults.py that causes the fault, if no option of `train` does."""

    @property
    def environment(self) -> str:
        return self.flags.split()[0]

    @property
    def command(self) -> list[str]:
        sizes = f"--batch-size 32 --gradient-accumulation-steps 1 --max-steps {self.steps}"
        evaluation = "" if "--eval-examples" in self.flags else " --eval-examples 0"
        return [*(sizes + evaluation).split(), *self.flags.split()]

    def with_seed(self, seed: int) -> Case:
        """The case with `--seed seed`; seed 0 keeps the name unchanged."""
        return replace(self, name=f"{self.name}, seed {seed}", flags=f"{self.flags} --seed {seed}") if seed else self


def healthy(first_seed: int, seeds: int) -> list[Case]:
    """Runs without a fault: each bundled policy, in full and with LoRA, for each seed; and variants of lookup."""
    cases = [
        Case(
            f"healthy {policy.split()[0]}, {kind}, seed {seed}",
            f"{policy} --seed {seed}{flag}",
            steps=20 if policy == LOOKUP and first_seed else 10,
        )
        for seed in range(first_seed, first_seed + seeds)
        for policy in (LOOKUP, GSM8K, MUSIQUE)
        for kind, flag in (("full", ""), ("LoRA", " --peft"))
    ]
    variants = {
        "a little KL": "--kl-beta 0.04",
        "gspo": "--loss-type gspo --num-iterations 2",
        "two minibatches, twice, scaled": "--num-minibatches 2 --num-iterations 2 --scale-rewards group",
        "bf16": "--bf16",
        # The first update of a step is never clipped, so only several iterations can show clipping.
        "clip at 1e-5, 4 iterations": "--epsilon 0.00001 --num-iterations 4",
        "cispo": "--loss-type cispo --num-iterations 2",
        "dapo, dynamic sampling": "--loss-type dapo --zero-signal refill --epsilon-high 0.28",
        "warm-up and evaluations": "--warmup-steps 3 --eval-examples 64 --eval-steps 2",
        "batch scaling, KL in the reward": "--scale-rewards batch --kl-beta 0.02 --kl-placement reward",
        "overlong mask": "--overlong mask --max-context 320",
        "weight decay, leave one out": "--weight-decay 0.01 --baseline leave_one_out",
    }
    return cases + [
        Case(f"healthy lookup, {name}", f"{LOOKUP} {flags}").with_seed(first_seed) for name, flags in variants.items()
    ]


FAULTY = [
    Case("learning rate 1e-9", f"{LOOKUP} --lr 1e-9", "learning-rate-too-low"),
    Case("LoRA at full training's 1e-6", f"{LOOKUP} --peft --lr 1e-6", "learning-rate-too-low"),
    Case("learning rate 100 times too high", f"{LOOKUP} --lr 3e-2", "learning-rate-too-high"),
    Case("LoRA rate 100 times too high", f"{LOOKUP} --peft --lr 0.3", "learning-rate-too-high"),
    Case("warm-up of 100,000 steps", f"{LOOKUP} --warmup-steps 100000", "warmup-too-long"),
    Case("gradient clipped to 1e-9", f"{LOOKUP} --max-grad-norm 1e-9", "gradient-clipped-to-nothing"),
    Case("KL coefficient 100", f"{LOOKUP} --kl-beta 100", "kl-too-large", steps=10),
    Case("turns of 8 tokens", f"{LOOKUP} --max-tokens 8", "truncated-turns"),
    Case("context of 190 tokens", f"{LOOKUP} --max-context 190", "truncated-context"),
    Case("context of 190, masked", f"{LOOKUP} --max-context 190 --overlong mask", "truncated-context"),
    Case("two turns", f"{LOOKUP} --max-turns 2", "truncated-rollouts"),
    Case("task out of reach", f"{LOOKUP} -a difficulty=hard", "never-succeeds"),
    Case("task solved", f"{LOOKUP} -a difficulty=trivial", "task-solved"),
    Case("top-p 0.5", f"{LOOKUP} --top-p 0.5", "sampling-truncated"),
    Case("temperature 5", f"{LOOKUP} --temperature 5", "temperature-too-high"),
    Case("temperature 0.05", f"{LOOKUP} --temperature 0.05", "groups-without-variety"),
    Case("dropout 0.5", f"{LOOKUP} --peft --lora-dropout 0.5", "dropout-in-training"),
    Case(
        "format weighs 20 times",
        f"{MUSIQUE} -a weights=format=20 -a grounding=0",
        "reward-format-dominated",
        by_traces=True,
    ),
    Case("stale engine, sync unchecked", LOOKUP, "weights-not-synced", double="stale engine"),
    Case(
        "adapter bound to nothing, unchecked",
        f"{LOOKUP} --peft",
        "engine-trainer-mismatch",
        double="adapter bound to nothing",
    ),
    Case("loss mask as attention mask", LOOKUP, "engine-trainer-mismatch", double="loss mask as attention mask"),
    Case("assistant header missing", LOOKUP, "engine-trainer-mismatch", double="assistant header missing"),
    Case(
        "tools not in the trained prompt", LOOKUP, "engine-trainer-mismatch", double="tools not in the trained prompt"
    ),
    Case(
        "temperature 1.3 not applied",
        f"{LOOKUP} --temperature 1.3",
        "engine-trainer-mismatch",
        double="temperature not applied",
    ),
    Case("loss detached", LOOKUP, "no-gradient", double="loss detached"),
    Case("weights in bf16, rate 1e-6", f"{LOOKUP} --lr 1e-6", "weights-in-bf16", double="bf16 masters"),
    Case("optimizer of copies", LOOKUP, "optimizer-moves-nothing", double="optimizer of copies"),
    Case("reward NaN where wrong", LOOKUP, "reward-not-finite", double="reward NaN"),
    Case("reward raises where wrong", LOOKUP, "environment-fails", double="reward raises"),
    Case("reward always 0.3", LOOKUP, "reward-constant", double="reward constant"),
    Case("reward drawn by lot", LOOKUP, "reward-nondeterministic", by_traces=True, double="reward drawn by lot"),
    Case(
        "rewards nearly equal, scaled",
        f"{GSM8K} --scale-rewards group",
        "tiny-std-scaling",
        double="rewards nearly equal",
    ),
    Case("reward for style", LOOKUP, "reward-format-dominated", steps=10, double="reward for style"),
    Case(
        "held-out tasks parsed differently",
        f"{LOOKUP} --eval-examples 64 --batch-size 128",
        "evaluation-differs",
        double="held-out tasks parsed differently",
    ),
    Case("tools down", LOOKUP, "tools-fail", double="tools down"),
    Case("task out of reach, with KL", f"{LOOKUP} -a difficulty=hard --kl-beta 0.04", "never-succeeds"),
    Case("task out of reach, refilled", f"{LOOKUP} -a difficulty=hard --zero-signal refill", "never-succeeds"),
]

TRL = {
    "reward": "reward/mean",
    "kl": "policy/kl",
    "clip_ratio": "policy/clip_fraction",
    "frac_reward_zero_std": "groups/zero_signal_share",
    "grad_norm": "optimizer/grad_norm",
}
READ = re.compile(
    "step$|reward/(mean|std|.*/variance_share)$|rollout/(count|errored|stale|not_finite|stopped/.*|truncated_share)$|"
    "rollout/(sampled_tokens|tool_calls|tool_errors|malformed_calls)$|advantage/mean_abs$|train/rows$|eval/|"
    "groups/(count|all_fail|all_pass|zero_signal|zero_signal_share|tiny_spread_share)$|sync/(sampling_gap|mismatch_kl)$|"
    "policy/(entropy|kl|step_kl|clip_fraction)$|correction/(masked_share|mean_weight)$|"
    "optimizer/(grad_norm|learning_rate|relative_update|update_rms|moved_share|skipped|updates)$"
)
"""Matches the names of the metrics that the rules of the watch read; only these are recorded for the tests."""

SHARES = ("reward", "clip_ratio", "frac_reward_zero_std")
"""TRL's metrics that are between 0 and 1."""


def run(case: Case, out: Path) -> Path:
    """Run a case unless it is complete; returns its run directory. Raises RuntimeError with the end of the output."""
    folder = out / case.name.replace(" ", "-").replace(",", "")
    if not folder.is_dir() or len(read_metrics(folder)) < case.steps:
        train = [sys.executable, "-c", "from plumbob.trainer.cli.train import main; main()"]
        if case.double is not None:
            train = [sys.executable, str(Path(__file__).with_name("watch_faults.py")), case.double]
        where = ["-o", str(out), "--run-name", folder.name, "--threads", "1", "--save-steps", "1000"]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*train, *case.command, *where], env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{case.name} failed:\n{done.stderr[-2000:]}")
    print(case.name, file=sys.stderr, flush=True)
    return folder


def trl_shows(rows: Sequence[Row], others: Sequence[Sequence[Row]]) -> list[str]:
    """Which of TRL's metrics leave the range of the healthy runs (`others`) by a factor of three."""
    shown = []
    for name, metric in TRL.items():
        value = mean(rows[:5], metric)
        range_ = [mean(other[:5], metric) for other in others]
        outside = value < min(range_) / 3 or value > 3 * max(range_)
        if name in SHARES:
            outside = outside or 1 - value < (1 - max(range_)) / 3 or 1 - value > 3 * (1 - min(range_))
        if outside and abs(value - min(range_, key=lambda v: abs(v - value))) > 1e-6:
            shown.append(name)
    return shown


def row_of(case: Case, findings: list[Finding], shown: list[str]) -> str:
    """The row of the table for one case. `shown`: TRL's metrics that show the fault."""
    failed = [f for f in findings if f.cause]
    named = ", ".join(f"`{f.cause}`" for f in failed) or "none"
    step = min((f.step for f in failed if f.step is not None), default="")
    right = "yes" if {f.cause for f in failed} == ({case.cause} - {None}) else "**no**"
    return f"| {case.name} | {named} | {step} | {right} | {', '.join(shown) or 'none'} |"


def record(cases: list[Case], folders: dict[str, Path], file: Path) -> None:
    """Write the file that the tests replay: settings that are not default, and metrics that rules read, rounded.

    A metric that is the same in every step is written as one value, others as a list. Runs that `cases` does not name
    stay in the file.
    """
    default, runs = TrainConfig(), json.loads(file.read_text()) if file.exists() else {}
    for case in [c for c in cases if not c.by_traces]:
        folder = folders[case.name]
        settings = read_toml(folder / "config.toml", TrainConfig)
        settings = {
            k: v for k, v in settings.items() if v != getattr(default, k) and k not in ("output_dir", "threads")
        }
        rows = read_metrics(folder)
        names = sorted({name for row in rows for name in row if READ.match(name)})
        columns = {name: [_rounded(row.get(name)) for row in rows] for name in names}
        columns = {name: c if len(set(c)) > 1 else c[0] for name, c in columns.items()}
        before = {"before": evaluation_before(folder)} if evaluation_before(folder) else {}
        runs[case.name] = {"config": settings, **before, "cause": case.cause, "steps": len(rows), "metrics": columns}
    file.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in runs.items()) + "\n}\n")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/watch"), help="folder of the run directories")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at the same time")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds for each kind of healthy run")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="first seed of the healthy runs, and the seed of the others"
    )
    parser.add_argument("--only", default="", help="run only the cases whose name contains this text")
    parser.add_argument("--record", type=Path, help="write the runs to this file, for the tests to replay")
    args = parser.parse_args()
    faulty = [case.with_seed(args.first_seed) for case in FAULTY]
    cases = [case for case in [*faulty, *healthy(args.first_seed, args.seeds)] if args.only in case.name]
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = dict(zip((c.name for c in cases), pool.map(lambda c: run(c, args.out), cases), strict=True))
    metrics = {case.name: read_metrics(folders[case.name]) for case in cases}
    print(
        "| run | causes named | in step | right | TRL's metrics that leave the healthy range |\n|---|---|---|---|---|"
    )
    wrong = 0
    for case in cases:
        findings = examine(folders[case.name])
        others = [metrics[c.name] for c in cases if c.cause is None and c.environment == case.environment]
        shown = trl_shows(metrics[case.name], others) if others and case.cause else []
        print(line := row_of(case, findings, shown))
        wrong += "**no**" in line
    with_fault = sum(case.cause is not None for case in cases)
    print(f"\n{len(cases) - with_fault} healthy runs, {with_fault} faulty, {wrong} named wrongly")
    if args.record:
        record(cases, folders, args.record)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
