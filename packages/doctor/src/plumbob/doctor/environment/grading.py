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

from plumbob.doctor.environment.inequality import Evidence, about, equal, refuted, rows, spread_of
from plumbob.doctor.environment.matrix import IDEAL, REVERSED, TOLERANCE, TWICE, Matrix, alike
from plumbob.doctor.environment.player import Failure, Played, Script
from plumbob.doctor.environment.texts import chosen, places, short
from plumbob.doctor.environment.transcripts import CHEAP, ECHO, EMPTY, NEAR, ODD, PERFECT

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


def _failures(m: Matrix, failure: Failure) -> list[Played]:
    return [p for cells in m.cells.values() for p in cells.values() if p.failure == failure]


def _hangs(m: Matrix) -> Evidence | None:
    hung = _failures(m, "hangs")
    return Evidence(f"{len(hung)} rollouts did not end in time; the first: {hung[0].error}", hung[0]) if hung else None


def _finite(m: Matrix, *, infinite: bool) -> Evidence | None:
    """What pays a reply without bounds would pay others of its kind nearly as much."""
    bad = [p for p in _failures(m, "not-finite") if p.error.endswith(" inf") == infinite]
    return Evidence(f"{len(bad)} rollouts have no finite reward; the first: {bad[0].error}", bad[0]) if bad else None


def _errors(m: Matrix) -> Evidence | None:
    kinds = {kind: [*cells.values()] for kind, cells in m.cells.items() if kind not in ODD}
    kinds["an empty reply to a held-out task"] = [*m.held_out.cells.get(EMPTY, {}).values()] if m.held_out else []
    for name, played in kinds.items():
        bad = [p for p in played if p.failure == "fails"]
        text = f"{{}} rollouts ({name}) end in errors; the first: {bad[0].error}" if bad else ""
        share = FAILED if name in (PERFECT, EMPTY) else FAILED_OF_A_KIND
        if (
            found := refuted(bad, played, text, bad[0] if bad else None, least=min(FEWEST, len(played)), share=share)
        ) is not None:
            return found
    return None


def _logged(m: Matrix) -> Evidence | None:
    """An error that is only logged, where the rollout earns no more than an empty reply."""
    for kind, cells in m.cells.items():
        for i, p in cells.items():
            if p.ok and p.logged and kind != EMPTY and p.reward <= m.floor(i) + TOLERANCE:
                return Evidence(f"{kind} earned {p.reward:.3g} in task {p.task.key}, and {p.logged[0]} was logged", p)
    return None


def _twice(m: Matrix) -> Evidence | None:
    again = {kind: m.kind(f"{kind}, {TWICE}") for kind in (PERFECT, EMPTY)}
    pairs = [(p, of[i]) for kind, of in again.items() for i, p in m.kind(f"{kind}, {REVERSED}").items() if i in of]
    bad = [(a, b) for a, b in pairs if not alike(a.reward, b.reward)]
    gap = max((abs(a.reward - b.reward) for a, b in bad), default=0.0)
    text = f"{{}} transcripts earn something else at once again, by up to {gap:.3g}"
    return refuted(bad, pairs, text, bad[0][1] if bad else None)


# Right answers are paid


def _constant(m: Matrix) -> Evidence | None:
    every = [p.reward for kind in (PERFECT, EMPTY, "other words") for p in m.kind(kind).values()]
    if m.paid or not equal(every) or abs(every[0]) <= TOLERANCE:
        return None  # if that is 0, right answers fail; whether wrong ones would earn something is not known
    return Evidence(f"perfect transcripts, empty replies and other words all earn {every[0]:.3g}")


def _unpaid(m: Matrix) -> list[int]:
    """Tasks whose perfect transcript earns no more than an empty reply, also with the settings for which it is made."""
    ideal = m.cells.get(f"{PERFECT}, {IDEAL}", {})
    return [i for i in m.unpaid if i not in ideal or ideal[i].reward <= m.floor(i) + TOLERANCE]


def _told(m: Matrix, unpaid: Sequence[int]) -> str:
    earned, empty = (spread_of(p.reward for p in m.kind(kind).values()) for kind in (PERFECT, EMPTY))
    keys = ", ".join(m.hand.tasks[i].key for i in unpaid[:3])
    return (
        f"perfect transcripts of {len(m.lifts)} tasks earn {earned}, empty replies {empty}; in {len(unpaid)} the former earn no "
        f"more, such as {keys}"
    )


