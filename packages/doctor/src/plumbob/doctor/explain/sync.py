"""What else than the trained weights a model may hold: an engine after a weight sync, or a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from plumbob.doctor.explain.loop import Conditions, nearest
from plumbob.doctor.reference.model import Plain, plain_name

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class WeightsCase:
    """Log-probabilities under weights that should be those that were trained."""

    plain: Plain
    old: Weights
    """The trained tensors before a known change, by the trainer's names."""
    new: Weights
    observed: np.ndarray
    score: Callable[[], np.ndarray]
    """The plain model's log-probabilities of the same tokens, with the weights that it has when it is called."""

    def under(self, weights: Weights, scale: float = 1.0) -> np.ndarray:
        with self.plain.having(weights, scale):
            return self.score()


def conditions(case: WeightsCase) -> Conditions:
    cause = "weights-not-synced"
    yield cause, "the weights before the change", case.under(case.old)
    if case.plain.settings.adapter:
        yield "adapter-scale-differs", "no adapter", case.under(case.new, 0.0)
        value, predicted = nearest([2.0**k for k in range(-6, 7)], lambda s: case.under(case.new, s), case.observed)
        yield "adapter-scale-differs", f"{value:.3g} times the adapter", predicted
    yield cause, "weights rounded to bfloat16", case.under({n: w.bfloat16().float() for n, w in case.new.items()})
    kinds: dict[str, list[str]] = {}
    for name in case.new:
        plain = plain_name(name)
        module = re.sub(r"\.(weight|bias|lora_A|lora_B)$", "", plain)
        layer = re.match(r".*?\.\d+(?=\.)", plain)
        for kind in {plain, module, module.rpartition(".")[2], layer[0] if layer else plain}:
            kinds.setdefault(kind, []).append(name)
    for kind, names in kinds.items():
        if len(names) < len(case.new):
            yield cause, f"old weights of {kind}", case.under({**case.new, **{n: case.old[n] for n in names}})
