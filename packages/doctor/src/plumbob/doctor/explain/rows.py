"""What would make other rows of the same requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from plumbob.doctor.explain.loop import Condition
from plumbob.doctor.record import Rollout, StepRecord
from plumbob.doctor.reference import rows as reference

Made = tuple[tuple[int, ...], tuple[bool, ...]]
"""(ids, loss mask) of a row."""


@dataclass(frozen=True)
class RowCase:
    """The rows that are not what their requests say."""

    truths: Sequence[reference.Truth]
    rollouts: Sequence[Rollout]
    record: StepRecord
    tokenizer: Any = None


def made(ids: Iterable[int], mask: Iterable[bool]) -> Made:
    return tuple(map(int, ids)), tuple(map(bool, mask))


def without(ids: Sequence[int], mask: Sequence[bool], dropped: set[int]) -> Made:
    kept = [i for i in range(len(ids)) if i not in dropped]
    return made([ids[i] for i in kept], [mask[i] for i in kept])


def _masks(case: RowCase) -> Iterator[tuple[str, list[Made]]]:
    def by(change: Any) -> list[Made]:
        return [made(t.token_ids, change(list(t.loss_mask), t)) for t in case.truths]

    def ends(mask: list[bool]) -> list[int]:
        return [i for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]

    def starts(mask: list[bool]) -> list[int]:
        return [i for i in range(len(mask)) if mask[i] and (not i or not mask[i - 1])]

    yield "a loss mask shifted by one to the left", by(lambda m, t: [*m[1:], False])
    yield "a loss mask shifted by one to the right", by(lambda m, t: [False, *m[:-1]])
    yield "a loss on everything after the prompt", by(lambda m, t: [i >= m.index(True) for i in range(len(m))])
    yield "a loss on every token", by(lambda m, t: [True] * len(m))
    yield "a loss on the last turn alone", by(lambda m, t: [x and i >= starts(m)[-1] for i, x in enumerate(m)])
    yield "a loss on the first turn alone", by(lambda m, t: [x and i <= ends(m)[0] for i, x in enumerate(m)])
    yield "a loss without the first turn", by(lambda m, t: [x and i > ends(m)[0] for i, x in enumerate(m)])
    yield "a loss without the last turn", by(lambda m, t: [x and i < starts(m)[-1] for i, x in enumerate(m)])
    yield (
        "a loss without the last token of each turn",
        by(lambda m, t: [x and i not in ends(m) for i, x in enumerate(m)]),
    )
    yield (
        "a loss without the first token of each turn",
        by(lambda m, t: [x and i not in starts(m) for i, x in enumerate(m)]),
    )
    yield "a loss mask turned round", by(lambda m, t: [not x for x in m])


def _headers(case: RowCase) -> Iterator[tuple[str, list[Made]]]:
    if case.tokenizer is None:
        return
    rows = []
    for truth, rollout in zip(case.truths, case.rollouts, strict=True):
        length = len(reference.header_of(case.tokenizer, rollout))
        starts = [i for i in range(1, len(truth.loss_mask)) if truth.loss_mask[i] and not truth.loss_mask[i - 1]]
        rows.append(without(truth.token_ids, truth.loss_mask, {j for s in starts[1:] for j in range(s - length, s)}))
    yield "rows without the header before the later turns", rows


def _prompts(case: RowCase) -> Iterator[tuple[str, list[Made]]]:
    if case.tokenizer is None:
        return
    found: dict[str, list[Made]] = {}
    for truth, rollout in zip(case.truths, case.rollouts, strict=True):
        start = truth.loss_mask.index(True)
        for missing, ids in reference.prompts(case.record, rollout, case.tokenizer).items():
            row = made([*ids, *truth.token_ids[start:]], [*[False] * len(ids), *truth.loss_mask[start:]])
            found.setdefault(missing, []).append(row)
    for missing, rows in found.items():
        if missing and len(rows) == len(case.truths):
            yield f"a prompt without {missing}", rows


CONDITIONS = (
    Condition("prompt-incomplete", _headers),
    Condition("prompt-incomplete", _prompts),
    Condition("loss-mask-wrong", _masks),
)
