"""A frozen base in 8 bits: each row of a matrix is whole numbers from -127 to 127, times the row's scale.

A product is computed with the whole numbers, which bfloat16 holds exactly, and its result is scaled. So trainer and engine
round alike, and nothing is rounded that was not when the matrix was stored. A copy of one matrix in the type of the input
exists while its product is computed, and none is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel


class Int8Linear(torch.nn.Linear):
    """A frozen linear layer: `weight` [out, in] is int8, and `scale` [out] float32."""

    scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device = input.device.type
        x = input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input
        y = product(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def float_weight(self) -> torch.Tensor:
        """The matrix that the layer computes with, [out, in] in float32."""
        return self.weight * self.scale[:, None]


def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x W^T in the type of `x` [..., in], where W is `weight` [out, in] int8 times `scale` [out]; with a gradient for `x`."""
    return cast(torch.Tensor, _Product.apply(x, weight, scale))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, weight.to(x.dtype)) * scale.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        (dy,) = grads
        with torch.autocast(dy.device.type, enabled=False):
            return (dy * scale.to(dy.dtype)) @ weight.to(dy.dtype), None, None


def base_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Name -> linear layer, of those that 8 bits are for: the frozen ones of the decoder's layers, its head excepted."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and not module.weight.requires_grad
    }


@torch.no_grad()
def to_int8(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Store the base of a model with an adapter in 8 bits, in place. `device`: where its matrices then are."""
    for module in base_layers(model).values():
        weight, scale = _rounded(module.weight.data.to(device, torch.float32))
        module.__class__ = Int8Linear
        module.register_buffer("scale", scale, persistent=False)
        module.weight.data = weight.to(torch.int8)


@torch.no_grad()
def round_as_int8(model: PreTrainedModel) -> None:
    """Give a model without an adapter the values that `to_int8` would store, in float32."""
    for module in base_layers(model.requires_grad_(False)).values():
        weight, scale = _rounded(module.weight.data)
        module.weight.data = weight * scale[:, None]


def _rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole numbers and the scale of each row: its largest absolute value / 127, rounded to bfloat16."""
    scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-30).bfloat16().float()
    return (weight / scale[:, None]).round_().clamp_(-127, 127), scale
