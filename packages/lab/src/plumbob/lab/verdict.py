"""From the outcomes of criteria to a verdict: status, confidence and one sentence of evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plumbob.lab.criteria.evaluate import Outcome, Runs, evaluate
from plumbob.lab.criteria.statistics import MIN_SEEDS
from plumbob.lab.files.hypothesis import Hypothesis, Level, Status

HIGH_SEEDS = 5
HIGH_P = 0.01
"""A verdict has high confidence with at least this many seeds, if every criterion that decided it has a smaller p."""


@dataclass(frozen=True)
class Verdict:
    """What an experiment says about its hypothesis."""

    status: Status
    confidence: Level
    evidence: str
    """One sentence with the effect, its interval and the number of seeds."""
    seeds: int
    """Number of seeds that every arm has finished."""
    for_it: list[Outcome]
    against_it: list[Outcome]

    def to_json(self, hypothesis: Hypothesis) -> dict[str, Any]:
        return {
            "status": self.status,
            "confidence": self.confidence,
            "evidence": self.evidence,
            "seeds": self.seeds,
            "criteria": [list(hypothesis.validated_if), list(hypothesis.invalidated_if)],
            "validated_if": [outcome.to_json() for outcome in self.for_it],
            "invalidated_if": [outcome.to_json() for outcome in self.against_it],
        }


def judge(hypothesis: Hypothesis, runs: Runs) -> Verdict:
    """Evaluate all criteria of a hypothesis on the finished runs of its arms.

    validated: every criterion of `validated_if` holds, and none of `invalidated_if`. invalidated: a criterion of
    `invalidated_if` holds and none of `validated_if`; or there is none of the former, and all of the latter do not hold.
    partial: criteria on both sides hold, or some of `validated_if` hold and others do not. inconclusive: else, and with
    fewer than `MIN_SEEDS` seeds that all arms have finished. The confidence is high by `HIGH_SEEDS` and `HIGH_P`, else
    medium for a validated or invalidated hypothesis, else low.
    """
    for_it, against_it = ([evaluate(c, runs) for c in criteria] for criteria in hypothesis.criteria())
    seeds = len(set.intersection(*(set(runs.get(arm, {})) for arm in hypothesis.arms))) if hypothesis.arms else 0
    status = "inconclusive" if seeds < MIN_SEEDS else _status(for_it, against_it)
    confidence: Level = "low"
    if status in ("validated", "invalidated"):
        side = [o for o in (for_it if status == "validated" else against_it or for_it) if o.holds is not None]
        certain = seeds >= HIGH_SEEDS and all(o.every or (o.p is not None and o.p < HIGH_P) for o in side)
        confidence = "high" if certain else "medium"
    return Verdict(status, confidence, _evidence(status, seeds, for_it, against_it), seeds, for_it, against_it)


def _status(for_it: Sequence[Outcome], against_it: Sequence[Outcome]) -> Status:
    held = [o for o in for_it if o.holds]
    against = any(o.holds for o in against_it)
    if held and (against or any(o.holds is False for o in for_it)):
        return "partial"
    if for_it and len(held) == len(for_it):
        return "validated"
    if not held and (against or (for_it and not against_it and all(o.holds is False for o in for_it))):
        return "invalidated"
    return "partial" if held else "inconclusive"


def _evidence(status: Status, seeds: int, for_it: Sequence[Outcome], against_it: Sequence[Outcome]) -> str:
    if not seeds:
        return "no seed is finished in every arm"
    if seeds < MIN_SEEDS:
        return f"too few seeds: {seeds} of at least {MIN_SEEDS}"
    shown = next((o for o in (*for_it, *against_it) if o.holds), None)
    shown = shown or next((o for o in (*for_it, *against_it) if o.effect is not None), None)
    if shown is None:
        notes = [o.note for o in (*for_it, *against_it) if o.note]
        return notes[0] if notes else "no criterion"
    return f"`{shown.text}` {shown.word}: {shown.told}, {seeds} seeds"
