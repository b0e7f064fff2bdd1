"""Which of engine and trainer is wrong, and what makes its log-probabilities what they are.

A third opinion is needed for that: the model as it is on disk, computed by its own forward pass, one row at a time. A
side whose log-probabilities differ from it is wrong. Then the third opinion is asked again under other conditions (other
positions, another temperature, a part of the prompt), until one of them gives what the wrong side gives.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.other_prompts import other_prompts
from plumbob.trainer.doctor.subject import Subject, mean_abs
from plumbob.trainer.doctor.third_opinion import Explanation, Third, by_turn, explains, in_turns, turn_of
from plumbob.trainer.doctor.token_bias import biased

TEMPERATURES = tuple(0.3 * 1.08**k for k in range(26))
"""Temperatures that are tried: 0.3 to 2.05, each 8% above the one before."""
FINER = tuple(1.08 ** (k / 8) for k in range(-8, 9))
"""Then these multiples of the best one: 1% apart."""

MOST_LOGITS = 20_000_000
"""About the most logits in which tokens with a bias are looked for: each trial computes all of them again."""

SHORT = 48
"""Number of prompts of a single token."""


def explain(
    subject: Subject,
    third: Third,
    rows: Sequence[Sample],
    own: Sequence[torch.Tensor],
    wrong: Sequence[torch.Tensor],
    limit: float,
    *,
    engine: bool,
) -> Explanation | None:
    """The conditions under which the third opinion comes closest to the wrong side; None if it never comes close.

    `own` and `wrong`: the third opinion's and the wrong side's log-probabilities of each row's sampled tokens. `engine`:
    whether that side is the engine.
    `limit`: difference of engine and trainer that is healthy, in nats.
    """
    before = mean_abs(wrong, own)
    found = [_temperature(third, rows, wrong), *_positions(third, rows, wrong), *other_tokens(own, wrong)]
    found += [*elsewhere(third, rows, wrong), *_other_numbers(own, wrong), _means(rows, own, wrong)]
    if engine:
        found += [*other_prompts(subject, third, rows, wrong), *_favoured(subject, third, rows, wrong, limit)]
        found.append(_no_early_end(subject, third, rows, wrong))
    else:
        found += _blanked(third, rows, wrong)
    best = min(found, key=lambda e: e.gap)
    return best if explains(best.gap, before, limit) else None


def _temperature(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Explanation:
    """The temperature that fits best: first of a coarse grid, then of a fine one around its best."""
    coarse = _gaps(third, rows, wrong, TEMPERATURES)
    near = min(coarse, key=coarse.__getitem__)
    fine = _gaps(third, rows, wrong, (*(round(near * f, 3) for f in FINER), round(near, 1), round(near, 2)))
    best = min(fine, key=fine.__getitem__)
    return Explanation(
        "temperature-not-applied", f"at temperature {best:g} in place of {third.temperature:g}", fine[best]
    )


def _gaps(
    third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor], temperatures: Sequence[float]
) -> dict[float, float]:
    """Temperature -> mean |difference| of `wrong` and the third opinion at it, in nats. One pass over the rows."""
    sums = dict.fromkeys(temperatures, 0.0)
    for row, theirs in zip(rows, wrong, strict=True):
        mask = torch.tensor(row.loss_mask[1:])
        logits, ids = third.logits(row.token_ids)[mask], torch.tensor(row.token_ids[1:])[mask]
        for t in sums:
            scaled = logits / t
            mine = scaled.gather(-1, ids[:, None])[:, 0] - scaled.logsumexp(-1)
            sums[t] += (mine - theirs).abs().sum().item()
    return {t: total / sum(map(len, wrong)) for t, total in sums.items()}


PLACES: dict[str, Callable[[Sample], list[int]]] = {
    "with all positions moved by 1": lambda row: [i + 1 for i in range(len(row.token_ids))],
    "with the positions of what follows the first prompt moved by 1": lambda row: _after_prompt(row, 1),
    "with the positions of what follows the first prompt moved by -1": lambda row: _after_prompt(row, -1),
    "with the positions of sampled tokens moved by 1": lambda row: [i + m for i, m in enumerate(row.loss_mask)],
    "with positions that begin again after the first prompt": lambda row: _after_prompt(row, -_first(row)),
    "with positions that move by 1 in each turn": lambda row: [
        i + sum(b and not a for a, b in zip(row.loss_mask[:i], row.loss_mask[1 : i + 1], strict=False))
        for i in range(len(row.token_ids))
    ],
    "with positions that count sampled tokens alone": lambda row: [
        max(sum(row.loss_mask[: i + 1]) - 1, 0) for i in range(len(row.token_ids))
    ],
    "with positions that count sampled tokens alone, from 1": lambda row: [
        sum(row.loss_mask[: i + 1]) for i in range(len(row.token_ids))
    ],
    "with positions of sampled tokens alone, and 1 for all others": lambda row: [
        sum(row.loss_mask[: i + 1]) - 1 if m else 1 for i, m in enumerate(row.loss_mask)
    ],
    "with the same position for every token": lambda row: [0] * len(row.token_ids),
    "with positions that count by 2": lambda row: [2 * i for i in range(len(row.token_ids))],
}
"""Ways to get positions wrong, with what they make of a row's."""