def _parsed(m: Matrix) -> Evidence | None:
    unpaid, alone = _unpaid(m), m.kind("the answer alone")
    bare = [i for i in unpaid if i in alone]
    if 2 * len(unpaid) <= len(m.lifts) or not bare or any(alone[i].reward <= m.floor(i) + TOLERANCE for i in bare):
        return None
    return Evidence(f"{_told(m, unpaid)}; the answer alone earns something in all of {len(bare)}", alone[bare[0]])


def _swallowed(m: Matrix) -> Evidence | None:
    """The error that is raised and caught wherever a perfect transcript earns nothing, and nowhere else."""
    unpaid = _unpaid(m)
    if not unpaid or 2 * len(unpaid) > len(m.lifts):
        return None
    usual = set[str]().union(*_raised(m, m.paid))
    error = min(set.intersection(*_raised(m, unpaid)) - usual, default="")
    text = f"{_told(m, unpaid)}; whenever they do, and never otherwise, an error is raised and caught: {error}"
    return Evidence(text, m.kind(PERFECT)[unpaid[0]]) if error else None


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


def _overpaid(m: Matrix) -> Evidence | None:
    """Where right answers earn nothing in some tasks and wrong ones all in others, something else decides."""
    unpaid = _unpaid(m)
    usual = median(m.kind(PERFECT)[i].reward for i in m.paid or m.lifts) if m.lifts else 0.0
    over = [i for i in unpaid if m.floor(i) >= usual - TOLERANCE and (m.paid or usual > TOLERANCE)]
    text = f"{_told(m, unpaid)}; in {{}} of these an empty reply earns as much as right answers usually do"
    return refuted(over, unpaid, text, m.kind(EMPTY)[over[0]] if over else None, share=0.5)


def _oracle(m: Matrix) -> Evidence | None:
    unpaid = _unpaid(m)
    for i, error in m.hand.raised.items():
        return Evidence(
            f"the perfect transcripts of {len(m.hand.raised)} tasks raise, in {m.hand.tasks[i].key}: {error[:200]}"
        )
    return Evidence(_told(m, unpaid), m.kind(PERFECT)[unpaid[0]]) if unpaid else None


def _vain(m: Matrix) -> Evidence | None:
    """Perfect transcripts earn less than 1, with the settings for which they are made, and as much without their calls."""
    ideal, alone, best = m.kind(f"{PERFECT}, {IDEAL}"), m.kind("the answer without calls"), m.kind(PERFECT)
    known = [i for i in ideal if i in alone and i in best]
    low = [i for i in known if ideal[i].reward < 1 - NOT_PERFECT and alike(best[i].reward, alone[i].reward)]
    if 2 * len(low) <= len(known):
        return None
    earned = spread_of(ideal[i].reward for i in low)
    return Evidence(
        f"in {len(low)} of {len(known)} tasks the perfect transcript earns {earned}, and as much without its calls",
        ideal[low[0]],
    )


def _read(kind: str) -> Callable[[Matrix], Evidence | None]:
    """Where plain working before an answer takes nothing from it, another text there does not take everything."""

    def check(m: Matrix) -> Evidence | None:
        plain, changed, best = m.kind("working before the answer"), m.kind(kind), m.kind(PERFECT)
        known = [i for i in m.paid if i in plain and i in changed and alike(plain[i].reward, best[i].reward)]
        gone = [i for i in known if changed[i].reward <= m.floor(i) + TOLERANCE]
        if len(known) < FEWEST or 2 * len(gone) <= len(known):
            return None
        return Evidence(f"with {kind}, {len(gone)} of {len(known)} perfect transcripts earn nothing", changed[gone[0]])

    return check


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
            text = f"{kind} earns {fmean(shares.values()):.0%} of what right answers earn above empty replies"
            example = m.kind(kind)[max(shares, key=lambda i: shares[i])]
            return Evidence(f"{text}; only {', '.join(clean)} tells the two apart", example, clean[0])
    return None


def _empty(m: Matrix) -> Evidence | None:
    low = min((p.reward for cells in m.cells.values() for p in cells.values() if p.ok), default=0.0)
    shares = [(m.floor(i) - low) / (m.kind(PERFECT)[i].reward - low) for i in m.paid]
    if _clean(m) or _surely(shares) <= EMPTY_EARNS:
        return None
    text = f"an empty reply earns {fmean(shares):.0%} of the range from the worst transcript, {low:.3g}, to the perfect one"
    return Evidence(text, m.kind(EMPTY)[m.paid[0]])


