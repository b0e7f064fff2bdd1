"""What transcripts must earn: right answers more than wrong ones, and the same transcript the same."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, stdev
from types import FrameType
from typing import Any

from plumbob.doctor.environment.inequality import Evidence, Inequality, about, equal, spread_of
from plumbob.doctor.environment.matrix import IDEAL, REVERSED, TOLERANCE, TWICE, Matrix, alike
from plumbob.doctor.environment.player import Played, Script
from plumbob.doctor.environment.texts import chosen, places, says_failed, short
from plumbob.doctor.environment.transcripts import CHEAP, EMPTY, NEAR, ODD, PERFECT

FAILED, FAILED_OF_A_KIND = 0.1, 0.33
"""Largest share of the perfect transcripts and empty replies that may fail, and of another kind of transcript."""
FEWEST = 6
"""Fewest tasks in which a kind of transcript is judged, and fewest failures."""
CHEAP_EARNS, EMPTY_EARNS = 0.5, 0.75
"""Largest share of what a perfect transcript earns above an empty one that one which solves nothing may earn; and of the
range of all rewards that an empty reply may earn. A reward of -1, 0 and 1 for wrong, no and right answers gives it half."""
CONSTANT_EARNS = 0.8
"""Largest share that one and the same reply to all tasks may earn: with two answers, the more frequent one has half or more."""
FORM_EARNS = 0.75
"""Largest share that form may earn where another component of the reward tells right answers from it."""
NEAR_EARNS = 0.5
"""Largest share of tasks that may pay a wrong answer near to the right one in full. Less is paid by a reward that falls with
the distance, which is no fault."""
VAIN_CALLS = 0.1
"""Share of what a perfect transcript earns that eight calls in vain may add to it."""
NOT_PERFECT = 0.05
"""How much less than 1 a perfect transcript may earn with the settings for which the environment says that it earns 1."""
TRACED = 4
"""Number of transcripts that are played again to see which errors are raised and caught."""
_CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError)
"""Exceptions with which Python ends loops, generators and tasks."""


# Rollouts end


def _hangs(m: Matrix) -> Evidence | None:
    hung = [p for cells in m.cells.values() for p in cells.values() if p.failure == "hangs"]
    return Evidence(f"{len(hung)} rollouts did not end in time; the first: {hung[0].error}", hung[0]) if hung else None


def _not_finite(m: Matrix) -> Evidence | None:
    bad = [p for cells in m.cells.values() for p in cells.values() if p.failure == "not-finite" and not _unbounded(p)]
    return Evidence(f"{len(bad)} rollouts have no finite reward; the first: {bad[0].error}", bad[0]) if bad else None


def _infinite(m: Matrix) -> Evidence | None:
    """What pays a reply without bounds would pay others of its kind nearly as much."""
    bad = [p for cells in m.cells.values() for p in cells.values() if p.failure == "not-finite" and _unbounded(p)]
    return Evidence(f"{len(bad)} rollouts earn an infinite reward; the first: {bad[0].error}", bad[0]) if bad else None


def _unbounded(played: Played) -> bool:
    return played.error.endswith(" inf")


def _errors(m: Matrix) -> Evidence | None:
    first = [*m.cells.get(PERFECT, {}).values(), *m.cells.get(EMPTY, {}).values()]
    held = m.held_out.cells.get(EMPTY, {}).values() if m.held_out else ()
    groups = {
        "perfect transcripts and empty replies": (first, FAILED),
        "empty replies to held-out tasks": (list(held), 2 * FAILED),
    }
    groups |= {kind: (list(cells.values()), FAILED_OF_A_KIND) for kind, cells in m.cells.items() if kind not in ODD}
    for name, (played, share) in groups.items():
        bad = [p for p in played if p.failure == "fails"]
        if len(bad) >= min(FEWEST, len(played)) and len(bad) > share * len(played):
            return Evidence(
                f"{len(bad)} of {len(played)} rollouts ({name}) end in errors; the first: {bad[0].error}", bad[0]
            )
    return None


def _logged(m: Matrix) -> Evidence | None:
    """An error that is only logged, where the rollout earns no more than an empty reply."""
    for kind, cells in m.cells.items():
        for i, p in cells.items():
            if p.ok and p.logged and kind != EMPTY and p.reward <= m.floor(i) + TOLERANCE:
                return Evidence(f"{kind} earned {p.reward:.3g} in task {p.task.key}, and {p.logged[0]} was logged", p)
    return None


def _twice(m: Matrix) -> Evidence | None:
    pairs = [
        (p, m.cells[f"{kind}, {TWICE}"][i])
        for kind in (PERFECT, EMPTY)
        for i, p in m.kind(f"{kind}, {REVERSED}").items()
        if m.cells.get(f"{kind}, {TWICE}", {i: p})[i].ok
    ]
    bad = [(a, b) for a, b in pairs if not alike(a.reward, b.reward)]
    if not bad:
        return None
    gap = max(abs(a.reward - b.reward) for a, b in bad)
    text = f"{len(bad)} of {len(pairs)} transcripts earned something else when they were played at once again, by up to {gap:.3g}"
    return Evidence(text, bad[0][1])


# Right answers are paid


def _constant(m: Matrix) -> Evidence | None:
    every = [p.reward for kind in (PERFECT, EMPTY, "other words") for p in m.kind(kind).values()]
    if m.paid or not equal(every) or abs(every[0]) <= TOLERANCE:
        return None  # if that is 0, right answers fail; whether wrong ones would earn something is not known
    return Evidence(f"perfect transcripts, empty replies and other words all earn {every[0]:.3g}")


def _silence_is_gold(m: Matrix) -> Evidence | None:
    every = [p.reward for kind in (PERFECT, EMPTY) for p in m.kind(kind).values()]
    if m.paid or not equal(every) or abs(every[0]) <= TOLERANCE:
        return None
    others = spread_of(p.reward for p in m.kind("other words").values())
    return Evidence(f"perfect transcripts and empty replies all earn {every[0]:.3g}, other words {others}")


def _unpaid(m: Matrix) -> list[int]:
    """Tasks whose perfect transcript earns no more than an empty reply, also with the settings for which it is made."""
    ideal = m.cells.get(f"{PERFECT}, {IDEAL}", {})
    return [i for i in m.unpaid if i not in ideal or ideal[i].reward <= m.floor(i) + TOLERANCE]


def _told(m: Matrix, unpaid: Sequence[int]) -> str:
    keys = ", ".join(m.hand.tasks[i].key for i in unpaid[:3])
    earned = spread_of(p.reward for p in m.kind(PERFECT).values())
    return (
        f"perfect transcripts of {len(m.lifts)} tasks earn {earned}, empty replies "
        f"{spread_of(p.reward for p in m.kind(EMPTY).values())}; in {len(unpaid)} the former earn no more, such as {keys}"
    )


def _bare(m: Matrix) -> tuple[list[int], list[int]]:
    """(unpaid tasks in which the answer alone was played, those of them in which it earns something)."""
    unpaid, alone = _unpaid(m), m.kind("the answer alone")
    bare = [i for i in unpaid if i in alone]
    return bare, [i for i in bare if alone[i].reward > m.floor(i) + TOLERANCE]


def _parsed(m: Matrix, *, all_of_them: bool = True) -> Evidence | None:
    unpaid, (bare, right) = _unpaid(m), _bare(m)
    if (
        m.hand.raised
        or 2 * len(unpaid) <= len(m.lifts)
        or 2 * len(right) <= len(bare)
        or (len(right) == len(bare)) != all_of_them
    ):
        return None
    text = f"{_told(m, unpaid)}; but in {len(right)} of {len(bare)} the answer alone earns something"
    return Evidence(text, m.kind(PERFECT)[right[0]])


def _swallowed(m: Matrix) -> Evidence | None:
    """The error that is raised and caught wherever a perfect transcript earns nothing, and nowhere else."""
    unpaid = _unpaid(m)
    if not unpaid or 2 * len(unpaid) > len(m.lifts):
        return None
    usual = set[str]().union(*_raised(m, m.paid))
    error = min(set.intersection(*_raised(m, unpaid)) - usual, default="")
    if not error:
        return None
    text = f"{_told(m, unpaid)}; whenever they do, and never otherwise, an error is raised and caught: {error}"
    return Evidence(text, m.kind(PERFECT)[unpaid[0]])


def _raised(m: Matrix, numbers: Sequence[int]) -> list[set[str]]:
    found = []
    for i in (numbers[k] for k in chosen(len(numbers), TRACED)):
        with exceptions_raised() as where:
            m.player.play(Script(m.hand.tasks[i], m.hand.turns[i]))
        found.append(set(where))
    return found


@contextmanager
def exceptions_raised() -> Generator[list[str]]:
    """The type and the place of each exception that Python code raises inside the context, caught or not.

    In threads, only those that are started inside the context are seen.
    """
    found: list[str] = []

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and not issubclass(argument[0], _CONTROL):
            name = Path(frame.f_code.co_filename).name
            found.append(f"{argument[0].__name__} in {frame.f_code.co_name} ({name}, line {frame.f_lineno})")
        return local

    before, before_in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(local)
    threading.settrace(local)
    try:
        yield found
    finally:
        sys.settrace(before)
        threading.settrace(before_in_threads)


def _fined(m: Matrix) -> Evidence | None:
    unpaid = _unpaid(m)
    below = [i for i in unpaid if m.lifts[i] < -TOLERANCE]
    return (
        Evidence(f"{_told(m, unpaid)}; in {len(below)} they earn less", m.kind(PERFECT)[below[0]])
        if 2 * len(below) > len(unpaid)
        else None
    )


def _overpaid(m: Matrix, *, most: bool = True) -> Evidence | None:
    """Where right answers earn nothing in some tasks and wrong ones all in others, something else decides."""
    unpaid = _unpaid(m)
    if not unpaid or not m.paid:
        return None
    usual = median(m.kind(PERFECT)[i].reward for i in m.paid) - TOLERANCE
    over = [i for i in unpaid if m.floor(i) >= usual]
    if not over or (2 * len(over) > len(unpaid)) != most:
        return None
    text = f"{_told(m, unpaid)}; in {len(over)} of these an empty reply earns as much as perfect transcripts of other tasks"
    return Evidence(text, m.kind(EMPTY)[over[0]])


def _oracle(m: Matrix) -> Evidence | None:
    unpaid = _unpaid(m)
    if m.hand.raised:
        i, error = next(iter(m.hand.raised.items()))
        return Evidence(
            f"the method with the perfect transcript failed in {len(m.hand.raised)} tasks, in {m.hand.tasks[i].key} with {error[:200]}"
        )
    return Evidence(_told(m, unpaid), m.kind(PERFECT)[unpaid[0]]) if unpaid else None


def _in_vain(m: Matrix) -> list[int]:
    """Tasks whose perfect transcript earns less than 1, with its own settings, and as much without its calls; [] if few."""
    ideal, alone = m.kind(f"{PERFECT}, {IDEAL}"), m.kind("the answer without calls")
    known = [i for i in ideal if i in alone]
    low = [i for i in known if ideal[i].reward < 1 - NOT_PERFECT and alike(m.kind(PERFECT)[i].reward, alone[i].reward)]
    return low if 2 * len(low) > len(known) else []


def _vain(m: Matrix) -> tuple[str, Evidence] | None:
    """(what is to blame, evidence) where the calls of perfect transcripts find nothing that counts."""
    low = _in_vain(m)
    if not low:
        return None
    played = [m.kind(f"{PERFECT}, {IDEAL}")[i] for i in low]
    results = [text for p in played for text in p.results]
    refused = sum(map(says_failed, results))
    text = f"in {len(low)} tasks the perfect transcript earns {spread_of(p.reward for p in played)}, and as much without its calls"
    blame = "fails" if 2 * refused > len(results) else "reward" if equal([p.reward for p in played]) else "tools"
    return blame, Evidence(text, played[0])


def _blamed(what: str) -> Callable[[Matrix], Evidence | None]:
    return lambda m: found[1] if (found := _vain(m)) is not None and found[0] == what else None


def _lost(m: Matrix, kind: str) -> tuple[list[int], list[int], list[int]]:
    """(tasks with plain working that is read, those of them that lose reward with `kind`, those that lose all of it)."""
    plain, changed, best = m.kind("working before the answer"), m.kind(kind), m.kind(PERFECT)
    known = [i for i in m.paid if i in plain and i in changed and alike(plain[i].reward, best[i].reward)]
    lost = [i for i in known if changed[i].reward < plain[i].reward - TOLERANCE]
    return known, lost, [i for i in known if changed[i].reward <= m.floor(i) + TOLERANCE]


def _numbers(m: Matrix, *, all_of_them: bool) -> Evidence | None:
    known, lost, gone = _lost(m, kind := "numbers before the answer")
    # A parser that takes the first number finds the answer in no task; who loses it in some only is not known.
    if len(known) < FEWEST or 2 * len(lost) <= len(known) or (len(gone) == len(known)) != all_of_them:
        return None
    return Evidence(
        f"with two numbers in the working, {len(lost)} of {len(known)} right answers earn less", m.kind(kind)[lost[0]]
    )


def _long(m: Matrix) -> Evidence | None:
    known, _, gone = _lost(m, kind := "long working before the answer")
    if len(known) < FEWEST or 2 * len(gone) <= len(known):
        return None
    return Evidence(
        f"after long working, {len(gone)} of {len(known)} right answers earn nothing", m.kind(kind)[gone[0]]
    )


# Wrong answers are not


def _clean(m: Matrix) -> list[str]:
    """Of several components of the reward, those that only perfect transcripts earn."""
    best = list(m.kind(PERFECT).values())
    cheap = [p for kind in (EMPTY, *CHEAP) for p in m.kind(kind).values()]
    names = {name for p in best for name in p.components}

    def mean(played: Sequence[Played], name: str) -> float:
        return fmean(p.components.get(name, 0.0) for p in played) if played else 0.0

    return sorted(n for n in names if len(names) > 1 and mean(best, n) > 0 and mean(cheap, n) < mean(best, n) / 10)


def _surely(shares: Sequence[float]) -> float:
    """The mean, less its standard error."""
    return fmean(shares) - stdev(shares) / math.sqrt(len(shares)) if len(shares) >= FEWEST else 0.0


def _form(m: Matrix) -> Evidence | None:
    clean = _clean(m)
    for kind in CHEAP if clean else ():
        shares = m.shares(kind)
        if _surely([*shares.values()]) >= FORM_EARNS:
            text = f"{kind} earns {fmean(shares.values()):.0%} of what the perfect transcript does; only {', '.join(clean)} tells the two apart"
            return Evidence(text, m.kind(kind)[max(shares, key=lambda i: shares[i])], clean[0])
    return None


def _empty(m: Matrix) -> Evidence | None:
    lowest = min((p.reward for cells in m.cells.values() for p in cells.values() if p.ok), default=0.0)
    shares = {i: (m.floor(i) - lowest) / (m.kind(PERFECT)[i].reward - lowest) for i in m.paid}
    if _clean(m) or _surely([*shares.values()]) <= EMPTY_EARNS:
        return None
    text = f"an empty reply earns {fmean(shares.values()):.0%} of the range from the worst transcript, {lowest:.3g}, to the perfect one"
    return Evidence(text, m.kind(EMPTY)[m.paid[0]])


def _cheap(kind: str, most: float = CHEAP_EARNS) -> Callable[[Matrix], Evidence | None]:
    def check(m: Matrix) -> Evidence | None:
        shares = m.shares(kind)
        if _clean(m) or _surely([*shares.values()]) <= most:
            return None
        example = m.kind(kind)[max(shares, key=lambda i: shares[i])]
        text = f"{kind} earns {fmean(shares.values()):.0%} of what perfect transcripts earn above empty ones, in {len(shares)} tasks"
        return Evidence(f"{text}: {about(example)}", example)

    return check


def _given(m: Matrix) -> Evidence | None:
    """Prompts that earn the reward when they are sent back hold the answer in the form that is asked for.

    A reward that finds the answer anywhere in a reply pays for it among other answers, too: then the reward is at fault.
    """
    if (found := _cheap("the prompt sent back")(m)) is None:
        return None
    paid = [i for i, share in m.shares("the prompt sent back").items() if share > 0]
    held = [i for i in paid if m.hand.golds[i] and places(m.hand.golds[i], m.kind(EMPTY)[i].opening[-1].text)]
    several = m.shares("several answers joined by or")
    lenient = sum(share > 0 for share in several.values())
    return found if several and 2 * len(held) > len(paid) and 2 * lenient < len(several) else None


def _near(kind: str) -> Callable[[Matrix], Evidence | None]:
    def check(m: Matrix) -> Evidence | None:
        found, best = m.kind(kind), m.kind(PERFECT)
        known = [i for i in m.paid if i in found]
        full = [i for i in known if found[i].reward >= best[i].reward - TOLERANCE]
        if len(known) < FEWEST or len(full) <= NEAR_EARNS * len(known):
            return None
        text = f"{kind} earns as much as the right answer in {len(full)} of {len(known)} tasks: {about(found[full[0]])}"
        return Evidence(f"{text}, where {short(m.hand.golds[full[0]])} is right", found[full[0]])

    return check


def _calls_paid(m: Matrix) -> Evidence | None:
    kind = "calls in vain before it"
    shares = [share - 1 for share in m.shares(kind).values()]
    if len(shares) < FEWEST or fmean(shares) <= VAIN_CALLS:
        return None
    return Evidence(
        f"eight calls in vain add {fmean(shares):.0%} to what perfect transcripts earn",
        next(iter(m.kind(kind).values())),
    )


def _row(id: str, statement: str, cause: str, check: Callable[[Matrix], Evidence | None], *needs: str) -> Inequality:
    return Inequality(id, statement, cause, check, "reward", needs)


ENDING = (
    _row("no-hang", "Rollouts of scripts end in time", "environment-hangs", _hangs, EMPTY),
    _row("finite", "Every rollout has a finite reward", "reward-not-finite", _not_finite, EMPTY),
    _row("bounded", "No rollout earns an infinite reward", "reward-exploitable", _infinite, EMPTY),
    _row("no-error", "Rollouts of scripts end without errors of the environment", "environment-fails", _errors),
    _row(
        "twice",
        "A transcript earns the same when it is played at once again",
        "reward-nondeterministic",
        _twice,
        f"{EMPTY}, {REVERSED}",
    ),
)
"""Rollouts end, and their rewards are numbers that stay the same."""
PAID = (
    _row("varies", "Perfect transcripts, empty replies and other words do not all earn the same", "reward-constant", _constant, PERFECT),
    _row("silence", "An empty reply does not earn as much as perfect transcripts", "reward-exploitable", _silence_is_gold, PERFECT),
    _row("not-swallowed", "No error is caught where a perfect transcript earns nothing", "grader-swallows-errors", _swallowed, PERFECT),
    _row("parsed", "Answers that count alone count in perfect transcripts", "answers-not-parsed", _parsed, PERFECT),
    _row("parsed-by-task", "Answers that count alone in some tasks count there in perfect transcripts", "reward-wrong", lambda m: _parsed(m, all_of_them=False), PERFECT),
    _row("not-fined", "A perfect transcript does not earn less than an empty reply", "reward-wrong", _fined, PERFECT),
    _row("not-overpaid", "Empty replies do not earn most of what perfect transcripts of other tasks do", "reward-exploitable", _overpaid, PERFECT),
    _row("follows-task", "What perfect transcripts and empty replies earn has the same order in all tasks", "reward-wrong", lambda m: _overpaid(m, most=False), PERFECT),
    Inequality("paid", "A perfect transcript earns more than an empty reply, in every task", "oracle-fails", _oracle, "oracle"),
)  # fmt: skip
"""Right answers are paid."""
READ = (
    _row("numbers", "Numbers in the working are not taken for the answer", "answers-not-parsed", lambda m: _numbers(m, all_of_them=True), PERFECT),
    _row("some-numbers", "Numbers in the working do not change what most answers earn", "reward-wrong", lambda m: _numbers(m, all_of_them=False), PERFECT),
    _row("long", "An answer after long working is read", "reward-wrong", _long, PERFECT),
    Inequality("calls-work", "The calls of perfect transcripts do not all end in errors", "tools-fail", _blamed("fails"), "tool", (f"{PERFECT}, {IDEAL}",)),
    _row("calls-count", "What perfect transcripts earn depends on what their calls find", "reward-wrong", _blamed("reward"), f"{PERFECT}, {IDEAL}"),
    Inequality("calls-find", "The calls of perfect transcripts find what their answers need", "tool-results-wrong", _blamed("tools"), "tool", (f"{PERFECT}, {IDEAL}",)),
)  # fmt: skip
"""Right answers are read, however they are written."""
REFUSED = (
    _row("not-logged", "No error is only logged while a reply is scored", "grader-swallows-errors", _logged, EMPTY),
    _row("form", "What form alone earns is less than what right answers add", "reward-format-dominated", _form, PERFECT),
    _row("empty", "An empty reply earns little", "reward-exploitable", _empty, PERFECT),
    _row("not-given", "The prompt, sent back, does not hold the answer in the form that is asked for", "answer-in-prompt", _given, PERFECT),
    *(
        _row(kind.replace(" ", "-"), f"{kind.capitalize()} earns little", "reward-exploitable", _cheap(kind, CONSTANT_EARNS if "constant" in kind else CHEAP_EARNS), PERFECT)
        for kind in CHEAP
    ),
    *(_row(kind.replace(" ", "-"), f"{kind.capitalize()} earns less than the right answer", "reward-exploitable", _near(kind), PERFECT) for kind in NEAR),
    _row("vain-calls", "Calls in vain add nothing", "reward-exploitable", _calls_paid, PERFECT),
)  # fmt: skip
"""Wrong answers are not paid."""
