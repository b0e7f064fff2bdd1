"""How far an examination reached: what it did not examine, and how rare a fault may be that it misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plumbob.trainer.diagnosis.findings import Finding
    from plumbob.trainer.rollouts.tasks import Tasks

UNSEEN = (
    "what happens in later steps, such as a policy that exploits the reward, collapses or stops using tools. `train` "
    "watches for it, and `doctor RUN_DIR` examines it"
)
UNSEEN_OF_RUN = (
    "Not examined, because the model is not loaded: what controlled experiments show, such as a gradient that points the "
    "wrong way. `doctor ENV --model MODEL` with the options of the run makes them"
)


@dataclass
class Scope:
    """What was examined so far."""

    run: bool = False
    """Whether the metrics of a run were examined, and not a run before its start."""
    tasks: int = 0
    """Number of training tasks that were played without a model."""
    rollouts: int = 0
    """Number of rollouts that were sampled from the model."""
    groups: int = 0
    """Number of tasks of these rollouts."""
    steps: int = 0
    """Number of training steps that were taken, to watch them."""
    model: bool = True
    """Whether the model may be loaded."""
    broken: bool = False
    """Whether what was examined last leaves nothing for later checks to examine, such as no usable rollout."""
    stopped: bool = False
    """Whether checks were left out after a failure."""
    environments: Sequence[Tasks] | None = None
    """The tasks, once they are loaded."""

    def limits(self, findings: Sequence[Finding]) -> list[str]:
        """What was not examined and how sure the rest is, one sentence each."""
        told = []
        for verdict, what in (("unsure", "Not certain"), ("error", "Not completed")):
            told += [f"{what}: {f.check} ({f.evidence})" for f in findings if f.verdict == verdict]
        if self.tasks:
            told.append(
                f"{self.tasks} training tasks were played without a model: a fault of fewer than "
                f"{missed(self.tasks):.0%} of all tasks can be missed"
            )
        if self.rollouts:
            told.append(
                f"{self.rollouts} rollouts of {self.groups} tasks were sampled from the model: what happens in fewer than "
                f"{missed(self.rollouts):.1%} of rollouts, or {missed(self.groups):.0%} of tasks, can be missed"
            )
        if self.run:
            return told if self.rollouts else [*told, UNSEEN_OF_RUN]
        trained = f"only {self.steps} steps are taken" if self.steps else "nothing is trained"
        return [*told, f"Not examined, because {trained}: {UNSEEN}"]


def missed(count: int) -> float:
    """The largest share of cases that `count` independent samples miss with a probability of 5%.

    Example: missed(48) -> 0.06, because 0.94 ** 48 = 0.05.
    """
    return 1 - 0.05 ** (1 / max(count, 1))
