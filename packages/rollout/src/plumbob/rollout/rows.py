"""Convert a finished rollout to a training row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plumbob.rollout.types import Sample

if TYPE_CHECKING:
    import verifiers.v1 as vf


def to_sample(trace: vf.Trace, group: str) -> Sample:
    """The training row of a finished trace.

    `group`: the id of the rollout's group. Raises ValueError if the trace does not have exactly one branch.
    """
    branches = trace.branches
    if len(branches) != 1:
        raise ValueError(f"trace {trace.id} has {len(branches)} branches; a token-exact rollout has one")
    branch = branches[0]
    return Sample(
        token_ids=branch.token_ids,
        loss_mask=branch.sampled_mask,
        sampling_logprobs=branch.logprobs,
        reward=trace.reward,
        group=group,
        stop=trace.stop_condition or "",
        truncated=trace.is_truncated or trace.is_timeout,
        policy_version=min(trace.info.get("policy_versions", ()), default=None),
        seconds=max(trace.timing.agent.end - trace.timing.agent.start, 0.0),
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
        rewards={name: reward.value for name, reward in trace.rewards.items() if reward is not None},
        reward_weights={name: reward.weight for name, reward in trace.rewards.items() if reward is not None},
        trace_id=trace.id,
        tool_seconds=trace.timing.agent.harness.duration,
    )
