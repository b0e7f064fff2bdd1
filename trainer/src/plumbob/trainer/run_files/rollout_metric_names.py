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
)
