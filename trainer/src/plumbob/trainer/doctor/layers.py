"""Does the gradient reach every layer?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

_LAYER = re.compile(r"^.*?\.\d+(?=\.)")


def layers_without_gradient(trained: Iterable[str], gradient: Mapping[str, torch.Tensor]) -> tuple[list[str], int]:
    """(layers none of whose trained tensors has a gradient other than 0, number of layers).

    `trained`: names of all trained tensors. `gradient`: those that have one. A layer is what is before the first number in a
    tensor's name, with the number, as in "model.layers.3"; tensors outside layers, such as embeddings, are left out. An
    adapter's first matrices have no gradient before its second ones have moved, which is why layers are looked at, and not
    tensors.
    """
    reached: dict[str, bool] = {}
    for name in trained:
        if (layer := _LAYER.match(name)) is not None:
            own = gradient.get(name)
            reached[layer[0]] = reached.get(layer[0], False) or (own is not None and bool((own != 0).any()))
    return [layer for layer, reaches in reached.items() if not reaches], len(reached)
