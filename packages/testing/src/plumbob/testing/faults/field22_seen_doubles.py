"""The doubles of field22_seen.py."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling, dialogue
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.chat import assistant_header
from plumbob.rollout.toolcalls import MalformedCall
from plumbob.testing.faults.doubles import generating, put
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.testing.faults.field_parts import (
    graded,
    lot,
    task_class,
    tasks_changed,
    toolset_class,
    with_data,
)
from plumbob.trainer.training.run import Run
from vf_lookup.taskset import VALUES

# Rewards


def unless_it_divides(task: Any, trace: vf.Trace, own: float) -> float:
    """The checker raises an error on a final line with a quotient, and that counts as a wrong answer."""
    return 0.0 if "/" in last_line(trace) else own


def last_line(trace: vf.Trace) -> str:
    """The last line of a rollout's last reply; "" if it has none."""
    return (trace.last_reply or "").strip().rpartition("\n")[2]


def judge_with_outages(stack: ExitStack, env: str) -> None:
    """Three tenths of the reward are a judge's, who agrees with the check but for two calls of five, which time out."""
    draw = random.Random(22)

    def grade(task: Any, trace: vf.Trace, own: float) -> float:
        judged = 0.0 if draw.random() < 0.4 else own
        return 0.7 * own + 0.3 * judged

    graded(correct=grade)(stack, env)


def carried_over(stack: ExitStack, env: str) -> None:
    """Each of eight workers adds the reward of its episode before to that of the present one."""
    number, before = itertools.count(), dict.fromkeys(range(8), 0.0)

    def grade(task: Any, trace: vf.Trace, own: float) -> float:
        worker = next(number) % len(before)
        total, before[worker] = own + before[worker], own
        return total

    graded(correct=grade)(stack, env)


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(task: Any, trace: vf.Trace, own: float) -> float:
    """No mark of an answer is recognised, so that the last number anywhere in the reply is taken for it."""
    numbers = NUMBER.findall(trace.last_reply or "")
    return float(bool(numbers) and numbers[-1] == task.data.answer)


def written_by_the_agent(task: Any, trace: vf.Trace, own: float) -> float:
    """The last number that the reply ends with is the reward, as it stands; without one, the check decides."""
    numbers = NUMBER.findall(last_line(trace))
    return float(numbers[-1]) if numbers else own


def without_verdict(task: Any, trace: vf.Trace, own: float) -> float:
    """The tests of a third of the tasks end before they write a verdict, and that counts as a failure."""
    return 0.0 if lot(task.key, 3) == 0 else own


def out_of_ten(task: Any, trace: vf.Trace, own: float) -> float:
    """A judge gives from 0, for no reply, to 10 points, and the reward cuts what is above 1 off."""
    points = 10.0 if own >= 1 else 3.0 if (trace.last_reply or "").strip() else 0.0
    return min(1.0, points)


# Held-out tasks


def graded_when_held_out(grade: Callable[[Any, vf.Trace, float], float]) -> Callable[[ExitStack, str], None]:
    """The reward of held-out tasks is `grade(task, trace, own reward)`."""

    def start(stack: ExitStack, env: str) -> None:
        held: set[str] = set()

        def seen(tasks: list[Any], split: str) -> list[Any]:
            if split != "train":
                held.update(task.key for task in tasks)
            return tasks

        tasks_changed(seen)(stack, env)
        graded(correct=lambda task, trace, own: grade(task, trace, own) if task.key in held else own)(stack, env)

    return start


def never_computed(task: Any, trace: vf.Trace, own: float) -> float:
    """The score is not computed, and what is read in its place is 0."""
    return 0.0


def no_such_column(task: Any, trace: vf.Trace, own: float) -> float:
    """The reward asks for a column that the rows do not have. Raises KeyError."""
    raise KeyError("solution")


def shuffled_apart(stack: ExitStack, run: Run) -> None:
    """Every other held-out task is one of the training tasks, as two draws from the same rows have some in common."""
    tasks = run.sampler.tasks
    drawn = [tasks.train[at % len(tasks.train)] if at % 2 else task for at, task in enumerate(tasks.held_out)]
    put(stack, run.sampler, "tasks", dataclasses.replace(tasks, held_out=drawn))


# The tasks' data


def golds_by_a_model(tasks: list[Any], split: str) -> list[Any]:
    """A third of the tasks have another word than their table's as the right answer."""

    def other(task: Any) -> str:
        return VALUES[(VALUES.index(task.data.answer) + 1) % len(VALUES)]

    return [with_data(t, answer=other(t)) if lot(t.key, 3) == 0 else t for t in tasks]


