"""What would give other token weights, importance weights and slopes of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from plumbob.doctor.explain.loop import Condition, by_part, factor
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
    by = factor(case.observed - policy, kl)
    yield f"a KL coefficient times {by:.3g}", policy + by * kl
    for estimator in ("k1", "k2", "k3"):
        other = reference.kl_slopes(case.tokens, case.settings, estimator)
        yield f"the KL estimator {estimator}", policy + other
        by = factor(case.observed - policy, other)
        yield f"the KL estimator {estimator} with a coefficient times {by:.3g}", policy + by * other
    plain = dataclasses.replace(case.tokens, old=case.tokens.logprobs)
    yield "a KL term without the importance ratio", policy + reference.kl_slopes(plain, case.settings)
    swapped = dataclasses.replace(case.tokens, logprobs=case.tokens.reference, reference=case.tokens.logprobs)
    yield "a KL term of the reference to the policy", policy + reference.kl_slopes(swapped, case.settings)
    weight = np.ones(len(kl)) * case.tokens.weights.mean()
    flat = dataclasses.replace(case.tokens, weights=weight)
    yield "a KL term that is averaged by itself", policy + reference.kl_slopes(flat, case.settings)


def _ratios(case: LossCase) -> Predictions:
    t = case.tokens
    yield "an importance ratio of 1", case.by(dataclasses.replace(t, old=t.logprobs))
    yield "no clip bounds", case.by(epsilon=1e9, epsilon_high=1e9, delta=None, bound="clip")
    for ratio in ("token", "sequence"):
        for bound in ("clip", "cap"):
            yield f"a ratio of each {ratio} with the bound {bound}", case.by(ratio=ratio, bound=bound)
    yield "equal clip bounds", case.by(epsilon_high=case.settings.epsilon)
    yield "exchanged clip bounds", case.by(epsilon=case.settings.epsilon_high, epsilon_high=case.settings.epsilon)
    yield "no bound delta", case.by(delta=None)
    for epsilon in (0.05, 0.1, 0.2, 0.28, 0.3, 0.5):
        yield f"clip bounds of {epsilon:g}", case.by(epsilon=epsilon, epsilon_high=epsilon)
    yield "the ratio turned round", case.by(dataclasses.replace(t, logprobs=t.old, old=t.logprobs))
    if t.reference is not None:
        yield "a ratio to the reference policy", case.by(dataclasses.replace(t, old=t.reference))
    ratio = np.exp(np.minimum(t.logprobs - t.old, reference.LARGEST))
    inside = (ratio <= 1 + case.settings.epsilon_high) & (ratio >= 1 - case.settings.epsilon)
    yield "a clip that takes the gradient on both sides", -t.weights * t.corrections * t.advantages * ratio * inside
    product = np.clip(ratio * t.advantages, 1 - case.settings.epsilon, 1 + case.settings.epsilon_high)
    flat = product != ratio * t.advantages
    yield "a clamp on ratio times advantage", -t.weights * t.corrections * t.advantages * ratio * ~flat


def _factors(case: LossCase) -> Predictions:
    right, t = case.expected, case.tokens
    p, ones, by = np.exp(t.logprobs), np.ones(len(right)), factor(case.observed, right)
    yield "the opposite sign", -right
    yield "slopes of 0", 0 * right
    yield "no importance weights", case.by(dataclasses.replace(t, corrections=ones))
    yield "importance weights that are squared", case.by(dataclasses.replace(t, corrections=t.corrections**2))
    yield "tokens with a positive advantage alone", np.where(t.advantages > 0, right, 0)
    yield "tokens with a negative advantage alone", np.where(t.advantages < 0, right, 0)
    yield "the signs of advantages", case.by(dataclasses.replace(t, advantages=np.sign(t.advantages)))
    yield "advantages of 1", case.by(dataclasses.replace(t, advantages=ones))
    yield "slopes times the token's probability", right * p
    yield "slopes in the probability in place of its logarithm", right / np.maximum(p, 1e-6)
    yield f"slopes times {by:.3g}", by * right


def _entropy(case: LossCase) -> Predictions:
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
    """Tokens without their slope."""
    right, rows = case.expected, case.tokens.rows
    starts = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    ends = np.r_[starts[1:], len(rows)]
    place = np.arange(len(rows)) - np.repeat(starts, ends - starts)
    left = np.repeat(ends - starts, ends - starts) - place
    yield "rows without their first token", np.where(place == 0, 0, right)
    yield "rows without their last token", np.where(left == 1, 0, right)
    yield "slopes of the token before", np.where(place == 0, 0, np.roll(right, 1))
    yield "slopes of the next token", np.where(left == 1, 0, np.roll(right, -1))
    for most in (0.5, 0.2):
        order = np.argsort(case.tokens.logprobs)
        kept = np.zeros(len(right), bool)
        kept[order[: max(int(len(order) * most), 1)]] = True
        yield f"the {most:.0%} least likely tokens alone", np.where(kept, right, 0)
    dropped = case.observed == 0
    if dropped.any() and not dropped.all():
        kinds = {"unlikely": case.tokens.logprobs, "early": -place.astype(float), "late": place.astype(float)}
        for kind, value in kinds.items():
            edge = value[dropped & (right != 0)].max(initial=-np.inf)
            if (value[~dropped] > edge).all():
                yield f"no slope at {kind} tokens", np.where(value <= edge, 0, right)


def _row_factors(case: LossCase) -> Predictions:
    yield "a factor for each row", by_part(case.observed, case.expected, case.tokens.rows)[0]


def _microbatches(case: LossCase | WeightCase) -> Predictions:
    predicted, found = by_part(case.observed, case.expected, case.microbatch)
    if found and max(found) - min(found) > 1e-3:
        yield f"a factor for each microbatch ({min(found):.3g} to {max(found):.3g})", predicted


def _reductions(case: WeightCase) -> Predictions:
    right = case.expected
    if case.whole:
        for reduction in ("rows", "constant", "minibatch_tokens", "step_tokens"):
            yield f"the reduction {reduction}", case.by(reduction=reduction)
        for overlong in ("keep", "mask"):
            yield f"overlong {overlong}", case.by(overlong=overlong)
        lengths = np.array([reference.in_loss(row, case.settings) for row in case.rows], float)
        whole = np.array([len(row.token_ids) for row in case.rows], float)
        yield "the number of all tokens of a row", np.where(lengths > 0, 1 / (len(case.rows) * whole), 0.0)
        trained = np.array([bool(row.advantage) for row in case.rows])
        yield "no rows of groups without a signal", right * len(case.rows) / max(trained.sum(), 1)
        yield "no tokens of groups without a signal", right * lengths.sum() / max(lengths[trained].sum(), 1)
        yield "weights times the row's tokens", right * lengths
    by = factor(case.observed, right)
    yield f"weights times {by:.3g}", by * right


SLOPES = (
    Condition("kl-term-wrong", _kl),
    Condition("loss-differs-from-settings", _ratios),
    Condition("loss-differs-from-settings", _factors),
    Condition("normaliser-depends-on-microbatches", _microbatches),
    Condition("loss-differs-from-settings", _entropy),
    Condition("loss-differs-from-settings", _parts),
    Condition("loss-differs-from-settings", _row_factors),
)
WEIGHTS = (
    Condition("loss-differs-from-settings", _reductions),
    Condition("normaliser-depends-on-microbatches", _microbatches),
)
