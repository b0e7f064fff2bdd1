"""What would give other numbers than the reference: conditions for each stage; those of log-probabilities are in logprobs.py."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from plumbob.doctor.explain.loop import Conditions, by_part, factor, nearest, slices, still
from plumbob.doctor.record import Rollout, Row, Settings, StepRecord
from plumbob.doctor.reference import advantages, loss, rows
from plumbob.doctor.reference.model import plain_name
from plumbob.doctor.reference.optimizer import Moments, clipping, rate

# Rows

Made = tuple[tuple[int, ...], tuple[bool, ...]]
"""(ids, loss mask) of a row."""


def made(ids: Iterable[int], mask: Iterable[bool]) -> Made:
    return tuple(map(int, ids)), tuple(map(bool, mask))


def starts(mask: Sequence[bool]) -> list[int]:
    return [i for i in range(len(mask)) if mask[i] and (not i or not mask[i - 1])]


def ends(mask: Sequence[bool]) -> list[int]:
    return [i for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]


MASKS: dict[str, Callable[[list[bool]], list[bool]]] = {
    "a loss mask shifted by one to the left": lambda m: [*m[1:], False],
    "a loss mask shifted by one to the right": lambda m: [False, *m[:-1]],
    "a loss on everything after the prompt": lambda m: [i >= m.index(True) for i in range(len(m))],
    "a loss on every token": lambda m: [True] * len(m),
    "a loss on the last turn alone": lambda m: [x and i >= starts(m)[-1] for i, x in enumerate(m)],
    "a loss on the first turn alone": lambda m: [x and i <= ends(m)[0] for i, x in enumerate(m)],
    "a loss without the last token of each turn": lambda m: [x and i not in ends(m) for i, x in enumerate(m)],
    "a loss without the first token of each turn": lambda m: [x and i not in starts(m) for i, x in enumerate(m)],
}
"""What is so -> the loss mask that it makes of the right one."""


def of_rows(
    truths: Sequence[rows.Truth], rollouts: Sequence[Rollout], record: StepRecord, tokenizer: Any = None
) -> Conditions:
    """`truths`: what the rows should be that are not what their requests say, each with its rollout."""
    if tokenizer is not None:
        whole, found = list[Made](), dict[str, list[Made]]()
        for t, rollout in zip(truths, rollouts, strict=True):
            length, start = len(rows.header_of(tokenizer, rollout)), t.loss_mask.index(True)
            dropped = {j for s in starts(t.loss_mask)[1:] for j in range(s - length, s)}
            kept = [i for i in range(len(t.token_ids)) if i not in dropped]
            whole.append(made([t.token_ids[i] for i in kept], [t.loss_mask[i] for i in kept]))
            for missing, ids in rows.prompts(record, rollout, tokenizer).items():
                row = made([*ids, *t.token_ids[start:]], [*[False] * len(ids), *t.loss_mask[start:]])
                found.setdefault(missing, []).append(row)
        yield "prompt-incomplete", "rows without the header before the later turns", whole
        for missing, those in found.items():
            if missing and len(those) == len(truths):
                yield "prompt-incomplete", f"a prompt without {missing}", those
    for what, mask in MASKS.items():
        yield "loss-mask-wrong", what, [made(t.token_ids, mask(list(t.loss_mask))) for t in truths]


# Advantages


def of_advantages(rows: Sequence[Row], settings: Settings, observed: np.ndarray, right: np.ndarray) -> Conditions:
    """`observed`: the advantages of the rows, [B]. `right`: those of the settings."""
    cause = "advantages-wrong"
    rewards, every = np.array([advantages.shaped_reward(row, settings) for row in rows]), ["all"] * len(rows)
    for scale, baseline in itertools.product((settings.scale, "none", "group", "batch"), ("mean", "leave_one_out")):
        other = replace(settings, scale=scale, baseline=baseline)
        yield cause, "one group of the whole step", advantages.centred(rewards, every, other)
        yield cause, f"baseline {baseline} and scale {scale}", advantages.expected(rows, other)
    settings_of: dict[str, dict[str, Any]] = {
        "components summed before they are normalised": {"components": "sum_then_normalize"},
        "components normalised before they are summed": {"components": "normalize_then_sum"},
        "overlong keep": {"overlong": "keep"},
        "overlong penalise": {"overlong": "penalise"},
        "no penalty on KL": {"kl_place": "loss"},
        "the environment's own weights of rewards": {"reward_weights": {}},
    }
    for what, changes in settings_of.items():
        yield cause, what, advantages.expected(rows, replace(settings, **changes))
    spread, by = right.std() or 1.0, factor(observed, right)
    for what, predicted in (
        ("the opposite sign", -right),
        ("rewards without a baseline", rewards),
        ("positive advantages alone", np.maximum(right, 0)),
        ("negative advantages alone", np.minimum(right, 0)),
        ("the signs of advantages", np.sign(right)),
        ("advantages of 0", np.zeros(len(right))),
        ("advantages that are normalised once more over the step", (right - right.mean()) / spread),
        *((f"advantages that are clipped at {most:g}", np.clip(right, -most, most)) for most in (0.5, 1.0, 2.0)),
        (f"advantages times {by:.3g}", by * right),
    ):
        yield cause, what, predicted


# The loss

Predictions = Iterator[tuple[str, np.ndarray]]


def _kl(tokens: loss.Tokens, settings: Settings, observed: np.ndarray) -> Predictions:
    policy, kl = loss.policy_slopes(tokens, settings), loss.kl_slopes(tokens, settings)
    if tokens.reference is None or not kl.any():
        return
    yield "no KL term", policy
    yield "a KL term of the opposite sign", policy - kl
    yield "the KL term alone", kl
    for estimator in ("k1", "k2", "k3"):
        other = loss.kl_slopes(tokens, settings, estimator)
        by = factor(observed - policy, other)
        yield f"the KL estimator {estimator} with a coefficient times {by:.3g}", policy + by * other


def _otherwise(t: loss.Tokens, settings: Settings, observed: np.ndarray, right: np.ndarray) -> Predictions:
    def by(tokens: loss.Tokens = t, **changes: object) -> np.ndarray:
        return loss.slopes(tokens, replace(settings, **changes))

    yield "an importance ratio of 1", by(replace(t, old=t.logprobs))
    yield "no clip bounds", by(epsilon=1e9, epsilon_high=1e9, delta=None, bound="clip")
    for ratio, bound in itertools.product(("token", "sequence"), ("clip", "cap")):
        yield f"a ratio of each {ratio} with the bound {bound}", by(ratio=ratio, bound=bound)
    if t.reference is not None:
        yield "a ratio to the reference policy", by(replace(t, old=t.reference))
    product = np.exp(np.minimum(t.logprobs - t.old, loss.LARGEST)) * t.advantages
    flat = (product > 1 + settings.epsilon_high) | (product < 1 - settings.epsilon)
    yield "a clamp on ratio times advantage", -t.weights * t.corrections * product * ~flat
    ones, times = np.ones(len(right)), factor(observed, right)
    yield "the opposite sign", -right
    yield "slopes of 0", 0 * right
    yield "no importance weights", by(replace(t, corrections=ones))
    yield "tokens with a positive advantage alone", np.where(t.advantages > 0, right, 0)
    yield "tokens with a negative advantage alone", np.where(t.advantages < 0, right, 0)
    yield "advantages of 1", by(replace(t, advantages=ones))
    yield f"slopes times {times:.3g}", times * right


def _additions(t: loss.Tokens, observed: np.ndarray, right: np.ndarray) -> Predictions:
    """A term in the tokens' own log-probabilities, and a factor for each row."""
    for what, term in (
        ("a constant pull on every token", t.weights),
        ("an entropy term", t.weights * (t.logprobs + 1)),
        ("a term in the squares of log-probabilities", t.weights * t.logprobs),
        ("the same pull on every token of the microbatch", np.ones(len(right))),
    ):
        times = factor(observed - right, term)
        yield f"{what}, of size {times:.3g}", right + times * term
    yield "a factor for each row", by_part(observed, right, t.rows)[0]


