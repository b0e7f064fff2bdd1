"""Options of rollouts that `train` and `evaluate` share. Each call makes a field, because a class needs fields of its own."""

from __future__ import annotations

from typing import Any

from plumbob.trainer.config.options import option


def max_turns() -> Any:
    return option(16, "Maximum number of assistant turns in one rollout.", at_least=1)


def max_context() -> Any:
    return option(4096, "Maximum number of tokens in one rollout, prompt and tool results included.", at_least=1)


def keep_control_tokens(exception: str = "") -> Any:
    """`exception`: a further sentence about where this does not hold."""
    return option(
        False,
        "Tokenise a control token that a message spells (such as <|im_end|> in a tool result) as that token, so that the "
        f"message can end its own turn. By default it stays text.{exception}",
    )


def max_seconds() -> Any:
    return option(
        600.0,
        "Time limit of one rollout's setup and turns, and another of the same length for its scoring, in seconds. Turns "
        "sampled until then are kept.",
        above=0,
    )


def max_tool_seconds() -> Any:
    return option(
        120.0,
        "Time limit of one tool call, and of any environment code (hook, metric, reward) that blocks other rollouts, in "
        "seconds. A rollout that exceeds it has failed, and what hung is named.",
        above=0,
    )


def threads() -> Any:
    return option(0, "Number of CPU threads for tensor operations; 0: one for a tiny model, else all CPUs.", at_least=0)
