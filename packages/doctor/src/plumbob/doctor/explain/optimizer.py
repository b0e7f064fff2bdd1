"""What would give other weights after the same gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from plumbob.doctor.explain.loop import Condition, factor, slices, still
from plumbob.doctor.record import Settings
from plumbob.doctor.reference.optimizer import Moments, clipping, rate

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class How:
    """How an update may differ from AdamW with the settings."""

    lr: float = 1.0
    """Factor of the rate."""
    ahead: int = 0
    """The rate of so many steps later."""
    clip: str = "norm"
    """"norm", "tensor" (each tensor by itself) or "value"."""
    coupled: bool = False
    """Weight decay is added to the gradient: Adam with L2."""
    unbiased: bool = True
    """Whether moments are corrected for their beginning at 0."""
    forgets: bool = False
    """Moments are 0 before each update."""
    kind: str = "adam"
    """"adam", "sgd", "sign" or "ascent"."""
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
                gradient = own[name].astype(float)
                lr = how.lr * (how.only in (-1, k)) * rate(s, step + how.ahead)
                g = gradient * _clip(how, s, norm, gradient)
                for _ in range(how.times):
                    w, m = _update(w, g, Moments(m.first * 0, m.second * 0) if how.forgets else m, lr, how, s)
                    w = torch.from_numpy(w).bfloat16().double().numpy() if how.rounds else w
            found.append(w - start)
        return np.concatenate(found)


def _clip(how: How, s: Settings, norm: float, gradient: np.ndarray) -> float | np.ndarray:
    if how.clip == "tensor":
        return clipping(s, float(np.linalg.norm(gradient)))
    if how.clip == "value" and s.max_norm:
        return np.minimum(1.0, s.max_norm / np.maximum(np.abs(gradient), 1e-30))
    return clipping(s, norm)


def _update(w: np.ndarray, g: np.ndarray, m: Moments, lr: float, how: How, s: Settings) -> tuple[np.ndarray, Moments]:
    if how.kind == "sgd":
        return w - lr * g, m
    if how.kind == "sign":
        return w - lr * np.sign(g), m
    g = -g if how.kind == "ascent" else g
    g = g + s.weight_decay * w if how.coupled else g
    k = m.updates + 1
    first, second = s.beta1 * m.first + (1 - s.beta1) * g, s.beta2 * m.second + (1 - s.beta2) * g**2
    a, b = (1 - s.beta1**k, 1 - s.beta2**k) if how.unbiased else (1.0, 1.0)
    decayed = w if how.coupled else w * (1 - lr * s.weight_decay)
    return decayed - lr * (first / a) / (np.sqrt(second / b) + s.epsilon_adam), Moments(first, second, k)


Predictions = Iterator[tuple[str, np.ndarray]]


def _rates(case: UpdateCase) -> Predictions:
    right = case.change()
    for ahead in (-1, 1):
        yield f"the rate of the step {'before' if ahead < 0 else 'after'}", case.change(How(ahead=ahead))
    for schedule in ("constant", "linear", "cosine"):
        for what, changes in (
            (f"the schedule {schedule}", {}),
            (f"the schedule {schedule}, no warm-up", {"warmup": 0}),
        ):
            other = dataclasses.replace(case.settings, schedule=schedule, **changes)
            yield what, case.change(settings=other)
    count = len(case.gradients)
    if count > 1:  # each update by itself: the change is linear in their rates
        alone = np.stack([case.change(How(only=k)) for k in range(count)], 1)
        rates, *_ = np.linalg.lstsq(alone, case.observed, rcond=None)
        yield f"{', '.join(f'{r:.3g}' for r in rates)} times the learning rate in {count} updates", alone @ rates
    by = factor(case.observed, right)
    if math.isfinite(by) and by > 1e-6:
        yield f"{by:.3g} times the learning rate", case.change(How(lr=by))


def _nothing(case: UpdateCase) -> Predictions:
    yield "no change", np.zeros(len(case.observed))
    names, predicted = still(case.observed, case.change(), slices(case.before))
    if names:
        yield f"no change of {len(names)} of {len(case.before)} tensors, such as {names[0]}", predicted


def _others(case: UpdateCase) -> Predictions:
    s = case.settings
    for what, how in (
        ("weights rounded to bfloat16 after each update", How(rounds=True)),
        ("each tensor's gradient clipped by itself", How(clip="tensor")),
        ("each entry of the gradient clipped by itself", How(clip="value")),
        ("weight decay that is added to the gradient", How(coupled=True)),
        ("moments that are not corrected for their beginning", How(unbiased=False)),
        ("moments that are forgotten before each update", How(forgets=True)),
        ("an update against the descent", How(kind="ascent")),
        ("plain gradient descent", How(kind="sgd")),
        ("the gradient's signs", How(kind="sign")),
        ("each update taken twice", How(times=2)),
    ):
        yield what, case.change(how)
    for what, changes in (
        ("no clipping of the gradient", {"max_norm": 0.0}),
        ("exchanged betas", {"beta1": s.beta2, "beta2": s.beta1}),
        ("a beta1 of 0", {"beta1": 0.0}),
        ("a beta1 of 0.9", {"beta1": 0.9}),
        ("a beta2 of 0.999", {"beta2": 0.999}),
        ("a beta2 of 0.95", {"beta2": 0.95}),
        ("no weight decay", {"weight_decay": 0.0}),
        ("a weight decay of 0.01", {"weight_decay": 0.01}),
        ("a weight decay of 0.1", {"weight_decay": 0.1}),
        *((f"Adam's epsilon of {e:g}", {"epsilon_adam": e}) for e in (1e-12, 1e-6, 1e-5, 1e-4, 1e-3)),
        *((f"a gradient clipped to {n:g}", {"max_norm": n}) for n in (0.01, 0.1, 0.5, 1.0)),
    ):
        yield what, case.change(settings=dataclasses.replace(s, **changes))


CONDITIONS = (
    Condition("update-differs-from-settings", _nothing),
    Condition("update-differs-from-settings", _others),
    Condition("schedule-hides-rate", _rates),
)