def _microbatches(observed: np.ndarray, right: np.ndarray, microbatch: np.ndarray) -> Conditions:
    predicted, found = by_part(observed, right, microbatch)
    if found and max(found) - min(found) > 1e-3:
        what = f"a factor for each microbatch ({min(found):.3g} to {max(found):.3g})"
        yield "normaliser-depends-on-microbatches", what, predicted


def of_slopes(
    t: loss.Tokens, s: Settings, observed: np.ndarray, right: np.ndarray, microbatch: np.ndarray
) -> Conditions:
    """`observed`, `right`: slopes of N tokens, and those of the formulas. `microbatch`: [N] number of each token's."""
    cause = "loss-differs-from-settings"
    yield from (("kl-term-wrong", *one) for one in _kl(t, s, observed))
    yield from ((cause, *one) for one in _otherwise(t, s, observed, right))
    yield from _microbatches(observed, right, microbatch)
    yield from ((cause, *one) for one in _additions(t, observed, right))


def of_weights(
    by: Callable[..., Sequence[float]] | None, observed: np.ndarray, right: np.ndarray, microbatch: np.ndarray
) -> Conditions:
    """`observed`, `right`: weights of a minibatch's trained rows, and those of the settings, [B]. `by`: these under other settings;
    None if not all rows of the minibatch are trained.
    """
    cause = "loss-differs-from-settings"
    for name, value in (
        *(("reduction", value) for value in ("rows", "constant", "minibatch_tokens", "step_tokens")),
        *(("overlong", value) for value in ("keep", "mask")),
    ):
        if by is not None:
            yield cause, f"{'the ' * (name == 'reduction')}{name} {value}", np.array(by(**{name: value}))
    times = factor(observed, right)
    yield cause, f"weights times {times:.3g}", times * right
    yield from _microbatches(observed, right, microbatch)


