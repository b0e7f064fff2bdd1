"""A run's settings and metrics as `plumbob.doctor` judges them: warnings while it trains, and afterwards also why it ended."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plumbob.console.files import write_whole
from plumbob.doctor import trends
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.findings import Finding
from plumbob.doctor.trends import Trends
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.run_directory import evaluation_before, read_lines, read_metrics
from plumbob.trainer.run_files.silence import STACKS, last_silence
from plumbob.trainer.run_files.stopped import Stop, read_stop

WARNINGS = "warnings.jsonl"
"""File in the run directory with a line for each check that failed, with the step in which it first did."""


def read_warnings(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of warnings.jsonl; an empty list without the file."""
    return read_lines(run_dir / WARNINGS) if (run_dir / WARNINGS).exists() else []


class Warner:
    """Prints each warning once and stores it in the run directory.

    Warnings are only advice, so an error in here never ends the run.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrainConfig,
        steps: int,
        tell: Callable[[str], None],
        before: Mapping[str, float] | None = None,
    ) -> None:
        """`steps`: number of steps that a resumed run has finished already, whose warnings are not printed again.
        `tell`: prints one message. `before`: metrics of the evaluation before the first step, if there was one.
        """
        self.path, self.tell, self.config = run_dir / WARNINGS, tell, config
        self.trends: Trends | None = Trends(plan_of(config))
        self._guarded(lambda trends: self._catch_up(trends, run_dir, steps, before or {}))

    def step(self, row: Mapping[str, float]) -> None:
        """Take in the metrics of one step."""
        self._guarded(lambda trends: self._say(trends, trends.add(row)))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Take in `eval/greedy` and `eval/sampled` after step `step`; step 0 is before the first step."""
        self._guarded(lambda trends: self._say(trends, trends.evaluated(values, before=step == 0)))

    def _catch_up(self, trends: Trends, run_dir: Path, steps: int, before: Mapping[str, float]) -> None:
        if before:
            trends.evaluated(before, before=True)
        for row in read_metrics(run_dir) if steps else []:
            if row.get("step", 0) <= steps:
                trends.add(row)
        if self.path.exists():  # warnings of later steps are dropped, because these steps are run again
            self._store(trends)

    def _say(self, trends: Trends, findings: list[Finding]) -> None:
        for finding in findings:
            self.tell(warning(finding, self.config))
        if findings:
            self._store(trends)

    def _store(self, trends: Trends) -> None:
        lines = [json.dumps(dataclasses.asdict(finding)) + "\n" for finding in trends.failed.values()]
        write_whole(self.path, "".join(lines))

    def _guarded(self, use: Callable[[Trends], None]) -> None:
        if self.trends is None:
            return
        try:
            use(self.trends)
        except OSError as error:
            self.tell(f"Warning: cannot write to {self.path}: {error.strerror}")
        except Exception as error:
            self.trends = None
            self.tell(f"The run continues, but its metrics are no longer checked: {type(error).__name__}: {error}")


def warning(finding: Finding, config: TrainConfig) -> str:
    """A failure as two lines for the progress table. `config`: settings of the run, for the commands of its remedy."""
    assert finding.cause is not None
    cause = CAUSES[finding.cause]
    remedy = cause.advice(config.env, config.model)
    return f"Warning, step {finding.step}: {cause.id}: {finding.evidence}\n  {cause.sentence} {remedy}"


def course_of(directory: Path, config: TrainConfig, rows: Sequence[Mapping[str, float]]) -> trends.Trends:
    """What the metrics of a run directory say, with its evaluations and its saved model. `rows`: of metrics.jsonl."""
    before, saved = evaluation_before(directory), saved_model(directory)
    return trends.judge(rows, plan_of(config), before=before, saved_model=saved)


