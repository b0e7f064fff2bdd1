"""Checks that need a run's traces: tasks of a group, rewards of equal tokens, parsing, what the reward depends on."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.watch.rules import is_format

STEPS_READ = 3
"""Number of steps whose traces are read at the start and at the end of a run: one step may be many megabytes."""

RIGHT = ("correct", "exact_match", "f1", "accuracy", "em", "solved")
"""Names of metrics that say whether an answer is right."""


@dataclass(frozen=True)
class Rollout:
    """What the checks need of one line of a run's traces."""

    step: int
    group: int
    """Number of the group in its file: line number divided by group size, because a group's lines are consecutive."""
    task: str
    """Key of the task."""
    ok: bool
    token_ids: tuple[int, ...]
    reward: float
    metrics: dict[str, float]
    reply: str
    """Text of the last message if the policy wrote it, else empty."""
    gold: tuple[str, ...]
    """Answers that the task's data names as right."""

    @classmethod
    def of(cls, record: dict[str, Any], step: int, group: int) -> Rollout:
        """The rollout of a stored trace.

        Raises LookupError, TypeError, ValueError or AttributeError if it is not one.
        """
        nodes, data = record["nodes"], record["task"]["data"]
        text = nodes[-1]["message"].get("content") if nodes and nodes[-1]["sampled"] else ""
        answers = [data.get("answer"), *(data.get("answers") or [])]
        rewards = [r for r in record["rewards"].values() if r is not None]
        return cls(
            step,
            group,
            record["task"]["key"],
            bool(record["ok"]),
            tuple(t for node in nodes for t in node["token_ids"]),
            sum(r["score"] * r["weight"] for r in rewards),
            record["metrics"],
            text if isinstance(text, str) else "",
            tuple(str(a) for a in answers if isinstance(a, str | int | float)),
        )


def examine_traces(run_dir: Path, config: TrainConfig) -> list[Finding]:
    """Findings over the first and the last steps that have traces; an empty list without traces."""
    rollouts: list[Rollout] = []
    damaged: list[Finding] = []
    files = trace_files.stored_steps(run_dir)
    for step in sorted({*list(files)[:STEPS_READ], *list(files)[-STEPS_READ:]}):
        try:
            rollouts += read_traces(files[step], config.num_generations)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{files[step].name}: {type(error).__name__}: {error}"
            damaged.append(Finding("the traces can be read", "unsure", reason))
    if not rollouts and not damaged and config.keep_traces == "none":
        reason = "the run stored no rollouts (--keep-traces none), so their checks were left out"
        return [Finding("stored rollouts are there to be examined", "unsure", reason)]
    if not rollouts:
        return damaged
    usable = [r for r in rollouts if r.ok and math.isfinite(r.reward)]
    return [
        *damaged,
        _sample(rollouts, run_dir),
        grouping(rollouts),
        *(f for f in (determinism(usable), parsing(usable), dominance(usable)) if f is not None),
    ]


def _sample(rollouts: Sequence[Rollout], run_dir: Path) -> Finding:
    """Which rollouts the following checks examine: only a part of a step's may be stored (--keep-traces)."""
    counts = trace_files.rollouts_of_steps(run_dir)
    steps = sorted({r.step for r in rollouts})
    # A step that failed has traces, but no metrics.
    total = sum(counts.get(step, sum(r.step == step for r in rollouts)) for step in steps)
    part = "all" if len(rollouts) >= total else f"{len(rollouts)} randomly drawn ones of the"
    evidence = f"examined {part} {total} rollouts of steps {', '.join(map(str, steps))}"
    return Finding("stored rollouts are there to be examined", "pass", evidence)