def _first(row: Sample) -> int:
    return row.loss_mask.index(True)


def _after_prompt(row: Sample, by: int) -> list[int]:
    return [i + by * (i >= _first(row)) for i in range(len(row.token_ids))]


def _positions(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    for name, places in PLACES.items():
        try:
            scores = [third.scores(row, positions=places(row)) for row in rows]
        except (TypeError, IndexError, RuntimeError):  # a model without positions, or with fewer of them
            continue
        yield Explanation("positions-shifted", name, mean_abs(wrong, scores))
    for by in (1, -1):
        with contextlib.suppress(TypeError, IndexError, RuntimeError):
            scores = [_replies_moved(third, row, by) for row in rows]
            name = f"with the positions of each reply moved by {by}, and those of its prompt right"
            yield Explanation("positions-shifted", name, mean_abs(wrong, scores))


def _replies_moved(third: Third, row: Sample, by: int) -> torch.Tensor:
    """Log-probabilities of the row's sampled tokens, of each turn with the positions of its reply moved: [n] in nats.

    So computes an engine that goes wrong when it decodes, and reads the whole prompt of the next turn afresh.
    """
    turns = [turn_of(prompt, reply) for prompt, reply in by_turn(row)]
    return torch.cat([third.scores(turn, positions=_after_prompt(turn, by)) for turn in turns])


def other_tokens(own: Sequence[torch.Tensor], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    """Are these the right log-probabilities, at other tokens?"""
    cause, those = "logprobs-permuted", "if each token is given the log-probability of"
    for by, name in ((1, "the token before it"), (-1, "the token after it")):
        pairs = [(a.roll(by)[1:-1], b[1:-1]) for a, b in zip(own, wrong, strict=True) if len(a) > 2]
        if pairs:
            yield Explanation(cause, f"{those} {name}", mean_abs([a for a, _ in pairs], [b for _, b in pairs]))
    yield Explanation(
        cause,
        f"{those} another token of its row",
        mean_abs([a.sort().values for a in own], [b.sort().values for b in wrong]),
    )


DIFFERENT = "engine-trainer-mismatch"
"""Cause of a difference that has no name of its own: an unexplained one, or log-probabilities that were made over afterwards."""
LEAST_RATIO = 0.05
"""Smallest ratio that is looked for: an engine without a choice gives every token a log-probability of 0."""
RATIOS = {"in bits": 1 / math.log(2), "in decimal digits": 1 / math.log(10), "without their sign": -1.0}
"""What log-probabilities are multiplied by in other units."""


def _other_numbers(own: Sequence[torch.Tensor], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    """Are these the right log-probabilities times a number, or plus one?"""
    mine, theirs = torch.cat(list(own)).double(), torch.cat(list(wrong)).double()
    if not (size := mine.square().sum().item()) > 0:
        return
    fitted = (mine @ theirs).item() / size
    if abs(fitted) < LEAST_RATIO:
        return
    known = any(math.isclose(fitted, ratio, rel_tol=0.01) for ratio in RATIOS.values())
    for name, ratio in (RATIOS if known else {f"times {fitted:.3g}": fitted}).items():
        yield Explanation(DIFFERENT, f"the right log-probabilities {name}", (ratio * mine - theirs).abs().mean().item())
    shift = (theirs - mine).median().item()
    yield Explanation(
        DIFFERENT, f"the right log-probabilities {shift:+.3g}", (mine + shift - theirs).abs().mean().item()
    )


FIRST = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 100, 128, 256)
"""Numbers of tokens of a turn among which an end token may have been forbidden."""


def _no_early_end(subject: Subject, third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Explanation:
    """No turn may end among its first tokens, as a smallest length of replies has it: then all other tokens are likelier."""
    ends = list(subject.run.sampler.chat.stop_token_ids)
    sums = dict.fromkeys(FIRST, 0.0)
    for row, theirs in zip(rows, wrong, strict=True):
        mask = torch.tensor(row.loss_mask[1:])
        logprobs = (third.logits(row.token_ids)[mask] / third.temperature).log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(row.token_ids[1:])[mask][:, None])[:, 0]
        rest = torch.log1p(-logprobs[:, ends].exp().sum(-1).clamp(max=1 - 1e-6))
        places = torch.cat([torch.arange(len(part)) for part in in_turns(row, own)])
        for first in FIRST:
            sums[first] += (torch.where(places < first, own - rest, own) - theirs).abs().sum().item()
    best = min(sums, key=sums.__getitem__)
    condition = f"if no turn may end among its first {best} tokens"
    return Explanation("sampling-truncated", condition, sums[best] / max(sum(map(len, wrong)), 1))


def _means(rows: Sequence[Sample], own: Sequence[torch.Tensor], wrong: Sequence[torch.Tensor]) -> Explanation:
    """Has each token the mean of its turn?"""
    same = [
        torch.cat([turn.mean().expand(len(turn)) for turn in in_turns(row, scores)])
        for row, scores in zip(rows, own, strict=True)
    ]
    return Explanation(DIFFERENT, "the mean of its turn for each token", mean_abs(same, wrong))


def elsewhere(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    """Are these the log-probabilities of other tokens of the row, as many in a line, sampled or not?"""
    every = [third.of_all(row) for row in rows]
    for where in ("at the row's start", "at the row's end"):
        pairs = [
            (own[: len(theirs)] if "start" in where else own[-len(theirs) :], theirs)
            for own, theirs in zip(every, wrong, strict=True)
        ]
        if all(len(a) == len(b) for a, b in pairs):
            gap = mean_abs([a for a, _ in pairs], [b for _, b in pairs])
            yield Explanation("logprobs-permuted", f"if tokens are given those of as many tokens {where}", gap)


TELLING = 0.01
"""A token whose log-probability is above minus this in both lists tells nothing: that of nearly every token is about 0."""
FEW_TELLING = 20
"""Smallest number of the other tokens that are compared."""
MOST_EXPLAINED = 0.8
"""Share of them that neighbours must explain: at the end of a turn a shifted mask has nothing, or what is put there."""


def neighbours(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor], limit: float) -> Explanation | None:
    """Are these the log-probabilities of the tokens one or two places before or after, sampled or not? None if not.

    `limit`: a healthy difference of a token, in nats.
    """
    every = [third.of_all(row) for row in rows]
    for by in (1, -1, 2, -2):
        pairs = [
            (values[i - 1 + by].item(), other, values[i - 1].item())
            for row, values, theirs in zip(rows, every, wrong, strict=True)
            for i, other in zip((i for i, sampled in enumerate(row.loss_mask) if sampled), theirs.tolist(), strict=True)
            if 0 <= i - 1 + by < len(values)
        ]
        telling = [(there, other) for there, other, own in pairs if min(other, own) < -TELLING]
        right = sum(abs(there - other) <= limit for there, other in telling)
        if len(telling) >= FEW_TELLING and right >= MOST_EXPLAINED * len(telling):
            where = f"{abs(by)} place{'s' * (abs(by) > 1)} {'after' if by > 0 else 'before'} it"
            condition = f"for {right} of {len(telling)} tokens if each is given that of the token {where}"
            return Explanation("logprobs-permuted", condition, limit)
    return None


def _blanked(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    """The trainer may not see the prompt: as much of the row as can be taken away without touching what is scored."""
    alone = [_without(row, range(1, _first(row) - 1)) for row in rows]
    scores = [third.scores(row) for row in alone]
    yield Explanation("loss-mask-as-attention-mask", "without the prompt", mean_abs(wrong, scores))


def after_short_prompts(subject: Subject, score: Callable[[Sample], torch.Tensor], limit: float) -> str | None:
    """Evidence that the engine adds to prompts or replaces them; None if there is none.

    Of a prompt of one token nothing can be missing. If the engine's log-probabilities are wrong even after such prompts,
    at temperature 1, it has another context, or it makes some tokens less likely. What makes some tokens less likely, or
    leaves them out, makes all others likelier, so that sampled tokens other than the prompt's must be less likely in the
    engine for that to be ruled out. `score`: right log-probabilities of a row's sampled tokens at temperature 1.
    """
    words = sorted({t for row in subject.drawn.samples for t in row.token_ids})
    prompts = [[words[len(words) * k // SHORT]] for k in range(SHORT)]
    try:
        replies = subject.generate(prompts, Sampling(1, temperature=1.0, seed=0))
    except EngineError:
        return None
    pairs = [(p, reply) for p, reply in zip(prompts, replies, strict=True) if reply.token_ids]
    if not pairs:
        return None
    rows = [turn_of(p, list(reply.token_ids)) for p, reply in pairs]
    engine, own = [torch.tensor(reply.logprobs) for _, reply in pairs], [score(row) for row in rows]
    others = [(e - o) for e, o, row in zip(engine, own, rows, strict=True) if row.token_ids[0] != row.token_ids[1]]
    lower = int((torch.cat(others) < -limit).sum()) if others else 0
    if not (gap := mean_abs(engine, own)) > limit or not lower:
        return None
    return f"after prompts of a single token, the engine differs by {gap:.2g} nats, {lower} of {len(rows)} tokens are less likely"


def _without(row: Sample, left_out: range) -> Sample:
    kept = [i for i in range(len(row.token_ids)) if i not in left_out]
    values = [0.0] * len(kept)
    return Sample([row.token_ids[i] for i in kept], [row.loss_mask[i] for i in kept], values, 0.0, "", "", False)


def _favoured(
    subject: Subject, third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor], limit: float
) -> Iterator[Explanation]:
    """The engine may leave out a few tokens, or add a bias to their logits."""
    logits, sampled, theirs = [], [], []
    for row, scores in zip(rows, wrong, strict=True):
        places = [i for i, m in enumerate(row.loss_mask[1:]) if m]
        of_row = third.logits(row.token_ids)
        few = spread(len(places), max(1, MOST_LOGITS // (len(rows) * of_row.shape[-1])))
        some = torch.tensor([places[i] for i in few], dtype=torch.long)
        logits.append(of_row[some] / third.temperature)
        sampled.append(torch.tensor(row.token_ids[1:])[some])
        theirs.append(scores[few])
    biases, rest = biased(logits, sampled, theirs, limit)
    if not biases:
        return
    names = dict(zip(biases, subject.run.tokenizer.convert_ids_to_tokens(list(biases)), strict=True))
    out = [f"without {names[t]!r}" for t, bias in biases.items() if bias == -math.inf]
    moved = [f"with a logit bias of {bias:+.3g} for {names[t]!r}" for t, bias in biases.items() if bias != -math.inf]
    yield Explanation("sampling-penalised" if moved else "sampling-truncated", " and ".join([*moved, *out]), rest)
