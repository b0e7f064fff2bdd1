"""ZeRO-2 and ZeRO-3 by DeepSpeed: optimizer state and gradients, with ZeRO-3 also parameters, divided among the ranks.

DeepSpeed's mixed precision is off, so it computes in the parameters' own types, and plumbob's scorer uses autocast. So
float32 weights stay float32, and neither a loss scale nor a second copy of the weights is needed.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from plumbob.trainer.distributed.base import MakeOptimizer, Sharding
from plumbob.trainer.distributed.world import World


class Zero(Sharding):
    collective_forward = True

    def __init__(self, scorer: torch.nn.Module, world: World, config: Mapping[str, Any]) -> None:
        """`config`: the DeepSpeed configuration, as accelerate reads it."""
        super().__init__(scorer, world)
        os.environ.setdefault("DS_ACCELERATOR", world.device.type)
        self._deepspeed: Any = importlib.import_module("deepspeed")
        # On CPUs DeepSpeed would compile a kernel for sums over processes, for a minute or two; torch's gloo has one.
        self._deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # The newest torch warns about DeepSpeed's own calls many times per step.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        self.stage = config["zero_optimization"]["stage"]
        self.kind = f"zero{self.stage}"
        self._config = config
        self._engine: Any = None

    def make_optimizer(self, make: MakeOptimizer, max_norm: float) -> torch.optim.Optimizer:
        if self.stage == 3:
            # DeepSpeed gathers a parameter for its own module's forward pass, but the head's are read in the scorer's.
            head = self.scorer.model.get_output_embeddings()
            for parameter in head.parameters(recurse=False) if head is not None else ():
                self._deepspeed.zero.register_external_parameter(self.scorer, parameter)
        optimizer = super().make_optimizer(make, max_norm)
        self._deepspeed.init_distributed(dist_init_required=False)
        self._engine, *_ = self._deepspeed.initialize(
            model=self.scorer, optimizer=optimizer, config=settings(self._config, self.world.size, max_norm)
        )
        found = (self._engine.dp_world_size, self._engine.zero_optimization_stage())
        if found != (self.world.size, self.stage):
            raise RuntimeError(
                f"DeepSpeed runs stage {found[1]} in {found[0]} processes, not {self.stage} in {self.world.size}"
            )
        return optimizer

    def __call__(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self._engine(*args)
        if self.stage == 3 and not torch.is_grad_enabled():
            # DeepSpeed has begun to gather what a backward pass would need first, but none follows to wait for it.
            self._engine.optimizer.empty_partition_cache()
        return outputs

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world.size)  # because DeepSpeed takes the mean over ranks

    def update(self) -> float:
        self._engine.step()
        # If the norm is not finite, DeepSpeed skips the update by itself and discards the gradients.
        norm = float(self._engine.get_global_grad_norm())
        return float("inf") if self._engine.optimizer.overflow else norm

    def zero_grad(self) -> None:
        self._engine.optimizer.zero_grad()

    def local(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.ds_tensor.data if self.stage == 3 else parameter.data

    def local_gradient(self, parameter: torch.Tensor) -> None:
        return None

    @contextmanager
    def whole(self, *parameters: torch.Tensor) -> Generator[list[torch.Tensor]]:
        gathered = self._deepspeed.zero.GatheredParameters(list(parameters)) if self.stage == 3 else nullcontext()
        with gathered:
            yield [p.detach() for p in parameters]

    @torch.no_grad()
    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        own = self.parameters
        for name, tensor in tensors:
            if self.stage == 3:
                with self._deepspeed.zero.GatheredParameters([own[name]], modifier_rank=0):
                    if self.world.is_main:
                        own[name].copy_(tensor)
            else:
                own[name].copy_(tensor)
        # The optimizer has copies of the weights, which must follow.
        self._engine.optimizer.refresh_fp32_params()

    def changed(self) -> None:
        """Update the whole copies of small parameters that ZeRO-3 keeps on every rank beside their parts."""
        kept = getattr(self._engine.optimizer, "persistent_parameters", [])
        if kept:
            kept[0].partition(kept)
            kept[0].all_gather(kept)

    @property
    def _masters(self) -> list[torch.Tensor]:
        """This rank's parts of the weights on which the optimizer acts, as flat float32 tensors."""
        optimizer = self._engine.optimizer
        return list(
            optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups
        )

    def state(self) -> list[dict[str, torch.Tensor]]:
        return [dict(self.optimizer.state[p]) for p in self._masters]

    def load_state(self, state: list[dict[str, torch.Tensor]]) -> None:
        for p, saved in zip(self._masters, state, strict=True):
            self.optimizer.state[p] = saved


def settings(config: Mapping[str, Any], size: int, max_norm: float) -> dict[str, Any]:
    """The DeepSpeed configuration of a run: the user's, with the settings that plumbob decides replaced or removed.

    Gradient accumulation is 1 here because plumbob counts the passes itself, and tells DeepSpeed which one is the last.
    """
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": size,
        "gradient_clipping": max_norm,
        "steps_per_print": 10**12,
    }
    dropped = {"bf16", "fp16", "optimizer", "scheduler", "amp", "torch_autocast"}
    return {**_without_auto({k: v for k, v in config.items() if k not in dropped}), **own}


def _without_auto(value: Any) -> Any:
    """The configuration without settings that are "auto" or None, for which DeepSpeed then uses its own defaults.

    accelerate and transformers write "auto" for settings that they fill in themselves.
    """
    if not isinstance(value, Mapping):
        return value
    return {k: _without_auto(v) for k, v in value.items() if v != "auto" and v is not None}
