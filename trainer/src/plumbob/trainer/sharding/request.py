"""What the launcher asks for: `accelerate launch --config-file ...` says it in the environment, torchrun asks for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from plumbob.hub import UserError
from plumbob.trainer.ranks import Ranks
from plumbob.trainer.sharding.base import Replicated, Sharding


@dataclass(frozen=True)
class Request:
    """Example: `Request("zero", {"zero_optimization": {"stage": 3}})`."""

    kind: Literal["replicated", "fsdp2", "zero"] = "replicated"
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    reshard_after_forward: bool = True
    bf16: bool = False
    """The configuration file says `mixed_precision: bf16`, which means what --bf16 does."""

    def divides(self, ranks: Ranks) -> bool:
        """Alone, a process holds everything, whatever was asked for."""
        return ranks.size > 1 and self.kind != "replicated"


def requested(environment: Mapping[str, str] = os.environ) -> Request:
    """Raises UserError for what accelerate can do and plumbob cannot."""

    def says(name: str, default: str = "") -> str:
        return environment.get(name, default).lower()

    precision = says("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16"):
        raise UserError(
            f"mixed_precision: {precision} is not supported; write 'bf16' or 'no' in the accelerate configuration"
        )
    for name, what in (("MEGATRON_LM", "Megatron-LM"), ("PARALLELISM_CONFIG", "a parallelism_config")):
        if says(f"ACCELERATE_USE_{name}") == "true":
            raise UserError(
                f"{what} in the accelerate configuration is not supported: use DDP, FSDP2, ZeRO-2 or ZeRO-3"
            )
    bf16 = precision == "bf16"
    if says("ACCELERATE_USE_DEEPSPEED") == "true":
        return Request("zero", _deepspeed_config(), bf16=bf16)
    if says("ACCELERATE_USE_FSDP") == "true":
        if says("FSDP_VERSION", "1") != "2":
            raise UserError("FSDP version 1 is not supported: write fsdp_version: 2, as configs/fsdp2.yaml does")
        if says("FSDP_OFFLOAD_PARAMS") == "true":
            raise UserError("fsdp_offload_params is not supported")
        return Request("fsdp2", reshard_after_forward=says("FSDP_RESHARD_AFTER_FORWARD", "true") != "false", bf16=bf16)
    return Request(bf16=bf16)


def _deepspeed_config() -> Mapping[str, Any]:
    from accelerate.utils import DeepSpeedPlugin

    try:
        config = DeepSpeedPlugin().deepspeed_config
    except ImportError:
        raise UserError("this configuration needs DeepSpeed: uv sync --extra deepspeed") from None
    except (ValueError, OSError) as error:
        raise UserError(f"the DeepSpeed configuration cannot be used: {error}") from None
    zero = config["zero_optimization"]
    if zero.get("stage") not in (2, 3):
        raise UserError(f"ZeRO stage {zero.get('stage')} is not supported: use 2 or 3, or configs/ddp.yaml")
    for what in ("offload_optimizer", "offload_param"):
        device = (zero.get(what) or {}).get("device", "none")
        if device not in ("none", None):
            raise UserError(
                f"{what}_device: {device} is not supported; use more processes, --peft or --gradient-checkpointing"
            )
    return {**config, "zero_optimization": {k: v for k, v in zero.items() if not k.startswith("offload_")}}


def check_same(module: torch.nn.Module, ranks: Ranks) -> None:
    """Raises UserError if the processes do not begin with the same weights; up to 1,024 of each tensor are looked at.

    Divided, the parts of different models would pass for one: it trains, syncs and agrees with its engine, and is nonsense.
    """
    if ranks.size == 1:
        return
    own = {
        n: p.detach().flatten()[:: p.numel() // 1024 + 1].double().sum().item() for n, p in module.named_parameters()
    }
    for rank, others in enumerate(ranks.gather(own)):
        if wrong := [name for name, value in own.items() if others.get(name) != value]:
            raise UserError(
                f"processes {ranks.rank} and {rank} loaded different weights ({wrong[0]} and {len(wrong) - 1} others): all "
                "processes must see the same model files"
            )


def shard(request: Request, scorer: torch.nn.Module, ranks: Ranks, *, bf16: bool) -> Sharding:
    """Raises UserError if DeepSpeed is asked for and missing, or if the processes hold different weights."""
    check_same(scorer, ranks)
    if not request.divides(ranks):
        return Replicated(scorer.to(ranks.device), ranks)
    if request.kind == "fsdp2":
        from plumbob.trainer.sharding.fsdp2 import FSDP2

        return FSDP2(scorer, ranks, bf16=bf16, reshard_after_forward=request.reshard_after_forward)
    from plumbob.trainer.sharding.zero import Zero

    return Zero(scorer.to(ranks.device), ranks, request.deepspeed)
