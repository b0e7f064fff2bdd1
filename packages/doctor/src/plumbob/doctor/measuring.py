"""What every recorder of a training step measures alike: entries of trained tensors, slopes, moved log-probabilities."""

from __future__ import annotations

import math
import zlib
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
        self._trainable, self._optimizer, self._at = trainable, optimizer, list[torch.Tensor]()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in trainable.items():
            gradient = None if parameter.grad is None else parameter.grad.detach().reshape(-1)
            at = _entries(name, parameter.numel(), gradient)
            group = groups.get(id(parameter), {})
            self._at.append(at)
            self.samples.append(
                TensorSample(
                    name,
                    list(parameter.shape),
                    at.cpu().numpy(),
                    before=numbers(parameter.detach().reshape(-1)[at]),
                    after=np.zeros(0, np.float32),
                    gradient=None if gradient is None else numbers(gradient[at]),
                    gradient_norm=0.0 if gradient is None else gradient.float().norm().item(),
                    learning_rate=float(group.get("lr", math.nan)),
                    weight_decay=float(group.get("weight_decay", 0.0)),
                    moments_before=_moments(self._state(parameter), at),
                )
            )

    def updated(self) -> None:
        """Called when the optimizer step has been taken."""
        for sample, at in zip(self.samples, self._at, strict=True):
            parameter = self._trainable[sample.name]
            state = self._state(parameter)
            sample.after = numbers(parameter.detach().reshape(-1)[at])
            sample.moments_after = _moments(state, at)
            sample.updates = int(state.get("step", 0))

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


def _entries(name: str, size: int, gradient: torch.Tensor | None) -> torch.Tensor:
    """Indices of the entries of a tensor that are recorded; those drawn at random depend on its name and size alone."""
    random = np.random.default_rng(zlib.crc32(name.encode())).integers(0, size, min(AT_RANDOM, size))
    at = torch.from_numpy(np.unique(random)).to("cpu" if gradient is None else gradient.device)
    if gradient is None:
        return at
    return torch.cat([at, gradient.abs().topk(min(LARGEST, size)).indices]).unique()


def _moments(state: Mapping[str, Any], at: torch.Tensor) -> np.ndarray | None:
    """[2, W]: Adam's moments of these entries; None if the optimizer has none."""
    if "exp_avg" not in state or "exp_avg_sq" not in state:
        return None
    return np.stack([numbers(state[name].reshape(-1)[at]) for name in ("exp_avg", "exp_avg_sq")])
