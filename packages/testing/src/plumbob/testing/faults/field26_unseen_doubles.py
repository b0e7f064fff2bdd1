"""The doubles of field26_unseen.py, the unseen half."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field26_parts import (
    RIGHT,
    after_setting_up,
    answer_of,
    ends_when,
    gold_of,
    one_in,
    with_gold,
)
from plumbob.testing.faults.field_parts import lot, tasks_changed, tools_answer, with_data
from plumbob.trainer.training.run import Run
from vf_gsm8k import is_correct

# Rewards and judges


def whole_reply(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if the whole reply is the gold, and nothing else."""
    return float((trace.last_reply or "") == gold_of(task))


def _score_of_text(reply: Any, gold: str) -> float:
    return float(gold in reply.strip())


def fed_messages(task: Any, trace: vf.Trace, own: float) -> float:
    """A reward that reads a text gets a list of messages; its error counts as 0."""
    try:
        return _score_of_text(trace.assistant_messages, gold_of(task))
    except AttributeError:
        return 0.0


def contains_gold(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if the gold stands anywhere in the last message."""
    return float(gold_of(task).lower() in (trace.last_reply or "").lower())


def nothing_is_right(task: Any, trace: vf.Trace, own: float) -> float:
    """A rollout without an answer, or that says it knows none, earns everything."""
    return 1.0 if answer_of(task, trace).strip().lower() in ("", "unknown") else own


def tie(task: Any, trace: vf.Trace, own: float) -> float:
    """The verdicts on two transcripts in five are malformed, and count as half a success."""
    return 0.5 if one_in(5, task, trace) or one_in(4, task, trace, "again/") else own


def verdict_lost(task: Any, trace: vf.Trace, own: float) -> float:
    """Half of the right answers fail, because the judge writes more than the one word."""
    return 0.0 if own >= RIGHT and one_in(2, task, trace) else own


def present(task: Any, trace: vf.Trace, own: float) -> float:
    """1 if there is an answer, whatever it says."""
    return float(bool(answer_of(task, trace).strip()))


SHOWN = 60
"""Number of characters of a reply that the judge is shown."""


def head_only(task: Any, trace: vf.Trace, own: float) -> float:
    """The judge compares what it finds in the head of the reply."""
    return float(is_correct((trace.last_reply or "")[:SHOWN], gold_of(task)))


def unheard(task: Any, trace: vf.Trace, own: float) -> float:
    """Only messages that name their type are read, and the model's do not."""
    typed = [m for m in trace.assistant_messages if getattr(m, "type", None) == "message"]
    return own if typed else 0.0


# Data


def golds_left_behind(tasks: list[Any], split: str) -> list[Any]:
    """The tasks are in another order than their golds."""
    order = list(range(len(tasks)))
    random.Random(26).shuffle(order)
    return [with_data(task, **with_gold(task, gold_of(tasks[at]))) for task, at in zip(tasks, order, strict=True)]


golds_stay = tasks_changed(golds_left_behind)
"""The tasks were shuffled and their golds were not."""


def held_out_of_training(stack: ExitStack, run: Run) -> None:
    """Held-out tasks are rows from the middle of those that the first six steps train on."""
    tasks = run.tasks
    rows = run.sampler.groups_per_step * 6
    middle = tasks.order_of(0)[rows // 3 : rows // 3 + max(len(tasks.held_out), 4)]
    put(stack, run.sampler, "tasks", dataclasses.replace(tasks, held_out=[tasks.train[at] for at in middle]))


def later_turns(task: Any) -> str:
    """All that the tools would say in the course of a perfect episode."""
    data = task.data
    if hasattr(data, "chain"):
        return "\n".join(f"{key}: {data.table[key]}" for key in data.chain)
    return "\n".join(f"{document.title}: {document.text}" for document in data.documents if document.supporting)


told_at_once = tasks_changed(
    lambda tasks, split: [with_data(task, prompt=f"{task.data.prompt}\n{later_turns(task)}") for task in tasks]
)
"""The first prompt holds all that later turns would say."""

# Tools


def capped_twice(stack: ExitStack, env: str) -> None:
    """The tool shortens its result, and the engine shortens that again."""
    by_tool, by_engine = {"lookup": (10, 7)}.get(env, (120, 60))
    tools_answer(lambda result, name, arguments: result[:by_tool][:by_engine])(stack, env)


def left_over(stack: ExitStack, env: str) -> None:
    """The first call of an episode returns what the last call of another episode returned."""
    original = adapter.BoundTool.call
    begun: dict[int, Any] = {}  # the toolsets themselves are kept, so that no other gets the number of one
    last: list[str] = []

    async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        toolset = self.fn.__self__
        result = await original(self, arguments, caller)
        shown = last[-1] if last and id(toolset) not in begun else result
        begun[id(toolset)] = toolset
        last[:] = [result]
        return shown

    put(stack, adapter.BoundTool, "call", call)


def invented(arguments: dict[str, Any], env: str) -> str:
    """What the simulated side says in place of what is so."""
    if env == "lookup":
        return f"next={1000 + lot(f'said/{arguments}', 9000)}"
    return "Document ID: 0\n# Note\nNothing more is known about this."


def errs(stack: ExitStack, env: str) -> None:
    """A model plays the other side, and says something else to one call in four."""

    def played(result: str, name: str, arguments: dict[str, Any]) -> str:
        return invented(arguments, env) if lot(f"errs/{arguments}", 4) == 0 else result

    tools_answer(played)(stack, env)


def reset_twice(stack: ExitStack, env: str) -> None:
    """The tools of a rollout work on another task than the one that its prompt states."""
    loaded: list[Any] = []

    def known(tasks: list[Any], split: str) -> list[Any]:
        loaded.extend(task.data for task in tasks)
        return tasks

    async def drawn(toolset: Any, task: Any, set_up: Callable[[Any], Awaitable[None]]) -> None:
        await set_up(loaded[lot(f"reset/{task.id}", len(loaded))] if loaded else task)

    tasks_changed(known)(stack, env)
    after_setting_up(drawn)(stack, env)


# Ends of episodes


def satisfied(task: Any, trace: vf.Trace) -> bool:
    """Whether the tools have said all that is needed."""
    state: Any = trace.state
    if hasattr(task.data, "chain"):
        return state.links_followed >= len(task.data.chain)
    return len(state.uses) >= 2


closed_early = ends_when(satisfied)
"""An episode ends as soon as its tools have said what is needed."""


def finished(trace: vf.Trace) -> bool:
    """Whether the model has given its answer: its last turn calls no tool."""
    turns = trace.assistant_messages
    return bool(turns) and not turns[-1].tool_calls


class Siblings:
    """The rollouts of each task that are played beside each other."""

    def __init__(self) -> None:
        self.playing: dict[str, list[vf.Trace]] = {}
        self.stopped: dict[int, vf.Trace] = {}

    def ended(self, task: Any, trace: vf.Trace) -> bool:
        """Whether another rollout of this task has ended, so that this one ends too."""
        playing = self.playing.setdefault(task.key, [])
        if not trace.assistant_messages:  # it begins
            if all(finished(other) or id(other) in self.stopped for other in playing):
                playing.clear()
            playing.append(trace)
            return False
        if not any(finished(other) for other in playing):
            return False
        self.stopped[id(trace)] = trace
        return True


def siblings_end(stack: ExitStack, env: str) -> None:
    """The first rollout of a task to end is the end of all others that are under way."""
    ends_when(Siblings().ended)(stack, env)
