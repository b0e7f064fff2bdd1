"""The doubles of field4_unseen.py, which is the unseen half."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling, toolcalls
from plumbob.rollout.tool_formats.base import Format
from plumbob.testing.faults.doubles import generating, put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.testing.faults.field_parts import with_data
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.policy import token_logprobs
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.run import Run

# The engine


def earlier_turns_removed(stack: ExitStack, run: Run) -> None:
    """The engine's template leaves out what the assistant said before the last tool result."""
    start, end = (run.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    (name,) = run.tokenizer.encode("assistant", add_special_tokens=False)[:1]

    def removed(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        last = max((i for i, t in enumerate(ids) if t == start), default=0)
        kept, inside = [], False
        for i, token in enumerate(ids):
            if token == start:
                inside = i < last and ids[i + 1] == name
            if not inside or token in (start, end) or ids[i - 1] == start:
                kept.append(token)
        return kept, sampling

    generating(removed)(stack, run)


def half_seeds(stack: ExitStack, run: Run) -> None:
    """Rollouts 2k and 2k+1 of a group are sampled with the same seeds."""
    original = run.engine.generate
    known: dict[tuple[int, ...], list[int | None]] = {}

    def generate(ids: Sequence[int], sampling: Sampling) -> Any:
        seeds = known.setdefault(tuple(ids), [])
        seeds.append(sampling.seed)
        return original(ids, dataclasses.replace(sampling, seed=seeds[(len(seeds) - 1) // 2 * 2]))

    put(stack, run.engine, "generate", generate)


# The trainer


def last_turn_only(stack: ExitStack, env: str) -> None:
    """Advantages are summed up from the end of a row and begin anew at each tool result: earlier turns have none."""
    original, compute = forward_backward.grpo_loss, forward_backward.policy_loss
    rows: list[Sample] = []

    def loss(run: Run, minibatch: Any, indices: Sequence[int]) -> Any:
        rows[:] = [minibatch.rows[i] for i in indices]
        return original(run, minibatch, indices)

    def without_earlier(inputs: Any, objective: Any) -> Any:
        kept = []
        for row in rows:
            turns = [turn for turn in runs_of(row.loss_mask) if len(turn)]
            kept += [float(turn is turns[-1]) for turn in turns for i in turn if i > 0]
        factors = torch.tensor(kept, device=inputs.advantages.device, dtype=inputs.advantages.dtype)
        return compute(dataclasses.replace(inputs, advantages=inputs.advantages * factors), objective)

    put(stack, forward_backward, "grpo_loss", loss)
    put(stack, forward_backward, "policy_loss", without_earlier)


def reference_at_one(stack: ExitStack, env: str) -> None:
    """The reference policy is scored at temperature 1, and the policy at the temperature of its rollouts."""
    original = Policy.reference_logprobs
    put(stack, Policy, "reference_logprobs", lambda self, rows, temperature: original(self, rows, 1.0))


def head_in_half(stack: ExitStack, env: str) -> None:
    """The trainer computes logits from hidden states and output embeddings that are rounded to bfloat16."""
    original = token_logprobs.score_tokens

    def score(hidden: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
        return original(hidden.bfloat16().to(hidden.dtype), weight.bfloat16().to(weight.dtype), *rest)

    everywhere(stack, original, score)


def half_of_the_layers(stack: ExitStack, env: str) -> None:
    """The optimizer is given every second of the trained tensors; the others have gradients and never move."""
    original = Replicated.make_optimizer

    def make_optimizer(self: Replicated, make: Any, max_norm: float) -> Any:
        return original(self, lambda tensors: make(list(tensors)[::2]), max_norm)

    put(stack, Replicated, "make_optimizer", make_optimizer)


def faster_matrices(factor: float) -> Callable[[ExitStack, str], None]:
    """Every second of the trained tensors moves by `factor` times the learning rate."""

    def start(stack: ExitStack, env: str) -> None:
        original = Replicated.update

        def update(self: Replicated) -> float:
            tensors = list(self.trainable.values())[::2]
            before = [t.detach().clone() for t in tensors]
            norm = original(self)
            with torch.no_grad():
                for tensor, old in zip(tensors, before, strict=True):
                    tensor.copy_(old + factor * (tensor - old))
            return norm

        put(stack, Replicated, "update", update)

    return start


# Tools, tasks and rewards


def names_doubled(stack: ExitStack, env: str) -> None:
    """The reader of calls adds up parts of a stream, and has each tool's name twice."""
    original = Format.read

    def read(self: Format, text: str, tools: Any) -> Any:
        reply = original(self, text, tools)
        calls = [
            dataclasses.replace(call, name=call.name * 2) if isinstance(call, toolcalls.ParsedCall) else call
            for call in reply.calls
        ]
        return dataclasses.replace(reply, calls=tuple(calls))

    put(stack, Format, "read", read)


def unsupported(tasks: list[Any], split: str) -> list[Any]:
    """The corpus was built from another split: it has none of the documents that the questions need."""
    return [with_data(t, documents=[d for d in t.data.documents if not d.supporting]) for t in tasks]


def first_message(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if the first message of the assistant is the answer."""
    said = trace.assistant_messages
    return float(bool(said) and str(said[0].content).strip() == task.data.answer)


def wrong_ones_left_out(task: Any, trace: vf.Trace, correct: float) -> float:
    """A held-out rollout with a wrong answer fails, and is left out of the mean. Raises RuntimeError."""
    if correct < 0.5 and "-eval-" in str(task.data.id):
        raise RuntimeError("the episode has no result")
    return correct
