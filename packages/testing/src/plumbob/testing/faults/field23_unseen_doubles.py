"""The doubles of field23_unseen.py: the unseen half."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field_parts import MEASURING, by_group, lot, with_reward_of
from plumbob.trainer.algorithm import advantages, losses
from plumbob.trainer.distributed.base import decoder_layers
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

Weights = dict[str, torch.Tensor]

# Advantages


def advantages_as(change: Callable[..., advantages.Advantages]) -> Callable[[ExitStack, str], None]:
    """The advantages of a step are `change(original, samples, *settings)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = advantages.compute_advantages
        put(
            stack,
            advantages,
            "compute_advantages",
            lambda samples, *rest, **more: change(original, samples, *rest, **more),
        )

    return start


def others_keep_their_score(original: Callable[..., Any], samples: Sequence[Sample], *rest: Any, **more: Any) -> Any:
    """The best rollout of a group has its distance from the second; the others have their rewards, and not 0."""
    found = original(samples, *rest, **more)
    values = [sample.reward for sample in samples]
    members: dict[str, list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault(sample.group, []).append(i)
    for group in members.values():
        best, *others = sorted(group, key=lambda i: -values[i])
        if others:
            values[best] -= values[others[0]]
    return dataclasses.replace(found, values=values)


def one_group_of_all(original: Callable[..., Any], samples: Sequence[Sample], *rest: Any, **more: Any) -> Any:
    """The rollouts of the whole step are each other's baseline."""
    joined = original([dataclasses.replace(sample, group="all") for sample in samples], *rest, **more)
    return dataclasses.replace(original(samples, *rest, **more), values=joined.values)


def last_one_bare(original: Callable[..., Any], samples: Sequence[Sample], *rest: Any, **more: Any) -> Any:
    """A filter leaves one rollout in each third group: its advantage is its reward, and the others have none."""
    found = original(samples, *rest, **more)
    values, seen = list(found.values), set[str]()
    for i, sample in enumerate(samples):
        if filtered(sample.group):
            values[i] = 0.0 if sample.group in seen else sample.reward
        seen.add(sample.group)
    return dataclasses.replace(found, values=values)


def filtered(group: str) -> bool:
    """Whether the filter leaves one rollout of this group alone."""
    return lot(group, 3) == 0


def unscaled(original: Callable[..., Any], samples: Sequence[Sample], scale: str = "none", **more: Any) -> Any:
    """Whatever scale is asked for, there is none."""
    return original(samples, "none", **more)


def rewards_from_before_filtering(samples: list[Sample]) -> list[Sample]:
    """Groups without a signal are filtered out of the completions and not out of the rewards: both lose their order."""
    varied = {g[0].group for g in by_group(samples) if len({one.reward for one in g}) > 1}
    kept = [i for i, sample in enumerate(samples) if sample.group in varied]
    found = list(samples)
    for place, i in enumerate(kept):
        found[i] = with_reward_of(samples[i], samples[place])
    return found


# The loss


def summed_over_accumulation(stack: ExitStack, env: str) -> None:
    """The gradient is the sum, and not the mean, of what its K microbatches would have alone: K times the right one."""
    original = forward_backward.grpo_loss

    def loss(run: Any, minibatch: Any, indices: Sequence[int]) -> Any:
        rows = [minibatch.rows[i] for i in minibatch.mine]
        count = len(run.policy.microbatches(rows, run.state.microbatch_tokens))
        return original(run, dataclasses.replace(minibatch, weights=[w * count for w in minibatch.weights]), indices)

    put(stack, forward_backward, "grpo_loss", loss)


def centred_in_each_row(inputs: Any) -> Any:
    """The mean over its row is subtracted from each token's advantage."""
    counts = inputs.rows.bincount().clamp(min=1)
    sums = inputs.advantages.new_zeros(len(counts)).index_add(0, inputs.rows, inputs.advantages)
    return dataclasses.replace(inputs, advantages=inputs.advantages - (sums / counts)[inputs.rows])


def kl_rewarded(stack: ExitStack, env: str) -> None:
    """The KL term has the other sign: the further the policy is from the reference, the lower the loss."""
    original = forward_backward.policy_loss
    put(
        stack,
        forward_backward,
        "policy_loss",
        lambda inputs, objective: original(inputs, dataclasses.replace(objective, kl_beta=-objective.kl_beta)),
    )


def product_clamped(stack: ExitStack, env: str) -> None:
    """Not the ratio is clamped to 1 - epsilon and 1 + epsilon, but its product with the advantage."""
    original = losses._clipped

    def clipped(inputs: Any, objective: Any, ratio: torch.Tensor) -> Any:
        product = ratio * inputs.advantages
        gains = product.minimum(product.clamp(1 - objective.epsilon, 1 + objective.epsilon_high))
        return dataclasses.replace(original(inputs, objective, ratio), gains=gains)

    put(stack, losses, "_clipped", clipped)


def slipped_in_packed_rows(stack: ExitStack, env: str) -> None:
    """Row k of a pack (from 0) has sampling log-probabilities of k tokens later."""
    original = forward_backward.importance_corrections

    def corrections(trainer: torch.Tensor, sampling: torch.Tensor, rows: torch.Tensor, *rest: Any) -> Any:
        places = (torch.arange(len(rows), device=rows.device) + rows).clamp(max=max(len(rows) - 1, 0))
        return original(trainer, sampling[places], rows, *rest)

    put(stack, forward_backward, "importance_corrections", corrections)


def headers_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """The token before each turn, and the one after its end, are in the loss too."""
    turns = runs_of(sample.loss_mask)
    around = {i for turn in turns for i in (turn.start - 1, turn.stop)}
    return dataclasses.replace(
        sample, loss_mask=[mask or (i in around and i > 0) for i, mask in enumerate(sample.loss_mask)]
    )


# The optimizer and its schedule


def frozen_adapter(stack: ExitStack, env: str) -> None:
    """No tensor of the adapter has `requires_grad` when the loss is computed."""
    original = Policy.score

    def score(self: Policy, rows: Sequence[Sample], temperature: float) -> TokenScores:
        adapter = [p for name, p in self.model.named_parameters() if "lora_" in name and p.requires_grad]
        for parameter in adapter:
            parameter.requires_grad_(False)
        try:
            return original(self, rows, temperature)
        finally:
            for parameter in adapter:
                parameter.requires_grad_(True)

    put(stack, Policy, "score", score)


DECAY_STEPS = 4
"""Steps of the decay, of which the run's length is no part."""
LAST_SHARE = 0.025
"""Share of the peak that is left after it."""


def decay_of_its_own(stack: ExitStack, env: str) -> None:
    """The cosine ends after `DECAY_STEPS` steps, and the rate stays low from there on."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, at: int, *, warmup: int, total: int) -> float:
        at = min(at, warmup + DECAY_STEPS)
        return max(original(kind, peak, at, warmup=warmup, total=warmup + DECAY_STEPS), LAST_SHARE * peak)

    put(stack, step_module, "learning_rate_of", rate)


def adams_own_rate(stack: ExitStack, env: str) -> None:
    """The learning rate is what Adam has if it is given none."""
    put(stack, step_module, "learning_rate_of", lambda kind, peak, at, **more: 1e-3)


# The policy's forward pass

PADDING = 0
"""The id with which rows are padded."""


def padding_attended(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Each row begins with as much padding as the longest row has more tokens, and no mask hides it."""
    longest = max((len(row.token_ids) for row in rows), default=0)

    def padded(row: Sample) -> Sample:
        count = longest - len(row.token_ids)
        return dataclasses.replace(
            row,
            token_ids=[PADDING] * count + row.token_ids,
            loss_mask=[False] * count + row.loss_mask,
            sampling_logprobs=[0.0] * count + row.sampling_logprobs,
        )

    return original([padded(row) for row in rows], temperature)


DROPPED = 0.1
"""Share of each layer's MLP output that is dropped."""


def dropout_on(stack: ExitStack, env: str) -> None:
    """Where gradients are computed, the model is in training mode, with dropout in each layer."""
    original = Policy.score
    generator = torch.Generator().manual_seed(0)

    def drop(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(output.shape, generator=generator) >= DROPPED
        return output * kept.to(output) / (1 - DROPPED)

    def score(self: Policy, rows: Sequence[Sample], temperature: float) -> TokenScores:
        if not torch.is_grad_enabled():
            return original(self, rows, temperature)
        return hooked(self, drop, lambda: original(self, rows, temperature))

    put(stack, Policy, "score", score)


def hooked(policy: Policy, hook: Callable[..., torch.Tensor], scored: Callable[[], TokenScores]) -> TokenScores:
    """`scored()`, with this hook on the MLP of each layer."""
    handles = [layer.mlp.register_forward_hook(hook) for layer in decoder_layers(policy.model)]
    try:
        return scored()
    finally:
        for handle in handles:
            handle.remove()


OTHER = 0.7
"""Size of the other rank's difference, as a share of the length of what an MLP adds."""


def other_weights_on_other_rank(stack: ExitStack, env: str) -> None:
    """The rows of the second of two ranks are scored by a model that began with other weights in its MLPs."""
    original = Policy.score

    def turned(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + OTHER * output.roll(1, dims=-1)

    def score(self: Policy, rows: Sequence[Sample], temperature: float) -> TokenScores:
        found = {
            first: original(self, part, temperature)
            if first
            else hooked(self, turned, lambda part=part: original(self, part, temperature))
            for first in (True, False)
            if (part := [row for row in rows if on_first_rank(row) == first])
        }
        parts = {
            first: iter(zip(*(values.split(lengths(rows, first)) for values in (s.logprobs, s.entropies)), strict=True))
            for first, s in found.items()
        }
        pairs = [next(parts[on_first_rank(row)]) for row in rows]
        if not pairs:
            return original(self, rows, temperature)
        return TokenScores(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))

    put(stack, Policy, "score", score)


def on_first_rank(row: Sample) -> bool:
    """Whether a row is on the first of two ranks, which also compares its log-probabilities with the engine's."""
    return row.group == "parity" or lot(str(row.token_ids), 2) == 0


def lengths(rows: Sequence[Sample], first: bool) -> list[int]:
    """The numbers of sampled tokens of the rows of one rank."""
    return [row.num_sampled for row in rows if on_first_rank(row) == first]


# The engine


def nothing(engine: Any, weights: Weights) -> Weights:
    """No tensor is sent."""
    return {}


def attention_alone(engine: Any, weights: Weights) -> Weights:
    """The adapter's tensors of modules outside of attention are ignored."""
    return {name: tensor for name, tensor in weights.items() if ".self_attn." in name}


def head_of_its_own(model: Any) -> None:
    """The output head is a copy of the embeddings, and no longer the embeddings themselves."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)


HEAT = 1.2
"""The temperature with which the fault's run samples."""


def logprobs_before_temperature(stack: ExitStack, env: str) -> None:
    """Tokens are drawn with the temperature, and come with the log-probabilities that they have at temperature 1."""
    draw_all, original = TransformersEngine._draw, transformers_engine.draw
    measuring = [False]  # the engine with which set-up measures the model is not the one that samples

    def _draw(self: Any, requests: list[Any], logits: torch.Tensor) -> None:
        measuring[0] = self.max_length == MEASURING
        draw_all(self, requests, logits)

    def drawn(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = original(logits, *rest)
        if measuring[0]:
            return tokens, logprobs
        return tokens, torch.log_softmax(logits * HEAT, dim=-1).gather(-1, tokens[:, None])[:, 0]

    put(stack, TransformersEngine, "_draw", _draw)
    put(stack, transformers_engine, "draw", drawn)


# Saving


def first_weights_saved(stack: ExitStack, env: str) -> None:
    """The final model is written from a copy of the weights that was made before the first step."""
    shard, save_final = Policy.shard, Policy.save_final
    copies: dict[int, tuple[Policy, list[torch.Tensor]]] = {}  # with the policy, so that no other gets its id

    def sharded(self: Policy, *args: Any) -> Any:
        copies[id(self)] = (self, [p.detach().clone() for p in self.model.parameters()])
        return shard(self, *args)

    @torch.no_grad()
    def saved(self: Policy, folder: Any) -> None:
        now = [p.detach().clone() for p in self.model.parameters()]
        for parameter, first in zip(self.model.parameters(), copies[id(self)][1], strict=True):
            parameter.copy_(first)
        try:
            save_final(self, folder)
        finally:
            for parameter, own in zip(self.model.parameters(), now, strict=True):
                parameter.copy_(own)

    put(stack, Policy, "shard", sharded)
    put(stack, Policy, "save_final", saved)