def stop_finding(directory: Path, rows: Sequence[Mapping[str, float]]) -> Finding | None:
    """Why the run ended early, or what it was doing when it fell silent; None if it took its steps."""
    stop, check = read_stop(directory), "the run takes all its steps"
    command = f"doctor --config {shlex.quote(str(directory / 'config.toml'))}"
    if stop is not None:
        where, cause = f"in step {stop.step}" if stop.step else "in the set-up, before its first step", _cause_of(stop)
        said, verdict = f"it stopped {where}: {stop.kind}: {stop.reason}", "fail" if cause else "error"
        return Finding(check, verdict, said, cause, None, stop.step, command=command)
    if (silent := last_silence(directory)) is None:
        return None
    said = f"it has finished no step since {silent}; {directory / STACKS} says where each of its threads was"
    return Finding(check, "error", said, None, "trends", len(rows) + 1, command=command)


def _cause_of(stop: Stop) -> str | None:
    if stop.cause is not None:
        return stop.cause if stop.cause in CAUSES else None  # that of another version
    if stop.kind != "SyncError":
        return None
    if "log-probabilities" in stop.reason:  # after the first step, both sides compute alike: it is the weights
        return "weights-not-synced" if stop.step > 1 else "engine-trainer-mismatch"
    about_weights = any(word in stop.reason for word in ("weight", "adapter", "tensor", "module"))
    return "weights-not-synced" if about_weights else "rollouts-fail"


def saved_model(directory: Path) -> dict[str, float]:
    """Numbers of summary.json about the saved model."""
    try:
        found = json.loads((directory / "summary.json").read_text())
        return {name: float(found[name]) for name in ("saved_gap", "saved_limit") if name in found}
    except (OSError, ValueError, TypeError):
        return {}


STOPS = {
    "max_turn_tokens": "max_tokens",
    "max_total_tokens": "max_context",
    "max_turns": "max_turns",
    "agent_timeout": "max_seconds",
}
"""Stop reason -> setting of the limit."""
SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "kl_beta")
"""Settings that have the same name in a record."""


def plan_of(config: TrainConfig) -> trends.Plan:
    """What the table of trends must know of a run's settings."""
    ordered = any(pair.partition("=")[0] in ("curriculum", "shuffle") for pair in config.env_args)
    return trends.Plan(
        **{name: getattr(config, name) for name in SAME_NAMES},
        num_steps=config.max_steps,
        group_size=config.num_generations,
        precision="bfloat16" if config.bf16 or config.engine == "vllm" else "float32",
        stale=config.max_staleness > 0,
        random_rewards=config.trained_reward == "random",
        scale=config.scale_rewards,
        learning_rate=config.learning_rate or 0.0,
        adapter="lora" if config.peft else "",
        warmup=config.warmup_steps,
        max_norm=config.max_grad_norm,
        comparable=config.eval_datasets is None and config.task_order in ("auto", "shuffle") and not ordered,
        held_out=max(min(config.eval_examples, 32), 1),
        limits={stop: f"--{name.replace('_', '-')} {getattr(config, name):g}" for stop, name in STOPS.items()},
    )


FEWEST_GROUPS, FEWEST_ROLLOUTS = 4, 32
"""A step has too few groups if it has fewer than both."""


def settings_checks(config: TrainConfig) -> Iterator[Finding]:
    """What a run's settings say by themselves, before anything is loaded."""
    rollouts, size = config.rollouts_per_step(1), config.num_generations
    few = rollouts // size < FEWEST_GROUPS and rollouts < FEWEST_ROLLOUTS
    said = f"a step has {rollouts // size} groups of {size} rollouts"
    yield Finding.of("a step has enough groups", "too-little-signal", few, said, "signal")
    warmup, steps = config.warmup_steps, max(config.max_steps, 0)
    if warmup and steps:
        said = f"--warmup-steps {warmup} in {steps} steps: {min(steps / warmup, 1):.0%} of --learning-rate are reached"
        late, check = warmup > 2 * steps, "the learning rate reaches its peak"
        yield Finding.of(check, "learning-rate-too-low", late, said, "optimizer")
