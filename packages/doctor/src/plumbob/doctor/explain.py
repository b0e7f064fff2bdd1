"""What would give other numbers than the reference: conditions for each stage, and the one loop that says which explains a
difference."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from plumbob.doctor.record import Rollout, Row, Settings, StepRecord
from plumbob.doctor.reference import formulas, rows
from plumbob.doctor.reference.model import MOST_TOKENS, Plain, of_tokens

REST = 0.05
"""Share of a difference that the right condition may leave."""
PERFECT = 1e-3
"""A condition that leaves less than this is not given up for one with more numbers to fit."""
EXPLAINED = 0.8
"""Share of the numbers that differ of which a condition must explain most: one fitted number can explain one large gap."""
BARELY = 0.25
"""Where a difference is hardly larger than rounding, rounding may be this share of it."""


Conditions = Iterator[tuple[str, str, Any]]
"""Things that would give other numbers than the reference, each as (id of the cause that it is, what is so, as the end of "this is
what ... gives", what would then be observed)."""


def explain(conditions: Conditions, observed: Any, expected: Any, noise: float = 0.0) -> tuple[str, str] | None:
    """The condition under which the reference gives what was observed, as (id of the cause, what is so); None if none leaves less
    than `REST` of the difference.

    `expected`: what the reference gives. `noise`: a healthy difference. Of conditions that fit equally well, the first one is
    taken.
    """
    gap = mean_abs(observed, expected)
    if not gap > 0 or gap == float("inf"):
        return None
    allowed = max(REST * gap, min(noise, BARELY * gap))
    best, left = None, float("inf")
    for cause, what, predicted in conditions:
        rest = mean_abs(observed, predicted)
        fits = rest <= allowed and _most(observed, expected, predicted, noise)
        if fits and (best is None or (left > PERFECT * gap and rest < left / 2)):
            best, left = (cause, what), rest
    return best


def _most(observed: Any, expected: Any, predicted: Any, noise: float) -> bool:
    """Whether a prediction is far nearer than the reference, for most of the numbers that differ by more than noise."""
    observed, expected, predicted = (np.asarray(a, float) for a in (observed, expected, predicted))
    gaps = np.abs(observed - expected)
    differ = gaps > max(noise, 1e-12)
    left = np.abs(observed - predicted) <= np.maximum(BARELY * gaps, noise)
    return bool(left[differ].mean() >= EXPLAINED) if differ.any() else True


def mean_abs(a: Any, b: Any) -> float:
    """Mean absolute difference; infinite where shapes differ or a number is not finite."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    if a.shape != b.shape or not a.size:
        return float("inf")
    found = float(np.abs(a - b).mean())
    return found if np.isfinite(found) else float("inf")


def factor(observed: np.ndarray, expected: np.ndarray) -> float:
    """The number by which `expected` is nearest to `observed`, by least squares; NaN if `expected` is 0."""
    size = float((expected * expected).sum())
    return float((observed * expected).sum()) / size if size > 0 else float("nan")


def slices(tensors: Mapping[str, np.ndarray]) -> dict[str, slice]:
    """Where the entries of each tensor are, if those of all tensors stand one after the other."""
    ends = list(itertools.accumulate(map(len, tensors.values())))
    return {name: slice(end - len(own), end) for (name, own), end in zip(tensors.items(), ends, strict=True)}


# Rows

Made = tuple[tuple[int, ...], tuple[bool, ...]]
"""(ids, loss mask) of a row."""


def made(ids: Iterable[int], mask: Iterable[bool]) -> Made:
    return tuple(map(int, ids)), tuple(map(bool, mask))


MASKS: dict[str, Callable[[list[bool]], list[bool]]] = {
    "a loss mask shifted by one to the left": lambda m: [*m[1:], False],
    "a loss on everything after the prompt": lambda m: [i >= m.index(True) for i in range(len(m))],
    "a loss on the last turn alone": lambda m: [x and all(m[i:]) for i, x in enumerate(m)],
}
"""What is so -> the loss mask that it makes of the right one."""


def of_rows(
    truths: Sequence[rows.Truth], rollouts: Sequence[Rollout], record: StepRecord, tokenizer: Any = None
) -> dict[str, list[Made]]:
    """What may be missing in rows -> the rows without it. `truths`: what they should be, each with its rollout."""
    found = defaultdict[str, list[Made]](list)
    for t, rollout in zip(truths, rollouts, strict=True) if tokenizer is not None else ():
        mask, length, start = t.loss_mask, len(rows.header_of(tokenizer, rollout)), t.loss_mask.index(True)
        later = [i for i in range(start + 1, len(mask)) if mask[i] and not mask[i - 1]]
        dropped = {j for i in later for j in range(i - length, i)}
        kept = [i for i in range(len(t.token_ids)) if i not in dropped]
        whole = made([t.token_ids[i] for i in kept], [mask[i] for i in kept])
        found["rows without the header before the later turns"].append(whole)
        for missing, ids in rows.prompts(record, rollout, tokenizer):
            if missing:
                row = made([*ids, *t.token_ids[start:]], [*[False] * len(ids), *mask[start:]])
                found[f"a prompt without {missing}"].append(row)
    return {what: those for what, those in found.items() if len(those) == len(truths)}


# Draws: log-probabilities of tokens under what an engine can make of the model's distribution. Whatever tokens are drawn from the
# distribution p, the probability that they are e^c times as likely under another one is at most e^-c, because the mean of
# q(tokens) / p(tokens) is 1. So a sum of differences of log-probabilities needs no other limit.

TEMPERATURES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.1, 1.3, 1.7, 2.5)
"""Times the right one."""
LIKELIEST = (1, 5, 10, 20, 40, 50, 64, 100)
MASSES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
PENALTIES = {"repetition": (1.05, 1.1, 1.3), "presence": (0.5, 1.5)}
MOST_RANKED = 1024
"""Likeliest tokens that are put in order; where more of them are left, none counts as left out."""


def leaving_out(logits: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Log-probabilities [n] of tokens where the less likely ones are left out, by what is left."""
    own, most = of_tokens(logits, tokens), min(MOST_RANKED, logits.shape[-1])
    ordered = (logits.topk(most, -1).values - logits.logsumexp(-1, keepdim=True)).exp()
    mass, rank = ordered.cumsum(-1), (ordered > own.exp()[:, None] * (1 + 1e-5)).sum(-1)
    counts = {f"draws from the {k} likeliest tokens alone": torch.full_like(rank, k) for k in LIKELIEST}
    counts |= {f"draws from the likeliest tokens that make {p:g}": (mass < p).sum(-1) + 1 for p in MASSES}
    shares = {share: (ordered >= share * ordered[:, :1]).sum(-1) for share in (0.01, 0.02, 0.05, 0.1, 0.2)}
    counts |= {f"draws from tokens with {p:g} of the largest probability": count for p, count in shares.items()}
    found = {}
    for what, count in counts.items():
        left = mass.gather(-1, count.clamp(max=most)[:, None] - 1)[:, 0]
        found[what] = torch.where(count >= most, own, torch.where(rank < count, own - left.log(), -torch.inf))
    return found


def seen_before(ids: Sequence[int], at: Sequence[bool], vocabulary: int) -> torch.Tensor:
    """[n, V] which ids a row already has at each of its scored places."""
    seen = torch.zeros(sum(at[1:]), vocabulary, dtype=torch.bool)
    for k, i in enumerate(i for i in range(1, len(at)) if at[i]):
        seen[k, list(ids[:i])] = True
    return seen


def penalised(logits: torch.Tensor, seen: torch.Tensor, repetition: float = 1.0, presence: float = 0.0) -> torch.Tensor:
    """Logits of which those that the row has already are made smaller: Keskar et al., arXiv:1909.05858, sec. 4.1."""
    divided = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen.to(logits.device), divided - presence, logits)


