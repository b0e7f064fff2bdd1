"""Faults of the weight sync, of the adapter that the engine computes with, and of the model that a run saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import Fault, table
from plumbob.testing.faulty.sites import UNJUDGED, Site, anew, since
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def only(keep: Callable[[str], bool]) -> Callable[[Tensors, Any], Tensors]:
    """A sync that sends the tensors of which `keep(name)` is true."""
    return lambda sent, engine: {name: tensor for name, tensor in sent.items() if keep(name)}


def each(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Tensors, Any], Tensors]:
    """A sync that sends `change(name, tensor)`."""
    return lambda sent, engine: {name: change(name, tensor) for name, tensor in sent.items()}


def renamed(other: Callable[[str], str]) -> Callable[[Tensors, Any], Tensors]:
    """A sync in which each tensor is the one of the name `other(its name)`, if there is one of its shape."""

    def change(sent: Tensors, engine: Any) -> Tensors:
        names = {n: other(n) if getattr(sent.get(other(n)), "shape", None) == t.shape else n for n, t in sent.items()}
        return {name: sent[source] for name, source in names.items()}

    return change


def exchanged(one: str, two: str) -> Callable[[str], str]:
    """The name with one of these parts in place of the other."""
    return lambda name: name.replace(one, two) if one in name else name.replace(two, one)


def every(number: int) -> Callable[[], Callable[[Tensors, Any], Tensors]]:
    """A sync that sends the newest weights every so many times, and in between the ones before."""

    def make() -> Callable[[Tensors, Any], Tensors]:
        held: dict[int, tuple[Any, int, Tensors]] = {}  # by the engine, which is kept so that no other has its id

        def change(sent: Tensors, engine: Any) -> Tensors:
            _, count, old = held.get(id(engine), (engine, 0, {}))
            if count % number == 0:
                old = {name: tensor.clone() for name, tensor in sent.items()}
            held[id(engine)] = (engine, count + 1, old)
            return old

        return change

    return make


def cache_kept(original: Any, engine: Any, sent: Any, **how: Any) -> Any:
    forget, engine.forget = engine.forget, lambda: None
    try:
        return original(engine, sent, **how)
    finally:
        engine.forget = forget


def adapters(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLinear)]


def scaled(factor: Callable[[str, Any], float]) -> Callable[[Any], None]:
    """Multiplies the scale of each adapter by `factor(its name, its layer)`."""

    def change(model: Any) -> None:
        for name, layer in adapters(model):
            layer.scaling = {key: value * factor(name, layer) for key, value in layer.scaling.items()}

    return change


def rank(layer: Any) -> int:
    (found,) = layer.r.values()
    return found


def saved_with_scale(factor: float) -> Callable[[Any, Any], Tensors]:
    """The final model is merged with adapters at `factor` times their scale."""

    def change(original: Any, model: Any) -> Tensors:
        layers = [layer for _, layer in adapters(model)]
        kept = [dict(layer.scaling) for layer in layers]
        scaled(lambda name, layer: factor)(model)
        try:
            return original(model)
        finally:
            for layer, scaling in zip(layers, kept, strict=True):
                layer.scaling = scaling

    return change


def saved(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], Tensors]:
    """The final model's tensors are `change(name, tensor)`."""
    return lambda original, model: {name: change(name, tensor) for name, tensor in original(model).items()}


def first_state(names: Callable[[str], bool]) -> Callable[[ExitStack, str, Any], None]:
    """The final model has the tensors of these names from the run's start."""

    def install(stack: ExitStack, env: str, change: None) -> None:
        first: Tensors = {}

        def engine_model(original: Any, self: Any, **how: Any) -> Any:
            if not first:
                first.update({n: t.clone() for n, t in merged(self.model).items() if names(n)})
            return original(self, **how)

        merged = at.policy_module.merged_state
        at.wrapped(stack, at.Policy, "engine_model", engine_model)
        at.saved_state.install(stack, env, lambda original, model: {**original(model), **first})

    return install


