"""How the in-process engine decodes a model exactly, found by measurement when the model is loaded."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from plumbob.console import first_line
from plumbob.rollout import Completion, Sampling
from plumbob.trainer.inference.engine import Decoding
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy.forward_plan import (
    ForwardPlan,
    measured_rows,
    measuring,
    own_logprobs,
)
from plumbob.trainer.policy.loading import TINY
from transformers import PreTrainedModel


def choose_decoding(model: PreTrainedModel, plan: ForwardPlan, max_context: int) -> Decoding:
    """Measure whether the engine's cache gives what `model` gives without one, in float32, like `plan_forward`.

    Conversations of two turns are sampled: prompts of several lengths in one batch, two of them equal, and a second
    turn that continues from what is cached. `model` is left as it was.
    """
    if plan.logits is None:
        return Decoding(False, None, plan.layout, plan.attention, "only its own forward pass makes its logits")
    flags = [p.requires_grad for p in model.parameters()]
    difference: float | str = ""
    tiny = model.device.type == "cpu" and model.num_parameters() < TINY
    for joined in (True, False) if tiny else (False,):
        tried = Decoding(logits=plan.logits, joined=joined)
        try:
            with measuring(model, max_context) as lengths:
                rows = [row.token_ids for row in measured_rows(plan.num_ids, lengths)]
                difference = _difference(model, [*rows, rows[1]], plan, tried)
        except Exception as error:  # whatever a model raises that cannot use this cache
            difference = first_line(error)
        finally:
            for parameter, flag in zip(model.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)
        if isinstance(difference, float) and difference <= plan.limit:
            return replace(tried, difference=difference)
    return Decoding(False, plan.logits, plan.layout, plan.attention, difference)


def _difference(model: PreTrainedModel, prompts: list[list[int]], plan: ForwardPlan, decoding: Decoding) -> float:
    """The largest difference of sampled log-probabilities to the model's own forward pass, in nats."""
    engine = TransformersEngine(model, max_slots=len(prompts), max_length=1 << 20, decoding=decoding)

    async def turn(rows: list[list[int]], seed: int) -> list[Completion]:
        requests = (engine.submit(ids, Sampling(max_tokens=4, seed=seed + i)) for i, ids in enumerate(rows))
        return await asyncio.gather(*requests)

    async def conversations() -> list[list[int]]:
        """Plays two turns; returns the rows, with what was sampled at their ends and before their last 7 ids."""
        first = await turn(prompts, 0)
        longer = [[*ids, *c.token_ids, *ids[:3]] for ids, c in zip(prompts, first, strict=True)]
        second = await turn(longer, len(prompts))
        sampled.extend([*a.logprobs, *b.logprobs] for a, b in zip(first, second, strict=True))
        return [[*ids, *c.token_ids] for ids, c in zip(longer, second, strict=True)]

    sampled: list[list[float]] = []
    # In a thread of its own, because a model may be loaded where an event loop runs, as `serve` does.
    with ThreadPoolExecutor(1) as thread:
        rows = thread.submit(lambda: asyncio.run(conversations())).result()
    model.set_attn_implementation(plan.own_attention)
    own = [own_logprobs(model, ids).cpu() for ids in rows]
    expected = torch.stack([torch.cat([row[-11:-7], row[-4:]]) for row in own])
    return (expected - torch.tensor(sampled)).abs().max().item()