def alternatives(
    logits: torch.Tensor, tokens: torch.Tensor, seen: torch.Tensor, temperature: float
) -> dict[tuple[str, str], torch.Tensor]:
    """(id of a cause, what is so) -> log-probabilities [n] of tokens. `logits` [n, V]: at the right temperature."""
    found = {("sampling-altered", what): values for what, values in leaving_out(logits, tokens).items()}
    # 1 / temperature: log-probabilities from before the temperature, as most engines give them.
    for by in sorted({*TEMPERATURES, 1 / temperature} - {1.0}):
        what = f"draws at a temperature of about {by * temperature:.3g}"
        found["temperature-not-applied", what] = of_tokens(logits / by, tokens)
    for kind, by in ((kind, by) for kind, values in PENALTIES.items() for by in values):
        what = f"a {kind} penalty of about {by:g}"
        found["sampling-altered", what] = of_tokens(penalised(logits, seen, **{kind: by}), tokens)
    return found


# Log-probabilities


@dataclass(frozen=True)
class Scored:
    """One row, or one turn, whose tokens were scored."""

    ids: list[int]
    at: list[bool]
    """[T] which ids are scored."""
    row: int = -1
    """Index in the record's rows."""


def of_logprobs(
    plain: Plain,
    scored: Sequence[Scored],
    before: Sequence[list[int]],
    observed: Sequence[np.ndarray],
    right: Sequence[np.ndarray],
) -> Conditions:
    """Of rows whose log-probabilities `observed`, [n] each, are not the plain model's, `right`.

    `before`: of each row, the ids of the rows before it in its microbatch.
    """
    altered = defaultdict[tuple[str, str], dict[int, np.ndarray]](dict)
    with torch.no_grad():
        for i, logits, ids in itertools.chain.from_iterable(plain.scored([(s.ids, s.at) for s in scored])):
            seen = seen_before(scored[i].ids, scored[i].at, logits.shape[-1])
            for key, values in alternatives(logits.double(), ids, seen, plain.settings.temperature).items():
                altered[key][i] = values.clamp(min=-1e9).cpu().numpy()
    yield from ((*key, np.concatenate([of[i] for i in range(len(scored))])) for key, of in altered.items())
    pad = getattr(plain.model.config, "pad_token_id", None) or 0
    # A token must see itself, and the one before it, after which it is scored.
    masks = [[int(a or b) for a, b in zip(s.at, [*s.at[1:], False], strict=True)] for s in scored]
    hidden = [replace(s, ids=np.where(s.at, s.ids, pad).tolist()) for s in scored]
    behind = [
        Scored([*ids[-MOST_TOKENS:], *s.ids], [False] * len(ids[-MOST_TOKENS:]) + s.at)
        for s, ids in zip(scored, before, strict=True)
    ]
    zeros = [{"position_ids": [0] * len(s.ids), "attention_mask": [1] * len(s.ids)} for s in scored]
    blind, apart = "loss-mask-as-attention-mask", "attention-or-positions-wrong"
    table: tuple[tuple[str, str, Sequence[Scored], Sequence[dict[str, list[int]]]], ...] = (
        (blind, "the loss mask as attention mask", scored, [{"attention_mask": mask} for mask in masks]),
        (blind, "a context that the loss mask hides", hidden, [{}] * len(scored)),
        (apart, "positions that are all 0", scored, zeros),
        (apart, "rows that see the rows before them in their microbatch", behind, [{}] * len(scored)),
    )
    for cause, what, those, inputs in table:
        found = [plain.every([(s.ids, s.at)], **given)[0] for s, given in zip(those, inputs, strict=True)]
        yield cause, what, np.concatenate(found)
    in_order = [np.sort(r)[np.argsort(np.argsort(o))] for o, r in zip(observed, right, strict=True)]
    yield "loss-differs-from-settings", "log-probabilities in another order", np.concatenate(in_order)


