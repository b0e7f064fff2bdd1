"""What would give other log-probabilities of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from plumbob.doctor.explain.loop import Conditions
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


def _visible(s: Scored) -> list[int]:
    return [int(a or (i + 1 < len(s.at) and s.at[i + 1])) for i, a in enumerate(s.at)]  # a token must see itself


def conditions(
    plain: Plain,
    scored: Sequence[Scored],
    record: StepRecord,
    observed: Sequence[np.ndarray],
    right: Sequence[np.ndarray],
) -> Conditions:
    """Of rows whose log-probabilities `observed`, [n] each, are not the plain model's, `right`."""
    yield from _altered(plain, scored)
    pad, passes = getattr(plain.model.config, "pad_token_id", None) or 0, dict[int, list[int]]()
    for one in record.updates[0].trained if record.updates else ():
        passes.setdefault(one.microbatch, []).append(one.row)
    before = {row: rows[:k] for rows in passes.values() for k, row in enumerate(rows)}

    def behind_others(s: Scored) -> dict[str, Any]:
        seen = [int(t) for row in before.get(s.row, ()) for t in record.rows[row].token_ids][-MOST_TOKENS:]
        return {"ids": [*seen, *s.ids], "at": [False] * len(seen) + s.at}

    def score(s: Scored, ids: list[int] | None = None, at: list[bool] | None = None, **inputs: list[int]) -> np.ndarray:
        return plain.every([(ids or s.ids, at or s.at)], **inputs)[0]

    blind, apart = "loss-mask-as-attention-mask", "attention-or-positions-wrong"
    table: tuple[tuple[str, str, Callable[[Scored], dict[str, Any]]], ...] = (
        (blind, "the loss mask as attention mask", lambda s: {"attention_mask": _visible(s)}),
        (blind, "a context that the loss mask hides", lambda s: {"ids": np.where(s.at, s.ids, pad).tolist()}),
        (
            apart,
            "positions that are all 0",
            lambda s: {"position_ids": [0] * len(s.ids), "attention_mask": [1] * len(s.ids)},
        ),
        (apart, "rows that see the rows before them in their microbatch", behind_others),
    )
    for cause, what, how in table:
        yield cause, what, np.concatenate([score(s, **how(s)) for s in scored])
    in_order = [np.sort(r)[np.argsort(np.argsort(o))] for o, r in zip(observed, right, strict=True)]
    yield "loss-differs-from-settings", "log-probabilities in another order", np.concatenate(in_order)


def _altered(plain: Plain, scored: Sequence[Scored]) -> Conditions:
    found: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    with torch.no_grad():
        for part in plain.scored([(s.ids, s.at) for s in scored]):
            for i, logits, ids in part:
                seen = sampling.seen_before(scored[i].ids, scored[i].at, logits.shape[-1])
                other = sampling.alternatives(logits.double(), ids, seen, plain.settings.temperature)
                for key, values in other.items():
                    found.setdefault(key, {})[i] = values.clamp(min=-1e9).cpu().numpy()
    return ((*key, np.concatenate([values[i] for i in range(len(scored))])) for key, values in found.items())
