"""The part of metrics.jsonl that describes a step's rollouts and the training rows made of them, and evaluations."""

from __future__ import annotations

from plumbob.trainer.run_files.metric import Metric

ROLLOUTS = (
    Metric("rollout/count", "rollouts", "Number of rollouts sampled in the step."),
    Metric(
        "rollout/errored",
        "rollouts",
        "Number of rollouts that failed in the environment or the engine. A rollout that failed in the environment "
        "is left out of its group; if the engine failed, the whole group is left out (groups/broken).",
    ),
    Metric(
        "rollout/engine_errors",
        "rollouts",
        "Number of rollouts that failed in the engine, or where the chat template turns messages into tokens: "
        "the part of rollout/errored that is not the environment's.",
    ),
    Metric(
        "rollout/stuck",
        "rollouts",
        "Number of failed rollouts (they are also in rollout/errored) in which a tool, hook or reward did not end within "
        "--max-tool-seconds, or scoring within --max-seconds.",
    ),
    Metric(
        "rollout/no_turn",
        "rollouts",
        "Number of rollouts left out because they ended before the model's first turn, for example because the prompt "
        "alone reaches --max-context.",
    ),
    Metric(
        "rollout/unusable_tokens",
        "tokens",
        "Mean number of sampled tokens of the rollouts that failed or cannot be used; compare rollout/sampled_tokens. "
        "Absent without such rollouts.",
    ),
    Metric(
        "rollout/truncated_tokens",
        "tokens",
        "Mean number of sampled tokens of the rollouts that a limit cut off. Absent without such rollouts.",
    ),
    Metric(
        "rollout/whole_tokens",
        "tokens",
        "Mean number of sampled tokens of the other rollouts, in steps with rollout/truncated_tokens.",
    ),
    Metric(
        "rollout/missing",
        "rollouts",
        "Number of rollouts that finished and are missing from a group of which others are there. 0 in a correct run.",
    ),
    Metric(
        "rollout/missing_longer",
        "pairs",
        "Of the pairs of a missing and a kept rollout of one group, those in which the missing one is longer, less those in "
        "which it is shorter. Absent without missing rollouts.",
    ),
    Metric(
        "rollout/missing_variance",
        "pairs squared",
        "Variance of rollout/missing_longer if which rollouts are missing does not depend on their lengths.",
    ),
    Metric(
        "rollout/missing_better",
        "pairs",
        "Of the pairs of a missing and a kept rollout of one group, those in which the missing one earned more, less those in "
        "which it earned less. Absent without missing rollouts.",
    ),
    Metric(
        "rollout/missing_better_variance",
        "pairs squared",
        "Variance of rollout/missing_better if which rollouts are missing does not depend on their rewards.",
    ),
    Metric(
        "rollout/missing_odd",
        "rollouts",
        "Number of missing rollouts with another reward than the kept ones of their group, which all have the same one. Absent "
        "without missing rollouts.",
    ),
    Metric(
        "rollout/repetitive_share",
        "share",
        "Share of rollouts whose last 64 sampled tokens repeat themselves: fewer than half of their sequences of four "
        "tokens are different.",
    ),
    Metric(
        "rollout/stale",
        "rollouts",
        "Number of rollouts discarded because a rollout of their group is older than --max-staleness allows.",
    ),
    Metric(
        "rollout/stale_tokens",
        "tokens",
        "Mean number of sampled tokens of the rollouts in rollout/stale; compare rollout/sampled_tokens. Absent without "
        "such rollouts.",
    ),
    Metric(
        "rollout/stale_seconds",
        "s",
        "Mean time to sample one of the rollouts in rollout/stale. Absent without such rollouts.",
    ),
    Metric(
        "rollout/kept_seconds",
        "s",
        "Mean time to sample one of the other rollouts, for comparison with rollout/stale_seconds. Absent without "
        "rollouts in rollout/stale.",
    ),
    Metric(
        "rollout/not_finite",
        "rollouts",
        "Number of rollouts left out because a reward or log-probability is NaN or infinite.",
    ),
    Metric(
        "rollout/truncated_share",
        "share",
        "Share of rollouts that a limit cut off (--max-tokens, --max-context, --max-turns or --max-seconds).",
    ),
    Metric("rollout/stopped/REASON", "share", "Share of rollouts that ended for this stop reason."),
    Metric("rollout/turns", "turns", "Mean number of assistant turns per rollout."),
    Metric("rollout/tools", "tools", "Mean number of tools that a rollout has."),
    Metric("rollout/tool_calls", "calls", "Mean number of tool calls per rollout."),
    Metric("rollout/tool_errors", "calls", "Mean number of tool calls per rollout that ended in an error."),
    Metric("rollout/malformed_calls", "calls", "Mean number of tool calls per rollout that could not be parsed."),
    Metric(
        "rollout/unread_calls",
        "replies",
        "Mean number of replies per rollout that look like a tool call in a form that is not read.",
    ),
    Metric("rollout/sampled_tokens", "tokens", "Mean number of sampled tokens per rollout."),
    Metric("rollout/row_tokens", "tokens", "Mean number of tokens per rollout, prompt and tool results included."),
    Metric("env/NAME", "-", "Mean of this metric of the environment over the rollouts that report it."),
    Metric("eval/greedy", "reward", "Held-out reward at temperature 0, in steps with an evaluation."),
    Metric("eval/sampled", "reward", "Held-out reward at the training temperature, in steps with an evaluation."),
    Metric(
        "eval/pass@K",
        "share",
        "Estimated probability that at least one of K rollouts of a held-out task passes (--pass-threshold), with "
        "--eval-rollouts above 1, in steps with an evaluation.",
    ),
    Metric(
        "eval/prompts_differ",
        "-",
        "1 if the evaluation before the step prompted held-out tasks with another system prompt or other tools than the "
        "step's tasks, else absent. Only in the step after an evaluation, in runs of one environment.",
    ),
    Metric(
        "eval/cut_off",
        "share",
        "Share of the held-out rollouts, at the training temperature, that limits cut off, where it differs from the step's by "
        "more than half. Only in the step after an evaluation, in runs of one environment.",
    ),
    Metric("eval/count", "tasks", "Number of held-out tasks that were evaluated."),
    Metric(
        "rollout/unmatched",
        "share",
        "Share of the trained rows that are no rollout of this step. This one and the next eight are 0 in a correct run; those "
        "that need every rollout are absent with several processes.",
    ),
    Metric(
        "rollout/changed",
        "share",
        "Share of the trained rows whose token ids are not those of their rollout.",
    ),
    Metric(
        "rollout/copied",
        "share",
        "Share of the trained rows that are copies: beyond as many rows with their token ids as there are rollouts with them.",
    ),
    Metric(
        "rollout/other_logprobs",
        "share",
        "Share of the trained rows with log-probabilities that their rollouts do not have, in whatever order they stand.",
    ),
    Metric("rollout/sampled_untrained", "share", "Share of the sampled tokens that the loss mask leaves out."),
    Metric(
        "rollout/context_trained",
        "share",
        "Tokens that the loss mask includes although nobody sampled them, as a share of the sampled tokens.",
    ),
    Metric(
        "rollout/prompts_cut",
        "share",
        "Of up to four of the step's rollouts, the share whose first prompt lacks the beginning of a message. 0 in a correct run.",
    ),
    Metric(
        "rollout/headless",
        "share",
        "Of up to four of the step's rollouts, the share whose first prompt does not end with the chat template's header of an "
        "assistant turn. 0 in a correct run.",
    ),
    Metric(
        "rollout/tools_unshown",
        "share",
        "Of up to four of the step's rollouts with tools, the share whose prompt leaves out the name of a tool. 0 in a "
        "correct run.",
    ),
    Metric("rollout/run_on", "share", "Share of the sampled turns that go on after an end token."),
    Metric(
        "rollout/unlikely_ends",
        "share",
        "Share of the sampled turns that end with an end token of a probability below 1e-5, so that not the policy ended them.",
    ),
    Metric("groups/mixed", "share", "Share of the groups whose rollouts are of more than one task."),
    Metric(
        "advantage/wrong",
        "share",
        "Share of the trained rows whose advantage is not what the settings say of the rollouts' rewards, computed again.",
    ),
    Metric(
        "loss/other_weights",
        "share",
        "Share of the trained rows whose tokens have another weight in the loss than --loss-type gives them, computed again, but "
        "for a factor of all rows.",
    ),
)
