"""The doubles of field15_unseen.py: whoever writes rules does not read the unseen half before it has been run."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field15_seen_doubles import end_tokens, kept
from plumbob.trainer.algorithm.losses import LossInputs
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training import step as step_module

# Rows


def ends_removed(sample: Sample, trace: vf.Trace) -> Sample:
    """The end tokens of turns are missing from the row."""
    ends = end_tokens(sample)
    if len(ends) == sample.num_sampled:
        return sample
    return kept(sample, [i not in ends for i in range(len(sample.token_ids))])


def replies_twice(sample: Sample, trace: vf.Trace) -> Sample:
    """After each turn but the last its tokens stand a second time in the row, outside of the loss."""
    again = {turn[-1]: turn for turn in runs_of(sample.loss_mask)[:-1]}
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for i, token in enumerate(sample.token_ids):
        ids, mask, logprobs = [*ids, token], [*mask, sample.loss_mask[i]], [*logprobs, sample.sampling_logprobs[i]]
        if i in again:
            copied = [sample.token_ids[j] for j in again[i]]
            ids, mask, logprobs = ids + copied, mask + [False] * len(copied), logprobs + [0.0] * len(copied)
    return dataclasses.replace(sample, token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs)


PROMPT_LIMIT = 48
"""Number of tokens of the prompt that the trained row keeps."""


def prompt_cut(sample: Sample, trace: vf.Trace) -> Sample:
    """The trained row has only the last tokens of the prompt."""
    first = sample.loss_mask.index(True) if any(sample.loss_mask) else 0
    return kept(sample, [i >= first - PROMPT_LIMIT for i in range(len(sample.token_ids))])


# Loss, schedule and optimizer

ENTROPY_COEFFICIENT = 0.2
"""Coefficient of the entropy in the loss."""


def less_entropy(inputs: LossInputs) -> LossInputs:
    """The gradient also lowers the entropy, as that of plus the coefficient times the entropy in the loss does."""
    return dataclasses.replace(inputs, advantages=inputs.advantages + ENTROPY_COEFFICIENT * inputs.logprobs.detach())


def from_zero(stack: ExitStack, env: str) -> None:
    """The warm-up counts the steps from 0, so that the first one has a rate of 0."""
    original = step_module.learning_rate_of

    def learning_rate_of(kind: Any, peak: float, step: int, *, warmup: int, total: int) -> float:
        return peak * step / warmup if step < warmup else original(kind, peak, step, warmup=warmup, total=total)

    put(stack, step_module, "learning_rate_of", learning_rate_of)


LOSS_SCALE = 2.0**16
"""By what the gradients are multiplied when they are clipped: the first scale of torch's GradScaler."""


def clipped_scaled_up(stack: ExitStack, env: str) -> None:
    """Gradients are clipped while they are multiplied by the loss scale, and divided by it afterwards."""
    original = torch.nn.utils.clip_grads_with_norm_

    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *rest: Any) -> None:
        original(parameters, max_norm / LOSS_SCALE, total_norm, *rest)

    put(stack, torch.nn.utils, "clip_grads_with_norm_", clip)


def optimizer_of_other_tensors(stack: ExitStack, env: str) -> None:
    """The optimizer holds copies of the trained tensors, which the model does not compute with."""

    def make_optimizer(self: Any, make: Any, max_norm: float) -> Any:
        self._optimizer = make([p.detach().clone().requires_grad_() for p in self.trainable.values()])
        self._max_norm = max_norm
        return self._optimizer

    put(stack, Replicated, "make_optimizer", make_optimizer)


# The policy


def first_layer_alone(stack: ExitStack, env: str) -> None:
    """Trained tensors outside of the first layer get gradients of zero."""
    original = Policy.__init__

    def __init__(self: Policy, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, parameter in self.trainable.items():
            if ".layers.0." not in name:
                parameter.register_hook(torch.zeros_like)

    put(stack, Policy, "__init__", __init__)


DROPOUT = 0.1
"""Probability with which a number is dropped."""


def dropout_with_gradients(stack: ExitStack, env: str) -> None:
    """What a layer's MLP returns passes dropout where gradients are on."""
    original = Policy.__init__

    def drop(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, DROPOUT) if torch.is_grad_enabled() else output

    def __init__(self: Policy, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name, module in self.model.named_modules():
            if name.endswith(".mlp"):
                module.register_forward_hook(drop)

    put(stack, Policy, "__init__", __init__)


def head_of_its_own(stack: ExitStack, env: str) -> None:
    """The output embeddings are a tensor of their own, which begins as the input embeddings; the configuration ties them."""
    original = Policy.__init__

    def __init__(self: Policy, model: Any, *args: Any, **kwargs: Any) -> None:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        original(self, model, *args, **kwargs)

    put(stack, Policy, "__init__", __init__)


def never_frozen(stack: ExitStack, env: str) -> None:
    """The reference policy has the policy's own tensors."""
    original = Policy._placed

    def _placed(self: Policy) -> None:
        original(self)
        if self._reference is not None:
            self._reference = {name: self.sharding.local(p) for name, p in self.trainable.items()}

    put(stack, Policy, "_placed", _placed)


# The engine

PENALTY = 1.1
"""Repetition penalty of the checkpoint's generation config."""


def penalised(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Tokens that the text already has are less likely, as Hugging Face's repetition penalty makes them."""
    changed = logits.clone()
    for i, request in enumerate(requests):
        had = torch.tensor(sorted({*request.prompt.tolist(), *request.token_ids}))
        own = logits[i, had]
        changed[i, had] = torch.where(own > 0, own / PENALTY, own * PENALTY)
    return changed


BLOCK = 16
"""Prompts are padded to a multiple of this many tokens."""


def padded_right(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The prompt is followed by tokens of padding."""
    return ids + [0] * (-len(ids) % BLOCK), sampling


def under_other_names(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The engine knows none of the names, and skips all tensors."""
    return {}
