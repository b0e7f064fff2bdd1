"""What a rollout earns and reads depends on nothing but itself: not on what was played before it, beside it, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from plumbob.doctor.environment.inequality import Evidence, Inequality
from plumbob.doctor.environment.matrix import FRESHLY, REVERSED, TWICE, Matrix, alike, steady_alone
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.texts import DOWN, says_failed, says_nothing, short, squeezed
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

FEWEST = 3
"""Fewest rewards, results or failures that must change: one or two may have another reason, such as a server that was busy."""

Pair = tuple[Played, Played]


def _rewards(name: str, pairs: list[Pair]) -> Evidence | None:
    changed = [(a, b) for a, b in pairs if a.ok and b.ok and not alike(a.reward, b.reward)]
    if len(changed) < FEWEST:
        return None
    first = changed[0][1]
    text = f"{len(changed)} of {len(pairs)} transcripts earn something else {name}: {first.reward:.3g} in place of {changed[0][0].reward:.3g}"
    return Evidence(f"{text} in task {first.task.key}", first)


def _results(name: str, pairs: list[Pair], *, nothing: bool | None = None) -> Evidence | None:
    """`nothing`: whether most of what changed must be empty, or must not be; None: either."""
    every = [(b, x, y) for a, b in pairs for x, y in zip(a.results, b.results, strict=False)]
    changed = [(p, x, y) for p, x, y in every if _changed(x, y)]
    empty = sum(says_nothing(x) or says_nothing(y) for _, x, y in changed)
    if len(changed) < FEWEST or (nothing is not None and (2 * empty > len(changed)) != nothing):
        return None
    first, x, y = changed[0]
    text = f"{len(changed)} of {len(every)} tool results are others {name}: {short(y)} in place of {short(x)}"
    return Evidence(f"{text} in task {first.task.key}", first)


def _changed(a: str, b: str) -> bool:
    """Whether two results have other words, not only in another order, and neither is the error of a server."""
    if DOWN.search(a[:200]) or DOWN.search(b[:200]):
        return False
    return sorted(squeezed(a).split()) != sorted(squeezed(b).split())


def _again(m: Matrix) -> Iterator[Pair]:
    """Perfect transcripts that were played twice in a row, where the tools themselves return the same both times.

    Tools may be random, such as dice.
    """
    for i, a in m.kind(f"{PERFECT}, {REVERSED}").items():
        b = m.cells.get(f"{PERFECT}, {TWICE}", {}).get(i)
        calls = [message.answers for message in a.messages if message.answers is not None]
        if b is None or not b.ok or not calls or any(map(says_failed, [*a.results, *b.results])):
            continue
        own = m.player.direct(m.hand.tasks[i], calls)
        if None not in own and own == m.player.direct(m.hand.tasks[i], calls):
            yield a, b


def _ordered(m: Matrix) -> list[Pair]:
    """Transcripts in the order of the tasks, and in another order, that were the same at once again there."""
    found = []
    for kind in (PERFECT, EMPTY):
        for i, b in m.kind(f"{kind}, {REVERSED}").items():
            c, a = m.cells.get(f"{kind}, {TWICE}", {}).get(i), m.kind(kind).get(i)
            if a is not None and c is not None and c.ok and alike(b.reward, c.reward) and b.results == c.results:
                found.append((a, b))
    return found


def _fresh(m: Matrix) -> list[Pair]:
    return [
        (m.cells[kind][i], b)
        for kind in (PERFECT, EMPTY)
        for i, b in m.kind(f"{kind}, {FRESHLY}").items()
        if i in m.cells.get(kind, {}) and steady_alone(m, kind, i)
    ]


def _beside(m: Matrix) -> list[Pair]:
    return [(m.cells[kind][i], b) for kind, i, b in m.beside]


def _failed_beside(m: Matrix, *, hangs: bool) -> Evidence | None:
    failed = [p for _, _, p in m.beside if not p.ok]
    if len(failed) < FEWEST or (failed[0].failure == "hangs") != hangs:
        return None
    return Evidence(f"{len(failed)} of {len(m.beside)} rollouts fail {_BESIDE}: {failed[0].error}", failed[0])


_BESIDE = "when they are played at the same time"
_ORDER = "when other tasks were played before them"
_FRESH = "in a process that has played nothing before"


def _row(
    id: str, statement: str, cause: str, check: Callable[[Matrix], Evidence | None], tool: bool = False
) -> Inequality:
    return Inequality(id, statement, cause, check, "tool" if tool else "reward", (EMPTY,))


STATE = (
    _row("again-results-empty", "Calls that are made again do not get empty results", "tools-return-nothing", lambda m: _results("at once again", list(_again(m)), nothing=True), True),
    _row("again-results", "The same calls get the same results at once again", "tool-results-wrong", lambda m: _results("at once again", list(_again(m)), nothing=False), True),
    _row("order-results", "Tool results do not depend on what was played before", "tool-results-mixed", lambda m: _results(_ORDER, _ordered(m)), True),
    _row("order-rewards", "Rewards do not depend on what was played before", "rewards-of-other-rollouts", lambda m: _rewards(_ORDER, _ordered(m))),
    _row("fresh-results", "Tool results are the same in a fresh process", "tool-results-mixed", lambda m: _results(_FRESH, _fresh(m)), True),
    _row("fresh-rewards", "Rewards are the same in a fresh process", "reward-nondeterministic", lambda m: _rewards(_FRESH, _fresh(m))),
    _row("beside-results", "Tool results are the same when many rollouts are played at once", "tool-results-mixed", lambda m: _results(_BESIDE, _beside(m)), True),
    _row("beside-hang", "Rollouts end in time when many are played at once", "environment-hangs", lambda m: _failed_beside(m, hangs=True)),
    _row("beside-errors", "Rollouts do not fail when many are played at once", "environment-fails", lambda m: _failed_beside(m, hangs=False)),
    _row("beside-rewards", "Rewards are the same when many rollouts are played at once", "rewards-of-other-rollouts", lambda m: _rewards(_BESIDE, _beside(m))),
)  # fmt: skip
