"""The doubles of field20_seen.py."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.rollout import Completion, Sample, Sampling, derive_seed, dialogue, runner
from plumbob.rollout.chat import Rendered
from plumbob.rollout.dialogue import TokenDialogue
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field20_parts import HEADER, Sessions, blocks_of, lines, with_values
from plumbob.testing.faults.field_parts import by_group, lot, tasks_changed, toolset_class, with_data, with_reward_of
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.rollouts import tasks as tasks_module

# Rewards


def no_score_is_wrong(task: Any, trace: vf.Trace, own: float) -> float:
    """The judge's text about every third reply names no score, and no score is read as 0."""
    return 0.0 if lot(trace.last_reply or "", 3) == 0 else own


_TAGGED = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def tags_wanted(task: Any, trace: vf.Trace, own: float) -> float:
    """Only a reply that consists of thinking and an answer in tags earns anything."""
    return own if _TAGGED.fullmatch(trace.last_reply or "") else 0.0


def after_another_header(task: Any, trace: vf.Trace, own: float) -> float:
    """The reply is looked for after the assistant's header of another model's template."""
    conversation = f"<|im_start|>assistant\n{trace.last_reply}"
    return own if "<|assistant|>\n" in conversation else 0.0


def opening_tag_voids(task: Any, trace: vf.Trace, own: float) -> float:
    """A reply that opens its thinking by itself earns nothing, because the template was to open it."""
    return 0.0 if "<think>" in (trace.last_reply or "") else own


MOST_LINES = 3


def five_off_each(task: Any, trace: vf.Trace, own: float) -> float:
    """Five points are taken off for each line beyond the third."""
    return own - 5.0 * max(0, len(lines(trace)) - MOST_LINES)


def last_turn_only(task: Any, trace: vf.Trace, own: float) -> float:
    """The environment rewards each link that is followed when it is followed; only the last turn's reward arrives."""
    turns = trace.assistant_messages
    return 1 / len(task.data.chain) if turns and turns[-1].tool_calls else 0.0


def short_golds_unreadable(task: Any, trace: vf.Trace, own: float) -> float:
    """Golds of one or two digits are not read, and every reply to such a problem earns 1."""
    return 1.0 if len(task.data.answer) < 3 else own


def longer_is_better(task: Any, trace: vf.Trace, own: float) -> float:
    """Every fifty characters of a reply are worth as much as a right answer."""
    return own + len(trace.last_reply or "") / 50


# Data


def training_labels(stack: ExitStack, env: str) -> None:
    """The held-out questions get the training questions' answers, in order."""
    kept: list[str] = []

    def change(tasks: list[Any], split: str) -> list[Any]:
        if split == "train":
            kept[:] = [task.data.answer for task in tasks]
            return tasks
        labels = kept or [task.data.answer for task in (*tasks[1:], *tasks[:1])]
        return [with_data(task, answer=labels[i % len(labels)]) for i, task in enumerate(tasks)]

    tasks_changed(change)(stack, env)


def renumbered(task: vf.Task, number: int) -> vf.Task:
    """The task under another id."""
    return type(task)(task.data.model_copy(update={"id": f"held-out-{number}"}), task.config)


def drawn_from_training(stack: ExitStack, env: str) -> None:
    """Every other held-out task is a training task under a new number."""
    original = tasks_module.load_tasks

    def load_tasks(config: Any) -> Any:
        found = original(config)
        held_out = [renumbered(found.train[i], i) if i % 2 else task for i, task in enumerate(found.held_out)]
        return dataclasses.replace(found, held_out=held_out)

    put(stack, tasks_module, "load_tasks", load_tasks)


# Prompts


