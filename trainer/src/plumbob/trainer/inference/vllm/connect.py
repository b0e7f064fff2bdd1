"""Connect a run to its vLLM servers, or start one for it."""

from __future__ import annotations

from pathlib import Path

import torch
from plumbob.console import UserError
from plumbob.trainer.inference.engine import EngineParts
from plumbob.trainer.inference.vllm.adapter_sync import LoraShape
from plumbob.trainer.inference.vllm.engine import VllmEngine, VllmSettings, is_local
from plumbob.trainer.inference.vllm.launch import ServerOptions, start_server
from plumbob.trainer.run_files.model_path import model_path
from plumbob.trainer.run_files.run_directory import SERVER_LOG


def open_vllm(parts: EngineParts) -> VllmEngine:
    """Connect to the servers of --vllm-url; without any, start one that ends with this process. Raises UserError.

    Collective: every process samples from the servers; only rank 0 starts a server and sends weights.
    """
    config, world = parts.config, parts.world
    urls = config.vllm_url or (world.from_main(_start(parts) if world.is_main else ""),)
    settings = VllmSettings(
        urls=urls,
        model=config.model,
        vocab_size=parts.vocab_size,
        lora=LoraShape(config.lora_r, config.lora_alpha) if config.peft else None,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        device=world.device,
        folder=None if all(map(is_local, urls)) else parts.directory,
    )
    engine = VllmEngine(settings, world)
    if config.max_context > engine.max_length:
        engine.close()
        raise UserError(
            f"--max-context {config.max_context} is more than the vLLM server's limit of {engine.max_length} tokens; "
            "lower it, or start vf-vllm with a larger --max-model-len"
        )
    return engine


def _start(parts: EngineParts) -> str:
    """Start the run's own server, on the trainer's GPUs; returns its URL. Raises UserError."""
    config, on_gpu = parts.config, parts.world.device.type == "cuda"
    if config.peft and on_gpu and not config.bf16:
        raise UserError("vLLM's LoRA kernels for GPUs do not support float32: add --bf16")
    path = model_path(config.model)
    if (Path(path) / "adapter_config.json").is_file():
        raise UserError(
            f"--model {config.model} is a LoRA adapter, from which vLLM cannot start; give a whole model, such as a run's "
            "model/ folder"
        )
    options = ServerOptions(
        config.model,
        sync="lora" if config.peft else "ipc" if on_gpu else "disk",
        lora_rank=config.lora_r,
        memory=config.engine_memory,
        max_length=config.max_context,
        bf16=config.bf16,
        sleep=config.vllm_sleep,
    )
    return start_server(options, parts.directory / SERVER_LOG, status=parts.status).url
