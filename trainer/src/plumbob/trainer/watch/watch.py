"""The watch of a run: applies the rules to the metrics of each step, or to a run directory afterwards.

watch = Watch(config)
for row in rows:                       # of metrics.jsonl
    for finding in watch.update(row):  # what is wrong, each once
        print(warning(finding, config))

findings = examine(Path("runs/NAME"))
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.trainer.config.options import command_of, read_toml
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.causes import CAUSES
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.run_files.run_directory import saved_checkpoints, write_whole
from plumbob.trainer.watch.change import of_same_tasks, of_windows
from plumbob.trainer.watch.history import WINDOW, History, Row, mean, number
from plumbob.trainer.watch.places import with_places
from plumbob.trainer.watch.ratio_rules import ROOM, room
from plumbob.trainer.watch.rules import RULES, contradicted
from plumbob.trainer.watch.settings_rules import kept_checkpoint
from plumbob.trainer.watch.stopped_run import stop_finding
from plumbob.trainer.watch.stored_rollouts import Rollout
from plumbob.trainer.watch.traces import calls_read, examine_traces, stored_rollouts

WARNINGS = "warnings.jsonl"
"""File in the run directory with one line per failed rule, with the step in which it first failed."""

CONSEQUENCES_OF_UNREAD_CALLS = (
    "tool calls can be parsed",
    "tool calls are in a form that is read",
    "tools are called",
    "rollouts end by themselves",
    "groups have a signal",
)
"""Checks of rules that fail where calls are not read."""


class Watch:
    """Reports each rule once, in the step in which it first fails. A step takes constant time and memory."""

    def __init__(self, config: TrainConfig) -> None:
        self.history = History(config)
        self.failed: dict[str, Finding] = {}
        """Check of a rule -> the finding of its first failure."""

    def update(self, row: Row) -> list[Finding]:
        """Take in the metrics of one more step; returns the findings of rules that fail for the first time."""
        self.history.add(row)
        step = int(row.get("step", self.history.steps))
        new = self._judge(step)
        evaluation = {k: v for k, v in row.items() if k.startswith("eval/") and v is not None}
        return new + (self.evaluated(step, evaluation) if evaluation else [])

    def evaluated(self, step: int, values: Mapping[str, float]) -> list[Finding]:
        """Take in the evaluation after step `step`, which is known later than the step's row; returns new failures."""
        if count := int(number(values, "eval/count")):
            self.history.held_out = count
        if step == 0:
            sampled = number(values, "eval/sampled", math.nan)
            self.history.sampled_at_start = None if math.isnan(sampled) else sampled
            self.history.negative |= sampled < 0
        elif "eval/sampled" in values:
            self.history.sampled = step, number(values, "eval/sampled")
        held_out = number(values, "eval/greedy", math.nan)
        if not math.isnan(held_out):
            training = mean(self.history.recent, "reward/mean") if self.history.steps else None
            self.history.evaluated(step, held_out, training)
        return self._judge(step) if self.history.steps else []

    def _judge(self, step: int) -> list[Finding]:
        new = []
        for rule in RULES:
            if rule.check in self.failed:
                continue
            outcome = rule.judge(self.history)
            if outcome is not None and outcome[0] is not None:
                new.append(Finding(rule.check, "fail", outcome[1], outcome[0], step))
                self.failed[rule.check] = new[-1]
        return new

    def findings(self) -> list[Finding]:
        """The verdict of every rule so far, in the order of RULES. Rules that do not apply yet are left out."""
        found = []
        for rule in RULES:
            outcome = rule.judge(self.history)
            failed = self.failed.get(rule.check)
            if failed is not None and contradicted(self.history, failed.cause):
                failed = None
                outcome = outcome and (None, f"{outcome[1]}; later steps contradict what the first ones showed")
            if failed is not None:
                found.append(failed)
            elif outcome is not None:
                found.append(Finding(rule.check, "pass", outcome[1]))
        return found


