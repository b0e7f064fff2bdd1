"""Packed rows that begin alike compute their common beginning once.

GRPO trains several rollouts of one prompt, whose rows all begin with it. Without this, a microbatch would compute the prompt
once for each of them. Rows are cut into pieces: a beginning that several rows have in common is one piece, sampled tokens
included, and what follows in a row is another. A piece attends to itself causally and to all of the pieces before it in its
rows, so each token sees what it would see in a row of its own, at the same position. Gradients add up where rows have a piece
in common. The dropout of an adapter is drawn once for a piece.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from plumbob.rollout import Sample
from plumbob.trainer.distributed.world import balanced_shares
from plumbob.trainer.policy import packed_attention as attention
from plumbob.trainer.policy.packing import by_prompt, indices_of, to_device
from plumbob.trainer.policy.token_scorer import Batch

SHORTEST = 8
"""Fewest tokens that a piece of several rows has. To compute fewer of them once saves less than one more piece costs."""

UNEVEN = 1.05
"""How much fuller the fullest share of the processes may be for the sake of prompts that are computed once."""


@dataclass(frozen=True)
class Piece:
    """The tokens `start` to `end` of a row, and of all other rows that have the same tokens up to `end`."""

    row: int
    """Index of one of these rows."""
    start: int
    end: int
    above: tuple[int, ...]
    """Indices of the pieces with the tokens up to `start`, in order."""


def prompt_of(row: Sample) -> list[int]:
    """The ids of a row before its first scored token: all of them, if none is scored. Rows of one prompt belong together.

    A row's first token is never scored.
    """
    scored = any(row.loss_mask[1:])
    return row.token_ids[: row.loss_mask.index(True, 1) if scored else None]


def balanced_by_prompt(rows: Sequence[Sample], num_shares: int) -> list[list[int]]:
    """`balanced_shares` of the rows' tokens, but with rows of one prompt in the same share where that is about as even.

    If whole prompts are not (their fullest share is too full), halves of their rows are tried, quarters, and so on.
    """
    lengths = [len(row.token_ids) for row in rows]
    apart = balanced_shares(lengths, num_shares)
    members = by_prompt([prompt_of(row) for row in rows], SHORTEST)
    size = max(map(len, members), default=1)
    while size > 1:
        units = [own[k : k + size] for own in members for k in range(0, len(own), size)]
        divided = balanced_shares([sum(lengths[i] for i in unit) for unit in units], num_shares)
        shares = [sorted(i for k in share for i in units[k]) for share in divided]
        if _fullest(shares, lengths) <= UNEVEN * _fullest(apart, lengths):
            return shares
        size = -(-size // 2)
    return apart


def _fullest(shares: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[i] for i in share) for share in shares)


def find_pieces(rows: Sequence[Sample]) -> tuple[list[Piece], list[tuple[int, ...]]]:
    """The pieces of `rows`, and for each row the indices of its pieces in order. The order of rows does not matter.

    A beginning of several rows may itself begin with one of more rows: a system prompt of all rows, for example, is a
    piece, and each of their prompts another.
    """
    ids = [row.token_ids for row in rows]
    order = sorted(range(len(rows)), key=lambda i: ids[i])  # rows that begin alike are next to each other
    common = [_common(ids[a], ids[b]) for a, b in pairwise(order)]
    pieces: list[Piece] = []
    paths: list[tuple[int, ...]] = [()] * len(rows)

    # (first, last, start, end, above): rows order[first] to order[last] have the pieces `above` in common, and the next one from
    # `start` to `end`. A function that calls itself would hold the rows until garbage is collected.
    left: list[tuple[int, int, int, int, tuple[int, ...]]] = []
    if rows:
        left.append((0, len(rows) - 1, 0, 0 if len(rows) > 1 else len(ids[0]), ()))
    while left:
        first, last, start, end, above = left.pop()
        if start < end:
            pieces.append(Piece(order[first], start, end, above))
            above = (*above, len(pieces) - 1)
        if first == last:
            paths[order[first]] = above
            continue
        lasts = [k for k in range(first, last + 1) if k == last or common[k] < end + SHORTEST]
        parts = zip([first, *(k + 1 for k in lasts)], lasts, strict=False)
        left += [(a, b, end, min(common[a:b]) if a < b else len(ids[order[a]]), above) for a, b in parts][::-1]
    return pieces, paths


def share_beginnings(batch: Batch, rows: Sequence[Sample]) -> Batch:
    """`batch`, whose layout of `rows` is packed, with their common beginnings only once; the scores keep their order.

    A batch without positions or without the bounds of its rows, which is not what was planned, is returned as it is.
    """
    if "position_ids" not in batch.inputs or batch.inputs.keys().isdisjoint({"row_lengths", "cu_seq_lens_q"}):
        return batch
    pieces, paths = find_pieces(rows)
    if not any(piece.above for piece in pieces):
        return batch
    lengths = [piece.end - piece.start for piece in pieces]
    places = [0, *accumulate(lengths)]  # where pieces begin among the tokens that are computed
    starts = [0, *accumulate(len(row.token_ids) for row in rows)]  # where rows begin among the tokens of `batch`
    all_paths = [p for path in paths for p in path]
    device = batch.ids.device
    taken = to_device(indices_of([starts[piece.row] + piece.start for piece in pieces], lengths), device)
    moved = to_device(indices_of([places[p] for p in all_paths], [lengths[p] for p in all_paths]), device)
    above = [piece.above for piece in pieces]
    inputs = {
        **batch.inputs,
        "position_ids": batch.inputs["position_ids"][:, taken],
        **attention.piece_bounds(lengths, above, device, flash="cu_seq_lens_q" in batch.inputs),
    }
    return dataclasses.replace(batch, ids=batch.ids[:, taken], inputs=inputs, wanted=moved[batch.wanted])


def _common(a: list[int], b: list[int]) -> int:
    """Number of ids at the beginning of both."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda n: a[:n] != b[:n])