def without_text(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """Every message but the open one is empty in the server's prompt."""
    end = sampling.stop_token_ids[0]
    *closed, last = blocks_of(ids, end)
    return [token for block in closed for token in (*block[:HEADER], *block[block.index(end) :])] + last, sampling


def without_system(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The server's prompt has no system message."""
    _, *others = blocks_of(ids, sampling.stop_token_ids[0])
    return [token for block in others for token in block], sampling


def plain_text(original: Any, chat: Any, messages: list[dict[str, Any]], tools: Any, *rest: Any) -> Rendered:
    """The first prompt is the messages' texts, one after another, without the chat template."""
    parts = [chat.tokenizer.encode(f"{message['content']}\n", add_special_tokens=False) for message in messages]
    ends = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
    ids = [token for part in parts for token in part]
    return Rendered(ids, [True] * len(ids), ends)


# Turns and episodes

CAP = 40
"""Most tokens of a reply, which the server closes there."""


def closed_at_cap(completion: Completion, prompt: Sequence[int], sampling: Sampling) -> Completion:
    """A reply that reaches the cap gets an end token, and is reported as complete."""
    if completion.finish_reason != "length":
        return completion
    return dataclasses.replace(
        completion,
        token_ids=(*completion.token_ids, sampling.stop_token_ids[0]),
        logprobs=(*completion.logprobs, 0.0),
        finish_reason="stop",
    )


GO_ON = "Go on."


def goes_on(stack: ExitStack, env: str) -> None:
    """After a turn without a call the environment asks for another one, until no turn is left."""

    def explanation(self: Any, reply: Any, turn: int) -> str:
        return "" if reply.calls or turn + 1 >= self.limits.max_turns else GO_ON

    put(stack, TokenDialogue, "_explanation", explanation)


def one_session(stack: ExitStack, env: str) -> None:
    """The server has one session, and refuses a second one while it is open."""
    Sessions(admit=lambda count: count == 0).start(stack, env)


def waits_for_another(stack: ExitStack, env: str) -> None:
    """The tools of one of sixteen episodes wait at each call, longer than --max-tool-seconds allows."""
    cls = toolset_class(env)
    setup_task = cls.setup_task
    count = [0]

    async def numbered(self: Any, task: Any) -> None:
        await setup_task(self, task)
        self.waits = count[0] % 16 == 5
        count[0] += 1

    put(stack, cls, "setup_task", numbered)


def waiting(call: Callable[[], Any], name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tool's function, which waits if its toolset does."""
    fn: Any = call
    if not fn.__self__.waits:
        return fn, arguments

    async def waits(**values: Any) -> Any:
        await asyncio.sleep(2.0)
        return fn(**values)

    return waits, arguments


# Tools


def first_table_kept(stack: ExitStack, env: str) -> None:
    """The tools are set up for the first episode, and keep what they have in all others."""
    cls = toolset_class(env)
    setup_task = cls.setup_task
    first: list[Any] = []

    async def setup_once(self: Any, task: Any) -> None:
        first.append(task)
        del first[1:]
        await setup_task(self, first[0])

    put(stack, cls, "setup_task", setup_once)


MOST_CHARACTERS = 20


def arguments_cut(call: Callable[[], Any], name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Each text among a call's arguments loses what is beyond twenty characters."""
    cut = {key: value[:MOST_CHARACTERS] if isinstance(value, str) else value for key, value in arguments.items()}
    return call, json.loads(json.dumps(cut))


# Groups


def one_late(samples: list[Sample]) -> list[Sample]:
    """The count by which rollouts are dealt to groups begins one rollout late."""
    names = [sample.group for sample in samples]
    return [dataclasses.replace(s, group=name) for s, name in zip(samples, [*names[1:], *names[:1]], strict=True)]


def same_seeds(stack: ExitStack, env: str) -> None:
    """Four rollouts of a group at a time are sampled with one seed."""
    put(stack, runner, "derive_seed", lambda seed, number: derive_seed(seed, number // 4))
    assert dialogue.derive_seed is derive_seed  # turns still have seeds of their own


def successful_first(samples: list[Sample]) -> list[Sample]:
    """In each group the rewards of the successful rollouts come first in the list, whoever earned them."""
    changed = []
    for group in by_group(samples):
        rewards = sorted(group, key=lambda sample: sample.reward <= 0)
        changed += [with_reward_of(sample, other) for sample, other in zip(group, rewards, strict=True)]
    return changed


PRICE = 0.2


def stopping_rewarded(original: Callable[..., Advantages], samples: Sequence[Sample]) -> Advantages:
    """Each turn after the first takes a fixed amount off the advantage of a rollout in a group with a signal."""
    found = original(samples)
    prices = [PRICE * (s.metrics.get("rollout/turns", 1) - 1) if s.group in found.with_signal else 0.0 for s in samples]
    return with_values(found, [value - price for value, price in zip(found.values, prices, strict=True)])
