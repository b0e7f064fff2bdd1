"""Options of rollouts that `train`, `sft` and `evaluate` share."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class RolloutOptions:
    """The settings of how rollouts are sampled and where they end. Commands add the temperature, whose default differs."""

    top_p: float = option(
        1.0,
        "Nucleus sampling: sample from the smallest set of likely tokens with this total probability. In training, a value "
        "below 1 biases the gradient.",
        group="Sampling",
        above=0,
        at_most=1,
    )
    top_k: int = option(
        0,
        "Sample from this many most likely tokens; 0: from all tokens. In training, a value above 0 biases the gradient.",
        at_least=0,
    )
    min_p: float = option(
        0.0,
        "Exclude tokens less likely than this fraction of the likeliest token's probability. In training, a value above 0 "
        "biases the gradient.",
        at_least=0,
        below=1,
    )
    max_tokens: int = option(
        512,
        "Maximum number of tokens in one assistant turn.",
        "--max-new-tokens",
        "--max-completion-length",
        at_least=1,
    )
    max_turns: int = option(16, "Maximum number of assistant turns in one rollout.", at_least=1)
    max_context: int = option(
        4096, "Maximum number of tokens in one rollout, prompt and tool results included.", at_least=1
    )
    chat_template: str | None = option(
        None,
        "Jinja file with the chat template to use in place of the model's own. The directory of results keeps a copy, "
        "which --resume uses. `evaluate --engine openai` does not take it: give it to the server.",
    )
    chat_template_args: tuple[str, ...] = option(
        (),
        "Value of a variable of the chat template, as NAME=VALUE with VALUE in JSON or as text; may be repeated. "
        "Example: enable_thinking=false turns the thinking of Qwen3's hybrid models off.",
    )
    tool_format: ToolFormatName | None = option(  # noqa: RUF009 - ruff does not see the alias
        None,
        f"{TOOL_FORMATS} Default: chosen from the chat template. With `evaluate --engine openai` the server reads the calls.",
    )
    max_seconds: float = option(
        600.0,
        "Time limit of one rollout's setup and turns, and another of the same length for its scoring, in seconds. Turns "
        "sampled until then are kept.",
        above=0,
    )
    max_tool_seconds: float = option(
        120.0,
        "Time limit of one tool call, and of any environment code (hook, metric, reward) that blocks other rollouts, in "
        "seconds. A rollout that exceeds it has failed, and what hung is named.",
        above=0,
    )
    max_concurrent: int = option(
        128, "Maximum number of rollouts that each process samples at the same time.", at_least=1
    )

def engine_memory(more: str = "", *names: str) -> Any:
    """`more`: what it means for other engines. `names`: further spellings. A field of the class that asks for it."""
    text = f"Largest share of each GPU's memory for the keys and values of rollouts, with --engine paged.{more}"
    return option(0.4, text, *names, above=0, below=1)


def threads() -> Any:
    """A field of the class that asks for it."""
    return option(0, "Number of CPU threads for tensor operations; 0: one for a tiny model, else all CPUs.", at_least=0)
