"""LoRA with peft's layers and files, and a forward pass that moves less memory than peft's.

Only runs with --peft import this module, because importing peft takes about a second.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
from torch.nn import functional
from transformers import PreTrainedModel


class LeanLoraLinear(PeftLinear):
    """peft's LoRA layer, but without dropout it computes x W^T + b + s (x A^T) B^T with fewer passes over memory.

    peft casts x to the adapter's float32, although autocast casts it straight back, and applies the scale to the wide
    side of the product. These are three more passes over activations forward and four backward, which take more time
    than the adapter's arithmetic. Here x keeps its type, and the scale is applied to the [T, r] side.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        name = None if args or kwargs else self._only_plain_adapter()
        if name is None:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x)
        a, b = cast(Any, self.lora_A[name]).weight, cast(Any, self.lora_B[name]).weight
        return result + functional.linear(functional.linear(x, a) * self.scaling[name], b).to(result.dtype)

    def _only_plain_adapter(self) -> str | None:
        """The adapter's name, if there is exactly one that is active, unmerged, without dropout and of no variant."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        name = self.active_adapters[0]
        if name not in self.lora_A or name in self.lora_variant or self.lora_A[name].bias is not None:
            return None
        dropout = self.lora_dropout[name]
        plain = isinstance(dropout, torch.nn.Identity) or not dropout.training
        return name if plain and self.lora_B[name].bias is None else None


def add_lora(model: PreTrainedModel, config: TrainConfig) -> None:
    """Add the configured LoRA adapter to `model`, and freeze all other weights.

    Raises UserError if --lora-targets names a module that the model does not have.
    """
    model.add_adapter(
        LoraConfig(
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=_targets(model, config.lora_targets),
        )
    )
    for module in model.modules():
        if type(module) is PeftLinear:
            module.__class__ = LeanLoraLinear


def _targets(model: PreTrainedModel, names: str) -> list[str]:
    """The module names that --lora-targets means. Raises UserError if the model lacks one of them."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    head = model.get_output_embeddings()
    have = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    if wanted == ["all-linear"]:
        return sorted(have)
    missing = [name for name in wanted if name not in have]
    if missing or not wanted:
        named = ", ".join(missing) or "nothing"
        raise UserError(f"--lora-targets names no module of this model: {named}; choose from {', '.join(sorted(have))}")
    return wanted
