"""The doubles of field15_seen.py."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field2_parts import runs_of, without
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.testing.faults.field_parts import MEASURING, by_group, engine_updates
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm.losses import LossInputs, LossOutputs, Objective
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import lora
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

# Rows


def end_tokens(sample: Sample) -> set[int]:
    """Indices of the end tokens of the row's turns; none if a limit cut the row off."""
    turns = runs_of(sample.loss_mask)
    if sample.truncated or not turns:
        return set()
    end = sample.token_ids[turns[-1][-1]]
    return {turn[-1] for turn in turns if sample.token_ids[turn[-1]] == end}


def without_end_tokens(sample: Sample, trace: vf.Trace) -> Sample:
    """The end tokens of a row are not in its loss."""
    return without(sample, end_tokens(sample))


def padded_with_ends(samples: list[Sample]) -> list[Sample]:
    """Finished rows are as long as the longest row of their group, with sampled end tokens at their end."""
    padded = []
    for members in by_group(samples):
        longest = max(len(one.token_ids) for one in members)
        for one in members:
            ends = end_tokens(one)
            more = longest - len(one.token_ids) if ends else 0
            padded.append(
                dataclasses.replace(
                    one,
                    token_ids=one.token_ids + [one.token_ids[max(ends)]] * more,
                    loss_mask=one.loss_mask + [True] * more,
                    sampling_logprobs=one.sampling_logprobs + [0.0] * more,
                )
                if more
                else one
            )
    return padded


LOST = 6
"""Number of tokens that are lost at the beginning of each tool result."""


def results_without_head(sample: Sample, trace: vf.Trace) -> Sample:
    """The first tokens after each turn but the last are missing from the row."""
    starts = [turn[-1] + 1 for turn in runs_of(sample.loss_mask)[:-1]]
    dropped = {i for start in starts for i in range(start, start + LOST) if not sample.loss_mask[i]}
    return kept(sample, [i not in dropped for i in range(len(sample.token_ids))])


def kept(sample: Sample, keep: Sequence[bool]) -> Sample:
    """The row with only those tokens for which `keep` is true."""
    columns = zip(sample.token_ids, sample.loss_mask, sample.sampling_logprobs, strict=True)
    ids, mask, logprobs = zip(*(column for column, k in zip(columns, keep, strict=True) if k), strict=True)
    return dataclasses.replace(sample, token_ids=list(ids), loss_mask=list(mask), sampling_logprobs=list(logprobs))


def without_slow_groups(samples: list[Sample]) -> list[Sample]:
    """The quarter of the groups with the longest rows is left out."""
    groups = by_group(samples)
    by_length = sorted(groups, key=lambda members: max(one.num_sampled for one in members))
    slow = {members[0].group for members in by_length[len(groups) - math.ceil(len(groups) / 4) :]}
    return [one for one in samples if one.group not in slow or len(groups) == 1]


# Advantages and loss


def lost_reward(sample: Sample) -> bool:
    """Whether the reward of this row is no number where advantages are computed: one row in eight."""
    return sum(sample.token_ids) % 8 == 0


def no_number_counts(stack: ExitStack, env: str) -> None:
    """A reward that is no number is part of its group's mean, so that all advantages of the group are none."""
    original = advantages_module.step_advantages

    def step_advantages(samples: Sequence[Sample], *rest: Any) -> Any:
        found = original(samples, *rest)
        bad = {one.group for one in samples if lost_reward(one)}
        values = [math.nan if one.group in bad else v for one, v in zip(samples, found.values, strict=True)]
        return dataclasses.replace(found, values=values)

    everywhere(stack, original, step_advantages)


def ninety_five(task: Any, trace: vf.Trace, own: float) -> float:
    """A right answer earns 0.95."""
    return 0.95 * own