# Advantages


def of_advantages(rows: Sequence[Row], settings: Settings, observed: np.ndarray, right: np.ndarray) -> Conditions:
    """`observed`: the advantages of the rows, [B]. `right`: those of the settings."""
    cause = "advantages-wrong"
    rewards, every = np.array([formulas.shaped_reward(row, settings) for row in rows]), ["all"] * len(rows)
    for scale, baseline in itertools.product((settings.scale, "none", "group", "batch"), ("mean", "leave_one_out")):
        other = replace(settings, scale=scale, baseline=baseline)
        yield cause, "one group of the whole step", formulas.centred(rewards, every, other)
        yield cause, f"baseline {baseline} and scale {scale}", formulas.advantages(rows, other)
    yield cause, "rewards without a baseline", rewards
    by = factor(observed, right)
    yield cause, f"advantages times {by:.3g}", by * right


# The loss


def of_microbatches(observed: np.ndarray, right: np.ndarray, microbatch: np.ndarray) -> Conditions:
    """`observed`, `right`: numbers of tokens or rows, and those of the settings. `microbatch`: the number of each one's."""
    predicted, found = right.copy(), []
    for at in (microbatch == number for number in np.unique(microbatch)):
        by = factor(observed[at], right[at])
        if math.isfinite(by):
            predicted[at] *= by
            found.append(by)
    if found and max(found) - min(found) > 1e-3:
        what = f"a factor for each microbatch ({min(found):.3g} to {max(found):.3g})"
        yield "normaliser-depends-on-microbatches", what, predicted


