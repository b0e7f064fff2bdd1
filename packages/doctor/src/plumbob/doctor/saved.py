"""Rollouts that verifiers has saved (`traces.jsonl` of vf-eval), examined without a model and without verifiers."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.doctor.environment.matrix import TOLERANCE, Matrix
from plumbob.doctor.environment.player import Given, Played, Task, messages_of
from plumbob.doctor.environment.table import judge
from plumbob.doctor.environment.texts import says_failed
from plumbob.doctor.environment.transcripts import EMPTY, Hand, gold_field
from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import Finding
from plumbob.doctor.run_numbers import of_groups
from plumbob.doctor.trends import TRENDS, WINDOW, Plan
from plumbob.doctor.trends import judge as judge_numbers

EXAMINED = {"ends", "finite", "distinct", "hidden"}
"""Rows of the environment's table that saved rollouts are enough for."""
OF_TRAINING = next(trend.statement for trend in TRENDS if trend.cause == "too-little-signal")
"""What is true of steps of training alone, which take a certain number of tasks."""
NO_DATA = ("prompt", "system_prompt", "name", "description", "idx", "id")
CUT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
"""Reasons why a rollout ended that are limits, as verifiers names them."""


def examination(path: Path) -> Examination:
    """What the rollouts in a file show of their environment. Raises UserError if it is none of verifiers' files."""
    rollouts = list(_read(path))
    first = {one.task.key: one for one, _ in reversed(rollouts)}
    tasks = [one.task for one in first.values()]
    gold = gold_field(tasks, [()] * len(tasks))
    hand = Hand(tasks, [()] * len(tasks), [gold.of(task) if gold else "" for task in tasks])
    matrix = Matrix(Given(tasks), hand)  # ty: ignore[invalid-argument-type]
    matrix.cells["saved"] = dict(enumerate(one for one, _ in rollouts))
    matrix.cells[EMPTY] = {i: Played(one.task, 0.0, messages=one.opening) for i, one in enumerate(first.values())}
    x, ok = Examination("the environment", "the model"), [one for one, _ in rollouts if one.ok]
    equal = alike(((one.task.key, *((m.role, m.text, str(m.calls)) for m in one.messages)), one.reward) for one in ok)
    x.add("environment", *judge(matrix, EXAMINED), equal)
    # The table of trends reads steps: tasks are dealt out to as many as it waits for.
    number = {key: i for i, key in enumerate(first)}
    parts = [[one for one in rollouts if number[one[0].task.key] % WINDOW == k] for k in range(min(WINDOW, len(tasks)))]
    rows = [numbers(k, part) for k, part in enumerate(parts, 1)]
    size = max(Counter(one.task.key for one, _ in rollouts).values(), default=1)
    found = judge_numbers(rows, Plan(group_size=size, limits={"limit": "a limit"}), patience=len(rows)).findings()
    known = [finding for finding in found if finding.verdict != "unsure" and finding.check != OF_TRAINING]
    x.add("trends", *(dataclasses.replace(finding, step=None) for finding in known))
    mean = statistics.fmean(one.reward for one in ok) if ok else 0.0
    x.notes.append(f"{len(rollouts)} rollouts of {len(tasks)} tasks, mean reward {mean:.3f}.")
    return x


def _read(path: Path) -> Iterator[tuple[Played, bool]]:
    """The rollouts of a file, or of a folder with one, each with whether a limit cut it off."""
    file = path / "traces.jsonl" if path.is_dir() else path
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            found = [_played(trace) for trace in row.get("traces", [row])]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{file}, line {number}: is no rollout of verifiers: {type(error).__name__}: {error}"
            ) from None
        yield from found


def _played(trace: dict[str, Any]) -> tuple[Played, bool]:
    data, messages = trace["task"]["data"], messages_of(trace["nodes"])
    parts = {name: one["score"] * one.get("weight", 1.0) for name, one in trace["rewards"].items() if one}
    reward, errors = sum(parts.values()), trace.get("errors") or []
    key = trace["task"].get("key") or json.dumps(data, sort_keys=True)
    prompt = "\n".join(m.text for m in messages if not m.sampled and m.role in ("system", "user"))
    task = Task(key, "train", {name: value for name, value in data.items() if name not in NO_DATA}, prompt)
    failure = "fails" if errors else None if math.isfinite(reward) else "not-finite"
    error = f"{errors[-1]['type']}: {errors[-1]['message']}"[:300] if errors else ""
    long = [call.get("finish_reason") for call in trace.get("calls") or () if not call.get("error")][-1:] == ["length"]
    return Played(task, reward, parts, messages, failure, error), long or trace.get("stop_condition") in CUT


def alike(earned: Iterable[tuple[Any, float]], room: float = TOLERANCE, step: int | None = None) -> Finding:
    """Equal rollouts of a task earn equal rewards. `earned`: (what is the same of equal ones, reward) of each rollout.

    `room`: difference up to which rewards are equal. `step`: the training step (from 1) that made them, if one did.
    """
    same: dict[Any, list[float]] = defaultdict(list)
    for key, reward in earned:
        same[key].append(reward)
    apart = [max(rewards) - min(rewards) for rewards in same.values() if len(rewards) > 1]
    wrong = sum(gap > room for gap in apart)
    told = (
        f"of {len(apart)} sets of equal rollouts {wrong} earn different rewards, by up to {max(apart, default=0.0):.3g}"
    )
    check = "equal rollouts of a task earn equal rewards"
    if not apart:
        return Finding(check, "unsure", told, None, "grading")
    return Finding.of(check, "reward-nondeterministic", wrong, told, "grading", step)


def numbers(number: int, rollouts: Sequence[tuple[Played, bool]], limit: str = "limit") -> dict[str, float]:
    """The numbers of rollouts, each with whether `limit` cut it off, as those of step `number`: see `plumbob.doctor.trends`."""
    by_task: dict[str, list[float]] = defaultdict(list)
    for one, _ in rollouts:
        if one.ok:
            by_task[one.task.key].append(one.reward)
    groups = [group for group in by_task.values() if len(group) > 1] or list(by_task.values())
    results = [message for one, _ in rollouts for message in one.messages if message.role == "tool"]
    calls = [len(message.calls) for one, _ in rollouts for message in one.messages if message.sampled]
    cut, count = sum(was_cut for _, was_cut in rollouts) / max(len(rollouts), 1), len(rollouts)
    row = {
        "step": float(number),
        **of_groups(groups, TOLERANCE),
        "rollout/count": float(count),
        "rollout/errored": float(sum(one.failure == "fails" for one, _ in rollouts)),
        "rollout/not_finite": float(sum(one.failure == "not-finite" for one, _ in rollouts)),
        "rollout/truncated_share": cut,
        f"rollout/stopped/{limit}": cut,
        "rollout/turns": len(calls) / max(count, 1),
        "rollout/tool_calls": sum(calls) / max(count, 1),
    }
    if len(groups) > 1:  # one group says nothing of others
        row["reward/group_std"] = statistics.stdev(map(statistics.fmean, groups))
    if results:
        row["rollout/tools"] = 1.0
        row["rollout/tool_errors"] = sum(says_failed(message.text) for message in results) / max(count, 1)
    single = all(len(group) == 1 for group in groups)
    return {name: value for name, value in row.items() if not (single and name.startswith("groups/"))}