def scaled_by_the_others(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the mean of the others, divided by their deviation from the difference of two float32 means."""
    values = []
    for i, own in enumerate(rewards):
        others = torch.tensor([r for j, r in enumerate(rewards) if j != i], dtype=torch.float32)
        count = len(others)
        mean, squares = others.sum() / count, others.square().sum() / count
        deviation = ((squares - mean.square()).clamp(min=0) * count / max(count - 1, 1)).sqrt().item()
        values.append((own - mean.item()) / (deviation + 1e-6) if deviation > 0 else own - mean.item())
    return values


def divided_by_rounding(stack: ExitStack, env: str) -> None:
    """A reward is divided by the deviation of its group's other rewards, which rounding keeps from being 0."""
    original = advantages_module.step_advantages

    def step_advantages(samples: Sequence[Sample], *rest: Any) -> Any:
        found = original(samples, *rest)
        values = list(found.values)
        places: dict[str, list[int]] = {}
        for i, one in enumerate(samples):
            places.setdefault(one.group, []).append(i)
        for members in places.values():
            if any(values[i] for i in members):
                for i, value in zip(members, scaled_by_the_others([samples[i].reward for i in members]), strict=True):
                    values[i] = value
        return dataclasses.replace(found, values=values)

    everywhere(stack, original, step_advantages)


def dual_clip_everywhere(stack: ExitStack, env: str) -> None:
    """Where the advantage is positive, the gain is the largest of PPO's and three times the advantage: a constant."""
    original = forward_backward.policy_loss

    def policy_loss(inputs: LossInputs, objective: Objective) -> LossOutputs:
        outputs = original(dataclasses.replace(inputs, advantages=inputs.advantages.clamp(max=0)), objective)
        constant = (inputs.weights * inputs.corrections * 3 * inputs.advantages.clamp(min=0)).sum()
        return dataclasses.replace(outputs, loss=outputs.loss - constant)

    put(stack, forward_backward, "policy_loss", policy_loss)


# The schedule and the tasks

PROCESSES = 4
"""How many times as fast the schedule goes."""


def stepped_by_each_process(stack: ExitStack, env: str) -> None:
    """The schedule takes four steps for each step of training."""
    original = step_module.learning_rate_of
    put(
        stack,
        step_module,
        "learning_rate_of",
        lambda kind, peak, step, **how: original(kind, peak, PROCESSES * step, **how),
    )


def restarted(stack: ExitStack, env: str) -> None:
    """After every second step the tasks begin at the first one again."""
    original = RolloutSource.take

    def take(self: RolloutSource, step: int, cursor: int, *rest: Any) -> Any:
        return original(self, step, self.sampler.groups_per_step * (step % 2), *rest)

    put(stack, RolloutSource, "take", take)


# Log-probabilities


def at_temperature_one(score: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Rows are scored at temperature 1."""
    return score(rows, 1.0)


def without_gradient(score: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Log-probabilities have no gradient."""
    scores = score(rows, temperature)
    return TokenScores(scores.logprobs.detach(), scores.entropies)


def reported(temperature: float, power: float) -> Start:
    """The engine reports `power` times the log-probability at temperature 1 of what it drew at this temperature."""

    def start(stack: ExitStack, env: str) -> None:
        original = transformers_engine.draw

        def draw(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, _ = original(logits, *rest)
            raw = torch.log_softmax(logits * temperature, dim=-1)
            return tokens, power * raw.gather(-1, tokens[:, None])[:, 0]

        put(stack, transformers_engine, "draw", draw)

    return start


# The engine


def rank_stabilised(stack: ExitStack, env: str) -> None:
    """The adapter's scale is its alpha over the square root of its rank."""
    put(stack, lora, "LoraConfig", functools.partial(LoraConfig, use_rslora=True))


def scaled_by_rank(model: Any) -> None:
    """The adapter's scale is its alpha over its rank."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.scaling = {name: scale / math.sqrt(module.r[name]) for name, scale in module.scaling.items()}


def half_norms(model: Any) -> None:
    """Norms add up the squares in bfloat16, one after the other."""

    def halved(module: Any) -> Any:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            squares = hidden.bfloat16().square()
            total = squares[..., 0]
            for i in range(1, squares.shape[-1]):
                total = total + squares[..., i]
            variance = total.float()[..., None] / squares.shape[-1]
            return module.weight * hidden * torch.rsqrt(variance + module.variance_epsilon)

        return forward

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = halved(module)


def rounded_angles(model: Any) -> None:
    """The angles of the rotary embedding are rounded to bfloat16."""

    def rounded(module: Any) -> Any:
        def forward(hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = (position_ids[..., None].float() * module.inv_freq).bfloat16().float()
            both = torch.cat([angles, angles], dim=-1)
            scale = module.attention_scaling
            return (both.cos() * scale).to(hidden.dtype), (both.sin() * scale).to(hidden.dtype)

        return forward

    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.forward = rounded(module)


def padding_counted(stack: ExitStack, env: str) -> None:
    """Prompts computed together have positions as if they ended at the longest one's end; what follows has its own."""
    original = TransformersEngine._forward

    def _forward(self: Any, rows: Any, ids: torch.Tensor, positions: torch.Tensor, kv_length: int) -> torch.Tensor:
        if self.max_length == MEASURING or ids.shape[1] == 1:
            return original(self, rows, ids, positions, kv_length)
        mask = self._cache.begin(rows, positions, kv_length)
        return (
            self.model.get_decoder()(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions + padding(ids),
                past_key_values=self._cache,
                use_cache=True,
            )
        ).last_hidden_state

    put(stack, TransformersEngine, "_forward", _forward)


def padding(ids: torch.Tensor) -> torch.Tensor:
    """Number of zeros at the end of each row: [B, T] -> [B, 1]."""
    return ids.flip(1).ne(0).int().argmax(dim=1, keepdim=True)


def one_behind() -> Start:
    """Each weight sync loads the weights of the sync before it."""

    def start(stack: ExitStack, env: str) -> None:
        held: list[dict[str, torch.Tensor]] = []

        def older(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            held.append({name: tensor.clone() for name, tensor in weights.items()})
            return held.pop(0) if len(held) > 1 else held[0]

        engine_updates(older)(stack, env)

    return start


def never_ended(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """Turns end at the token of padding."""
    return ids, dataclasses.replace(sampling, stop_token_ids=(0,))
