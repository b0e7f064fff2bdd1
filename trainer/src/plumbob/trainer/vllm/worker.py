"""What `vf-vllm` adds to vLLM's workers, for questions that vLLM's endpoints do not answer. Runs in the server's processes.

Called through `/collective_rpc`. It reads private names of vLLM (0.25 and 0.32 have the same), and is the only file that
does. A server without it still serves; the trainer then learns less at a sync.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Mixed into vLLM's worker class by `--worker-extension-cls`."""

    model_runner: Any

    def plumbob_bound_modules(self) -> dict[str, int]:
        """`adapter`: the number of the adapter loaded last; `bound`: how many of the model's modules it changes.

        Counted as peft counts: a fused module (query, key and value in one) is as many as were fused into it. An adapter
        whose names do not fit is loaded without a word and binds nothing.
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
        """Remember which policy version the weights are. A server that was started again does not know one."""
        self._plumbob_version = version
        return {"version": version}

    def plumbob_version(self) -> dict[str, int]:
        return {"version": getattr(self, "_plumbob_version", -1)}
