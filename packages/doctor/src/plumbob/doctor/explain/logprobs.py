"""What would give other log-probabilities of the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from plumbob.doctor.explain.loop import Conditions, nearest
from plumbob.doctor.record import StepRecord
from plumbob.doctor.reference import sampling
from plumbob.doctor.reference.model import Plain

MOST_TOKENS = 4096
"""Rows that are computed together have at most so many tokens here."""


@dataclass(frozen=True)
class Scored:
    """One row, or one turn, whose tokens were scored."""

    ids: list[int]
    at: list[bool]
    """[T] which ids are scored."""
    row: int = -1
    """Index in the record's rows."""


@dataclass(frozen=True)
class LogprobCase:
    """Rows whose log-probabilities, [n] one row after the other, are not the plain model's."""

    plain: Plain
    scored: Sequence[Scored]
    observed: np.ndarray
    record: StepRecord

    @functools.cached_property
    def tokens(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(logits [n, V] at the right temperature, ids [n]) of the scored tokens of each row."""
        with torch.no_grad():
            parts = list(self.plain.scored([(s.ids, s.at) for s in self.scored]))
        found = {i: (logits.double(), ids) for part in parts for i, logits, ids in part}
        return [found[i] for i in range(len(self.scored))]

    def by_logits(self, change: Callable[[torch.Tensor, Scored], torch.Tensor]) -> np.ndarray:
        """Log-probabilities if logits [n, V] at the right temperature are changed so."""
        pairs = zip(self.tokens, self.scored, strict=True)
        return np.concatenate([sampling.of_tokens(change(x, s), ids).cpu().numpy() for (x, ids), s in pairs])

    def by_ids(self, change: Callable[[Scored], tuple[Sequence[int], Sequence[bool]] | None]) -> np.ndarray:
        """Log-probabilities of the rows with other ids before the scored ones; NaN for a row that cannot be changed so."""
        found = []
        for s in self.scored:
            changed = change(s)
            count = sum(s.at[1:])
            ids, at = changed or ([0], [False])
            found.append(self.plain.logprobs(ids, at) if changed and sum(at[1:]) == count else np.full(count, np.nan))
        return np.concatenate(found)


Predictions = Iterator[tuple[str, np.ndarray]]


def _temperature(case: LogprobCase) -> Predictions:
    own = case.plain.settings.temperature
    grid = [0.05, *np.geomspace(0.2, 5.0, 25)]
    value, predicted = nearest(grid, lambda t: case.by_logits(lambda logits, _: logits * own / t), case.observed)
    yield f"a temperature of {value:.3g} in place of {own:g}", predicted


def _attention(case: LogprobCase) -> Predictions:
    found = [case.plain.logprobs(s.ids, s.at, attends=_mask(s)) for s in case.scored]
    yield "the loss mask as attention mask", np.concatenate(found)
    pad = getattr(case.plain.model.config, "pad_token_id", None) or 0

    def hidden(s: Scored) -> tuple[list[int], list[bool]]:
        return [t if a else pad for t, a in zip(s.ids, s.at, strict=True)], s.at

    yield "a context that the loss mask hides", case.by_ids(hidden)


def _mask(s: Scored) -> list[bool]:
    return [a or (i + 1 < len(s.at) and s.at[i + 1]) for i, a in enumerate(s.at)]  # a token must see itself


def _others(case: LogprobCase) -> Predictions:
    """Rows of a forward pass see each other."""
    passes: dict[int, list[int]] = {}
    for one in case.record.updates[0].trained if case.record.updates else ():
        passes.setdefault(one.microbatch, []).append(one.row)
    place = {row: (number, k) for number, rows in passes.items() for k, row in enumerate(rows)}

    def after(s: Scored) -> tuple[list[int], list[bool]] | None:
        if s.row not in place:
            return None
        number, k = place[s.row]
        before = [int(t) for row in passes[number][:k] for t in case.record.rows[row].token_ids][-MOST_TOKENS:]
        return [*before, *s.ids], [False] * len(before) + s.at

    yield "rows that see the rows before them in their microbatch", case.by_ids(after)


def _positions(case: LogprobCase) -> Predictions:
    def at(of: Callable[[Scored], list[int]]) -> np.ndarray:
        return np.concatenate([case.plain.logprobs(s.ids, s.at, positions=of(s)) for s in case.scored])

    yield "positions that are all 0", at(lambda s: [0] * len(s.ids))
    yield "positions that are half as far apart", at(lambda s: [i // 2 for i in range(len(s.ids))])
    yield "positions that are twice as far apart", at(lambda s: [2 * i for i in range(len(s.ids))])


def _shifted(case: LogprobCase) -> Predictions:
    parts = np.split(case.by_logits(lambda logits, _: logits), np.cumsum([len(ids) for _, ids in case.tokens])[:-1])
    around = [_around(case, s) for s in case.scored]
    after = [np.append(p[1:], n if n is not None else p[0]) for p, (_, n) in zip(parts, around, strict=True)]
    yield "log-probabilities of the next token", np.concatenate(after)
    before = [np.append(b if b is not None else p[-1], p[:-1]) for p, (b, _) in zip(parts, around, strict=True)]
    yield "log-probabilities of the token before", np.concatenate(before)


def _ordered(case: LogprobCase) -> Predictions:
    """As a loss has them that takes those of other tokens."""
    parts = np.split(case.by_logits(lambda logits, _: logits), np.cumsum([len(ids) for _, ids in case.tokens])[:-1])
    yield "log-probabilities that are moved by one within each row", np.concatenate([np.roll(p, 1) for p in parts])
    yield "log-probabilities in the opposite order", np.concatenate([p[::-1] for p in parts])
    yield "the mean log-probability of the row", np.concatenate([np.full(len(p), p.mean()) for p in parts])


def _around(case: LogprobCase, s: Scored) -> tuple[float | None, float | None]:
    """Log-probabilities of the last scored token before a row in its microbatch, and of the first one after it."""
    update = case.record.updates[0].trained if case.record.updates else []
    k = next((k for k, t in enumerate(update) if t.row == s.row), None)
    if k is None:
        return None, None

    def of(other: int, which: int) -> float | None:
        if not 0 <= other < len(update) or update[other].microbatch != update[k].microbatch:
            return None
        row = case.record.rows[update[other].row]
        found = case.plain.logprobs(row.token_ids.tolist(), row.loss_mask.tolist())
        return float(found[which]) if len(found) else None

    return of(k - 1, -1), of(k + 1, 0)


def _prompts(case: LogprobCase) -> Predictions:
    def first(s: Scored) -> int:
        return s.at.index(True)

    for kept in (32, 64, 128, 256, 512, 1024):
        if max(map(first, case.scored)) > kept:
            yield (
                f"prompts cut to {kept} tokens",
                case.by_ids(lambda s, k=kept: (s.ids[max(first(s) - k, 0) :], s.at[max(first(s) - k, 0) :])),
            )
    yield "a first token that is left out", case.by_ids(lambda s: (s.ids[1:], s.at[1:]))
    yield "a first token that is there twice", case.by_ids(lambda s: ([s.ids[0], *s.ids], [False, *s.at]))


def _altered(case: LogprobCase) -> Predictions:
    rows = [sampling.leaving_out(*tokens) for tokens in case.tokens]
    for what in rows[0]:
        yield what, np.concatenate([row[what].clamp(min=-1e9).cpu().numpy() for row in rows])
    grid = np.geomspace(0.5, 2.0, 15)
    value, predicted = nearest(grid, lambda r: case.by_logits(_penalty(repetition=r)), case.observed)
    yield f"a repetition penalty of {value:.3g}", predicted
    value, predicted = nearest(np.linspace(-2, 2, 9), lambda p: case.by_logits(_penalty(presence=p)), case.observed)
    yield f"a presence penalty of {value:.3g}", predicted


def _penalty(**by: float) -> Callable[[torch.Tensor, Scored], torch.Tensor]:
    return lambda x, s: sampling.penalised(x, sampling.seen_before(s.ids, s.at, x.shape[-1]), **by)


def _rounded(case: LogprobCase) -> Predictions:
    if case.plain.settings.precision == "bfloat16":
        return
    rounded = {name: p.data.bfloat16() for name, p in case.plain.model.named_parameters()}
    with case.plain.having(rounded):
        yield "weights rounded to bfloat16", case.by_ids(lambda s: (s.ids, s.at))


TABLE: tuple[tuple[str, Callable[[LogprobCase], Predictions]], ...] = (
    ("loss-mask-as-attention-mask", _attention),
    ("sampling-altered", _altered),
    ("temperature-not-applied", _temperature),
    ("attention-or-positions-wrong", _others),
    ("loss-mask-wrong", _shifted),
    ("loss-differs-from-settings", _ordered),
    ("prompt-replaced", _prompts),
    ("attention-or-positions-wrong", _positions),
    ("weights-not-synced", _rounded),
)


def conditions(case: LogprobCase) -> Conditions:
    return ((cause, what, predicted) for cause, predict in TABLE for what, predicted in predict(case))
