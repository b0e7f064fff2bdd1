"""The vLLM servers that a run draws from, found or started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from plumbob.hub import UserError
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.models import model_path
from plumbob.trainer.ranks import Ranks
from plumbob.trainer.run_directory import SERVER_LOG

if TYPE_CHECKING:
    from plumbob.trainer.vllm.engine import VllmEngine


def open_vllm(
    config: TrainConfig,
    ranks: Ranks,
    directory: Path,
    tokenizer: Any,
    vocab_size: int,
    status: Callable[[str], None],
) -> VllmEngine:
    """Connect to the servers of --vllm-url, or start one, which ends with this process. Raises UserError.

    Every rank asks the servers; rank 0 starts them and syncs.
    """
    from plumbob.trainer.vllm.adapters import LoraShape
    from plumbob.trainer.vllm.engine import VllmEngine, VllmSettings

    on_gpu = ranks.device.type == "cuda"
    urls, sync = config.vllm_url, config.weight_sync(on_gpu)
    if not urls:
        urls = (ranks.main(_start(config, directory, sync, status, on_gpu) if ranks.is_main else ""),)
    settings = VllmSettings(
        urls=urls,
        model=config.model,
        vocab_size=vocab_size,
        sync=sync,
        lora=LoraShape(config.lora_r, config.lora_alpha) if sync == "lora" else None,
        dtype=torch.bfloat16 if config.bf16 else torch.float32,
        device=ranks.device,
        folder=Path(config.vllm_folder) if config.vllm_folder else None,
    )
    engine = VllmEngine(settings, tokenizer)
    if config.max_context > engine.max_length:
        engine.close()
        raise UserError(
            f"--max-context {config.max_context} is more than the servers' {engine.max_length}; start vf-vllm with a larger "
            "--max-model-len"
        )
    return engine


def _start(config: TrainConfig, directory: Path, sync: Any, status: Callable[[str], None], on_gpu: bool) -> str:
    from plumbob.trainer.vllm.launch import start_server

    if sync == "lora" and on_gpu and not config.bf16:
        raise UserError("vLLM's LoRA kernels for GPUs take no float32: add --bf16")
    path = model_path(config.model)
    if (Path(path) / "adapter_config.json").is_file():
        raise UserError(f"vLLM cannot start from the adapter {config.model}; give a whole model, as a run's model/ is")
    gpus = [int(gpu) for gpu in config.vllm_gpus.split(",")] if config.vllm_gpus else None
    handle = start_server(
        config.model,
        directory / SERVER_LOG,
        sync=sync,
        lora_rank=config.lora_r,
        gpus=gpus,
        memory=config.vllm_memory,
        max_length=config.max_context,
        bf16=config.bf16,
        sleep=config.vllm_sleep,
        status=status,
    )
    return handle.url
