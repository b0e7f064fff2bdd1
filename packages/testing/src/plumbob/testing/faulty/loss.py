"""Faults of the loss: terms, signs, weights, ratios and masks of its own, KL terms, and normalisers of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import WITH_TOOLS, Fault, table
from plumbob.testing.faulty.helpers import turns
from plumbob.testing.faulty.sites import Site
from plumbob.trainer.policy.policy import Policy, TokenScores


def counts(inputs: Any) -> torch.Tensor:
    """[N]: number of sampled tokens of each token's row."""
    return inputs.rows.bincount()[inputs.rows]


def place(inputs: Any) -> torch.Tensor:
    """[N]: number of each token among the sampled ones of its row, from 0."""
    lengths = inputs.rows.bincount()
    return torch.arange(len(inputs.rows), device=inputs.rows.device) - (lengths.cumsum(0) - lengths)[inputs.rows]


def first_half_only(inputs: Any) -> Any:
    mine = 2 * place(inputs) < counts(inputs)
    return replace(inputs, logprobs=torch.where(mine, inputs.logprobs, inputs.logprobs.detach()))


def one_ratio_per_reply(inputs: Any) -> Any:
    ratios = inputs.logprobs - inputs.old_logprobs
    sums = ratios.new_zeros(int(inputs.rows.max()) + 1).index_add(0, inputs.rows, ratios)
    return replace(inputs, logprobs=inputs.old_logprobs + sums[inputs.rows])


def entropy_bonus(size: float) -> Callable[[Any], Any]:
    """Unlikely tokens are rewarded by `size` times their negative log-probability."""
    return lambda inputs: replace(inputs, advantages=inputs.advantages - size * inputs.logprobs.detach())


def negated(original: Any, inputs: Any, objective: Any) -> Any:
    found = original(inputs, objective)
    return replace(found, loss=-found.loss)


def results_trained(held: Any, indices: Sequence[int], run: Any) -> Any:
    """Everything after the prompt is in the loss of every row."""
    rows = [
        replace(row, loss_mask=[i >= turns(row)[0].start for i in range(len(row.loss_mask))]) if turns(row) else row
        for row in held.rows
    ]
    fresh: dict[str, Any] = {"old_logprobs": {}, "reference_logprobs": {}, "first_scores": {}}
    return replace(held, rows=rows, **fresh)


