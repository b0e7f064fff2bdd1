"""Faults by which weights get no gradient, or one that is no number or turned round: in the loss or in the gradient itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import Fault, table
from plumbob.testing.faulty.sites import Site, lot, since
from plumbob.trainer.policy.policy import Policy, TokenScores


def of_each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Each gradient is `change(gradient)` after the last backward pass of an update."""

    def backward(original: Any, sharding: Any, loss: torch.Tensor, *, last: bool) -> None:
        original(sharding, loss, last=last)
        for parameter in sharding.trainable.values() if last else ():
            if parameter.grad is not None:
                parameter.grad.copy_(change(parameter.grad))

    return backward


def clipped_to_minus_one(sharding: Any) -> None:
    found = [p.grad for p in sharding.trainable.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(found)
    for gradient in found:
        gradient.mul_(-1.0 / (norm + 1e-6))


def detached(original: Any, policy: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    found = original(policy, rows, temperature)
    return TokenScores(found.logprobs.detach(), found.entropies)


def first_rank_alone(original: Any, policy: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    """The rows of the second of two ranks give no gradient."""
    found = original(policy, rows, temperature)
    first = torch.tensor([lot(row.token_ids, 2) == 0 for row in rows for _ in range(row.num_sampled)])
    logprobs = found.logprobs
    return TokenScores(torch.where(first.bool().to(logprobs.device), logprobs, logprobs.detach()), found.entropies)


def first_layer_alone(stack: ExitStack, env: str, change: None) -> None:
    """Only the weights of the first layer get their gradient."""

    def init(original: Any, self: Policy, *args: Any, **how: Any) -> None:
        original(self, *args, **how)
        for name, parameter in self.trainable.items():
            if ".layers.0." not in name:
                parameter.register_hook(torch.zeros_like)

    at.wrapped(stack, Policy, "__init__", init)


def first_correction_nan(inputs: Any) -> Any:
    corrections = inputs.corrections.clone()
    corrections[:1] = math.nan
    return replace(inputs, corrections=corrections)


def both_sides_zero(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.zero_()


def exploding(loss: torch.Tensor, run: Any, held: Any, passes: int) -> torch.Tensor:
    late = run.state.step - 8
    return loss * 300.0 * 10.0**late if late >= 0 else loss


# fmt: off
FAULTS = (
*table("gradient",
    Fault("gradients of half of the ranks never added",
          "A setting of the sharding switches the sum of gradients off, so that the rows of the other ranks train "
          "nothing.", at.scores, first_rank_alone, "no-gradient loss-mask-wrong", "verl-project/verl#7493"),
    Fault("gradient in the first layer's adapters alone",
          "The sharding ends the backward pass early: only the adapters of one layer get a gradient.",
          Site("__init__", first_layer_alone), None, "no-gradient",
          "meta-pytorch/torchforge#592, locuslab/open-unlearning#178", options="--peft"),
    Fault("adapter of zeros on both sides",
          "Both matrices of the adapter are zero at first, and each multiplies the gradient of the other.",
          at.adapter_made, both_sides_zero, "no-gradient update-differs-from-settings",
          "nvidia-cosmos/cosmos-predict2.5#15, Lightning-AI/litgpt#1229", options="--peft"),
    Fault("alpha of one at rank 64",
          "The adapter's output is multiplied by a 64th, because alpha was left at one when the rank was raised.",
          at.options, None, "learning-rate-too-low no-gradient", "bmaltais/kohya_ss#1511",
          options="--peft --lora-r 64 --lora-alpha 1"),
    Fault("adapter gradients lost in recomputation",
          "What the adapter needs is not there when activations are computed again: its gradients are zeros.",
          at.backward, of_each(torch.zeros_like), "no-gradient", "huggingface/peft#2826",
          options="--peft --gradient-checkpointing", run_causes="update-differs-from-settings"),
    Fault("gradients underflow in half precision",
          "The loss scale has been lowered to a thousandth, and in half precision most of the gradient is zero.",
          at.backward, of_each(lambda gradient: (gradient * 2.0**-10).half().float() * 2.0**10),
          "learning-rate-too-low no-gradient update-differs-from-settings",
          "engichang1467/Open-Rig3R#35, warner-benjamin/optimi#15", run_causes="schedule-hides-rate"),
),
*table("loss",
    Fault("no gradient through a reentrant checkpoint",
          "With gradient checkpointing no input of a layer of the frozen model has a gradient, and so the adapter "
          "gets none.", at.scores, detached, "no-gradient", "microsoft/LoRA#120, cloneofsimo/lora#26",
          options="--peft"),
    Fault("policy term without a gradient",
          "The importance ratio is exp(0), a constant: only the KL term has a gradient, and no reward reaches the "
          "weights.", at.loss_inputs, lambda inputs: replace(inputs, advantages=torch.zeros_like(inputs.advantages)),
          "update-differs-from-settings no-gradient", "Goekdeniz-Guelmez/mlx-lm-lora#55", options="--kl-beta 0.02",
          steps=10, run_causes="kl-too-large learning-rate-too-low"),
    Fault("NaN at a masked position",
          "The log-probability at a place outside the loss is NaN, and zero times NaN is NaN in every update.",
          at.loss_inputs, first_correction_nan, "not-finite", "OpenRLHF/OpenRLHF#1240, areal-project/AReaL#1347"),
    Fault("KL coefficient that becomes infinite",
          "A controller divides by a horizon of 0, and from the second step on the coefficient is minus infinity.",
          since(1, at.kl_beta), lambda beta: -math.inf, "not-finite", "OpenRLHF/OpenRLHF#1289",
          options="--kl-beta 0.01", only="run"),
    Fault("gradient explodes in the middle of the run",
          "From the ninth step on the gradient is 300 times, then 3000 times as large, and ever larger.",
          at.pass_loss, exploding, "policy-breaks", "huggingface/trl#3015, OpenRLHF/OpenRLHF#1335", steps=12,
          only="run"),
),
*table("advantages",
    Fault("None of a reward becomes NaN",
          "A reward function has no value for some tasks, and None becomes NaN among the numbers.", at.reward,
          lambda own, task, trace: math.nan if lot(task.data.prompt, 3) == 0 else own, "not-finite",
          "modelscope/ms-swift#8125, modelscope/ms-swift#8123"),
),
*table("optimizer",
    Fault("gradients clipped to a norm of minus one",
          "A bound of -1, meant to turn clipping off, multiplies every gradient by a negative number.", at.gradients,
          clipped_to_minus_one, "update-differs-from-settings loss-differs-from-settings",
          "strands-labs/robots#2028"),
),
)
