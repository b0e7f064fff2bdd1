"""What passes between a rollout, an engine and a trainer.

Nothing here imports torch, transformers or verifiers, so that engines and command lines stay cheap to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from plumbob.rollout.toolcalls import MalformedCall, ParsedCall


@dataclass(frozen=True)
class Sampling:
    """How an engine draws one completion.

    Example: `Sampling(max_tokens=256, temperature=1.0, seed=7)`.
    """

    max_tokens: int = 512
    """The most tokens of one completion, the stop token included."""
    temperature: float = 1.0
    """Logits are divided by this; 0 takes the most likely token (its log-probability is then 0)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these that is drawn; it stays in the completion."""
    seed: int | None = None
    """The completion depends on (weights, prompt, sampling) alone, never on what else is in the batch."""


@dataclass(frozen=True)
class Completion:
    """What an engine drew: ids verbatim, and for each the log-probability under the distribution it was drawn from."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    policy_version: int = 0

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a completion of {len(self.token_ids)} tokens needs as many log-probabilities, got {len(self.logprobs)}"
            )


class EngineError(RuntimeError):
    """The engine could not answer; the rollout is recorded as failed and leaves its group."""


class Engine(Protocol):
    """Tokens in, tokens out. Implementations: `plumbob.trainer.engine.TransformersEngine`, and scripted ones in tests."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Draw one completion of `prompt_ids`. Many calls run concurrently. Raises EngineError."""
        ...


@dataclass(frozen=True)
class ChatReply:
    """One assistant turn as a chat endpoint gives it: text and calls, no token ids.

    Example: `ChatReply("", (ParsedCall("lookup", {"key": "4711"}),))`.
    """

    content: str
    calls: tuple[ParsedCall | MalformedCall, ...] = ()
    reasoning: str | None = None
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatEngine(Protocol):
    """Messages in, a message out: enough to evaluate with, not to train on.

    Implementations: `plumbob.rollout.scripted.ScriptedChat`, and the trainer package's client of OpenAI-compatible servers.
    """

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        """The next assistant turn. `messages` and `tools` are in OpenAI's wire format. Raises EngineError."""
        ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that a rollout uses."""

    chat_template: str | None

    def __call__(self, text: str, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class StopReason(StrEnum):
    """Why a rollout ended. A taskset's own `@vf.stop` ends it under the hook's name instead."""

    COMPLETED = "agent_completed"
    """The model answered without calling a tool."""
    MAX_TURNS = "max_turns"
    MAX_TURN_TOKENS = "max_turn_tokens"
    """One completion reached `Sampling.max_tokens` without a stop token."""
    MAX_CONTEXT = "max_total_tokens"
    """Prompt and completions together reached `Limits.max_context`."""
    TIMEOUT = "agent_timeout"
    """Wall time reached `Limits.max_seconds`."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one rollout; each ends it with its own stop reason, and what was sampled until then is kept."""

    max_turns: int = 16
    max_context: int = 4096
    """Tokens of the whole row: prompts, completions and tool results."""
    max_seconds: float = 600.0
    """Wall time of setup and turns; scoring may take as long again."""


@dataclass(frozen=True)
class Sample:
    """One training row. Ids are what the engine saw and drew, verbatim.

    `loss_mask[i]` is true exactly where `token_ids[i]` was sampled, and `sampling_logprobs[i]` is its log-probability
    then (0.0 elsewhere). All three have length T.
    """

    token_ids: list[int]
    loss_mask: list[bool]
    sampling_logprobs: list[float]
    reward: float
    group: str
    """Rollouts of one task in one step share it; advantages are computed within it."""
    stop: str
    truncated: bool
    policy_version: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    """The reward's components by name, weights applied; `reward` is their sum as the environment gave it."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """The weights that were applied; 1 where a name is missing."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.sampling_logprobs)}
        if len(lengths) != 1:
            raise ValueError(f"ids, mask and log-probabilities must have one length, got {sorted(lengths)}")

    @property
    def num_sampled(self) -> int:
        return sum(self.loss_mask)