def mask_one_early(original: Any, policy: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    if torch.is_grad_enabled():
        rows = [replace(row, loss_mask=[*row.loss_mask[1:], False]) for row in rows]
    return original(policy, rows, temperature)


# Ratios and clips


def clip_of_product(original: Any, inputs: Any, objective: Any, ratio: torch.Tensor) -> Any:
    product = ratio * inputs.advantages
    gains = product.minimum(product.clamp(1 - objective.epsilon, 1 + objective.epsilon_high))
    return replace(original(inputs, objective, ratio), gains=gains)


def slipped(original: Any, trainer: torch.Tensor, engine: torch.Tensor, rows: torch.Tensor, *rest: Any) -> Any:
    """The engine's log-probabilities slip by one place for each row that is packed before."""
    places = (torch.arange(len(rows), device=rows.device) + rows).clamp(max=max(len(rows) - 1, 0))
    return original(trainer, engine[places], rows, *rest)


def old_ones_reversed(stack: ExitStack, env: str, change: None) -> None:
    """Each row's old log-probabilities are in the reverse order of its tokens."""

    def by_row(original: Any, *args: Any) -> Any:
        return {i: values.flip(0) for i, values in original(*args).items()}

    at.wrapped(stack, at.forward_backward, "_by_row", by_row)


# The KL term


def one_place_late(original: Any, policy: Any, rows: Sequence[Sample], temperature: float) -> torch.Tensor:
    parts = original(policy, rows, temperature).split([row.num_sampled for row in rows])
    return torch.cat([part.roll(-1) for part in parts])


def reference_follows(stack: ExitStack, env: str, change: None) -> None:
    """The reference policy takes over the policy's weights before each step."""
    policies: list[Policy] = []
    at.reference.install(stack, env, lambda tensors, policy: policies.append(policy))

    def begin(step: int) -> None:
        for name, tensor in policies[-1]._reference_tensors().items() if step else ():
            tensor.copy_(policies[-1].trainable[name].detach())

    at.step_begins.install(stack, env, begin)


def another_reference(tensors: dict[str, torch.Tensor], policy: Policy) -> None:
    numbers = torch.Generator().manual_seed(7)
    for tensor in tensors.values():
        noise = torch.randn(tensor.shape, generator=numbers).to(tensor)
        tensor.add_(2.0 * (tensor.std() if tensor.numel() > 1 else 0.0) * noise)


def reference_shared(tensors: dict[str, torch.Tensor], policy: Policy) -> None:
    tensors.update({name: policy.sharding.local(parameter) for name, parameter in policy.trainable.items()})


# Normalisers


def own_mean_of_each_pass(held: Any, indices: Sequence[int], run: Any) -> Any:
    """A microbatch's loss is a mean over its own rows, and the losses are added."""
    factor = len(held.mine) / max(len(indices), 1)
    return replace(held, weights=[weight * factor for weight in held.weights])


def gradients_cleared(held: Any, indices: Sequence[int], run: Any) -> Any:
    run.policy.sharding.zero_grad()
    return held


def stepped_in_each_pass(original: Any, sharding: Any, loss: torch.Tensor, *, last: bool) -> None:
    original(sharding, loss, last=last)
    if not last:
        sharding.optimizer.step()
        sharding.zero_grad()


def ratio_to_reference(inputs: Any) -> Any:
    return inputs if inputs.ref_logprobs is None else replace(inputs, old_logprobs=inputs.ref_logprobs)


# fmt: off
FAULTS = (
*table("loss",
    Fault("advantages passed as the loss mask",
          "Two arguments of the loss are exchanged, and each token's term is multiplied by its advantage once more.",
          at.loss_inputs, lambda inputs: replace(inputs, weights=inputs.weights * inputs.advantages),
          "advantages-wrong update-differs-from-settings loss-differs-from-settings no-gradient",
          "verl-project/verl#2506"),
    Fault("every row has the mean advantage of its minibatch",
          "The advantage is averaged over the minibatch before the loss, so that good and bad rollouts get the "
          "same.", at.loss_inputs,
          lambda inputs: replace(inputs, advantages=inputs.advantages.mean().expand_as(inputs.advantages)),
          "advantages-wrong update-differs-from-settings loss-differs-from-settings no-gradient",
          "PacktPublishing/Deep-Reinforcement-Learning-Hands-On#9"),
    Fault("entropy bonus out of proportion",
          "The loss has an entropy bonus, left on by a default, that outweighs the advantages.", at.loss_inputs,
          entropy_bonus(1.0),
          "advantages-wrong update-differs-from-settings policy-breaks loss-differs-from-settings",
          "verl-project/verl#781", steps=14, run_causes="policy-breaks"),
    Fault("entropy punished instead of rewarded",
          "The entropy bonus has the wrong sign, and the policy is rewarded for being certain of anything.",
          at.loss_inputs, entropy_bonus(-1.0),
          "advantages-wrong update-differs-from-settings policy-breaks loss-differs-from-settings",
          "ray-project/ray#4374, datawhalechina/joyrl#23", steps=14),
    Fault("loss negated twice", "The loss is multiplied by -1 twice, and good rollouts become less likely.", at.loss,
          negated, "update-differs-from-settings loss-differs-from-settings",
          "fla-org/flash-linear-attention#1073, KanishJebaMathewM/Truxify#11885"),
    Fault("gradient of half of each row lost",
          "Two processes share a row, and each keeps the gradient of its own half, because they are not added.",
          at.loss_inputs, first_half_only, "loss-mask-wrong", "ByteDance-Seed/VeOmni#1115"),
    Fault("fused loss without the mask of tool results",
          "The fused loss gets the mask of the completion alone, and trains tool results as if they had been "
          "sampled.", at.minibatch, results_trained, "loss-mask-wrong", "huggingface/trl#4975", WITH_TOOLS),
    Fault("sampling log-probabilities slip by one for each packed row",
          "Packing k rows loses k places of the engine's log-probabilities, so that they belong to later tokens "
          "than they should.", at.correction, slipped, "loss-differs-from-settings", "PrimeIntellect-ai/prime-rl#606",
          options="--importance-correction token_truncate", run_causes="signal-left-out engine-trainer-mismatch"),
    Fault("ratio taken against itself in every pass",
          "The importance ratio is that of the current policy to itself, also in later passes over the same "
          "rollouts.", at.loss_inputs, lambda inputs: replace(inputs, old_logprobs=inputs.logprobs.detach()),
          "loss-differs-from-settings", "xiaomi-research/time-r1#20, sidhantls/ppo_lightning#3",
          options="--num-iterations 3"),
    Fault("ratio taken against the reference policy",
          "The importance ratio compares the policy with the reference instead of the step's first weights, so "
          "that the clip removes more and more tokens.", at.loss_inputs, ratio_to_reference,
          "loss-differs-from-settings signal-left-out", "huggingface/trl#2837", options="--kl-beta 0.001", steps=16,
          only="run", run_causes="kl-too-large"),
    Fault("one ratio for a whole reply",
          "Log-probabilities are summed over a reply before the ratio is taken, which a token's bounds then clip.",
          at.loss_inputs, one_ratio_per_reply, "signal-left-out", "walkinglabs/hands-on-modern-rl#75",
          ("gsm8k", "musique", "lookup"), "--num-iterations 4", steps=8),
    Fault("clamp on the product of ratio and advantage",
          "The clamp is put around ratio times advantage and not around the ratio: large advantages lose their "
          "gradient.", at.clip, clip_of_product, "loss-differs-from-settings", "alexis-jacq/Pytorch-DPPO#3",
          options="--scale-rewards group", run_causes="signal-left-out"),
    Fault("clip bounds of GSPO with token ratios",
          "Ratios of single tokens are clipped at bounds for the mean of a reply, and later passes lose their "
          "gradient.", at.options, None, "signal-left-out", "verl-project/verl#2775, XueZeyue/DanceGRPO#47",
          options="--epsilon 0.0003 --epsilon-high 0.0004 --num-iterations 4"),
    Fault("squared log-ratio with a sign that rewards distance from the reference",
          "The squared log-ratio to the reference is subtracted from the loss, so that the KL term drives the "
          "policy away.", at.kl_beta, lambda beta: -beta, "kl-term-wrong loss-differs-from-settings",
          "marin-community/marin#1742", options="--kl-beta 0.5"),
    Fault("reference scored at another temperature",
          "Rollouts are sampled and scored at temperature 1.5, and the reference policy is scored at 1: the KL "
          "term pulls towards another temperature.", at.reference_scores,
          lambda original, policy, rows, temperature: original(policy, rows, 1.0),
          "kl-too-large temperature-not-applied", "thinking-machines-lab/tinker-cookbook#689",
          options="--temperature 1.5 --kl-beta 0.05"),
    Fault("reference scored one place late",
          "The reference model's logits are not cut at the end as the policy's are: they belong to the next token.",
          at.reference_scores, one_place_late, "loss-differs-from-settings kl-term-wrong", "unslothai/unsloth#2736",
          options="--kl-beta 0.02"),
    Fault("KL to the policy of the step before",
          "The KL term compares the policy with that of the step before, not with the one with which the run began.",
          Site("reference", reference_follows), None, "kl-term-wrong", "lucidrains/PaLM-rlhf-pytorch#41",
          options="--kl-beta 0.05", steps=8, only="run"),
    Fault("reference policy is another checkpoint",
          "The KL term pulls the policy towards another model than the one with which the run began.", at.reference,
          another_reference, "kl-too-large kl-term-wrong", "huggingface/trl#3194, huggingface/trl#1340",
          options="--kl-beta 0.5", steps=10),
    Fault("reference policy that nothing freezes",
          "The reference policy is updated with the policy, so that the KL term is always 0.", at.reference,
          reference_shared, "kl-term-wrong", "irom-princeton/dppo#47, aburkov/theLMbook#8", options="--kl-beta 0.05"),
    Fault("a mean per microbatch that nothing divides",
          "Each microbatch's loss is a mean over its own rows, and nothing divides by the number of microbatches.",
          at.minibatch, own_mean_of_each_pass, "normaliser-depends-on-microbatches", "huggingface/trl#5828",
          options="--loss-type grpo --microbatch-tokens 2048"),
    Fault("loss of every pass added and never divided",
          "With several passes per update, each one's loss is a mean, and their sum is not divided by their number.",
          at.pass_loss, lambda loss, run, held, passes: loss * passes,
          "loss-differs-from-settings normaliser-depends-on-microbatches",
          "huggingface/trl#2617, huggingface/trl#3716", options="--microbatch-tokens 2048", only="doctor"),
),
*table("gradient",
    Fault("only the last microbatch counts",
          "Gradients are set to zero before each microbatch, so that a step trains on its last microbatch only.",
          at.minibatch, gradients_cleared, "normaliser-depends-on-microbatches",
          "huggingface/trl#3021, unslothai/unsloth#3390", options="--microbatch-tokens 2048", only="doctor"),
),
*table("logprobs",
    Fault("optimizer stepped after every microbatch",
          "Gradients are not added up: each microbatch has an update of its own, with the full rate.", at.backward,
          stepped_in_each_pass, "normaliser-depends-on-microbatches schedule-hides-rate", "huggingface/trl#2618",
          options="--microbatch-tokens 2048"),
    Fault("loss mask shifted by one in the backward pass",
          "Where gradients are computed the loss mask lies one token early; without gradients it is right.",
          at.scores, mask_one_early, "loss-mask-wrong", "the review's table, huggingface/trl#6357",
          run_causes="engine-trainer-mismatch"),
    Fault("old log-probabilities reversed within rows",
          "The log-probabilities under the step's first weights are stored in the reverse order of their tokens.",
          Site("_by_row", old_ones_reversed), None, "loss-differs-from-settings",
          "the review's table, pytorch/torchtune#2934", options="--num-iterations 2", run_causes="signal-left-out"),
),
)
