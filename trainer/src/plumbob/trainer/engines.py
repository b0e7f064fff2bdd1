"""The engine that an evaluation or a server asks, loaded from a model's name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from plumbob.hub import UserError
from plumbob.rollout import Chat, ChatEngine, Engine
from plumbob.trainer import remote
from plumbob.trainer.engine import TransformersEngine
from plumbob.trainer.evaluation.config import EvaluateConfig
from plumbob.trainer.models import (
    cast_weights,
    check_supported,
    default_threads,
    load_chat,
    load_generation_config,
    load_model,
    load_tokenizer,
)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, and how it is spoken to."""

    engine: Engine
    chat: Chat
    where: str
    """For people: a device, or a server."""
    max_context: int


@dataclass(frozen=True)
class LoadedChatEngine:
    """A chat engine: messages need no template here."""

    engine: ChatEngine
    where: str
    chat: None = None


def load_engine(config: EvaluateConfig) -> LoadedEngine | LoadedChatEngine:
    """The engine that the configuration names. Raises UserError for a model or a server that cannot be used."""
    if config.engine == "transformers":
        return load_transformers_engine(
            config.model,
            max_concurrent=config.max_concurrent,
            max_context=config.max_context,
            bf16=config.bf16,
            threads=config.threads,
        )
    server = (config.base_url, config.model, config.api_key_var)
    if config.engine == "openai":
        remote.connect(*server)
        return LoadedChatEngine(remote.OpenAIChat(*server, timeout=config.max_seconds), config.base_url)
    chat = load_chat(load_tokenizer(config.model), load_generation_config(config.model))
    remote.connect(*server)
    engine = remote.GenerateClient(*server, timeout=config.max_seconds)
    return LoadedEngine(engine, chat, config.base_url, config.max_context)


def load_transformers_engine(
    model: str, *, max_concurrent: int, max_context: int | None = None, bf16: bool = False, threads: int = 0
) -> LoadedEngine:
    """The model in this process, on the GPU or on the CPU without one.

    `max_context`: by default 4096 tokens, or the model's positions if those are fewer. Raises UserError for a model that
    cannot be loaded or used.
    """
    tokenizer = load_tokenizer(model)
    loaded = load_model(model)
    positions = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
    if max_context is None:
        max_context = min(4096, positions or 4096)
    elif positions is not None and max_context > positions:
        raise UserError(f"--max-context {max_context} is more than the model's {positions} positions")
    check_supported(loaded, max_context)
    chat = load_chat(tokenizer, loaded.generation_config)
    torch.set_num_threads(threads or default_threads(loaded))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = cast_weights(loaded.to(device), torch.bfloat16 if bf16 else torch.float32)
    engine = TransformersEngine(loaded, max_slots=max_concurrent, max_length=max_context)
    return LoadedEngine(engine, chat, str(device), max_context)
