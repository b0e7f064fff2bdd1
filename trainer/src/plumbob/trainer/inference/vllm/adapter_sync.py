"""Weight sync of a LoRA adapter to vLLM: files in peft's layout, loaded under a new name at each sync."""

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
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.inference.http_client import HttpThread
from plumbob.trainer.inference.vllm.control import Control
from safetensors import SafetensorError
from safetensors.torch import save_file

_LORA_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight$")


@dataclass(frozen=True)
class LoraShape:
    """Rank and alpha of a LoRA adapter, whose output is multiplied by alpha / rank."""

    rank: int
    alpha: float


@dataclass(frozen=True)
class Pushed:
    """What one weight sync sent to the servers."""

    num_bytes: int
    """Size of all tensors, in bytes."""
    model: str
    """The model name that requests use from now on."""
    bound: int | None = None
    """Number of the server's modules that the adapter changes; None without one, or if the server does not say."""


def write_adapter(folder: Path, weights: Mapping[str, torch.Tensor], shape: LoraShape) -> tuple[int, int]:
    """Write `weights`, named as peft names parameters, as an adapter folder in peft's layout.

    Returns the number of adapted modules, and the tensors' size in bytes. Raises SyncError for a name that is not a
    LoRA weight's.
    """
    tensors: dict[str, torch.Tensor] = {}
    modules: set[str] = set()
    for name, tensor in weights.items():
        found = _LORA_NAME.match(name)
        if found is None:
            raise SyncError(f"{name!r} is not a weight of a LoRA adapter, and with --peft nothing else is sent to vLLM")
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
    # Written last, so that a folder with this file is complete.
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return len(modules), sum(t.nbytes for t in tensors.values())


@contextmanager
def written(folder: Path) -> Generator[None]:
    """Context in which weights are written to `folder`; if writing fails, deletes the folder and raises SyncError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        reason = str(error).strip().splitlines()[0]
        raise SyncError(f"cannot write weights to {folder}: {reason}") from None


class AdapterTransfer:
    """Sends an adapter to every server. Completions under way end with the adapter that they began with."""

    def __init__(self, control: Control, folder: Path, shape: LoraShape) -> None:
        self.control, self.folder, self.shape = control, folder, shape
        # A server may outlive the run, so adapter names must differ between runs.
        self._run = uuid.uuid4().hex[:8]
        self._loaded: list[str] = []

    def push(self, weights: Mapping[str, torch.Tensor], version: int) -> Pushed:
        """Load the adapter on every server.

        Raises SyncError if a server does not take all of it; the adapter is then unloaded from all servers.
        """
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
                    f"adapter {name} has weights for {modules} modules, but vLLM bound it to {bound}; check "
                    "--lora-targets and the server's model"
                )
        except SyncError as error:
            self._forget(name)
            raise SyncError(f"{error}{self._hint(error)}") from None
        self._loaded.append(name)
        return Pushed(size, name, bound)

    def settle(self) -> None:
        """Unload all adapters but the newest and delete their files."""
        *old, newest = self._loaded
        for name in old:
            self._forget(name)
        self._loaded = [newest]

    async def readmit(self, http: HttpThread, url: str, model: str) -> None:
        """Load the adapter `model` on a restarted server, unless it has it already. Raises ServerFailure."""
        cards = await http.request("GET", url, "/v1/models")
        if not any(card["id"] == model for card in cards["data"]):
            body = {"lora_name": model, "lora_path": str(self.folder / model)}
            await http.request("POST", url, "/v1/load_lora_adapter", body, read=bytes)

    def close(self) -> None:
        """Unload all adapters of this run and delete their files."""
        for name in self._loaded:
            self._forget(name)
        self._loaded = []

    def _bound(self) -> int | None:
        """Modules that the newest adapter changes, the minimum over all workers; None if the servers do not say."""
        try:
            answers = self.control.each("POST", "/collective_rpc", {"method": "plumbob_bound_modules"}, read=json.loads)
            return min(worker["bound"] for answer in answers for worker in answer["results"])
        except (SyncError, KeyError, TypeError, ValueError):
            return None

    def _forget(self, name: str) -> None:
        with suppress(SyncError):  # a restarted server does not have this adapter
            self.control.each("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def _hint(self, error: SyncError) -> str:
        if error.status != 404:
            return ""
        if error.reason.endswith("Not Found"):  # the web server's own text where there is no such route
            return "; start the server with vf-vllm (--sync lora)"
        return f"; the server cannot read {self.folder}: give an --output-dir that both machines share"