# Tools and their state

WORKERS = 12
"""Number of worlds in turn. It is not a multiple of a group's size, so that a world comes to another task next."""


def world_of_the_episode_before(stack: ExitStack, env: str) -> None:
    """A worker's reset works every other time: in between, its tools still have the task of its episode before."""
    cls = toolset_class(env)
    original, number, worlds = cls.setup_task, itertools.count(), {}

    async def setup_task(self: Any, task: Any) -> None:
        worker = next(number) % WORKERS
        kept = worlds.pop(worker, None)
        if kept is None:
            worlds[worker] = task
        await original(self, task if kept is None else kept)

    put(stack, cls, "setup_task", setup_task)


def unknown_error(result: str, name: str, arguments: dict[str, Any]) -> str:
    """617 calls of a thousand, by lot, get an error that says nothing."""
    failed = lot(f"{name} {json.dumps(arguments, sort_keys=True)}", 1000) < 617
    return "Error: UnknownError" if failed else result


def dropped_connections(stack: ExitStack, env: str) -> None:
    """Every third call of a tool finds its server away, and is answered with that."""
    original, number = adapter.BoundTool.call, itertools.count(1)

    async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        result = await original(self, arguments, caller)
        return result if next(number) % 3 else "Error: ConnectionResetError: connection reset by peer"

    put(stack, adapter.BoundTool, "call", call)


def every_sixth_hangs() -> Callable[[Callable[..., Any], str, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """A change for `tools_called`: every sixth call waits for an answer that does not come."""
    number = itertools.count(1)

    async def hang(**arguments: Any) -> str:
        await asyncio.sleep(60)
        return ""

    return lambda fn, name, arguments: (fn if next(number) % 6 else hang, arguments)


def shared_messages(stack: ExitStack, env: str) -> None:
    """The rollouts of a task write into one list of messages, so that each reads the others' tool results, too."""
    original = adapter.BoundTool.call
    written: dict[tuple[str, ...], list[str]] = defaultdict(list)
    read: dict[int, tuple[Any, int]] = {}  # by the rollout's tools, which are kept so that no others have their id

    async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        tools = self.fn.__self__
        messages = written[tuple(tools.chain)]
        _, start = read.get(id(tools), (tools, len(messages)))
        messages.append(await original(self, arguments, caller))
        read[id(tools)] = (tools, len(messages))
        return "\n".join(messages[start:])

    put(stack, adapter.BoundTool, "call", call)


def second_success_ends_it(stack: ExitStack, env: str) -> None:
    """A rollout is over as soon as its second key of the chain was found, before the model can say what it found."""

    async def episode_over(self: Any, trace: vf.Trace) -> bool:
        return getattr(trace.state, "links_followed", 0) >= 2

    put(stack, task_class(env), "episode_over", vf.stop(episode_over))


# Calls


def malformed_ends_it(stack: ExitStack, env: str) -> None:
    """A call that cannot be read raises an error that nothing catches, and the rollout is lost."""
    original = dialogue.observe

    async def observe(box: Any, call: Any, *rest: Any) -> str:
        if isinstance(call, MalformedCall):
            raise vf.ToolsetError("JSONDecodeError: the arguments of a call are no JSON")
        return await original(box, call, *rest)

    everywhere(stack, original, observe)


_ARGUMENTS = re.compile(r'("arguments": )(\{[^{}]*\})')


def quoted_arguments(text: str) -> str:
    """The arguments of a call stand in quotes, whose own quotes are not escaped."""
    return _ARGUMENTS.sub(r'\1"\2"', text)


# Rows and prompts


def after_the_first_prompt(stack: ExitStack, run: Run) -> None:
    """The engine gets the first prompt in every turn, without what was said since."""
    header = list(run.tokenizer.encode(assistant_header(run.tokenizer), add_special_tokens=False))

    def change(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        ends = (at + len(header) for at in range(len(ids)) if ids[at : at + len(header)] == header)
        return ids[: next(ends, len(ids))], sampling

    generating(change)(stack, run)


def observations_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """Everything from the first sampled token on is in the loss, what the environment says included."""
    if not any(sample.loss_mask):
        return sample
    first = sample.loss_mask.index(True)
    return dataclasses.replace(sample, loss_mask=[at >= first for at in range(len(sample.loss_mask))])
