"""Every name in a line of metrics.jsonl, with its unit and meaning. docs/reference/metrics.md is generated from them.

A part in capitals is a placeholder for a name that the environment, the run or the machine gives: `env/NAME`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric. Example: `Metric("rollout/turns", "turns", "Assistant turns per rollout, mean.")`."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric's name, with any placeholder replaced."""
        return re.fullmatch(re.sub(r"[A-Z]+", ".+", self.name), name) is not None


METRICS = (
    Metric("step", "steps", "Number of the training step, from 1."),
    # Rewards
    Metric("reward/mean", "reward", "Mean reward of the step's rollouts."),
    Metric("reward/std", "reward", "Standard deviation of the step's rewards."),
    Metric("reward/COMPONENT", "reward", "Mean of one weighted component of the reward."),
    Metric(
        "reward/COMPONENT/variance_share",
        "share",
        "With several components: this one's share of the sum of their variances within groups, which training sees.",
    ),
    Metric("groups/count", "groups", "Groups with at least one finite reward."),
    Metric("groups/zero_signal", "groups", "Groups whose rewards are all equal: they add nothing to the gradient."),
    Metric("groups/zero_signal_share", "share", "Groups whose rewards are all equal, as a share of all groups."),
    Metric("groups/all_fail", "groups", "Groups without a signal that earned the step's lowest reward."),
    Metric("groups/all_pass", "groups", "Groups without a signal that earned more than the step's lowest reward."),
    Metric(
        "groups/tiny_spread_share",
        "share",
        "Groups with a signal whose rewards differ by less than 2% of the largest reward: scaling would blow them up.",
    ),
    Metric("groups/broken", "groups", "Groups left out whole because the engine failed some of their rollouts."),
    Metric("groups/rounds", "rounds", "Rounds of sampling; more than 1 with --zero-signal refill."),
    Metric("groups/replaced", "groups", "Groups replaced by --zero-signal refill."),
    Metric("advantage/mean_abs", "advantage", "Mean |advantage| of the step's rollouts."),
    Metric("advantage/largest", "advantage", "Largest |advantage| of the step's rollouts."),
    # Rollouts
    Metric("rollout/count", "rollouts", "Rollouts sampled in the step."),
    Metric(
        "rollout/errored",
        "rollouts",
        "Rollouts that failed in the environment or the engine; they are left out of their groups.",
    ),
    Metric("rollout/stale", "rollouts", "Rollouts discarded because they are older than --max-staleness allows."),
    Metric(
        "rollout/not_finite", "rollouts", "Rollouts left out because a reward or log-probability is NaN or infinite."
    ),
    Metric("rollout/truncated_share", "share", "Rollouts that a limit cut off."),
    Metric("rollout/stopped/REASON", "share", "Rollouts that ended for this reason."),
    Metric("rollout/turns", "turns", "Assistant turns per rollout, mean."),
    Metric("rollout/tool_calls", "calls", "Tool calls per rollout, mean."),
    Metric("rollout/tool_errors", "calls", "Tool calls per rollout that ended in an error, mean."),
    Metric("rollout/malformed_calls", "calls", "Tool calls per rollout that could not be read, mean."),
    Metric("rollout/sampled_tokens", "tokens", "Sampled tokens per rollout, mean."),
    Metric("rollout/row_tokens", "tokens", "Tokens of a rollout's row, prompts and tool results included, mean."),
    Metric("env/NAME", "-", "A metric of the environment, mean over the rollouts that have it."),
    Metric("eval/greedy", "reward", "Held-out reward at temperature 0, in the steps that evaluate."),
    Metric("eval/sampled", "reward", "Held-out reward at the training temperature, in the steps that evaluate."),
    Metric("eval/count", "tasks", "Held-out tasks that were evaluated."),
    # The policy
    Metric("loss", "-", "The step's loss: a sum over tokens whose weights come from the whole step."),
    Metric("policy/entropy", "nats/token", "Entropy of the policy on sampled tokens of the rows that were computed."),
    Metric("policy/kl", "nats/token", "Estimated KL divergence to the reference policy, with --kl-beta."),
    Metric(
        "policy/step_kl",
        "nats/token",
        "KL divergence from the policy that sampled to the policy after the step (k3), on at most 8 rows. "
        "Not measured in every step.",
    ),
    Metric("policy/clip_fraction", "share", "Sampled tokens that the ratio clip took out of the gradient."),
    Metric("policy/clip_fraction_low", "share", "Sampled tokens clipped at the lower bound of the ratio."),
    Metric("policy/clip_fraction_high", "share", "Sampled tokens clipped at the upper bound of the ratio."),
    # The optimizer
    Metric("optimizer/learning_rate", "-", "Learning rate of the step's first update."),
    Metric("optimizer/grad_norm", "-", "Gradient norm before clipping, mean over the step's updates."),
    Metric("optimizer/updates", "updates", "Optimizer steps that were applied."),
    Metric("optimizer/skipped", "updates", "Optimizer steps skipped because the gradient was not finite."),
    Metric("optimizer/update_rms", "-", "Root mean square change of a trained weight, on a sample of the weights."),
    Metric(
        "optimizer/relative_update",
        "-",
        "Norm of the step's change of the weights relative to the norm of the weights, on a sample of the weights.",
    ),
    Metric("optimizer/moved_share", "share", "Trained weights that changed in the step, on a sample of the weights."),
    # Engine against trainer
    Metric("sync/version", "syncs", "Policy version that the engine serves after the step."),
    Metric("sync/weights", "tensors", "Tensors that the sync handed over."),
    Metric("sync/bytes", "bytes", "Bytes that the sync sent to a server."),
    Metric("sync/bound_modules", "modules", "Modules of a server's model that the synced adapter changes."),
    Metric("sync/parity", "nats", "Mean |difference| of engine and trainer on fixed tokens, right after the sync."),
    Metric("sync/sampling_gap", "nats/token", "Mean |difference| of engine and trainer on the step's sampled tokens."),
    Metric("sync/largest_gap", "nats", "Largest |difference| of engine and trainer on the step's sampled tokens."),
    Metric("sync/mismatch_kl", "nats/token", "KL divergence from the engine's distribution to the trainer's (k3)."),
    Metric(
        "correction/mean_weight", "-", "Mean of trainer over engine probability before any correction; 1 if they agree."
    ),
    Metric("correction/truncated_share", "share", "Sampled tokens whose importance weight was cut to the cap."),
    Metric("correction/masked_share", "share", "Sampled tokens whose importance weight was set to 0."),
    # Work and resources
    Metric("train/rows", "rows", "Rows that added to the gradient."),
    Metric("train/tokens", "tokens", "Sampled tokens that the trainer computed."),
    Metric("train/microbatches", "microbatches", "Forward and backward passes, on all processes together."),
    Metric("train/microbatch_tokens", "tokens", "Most tokens of one microbatch at present."),
    Metric("train/out_of_memory", "retries", "Out-of-memory retries since the run began."),
    Metric("memory/peak_gib", "GiB", "Most GPU memory that tensors took on any process since the run began."),
    Metric(
        "memory/rank_RANK_gib",
        "GiB",
        "Most GPU memory that tensors took on process RANK since the run began; only with several processes.",
    ),
    Metric("time/rollout", "s", "Time that the step waited for its rollouts."),
    Metric("time/train", "s", "Time of advantages, gradients and updates."),
    Metric("time/sync", "s", "Time of the weight sync and its acknowledgement."),
    Metric(
        "time/sampling",
        "s",
        "Time that sampling the rollouts took; longer than time/rollout if it began during the step before.",
    ),
    Metric(
        "time/rollout_tokens_per_second",
        "tokens/s",
        "Sampled tokens per second of sampling, on all processes together.",
    ),
    Metric("time/train_tokens_per_second", "tokens/s", "Row tokens computed per second of training."),
)
"""All metrics, in the order of the documentation."""


def describe(name: str) -> Metric | None:
    """The metric of this name; None for a name that no run writes. Example: `describe("env/f1").unit == "-"`.

    A metric of exactly this name comes before one with a placeholder, and of those with a placeholder the last one
    counts.
    """
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in reversed(METRICS) if metric.matches(name)), None)
