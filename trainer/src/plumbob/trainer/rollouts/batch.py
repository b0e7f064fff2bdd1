"""The rollouts of one training step as all processes know them, and why a run cannot go on without any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.trainer.rollouts.groups import NOT_FINITE_LOGPROB
from plumbob.trainer.rollouts.requests import Request
from plumbob.trainer.rollouts.task_order import Taken
from plumbob.trainer.run_files.token_record import TokenRecord


class RunFailed(Exception):
    """The run cannot go on, for example because all rollouts failed; the message says why."""

    def __init__(
        self,
        message: str,
        records: Sequence[vf.Trace | str] = (),
        cause: str | None = None,
        *,
        unmoved: bool = False,
        resume_with: str = "",
    ) -> None:
        super().__init__(message)
        self.records = records
        """Traces that show the failure; a text is a trace as a line of JSON."""
        self.cause = cause
        """Id of the cause if it was the step's rollouts; else None."""
        self.unmoved = unmoved or cause is not None
        """Whether no weight has changed in the step, so that the weights are those after the last finished one."""
        self.resume_with = resume_with
        """Option with which the run can go on, from its last checkpoint; "" if none is known."""


@dataclass
class Batch:
    """The rollouts of one training step, equal on every rank except for `records`, `traces` and `seconds`."""

    samples: list[Sample] = field(default_factory=list)
    """Samples to train on. With `--zero-signal refill`, of as many groups as a step has, with signal first."""
    drawn: list[Sample] = field(default_factory=list)
    """Every usable sample of the step, those of replaced groups included. Metrics describe these."""
    records: list[vf.Trace | str] = field(default_factory=list)
    """On rank 0, every rollout's trace, group by group, those of other processes as lines of JSON; else empty."""
    token_records: dict[str, TokenRecord] = field(default_factory=dict)
    """On rank 0, what training computed for the tokens of each row, by the id of its trace; empty before training."""
    traces: list[vf.Trace] = field(default_factory=list)
    """Traces of this rank's own rollouts; in a step without a record, of those that no other process has played."""
    failures: list[str] = field(default_factory=list)
    """Reason of each rollout that cannot be used, in one line: it failed, has no turn, or is not finite."""
    requests: list[Callable[[], dict[str, list[Request]]]] | None = None
    """What finds, group by group, the requests to the engine of this rank's own rollouts, by the ids of their traces; None in a
    step without a record."""
    engine_failures: int = 0
    """Number of failed rollouts in which the environment did not fail: the engine did, or the chat template."""
    num_rollouts: int = 0
    """Number of rollouts, failed ones included."""
    stale: list[Sample] = field(default_factory=list)
    """Samples discarded because a rollout of their group is older than --max-staleness allows."""
    stuck: int = 0
    """Number of rollouts whose environment did not return from a tool, hook or reward in time."""
    no_turn: int = 0
    """Number of rollouts that ended before their first turn, for example because the prompt alone is too long."""
    not_finite: int = 0
    """Number of rollouts left out because a reward or log-probability is NaN or infinite."""
    groups_broken: int = 0
    """Number of groups left out whole, because without the rollouts that the engine failed they are no fair sample."""
    rounds: int = 0
    """Number of rounds of sampling; more than 1 with `--zero-signal refill`."""
    groups_replaced: int = 0
    """Number of groups replaced by `--zero-signal refill`."""
    generated_tokens: int = 0
    """Number of sampled tokens, on all processes together."""
    seconds: float = 0.0
    """Seconds that sampling took on this process."""
    cursor: int = 0
    """Number of tasks that the run has taken up to the end of this step, over all epochs."""
    taken: list[Taken] = field(default_factory=list)
    """The task of each group of the step, replaced groups included."""

    @property
    def errored(self) -> int:
        """Number of rollouts that failed in the environment or the engine."""
        return len(self.failures) - self.no_turn - self.not_finite

    def release(self) -> None:
        """Let go of everything in it, at the end of its step.

        A task that an environment has left running can hold an exception for as long as it runs. The exception holds the
        frames that it has passed, each frame the one that called it, and those of the training step hold this batch.
        """
        vars(self).update(vars(Batch()))


def discard_stale(batch: Batch, oldest: int) -> None:
    """Move every group with a sample that began under a policy version below `oldest` from the batch to `stale`.

    Whole groups, because the oldest rollouts of a group are its longest: without them the others would be compared with
    a mean that is not the policy's (thinking-machines-lab/tinker-cookbook#822).
    """
    too_old = {s.group for s in batch.drawn if s.policy_version is not None and s.policy_version < oldest}
    batch.stale = [s for s in batch.drawn if s.group in too_old]
    batch.drawn = [s for s in batch.drawn if s.group not in too_old]
    batch.samples = [s for s in batch.samples if s.group not in too_old]


def nothing_to_use(batch: Batch) -> RunFailed:
    """Why no rollout of the step can be used, with the commonest reasons first."""
    counts = Counter(batch.failures).most_common()
    reasons = "; ".join(f"{count} x {reason}" if len(counts) > 1 else reason for reason, count in counts[:3])
    more = f"; and {len(counts) - 3} other reasons" if len(counts) > 3 else ""
    rest = batch.num_rollouts - len(batch.failures)
    broken = f"; the other {rest} are in groups that the engine failed" if rest else ""
    most = max(batch.errored, batch.no_turn, batch.not_finite)
    cause = (
        "rollouts-fail"
        if most == batch.errored
        else "engine-trainer-mismatch"
        if most == batch.failures.count(NOT_FINITE_LOGPROB)
        else "not-finite"
        if most == batch.not_finite
        else "truncated-rollouts"
    )
    # Of rollouts that did not fail, "failed" would be a false word.
    what = "failed" if batch.errored == batch.num_rollouts else "cannot be used"
    count = batch.num_rollouts
    return RunFailed(f"all {count} rollouts {what}: {reasons}{more}{broken}", batch.records, cause)
