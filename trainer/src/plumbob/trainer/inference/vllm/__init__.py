"""`--engine vllm`: `vf-vllm` starts servers, `VllmEngine` samples from them and sends them the trained weights.

Importing this package does not import vllm: the servers run in processes of their own, and only the NCCL transfer uses
vLLM's library in the trainer's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plumbob.trainer.inference.engine import EngineParts, TrainingEngine
    from plumbob.trainer.policy.forward_plan import ForwardPlan
    from transformers import PreTrainedModel

IN_PROCESS = False


def measure(model: PreTrainedModel, plan: ForwardPlan, max_context: int) -> None:
    """Nothing: vLLM has model classes of its own, and each weight sync compares its log-probabilities."""


def open_engine(parts: EngineParts) -> TrainingEngine:
    from plumbob.trainer.inference.vllm.connect import open_vllm

    return open_vllm(parts)
