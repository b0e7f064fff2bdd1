"""Model files where tensors are divided: these are gathered one by one, written by rank 0, and read by every rank."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from plumbob.trainer.distributed.base import Sharding
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

FILE_BYTES = 5 << 30
"""Most bytes of one file of weights, and of the whole weights that rank 0 holds at once."""

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


def save(folder: Path, sharding: Sharding, model: PreTrainedModel) -> None:
    """Write the adapter if there is one, else the whole model, in the layout of `save_pretrained`. Collective.

    Raises OSError or SafetensorError on rank 0, after all tensors have been gathered, so that no other rank waits for
    it.
    """
    if sharding.shapes.keys() != sharding.trainable.keys():
        adapter = {name: tensor.cpu() for name, tensor in sharding.stream().items()}
        if sharding.world.is_main:
            model.save_pretrained(folder, state_dict=adapter)
        return
    save_merged(folder, sharding, model)


def save_merged(folder: Path, sharding: Sharding, model: PreTrainedModel) -> None:
    """Write the whole model in float32, with any adapter merged in, in files of at most 5 GiB. Collective.

    Raises OSError or SafetensorError on rank 0, after all tensors have been gathered.
    """
    if sharding.world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(model.config)
        config.dtype = torch.float32
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
    shapes = {name.replace(".base_layer.", "."): s for name, s in sharding.shapes.items() if "lora_" not in name}
    write(folder, merged(sharding, model), shapes, writes=sharding.world.is_main)


def merged(sharding: Sharding, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and whole float32 tensors of the model with any adapter merged in, as a plain model has them.

    Collective: every rank must take all tensors.
    """
    for plain, parameter, layer in in_plain_model(sharding.parameters, model):
        if layer is None:
            with sharding.whole(parameter) as (tensor,):
                yield plain, tensor.float()
            continue
        adapter = layer.active_adapters[0]
        with sharding.whole(parameter, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight) as (weight, a, b):
            yield plain, weight.float() + layer.scaling[adapter] * (b.float() @ a.float())


def in_plain_model(
    tensors: Mapping[str, torch.Tensor], model: PreTrainedModel
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Of each tensor but the adapter's: its name in a plain model, the tensor, and peft's LoRA layer of this weight or None.

    peft is imported only if there is an adapter.
    """
    layers: dict[str, Any] = {}
    if any("lora_" in name for name in tensors):
        from peft.tuners.lora import Linear

        layers = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Linear)}
    for name, tensor in tensors.items():
        if "lora_" not in name:
            plain = name.replace(".base_layer.", ".")
            yield plain, tensor, layers.get(plain)


def write(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shapes: Mapping[str, torch.Size], *, writes: bool
) -> None:
    """Write tensors one after the other into files of at most FILE_BYTES.

    `shapes`: name -> shape of all tensors, in order. `writes` false: take all tensors without writing them, because
    gathering them is collective. Raises OSError or SafetensorError after all tensors have been taken.
    """
    names = _files(shapes)
    last = {file: name for name, file in names.items()}
    part: dict[str, torch.Tensor] = {}
    failed: Exception | None = None
    for name, tensor in tensors:
        if not writes or failed is not None:
            continue
        try:
            part[name] = tensor.cpu().contiguous()
            if last[names[name]] == name:
                save_file(part, folder / names[name], metadata={"format": "pt"})
                part = {}
        except (OSError, SafetensorError) as error:
            failed = error
    if failed is not None:
        raise failed
    if writes and len(last) > 1:
        total = sum(shape.numel() * 4 for shape in shapes.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2))


def _files(shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """Name of each tensor -> name of its file, in order; files are named like those of transformers."""
    number, used, numbers = 1, 0, {}
    for name, shape in shapes.items():
        size = shape.numel() * 4
        if used and used + size > FILE_BYTES:
            number, used = number + 1, 0
        numbers[name], used = number, used + size
    if number == 1:
        return dict.fromkeys(shapes, "model.safetensors")
    return {name: f"model-{n:05d}-of-{number:05d}.safetensors" for name, n in numbers.items()}


def saved_tensors(folder: Path, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that `save` wrote, with the names of the model's parameters."""
    if (folder / ADAPTER).is_file():
        adapter = next(iter(model.peft_config))  # type: ignore[arg-type]
        for name, tensor in _read(folder / ADAPTER):
            plain = name.removeprefix(PEFT_PREFIX)
            yield plain.removesuffix(".weight") + f".{adapter}.weight", tensor
        return
    paths = [folder / "model.safetensors"]
    if (folder / INDEX).is_file():
        paths = [folder / file for file in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))]
    for path in paths:
        yield from _read(path)


def _read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            yield name, file.get_tensor(name)
