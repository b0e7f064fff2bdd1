"""Token-exact rollouts of verifiers tasksets, in the calling process, against any engine."""

from plumbob.rollout.chat import Chat, ChatTemplateError, Rendered
from plumbob.rollout.dialogue import EndOfScript, derive_seed, engine_failed
from plumbob.rollout.rows import to_sample
from plumbob.rollout.runner import run_group, run_rollout
from plumbob.rollout.scripted import ScriptedChat, ScriptedEngine
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall, ParsedReply, read_arguments
from plumbob.rollout.types import (
    ChatEngine,
    ChatReply,
    Completion,
    Engine,
    EngineError,
    Limits,
    Sample,
    Sampling,
    StopReason,
    Tokenizer,
)

__all__ = [
    "Chat",
    "ChatEngine",
    "ChatReply",
    "ChatTemplateError",
    "Completion",
    "EndOfScript",
    "Engine",
    "EngineError",
    "Limits",
    "MalformedCall",
    "ParsedCall",
    "ParsedReply",
    "Rendered",
    "Sample",
    "Sampling",
    "ScriptedChat",
    "ScriptedEngine",
    "StopReason",
    "Tokenizer",
    "derive_seed",
    "engine_failed",
    "read_arguments",
    "run_group",
    "run_rollout",
    "to_sample",
]
