"""What else than the trained weights a model may hold: an engine after a weight sync, or a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from plumbob.doctor.explain.loop import Condition, nearest
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


Predictions = Iterator[tuple[str, np.ndarray]]


def _old(case: WeightsCase) -> Predictions:
    yield "the weights before the change", case.under(case.old)
    for part in (0.5, 2.0):
        mixed = {n: case.old[n] + part * (w - case.old[n]) for n, w in case.new.items()}
        yield f"{part:g} times the change", case.under(mixed)


def _scale(case: WeightsCase) -> Predictions:
    if not case.plain.settings.adapter:
        return
    yield "no adapter", case.under(case.new, 0.0)
    value, predicted = nearest([2.0**k for k in range(-6, 7)], lambda s: case.under(case.new, s), case.observed)
    yield f"{value:.3g} times the adapter", predicted


def _rounded(case: WeightsCase) -> Predictions:
    yield "weights rounded to bfloat16", case.under({n: w.bfloat16().float() for n, w in case.new.items()})
    if not case.plain.settings.adapter:
        return
    given = {plain_name(n): w for n, w in case.new.items()}
    own, factor = case.plain.model, case.plain.settings.lora_alpha / case.plain.settings.lora_rank
    merged = {}
    for name, a in given.items():
        if name.endswith(".lora_A"):
            module = name.removesuffix(".lora_A")
            weight = own.get_submodule(module).weight.data.float()
            merged[f"{module}.weight"] = (
                (weight + factor * given[f"{module}.lora_B"].float() @ a.float()).bfloat16().float()
            )
    yield "an adapter that is merged in bfloat16", case.under(merged)


def _parts(case: WeightsCase) -> Predictions:
    """Some tensors are old."""
    kinds: dict[str, list[str]] = {}
    for name in case.new:
        plain = plain_name(name)
        module = plain.removesuffix(".weight").removesuffix(".bias").removesuffix(".lora_A").removesuffix(".lora_B")
        pieces = module.split(".")
        kinds.setdefault(pieces[-1], []).append(name)
        kinds.setdefault(plain, []).append(name)
        layer = next((i for i, piece in enumerate(pieces) if piece.isdigit()), None)
        if layer is not None:
            kinds.setdefault(".".join(pieces[: layer + 1]), []).append(name)
            kinds.setdefault(module, []).append(name)
        if plain.endswith((".lora_A", ".lora_B")):
            kinds.setdefault(plain.rsplit(".", 1)[1], []).append(name)
    for kind, names in kinds.items():
        if len(names) < len(case.new):
            yield f"old weights of {kind}", case.under({**case.new, **{n: case.old[n] for n in names}})


CONDITIONS = (
    Condition("weights-not-synced", _old),
    Condition("adapter-scale-differs", _scale),
    Condition("weights-not-synced", _rounded),
    Condition("weights-not-synced", _parts),
)
