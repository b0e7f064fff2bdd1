"""The catalogue of causes: every reason why a run does not learn that a probe or a rule can name.

A source is an arXiv number, or owner/repository#issue on GitHub.
"""

from __future__ import annotations

from collections.abc import Iterable

from plumbob.trainer.diagnosis.causes import engine, reward, rollouts, tokens, update
from plumbob.trainer.diagnosis.findings import Cause, Finding

CAUSES: dict[str, Cause] = {
    cause.id: cause for topic in (rollouts, reward, tokens, engine, update) for cause in topic.CAUSES
}
"""Id of a cause -> the cause."""


def named(findings: Iterable[Finding]) -> list[str]:
    """Ids of the causes of failed checks, each once, in the order of the checks; symptoms after all others.

    The first one is the answer: a check that sees only a symptom may come before one that finds the reason for it.
    """
    found = dict.fromkeys(f.cause for f in findings if f.cause is not None)
    return sorted(found, key=is_symptom)


def is_symptom(cause: str) -> bool:
    """Whether a cause of this id says only what is seen, not why. An id that the catalogue lacks does not."""
    return cause in CAUSES and CAUSES[cause].symptom


def names_reason(finding: Finding) -> bool:
    """Whether a check failed and names why, and not only a symptom."""
    return finding.cause is not None and not is_symptom(finding.cause)


def stands_for(cause: str) -> set[str]:
    """Its own id and those of the more specific causes that it includes."""
    return {cause, *(CAUSES[cause].includes if cause in CAUSES else ())}
