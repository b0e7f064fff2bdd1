"""Rows of a step -> forward and backward passes of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows for each pass: at most `max_tokens` tokens; a longer row goes alone.

    First-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973): at most 11/9 of the fewest passes, plus
    one. Every row is in exactly one pass, and the result depends on nothing but the arguments. The longest rows come
    first, so that a pass that does not fit into memory fails at the start and not after an hour.
    """
    passes: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for p, free in enumerate(room):
            if lengths[i] <= free:
                passes[p].append(i)
                room[p] -= lengths[i]
                break
        else:
            passes.append([i])
            room.append(max_tokens - lengths[i])
    return passes


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy from the CPU that waits for nothing.

    An ordinary copy to a GPU waits until all that was queued before is done, and the GPU then waits for the next kernel:
    a few of them in each pass cost a tenth of a step.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
