"""What every recorder of a training step measures alike: entries of trained tensors, slopes, moved log-probabilities."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from plumbob.doctor.record import TensorSample

AT_RANDOM = 48
"""Entries of each trained tensor that are drawn at random for the record."""
LARGEST = 16
"""Entries of each trained tensor with the largest gradients, which are added: most of an embedding's are 0."""
SMALL = 1 << 19
"""Most entries of a tensor that is copied to be read together with others of its shape."""
MOVED = (0.6, -0.6, 0.05, -0.05)
"""Differences in nats of new and old log-probabilities, in turn, with which the loss is tried: beyond usual clip bounds, and
within them."""
APART = (0.5, -0.3, -0.5, 0.3, 0.1)
"""The same of the policy's and the reference's."""


class SampledTensors:
    """Entries of the trained tensors, before and after an optimizer step.

    Small tensors of one shape are read together: an adapter has hundreds, and operations on each by itself would take a good part
    of a training step.
    """

    @torch.no_grad()
    def __init__(self, trainable: Mapping[str, torch.Tensor], optimizer: Any) -> None:
        """Called when the gradient is complete, and not yet applied."""
        self._parameters, self._optimizer = list(trainable.values()), optimizer
        gradients, groups = [p.grad for p in self._parameters], _alike(self._parameters)
        each = [(own, stack) for at in groups for own, stack in _stacks(gradients, at)]
        places = [_at_random(name, parameter.numel()) for name, parameter in trainable.items()]
        norms = [0.0] * len(places)
        norm = partial(torch.linalg.vector_norm, dim=(1, 2), dtype=torch.float32)
        measured = on_host([of(stack) for _, stack in each for of in (_largest, norm)])
        for (own, _), largest, lengths in zip(each, measured[::2], measured[1::2], strict=True):
            for k, also, length in zip(own, largest.reshape(len(own), -1), lengths, strict=True):
                places[k], norms[k] = np.union1d(places[k], also), float(length)
        self._sizes = [len(at) for at in places]
        self._groups = [(at, _padded([places[k] for k in at]).to(self._parameters[at[0]].device)) for at in groups]
        before, moments, chosen = self._taken(self._parameters), self._moments(), self._taken(gradients)
        options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.samples = [
            TensorSample(
                name,
                list(parameter.shape),
                places[k],
                before=before[k],
                after=np.zeros(0, np.float32),
                gradient=chosen[k],
                gradient_norm=norms[k],
                learning_rate=float(options.get(id(parameter), {}).get("lr", math.nan)),
                weight_decay=float(options.get(id(parameter), {}).get("weight_decay", 0.0)),
                moments_before=moments[k],
            )
            for k, (name, parameter) in enumerate(trainable.items())
        ]

    @torch.no_grad()
    def updated(self) -> None:
        """Called when the optimizer step has been taken."""
        steps = on_host([self._state(p).get("step") for p in self._parameters])
        after = self._taken(self._parameters)
        for sample, weights, step in zip(self.samples, after, steps, strict=True):
            sample.after = weights
            sample.updates = 0 if step is None else int(step.item())

    def _taken(self, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
        """[W] of each trained tensor, or None."""
        found: list[Any] = [None] * len(tensors)
        parts = []
        for members, at in self._groups:
            for own, stack in _stacks(tensors, members):
                here = at if len(own) == len(members) else at[[members.index(k) for k in own]]
                parts.append((own, stack.reshape(len(own), -1).gather(1, here)))
        for (own, part), values in zip(parts, on_host([part for _, part in parts]), strict=True):
            for k, of_each in zip(own, values.reshape(part.shape), strict=True):
                found[k] = of_each[: self._sizes[k]]
        return found

    def _moments(self) -> list[np.ndarray | None]:
        """[2, W] of each trained tensor: Adam's moments; None if the optimizer has none."""
        states = [self._state(p) for p in self._parameters]
        first, second = (self._taken([state.get(name) for state in states]) for name in ("exp_avg", "exp_avg_sq"))
        return [None if a is None or b is None else np.stack([a, b]) for a, b in zip(first, second, strict=True)]

    def _state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        return self._optimizer.state.get(parameter, {})


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of the tensors, those together that can be stacked without much memory."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for k, tensor in enumerate(tensors):
        groups[(tensor.shape, tensor.dtype, tensor.device) if tensor.numel() <= SMALL else k].append(k)
    return list(groups.values())


def _stacks(tensors: Sequence[torch.Tensor | None], members: Sequence[int]) -> list[tuple[list[int], torch.Tensor]]:
    """One or no (indices of those members that are no None, [members, rows, columns] of them)."""
    there = [(k, tensor) for k in members if (tensor := tensors[k]) is not None]
    if not there:
        return []
    own, first = [k for k, _ in there], there[0][1]
    stack = torch.stack([tensor for _, tensor in there]) if len(there) > 1 else first[None]
    return [(own, stack.reshape(len(own), len(first) if first.dim() else 1, -1))]


def _padded(places: Sequence[np.ndarray]) -> torch.Tensor:
    """[K, W] int64: each tensor's indices, with zeros behind the shorter ones."""
    found = np.zeros((len(places), max(map(len, places))), np.int64)
    for row, at in zip(found, places, strict=True):
        row[: len(at)] = at
    return torch.from_numpy(found)


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
            kinds[tensor.device, tensor.dtype].append((k, tensor.detach()))
        elif tensor is not None:
            found[k] = np.array(tensor)
    for (_, dtype), own in kinds.items():
        whole = torch.cat([t.reshape(-1) for _, t in own]).to(torch.float32 if dtype.is_floating_point else torch.int64)
        values, end = whole.cpu().numpy(), 0
        for k, tensor in own:
            start, end = end, end + tensor.numel()
            found[k] = values[start:end]
    return found


@cache
def _at_random(name: str, size: int) -> np.ndarray:
    """Indices of entries of a tensor that depend on its name and size alone."""
    return np.unique(np.random.default_rng(zlib.crc32(name.encode())).integers(0, size, min(AT_RANDOM, size)))


def _largest(gradients: torch.Tensor) -> torch.Tensor:
    """[K, rows, columns] -> [K, .]: where each flattened tensor's largest entries are. They lie in the rows with the largest."""
    count, rows, columns = gradients.shape
    few = torch.linalg.vector_norm(gradients, torch.inf, dim=2).topk(min(LARGEST, rows)).indices
    entries = gradients.gather(1, few[:, :, None].expand(-1, -1, columns)).abs().reshape(count, -1)
    at = entries.topk(min(LARGEST, entries.shape[1])).indices
    return few.gather(1, at // columns) * columns + at % columns
