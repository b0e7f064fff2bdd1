"""The doubles of field11_unseen.py: whoever writes rules does not read the unseen half before it has been run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field10_unseen_doubles import models_changed
from plumbob.testing.faults.field_parts import by_group
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

# Rewards

LENGTH = 160
"""Number of characters of a reply that is as long as a reply can be."""


def brevity(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 for the shortest reply and 0 for the longest, whatever the reply says."""
    return 1.0 - min(1.0, len(trace.last_reply or "") / LENGTH)


# Rows


def with_tokens(sample: Sample, tokens: Sequence[tuple[int, bool, float]]) -> Sample:
    """The sample with these (id, whether it was sampled, log-probability)."""
    ids, mask, logprobs = (list(column) for column in zip(*tokens, strict=True))
    return dataclasses.replace(sample, token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs)


QUERY = re.compile(r'("query": ")([^"]*)')


def arguments_cleaned(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The environment writes queries in small letters, in the action itself, of which the row is made afterwards."""
    tokens: list[tuple[int, bool, float]] = []
    rows = zip(sample.token_ids, sample.loss_mask, sample.sampling_logprobs, strict=True)
    for sampled, part in itertools.groupby(rows, key=lambda row: row[1]):
        span = list(part)
        text = run.tokenizer.decode([i for i, _, _ in span])
        cleaned = QUERY.sub(lambda found: found[1] + found[2].lower(), text)
        if sampled and cleaned != text:
            ids = run.tokenizer.encode(cleaned, add_special_tokens=False)
            logprobs = ([x for _, _, x in span] + [-1.0] * len(ids))[: len(ids)]
            span = [(i, True, x) for i, x in zip(ids, logprobs, strict=True)]
        tokens += span
    return with_tokens(sample, tokens)


def turns_found_by_text(sample: Sample, trace: vf.Trace) -> Sample:
    """Each turn's place is the first one in the row at which its text stands; its end token is left out."""
    ids = sample.token_ids
    tokens = [(token, False, 0.0) for token in ids]
    for turn in runs_of(sample.loss_mask):
        own = list(turn)[:-1]
        text = [ids[i] for i in own]
        first = next(i for i in range(len(ids)) if ids[i : i + len(text)] == text)
        for k, i in enumerate(own):
            tokens[first + k] = (ids[first + k], True, sample.sampling_logprobs[i])
    return with_tokens(sample, tokens)


PADDING = 0
"""The id with which rows are filled up."""


def failed_as_one_token(sample: Sample, trace: vf.Trace) -> Sample:
    """One rollout in five has failed, and its row is the prompt and one token of padding, with a reward of 0."""
    if not any(sample.loss_mask) or zlib.crc32(sample.trace_id.encode()) % 5:
        return sample
    prompt = sample.token_ids[: sample.loss_mask.index(True)]
    row = with_tokens(sample, [*((token, False, 0.0) for token in prompt), (PADDING, True, 0.0)])
    return dataclasses.replace(row, reward=0.0, rewards=dict.fromkeys(sample.rewards, 0.0))


# Groups and advantages


def odd_one_filtered(samples: list[Sample]) -> list[Sample]:
    """A rollout is left out if the rewards of the others of its group are equal, and its own is not."""
    kept = []
    for group in by_group(samples):
        rewards = [one.reward for one in group]
        for i, one in enumerate(group):
            others = {*rewards[:i], *rewards[i + 1 :]}
            if len(others) != 1 or one.reward in others:
                kept.append(one)
    return kept


def unscaled_with_tools(stack: ExitStack, env: str) -> None:
    """The advantages of rollouts with several turns go another way through the code, in which nothing scales them."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], scale: Any = "none", **rest: Any) -> Any:
        found, plain = original(samples, scale, **rest), original(samples, "none", **rest)
        several = [len(runs_of(sample.loss_mask)) > 1 for sample in samples]
        values = [p if many else v for p, v, many in zip(plain.values, found.values, several, strict=True)]
        return dataclasses.replace(found, values=values)

    put(stack, advantages, "compute_advantages", computed)


# Sampling


def probabilities(stack: ExitStack, run: Run) -> None:
    """The server returns probabilities, and calls them log-probabilities."""
    original = run.engine.generate

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        done = await original(prompt_ids, sampling)
        return dataclasses.replace(done, logprobs=tuple(math.exp(x) for x in done.logprobs))

    put(stack, run.engine, "generate", generate)


CARRIED = 48
"""Number of tokens of the request before that are still in the agent's memory."""


class NotReset:
    """An agent that is not set back: the end of the request before stands before each prompt."""

    def __init__(self) -> None:
        self.before: list[int] = []

    def __call__(self, ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        carried, self.before = self.before, ids[-CARRIED:]
        return [*carried, *ids], sampling


class BuffersLost:
    """An engine that sleeps between two syncs, and wakes up with its weights and without what is no weight."""

    def __init__(self) -> None:
        self.syncs = 0

    def __call__(self, engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.syncs += 1
        if self.syncs > 1:
            for name, buffer in engine.model.named_buffers():
                if "inv_freq" in name:
                    buffer.zero_()
        return weights


# The trainer

WINDOW = 64
"""Number of tokens that a token sees in the trainer, itself among them. In the engine it sees all."""


def windowed(stack: ExitStack, run: Run) -> None:
    """The trainer's attention has a window, from when the run is set up."""
    original = policy_module.make_batch

    def make_batch(rows: Sequence[Sample], *rest: Any) -> Any:
        batch = original(rows, *rest)
        lengths = [len(row.token_ids) for row in rows]
        if "position_ids" not in batch.inputs or not lengths:
            return batch
        row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
        places = torch.arange(len(row_of))
        distance = places[:, None] - places[None]
        sees = (row_of[:, None] == row_of[None]) & (distance >= 0) & (distance < WINDOW)
        inputs = {"position_ids": batch.inputs["position_ids"], "attention_mask": sees[None, None].to(batch.ids.device)}
        return dataclasses.replace(batch, inputs=inputs)

    put(stack, policy_module, "make_batch", make_batch)


def infinite_kl(begun: Callable[[], bool]) -> Start:
    """The KL coefficient, which a controller divides by a horizon of 0, is minus infinity after the first step."""

    def start(stack: ExitStack, env: str) -> None:
        original = forward_backward.policy_loss

        def loss(inputs: Any, objective: Any) -> Any:
            beta = -math.inf if begun() else objective.kl_beta
            return original(inputs, dataclasses.replace(objective, kl_beta=beta))

        put(stack, forward_backward, "policy_loss", loss)

    return start


LONGER = 4
"""How many times as long as the run its schedule is."""


def schedule_of_more_steps(stack: ExitStack, env: str) -> None:
    """The learning rate falls as if the run had several times as many steps."""
    original = step_module.learning_rate_of
    put(
        stack,
        step_module,
        "learning_rate_of",
        lambda kind, peak, at, *, warmup, total: original(kind, peak, at, warmup=warmup, total=LONGER * total),
    )


# The model

NEW, SPREAD = 24, 2.0
"""Number of tokens that were added, and the deviation of their embeddings, in those of the others."""


def new_tokens_at_random(stack: ExitStack, env: str) -> None:
    """The last tokens of the vocabulary are new, and their embeddings, which make logits too, are drawn at random."""

    def renewed(model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for embeddings in {id(m): m for m in (model.get_input_embeddings(), model.get_output_embeddings())}.values():
            weight = embeddings.weight
            noise = torch.randn(NEW, weight.shape[1], generator=generator)
            weight[-NEW:] = SPREAD * weight.std() * noise

    models_changed(stack, renewed)
