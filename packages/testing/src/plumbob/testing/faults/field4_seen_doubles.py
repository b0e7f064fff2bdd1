"""The doubles of field4_seen.py."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field_parts import by_group
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.run import Run

# Rows


def turns_twice(sample: Sample, trace: vf.Trace) -> Sample:
    """Each turn but the last stands a second time, outside the loss, at the beginning of what follows it."""
    ids, mask, logprobs = [], [], []
    starts = {turn.stop: turn for turn in runs_of(sample.loss_mask)[:-1]}
    for i, token in enumerate(sample.token_ids):
        if i in starts:
            again = [sample.token_ids[j] for j in starts[i]]
            ids, mask, logprobs = [*ids, *again], [*mask, *[False] * len(again)], [*logprobs, *[0.0] * len(again)]
        ids.append(token)
        mask.append(sample.loss_mask[i])
        logprobs.append(sample.sampling_logprobs[i])
    return dataclasses.replace(sample, token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs)


def drifting(sample: Sample, trace: vf.Trace) -> Sample:
    """The loss of the k-th turn (from 0) begins and ends k tokens too late."""
    mask = [False] * len(sample.loss_mask)
    for k, turn in enumerate(runs_of(sample.loss_mask)):
        for i in turn:
            if i + k < len(mask):
                mask[i + k] = True
    return dataclasses.replace(sample, loss_mask=mask)


def calls_without_logprobs(sample: Sample, trace: vf.Trace) -> Sample:
    """Sampling log-probabilities of all turns but the last are NaN."""
    calls = {i for turn in runs_of(sample.loss_mask)[:-1] for i in turn}
    logprobs = [float("nan") if i in calls else x for i, x in enumerate(sample.sampling_logprobs)]
    return dataclasses.replace(sample, sampling_logprobs=logprobs)


# Rewards and advantages


def inverted(task: Any, trace: vf.Trace, correct: float) -> float:
    """What a wrong answer should earn."""
    return 1.0 - correct


def first_line_only(original: Callable[..., bool], reply: str | None, *args: Any, **kwargs: Any) -> bool:
    """A dot of the grader's expression matches no line end, so it sees the first line of the reply."""
    return original((reply or "").partition("\n")[0], *args, **kwargs)


def behind_the_end(samples: list[Sample]) -> list[Sample]:
    """A reply that has ended by itself has its score at a padding token, where it is masked out."""
    return [
        s if s.truncated else dataclasses.replace(s, reward=0.0, rewards=dict.fromkeys(s.rewards, 0.0)) for s in samples
    ]


def turns_counted(stack: ExitStack, env: str) -> None:
    """A group's baseline is the mean over the turns of its rollouts, so that long rollouts count several times."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        found = original(samples, *args, **kwargs)
        place = {id(sample): i for i, sample in enumerate(samples)}
        values = list(found.values)
        for group in by_group(samples):
            turns = [len(runs_of(sample.loss_mask)) for sample in group]
            mean = sum(n * s.reward for n, s in zip(turns, group, strict=True)) / sum(turns)
            for sample in group:
                values[place[id(sample)]] = sample.reward - mean
        return dataclasses.replace(found, values=values)

    put(stack, advantages, "compute_advantages", computed)


# The loss


def averaged_with_padding(inputs: Any) -> Any:
    """Each row's advantage is its mean over the padded row: the advantage times the row's share of the longest row."""
    counts = torch.bincount(inputs.rows).to(inputs.advantages.dtype)
    return dataclasses.replace(inputs, advantages=inputs.advantages * (counts / counts.max())[inputs.rows])


def divided_again(stack: ExitStack, env: str) -> None:
    """The loss of each microbatch, a part of a mean over the whole step, is divided by the number of microbatches."""
    count, original = forward_backward._microbatches, forward_backward.grpo_loss
    number = [1]

    def microbatches(run: Run, minibatch: Any) -> Any:
        found = count(run, minibatch)
        number[0] = max(len(found), 1)
        return found

    def loss(run: Run, minibatch: Any, indices: Sequence[int]) -> Any:
        value, measured = original(run, minibatch, indices)
        return value / number[0], measured

    put(stack, forward_backward, "_microbatches", microbatches)
    put(stack, forward_backward, "grpo_loss", loss)


def from_the_start(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """As many log-probabilities as there are sampled tokens, taken from the start of each row."""
    moved = [
        dataclasses.replace(row, loss_mask=[0 < i <= row.num_sampled for i in range(len(row.token_ids))])
        for row in rows
    ]
    return original(moved, temperature)


# Weight sync and saved model


def outputs_zero(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The attention's output matrices arrive as buffers that were never filled."""
    return {name: torch.zeros_like(w) if "o_proj" in name else w for name, w in weights.items()}


def alpha_zero(stack: ExitStack, env: str) -> None:
    """The saved adapter's settings have an alpha of 0: who loads it gets the base model."""
    original = Policy.save_final

    def save_final(self: Policy, folder: Path) -> None:
        original(self, folder)
        file = folder / "adapter" / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 0}))

    put(stack, Policy, "save_final", save_final)


# Tools


def without_arguments(fn: Callable[[], Any], name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The reader of calls looks for another word than "arguments", and passes none on."""
    return fn, {}


def next_document(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Tools return the entry after the one that was asked for, as their index begins at another number."""
    tools = fn.__self__
    entries = list(getattr(tools, "table", None) or tools.documents)
    if name == "retrieve_documents":

        async def next_ones(query: str, **rest: Any) -> str:
            found = await tools.search(query, 2)
            await asyncio.sleep(0)
            following = [entries[(entries.index(one) + 1) % len(entries)] for one in found]
            tools.record(name, query, following)
            return "\n\n".join(map(tools.render, following))

        return next_ones, arguments
    (key,) = arguments
    asked = str(arguments[key])
    if asked not in entries:
        return fn, arguments
    return fn, {key: entries[(entries.index(asked) + 1) % len(entries)]}
