"""The doubles of field3_seen.py."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field2_parts import before_rounds, evaluations, runs_of
from plumbob.testing.faults.field3_parts import everywhere, tools_called
from plumbob.testing.faults.field_parts import sampling_now
from plumbob.trainer.inference.transformers.kv_cache import SlotCache
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.training import minibatches
from plumbob.trainer.training.run import Run

# The engine


def cache_in_eight_bits(stack: ExitStack, env: str) -> None:
    """While it samples, the engine's cache holds keys and values in eight bits, with a scale of 1 that suits no model.

    Each becomes the nearest whole number from -127 to 127.
    """
    update, sampling = SlotCache.update, sampling_now(stack)

    def rounded(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sampling():
            keys, values = (x.round().clamp(-127, 127) for x in (keys, values))
        return update(self, keys, values, *args, **kwargs)

    put(stack, SlotCache, "update", rounded)


# Rows


def with_leading_spaces(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The text of each turn is tokenised again behind a space, as a tokeniser does that puts one before every text."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    begin = 0
    for turn in runs_of(sample.loss_mask):
        span = [sample.token_ids[i] for i in turn]
        ends = span[-1:] if span[-1] in run.sampler.chat.stop_token_ids else []
        text = run.tokenizer.decode(span[: len(span) - len(ends)])
        new = [*run.tokenizer.encode(f" {text}", add_special_tokens=False), *ends]
        own = [sample.sampling_logprobs[i] for i in turn]
        between = slice(begin, turn.start)
        ids += [*sample.token_ids[between], *new]
        mask += [*sample.loss_mask[between], *[True] * len(new)]
        logprobs += [*sample.sampling_logprobs[between], *(own[:1] + own + own[-1:] * len(new))[: len(new)]]
        begin = turn.stop
    rest = slice(begin, None)
    return dataclasses.replace(
        sample,
        token_ids=[*ids, *sample.token_ids[rest]],
        loss_mask=[*mask, *sample.loss_mask[rest]],
        sampling_logprobs=[*logprobs, *sample.sampling_logprobs[rest]],
    )


# The trainer


def advantages_unsorted(stack: ExitStack, env: str) -> None:
    """Rows are sorted by their length before they are packed, and advantages stay in the order of the rollouts."""
    original = minibatches.make_minibatches

    def make(samples: Sequence[Sample], advantages: Any, *args: Any, **kwargs: Any) -> Any:
        order = sorted(range(len(samples)), key=lambda i: -len(samples[i].token_ids))
        values = [0.0] * len(samples)
        for value, i in zip(advantages.values, order, strict=True):
            values[i] = value
        return original(samples, dataclasses.replace(advantages, values=values), *args, **kwargs)

    everywhere(stack, original, make)


def entropy_bonus(size: float) -> Callable[[Any], Any]:
    """Each token earns `size` times its surprise, in nats, which is the gradient of an entropy bonus of this size."""
    return lambda inputs: dataclasses.replace(
        inputs, advantages=inputs.advantages - size * inputs.logprobs.detach().to(inputs.advantages.dtype)
    )


def initial_weights_at(step: int) -> Callable[[ExitStack, Run], None]:
    """Before this step (from 0), the policy is the initial one again; optimizer and step counter go on."""

    def inject(stack: ExitStack, run: Run) -> None:
        first = {name: p.detach().clone() for name, p in run.policy.trainable.items()}
        done: list[int] = []

        def begin(number: int) -> None:
            if number < step or done:
                return
            done.append(number)
            with torch.no_grad():
                for name, parameter in run.policy.trainable.items():
                    parameter.copy_(first[name])
            sync_weights(run.policy, run.engine, run.parity_row)

        before_rounds(stack, begin)

    return inject


# Tasks, tools and rewards


def calls_pay(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 1, and each tool call earns 0.5, whatever it asks for."""
    return correct + 0.5 * sum(len(turn.tool_calls or []) for turn in trace.assistant_messages)


def boxed_only(original: Callable[..., bool], reply: str | None, *args: Any, **kwargs: Any) -> bool:
    """A reply without a box is wrong."""
    return "\\boxed" in (reply or "") and original(reply, *args, **kwargs)


def one_in_thirty_hangs() -> Start:
    """Every thirtieth tool call waits for an answer that never comes."""
    count = itertools.count(1)

    async def hung(**arguments: Any) -> str:
        await asyncio.sleep(3600)
        return ""

    return tools_called(lambda fn, name, arguments: (fn if next(count) % 30 else hung, arguments))


# Evaluation


def one_turn(stack: ExitStack, run: Run) -> None:
    """Held-out rollouts end after their first turn."""

    async def limited(call: Callable[..., Any], sampler: Any) -> Any:
        return await call(dataclasses.replace(sampler, limits=dataclasses.replace(sampler.limits, max_turns=1)))

    evaluations(limited)(stack)
