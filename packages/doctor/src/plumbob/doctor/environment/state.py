"""What a rollout earns and reads depends on nothing but itself: not on what was played before it or beside it."""

from __future__ import annotations

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


def _pairs(m: Matrix) -> dict[str, list[tuple[Played, Played]]]:
    """How rollouts were played -> pairs of a rollout that was played in the order of the tasks and of one that was played so.

    Only of transcripts that were the same when they were played at once again.
    """
    ordered = []
    for kind in (PERFECT, EMPTY):
        for i, b in m.kind(f"{kind}, {REVERSED}").items():
            c, a = m.cells.get(f"{kind}, {TWICE}", {}).get(i), m.kind(kind).get(i)
            if a is not None and c is not None and same(b, c):
                ordered.append((a, b))
    return {ORDER: ordered, BESIDE: [(m.cells[kind][i], b) for kind, i, b in m.beside]}


def results(m: Matrix) -> Evidence | None:
    """Results that are errors, or have other words, than when they were played in the order of the tasks."""
    for how, pairs in _pairs(m).items():
        every = [(b, x, y) for a, b in pairs for x, y in zip(a.results, b.results, strict=False)]
        fine = [one for one in every if not says_failed(one[1])]
        fails = [one for one in fine if says_failed(one[2])]
        read = [one for one in fine if not says_failed(one[2])]
        other = [one for one in read if sorted(squeezed(one[1]).split()) != sorted(squeezed(one[2]).split())]
        for bad, share, cause in ((fails, CALLS_FAILED, "tools-fail"), (other, 0.0, "tool-results-wrong")):

            def said(first: tuple[Played, str, str], how: str = how) -> str:
                played, x, y = first
                told = f"{{}} tool results are others {how}: {short(y)} in place of {short(x)}"
                return f"{told} in task {played.task.key}"

            if found := refuted(bad, every, said, least=FEWEST, share=share):
                return Evidence(found.text, cause=cause)
    return None


def rewards(m: Matrix) -> Evidence | None:
    for how, pairs in _pairs(m).items():
        if found := otherwise(pairs, f"{{}} transcripts earn something else {how}", FEWEST):
            return found
    bad = [p for _, _, p in m.beside if not p.ok]
    found = refuted(bad, m.beside, lambda p: f"{{}} rollouts fail {BESIDE}: {p.error}", least=FEWEST, share=FAILED)
    return found and Evidence(found.text, cause="rollouts-fail")
