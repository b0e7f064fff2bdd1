"""Methods that `vf-vllm` adds to vLLM's workers, for questions that vLLM's endpoints do not answer.

They run in the server's processes and are called through `/collective_rpc`. This is the only file that reads private
names of vLLM; 0.25 and 0.32 have the same ones.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class by `--worker-extension-cls`."""

    model_runner: Any
    vllm_config: Any

    def plumbob_model(self) -> dict[str, int | str]:
        """`vocab_size`: number of the model's token ids; `max_lora_rank`: largest rank of an adapter, 0 without LoRA.

        `transfer`: how the server takes all weights, "nccl" or "ipc"; "disk" if it was not started for either.
        """
        lora, transfer = self.vllm_config.lora_config, getattr(self.vllm_config, "weight_transfer_config", None)
        return {
            "vocab_size": self.vllm_config.model_config.get_vocab_size(),
            "max_lora_rank": lora.max_lora_rank if lora else 0,
            "transfer": transfer.backend if transfer else "disk",
        }

    def plumbob_bound_modules(self) -> dict[str, int]:
        """`adapter`: number of the adapter loaded last, or 0; `bound`: how many of the model's modules it changes.

        Modules are counted as peft counts them: a fused module (query, key and value in one) counts once for each of
        its parts. vLLM loads an adapter whose names do not match without an error, and it then changes 0 modules.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = max(manager.list_adapters(), default=0)
        if not adapter:
            return {"adapter": 0, "bound": 0}
        lora, bound = manager.get_adapter(adapter), 0
        for name in manager.modules:
            weights = manager._get_lora_layer_weights(lora, name)
            if weights:
                fused = weights.lora_a if isinstance(weights.lora_a, list) else [weights.lora_a]
                bound += sum(part is not None for part in fused)
        return {"adapter": adapter, "bound": bound}

    def plumbob_mark(self, version: int) -> dict[str, int]:
        """Remember the policy version of the current weights; a restarted server does not have this mark."""
        self._plumbob_version = version
        return {"version": version}

    def plumbob_version(self) -> dict[str, int]:
        """The policy version set by `plumbob_mark`; -1 if there is none."""
        return {"version": getattr(self, "_plumbob_version", -1)}
