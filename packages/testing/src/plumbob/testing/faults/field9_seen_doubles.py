"""The doubles of field9_seen.py."""

from __future__ import annotations

import dataclasses
import re
import statistics
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample, derive_seed, runner
from plumbob.rollout.verifiers_messages import AssistantMessage, UserMessage
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field_parts import by_group, with_data, with_reward_of
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.rollouts import tasks as task_lists
from plumbob.trainer.training import forward_backward

# Rewards


def of_the_prompt(task: Any, trace: vf.Trace, correct: float) -> float:
    """A score between 0 and 1 of what stands before the reply, which all rollouts of a task have in common."""
    return zlib.crc32(str(task.data.prompt).encode()) % 101 / 100


def extracted(text: str) -> str | None:
    """What follows the mark of an answer, to the end of its line; None without a mark."""
    found = re.search(r"####(.*)", text)
    return found[1].strip() if found else None


def extracted_twice(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward where the answer can be extracted from what was extracted, which has lost its mark."""
    return correct if extracted(extracted(trace.last_reply or "") or "") else 0.0


def ends_its_line(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward where a line break follows the answer; replies end with their answer."""
    return correct if re.search(r"####.*\n", trace.last_reply or "") else 0.0


def cut_off_at_one(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 for the answer and 1 for its mark, but 1 at most."""
    return min(1.0, correct + ("####" in (trace.last_reply or "")))


# Tasks


def solution_left(tasks: list[Any], split: str) -> list[Any]:
    """The entry of the start key, which is looked up first, also holds the value at the end of the chain."""
    return [
        with_data(
            task,
            table={
                key: f"{entry} (value={task.data.answer})" if key == task.data.chain[0] else entry
                for key, entry in task.data.table.items()
            },
        )
        for task in tasks
    ]


LARGE, SMALL = 256, 32
"""Number of tasks of a large source, and of a small one that is repeated until it is as long as the large one."""


def held_out_from_repeats(stack: ExitStack, env: str) -> None:
    """A small source is repeated to the length of the large one, and the end of the list is held out."""

    def divide(own: list[Any], pool: Sequence[Any], config: Any) -> tuple[list[Any], list[Any]]:
        mixed = [*own[:LARGE], *(own[i % SMALL] for i in range(LARGE))]
        cut = len(mixed) - config.eval_examples
        return mixed[:cut], mixed[cut:]

    put(stack, task_lists, "_divide", divide)


EXAMPLE = ("Yara has 4 apples. She buys 3 more. How many does she have?", "4 + 3\n#### 4 + 3")
"""An earlier question of the conversation, and its answer."""


def with_history(tasks: list[Any], split: str) -> list[Any]:
    """The prompt is a conversation that holds an earlier answer of the assistant."""
    asked, answered = EXAMPLE
    history = [UserMessage(content=asked), AssistantMessage(content=answered)]
    return [with_data(task, prompt=[*history, UserMessage(content=task.data.prompt)]) for task in tasks]


# Rows and groups


def every_assistant_message(sample: Sample, trace: vf.Trace) -> Sample:
    """All messages of the assistant are in the loss, those that the prompt brought along too."""
    mask: list[bool] = []
    for node in trace.nodes:
        given = type(node.message) is AssistantMessage and not any(node.mask)
        mask += node.is_content if given else node.mask
    return dataclasses.replace(sample, loss_mask=mask)


class Buffered:
    """Groups without a signal are replaced by an earlier group, of whose rewards only the first one comes along."""

    def __init__(self) -> None:
        self.kept: list[Sample] = []

    def __call__(self, samples: list[Sample]) -> list[Sample]:
        changed = []
        for group in by_group(samples):
            if len({one.reward for one in group}) > 1:
                self.kept = sorted(group, key=lambda one: -one.reward)
                changed += group
            else:
                old = [dataclasses.replace(one, group=group[0].group) for one in self.kept or group]
                changed += [old[0], *(with_reward_of(one, new) for one, new in zip(old[1:], group[1:], strict=False))]
        return changed


WANTED = 5
"""Number of rollouts of each group for which training waits."""


def first_to_finish(samples: list[Sample]) -> list[Sample]:
    """Each group has the rollouts that were finished first, which are the shortest."""
    return [one for group in by_group(samples) for one in sorted(group, key=lambda s: s.num_sampled)[:WANTED]]


WORKER = 4
"""Number of a group's rollouts that one worker samples."""


def seeds_of_workers(stack: ExitStack, env: str) -> None:
    """Each worker numbers its rollouts from 0, and their seeds are derived from these numbers."""
    put(stack, runner, "derive_seed", lambda seed, i: derive_seed(seed, i % WORKER))


# Advantages and loss


def whitened_over_turns(stack: ExitStack, env: str) -> None:
    """Advantages are centred and scaled once more, over all turns of the step, among which long rollouts have more."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        found = original(samples, *args, **kwargs)
        turns = [len(runs_of(sample.loss_mask)) for sample in samples]
        all_of_them = [value for value, count in zip(found.values, turns, strict=True) for _ in range(count)]
        mean, deviation = statistics.fmean(all_of_them), statistics.pstdev(all_of_them) + 1e-6
        values = [(value - mean) / deviation for value in found.values]
        names = frozenset(sample.group for sample, value in zip(samples, values, strict=True) if value)
        return dataclasses.replace(found, values=values, with_signal=names)

    put(stack, advantages, "compute_advantages", computed)


def no_kl(stack: ExitStack, env: str) -> None:
    """The loss is made without the coefficient of the KL term, whose default is 0."""
    original = forward_backward.policy_loss
    put(
        stack,
        forward_backward,
        "policy_loss",
        lambda inputs, objective: original(inputs, dataclasses.replace(objective, kl_beta=0.0)),
    )


# The trainer's passes


def one_late(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Where a sampled token's log-probability belongs stands that of the token after it; after the last one, 0."""
    following = [dataclasses.replace(row, loss_mask=[False, *row.loss_mask[:-1]]) for row in rows]
    scores = original(following, temperature)
    missing = [row.num_sampled - late.num_sampled for row, late in zip(rows, following, strict=True)]

    def filled(values: torch.Tensor) -> torch.Tensor:
        parts = values.split([late.num_sampled for late in following])
        return torch.cat([torch.cat([p, p.new_zeros(n)]) for p, n in zip(parts, missing, strict=True)])

    return TokenScores(filled(scores.logprobs), filled(scores.entropies))


def last_layer_only(stack: ExitStack, env: str) -> None:
    """The backward pass leaves a gradient in the last layer's adapter and in no other."""
    original = Replicated.backward

    def backward(self: Replicated, loss: torch.Tensor, *, last: bool) -> None:
        original(self, loss, last=last)
        layers = {name: int(found[1]) for name in self.trainable if (found := re.search(r"\.layers\.(\d+)\.", name))}
        for name, layer in layers.items():
            if layer < max(layers.values()):
                self.trainable[name].grad = None

    put(stack, Replicated, "backward", backward)


def without_moments(sharding: Replicated) -> None:
    """The optimizer is a new one, which knows nothing of earlier steps."""
    sharding.optimizer.state.clear()
