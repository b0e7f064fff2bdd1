"""A LoRA adapter on its way to vLLM: files in peft's layout, loaded under a new name at each sync."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from plumbob.trainer.sync import SyncError
from plumbob.trainer.vllm.control import Control
from plumbob.trainer.vllm.http import HttpThread
from safetensors import SafetensorError
from safetensors.torch import save_file

_LORA_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight$")


@dataclass(frozen=True)
class LoraShape:
    """How an adapter is scaled: its output is multiplied by alpha / rank."""

    rank: int
    alpha: float


@dataclass(frozen=True)
class Pushed:
    """What a sync sent."""

    num_weights: int
    num_bytes: int
    model: str
    """The name that requests ask for from now on."""
    bound: int | None = None
    """Modules of the server's model that the adapter changes; None if there is none, or the server does not tell."""


def write_adapter(folder: Path, weights: Mapping[str, torch.Tensor], shape: LoraShape) -> tuple[int, int]:
    """Write trained tensors, by the names that peft gives parameters, as peft writes adapters.

    Returns how many modules they are for, and their bytes. Raises SyncError for a name that is no adapter's.
    """
    tensors: dict[str, torch.Tensor] = {}
    modules: set[str] = set()
    for name, tensor in weights.items():
        found = _LORA_NAME.match(name)
        if found is None:
            raise SyncError(
                f"{name!r} is no weight of a LoRA adapter, and the servers take adapters only (--sync lora)"
            )
        modules.add(found["module"])
        key = f"base_model.model.{found['module']}.lora_{found['side']}.weight"
        tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules}),
        "inference_mode": True,
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    # Last: a folder with this file is whole.
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return len(modules), sum(t.nbytes for t in tensors.values())


@contextmanager
def written(folder: Path) -> Generator[None]:
    """Raises SyncError, with nothing left in `folder`, if what is written there within does not fit."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        reason = str(error).strip().splitlines()[0]
        raise SyncError(f"cannot write weights to {folder}: {reason}; give a --vllm-folder with more room") from None


class AdapterTransfer:
    """Sends an adapter to every server. Completions in flight end with the adapter that they began with."""

    def __init__(self, control: Control, folder: Path, shape: LoraShape) -> None:
        self.control, self.folder, self.shape = control, folder, shape
        # Servers outlive runs: a name is never used twice.
        self._run = uuid.uuid4().hex[:8]
        self._loaded: list[str] = []

    def push(self, weights: Mapping[str, torch.Tensor], version: int) -> Pushed:
        """Load the adapter everywhere. Raises SyncError if one server does not take all of it; then none keeps it."""
        name = f"plumbob-{self._run}-{version}"
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        with written(folder):
            modules, size = write_adapter(folder, weights, self.shape)
        try:
            self.control.each("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            bound = self._bound()
            if bound is not None and bound != modules:
                raise SyncError(
                    f"adapter {name} has weights for {modules} modules, and the model that vLLM serves binds {bound} of them"
                )
        except SyncError as error:
            self._forget(name)
            raise SyncError(f"{error}{self._hint(str(error))}") from None
        self._loaded.append(name)
        return Pushed(len(weights), size, name, bound)

    def settle(self) -> None:
        """Unload all adapters but the newest, and delete all files but the newest two."""
        *old, newest = self._loaded
        for name in old:
            self._forget(name)
        self._loaded = [newest]

    async def readmit(self, http: HttpThread, url: str, model: str) -> None:
        """Give a server that came back the adapter that is served. Raises ServerFailure."""
        cards = await http.request("GET", url, "/v1/models")
        if not any(card["id"] == model for card in cards["data"]):
            body = {"lora_name": model, "lora_path": str(self.folder / model)}
            await http.request("POST", url, "/v1/load_lora_adapter", body, read=bytes)

    def close(self) -> None:
        for name in self._loaded:
            self._forget(name)
        self._loaded = []

    def _bound(self) -> int | None:
        """Modules bound by the adapter loaded last, the fewest of any worker; None if the servers do not tell."""
        try:
            answers = self.control.each("POST", "/collective_rpc", {"method": "plumbob_bound_modules"}, read=json.loads)
            return min(worker["bound"] for answer in answers for worker in answer["results"])
        except (SyncError, KeyError, TypeError, ValueError):
            return None

    def _forget(self, name: str) -> None:
        with suppress(SyncError):  # a server that has been started again has no such adapter
            self.control.each("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def _hint(self, reason: str) -> str:
        if "rank" in reason:
            return f"; start vf-vllm with --max-lora-rank {self.shape.rank}"
        if "No adapter" in reason:
            return f"; the server has to see {self.folder}: give a folder that both machines share"
        if " 404 " in reason or "not enabled" in reason:
            return "; start the server with vf-vllm (--sync lora)"
        return ""
