"""What every recorder of a training step measures alike: entries of trained tensors, slopes, moved log-probabilities."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from plumbob.doctor.record import TensorSample

AT_RANDOM = 48
"""Entries of each trained tensor that are drawn at random for the record."""
LARGEST = 16
"""Entries of each trained tensor with the largest gradients, which are added: most of an embedding's are 0."""
MOVED = (0.6, -0.6, 0.05, -0.05)
"""Differences in nats of new and old log-probabilities, in turn, with which the loss is tried: beyond usual clip bounds, and
within them."""
APART = (0.5, -0.3, -0.5, 0.3, 0.1)
"""The same of the policy's and the reference's."""


class SampledTensors:
    """Entries of the trained tensors, before and after an optimizer step."""

    def __init__(self, trainable: Mapping[str, torch.Tensor], optimizer: Any) -> None:
        """Called when the gradient is complete, and not yet applied."""
        self.samples: list[TensorSample] = []
        self._trainable, self._optimizer = trainable, optimizer
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        gradients = [p.grad for p in trainable.values()]
        largest = on_host([None if g is None else _largest(g.detach()) for g in gradients])
        norms = on_host(
            [None if g is None else torch.linalg.vector_norm(g.detach(), dtype=torch.float32) for g in gradients]
        )
        places = [_at_random(name, parameter.numel()) for name, parameter in trainable.items()]
        places = [at if also is None else np.union1d(at, also) for at, also in zip(places, largest, strict=True)]
        self._at = [torch.from_numpy(at).to(p.device) for at, p in zip(places, trainable.values(), strict=True)]
        before, moments, chosen = self._weights(), self._moments(), self._taken(gradients)
        for k, (name, parameter) in enumerate(trainable.items()):
            group, norm = groups.get(id(parameter), {}), norms[k]
            self.samples.append(
                TensorSample(
                    name,
                    list(parameter.shape),
                    places[k],
                    before=before[k],
                    after=np.zeros(0, np.float32),
                    gradient=chosen[k],
                    gradient_norm=0.0 if norm is None else float(norm[0]),
                    learning_rate=float(group.get("lr", math.nan)),
                    weight_decay=float(group.get("weight_decay", 0.0)),
                    moments_before=moments[k],
                )
            )

    def updated(self) -> None:
        """Called when the optimizer step has been taken."""
        steps = on_host([self._state(p).get("step") for p in self._trainable.values()])
        for sample, after, moments, step in zip(self.samples, self._weights(), self._moments(), steps, strict=True):
            sample.after, sample.moments_after = after, moments
            sample.updates = 0 if step is None else int(step.item())

    def _taken(self, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
        """[W] of each trained tensor, or None."""
        return on_host(
            [None if t is None else t.detach().reshape(-1)[at] for t, at in zip(tensors, self._at, strict=True)]
        )

    def _weights(self) -> list[Any]:
        return self._taken(list(self._trainable.values()))

    def _moments(self) -> list[np.ndarray | None]:
        """[2, W] of each trained tensor: Adam's moments; None if the optimizer has none."""
        states = [self._state(p) for p in self._trainable.values()]
        first, second = (self._taken([state.get(name) for state in states]) for name in ("exp_avg", "exp_avg_sq"))
        return [None if a is None or b is None else np.stack([a, b]) for a, b in zip(first, second, strict=True)]

    def _state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        return self._optimizer.state.get(parameter, {})


def moved(logprobs: torch.Tensor, by: Sequence[float]) -> torch.Tensor:
    """[..., N] without a gradient: `logprobs` less the values of `by`, in turn along the last dimension."""
    return (
        logprobs.detach() - logprobs.new_tensor(by)[torch.arange(logprobs.shape[-1], device=logprobs.device) % len(by)]
    )


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
            kinds[tensor.device, tensor.is_floating_point()].append((k, tensor.detach()))
        elif tensor is not None:
            found[k] = np.array(tensor)
    for (_, floating), own in kinds.items():
        whole = torch.cat([t.reshape(-1).to(torch.float32 if floating else torch.int64) for _, t in own]).cpu().numpy()
        parts = np.split(whole, np.cumsum([t.numel() for _, t in own])[:-1])
        for (k, _), part in zip(own, parts, strict=True):
            found[k] = part
    return found


def _at_random(name: str, size: int) -> np.ndarray:
    """Indices of entries of a tensor that depend on its name and size alone."""
    return np.unique(np.random.default_rng(zlib.crc32(name.encode())).integers(0, size, min(AT_RANDOM, size)))


def _largest(gradient: torch.Tensor) -> torch.Tensor:
    """Indices of its largest entries in the flattened tensor. They lie in the rows with the largest ones."""
    rows = gradient.reshape(len(gradient) if gradient.dim() else 1, -1)
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=1)
    few = largest.topk(min(LARGEST, len(rows))).indices
    at = rows[few].abs().reshape(-1).topk(min(LARGEST, few.numel() * rows.shape[1])).indices
    return few[at // rows.shape[1]] * rows.shape[1] + at % rows.shape[1]