def _cheap(kind: str) -> Callable[[Matrix], Evidence | None]:
    most = CONSTANT_EARNS if "constant" in kind else CHEAP_EARNS

    def check(m: Matrix) -> Evidence | None:
        shares = m.shares(kind)
        if _clean(m) or _surely([*shares.values()]) <= most:
            return None
        example = m.kind(kind)[max(shares, key=lambda i: shares[i])]
        text = f"{kind} earns {fmean(shares.values()):.0%} of what right answers earn above empty ones, in {len(shares)} tasks"
        return Evidence(f"{text}: {about(example)}", example)

    return check


def _given(m: Matrix) -> Evidence | None:
    """Prompts that earn the reward when they are sent back hold the answer in the form that is asked for.

    A reward that finds the answer anywhere in a reply pays for it among other answers, too: then the reward is at fault.
    """
    found, several = _cheap(ECHO)(m), m.shares("several answers joined by or")
    paid = [i for i, share in m.shares(ECHO).items() if share > 0]
    held = [i for i in paid if m.hand.golds[i] and places(m.hand.golds[i], m.kind(EMPTY)[i].opening[-1].text)]
    lenient = sum(share > 0 for share in several.values())
    return found if several and 2 * len(held) > len(paid) and 2 * lenient < len(several) else None


def _near(kind: str) -> Callable[[Matrix], Evidence | None]:
    def check(m: Matrix) -> Evidence | None:
        found, best = m.kind(kind), m.kind(PERFECT)
        known = [i for i in m.paid if i in found]
        full = [i for i in known if found[i].reward >= best[i].reward - TOLERANCE]
        if len(known) < FEWEST or not full:
            return None
        text = (
            f"{kind} earns as much as the right answer in {{}} tasks: {about(found[full[0]])}, where the right one is"
        )
        return refuted(full, known, f"{text} {short(m.hand.golds[full[0]])}", found[full[0]], share=NEAR_EARNS)

    return check


def _calls_paid(m: Matrix) -> Evidence | None:
    shares = m.shares("calls in vain before it")
    more = fmean(shares.values()) - 1 if len(shares) >= FEWEST else 0.0
    example = next(iter(m.kind("calls in vain before it").values()), None)
    return (
        Evidence(f"eight calls in vain add {more:.0%} to what perfect transcripts earn", example)
        if more > VAIN_CALLS
        else None
    )


_rows = rows("reward", PERFECT, EMPTY)
ENDING = rows("reward")(
    ("no-hang", "Rollouts of scripts end in time", "environment-hangs", _hangs),
    ("finite", "Every rollout has a finite reward", "reward-not-finite", lambda m: _finite(m, infinite=False)),
    ("bounded", "No rollout earns an infinite reward", "reward-exploitable", lambda m: _finite(m, infinite=True)),
    ("no-error", "Rollouts of scripts end without errors of the environment", "environment-fails", _errors),
    ("twice", "A transcript earns the same when it is played at once again", "reward-nondeterministic", _twice),
)
"""Rollouts end, and their rewards are numbers that stay the same."""
PAID = _rows(
    ("varies", "Right answers, silence and other words do not all earn the same", "reward-constant", _constant),
    ("not-swallowed", "No error is caught where a right answer earns nothing", "grader-swallows-errors", _swallowed),
    ("parsed", "Answers that count alone count in perfect transcripts", "answers-not-parsed", _parsed),
    ("not-overpaid", "Silence does not earn what right answers to other tasks do", "reward-exploitable", _overpaid),
    ("paid", "A perfect transcript earns more than an empty reply, in every task", "oracle-fails", _oracle),
)
"""Right answers are paid."""
READ = _rows(
    (
        "numbers",
        "Numbers before the answer are not taken for it",
        "answers-not-parsed",
        _read("numbers before the answer"),
    ),
    ("long", "An answer after long working is read", "reward-wrong", _read("long working before the answer")),
    ("calls-count", "The calls of perfect transcripts find what their answers need", "tool-results-wrong", _vain),
)
"""Right answers are read, however they are written."""
REFUSED = _rows(
    ("not-logged", "No error is only logged while a reply is scored", "grader-swallows-errors", _logged),
    ("form", "What form alone earns is less than what right answers add", "reward-format-dominated", _form),
    ("empty", "An empty reply earns little", "reward-exploitable", _empty),
    ("not-given", "The prompt does not hold the answer in the form that is asked for", "answer-in-prompt", _given),
    *((kind, f"{kind.capitalize()} earns little", "reward-exploitable", _cheap(kind)) for kind in CHEAP),
    *(
        (kind, f"{kind.capitalize()} earns less than the right answer", "reward-exploitable", _near(kind))
        for kind in NEAR
    ),
    ("vain-calls", "Calls in vain add nothing", "reward-exploitable", _calls_paid),
)
"""Wrong answers are not paid."""
