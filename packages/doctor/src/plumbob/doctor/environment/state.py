"""What a rollout earns and reads depends on nothing but itself: not on what was played before it, beside it, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from plumbob.doctor.environment.inequality import Evidence, refuted, rows
from plumbob.doctor.environment.matrix import FRESHLY, REVERSED, TWICE, Matrix, alike, steady_alone
from plumbob.doctor.environment.player import Failure, Played
from plumbob.doctor.environment.texts import says_failed, says_nothing, short, squeezed
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

FEWEST = 3
"""Fewest rewards, results or failures that must change: one or two may have another reason, such as a server that was busy."""

Pair = tuple[Played, Played]


def _rewards(name: str, pairs: list[Pair]) -> Evidence | None:
    changed = [(a, b) for a, b in pairs if a.ok and b.ok and not alike(a.reward, b.reward)]
    a, b = changed[0] if changed else (None, None)
    example = f"{b.reward:.3g} in place of {a.reward:.3g} in task {b.task.key}" if a and b else ""
    return refuted(changed, pairs, f"{{}} transcripts earn something else {name}: {example}", b, least=FEWEST)


def _results(name: str, pairs: list[Pair], *, nothing: bool | None = None) -> Evidence | None:
    """`nothing`: whether most of what changed must be empty, or must not be; None: either."""
    every = [(b, x, y) for a, b in pairs for x, y in zip(a.results, b.results, strict=False)]
    changed = [(p, x, y) for p, x, y in every if _changed(x, y)]
    empty = sum(says_nothing(x) or says_nothing(y) for _, x, y in changed)
    if not changed or (nothing is not None and (2 * empty > len(changed)) != nothing):
        return None
    first, x, y = changed[0]
    text = f"{{}} tool results are others {name}: {short(y)} in place of {short(x)} in task {first.task.key}"
    return refuted(changed, every, text, first, least=FEWEST)


def _changed(a: str, b: str) -> bool:
    """Whether two results have other words, not only in another order, and neither is an error."""
    return not says_failed(a) and not says_failed(b) and sorted(squeezed(a).split()) != sorted(squeezed(b).split())


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


def _failed(m: Matrix, failure: Failure) -> Evidence | None:
    bad = [p for _, _, p in m.beside if p.failure == failure]
    return (
        Evidence(f"{len(bad)} of {len(m.beside)} rollouts fail {_BESIDE}: {bad[0].error}", bad[0])
        if len(bad) >= FEWEST
        else None
    )


def _again_results(nothing: bool) -> Callable[[Matrix], Evidence | None]:
    return lambda m: _results("at once again", list(_again(m)), nothing=nothing)


_BESIDE = "when they are played at the same time"
_ORDER = "when other tasks were played before them"
_FRESH = "in a process that has played nothing before"


_tool, _reward = rows("tool", PERFECT), rows("reward", EMPTY)
STATE = (
    *_tool(
        (
            "again-empty",
            "Calls that are made again do not get empty results",
            "tools-return-nothing",
            _again_results(True),
        ),
        ("again", "The same calls get the same results at once again", "tool-results-wrong", _again_results(False)),
        (
            "order-results",
            "Results do not depend on what was played before",
            "tool-results-mixed",
            lambda m: _results(_ORDER, _ordered(m)),
        ),
        (
            "fresh-results",
            "Results are the same in a fresh process",
            "tool-results-mixed",
            lambda m: _results(_FRESH, _fresh(m)),
        ),
        (
            "beside-results",
            "Results are the same beside other rollouts",
            "tool-results-mixed",
            lambda m: _results(_BESIDE, _beside(m)),
        ),
    ),
    *_reward(
        (
            "order",
            "Rewards do not depend on what was played before",
            "rewards-of-other-rollouts",
            lambda m: _rewards(_ORDER, _ordered(m)),
        ),
        (
            "fresh",
            "Rewards are the same in a fresh process",
            "reward-nondeterministic",
            lambda m: _rewards(_FRESH, _fresh(m)),
        ),
        ("beside-hang", "Rollouts end in time beside others", "environment-hangs", lambda m: _failed(m, "hangs")),
        ("beside-errors", "Rollouts do not fail beside others", "environment-fails", lambda m: _failed(m, "fails")),
        (
            "beside",
            "Rewards are the same beside other rollouts",
            "rewards-of-other-rollouts",
            lambda m: _rewards(_BESIDE, _beside(m)),
        ),
    ),
)
