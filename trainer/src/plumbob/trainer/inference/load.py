"""Load the engine of an evaluation or of `serve` from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plumbob.console.working import note
from plumbob.rollout import Chat
from plumbob.trainer.config.chat_template import OWN, TemplateChoice, read_parts
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.inference import choice
from plumbob.trainer.inference.chat_server import ChatServer
from plumbob.trainer.inference.engine import engine_module
from plumbob.trainer.inference.token_servers import TokenServers, check_model, connection, root_url
from plumbob.trainer.policy.call_tokens import write_calls_as_text
from plumbob.trainer.policy.forward_plan import moved, plan_forward, vocabulary
from plumbob.trainer.policy.loading import (
    cast_weights,
    check_context,
    load_chat,
    load_generation_config,
    load_model,
    load_tokenizer,
    positions_of,
    threads_for,
)


@dataclass(frozen=True)
class LoadedEngine:
    """What samples replies."""

    engine: Any
    """An `Engine`, which takes token ids; or a `ChatEngine`, which takes messages, if `chat` is None."""
    chat: Chat | None
    """The chat template to make token ids with; None if a server applies it."""
    where: str
    """Where the model computes, for display: a device or a server's URL."""
    max_context: int
    """Most tokens of one row: prompts, completions and tool results."""
    name: str
    """The value of --engine that it is."""
    close: Callable[[], None] = lambda: None
    """Closes the connections to a server."""


def load_engine(config: EvaluateConfig, resumed: Path | None = None) -> LoadedEngine:
    """Load the engine that `--engine` names. Raises UserError for a model or a server that cannot be used.

    `resumed`: the directory of an evaluation that is resumed, which has recorded its chat template.
    """
    template = TemplateChoice(config.chat_template, resumed)
    if config.computes_here:
        return load_engine_here(
            config.model,
            engine=config.engine,
            engine_memory=config.engine_memory,
            max_concurrent=config.max_concurrent,
            max_context=config.max_context,
            bf16=config.bf16,
            template=template,
            tool_format=config.tool_format,
        )
    url = root_url(config.base_url, "--base-url")
    if config.engine == "vllm":
        generation_config = load_generation_config(config.model)
        tokenizer = load_tokenizer(config.model, template)
        chat = load_chat(tokenizer, generation_config, config.tool_format)
    http = connection(config)
    try:
        check_model(http, url, config)
    except BaseException:
        http.close()
        raise
    if config.engine == "openai":
        server = ChatServer(http, url, config.model, read_parts(config.chat_template)[1])
        return LoadedEngine(server, None, config.base_url, config.max_context, "openai", http.close)
    return LoadedEngine(
        TokenServers(http, [url], config.model), chat, config.base_url, config.max_context, "vllm", http.close
    )


def load_engine_here(
    model: str,
    *,
    engine: str = "transformers",
    engine_memory: float = 0.4,
    max_concurrent: int,
    max_context: int | None = None,
    bf16: bool = False,
    template: TemplateChoice = OWN,
    tool_format: str | None = None,
) -> LoadedEngine:
    """Load a model into an engine in this process, on the GPU if there is one.

    `engine`: the name of one that computes in this process, or "auto". `engine_memory`: as --engine-memory.
    `max_context`: most tokens of one row; by default 4096, or the number of the model's positions if that is smaller.
    `template`: the chat template, by default the model's own. `tool_format`: see `load_chat`.
    Raises UserError for a model that cannot be loaded or used.
    """
    tokenizer = load_tokenizer(model, template)
    loaded = load_model(model)
    if max_context is None:
        max_context = min(4096, positions_of(loaded) or 4096)
    check_context(loaded, max_context)
    chat = load_chat(tokenizer, loaded.generation_config, tool_format, vocabulary(loaded))
    if write_calls_as_text(tokenizer, chat, loaded, tool_format):
        chat = load_chat(tokenizer, loaded.generation_config, tool_format)
    torch.set_num_threads(threads_for(loaded))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with moved(loaded, device):
        plan = plan_forward(loaded, max_context, len(tokenizer))
        measured = choice.measure(engine, loaded, plan, max_context, device, 1)
    dtype = torch.bfloat16 if bf16 else torch.float32
    loaded = cast_weights(loaded.to(device), dtype)
    chosen = choice.decide(
        measured,
        loaded,
        device,
        1,
        dtype=dtype,
        max_context=max_context,
        share=engine_memory,
        command=f"start a server with `vf-vllm --model {model}` and add --engine vllm",
    )
    for line in chosen.lines:
        note(line)
    engines: Any = engine_module(chosen.engine)
    made = engines.make_engine(loaded, chosen.decoding, max_concurrent, max_context, engine_memory)
    return LoadedEngine(made, chat, str(device), max_context, chosen.engine)
