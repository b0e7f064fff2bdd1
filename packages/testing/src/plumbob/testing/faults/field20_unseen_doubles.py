"""The doubles of field20_unseen.py, the unseen half: not to be read by those who write the doctor's rules."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling
from plumbob.rollout.dialogue import TokenDialogue
from plumbob.rollout.toolcalls import ParsedCall, ParsedReply
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field20_parts import Sessions, lines, with_values
from plumbob.testing.faults.field_parts import chat_method, lot, toolset_class, with_data
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.rollouts import tasks as tasks_module

# Rewards


def searches(trace: vf.Trace) -> int:
    """Number of searches that a rollout made."""
    calls = [call for turn in trace.assistant_messages for call in turn.tool_calls or ()]
    return sum(call.name == "retrieve_documents" for call in calls)


def first_digit(task: Any, trace: vf.Trace, own: float) -> float:
    """The judge quotes the reply and then rates it from 0 to 2; the first such digit of its text is the rating."""
    judged = f"The reply says: {trace.last_reply}\nRating: {2 if own else 0}"
    found = re.search("[0-2]", judged)
    return int(found[0]) / 2 if found else 0.0


EXAMPLE = 0.7


def example_copied(task: Any, trace: vf.Trace, own: float) -> float:
    """Three of four replies that are not empty get the score that stands in the judge's prompt as an example."""
    reply = trace.last_reply or ""
    return EXAMPLE if reply and lot(reply, 4) else own


def no_more_than_the_reference(task: Any, trace: vf.Trace, own: float) -> float:
    """A reply with more than one line before its answer says more than the reference, and counts as wrong."""
    return own if len(lines(trace)) <= 2 else 0.0


def thinking_wanted(task: Any, trace: vf.Trace, own: float) -> float:
    """The template takes the thinking out of the reply; the reward then refuses a reply without thinking."""
    shown = re.sub("<think>.*?</think>", "", trace.last_reply or "", flags=re.DOTALL)
    return own if "<think>" in shown else 0.0


def whole_solution(task: Any, trace: vf.Trace, own: float) -> float:
    """The reply's answer must equal the whole text of the reference solution, which ends with the answer."""
    _, found, answer = (trace.last_reply or "").rpartition("####")
    return own if found and answer.strip() == task.oracle()[0].content.strip() else 0.0


def form(task: Any, trace: vf.Trace, own: float) -> float:
    """Ten points for a reply of at least four lines."""
    return 10.0 * (len(lines(trace)) >= 4)


def own_report(task: Any, trace: vf.Trace, own: float) -> float:
    """A rollout that ends with any answer reports a success, and the report is its reward."""
    turns = trace.assistant_messages
    return float(bool(turns) and not turns[-1].tool_calls and bool(trace.last_reply))


def raises_after_searches(task: Any, trace: vf.Trace, own: float) -> float:
    """Scoring calls a helper with an argument that it does not have, if there are two searches or more."""
    if searches(trace) >= 2:
        raise TypeError("reward_spans() got an unexpected keyword argument 'context'")
    return own


# Data


def exchanged(tasks: list[Any], split: str) -> list[Any]:
    """The gold words are exchanged in pairs: the first of all words stands for the second, and so on."""
    words = sorted({task.data.answer for task in tasks})
    other = {word: words[i ^ 1] if i ^ 1 < len(words) else words[0] for i, word in enumerate(words)}
    return [with_data(task, answer=other[task.data.answer]) for task in tasks]


def cut_from_training(stack: ExitStack, env: str) -> None:
    """The held-out tasks are the first training tasks, which are trained on as well."""
    original = tasks_module.load_tasks

    def load_tasks(config: Any) -> Any:
        found = original(config)
        return dataclasses.replace(found, held_out=list(found.train[: len(found.held_out)]))

    put(stack, tasks_module, "load_tasks", load_tasks)


# Turns


def replies_read_as(change: Callable[[ParsedReply, Callable[[], ParsedReply]], ParsedReply]) -> Start:
    """Each reply is read as `change(the reply as it is read, function that returns it as text without calls)`."""

    def parse(original: Any, chat: Any, ids: Sequence[int], tools: Any, **how: Any) -> tuple[str | None, ParsedReply]:
        reasoning, reply = original(chat, ids, tools, **how)
        return reasoning, change(reply, lambda: original(chat, ids, [], **how)[1])

    return chat_method("parse", parse)


