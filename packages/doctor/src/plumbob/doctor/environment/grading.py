"""What transcripts must earn: right answers more than wrong ones, and the same transcript the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import correlation, fmean, median, stdev

from plumbob.doctor.environment.matrix import BESIDE, TOLERANCE, Evidence, Matrix, about, alike, otherwise, refuted
from plumbob.doctor.environment.texts import short
from plumbob.doctor.environment.transcripts import CHEAP, EMPTY, NEAR, ODD, PERFECT, number_of

FAILED, FAILED_OF_A_KIND = 0.1, 0.33
"""Largest share of the perfect transcripts and empty replies that may fail, and of another kind of transcript."""
FEWEST, FEW = 6, 3
"""Fewest tasks in which a kind of transcript is judged, and fewest failures; fewest changes of rollouts that are played with
others: one or two may have another reason, such as a server that was busy."""
HALF = 0.5
"""Share of a perfect transcript's reward above an empty one's that one which solves nothing may earn, and that a right answer
may lose by its letters; share of the tasks in which it may, or in which a wrong answer near to the right one may earn as much."""
MOSTLY = 0.8
"""Share that may be earned by one reply to all tasks (of two answers, the more frequent one has half or more), and by form where
another component of the reward tells right answers from it."""

# Rollouts end


def ends(m: Matrix) -> Evidence | None:
    held = m.held_out.cells.get(EMPTY, {}) if m.held_out else {}
    for name, cells in {**m.cells, "an empty reply to a held-out task": held}.items():
        hung = [p for p in cells.values() if p.failure == "hangs"]
        bad = hung or [p for p in cells.values() if p.failure == "fails" and name not in ODD]
        share = 0.0 if hung else FAILED if name in (PERFECT, EMPTY) else FAILED_OF_A_KIND
        text, least = f"{{}} rollouts ({name}) end in errors, or do not end; the first: ", min(FEWEST, len(cells))
        if bad and (found := refuted(bad, cells, text, lambda p: p.error, least=1 if hung else least, share=share)):
            return found
    return None


def finite(m: Matrix) -> Evidence | None:
    every = [p for cells in m.cells.values() for p in cells.values()]
    bad = [p for p in every if p.failure == "not-finite"]
    return refuted(bad, every, "{} rollouts have no finite reward; the first: ", lambda p: p.error)


def twice(m: Matrix) -> Evidence | None:
    return otherwise([*m.again.values()], "{} transcripts earn something else when they are played again")


def unlike_alone(m: Matrix) -> Evidence | None:
    """What a rollout earns depends on nothing but itself: not on what is played beside it."""
    if found := otherwise(m.beside, f"{{}} transcripts earn something else {BESIDE}", FEW):
        return found
    bad = [p for _, p in m.beside if not p.ok]
    found = refuted(bad, m.beside, f"{{}} rollouts fail {BESIDE}: ", lambda p: p.error, least=FEW, share=FAILED)
    return found and Evidence(found.text, cause="rollouts-fail")


# Right answers are paid


def unpaid(m: Matrix) -> Evidence | None:
    for i, error in m.hand.raised.items():
        return Evidence(f"{len(m.hand.raised)} perfect transcripts raise, in {m.hand.tasks[i].key}: {error[:200]}")
    gone = [m.hand.tasks[i].key for i in m.lifts if i not in m.paid]
    earned, empty = (fmean([p.reward for p in m.kind(kind).values()] or [0.0]) for kind in (PERFECT, EMPTY))
    text = (
        f"perfect transcripts of {len(m.lifts)} tasks earn {earned:.3g} on average, empty replies {empty:.3g}; in {len(gone)} the "
        f"former earn no more, such as {', '.join(gone[:3])}"
    )
    return Evidence(text) if gone else None


def overpaid(m: Matrix) -> Evidence | None:
    """Where silence mostly earns what right answers usually do, and something else earns less, it is paid too much."""
    gone = [i for i in m.lifts if i not in m.paid]
    usual = median(m.kind(PERFECT)[i].reward for i in m.paid or m.lifts) if m.lifts else 0.0
    less = m.paid or any(not alike(played.reward, usual) for played in m.kind("other words").values())
    silent = [i for i in gone if m.floor(i) >= usual - TOLERANCE] if less and usual > TOLERANCE else []
    text = f"where right answers earn no more than an empty reply, it earns as much as they usually do, {usual:.3g}, in {{}}"
    return refuted(silent, gone, text, share=0.5)


def written(kind: str, control: str = PERFECT) -> Callable[[Matrix], Evidence | None]:
    """Makes the check that right answers keep half of their reward in this kind of transcript, where `control` keeps all of it."""

    def check(m: Matrix) -> Evidence | None:
        plain = m.shares(control)
        shares = [share for i, share in m.shares(kind).items() if plain.get(i, 0.0) >= 1 - TOLERANCE]
        less = [share for share in shares if share < HALF]
        text = f"with {kind}, {{}} right answers earn less than half"
        return refuted(less, shares, text, least=FEWEST, share=HALF)

    return check


# Wrong answers are not


def _clean(m: Matrix) -> list[str]:
    """Of several components of the reward, those that only perfect transcripts earn."""
    kinds = (PERFECT,), (EMPTY, *CHEAP)
    best, cheap = ([p.components for kind in own for p in m.kind(kind).values()] for own in kinds)
    names = sorted({name for earned in best for name in earned})
    means = [[fmean([earned.get(n, 0.0) for earned in of] or [0.0]) for of in (best, cheap)] for n in names]
    return [n for n, (high, low) in zip(names, means, strict=True) if len(names) > 1 and high > 0 and low < high / 10]


def empty(m: Matrix) -> Evidence | None:
    low = min((p.reward for cells in m.cells.values() for p in cells.values() if p.ok), default=0.0)
    shares = [(m.floor(i) - low) / (m.kind(PERFECT)[i].reward - low) for i in m.paid]
    text = f"an empty reply earns {fmean(shares or [0]):.0%} of the range from the worst transcript, {low:.3g}, to a right one"
    return Evidence(text) if _surely(shares) > (0.95 if _clean(m) else MOSTLY) else None


def _surely(shares: Sequence[float]) -> float:
    """The mean, less its standard error; 0 for a few."""
    return fmean(shares) - stdev(shares) / math.sqrt(len(shares)) if len(shares) >= FEWEST else 0.0


def cheap(m: Matrix) -> Evidence | None:
    """Transcripts that solve nothing earn much."""
    found, clean = list[str](), _clean(m)
    for kind in CHEAP:
        shares = m.shares(kind)
        most = MOSTLY if clean or "constant" in kind else HALF
        if _surely([*shares.values()]) > most and not _graded(m, kind, shares):
            earned = f"{kind} earns {fmean(shares.values()):.0%} of what right answers earn above empty ones"
            example = about(m.kind(kind)[max(shares, key=lambda i: shares[i])])
            found.append(f"{earned}, in {len(shares)} tasks, as {example}")
    apart = f"; only {', '.join(clean)} tells the two apart" if clean else ""
    return Evidence("; ".join(found[:3]) + apart, clean[0] if clean else "") if found else None


def _graded(m: Matrix, kind: str, shares: Mapping[int, float]) -> bool:
    """Whether wrong numbers earn less the farther they are from the right one: a grade for being near, which nothing exploits."""
    apart, earned = list[float](), list[float]()
    for i, share in shares.items():
        gold, said = number_of(m.hand.golds[i]), number_of(m.kind(kind)[i].last)
        if gold is not None and said is not None and math.isfinite(gold - said):
            apart.append(abs(gold - said))
            earned.append(share)
    different = min(len(set(apart)), len(set(earned)))
    return len(apart) >= FEWEST and different >= FEW and correlation(apart, earned) < -MOSTLY


def near(m: Matrix) -> Evidence | None:
    shares, text = m.shares(NEAR), f"{NEAR} earns as much as the right answer in {{}} tasks, as "
    full = [i for i, share in shares.items() if share >= 1 - TOLERANCE]
    first = [f"{about(m.kind(NEAR)[i])}, where the right one is {short(m.hand.golds[i])}" for i in full]
    return refuted(first, shares, text, str, least=FEWEST, share=HALF)
