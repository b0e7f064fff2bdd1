"""Do calls that find nothing new add to what a right answer earns? Then a policy learns to call, whatever its calls are for."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import Environment, spread

TASKS = 12
"""Number of tasks in which this is played."""
CALLS = 8
"""Number of further calls: who pays for each of them shows in their sum."""


def checks(environment: Environment) -> Iterator[Finding]:
    """Perfect transcripts are played once more with their first call made `CALLS` times before it."""
    gains, lifts = [], []
    played = [p for p in environment.oracles if p.trace.ok] if environment.has_oracle else []
    for number in spread(len(played), TASKS):
        best = played[number]
        turns = environment.turns_of(best.task)
        if len(turns) < 2 or not turns[0].calls:
            continue
        again = environment.say(best.task, *turns[:1] * CALLS, *turns)
        lift = best.reward - environment.floor(best.task)
        if again.trace.ok and lift > thresholds.REWARD_TOLERANCE:
            gains.append(again.reward - best.reward)
            lifts.append(lift)
    if len(gains) < thresholds.CHEAP_PLAYED:
        return
    share = fmean(gains) / fmean(lifts)
    evidence = (
        f"perfect transcripts of {len(gains)} tasks earn {share:+.0%} of their reward more if their first call is "
        f"made {CALLS} times in vain before it"
    )
    bad = share > thresholds.PAID_CALLS
    yield Finding.of("calls in vain earn nothing", ("reward-exploitable" if bad else None, evidence))
