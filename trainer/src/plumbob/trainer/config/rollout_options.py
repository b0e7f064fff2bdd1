"""Options of rollouts that `train` and `evaluate` share. Each call makes a field, because a class needs fields of its own."""

from __future__ import annotations

from typing import Any, Literal

from plumbob.trainer.config.options import option

ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "pythonic", "qwen-coder", "qwen-xml"]
"""The names of `plumbob.rollout.tool_formats`, which this module does not import because it loads slowly."""


TOOL_FORMATS = (
    "Form in which the model writes tool calls: hermes (JSON in <tool_call> tags), llama3 (bare JSON), mistral "
    "([TOOL_CALLS]), pythonic ([f(a=1)]), qwen-coder (JSON in <tools> tags), qwen-xml (<function=f>), auto. Each also "
    "reads the calls of the others where they are unmistakable, and auto only those."
)
"""What --tool-format means, in every command that has it."""


def top_p(warning: str = "") -> Any:
    """`warning`: a further sentence about a value below 1."""
    text = f"Nucleus sampling: sample from the smallest set of likely tokens with this total probability.{warning}"
    return option(1.0, text, above=0, at_most=1)


def top_k(warning: str = "") -> Any:
    """`warning`: a further sentence about a value above 0."""
    return option(0, f"Sample from this many most likely tokens; 0: from all tokens.{warning}", at_least=0)


def min_p(warning: str = "") -> Any:
    """`warning`: a further sentence about a value above 0."""
    text = f"Exclude tokens less likely than this fraction of the likeliest token's probability.{warning}"
    return option(0.0, text, at_least=0, below=1)


def max_tokens(more: str = "") -> Any:
    """`more`: a further sentence about what the limit does."""
    names = ("--max-new-tokens", "--max-completion-length")
    return option(512, f"Maximum number of tokens in one assistant turn.{more}", *names, at_least=1)


def max_turns() -> Any:
    return option(16, "Maximum number of assistant turns in one rollout.", at_least=1)


def max_context() -> Any:
    return option(4096, "Maximum number of tokens in one rollout, prompt and tool results included.", at_least=1)


def engine_memory(more: str = "", *names: str) -> Any:
    """`more`: what it means for other engines. `names`: further spellings."""
    text = f"Largest share of each GPU's memory for the keys and values of rollouts, with --engine paged.{more}"
    return option(0.4, text, *names, above=0, below=1)


def chat_template(exception: str = "") -> Any:
    """`exception`: a further sentence about where this does not hold."""
    return option(
        None,
        "Jinja file with the chat template to use in place of the model's own. The directory of results keeps a copy, "
        f"which --resume uses.{exception}",
    )


def chat_template_args() -> Any:
    return option(
        (),
        "Value of a variable of the chat template, as NAME=VALUE with VALUE in JSON or as text; may be repeated. "
        "Example: enable_thinking=false turns the thinking of Qwen3's hybrid models off.",
    )


def tool_format(exception: str = "") -> Any:
    """`exception`: a further sentence about where this does not hold."""
    return option(
        None,
        f"{TOOL_FORMATS} Default: chosen from the chat template.{exception}",
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


def pass_threshold() -> Any:
    return option(1.0, "Smallest reward with which a rollout counts as passed in pass@k.")


def threads() -> Any:
    return option(0, "Number of CPU threads for tensor operations; 0: one for a tiny model, else all CPUs.", at_least=0)
