"""How the tensors of a policy lie over the processes of a run: a copy on each, or a share on each (FSDP2, ZeRO-2, ZeRO-3)."""

from plumbob.trainer.sharding.base import MakeOptimizer, Replicated, Sharding, WholeTensors
from plumbob.trainer.sharding.request import Request, requested, shard

__all__ = ["MakeOptimizer", "Replicated", "Request", "Sharding", "WholeTensors", "requested", "shard"]
