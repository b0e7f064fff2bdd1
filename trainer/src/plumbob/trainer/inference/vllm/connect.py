"""Connect a run to its vLLM servers, or start one for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
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
    on_gpu = world.device.type == "cuda"
    urls, sync = config.vllm_url, config.weight_sync(on_gpu)
    if not urls:
        url = _start(config, parts.directory, sync, parts.status, on_gpu) if world.is_main else ""
        urls = (world.from_main(url),)
    settings = VllmSettings(
        urls=urls,
        model=config.model,
        vocab_size=parts.vocab_size,
        sync=sync,
        lora=LoraShape(config.lora_r, config.lora_alpha) if sync == "lora" else None,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        device=world.device,
        folder=None if all(map(is_local, urls)) else parts.directory,
    )
    engine = VllmEngine(settings, world)
    if config.max_context > engine.max_length:
        engine.close()
        raise UserError(
            f"--max-context {config.max_context} is more than the vLLM server's limit of {engine.max_length} tokens; "
            "lower it, or "
            "start vf-vllm with a larger --max-model-len"
        )
    return engine


def _start(config: TrainConfig, directory: Path, sync: Any, status: Callable[[str], None], on_gpu: bool) -> str:
    if sync == "lora" and on_gpu and not config.bf16:
        raise UserError("vLLM's LoRA kernels for GPUs do not support float32: add --bf16")
    path = model_path(config.model)
    if (Path(path) / "adapter_config.json").is_file():
        raise UserError(
            f"--model {config.model} is a LoRA adapter, from which vLLM cannot start; give a whole model, such as a "
            "run's "
            "model/ folder"
        )
    options = ServerOptions(
        config.model,
        sync=sync,
        lora_rank=config.lora_r,
        gpus=tuple(int(gpu) for gpu in config.vllm_gpus.split(",")) if config.vllm_gpus else None,
        memory=config.engine_memory,
        max_length=config.max_context,
        bf16=config.bf16,
        sleep=config.vllm_sleep,
    )
    return start_server(options, directory / SERVER_LOG, status=status).url