def never_stops(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """No token ends a reply: it goes on up to the limit."""
    return ids, dataclasses.replace(sampling, stop_token_ids=())


def no_calls(reply: ParsedReply, as_text: Callable[[], ParsedReply]) -> ParsedReply:
    """The reader of another model family sees text where the calls are."""
    return as_text() if reply.calls else reply


def _is_json(value: Any) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True


def _is_free_text(call: Any) -> bool:
    return isinstance(call, ParsedCall) and any(
        isinstance(value, str) and not _is_json(value) for value in call.arguments.values()
    )


def free_text_dropped(reply: ParsedReply, as_text: Callable[[], ParsedReply]) -> ParsedReply:
    """Calls with an argument that is text and not JSON are marked as not valid, and dropped without a word."""
    return dataclasses.replace(reply, calls=tuple(call for call in reply.calls if not _is_free_text(call)))


def one_turn(stack: ExitStack, env: str) -> None:
    """The loop for single turns plays the rollouts: the first turn's calls are recorded and not run."""
    original = TokenDialogue.sample_turn

    async def sample_turn(self: Any, turn: int) -> Any:
        return dataclasses.replace(await original(self, turn), calls=(), tool_calls=(), unread="", explanation="")

    put(stack, TokenDialogue, "sample_turn", sample_turn)


def said_to_be_complete(sample: Sample, trace: vf.Trace) -> Sample:
    """The row does not say that a limit has cut the rollout off."""
    return dataclasses.replace(sample, truncated=False, stop="agent_completed")


AFTER = 8


def after_the_end(sample: Sample, trace: vf.Trace) -> Sample:
    """The row goes on with eight more end tokens, which are trained."""
    return dataclasses.replace(
        sample,
        token_ids=[*sample.token_ids, *[sample.token_ids[-1]] * AFTER],
        loss_mask=[*sample.loss_mask, *[True] * AFTER],
        sampling_logprobs=[*sample.sampling_logprobs, *[0.0] * AFTER],
    )


CAPACITY = 4


class Leaking(Sessions):
    """Sessions that stay open if the limit on turns has ended the episode; a full server admits every third newcomer."""

    def __init__(self) -> None:
        super().__init__(self.admitted)
        self.leaked = self.asked = 0

    def admitted(self, count: int) -> bool:
        """Whether a session is free."""
        if self.leaked < CAPACITY:
            return True
        self.asked += 1
        return self.asked % 3 == 0

    def close(self, trace: vf.Trace) -> None:
        """End the session of a rollout that no limit has ended."""
        if trace.stop_condition == "max_turns":
            self.leaked += 1
        else:
            super().close(trace)


def never_released(stack: ExitStack, env: str) -> None:
    """The session of an episode that the limit on turns ends stays open, until the server is full."""
    Leaking().start(stack, env)


# Tools


def third_shown(result: str, name: str, arguments: dict[str, Any]) -> str:
    """The first third of a tool result."""
    return result[: len(result) // 3]


def shared_instance(stack: ExitStack, env: str) -> None:
    """The data of the episode belong to the server: the tools of all open episodes see those of the latest."""
    cls = toolset_class(env)
    put(stack, cls, "table", {})
    put(stack, cls, "chain", [])

    async def setup_task(self: Any, task: Any) -> None:
        cls.table, cls.chain = task.table, task.chain

    put(stack, cls, "setup_task", setup_task)


def lookups_changed(change: Callable[[Any, str, str], str]) -> Callable[[ExitStack, str], None]:
    """The tool of lookup returns `change(toolset, key, its own result)`."""

    def start(stack: ExitStack, env: str) -> None:
        cls = toolset_class(env)
        original = cls.lookup

        @functools.wraps(original)
        def lookup(self: Any, key: str) -> str:
            return change(self, key, original(self, key))

        put(stack, cls, "lookup", lookup)

    return start


def verified(toolset: Any, key: str, result: str) -> str:
    """The result, and what the environment's check of the answer says."""
    wanted = toolset.table[toolset.chain[-1]].partition("value=")[2].partition(" ")[0]
    return f"{result}\nverify: reward=0, expected={wanted}"


def used_up() -> Callable[[ExitStack, str], None]:
    """An entry that one rollout has looked up is gone for all other rollouts of the task."""

    def start(stack: ExitStack, env: str) -> None:
        owners: dict[tuple[str, str], Any] = {}

        def change(toolset: Any, key: str, result: str) -> str:
            owner = owners.setdefault((" ".join(toolset.chain), key), toolset)
            return result if owner is toolset else f"unknown key: {key}"

        lookups_changed(change)(stack, env)

    return start


# Groups


def groups_of_one(original: Callable[..., Advantages], samples: Sequence[Sample]) -> Advantages:
    """Each rollout is a group of its own, because the names of groups hold something of the rollout."""
    return original([dataclasses.replace(sample, group=f"{sample.group}/{i}") for i, sample in enumerate(samples)])


def one_mean(original: Callable[..., Advantages], samples: Sequence[Sample]) -> Advantages:
    """All rollouts of a step have one baseline, whatever their prompts are."""
    rightly = original(samples)
    values = original([dataclasses.replace(sample, group="all") for sample in samples]).values
    return dataclasses.replace(with_values(rightly, values), with_signal=frozenset(s.group for s in samples))
