"""Token-exact rollouts of any verifiers taskset, in this process, against any engine."""

from plumbob.rollout.chat import Chat, ChatTemplateError, Rendered
from plumbob.rollout.runner import derive_seed, run_group, run_rollout, to_sample
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall, ParsedReply, parse_reply
from plumbob.rollout.types import Completion, Engine, EngineError, Limits, Sample, Sampling, StopReason, Tokenizer

__all__ = [
    "Chat",
    "ChatTemplateError",
    "Completion",
    "Engine",
    "EngineError",
    "Limits",
    "MalformedCall",
    "ParsedCall",
    "ParsedReply",
    "Rendered",
    "Sample",
    "Sampling",
    "StopReason",
    "Tokenizer",
    "derive_seed",
    "parse_reply",
    "run_group",
    "run_rollout",
    "to_sample",
]
