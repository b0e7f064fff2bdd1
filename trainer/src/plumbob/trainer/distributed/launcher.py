"""How the launcher wants weights divided: `accelerate launch --config-file ...` says so in environment variables.

torchrun does not say anything, and weights are then replicated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch
from plumbob.console import UserError
from plumbob.trainer.distributed.base import Replicated, Sharding
from plumbob.trainer.distributed.world import World


@dataclass(frozen=True)
class Request:
    """How to divide weights among processes. Example: `Request("zero", {"zero_optimization": {"stage": 3}})`."""

    kind: Literal["replicated", "fsdp2", "zero"] = "replicated"
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """The DeepSpeed configuration, for kind "zero"."""
    reshard_after_forward: bool = True
    """Whether FSDP2 releases a layer's gathered parameters between its forward and its backward pass."""
    bf16: bool = False
    """Whether the configuration file says `mixed_precision: bf16`, which has the effect of --bf16."""

    def divides(self, world: World) -> bool:
        """Whether weights are divided. A single process holds all of them, whatever is requested."""
        return world.size > 1 and self.kind != "replicated"


def requested(environment: Mapping[str, str] = os.environ) -> Request:
    """Read the request from accelerate's environment variables. Raises UserError for what plumbob does not support."""

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
                f"{what} in the accelerate configuration is not supported; use DDP, FSDP2, ZeRO-2 or ZeRO-3"
            )
    bf16 = precision == "bf16"
    if says("ACCELERATE_USE_DEEPSPEED") == "true":
        return Request("zero", _deepspeed_config(), bf16=bf16)
    if says("ACCELERATE_USE_FSDP") == "true":
        if says("FSDP_VERSION", "1") != "2":
            raise UserError("FSDP version 1 is not supported: write fsdp_version: 2, as configs/fsdp2.yaml does")
        if says("FSDP_OFFLOAD_PARAMS") == "true":
            raise UserError("fsdp_offload_params is not supported: set it to false in the accelerate configuration")
        return Request("fsdp2", reshard_after_forward=says("FSDP_RESHARD_AFTER_FORWARD", "true") != "false", bf16=bf16)
    return Request(bf16=bf16)


def _deepspeed_config() -> Mapping[str, Any]:
    """The DeepSpeed configuration as accelerate reads it. Raises UserError if it cannot be used."""
    if find_spec("deepspeed") is None:
        raise UserError("the accelerate configuration needs DeepSpeed; install it with `uv sync --extra deepspeed`")
    from accelerate.utils import DeepSpeedPlugin

    try:
        config = DeepSpeedPlugin().deepspeed_config
    except (ValueError, OSError) as error:
        raise UserError(f"the DeepSpeed configuration cannot be used: {error}") from None
    zero = config["zero_optimization"]
    if zero.get("stage") not in (2, 3):
        raise UserError(f"ZeRO stage {zero.get('stage')} is not supported: use 2 or 3, or configs/ddp.yaml")
    for what in ("offload_optimizer", "offload_param"):
        device = (zero.get(what) or {}).get("device", "none")
        if device not in ("none", None):
            raise UserError(
                f"{what}_device: {device} is not supported; to save memory, use more processes, --peft or "
                "--gradient-checkpointing"
            )
    return {**config, "zero_optimization": {k: v for k, v in zero.items() if not k.startswith("offload_")}}


def check_same(module: torch.nn.Module, world: World) -> None:
    """Raise UserError if the processes loaded different weights; compares up to 1,024 of each tensor. Collective.

    Without this check, parts of different models could form one model that trains, syncs and agrees with its engine,
    but is meaningless.
    """
    if world.size == 1:
        return
    own = {
        n: p.detach().flatten()[:: p.numel() // 1024 + 1].double().sum().item() for n, p in module.named_parameters()
    }
    for rank, others in enumerate(world.gather(own)):
        if wrong := [name for name, value in own.items() if others.get(name) != value]:
            raise UserError(
                f"processes {world.rank} and {rank} loaded different weights ({wrong[0]} and {len(wrong) - 1} others); "
                "give all processes the same model files"
            )


def shard(request: Request, scorer: torch.nn.Module, world: World, *, bf16: bool) -> Sharding:
    """Divide the scorer's parameters among the processes as requested. Collective.

    Raises UserError if the processes hold different weights.
    """
    check_same(scorer, world)
    if not request.divides(world):
        return Replicated(scorer.to(world.device), world)
    if request.kind == "fsdp2":
        from plumbob.trainer.distributed.fsdp2 import FSDP2

        return FSDP2(scorer, world, bf16=bf16, reshard_after_forward=request.reshard_after_forward)
    from plumbob.trainer.distributed.deepspeed import Zero

    return Zero(scorer.to(world.device), world, request.deepspeed)
