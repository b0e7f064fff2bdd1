"""The types of a diagnosis: a finding is the verdict of one check, and a cause is a reason why a run does not learn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "unsure", "error"]
"""`unsure`: the check was inconclusive. `error`: the check could not be completed, so its result is unknown."""


@dataclass(frozen=True)
class Cause:
    """One reason why a run does not learn."""

    id: str
    """Stable name in kebab case."""
    sentence: str
    """What is wrong, and what follows from it."""
    fix: str
    """What to do, in options or code."""
    hypotheses: tuple[str, ...] = ()
    """The usual suspicions that the cause belongs to.

    H01: scaling by a tiny standard deviation. H02: masks. H03: the KL term. H04: truncation. H05: the reward. H06:
    weight sync and LoRA. H07: tasks of several steps against tasks of one. H08: evaluation against training.
    """
    source: str = ""
    """Where the cause was reported: an arXiv number, or owner/repository#issue on GitHub."""

    def advice(self, env: str, model: str) -> str:
        """What to do, with the environment and the model of a run in the commands, in place of ENV and MODEL."""
        names = {"ENV": env, "MODEL": model}
        return re.sub(r"\b(ENV|MODEL)\b", lambda found: names[found[1]], self.fix)


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """What the check expects, as a statement that is true in a healthy run."""
    verdict: Verdict
    evidence: str
    """The measured numbers behind the verdict."""
    cause: str | None = None
    """Id of a cause in the catalogue if the verdict is `fail`, else None."""
    step: int | None = None
    """Training step in which the check first failed, if it belongs to a step."""

    def __post_init__(self) -> None:
        if (self.verdict == "fail") != (self.cause is not None):
            raise ValueError(f"A finding has a cause if and only if it failed: {self.check!r} is {self.verdict}.")
