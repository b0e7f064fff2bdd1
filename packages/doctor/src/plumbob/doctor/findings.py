"""The types of a diagnosis: a finding is the verdict of one check, and a cause is a reason why a run does not learn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "fail", "unsure", "error"]
"""`unsure`: the check was inconclusive. `error`: the check could not be completed, so its result is unknown."""

Stage = str
"""A key of `AREAS`: where in a run something is wrong."""

AREAS: dict[Stage, str] = {
    "tasks": "tasks",  # what is asked
    "grading": "rewards",  # what transcripts earn
    "tools": "tools",  # what calls are answered with
    "evaluation": "evaluation",  # held-out tasks
    "rows": "prompts and rows",  # the prompt, and the rollout's tokens as they are trained
    "logprobs": "log-probabilities",  # what engine and trainer compute for the same tokens
    "sampling": "sampling and limits",  # how tokens are drawn, and what ends a rollout
    "advantages": "advantages",
    "loss": "loss",
    "gradient": "gradient",
    "optimizer": "optimizer",  # one update
    "sync": "weight sync",  # the engine's weights after it
    "saved": "saved model",  # the model that the run leaves behind
    "signal": "signal in groups",  # whether rollouts of a group differ
    "trends": "course of the run",  # what changes over a run
}
"""Stage -> what it is called in print, in the order of the data: a difference in an earlier one explains those in later ones."""

STAGES: tuple[Stage, ...] = tuple(AREAS)


@dataclass(frozen=True)
class Cause:
    """One reason why a run does not learn."""

    sentence: str
    """What is wrong, and what follows from it."""
    fix: str
    """What to do, in options or code. ENV and MODEL stand for those of the run."""
    source: str = ""
    """Where the cause was reported: an arXiv number, or owner/repository#issue on GitHub."""
    includes: tuple[str, ...] = ()
    """Ids of more specific causes. It is named in their place where the evidence does not tell them apart."""
    symptom: bool = False
    """Whether it says only what is seen, which more than one mistake can be the reason for."""
    id: str = ""
    """Stable name in kebab case, given by the catalogue like the stage in which it lies."""
    stage: Stage = "trends"

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
    stage: Stage | None = None
    """What was examined; None: the stage of the cause. A check that passes must give it to be counted in its area."""
    step: int | None = None
    """Training step in which the check first failed, if it belongs to a step."""
    place: str = ""
    """Where the user's code is that it is about, as "file.py:12 Class.function"; "" if it is unknown."""
    command: str = ""
    """A command that shows it again; empty if the command that found it is the one."""

    @classmethod
    def of(
        cls, check: str, cause: str, wrong: object, evidence: str, stage: Stage | None = None, step: int | None = None
    ) -> Finding:
        """A failure for this cause if something is `wrong`, else a pass. `step`: the training step that is judged."""
        if not wrong:
            return cls(check, "pass", evidence, None, stage)
        return cls(check, "fail", evidence, cause, stage, step)

    def __post_init__(self) -> None:
        if (self.verdict == "fail") != (self.cause is not None):
            raise ValueError(f"A finding has a cause if and only if it failed: {self.check!r} is {self.verdict}.")
