"""What the loss does with each token, beside what it should do: the slope of the loss in the token's log-probability.

In the first update of a step the importance ratio is 1, so the slope of every loss type is minus the advantage of the
token's rollout, times the token's weight, times its importance weight. The weight is computed here a second time, by the
formulas in the help of --loss-type. Whatever goes wrong between rewards and the backward pass shows in these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import Sample

EXACT = 1e-3
"""Largest relative difference that rounding may make."""
TELLING, FEW = 0.01, 10
"""Difference of log-probabilities, in nats, that rounding does not make, and fewest tokens that must have it."""
SHOWN = 0.9
"""Share of what is wrong that a known mistake must account for."""


@dataclass(frozen=True)
class Slopes:
    """Slopes of the loss in the sampled tokens of one row, with the opposite sign: [n] each."""

    row: Sample
    found: torch.Tensor
    """As the backward pass has them."""
    weight: torch.Tensor
    """What they should be for an advantage of 1."""
    advantage: float
    """The rollout's own advantage."""
    logprobs: torch.Tensor
    one_ratio: bool = False
    """Whether the row's tokens have one importance ratio between them."""

    @property
    def wanted(self) -> torch.Tensor:
        return self.weight * self.advantage


def _of_all(parts: Sequence[Slopes], name: str) -> torch.Tensor:
    """A field of all rows, one after the other: [N] in float64."""
    return torch.cat([getattr(part, name).double() for part in parts])


def judged(parts: Sequence[Slopes], kl_beta: float = 0.0) -> tuple[str | None, str]:
    """(cause or None, evidence) of the slopes of several rows, of which at least one has an advantage.

    `kl_beta`: coefficient of a KL term in the loss, which has no slope in a policy that is the reference.
    """
    found, wanted = (_of_all(parts, name) for name in ("found", "wanted"))
    size = wanted.norm().item()
    off = (found - wanted).norm().item() / size if size else 0.0
    evidence = (
        f"the loss's slope in {len(found)} tokens of {len(parts)} rollouts, computed again from advantages and --loss-type, "
        f"differs by {off:.2g} of its size"
    )
    if off <= EXACT or not found.abs().max() > 0:
        return None, evidence
    factor = (found @ wanted).item() / size**2
    if (found - factor * wanted).norm().item() <= EXACT * abs(factor) * size:
        if factor > 0:  # one factor for all tokens: Adam divides by it again
            return None, f"{evidence}; all are {factor:.3g} times what they should be"
        return "gradient-backwards", f"{evidence}; they are {factor:.3g} times what they should be"
    if kl_beta and (turned := _linear_kl(parts, found - wanted, kl_beta)):
        return "kl-backwards", f"{evidence}; {turned}"
    return _named(parts, found - wanted, evidence)


def _linear_kl(parts: Sequence[Slopes], error: torch.Tensor, kl_beta: float) -> str:
    """Evidence that the KL term is the difference of log-probabilities itself, with either sign; "" if there is none.

    Its slope is the same everywhere, and pulls towards no policy.
    """
    weights = _of_all(parts, "weight")
    added = (error @ weights / weights.square().sum()).item()
    if (error - added * weights).norm() > EXACT * error.norm() or abs(abs(added) - kl_beta) > 0.01 * kl_beta:
        return ""
    return f"{added:+.3g} is added to all advantages, as a KL term does whose slope is {-added:+.3g} wherever the policy is"


def scaled_together(parts: Sequence[Slopes]) -> bool:
    """Whether each row's advantage in the loss is its own times a positive number that does not follow from the advantage.

    Rows of one microbatch have that number in common, and rows with the same advantage are in several microbatches.
    """
    found = [(_implied(p), p) for p in parts if p.advantage]
    if any(value is None or value * p.advantage <= 0 for value, p in found):
        return False
    scales = [((value or 0.0) / p.advantage, p) for value, p in found]
    different = {f"{scale:.3g}" for scale, _ in scales}
    by_advantage = {(f"{p.advantage:.3g}", f"{scale:.3g}") for scale, p in scales}
    # A mean over padding scales a row by its share of the longest one.
    by_length = {f"{scale / len(p.found):.3g}" for scale, p in scales}
    several = len(by_advantage) > len({own for own, _ in by_advantage})
    return several and len(different) <= len(scales) / 2 and len(different) <= len(by_length)


