"""Data types and protocols that rollouts, engines and trainers share.

This module imports neither torch nor transformers nor verifiers, so that engines and command lines load quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from plumbob.rollout.toolcalls import MalformedCall, ParsedCall


@dataclass(frozen=True)
class Sampling:
    """How an engine samples one completion.

    Example: `Sampling(max_tokens=256, temperature=1.0, seed=7)`.
    """

    max_tokens: int = 512
    """Most tokens of one completion, including the stop token."""
    temperature: float = 1.0
    """Divisor of the logits; 0 always takes the most likely token, whose log-probability is then 0."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this total probability; 1.0 keeps the whole vocabulary."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the highest probability; 0.0 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first sampled token among these ids, which is part of the completion."""
    seed: int | None = None
    """Seed of the completion, which then depends only on weights, prompt and these settings, not on its batch."""


@dataclass(frozen=True)
class Completion:
    """What an engine sampled for one prompt."""

    token_ids: tuple[int, ...]
    """[N] the sampled ids, verbatim."""
    logprobs: tuple[float, ...]
    """[N] the log-probability in nats of each id under the distribution that it was sampled from."""
    finish_reason: Literal["stop", "length"]
    """Why the completion ended: with a stop token, or because it reached `Sampling.max_tokens`."""
    policy_version: int = 0
    """The policy version that the completion began with."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a completion of {len(self.token_ids)} tokens needs as many log-probabilities, got {len(self.logprobs)}"
            )


class EngineError(RuntimeError):
    """The engine could not answer; the rollout is recorded as failed and left out of its group."""


class Engine(Protocol):
    """What a rollout needs from an engine: token ids in, token ids out.

    The trainer extends this protocol with weight sync.
    """

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one completion of `prompt_ids`. Many calls run concurrently. Raises EngineError."""
        ...


@dataclass(frozen=True)
class ChatReply:
    """One assistant turn as a chat endpoint returns it: text and tool calls without token ids.

    Example: `ChatReply("", (ParsedCall("lookup", {"key": "4711"}),))`.
    """

    content: str
    calls: tuple[ParsedCall | MalformedCall, ...] = ()
    reasoning: str | None = None
    finish_reason: Literal["stop", "length"] = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    explanation: str = ""
    """What a stored rollout told the model after this turn, whose call could not be read; the rollout then goes on."""


class ChatEngine(Protocol):
    """What a rollout needs from a chat endpoint: messages in, a message out. It cannot be used for training.

    Implementations: `plumbob.rollout.scripted.ScriptedChat`, and the trainer package's client of OpenAI-compatible
    servers.
    """

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        """Return the next assistant turn. `messages` and `tools` are in OpenAI's wire format. Raises EngineError."""
        ...


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that a rollout uses."""

    chat_template: str | None

    def __call__(self, text: str, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def decode(self, token_ids: list[int], **kwargs: Any) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


class StopReason(StrEnum):
    """Why a rollout ended. If a taskset's own `@vf.stop` hook ends it, the stop reason is the hook's name instead."""

    COMPLETED = "agent_completed"
    """The model answered without calling a tool."""
    ENV_ENDED = "user_closed"
    """The environment drives the conversation and ended it, as in a game that is over (verifiers' own name for it)."""
    MAX_TURNS = "max_turns"
    """The model took `Limits.max_turns` turns."""
    MAX_TURN_TOKENS = "max_turn_tokens"
    """One completion reached `Sampling.max_tokens` without a stop token."""
    MAX_CONTEXT = "max_total_tokens"
    """Prompt and completions together reached `Limits.max_context`."""
    TIMEOUT = "agent_timeout"
    """Wall time reached `Limits.max_seconds`."""


@dataclass(frozen=True)
class Limits:
    """Limits of one rollout. Each of the first three ends it with its own stop reason, and keeps the tokens sampled."""

    max_turns: int = 16
    """Most turns of the model."""
    max_context: int = 4096
    """Most tokens of the whole row: prompts, completions and tool results."""
    max_seconds: float = 600.0
    """Wall time limit of setup and turns; scoring has another limit of the same length."""
    max_tool_seconds: float = 120.0
    """Wall time limit of one tool call or stop hook, and of any code of the environment that blocks the event loop.

    A rollout that exceeds it has failed, and its error names what hung.
    """
    max_explanations: int = 2
    """Most replies that look like a tool call and could not be read, after which the model is told the form of a call.

    After a further one, as with 0 after the first, the rollout ends as after an answer.
    """


@dataclass(frozen=True)
class Sample:
    """One training row: a rollout's T tokens, and what is known about the rollout."""

    token_ids: list[int]
    """[T] the ids that the engine saw and sampled, verbatim."""
    loss_mask: list[bool]
    """[T] true exactly where the id was sampled."""
    sampling_logprobs: list[float]
    """[T] the sampling log-probability in nats of each sampled id, and 0.0 for the other ids."""
    reward: float
    """The reward that the environment gave the rollout."""
    group: str
    """Id of the group, which the rollouts of one task in one step share; advantages are computed within a group."""
    stop: str
    """The stop reason."""
    truncated: bool
    """Whether a limit cut the rollout off."""
    policy_version: int | None = 0
    """The oldest policy version that any of the rollout's turns was sampled with; None for a rollout without a turn."""
    seconds: float = 0.0
    """Wall time from the rollout's start to the end of its last turn."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's metrics, by name."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The components of the reward by name, weights applied; `reward` is their sum."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """The weight applied to each component of `rewards`; 1 for a missing name."""
    trace_id: str = ""
    """Id of the trace that the row was made of; empty for a row of no rollout."""
    tool_seconds: float = 0.0
    """The part of `seconds` in which the rollout waited for the results of its tools."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.sampling_logprobs)}
        if len(lengths) != 1:
            raise ValueError(f"ids, mask and log-probabilities must have one length, got {sorted(lengths)}")

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.loss_mask)

    @property
    def sampled_logprobs(self) -> list[float]:
        """The sampling log-probabilities of the sampled tokens alone, in order: [num_sampled]."""
        return [logprob for logprob, sampled in zip(self.sampling_logprobs, self.loss_mask, strict=True) if sampled]


class UnsupportedTaskset(TypeError):
    """The taskset needs something that in-process rollouts do not support; the message names it."""
