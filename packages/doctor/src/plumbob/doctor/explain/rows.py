"""What would make other rows of the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plumbob.doctor.explain.loop import Conditions
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


def starts(mask: Sequence[bool]) -> list[int]:
    return [i for i in range(len(mask)) if mask[i] and (not i or not mask[i - 1])]


def ends(mask: Sequence[bool]) -> list[int]:
    return [i for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]


MASKS: dict[str, Callable[[list[bool]], list[bool]]] = {
    "a loss mask shifted by one to the left": lambda m: [*m[1:], False],
    "a loss mask shifted by one to the right": lambda m: [False, *m[:-1]],
    "a loss on everything after the prompt": lambda m: [i >= m.index(True) for i in range(len(m))],
    "a loss on every token": lambda m: [True] * len(m),
    "a loss on the last turn alone": lambda m: [x and i >= starts(m)[-1] for i, x in enumerate(m)],
    "a loss on the first turn alone": lambda m: [x and i <= ends(m)[0] for i, x in enumerate(m)],
    "a loss without the last token of each turn": lambda m: [x and i not in ends(m) for i, x in enumerate(m)],
    "a loss without the first token of each turn": lambda m: [x and i not in starts(m) for i, x in enumerate(m)],
}
"""What is so -> the loss mask that it makes of the right one."""


def conditions(case: RowCase) -> Conditions:
    if case.tokenizer is not None:
        yield "prompt-incomplete", "rows without the header before the later turns", _without_headers(case)
        found: dict[str, list[Made]] = {}
        for truth, rollout in zip(case.truths, case.rollouts, strict=True):
            start = truth.loss_mask.index(True)
            for missing, ids in reference.prompts(case.record, rollout, case.tokenizer).items():
                row = made([*ids, *truth.token_ids[start:]], [*[False] * len(ids), *truth.loss_mask[start:]])
                found.setdefault(missing, []).append(row)
        for missing, rows in found.items():
            if missing and len(rows) == len(case.truths):
                yield "prompt-incomplete", f"a prompt without {missing}", rows
    for what, mask in MASKS.items():
        yield "loss-mask-wrong", what, [made(t.token_ids, mask(list(t.loss_mask))) for t in case.truths]


def _without_headers(case: RowCase) -> list[Made]:
    found = []
    for t, rollout in zip(case.truths, case.rollouts, strict=True):
        length = len(reference.header_of(case.tokenizer, rollout))
        dropped = {j for s in starts(t.loss_mask)[1:] for j in range(s - length, s)}
        kept = [i for i in range(len(t.token_ids)) if i not in dropped]
        found.append(made([t.token_ids[i] for i in kept], [t.loss_mask[i] for i in kept]))
    return found
