"""The types of a diagnosis: a finding is the verdict of one check, and a cause is a reason why a run does not learn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

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

    H01: instability of advantages scaled by a tiny standard deviation. H02: errors of token masks. H03: a wrong KL
    term. H04: truncation of the context. H05: a degraded reward, or a reward whose distribution has no signal. H06:
    LoRA and weight sync. H07: environments of several steps against those of one. H08: exploding gradients. Comparisons
    of evaluation with training have no number.
    """
    source: str = ""
    """Where the cause was reported: an arXiv number, or owner/repository#issue on GitHub."""
    includes: tuple[str, ...] = ()
    """Ids of more specific causes. It is named in their place where the evidence does not tell them apart."""
    symptom: bool = False
    """Whether it says only what is seen, which more than one mistake can be the reason for."""

    def advice(self, env: str, model: str) -> str:
        """What to do, with the environment and the model of a run in the commands, in place of ENV and MODEL."""
        names = {"ENV": env, "MODEL": model}
        return re.sub(r"\b(ENV|MODEL)\b", lambda found: names[found[1]], self.fix)


@dataclass(frozen=True)
class Place:
    """Where in a run's stored rollouts one can see what a finding says: one rollout, or some of its tokens."""

    step: int
    """The step whose file in traces/ holds the rollout, from 1."""
    task: str
    """The task's key in the trace: `task.key`."""
    rollout: int
    """Number of the rollout among those of this task in the step's file, from 0."""
    tokens: tuple[int, int] | None = None
    """First and last token of the row, both included, from 0; None: the whole rollout."""

    @property
    def fragment(self) -> str:
        """The part after `#` of a link to this place in the page that `report` writes."""
        token = f"&token={self.tokens[0]}" if self.tokens else ""
        return f"step={self.step}&task={quote(self.task)}&rollout={self.rollout}{token}"


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
    places: tuple[Place, ...] = ()
    """A few rollouts or tokens that show it, the clearest first; empty if it is about numbers alone."""
    command: str = ""
    """A command that shows it again; empty if the command that found it is the one."""

    @classmethod
    def of(cls, check: str, outcome: tuple[str | None, str]) -> Finding:
        """The finding of a check that fails if it names a cause. `outcome`: (id of the cause or None, evidence)."""
        cause, evidence = outcome
        return cls(check, "fail" if cause else "pass", evidence, cause)

    def __post_init__(self) -> None:
        if (self.verdict == "fail") != (self.cause is not None):
            raise ValueError(f"A finding has a cause if and only if it failed: {self.check!r} is {self.verdict}.")
