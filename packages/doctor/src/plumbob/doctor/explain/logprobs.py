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


Predictions = Iterator[tuple[str, np.ndarray]]


def _temperature(case: LogprobCase) -> Predictions:
    own = case.plain.settings.temperature
    grid = [0.05, *np.geomspace(0.2, 5.0, 25)]
    value, predicted = nearest(grid, lambda t: case.by_logits(lambda logits, _: logits * own / t), case.observed)
    yield f"a temperature of {value:.3g} in place of {own:g}", predicted


def _blind(case: LogprobCase) -> Predictions:
    found = [case.plain.logprobs(s.ids, s.at, attends=_mask(s)) for s in case.scored]
    yield "the loss mask as attention mask", np.concatenate(found)
    pad = getattr(case.plain.model.config, "pad_token_id", None) or 0
    hidden = [[t if a else pad for t, a in zip(s.ids, s.at, strict=True)] for s in case.scored]
    found = [case.plain.logprobs(ids, s.at) for ids, s in zip(hidden, case.scored, strict=True)]
    yield "a context that the loss mask hides", np.concatenate(found)


def _mask(s: Scored) -> list[bool]:
    return [a or (i + 1 < len(s.at) and s.at[i + 1]) for i, a in enumerate(s.at)]  # a token must see itself


def _others(case: LogprobCase) -> Predictions:
    """Rows of a forward pass see each other, or have no positions."""
    found = [case.plain.logprobs(s.ids, s.at, positions=[0] * len(s.ids)) for s in case.scored]
    yield "positions that are all 0", np.concatenate(found)
    passes: dict[int, list[int]] = {}
    for one in case.record.updates[0].trained if case.record.updates else ():
        passes.setdefault(one.microbatch, []).append(one.row)
    before = {row: rows[:k] for rows in passes.values() for k, row in enumerate(rows)}
    found = []
    for s in case.scored:
        seen = [int(t) for row in before.get(s.row, ()) for t in case.record.rows[row].token_ids][-MOST_TOKENS:]
        found.append(case.plain.logprobs([*seen, *s.ids], [False] * len(seen) + s.at))
    yield "rows that see the rows before them in their microbatch", np.concatenate(found)


def _altered(case: LogprobCase) -> Conditions:
    own, found = case.plain.settings.temperature, dict[tuple[str, str], list[np.ndarray]]()
    for (x, ids), s in zip(case.tokens, case.scored, strict=True):
        seen = sampling.seen_before(s.ids, s.at, x.shape[-1])
        for key, values in sampling.alternatives(x, ids, seen, own).items():
            found.setdefault(key, []).append(values.clamp(min=-1e9).cpu().numpy())
    return ((cause, what, np.concatenate(values)) for (cause, what), values in found.items())


TABLE: tuple[tuple[str, Callable[[LogprobCase], Predictions]], ...] = (
    ("loss-mask-as-attention-mask", _blind),
    ("temperature-not-applied", _temperature),
    ("attention-or-positions-wrong", _others),
)


def conditions(case: LogprobCase) -> Conditions:
    yield from _altered(case)
    yield from ((cause, what, predicted) for cause, predict in TABLE for what, predicted in predict(case))