def read_traces(path: Path, group_size: int) -> list[Rollout]:
    """The rollouts of one step.

    Raises OSError, ValueError, LookupError, TypeError or AttributeError for another file.
    """
    step = int(path.name.split(".")[0].removeprefix("step_"))
    lines = trace_files.read(path).splitlines()
    return [Rollout.of(json.loads(line), step, i // group_size) for i, line in enumerate(lines)]


def groups_of(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each group of each step."""
    groups: dict[tuple[int, int], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.step, rollout.group].append(rollout)
    return list(groups.values())


def grouping(rollouts: Sequence[Rollout]) -> Finding:
    """Does each group hold rollouts of one task only?"""
    groups = groups_of(rollouts)
    mixed = [g for g in groups if len({r.task for r in g}) > 1]
    evidence = f"{len(mixed)} of {len(groups)} groups hold more than one task"
    check = "each group holds one task"
    return (
        Finding(check, "fail", evidence, "groups-mixed", mixed[0][0].step)
        if mixed
        else Finding(check, "pass", evidence)
    )


def determinism(rollouts: Sequence[Rollout]) -> Finding | None:
    """Do rollouts of one task with equal tokens earn equal rewards? None if no two rollouts have equal tokens."""
    earned: dict[tuple[str, tuple[int, ...]], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        earned[rollout.task, rollout.token_ids].append(rollout)
    repeated = [rows for rows in earned.values() if len(rows) > 1]
    if not repeated:
        return None
    check = "equal tokens earn equal rewards"
    unequal = [rows for rows in repeated if not math.isclose(rows[0].reward, _other(rows), abs_tol=1e-9)]
    evidence = (
        f"{len(unequal)} of {len(repeated)} token sequences that were sampled more than once earned different rewards"
    )
    if len(unequal) < max(2, 0.02 * len(repeated)):
        return Finding(check, "pass", evidence)
    return Finding(check, "fail", evidence, "reward-nondeterministic", unequal[0][0].step)


def _other(rows: Sequence[Rollout]) -> float:
    """The reward that differs most from that of the first row."""
    return max((row.reward for row in rows), key=lambda reward: abs(reward - rows[0].reward))


def parsing(rollouts: Sequence[Rollout]) -> Finding | None:
    """In a run that never succeeds, do replies end with the right answer nevertheless?

    None if the check does not apply. It does not apply if all rollouts earn the same reward above 0, because such a
    reward is constant and parses no answer.
    """
    rewards = {round(r.reward, 9) for r in rollouts}
    asked = [r for r in rollouts if r.gold and r.reply]
    if len(rewards) > 1 or len(asked) < 20 or max(rewards) > 0:
        return None
    # Only the end of a reply counts, where answers are given: a number may occur in the steps before it by chance.
    found = [r for r in asked if any(_stands_in(gold, r.reply[-100:]) for gold in r.gold)]
    check = "a right answer counts as right"
    evidence = (
        f"all {len(rollouts)} rollouts earned {rewards.pop():g}; "
        f"the task's answer ends {len(found)} of {len(asked)} last messages"
    )
    if len(found) < 0.3 * len(asked):
        return Finding(check, "pass", evidence)
    return Finding(check, "fail", evidence, "answers-not-parsed", found[0].step)


def _stands_in(gold: str, reply: str) -> bool:
    return (
        bool(gold.strip()) and re.search(rf"(?<!\w){re.escape(gold.strip())}(?!\w)", reply, re.IGNORECASE) is not None
    )


def dominance(rollouts: Sequence[Rollout]) -> Finding | None:
    """Within groups, does the reward follow whether a reply is right, or how it is written?

    Compares correlations with the environment's metrics; None if it has no metric of both kinds, or rewards are
    constant.
    """
    groups = [g for g in groups_of(rollouts) if len(g) > 1]
    names = {name for r in rollouts for name in r.metrics}
    rewards = _centred([[r.reward for r in g] for g in groups])
    if sum(map(abs, rewards)) < 1e-9:
        return None
    share = {
        name: correlation(rewards, _centred([[r.metrics.get(name, 0.0) for r in g] for g in groups])) for name in names
    }
    form = max((n for n in names if is_format(n)), key=lambda n: share[n], default=None)
    right = max((n for n in names if n.split("/")[-1] in RIGHT), key=lambda n: share[n], default=None)
    if form is None or right is None:
        return None
    check = "the reward follows the answer"
    evidence = (
        f"within groups, the reward correlates {share[form]:.2f} with {form!r} and {share[right]:.2f} with {right!r}"
    )
    if share[form] > 0.8 and share[right] < 0.5:
        return Finding(check, "fail", evidence, "reward-format-dominated", rollouts[0].step)
    return Finding(check, "pass", evidence)


def _centred(groups: Sequence[Sequence[float]]) -> list[float]:
    """All values, minus the mean of their group."""
    return [value - sum(g) / len(g) for g in groups for value in g]


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson correlation of two lists of centred values; 0 if one of them does not vary."""
    size = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else 0.0