# The gradient

KEPT, LEAST = 0.1, 8
"""Share of a tensor's difference that the gradient of the step before may leave, and fewest entries that are compared."""


def of_gradient(
    observed: np.ndarray, parts: Sequence[np.ndarray], tensors: Mapping[str, slice], before: np.ndarray | None = None
) -> Conditions:
    """`observed` [E]: sampled entries of the gradient, all tensors one after the other. `parts`: [E] of each microbatch, whose
    sum is right. `tensors`: name -> its entries. `before` [E]: the gradient of the update before; NaN where it is unknown.
    """
    cause, right = "no-gradient", np.sum(parts, axis=0)
    yield cause, "no gradient at all", np.zeros(len(observed))
    names, predicted = still(observed, right, tensors)
    if names and len(names) < len(tensors):
        yield cause, f"no gradient in {len(names)} of {len(tensors)} tensors, such as {names[0]}", predicted
    cause, count = "normaliser-depends-on-microbatches", len(parts)
    for k in range(count) if count > 1 else ():
        yield cause, f"a gradient without microbatch {k + 1} of {count}", right - parts[k]
        yield cause, f"the gradient of microbatch {k + 1} of {count} alone", parts[k]
        yield cause, "the mean of microbatches in place of their sum", right / count
    yield "loss-differs-from-settings", "the opposite sign", -right
    by = factor(observed, right)
    yield "loss-differs-from-settings", f"a gradient times {by:.3g}", by * right
    tensor = np.repeat(range(len(tensors)), [at.stop - at.start for at in tensors.values()])
    yield "loss-differs-from-settings", "a factor for each tensor", by_part(observed, right, tensor)[0]
    if before is not None:
        predicted, kept = _kept(observed, right, tensors, before)
        what = f"the gradient contains that of the step before, in {kept} of {len(tensors)} tensors"
        yield "update-differs-from-settings", what, predicted


def _kept(
    observed: np.ndarray, right: np.ndarray, tensors: Mapping[str, slice], earlier: np.ndarray
) -> tuple[np.ndarray, int]:
    """Gradients that are not cleared, in some tensors or in all, are added to; clipping may have made them smaller."""
    predicted, kept = right.copy(), 0
    for at in tensors.values():
        rest, before = (observed - right)[at], earlier[at]
        known = np.isfinite(before)
        by = factor(rest[known], before[known])
        left = np.linalg.norm((rest - by * before)[known])
        if by > 0 and known.sum() >= LEAST and left < KEPT * np.linalg.norm(rest[known]):
            predicted[at] += np.where(known, by * before, rest)
            kept += 1
    return predicted, kept