def prefixed(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = {f"_orig_mod.{name}": tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


# fmt: off
FAULTS = (
*table("sync",
    Fault("weights under another prefix skipped in the sync",
          "The tensors' names have a prefix that the engine does not know, and names that it does not know are "
          "skipped.", at.weights, only(lambda name: False), "weights-not-synced",
          "pytorch/examples#1029, bowang-lab/scGPT#296", run_causes="engine-trainer-mismatch",
          also=UNJUDGED),
    Fault("embeddings are not synced",
          "A weight sync leaves out input and output embeddings, as those listed in modules_to_save.", at.weights,
          only(lambda name: "embed_tokens" not in name and "lm_head" not in name),
          "engine-trainer-mismatch weights-not-synced", "huggingface/trl#6007, vllm-project/vllm#11714",
          also=UNJUDGED),
    Fault("one layer is no longer synced from the middle of the run",
          "From the fifth step on a weight sync leaves out the second layer.", since(4, at.weights),
          only(lambda name: "layers.1." not in name), "weights-not-synced",
          "PrimeIntellect-ai/prime-rl#1857, huggingface/trl#5312", steps=12, only="run",
          run_causes="engine-trainer-mismatch", also=UNJUDGED),
    Fault("weights sent in every third step only",
          "The trainer sends weights at an interval of its own, and rollouts in between come from older weights.",
          anew(at.weights), every(3), "weights-not-synced", "huggingface/trl#3189, huggingface/trl#6513",
          run_causes="engine-trainer-mismatch"),
    Fault("prefix cache kept across weight syncs",
          "Generation pauses for a weight sync without clearing its cache, and prompts keep what old weights "
          "computed.", at.load, cache_kept, "weights-not-synced", "huggingface/trl#6344",
          run_causes="engine-trainer-mismatch"),
    Fault("asynchronous requests without the adapter",
          "The engine gets each update of the adapter, but its asynchronous requests do not name it: the base "
          "model answers.", at.engine_model, scaled(lambda name, layer: 0.0),
          "weights-not-synced", "modelscope/ms-swift#9855, unslothai/unsloth#8701",
          options="--peft", run_causes="engine-trainer-mismatch", also=UNJUDGED),
    Fault("adapter served at half its scale",
          "The engine multiplies the LoRA adapter by alpha / (2 rank), the trainer by alpha / rank.", at.engine_model,
          scaled(lambda name, layer: 0.5), "weights-not-synced",
          "the review's table, verl-project/verl#6380 (alpha of another value in the file)", options="--peft",
          run_causes="engine-trainer-mismatch weights-not-synced"),
),
*table("saved",
    Fault("merge skipped in the final model", "The final model is written without the trained adapter.",
          at.saved_state, saved_with_scale(0.0), "saved-model-differs",
          "unslothai/unsloth#2142, verl-project/verl#6380", options="--peft"),
    Fault("final model rounded to bfloat16",
          "The final model's weights are rounded to bfloat16, although they were trained in float32.", at.saved_state,
          saved(lambda name, tensor: tensor.bfloat16().float()), "weights-not-synced saved-model-differs",
          "TensorAuto/OpenTau#185, PrimeIntellect-ai/prime-rl#1456"),
    Fault("final model saved from a copy of the first weights",
          "The weights that are written at the end are those of the start, because sharded ones are never "
          "gathered into them.", Site("merged_state", first_state(lambda name: True)), None, "saved-model-differs",
          "haotian-liu/LLaVA#1734, 2U1/Qwen-VL-Series-Finetune#231"),
    Fault("weights saved under names that nobody loads",
          "The names of the saved weights have a prefix more, and who loads them gets new weights everywhere.",
          at.saved_files, prefixed, "saved-model-differs",
          "huggingface/transformers#48722, fla-org/flash-linear-attention#143"),
),
*table("logprobs",
    Fault("layers exchanged in a packed sync",
          "Weights are received in another order than they were sent, so that layers of the same shape change "
          "places.", at.weights, renamed(exchanged(".layers.0.", ".layers.1.")), "weights-not-synced",
          "lightseekorg/tokenspeed#546", options="--max-tokens 64", run_causes="engine-trainer-mismatch",
          also=UNJUDGED),
    Fault("attention outputs arrive as zeros",
          "A weight sync sends buffers for the attention's output matrices that were never filled.", at.weights,
          each(lambda name, tensor: torch.zeros_like(tensor) if "o_proj" in name else tensor), "weights-not-synced",
          "OpenRLHF/OpenRLHF#660, PrimeIntellect-ai/prime-rl#3451", run_causes="engine-trainer-mismatch"),
    Fault("square matrices arrive transposed",
          "One side stores matrices transposed, and nothing refuses those that are square.", at.weights,
          each(lambda name, tensor: tensor.T.contiguous() if tensor.dim() == 2 and len(set(tensor.shape)) == 1 else tensor),
          "engine-trainer-mismatch weights-not-synced", "lablup/mlxcel#925", also=UNJUDGED),
    Fault("values loaded in the place of keys",
          "A weight sync writes the projection of the values into that of the keys, and the other way round.",
          at.weights, renamed(exchanged("k_proj", "v_proj")), "engine-trainer-mismatch weights-not-synced",
          "vllm-project/vllm#42803, sgl-project/sglang#24321", also=UNJUDGED),
),
)
