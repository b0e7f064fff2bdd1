"""One order of verdicts for all that was examined: an environment, records of training steps, and the course of a run.

A trainer gathers findings with `add`; `Examination` says which cause is the answer, what follows from it, and what was not
examined. It imports neither torch nor a trainer, and `page` prints it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from plumbob.doctor.causes import CAUSES, is_symptom
from plumbob.doctor.findings import STAGES, Cause, Finding, Stage

if TYPE_CHECKING:  # it loads libraries that a page need not wait for
    from plumbob.doctor.stages import Outcome

Source = Literal["settings", "environment", "run", "records", "trends"]
"""What was examined: settings alone, an environment by scripts, how a run ended, records of its steps, or its metrics."""
SOURCES: tuple[Source, ...] = ("environment", "run", "records", "settings", "trends")
"""In the order in which they explain each other. An environment is examined without model and trainer, so what is wrong in
it is a reason of all else; a record is exact, where settings and metrics are only a hint.
"""


@dataclass
class Examination:
    """What was examined, and what was found."""

    env: str = "ENV"
    model: str = "MODEL"
    found: list[tuple[Source, Finding]] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    """What was not examined, and how sure the rest is: a sentence each."""
    remedies: Mapping[str, str] = field(default_factory=dict)
    """Id of a cause -> what to do in the words of another trainer than ours."""
    notes: list[str] = field(default_factory=list)
    """What else a user should know, such as how the reward has changed: a sentence each."""

    def add(self, source: Source, *findings: Finding) -> list[Finding]:
        """Take in findings, and return them."""
        self.found += [(source, finding) for finding in findings]
        return list(findings)

    def ranked(self) -> list[tuple[Source, Finding]]:
        """The failures, the answer first: causes before symptoms, then by what explains the other.

        The rows of an environment's table, and those of metrics, have an order of their own; in records, it is that of the
        stages.
        """

        def place(one: tuple[Source, Finding]) -> tuple[bool, int, int]:
            source, finding = one
            own_order = source in ("environment", "settings", "run")
            stage = 0 if own_order else STAGES.index(stage_of(finding))
            return is_symptom(finding.cause or ""), SOURCES.index(source), stage

        return sorted((one for one in self.found if one[1].cause is not None), key=place)

    def advice(self, cause: Cause) -> str:
        return self.remedies.get(cause.id) or cause.advice(self.env, self.model)

    @property
    def causes(self) -> list[str]:
        """Ids of causes and symptoms, each once, the answer first."""
        return list(dict.fromkeys(f.cause for _, f in self.ranked() if f.cause))

    @property
    def names_reason(self) -> bool:
        """Whether a cause was found, and not symptoms alone."""
        return any(not is_symptom(cause) for cause in self.causes)

    @property
    def code(self) -> int:
        """The command's exit code: 1 if something failed, 2 if nothing did but a check could not be completed, else 0."""
        if self.causes:
            return 1
        return 2 if any(f.verdict == "error" for _, f in self.found) else 0

    def of_stage(self, stage: Stage) -> list[Finding]:
        return [finding for _, finding in self.found if stage_of(finding) == stage]

    def as_json(self, title: str) -> dict[str, Any]:
        """All of it."""
        return {
            "title": title,
            "cause": next((cause for cause in self.causes if not is_symptom(cause)), None),
            "symptoms": [cause for cause in self.causes if is_symptom(cause)],
            "findings": [
                {"source": source, **dataclasses.asdict(finding), "stage": stage_of(finding)}
                for source, finding in self.found
            ],
            "causes": {
                name: {**dataclasses.asdict(CAUSES[name]), "fix": self.advice(CAUSES[name])} for name in self.causes
            },
            "notes": self.notes,
            "limits": self.limits,
        }


def stage_of(finding: Finding) -> Stage:
    """The area that a finding belongs to."""
    if finding.stage is not None:
        return finding.stage
    return CAUSES[finding.cause].stage if finding.cause in CAUSES else "trends"


def of_outcomes(outcomes: Iterable[Outcome], step: int) -> list[Finding]:
    """What the stages say of the record of a step (from 1), as findings."""
    found = []
    for one in outcomes:
        evidence = one.evidence
        if one.verdict == "fail" and one.what:
            evidence += f"; these numbers fit {one.what}"
        verdict: Any = "unsure" if one.verdict == "not examined" else one.verdict
        cause = one.cause if one.verdict == "fail" else None
        found.append(Finding(one.check, verdict, evidence, cause, one.stage, step if cause else None))
    return found


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of several steps, each check once: its first failure, or else what is known of it."""
    known: dict[str, Finding] = {}
    rank = {"fail": 0, "error": 1, "pass": 2, "unsure": 3}
    for finding in findings:
        before = known.get(finding.check)
        if before is None or rank[finding.verdict] < rank[before.verdict]:
            known[finding.check] = finding
    return list(known.values())
