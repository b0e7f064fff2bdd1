"""What would give other log-probabilities of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from plumbob.doctor.explain.loop import Conditions
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


def conditions(
    plain: Plain,
    scored: Sequence[Scored],
    before: Sequence[list[int]],
    observed: Sequence[np.ndarray],
    right: Sequence[np.ndarray],
) -> Conditions:
    """Of rows whose log-probabilities `observed`, [n] each, are not the plain model's, `right`.

    `before`: of each row, the ids of the rows before it in its microbatch.
    """
    yield from _altered(plain, scored)
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
    for cause, what, rows, inputs in table:
        found = [plain.every([(s.ids, s.at)], **given)[0] for s, given in zip(rows, inputs, strict=True)]
        yield cause, what, np.concatenate(found)
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