# What else than the trained weights an engine after a sync, or a folder, may hold

Weights = Mapping[str, torch.Tensor]


def of_weights_held(
    under: Callable[..., np.ndarray], old: Weights, new: Weights, observed: np.ndarray, *, adapter: bool
) -> Conditions:
    """`under`: (weights, factor of the adapter's scale) -> log-probabilities. `old`, `new`: trained tensors before and after a
    known change, by the trainer's names. `observed`: log-probabilities, which should be those under `new`.
    """
    cause = "weights-not-synced"
    yield cause, "the weights before the change", under(old)
    if adapter:
        yield "adapter-scale-differs", "no adapter", under(new, 0.0)
        value, predicted = nearest([2.0**k for k in range(-6, 7)], lambda s: under(new, s), observed)
        yield "adapter-scale-differs", f"{value:.3g} times the adapter", predicted
    yield cause, "weights rounded to bfloat16", under({n: w.bfloat16().float() for n, w in new.items()})
    kinds: dict[str, list[str]] = {}
    for name in new:
        plain = plain_name(name)
        module = re.sub(r"\.(weight|bias|lora_A|lora_B)$", "", plain)
        layer = re.match(r".*?\.\d+(?=\.)", plain)
        for kind in {plain, module, module.rpartition(".")[2], layer[0] if layer else plain}:
            kinds.setdefault(kind, []).append(name)
    for kind, names in kinds.items():
        if len(names) < len(new):
            yield cause, f"old weights of {kind}", under({**new, **{n: old[n] for n in names}})


# The update

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
    after: Tensors
    gradients: Sequence[Mapping[str, Any]]
    """Of each update, before clipping."""
    norms: Sequence[float]
    steps: Sequence[int]
    """The training step of each update."""
    settings: Settings
    moments: Mapping[str, Moments]
    """Before the first update, of tensors that had one before."""

    @property
    def observed(self) -> np.ndarray:
        """[E] change of all entries, tensor by tensor."""
        return np.concatenate([self.after[name].astype(float) - w for name, w in self.before.items()])

    def change(self, how: How = How(), settings: Settings | None = None) -> np.ndarray:
        """[E] the change under these conditions."""
        s = settings or self.settings
        found = []
        for name, start in self.before.items():
            w, zero = start.astype(float), np.zeros(len(start))
            m = self.moments.get(name, Moments(zero, zero))
            for k, (own, norm, step) in enumerate(zip(self.gradients, self.norms, self.steps, strict=True)):
                lr = how.lr * (how.only in (-1, k)) * rate(s, step)
                g = how.sign * own[name].astype(float) * clipping(s, norm)
                for _ in range(how.times):
                    w, m = _update(w, g, Moments(zero, zero) if how.forgets else m, lr, how, s)
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


def of_update(case: UpdateCase) -> Conditions:
    cause, right = "update-differs-from-settings", case.change()
    yield cause, "no change", np.zeros(len(case.observed))
    names, predicted = still(case.observed, right, slices(case.before))
    if names:
        yield cause, f"no change of {len(names)} of {len(case.before)} tensors, such as {names[0]}", predicted
    for what, how in OTHERWISE.items():
        yield cause, what, case.change(how)
    for what, changes in OTHER_SETTINGS.items():
        yield cause, what, case.change(settings=replace(case.settings, **changes))
    cause, count = "schedule-hides-rate", len(case.gradients)
    if count > 1:  # each update by itself: the change is linear in their rates
        alone = np.stack([case.change(How(only=k)) for k in range(count)], 1)
        rates, *_ = np.linalg.lstsq(alone, case.observed, rcond=None)
        told = ", ".join(f"{r:.3g}" for r in rates)
        yield cause, f"{told} times the learning rate in {count} updates", alone @ rates
    by = factor(case.observed, right)
    if math.isfinite(by) and by > 1e-6:
        yield cause, f"{by:.3g} times the learning rate", case.change(How(lr=by))