class Warner:
    """The watch of a run in progress: prints each warning once and stores it in the run directory.

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
        self.watch: Watch | None = Watch(config)
        self._guarded(lambda watch: self._catch_up(watch, run_dir, steps, before or {}))

    def step(self, row: Row) -> None:
        """Take in the metrics of one step."""
        self._guarded(lambda watch: self._say(watch.update(row)))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Take in `eval/greedy` and `eval/sampled` after step `step`; step 0 is before the first step."""
        self._guarded(lambda watch: self._say(watch.evaluated(step, values)))

    def _catch_up(self, watch: Watch, run_dir: Path, steps: int, before: Mapping[str, float]) -> None:
        if before:
            watch.evaluated(0, before)
        for row in read_metrics(run_dir) if steps else []:
            if row.get("step", 0) <= steps:
                watch.update(row)
        if self.path.exists():  # warnings of later steps are dropped, because these steps are run again
            kept = [line for line in read_lines(self.path) if line.get("step", 0) <= steps]
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def _say(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.tell(warning(finding, self.config))
        if findings:
            with self.path.open("a") as file:
                file.writelines(json.dumps(dataclasses.asdict(finding)) + "\n" for finding in findings)

    def _guarded(self, use: Callable[[Watch], None]) -> None:
        if self.watch is None:
            return
        try:
            use(self.watch)
        except OSError as error:
            self.tell(f"Warning: cannot write to {self.path}: {error.strerror}")
        except Exception as error:
            self.watch = None
            self.tell(f"The run continues, but its metrics are no longer checked: {type(error).__name__}: {error}")


def warning(finding: Finding, config: TrainConfig) -> str:
    """A failure as two lines for the progress table. `config`: settings of the run, for the commands of its remedy."""
    assert finding.cause is not None
    cause = CAUSES[finding.cause]
    remedy = cause.advice(config.env, config.model)
    return f"Warning, step {finding.step}: {cause.id}: {finding.evidence}\n  {cause.sentence} {remedy}"


def examine(run_dir: Path, *, kept: bool = True) -> list[Finding]:
    """Apply every check to a run directory: metrics.jsonl, traces/, stopped.json, stacks.txt, evaluations in summary.json.

    The first failure is the one to look at first. Raises UserError without a run directory, or if a run has neither
    finished a step nor said why it ended or where it may hang.

    `kept`: whether the directory stays; if not, findings name no place in it and no command.
    """
    config = run_config(run_dir)
    rows = read_metrics(run_dir)
    stopped = stop_finding(run_dir, config, rows, kept=kept)
    if not rows and stopped is None:
        raise UserError(f"{run_dir} has no finished training step yet, so there is nothing to examine")
    watch = Watch(config)
    start = evaluation_before(run_dir)
    if start:
        watch.evaluated(0, start)
    for row in rows:
        watch.update(row)
    rollouts, damaged = stored_rollouts(run_dir, config)
    judged = watch.findings()
    if (unread := calls_read(rollouts)) is not None:
        # After what makes a policy write anything, such as a prompt that the engine cuts, and before its consequences.
        later = (i for i, f in enumerate(judged) if f.check in CONSEQUENCES_OF_UNREAD_CALLS)
        judged.insert(next(later, len(judged)), unread)
    found = [*damaged, *_in_order(examine_traces(run_dir, config, rollouts, rows), judged)]
    found += saved_model(run_dir, config, rows)
    if stopped is not None:  # a run that ends is a consequence of what went wrong before
        found = [*found, stopped] if any(f.cause for f in found) else [stopped, *found]
    found = [_quoted(finding, rollouts) for finding in found]
    if kept:
        found = [with_places(finding, rollouts, run_dir) for finding in found]
    else:
        found = [dataclasses.replace(finding, places=(), command="") for finding in found]
    if len(rows) < WINDOW:
        few = f"the run has {len(rows)} of the {WINDOW} steps that most rules need"
        found.append(Finding("there are enough steps to judge", "unsure", few))
    elif all(f.cause is None for f in found):
        # What a run in progress is given time for, an examination is told: there may be no further steps.
        clipped = room(watch.history, WINDOW)
        if clipped is not None and clipped[0] is not None:
            found.append(Finding(ROOM, "fail", clipped[1], clipped[0], len(rows)))
        else:
            found.append(_learning(watch.history, rows, rollouts))
    return found


BEFORE_ROLLOUTS = (
    "prompts name the environment's tools",
    "first prompts open an assistant turn",
    "rows are the step's own rollouts",
    "the loss mask is on the sampled tokens",
    "the rollouts of a group are of one task",
)
"""Checks of rules about rows, of whose failures what stored rollouts show is a consequence."""


def _in_order(of_rollouts: Sequence[Finding], judged: Sequence[Finding]) -> list[Finding]:
    """Findings over stored rollouts, and those of the rules, from what others depend on to what depends on others.

    Where nothing is answered rightly, for whatever reason, rewards follow the format, and an engine that computes otherwise
    writes answers that nobody can read: both come where groups are judged.
    """
    first = [f for f in judged if f.cause and f.check in BEFORE_ROLLOUTS]
    last = [f for f in of_rollouts if f.cause in ("reward-format-dominated", "reward-wrong")]
    rest = [f for f in judged if f not in first]
    at = next((i for i, f in enumerate(rest) if f.check == "groups have a signal"), len(rest))
    return [*first, *(f for f in of_rollouts if f not in last), *rest[:at], *last, *rest[at:]]


def saved_model(run_dir: Path, config: TrainConfig, rows: Sequence[Row]) -> list[Finding]:
    """Is the model that the run saved the trained one? `train` loads it afresh at its end; empty before that."""
    check = "the saved model is the trained one"
    steps = len(rows)
    try:
        summary = json.loads((run_dir / "summary.json").read_text())
        chosen = kept_checkpoint(config)
        if chosen is not None and chosen[0] and (kept := summary.get("model_step", steps)) < steps:
            evidence = f"the final model is that of step {kept} of {steps}: {chosen[1]}"
            return [Finding(check, "fail", evidence, chosen[0])]
        if (worse := _not_the_best(config, rows, summary.get("model_step"))) is not None:
            return [Finding(check, "fail", worse, "saved-model-differs")]
        if "saved_gap" not in summary and "model_step" in summary:
            why = summary.get("saved_not_compared", "its model was too large, was divided, or could not be loaded")
            return [Finding(check, "unsure", f"not compared at the run's end, because {why}")]
        gap = float(summary["saved_gap"])
        limit = float(summary.get("saved_limit", thresholds.SAVED_GAP[config.bf16]))
    except (OSError, ValueError, LookupError, TypeError):
        return []
    evidence = (
        f"the saved model, loaded afresh, differs from the trained one by {gap:.2g} nats per token (limit {limit:g})"
    )
    bad = not gap <= limit
    cause = "saved-model-differs" if bad else None
    return [Finding(check, "fail" if bad else "pass", evidence, cause)]


def _not_the_best(config: TrainConfig, rows: Sequence[Row], kept: int | None) -> str | None:
    """Evidence that --keep-best kept the checkpoint of step `kept` although a later one was better; None if there is none."""
    values = {int(row["step"]): value for row in rows if (value := row.get(config.keep_best or "")) is not None}
    if kept not in values:
        return None
    best = max((step for step in values if step > kept), key=lambda step: values[step], default=kept)
    if not values[best] > values[kept]:
        return None
    return (
        f"the final model is that of step {kept}, where {config.keep_best} was {values[kept]:.3g}; in step {best} it was "
        f"{values[best]:.3g}, and --keep-best keeps the checkpoint where it is highest"
    )


def _quoted(finding: Finding, rollouts: Sequence[Rollout]) -> Finding:
    """With what the policy wrote, if its calls are in a form that is not read."""
    text = next((text for r in rollouts for _, text in r.unread), "")
    if finding.cause != "calls-in-unread-form" or not text:
        return finding
    short = " ".join(text.split())
    return dataclasses.replace(finding, evidence=f"{finding.evidence}, such as {short[:120]!r}")


def _learning(history: History, rows: Sequence[Row], rollouts: Sequence[Rollout]) -> Finding:
    """Does the reward rise by more than chance? Asked only if no rule has found a cause."""
    check = "the reward rises"
    if history.steps < 2 * WINDOW:
        return Finding(check, "unsure", f"{history.steps} steps are too few to tell")
    everywhere = of_windows(rows)
    paired = of_same_tasks(rollouts)
    change = paired or everywhere
    evidence = f"{everywhere}" + (f"; {paired}" if paired is not None else "")
    if history.solved:
        return Finding(check, "pass", f"{evidence}; nearly every rollout earns the most")
    if change.low > 0:
        return Finding(check, "pass", evidence)
    fallen = "; it falls" if change.high < 0 else "; the interval holds 0, so this may be chance"
    hint = "; no rule names a cause: run the probes with `doctor ENV` and this run's options"
    return Finding(check, "unsure", evidence + fallen + hint)


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl; an empty list without the file."""
    path = run_dir / "metrics.jsonl"
    return read_lines(path) if path.exists() else []


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, up to the first invalid line: a killed process may have left half a line."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def run_config(run_dir: Path) -> TrainConfig:
    """The settings of a run of `train`. Raises UserError for any other folder."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run directory: it has no config.toml")
    if command_of(path) == SftConfig.COMMAND:
        raise UserError(
            f"{run_dir} is a run of `sft`, which has no rollouts whose rewards could be examined: its loss is sft/loss in "
            f"metrics.jsonl; to examine the model that it trained:  doctor ENV --model {run_dir}"
        )
    return TrainConfig(**read_toml(path, TrainConfig))


def evaluation_before(run_dir: Path) -> dict[str, float]:
    """Metrics of the evaluation before the first step, from a finished run's summary or else from its last checkpoint.

    `eval/count` is the smallest number of tasks of all evaluations. Empty if there was no evaluation.
    """
    checkpoints = [folder / "state.json" for folder in saved_checkpoints(run_dir)]
    for path in (run_dir / "summary.json", *reversed(checkpoints)):
        try:
            evaluations = json.loads(path.read_text())["evaluations"]
            before = {f"eval/{how}": estimate["mean"] for how, estimate in evaluations.get("before", {}).items()}
            counts = [estimate["n"] for both in evaluations.values() for estimate in both.values() if "n" in estimate]
        except (OSError, ValueError, LookupError):  # no evaluation, or the file was cut off when the process was killed
            continue
        if before or counts:
            return {**before, **({"eval/count": min(counts)} if counts else {})}
    return {}