def _named(parts: Sequence[Slopes], error: torch.Tensor, evidence: str) -> tuple[str, str]:
    missing = sum(int(((p.found == 0) & (p.wanted != 0)).sum()) for p in parts)
    left = [p.found.double() - torch.where(p.found == 0, 0.0, p.wanted.double()) for p in parts]
    if missing and (sign := _only_of_sign(parts)):
        return (
            "loss-differs-from-settings",
            f"{evidence}; rollouts with {sign} advantage have none, and all others the right one",
        )
    if missing and torch.cat(left).norm() <= EXACT * torch.cat([p.wanted.double() for p in parts]).norm():
        # That masks are right is asked elsewhere: the loss itself may clamp or leave out what it should not.
        return (
            "loss-differs-from-settings",
            f"{evidence}; {missing} tokens have none, and all others have the right one",
        )
    if (ratios := _ratios(parts)) is not None:
        return ratios[0], f"{evidence}; {ratios[1]}"
    implied = {id(p): _implied(p) for p in parts}
    if all(value is not None for value in implied.values()):
        got, right = sorted(round(v or 0.0, 4) for v in implied.values()), sorted(round(p.advantage, 4) for p in parts)
        first = next(
            p for p in parts if abs((implied[id(p)] or 0.0) - p.advantage) > EXACT * max(abs(p.advantage), 1e-6)
        )
        evidence += (
            f"; each rollout has one advantage in the loss, the first that is wrong {implied[id(first)]:+.3g} in place of "
            f"{first.advantage:+.3g} (group {first.row.group})"
        )
        if all(_summed(p, implied[id(p)] or 0.0) for p in parts):
            evidence += "; it is as many times too large as the rollout has tokens: "
            if all(p.one_ratio for p in parts):
                return "ratio-clipped", (
                    f"{evidence}they have one importance ratio, of their summed log-probabilities, which the clip bounds of single "
                    "tokens take out of the gradient"
                )
            evidence += "summed over them"
        return ("rewards-of-other-rollouts" if got == right else "loss-differs-from-settings"), evidence
    for name, values in _additions(parts).items():
        if (share := _explained(error, values)) > SHOWN:
            return "loss-differs-from-settings", f"{evidence}; {share:.0%} of that is a multiple of {name}"
    return "loss-differs-from-settings", f"{evidence}; tokens of one rollout have different advantages in the loss"


def _ratios(parts: Sequence[Slopes]) -> tuple[str, str] | None:
    """(cause, evidence) if slopes are multiplied by importance ratios that are not 1, as they should be; None if not.

    A slope that is exp(own - old) times what it should be has the ratio of its own log-probability and another old one.
    """
    found, wanted, own = (_of_all(parts, name) for name in ("found", "wanted", "logprobs"))
    kept = (wanted != 0) & (found != 0)  # the others may have been clipped
    clipped = wanted[(wanted != 0) & (found == 0)]
    one_sign = len({bool(value > 0) for value in clipped}) == 1  # as a bound clips them
    if (2 * int(kept.sum()) < int((wanted != 0).sum()) and not one_sign) or (found[kept] * wanted[kept] < 0).any():
        return None
    old = own[kept] - (found[kept] / wanted[kept]).log()
    telling = (old - own[kept]).abs() > TELLING
    if telling.sum() < FEW:
        return None
    middle = old[telling].median()
    # Of tokens that are all about as likely, an old log-probability says as much as a ratio does.
    varied = (own[kept][telling] - own[kept][telling].median()).abs().quantile(1 - SHOWN) > TELLING
    if varied and (old[telling] - middle).abs().quantile(SHOWN) <= TELLING:
        return (
            "ratio-to-reference",
            f"they have the importance ratio of an old log-probability of {middle:.3g} for each token",
        )
    apart = own[kept] - old
    if (apart - apart.median()).abs().max() <= TELLING:
        return (
            "ratio-to-reference",
            f"they have the importance ratio {apart.median().exp():.3g}, or are clipped, in place of 1",
        )
    backwards = torch.cat([p.logprobs.double().flip(0) for p in parts])
    for where, others in (
        *((f"{abs(by)} tokens away", own.roll(by)) for by in (1, -1, 2, -2)),
        ("as far from the row's other end", backwards),
    ):
        same = (old - others[kept]).abs() <= TELLING
        if (same & telling).sum() >= SHOWN * telling.sum():
            return "logprobs-permuted", f"they have the importance ratio of the old log-probability {where}"
    return None


def _only_of_sign(parts: Sequence[Slopes]) -> str:
    """The sign of the advantages that are not in the loss, if those of the other sign, and no others, are; else ""."""
    kept = [p for p in parts if (p.found != 0).any()]
    lost = [p for p in parts if p.advantage and not (p.found != 0).any()]
    right = all((p.found - p.wanted).norm() <= EXACT * p.wanted.norm() for p in kept)
    signs, others = ({p.advantage > 0 for p in some} for some in (lost, [p for p in kept if p.advantage]))
    if not right or len(signs) != 1 or not others or signs & others:
        return ""
    return "a positive" if signs == {True} else "a negative"


def _summed(part: Slopes, implied: float) -> bool:
    """Whether the advantage in the loss is the rollout's own, times its number of tokens."""
    whole = part.advantage * len(part.found)
    return abs(implied - whole) <= EXACT * abs(whole)


def _implied(part: Slopes) -> float | None:
    """The one advantage that all tokens of the row have in the loss; None if they have several."""
    weight = part.weight.double()
    if not (weight != 0).any():
        return part.advantage
    values = part.found.double()[weight != 0] / weight[weight != 0]
    middle = values.mean().item()
    return middle if (values - middle).abs().max().item() <= EXACT * max(values.abs().max().item(), 1e-12) else None


def _additions(parts: Sequence[Slopes]) -> Mapping[str, torch.Tensor]:
    """What may have been added to advantages, token by token -> its slopes."""
    return {
        "the tokens' log-probabilities, as an entropy bonus or a KL term adds it": torch.cat(
            [(p.weight * p.logprobs).double() for p in parts]
        ),
        "a number that is the same for all tokens": torch.cat([p.weight.double() for p in parts]),
    }


def _explained(error: torch.Tensor, values: torch.Tensor) -> float:
    """Share of the error's square that a multiple of `values` accounts for."""
    total = error.square().sum() * values.square().sum()
    return ((error @ values).square() / total).item() if total > 0 else 0.0