def of_slopes(
    t: formulas.Tokens, s: Settings, observed: np.ndarray, right: np.ndarray, microbatch: np.ndarray
) -> Conditions:
    """`observed`, `right`: slopes of N tokens, and those of the formulas. `microbatch`: [N] number of each token's."""
    policy, cause = formulas.policy_slopes(t, s), "loss-differs-from-settings"
    for estimator in (s.kl_estimator, "k1", "k2", "k3") if formulas.kl_slopes(t, s).any() else ():
        other = formulas.kl_slopes(t, s, estimator)
        by = factor(observed - policy, other)
        yield "kl-term-wrong", f"the KL estimator {estimator} with a coefficient times {by:.3g}", policy + by * other
    yield from of_microbatches(observed, right, microbatch)
    yield cause, "an importance ratio of 1", formulas.slopes(replace(t, old=t.logprobs), s)
    times = factor(observed, right)
    yield cause, f"slopes times {times:.3g}", times * right


# The gradient


def of_gradient(observed: np.ndarray, parts: Sequence[np.ndarray], before: np.ndarray | None = None) -> Conditions:
    """`observed` [E]: sampled entries of the gradient, all tensors one after the other. `parts`: [E] of each microbatch, whose
    sum is right. `before` [E]: the gradient of the update before; NaN where it is unknown.
    """
    right, cause, count = np.sum(parts, axis=0), "normaliser-depends-on-microbatches", len(parts)
    for k in range(count) if count > 1 else ():
        yield cause, f"the gradient of microbatch {k + 1} of {count} alone", parts[k]
    if before is not None:  # gradients that are not cleared are added to; clipping may have made them smaller
        known, rest = np.isfinite(before), observed - right
        by = factor(rest[known], before[known])
        what = "a gradient that contains that of the step before"
        yield "update-differs-from-settings", what, np.where(known, right + by * before, observed)


# The update


def of_update(change: Callable[[float], np.ndarray], observed: np.ndarray) -> Conditions:
    """`change`: [E] the right change of the weights at so many times the learning rate. `observed` [E]."""
    cause, right = "update-differs-from-settings", change(1.0)
    yield cause, "no change", np.zeros(len(observed))
    yield cause, "an update against the descent", -right
    by = factor(observed, right)
    if math.isfinite(by) and by > 1e-6:
        yield "schedule-hides-rate", f"{by:.3g} times the learning rate", change(by)
