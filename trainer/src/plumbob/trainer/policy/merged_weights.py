"""The weights of a model with its LoRA adapter merged in. Imports peft only for a model that has an adapter."""

from __future__ import annotations

import torch
from plumbob.trainer.distributed.model_files import in_plain_model
from transformers import PreTrainedModel


def merged_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of `model` with its adapter merged in: a plain model's names -> float32 tensors on the CPU.

    The adapter is added in float32, because rounding the sum to bfloat16 loses most of an early update: four fifths of
    an update of relative size 1e-3, and a sixth of one of relative size 1e-2.
    """
    state = {}
    for plain, tensor, layer in in_plain_model(model.state_dict(), model):
        whole = tensor.float()
        if layer is not None:
            whole = whole + layer.get_delta_weight(layer.active_adapters[0]).float()
        state[plain] = whole.detach().cpu()  # one by one: a GPU may not hold a float32 copy of all
    return state
