"""Faults of the optimizer: its rate and schedule, its state, the tensors that it holds, and the weights between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import Fault, table
from plumbob.testing.faulty.sites import Site
from plumbob.trainer.policy import loading
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training import step as step_module


def step_as(other: Callable[..., float]) -> Callable[..., float]:
    """The rate of the step `other(step, warmup, total)`."""
    return lambda original, kind, peak, step, *, warmup, total: original(
        kind, peak, other(step, warmup, total), warmup=warmup, total=total
    )


def times(factor: Callable[[int], float]) -> Callable[..., float]:
    """The rate times `factor(step)`."""
    return lambda original, kind, peak, step, **how: original(kind, peak, step, **how) * factor(step)


def decay_of_four_steps(original: Any, kind: Any, peak: float, step: int, *, warmup: int, total: int) -> float:
    return max(original(kind, peak, min(step, warmup + 4), warmup=warmup, total=warmup + 4), 0.025 * peak)


def warmup_from_zero(original: Any, kind: Any, peak: float, step: int, *, warmup: int, total: int) -> float:
    return peak * step / warmup if step < warmup else original(kind, peak, step, warmup=warmup, total=total)


# Updates


def updated_twice(original: Any, sharding: Any) -> float:
    norm = original(sharding)
    sharding.optimizer.step()
    return norm


def rounded(original: Any, sharding: Any) -> float:
    norm = original(sharding)
    in_bf16(sharding.trainable.values())
    return norm


@torch.no_grad()
def in_bf16(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.bfloat16().float())


def loaded_in_bf16(stack: ExitStack, env: str, change: None) -> None:
    """The model has weights in bfloat16, so that rounding changes nothing before the first update."""
    original = loading.load_model

    def load_model(*args: Any, **how: Any) -> Any:
        model = original(*args, **how)
        in_bf16(model.parameters())
        return model

    at.everywhere(stack, original, load_model)


def large_epsilon(sharding: Any) -> None:
    for group in sharding.optimizer.param_groups:
        group["eps"] = 0.1


def of_copies(original: Any, sharding: Any, make: Any, max_norm: float) -> Any:
    return original(sharding, lambda tensors: make([t.detach().clone().requires_grad_() for t in tensors]), max_norm)


def begun_anew_at(step: int, of: Callable[[str], bool]) -> Callable[[ExitStack, str, Any], None]:
    """Before this training step, from 0, the trained weights of these names are those of the run's start again."""

    def install(stack: ExitStack, env: str, change: None) -> None:
        def sync_weights(original: Any, policy: Any, *args: Any, **how: Any) -> Any:
            syncs.append(True)
            if len(syncs) == step:
                with torch.no_grad():
                    for name, value in first.items():
                        policy.trainable[name].copy_(value)
            return original(policy, *args, **how)

        def shard(original: Any, self: Policy, *args: Any, **how: Any) -> Any:
            found = original(self, *args, **how)
            first.update({n: t.detach().clone() for n, t in self.trainable.items() if of(n)})
            return found

        first: dict[str, torch.Tensor] = {}
        syncs: list[bool] = []
        at.wrapped(stack, Policy, "shard", shard)
        at.wrapped(stack, step_module, "sync_weights", sync_weights)

    return install


def half_of_tensors(original: Any, sharding: Any, make: Any, max_norm: float) -> Any:
    return original(sharding, lambda tensors: make(list(tensors)[::2]), max_norm)


