"""What a rollout earns and reads depends on nothing but itself: not on what was played before it or beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from plumbob.doctor.environment.inequality import Evidence, otherwise, refuted
from plumbob.doctor.environment.matrix import REVERSED, TWICE, Matrix, same
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.texts import says_failed, short, squeezed
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

FEWEST = 3
"""Fewest rewards, results or failures that must change: one or two may have another reason, such as a server that was busy."""
FAILED, CALLS_FAILED = 0.1, 0.3
"""Largest share of rollouts, and of calls, that may fail beside others. Tools may fail at times by chance."""
ORDER, BESIDE = "after other tasks", "when they are played at the same time"

Pair = tuple[Played, Played]


def _rewards(name: str, pairs: list[Pair]) -> Evidence | None:
    return otherwise(pairs, f"{{}} transcripts earn something else {name}", FEWEST)


def _results(name: str, pairs: list[Pair], *, errors: bool = False) -> Evidence | None:
    """Results that have other words, or are errors, than when they were played in the order of the tasks."""
    every = [(b, x, y) for a, b in pairs for x, y in zip(a.results, b.results, strict=False)]
    changed = [one for one in every if (_fails if errors else _changed)(*one[1:])]

    def said(first: tuple[Played, str, str]) -> str:
        played, x, y = first
        kind = "errors" if errors else "others"
        return f"{{}} tool results are {kind} {name}: {short(y)} in place of {short(x)} in task {played.task.key}"

    return refuted(changed, every, said, least=FEWEST, share=CALLS_FAILED * errors)


def _fails(a: str, b: str) -> bool:
    return says_failed(b) and not says_failed(a)


def _changed(a: str, b: str) -> bool:
    """Whether two results have other words, not only in another order, and neither is an error."""
    return not says_failed(a) and not says_failed(b) and sorted(squeezed(a).split()) != sorted(squeezed(b).split())


def _pairs(m: Matrix) -> dict[str, list[Pair]]:
    """How rollouts were played -> pairs of a rollout that was played in the order of the tasks and of one that was played so.

    Only of transcripts that were the same when they were played at once again.
    """
    ordered = list[Pair]()
    for kind in (PERFECT, EMPTY):
        for i, b in m.kind(f"{kind}, {REVERSED}").items():
            c, a = m.cells.get(f"{kind}, {TWICE}", {}).get(i), m.kind(kind).get(i)
            if a is not None and c is not None and same(b, c):
                ordered.append((a, b))
    beside = [(m.cells[kind][i], b) for kind, i, b in m.beside]
    return {ORDER: ordered, BESIDE: beside}


def _of(judge: Callable[[str, list[Pair]], Evidence | None], *names: str) -> Callable[[Matrix], Evidence | None]:
    return lambda m: next((found for name in names if (found := judge(name, m.once(_pairs)[name])) is not None), None)


def ends_beside(m: Matrix) -> Evidence | None:
    bad = [p for _, _, p in m.beside if not p.ok]
    return refuted(bad, m.beside, lambda p: f"{{}} rollouts fail {BESIDE}: {p.error}", least=FEWEST, share=FAILED)


calls_beside = _of(partial(_results, errors=True), BESIDE)
other_results, other_rewards = _of(_results, ORDER, BESIDE), _of(_rewards, ORDER, BESIDE)
