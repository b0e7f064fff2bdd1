"""Options of rollouts that `train`, `sft`, `evaluate` and `serve` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plumbob.trainer.config.options import option

ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "pythonic", "qwen-coder", "qwen-xml"]
"""The names of `plumbob.rollout.tool_formats`, which this module does not import because it loads slowly."""


COLDEST = 1e-6
"""Lowest sampling temperature above 0: below it, scores divided by it overflow in float32."""


@dataclass(frozen=True)
class ChatOptions:
    """The settings of how conversations are written for the model."""

    chat_template: tuple[str, ...] = option((), "--chat-template-args", group="Sampling")
    """NAME=VALUE: a variable of the chat template, with VALUE in JSON or as text; may be repeated. Example:
    enable_thinking=false turns the thinking of Qwen3's hybrid models off. FILE: a Jinja file with the chat template to
    use in place of the model's own; `evaluate --engine openai` does not take it: give it to the server. A directory of
    results keeps a copy of the template, which --resume uses. A request to `serve` may set variables too."""
    tool_format: ToolFormatName | None = option(None)  # noqa: RUF009 - ruff does not see the alias
    """Form in which the model writes tool calls: hermes (JSON in <tool_call> tags), llama3 (bare JSON), mistral
    ([TOOL_CALLS]), pythonic ([f(a=1)]), qwen-coder (JSON in <tools> tags), qwen-xml (<function=f>), auto. Each also
    reads the calls of the others where they are unmistakable, and auto only those. Default: chosen from the chat
    template. With `evaluate --engine openai` the server reads the calls."""


@dataclass(frozen=True)
class RolloutOptions(ChatOptions):
    """The settings of how rollouts are sampled and where they end. Commands add the temperature, whose default differs."""

    top_p: float = option(1.0, group="Sampling", above=0, at_most=1)
    """Nucleus sampling: sample from the smallest set of likely tokens with this total probability. In training, a value
    below 1 biases the gradient."""
    top_k: int = option(0, at_least=0)
    """Sample from this many most likely tokens; 0: from all tokens. In training, a value above 0 biases the
    gradient."""
    min_p: float = option(0.0, at_least=0, below=1)
    """Exclude tokens less likely than this fraction of the likeliest token's probability. In training, a value above 0
    biases the gradient."""
    max_tokens: int = option(512, "--max-new-tokens", "--max-completion-length", at_least=1)
    """Maximum number of tokens in one assistant turn."""
    max_turns: int = option(16, at_least=1)
    """Maximum number of assistant turns in one rollout."""
    max_context: int = option(4096, at_least=1)
    """Maximum number of tokens in one rollout, prompt and tool results included."""
    max_seconds: float = option(600.0, above=0)
    """Time limit of one rollout's setup and turns, and another of the same length for its scoring, in seconds. Turns
    sampled until then are kept. One tool call, and any environment code (hook, metric, reward) that blocks other
    rollouts, may take a fifth of it: otherwise the rollout has failed, and what hung is named."""
    max_concurrent: int = option(128, at_least=1)
    """Maximum number of rollouts that each process samples at the same time."""

    @property
    def max_tool_seconds(self) -> float:
        """Time limit of one tool call, and of environment code that blocks other rollouts, in seconds."""
        return self.max_seconds / 5