# fmt: off
FAULTS = (
*table("optimizer",
    Fault("adapter trained at a millionth",
          "An adapter is trained at the learning rate of full training, and the reward stays where it was.",
          at.options, None, "learning-rate-too-low", "dhcode-cpp/X-R1#66", options="--peft --lr 1e-6"),
    Fault("rate a hundred times the usual one",
          "The learning rate is a hundred times what the model needs, and the reward jumps up and down and falls.",
          at.options, None, "learning-rate-too-high", "huggingface/open-r1#403, yifan123/flow_grpo#204",
          options="--learning-rate 0.03", run_causes="policy-breaks"),
    Fault("weight decay of a hundred",
          "Each step shrinks all weights by a hundred learning rates, whatever the gradient is.", at.options, None,
          "update-differs-from-settings learning-rate-too-high schedule-hides-rate", "modelscope/ms-swift#3931",
          options="--weight-decay 100", steps=12, run_causes="policy-breaks"),
    Fault("warm-up of four hundred steps",
          "The warm-up has more steps than the run, whose number of steps was given in epochs.", at.options, None,
          "learning-rate-too-low", "Lightning-AI/pytorch-lightning#18570", options="--warmup-steps 400"),
    Fault("custom scheduler that sets the default rate of Adam",
          "Where a scheduler is given, it is made without the run's learning rate, and sets Adam's default of "
          "0.001.", at.rate, lambda original, kind, peak, step, **how: 1e-3, "schedule-hides-rate",
          "SPOClab-ca/dn3#6", options="--lr-scheduler-type constant", run_causes="learning-rate-too-high"),
    Fault("scheduler steps once per microbatch and ends early",
          "The learning-rate schedule advances four steps in each training step, and is at 0 after a quarter of "
          "the run.", at.rate, step_as(lambda step, warmup, total: 4 * step),
          "learning-rate-too-low schedule-hides-rate", "huggingface/accelerate#2926, #2142, jzhang38/EasyContext#21",
          steps=16, only="run"),
    Fault("learning rate thirty times too high after a resume",
          "From the ninth step on the optimizer uses another scheduler's maximum, thirty times the rate.", at.rate,
          times(lambda step: 30.0 if step >= 8 else 1.0), "learning-rate-too-high schedule-hides-rate",
          "huggingface/accelerate#2124, deepspeedai/DeepSpeed#7303", steps=14, only="run",
          run_causes="policy-breaks"),
    Fault("cosine decay of four steps whatever the length of the run",
          "The decay has a length of its own and ends early in a longer run, whose other steps have hardly any "
          "learning rate.", at.rate, decay_of_four_steps, "schedule-hides-rate", "huggingface/lerobot#2558",
          options="--lr-scheduler-type cosine", steps=10, run_causes="learning-rate-too-low"),
    Fault("warm-up whose first step has no rate",
          "The warm-up counts from 0, so that the first step's rollouts are sampled and trained on with a rate of "
          "0.", at.rate, warmup_from_zero, "update-differs-from-settings schedule-hides-rate",
          "pytorch/torchtitan#1261", options="--warmup-steps 2", steps=8),
    Fault("each update taken twice",
          "The wrapper takes an optimizer step in its backward pass, and the training loop takes a second one.",
          at.update, updated_twice, "learning-rate-too-high schedule-hides-rate",
          "huggingface/transformers#45656, PKU-YuanGroup/Helios#130", steps=8),
    Fault("optimizer's epsilon of a tenth",
          "Adam's epsilon is 0.1, far above the gradients' size, and updates are a hundredth of the learning rate.",
          at.gradients, large_epsilon, "update-differs-from-settings learning-rate-too-low schedule-hides-rate",
          "marin-community/marin#5250, okoge-kaz/llm-recipes#8", steps=10),
    Fault("optimizer state lost at every step",
          "The optimizer is made anew for each step, so that Adam's update is the sign of one noisy gradient.",
          at.gradients, lambda sharding: sharding.optimizer.state.clear(),
          "learning-rate-too-high update-differs-from-settings schedule-hides-rate",
          "OpenPipe/ART#72, NVIDIA-NeMo/RL#3171", steps=14, only="run"),
    Fault("optimizer holds parameters from before they were flattened",
          "The optimizer was made with the parameters that sharding has since replaced, and updates those.",
          at.optimizer, of_copies, "update-differs-from-settings", "huggingface/accelerate#3256"),
    Fault("half of the layers in no optimizer group",
          "The optimizer's groups are chosen by name, and half of the trained tensors are in none of them.",
          at.optimizer, half_of_tensors, "update-differs-from-settings", "ACEsuit/mace#1529, huggingface/peft#3499"),
    Fault("AdamW directly on bfloat16 weights",
          "The weights are loaded in bfloat16 and the optimizer updates them there, where a small update rounds "
          "to nothing.", at.update, rounded, "update-differs-from-settings", "NVIDIA-NeMo/Automodel#3444",
          options="--learning-rate 5e-5", also=((Site("load_model", loaded_in_bf16), None),)),
    Fault("initial weights come back after a resume",
          "From the eleventh step on the run goes on from the initial weights, because a resume discards the "
          "trained ones.", Site("sync_weights", begun_anew_at(10, lambda name: True)), None,
          "saved-model-differs update-differs-from-settings", "huggingface/lerobot#3459, unslothai/unsloth#2451",
          steps=14, only="run"),
),
*table("gradient",
    Fault("gradients never set to zero", "The training loop has no call that clears the gradients.", at.zero_grad,
          lambda original, sharding: None, "update-differs-from-settings", "huggingface/trl#149", steps=12),
),
)
