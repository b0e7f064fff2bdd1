"""What every recorder of a training step measures alike: entries of trained tensors, slopes, moved log-probabilities."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from plumbob.doctor.record import TensorSample

AT_RANDOM = 48
"""Entries of each trained tensor that are drawn at random for the record."""
LARGEST, SMALL = 16, 1 << 19
"""Entries with the largest gradients, which are added of a tensor with more entries than `SMALL`: most of an embedding's are 0."""
MOVED = (0.6, -0.6, 0.05, -0.05)
"""Differences in nats of new and old log-probabilities, in turn, with which the loss is tried: beyond usual clip bounds, and
within them."""
APART = (0.5, -0.3, -0.5, 0.3, 0.1)
"""The same of the policy's and the reference's."""


class SampledTensors:
    """Entries of the trained tensors, before and after an optimizer step."""

    @torch.no_grad()
    def __init__(self, trainable: Mapping[str, torch.Tensor], optimizer: Any) -> None:
        """Called when the gradient is complete, and not yet applied."""
        self._parameters, self._optimizer = list(trainable.values()), optimizer
        gradients = [p.grad for p in self._parameters]
        norms = on_host([None if g is None else torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients])
        largest = on_host([None if g is None or g.numel() <= SMALL else _largest(g) for g in gradients])
        drawn = [at_random(name, parameter.numel()) for name, parameter in trainable.items()]
        places = [at if also is None else np.union1d(at, also) for at, also in zip(drawn, largest, strict=True)]
        self._places = [torch.from_numpy(at).to(p.device) for at, p in zip(places, self._parameters, strict=True)]
        before, chosen = entries(self._parameters, self._places), entries(gradients, self._places)
        states = [optimizer.state.get(p, {}) for p in self._parameters]
        adam = (entries([state.get(name) for state in states], self._places) for name in ("exp_avg", "exp_avg_sq"))
        moments = [None if a is None or b is None else np.stack([a, b]) for a, b in zip(*adam, strict=True)]
        options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.samples = [
            TensorSample(
                name,
                places[k],
                before=before[k],
                after=np.zeros(0, np.float32),
                gradient=chosen[k],
                gradient_norm=0.0 if norms[k] is None else float(norms[k].item()),
                learning_rate=float(options.get(id(parameter), {}).get("lr", math.nan)),
                weight_decay=float(options.get(id(parameter), {}).get("weight_decay", 0.0)),
                moments_before=moments[k],
            )
            for k, (name, parameter) in enumerate(trainable.items())
        ]

    @torch.no_grad()
    def updated(self) -> None:
        """Called when the optimizer step has been taken."""
        steps = on_host([self._optimizer.state.get(p, {}).get("step") for p in self._parameters])
        weights = entries(self._parameters, self._places)
        for sample, after, step in zip(self.samples, weights, steps, strict=True):
            sample.after = after
            sample.updates = 0 if step is None else int(step.item())


def entries(tensors: Sequence[torch.Tensor | None], places: Sequence[torch.Tensor]) -> list[Any]:
    """[W] of each flattened tensor at its places; None as it is."""
    return on_host([None if t is None else t.reshape(-1)[at] for t, at in zip(tensors, places, strict=True)])


def moved(logprobs: torch.Tensor, by: Sequence[float]) -> torch.Tensor:
    """[..., N] without a gradient: `logprobs` less the values of `by`, in turn along the last dimension."""
    return logprobs.detach() - logprobs.new_tensor(np.resize(by, logprobs.shape[-1]))


def keep_gradient(tensor: torch.Tensor, kept: list[torch.Tensor]) -> None:
    """Put a copy of the tensor's gradient into the list when it is computed.

    The hook holds nothing but the list: one that held a tensor of the graph would keep the graph for ever.
    """
    tensor.register_hook(lambda gradient: kept.append(gradient.detach().clone()))


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """The same numbers as float32."""
    return tensor.detach().float().cpu().numpy()


def on_host(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """The numbers of each tensor as `numbers` gives them, or of whole numbers as int64, flat; each None as it is.

    One transfer for all of a type and device: thousands of small ones would take a good part of a training step.
    """
    found: list[Any] = [None] * len(tensors)
    kinds: dict[Any, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for k, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor):
            kinds[tensor.device, tensor.dtype].append((k, tensor.detach()))
        elif tensor is not None:
            found[k] = np.array(tensor)
    for (_, dtype), own in kinds.items():
        whole = torch.cat([t.reshape(-1) for _, t in own]).to(torch.float32 if dtype.is_floating_point else torch.int64)
        for (k, _), part in zip(own, whole.cpu().split([t.numel() for _, t in own]), strict=True):
            found[k] = part.numpy()
    return found


@cache
def at_random(name: str, size: int) -> np.ndarray:
    """Indices of entries of a tensor that depend on its name and size alone."""
    return np.unique(np.random.default_rng(zlib.crc32(name.encode())).integers(0, size, min(AT_RANDOM, size)))


def _largest(gradient: torch.Tensor) -> torch.Tensor:
    """Where the largest entries of a flattened matrix are. They lie in the rows with the largest."""
    rows = gradient.reshape(len(gradient), -1)
    few = torch.linalg.vector_norm(rows, torch.inf, dim=1).topk(min(LARGEST, len(rows))).indices
    at = rows[few].abs().reshape(-1).topk(LARGEST).indices
    return few[at // rows.shape[1]] * rows.shape[1] + at % rows.shape[1]
