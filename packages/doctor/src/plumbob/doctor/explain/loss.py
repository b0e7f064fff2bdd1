"""What would give other token weights, importance weights and slopes of the loss."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from plumbob.doctor.explain.loop import Conditions, by_part, factor
from plumbob.doctor.record import Row, Settings
from plumbob.doctor.reference import loss as reference
from plumbob.doctor.reference.loss import Tokens


@dataclass(frozen=True)
class LossCase:
    """The slopes of N tokens, which are not those of the formulas."""

    tokens: Tokens
    settings: Settings
    observed: np.ndarray
    microbatch: np.ndarray
    """[N] number of each token's microbatch."""

    @property
    def expected(self) -> np.ndarray:
        return reference.slopes(self.tokens, self.settings)

    def by(self, tokens: Tokens | None = None, **settings: object) -> np.ndarray:
        return reference.slopes(tokens or self.tokens, dataclasses.replace(self.settings, **settings))


@dataclass(frozen=True)
class WeightCase:
    """The weights of a minibatch's trained rows, [B], which are not those of the settings."""

    rows: Sequence[Row]
    step: Sequence[Row]
    settings: Settings
    observed: np.ndarray
    expected: np.ndarray
    microbatch: np.ndarray
    whole: bool
    """Whether all rows of the minibatch are trained."""

    def by(self, **settings: object) -> np.ndarray:
        changed = dataclasses.replace(self.settings, **settings)
        return np.array(reference.weights(self.rows, self.step, changed))


Predictions = Iterator[tuple[str, np.ndarray]]


def _kl(case: LossCase) -> Predictions:
    policy, kl = reference.policy_slopes(case.tokens, case.settings), reference.kl_slopes(case.tokens, case.settings)
    if case.tokens.reference is None or not kl.any():
        return
    yield "no KL term", policy
    yield "a KL term of the opposite sign", policy - kl
    yield "the KL term alone", kl
    for estimator in ("k1", "k2", "k3"):
        other = reference.kl_slopes(case.tokens, case.settings, estimator)
        by = factor(case.observed - policy, other)
        yield f"the KL estimator {estimator} with a coefficient times {by:.3g}", policy + by * other
    plain = dataclasses.replace(case.tokens, old=case.tokens.logprobs)
    yield "a KL term without the importance ratio", policy + reference.kl_slopes(plain, case.settings)


def _ratios(case: LossCase) -> Predictions:
    t = case.tokens
    yield "an importance ratio of 1", case.by(dataclasses.replace(t, old=t.logprobs))
    yield "no clip bounds", case.by(epsilon=1e9, epsilon_high=1e9, delta=None, bound="clip")
    for ratio, bound in itertools.product(("token", "sequence"), ("clip", "cap")):
        yield f"a ratio of each {ratio} with the bound {bound}", case.by(ratio=ratio, bound=bound)
    yield "equal clip bounds", case.by(epsilon_high=case.settings.epsilon)
    if t.reference is not None:
        yield "a ratio to the reference policy", case.by(dataclasses.replace(t, old=t.reference))
    ratio = np.exp(np.minimum(t.logprobs - t.old, reference.LARGEST))
    product = ratio * t.advantages
    flat = (product > 1 + case.settings.epsilon_high) | (product < 1 - case.settings.epsilon)
    yield "a clamp on ratio times advantage", -t.weights * t.corrections * product * ~flat


def _factors(case: LossCase) -> Predictions:
    right, t, by = case.expected, case.tokens, factor(case.observed, case.expected)
    ones = np.ones(len(right))
    yield "the opposite sign", -right
    yield "slopes of 0", 0 * right
    yield "no importance weights", case.by(dataclasses.replace(t, corrections=ones))
    yield "tokens with a positive advantage alone", np.where(t.advantages > 0, right, 0)
    yield "tokens with a negative advantage alone", np.where(t.advantages < 0, right, 0)
    yield "advantages of 1", case.by(dataclasses.replace(t, advantages=ones))
    yield "slopes times the token's probability", right * np.exp(t.logprobs)
    yield f"slopes times {by:.3g}", by * right


def _additions(case: LossCase) -> Predictions:
    """A term in the tokens' own log-probabilities."""
    t, rest = case.tokens, case.observed - case.expected
    for what, term in (
        ("a constant pull on every token", t.weights),
        ("an entropy term", t.weights * (t.logprobs + 1)),
        ("a term in the squares of log-probabilities", t.weights * t.logprobs),
        ("the same pull on every token of the microbatch", np.ones(len(rest))),
    ):
        by = factor(rest, term)
        yield f"{what}, of size {by:.3g}", case.expected + by * term


def _parts(case: LossCase) -> Predictions:
    """Tokens without their slope, and a factor for each row."""
    right, rows = case.expected, case.tokens.rows
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    place = np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)]))
    dropped = case.observed == 0
    kinds = {"unlikely": case.tokens.logprobs, "early": -place.astype(float), "late": place.astype(float)}
    for kind, value in kinds.items() if dropped.any() and not dropped.all() else ():
        edge = value[dropped & (right != 0)].max(initial=-np.inf)
        if (value[~dropped] > edge).all():
            yield f"no slope at {kind} tokens", np.where(value <= edge, 0, right)
    yield "a factor for each row", by_part(case.observed, right, rows)[0]


def _microbatches(case: LossCase | WeightCase) -> Conditions:
    predicted, found = by_part(case.observed, case.expected, case.microbatch)
    if found and max(found) - min(found) > 1e-3:
        what = f"a factor for each microbatch ({min(found):.3g} to {max(found):.3g})"
        yield "normaliser-depends-on-microbatches", what, predicted


def _under(cause: str, *found: Predictions) -> Conditions:
    return ((cause, what, predicted) for what, predicted in itertools.chain(*found))


def slopes(case: LossCase) -> Conditions:
    yield from _under("kl-term-wrong", _kl(case))
    yield from _under("loss-differs-from-settings", _ratios(case), _factors(case))
    yield from _microbatches(case)
    yield from _under("loss-differs-from-settings", _additions(case), _parts(case))


def weights(case: WeightCase) -> Conditions:
    cause, right = "loss-differs-from-settings", case.expected
    for reduction in ("rows", "constant", "minibatch_tokens", "step_tokens") if case.whole else ():
        yield cause, f"the reduction {reduction}", case.by(reduction=reduction)
    for overlong in ("keep", "mask") if case.whole else ():
        yield cause, f"overlong {overlong}", case.by(overlong=overlong)
    by = factor(case.observed, right)
    yield cause, f"weights times {by:.3g}", by * right
    yield from _microbatches(case)
