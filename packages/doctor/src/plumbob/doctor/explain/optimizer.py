"""What would give other weights after the same gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from plumbob.doctor.explain.loop import Conditions, factor, slices, still
from plumbob.doctor.record import Settings
from plumbob.doctor.reference.optimizer import Moments, clipping, rate

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class How:
    """How an update may differ from AdamW with the settings."""

    lr: float = 1.0
    """Factor of the rate."""
    coupled: bool = False
    """Weight decay is added to the gradient: Adam with L2."""
    forgets: bool = False
    """Moments are 0 before each update."""
    sign: float = 1.0
    """Factor of the gradient."""
    only: int = -1
    """The only update whose rate is not 0; -1: all."""
    times: int = 1
    """How often each update is taken."""
    rounds: bool = False
    """Weights are rounded to bfloat16 after each update."""


@dataclass(frozen=True)
class UpdateCase:
    """The change of some entries of weights over one or more updates."""

    before: Tensors
    gradients: Sequence[Tensors]
    """Of each update, before clipping."""
    norms: Sequence[float]
    steps: Sequence[int]
    """The training step of each update."""
    settings: Settings
    observed: np.ndarray
    """[E] change of all entries, tensor by tensor."""
    moments: Mapping[str, Moments]

    def change(self, how: How = How(), settings: Settings | None = None) -> np.ndarray:
        """[E] the change under these conditions."""
        s = settings or self.settings
        found = []
        for name, start in self.before.items():
            w, m = start.astype(float), self.moments[name]
            for k, (own, norm, step) in enumerate(zip(self.gradients, self.norms, self.steps, strict=True)):
                lr = how.lr * (how.only in (-1, k)) * rate(s, step)
                g = how.sign * own[name].astype(float) * clipping(s, norm)
                for _ in range(how.times):
                    w, m = _update(w, g, Moments(m.first * 0, m.second * 0) if how.forgets else m, lr, how, s)
                    w = torch.from_numpy(w).bfloat16().double().numpy() if how.rounds else w
            found.append(w - start)
        return np.concatenate(found)


def _update(w: np.ndarray, g: np.ndarray, m: Moments, lr: float, how: How, s: Settings) -> tuple[np.ndarray, Moments]:
    g = g + s.weight_decay * w if how.coupled else g
    k = m.updates + 1
    first, second = s.beta1 * m.first + (1 - s.beta1) * g, s.beta2 * m.second + (1 - s.beta2) * g**2
    decayed = w if how.coupled else w * (1 - lr * s.weight_decay)
    step = first / (1 - s.beta1**k) / (np.sqrt(second / (1 - s.beta2**k)) + s.epsilon_adam)
    return decayed - lr * step, Moments(first, second, k)


OTHERWISE = {
    "weights rounded to bfloat16 after each update": How(rounds=True),
    "weight decay that is added to the gradient": How(coupled=True),
    "moments that are forgotten before each update": How(forgets=True),
    "an update against the descent": How(sign=-1.0),
    "each update taken twice": How(times=2),
}
OTHER_SETTINGS: dict[str, dict[str, float]] = {
    "no clipping of the gradient": {"max_norm": 0.0},
    "no weight decay": {"weight_decay": 0.0},
    "a beta1 of 0": {"beta1": 0.0},
    **{f"Adam's epsilon of {e:g}": {"epsilon_adam": e} for e in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)},
}


def conditions(case: UpdateCase) -> Conditions:
    cause, right = "update-differs-from-settings", case.change()
    yield cause, "no change", np.zeros(len(case.observed))
    names, predicted = still(case.observed, right, slices(case.before))
    if names:
        yield cause, f"no change of {len(names)} of {len(case.before)} tensors, such as {names[0]}", predicted
    for what, how in OTHERWISE.items():
        yield cause, what, case.change(how)
    for what, changes in OTHER_SETTINGS.items():
        yield cause, what, case.change(settings=dataclasses.replace(case.settings, **changes))
    cause, count = "schedule-hides-rate", len(case.gradients)
    if count > 1:  # each update by itself: the change is linear in their rates
        alone = np.stack([case.change(How(only=k)) for k in range(count)], 1)
        rates, *_ = np.linalg.lstsq(alone, case.observed, rcond=None)
        told = ", ".join(f"{r:.3g}" for r in rates)
        yield cause, f"{told} times the learning rate in {count} updates", alone @ rates
    by = factor(case.observed, right)
    if math.isfinite(by) and by > 1e-6:
        yield cause, f"{by:.3g} times the learning rate", case.change(How(lr=by))
