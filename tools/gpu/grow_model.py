"""Put a bundled policy into a shape of Qwen2.5: it computes what the small policy does, at the cost of the large model.

    python3 tools/gpu/grow_model.py tiny-musique 7b /tmp/musique-7b
    python3 tools/gpu/grow_model.py random 7b /tmp/random-7b           # random weights, with the tokenizer of `tiny`

Pretrained weights may not be available, and random weights solve no task. A model made here solves its task as well as
the small policy, calls tools and can learn, while its memory, communication and times are those of the large shape. As
in Net2Net (Chen et al., 2016, arXiv:1511.05641), the function is preserved, up to the rounding to bfloat16: no weight
reads the added width, the added heads, neurons and layers output 0 at first, and the added tokens have no probability.
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from plumbob.trainer.config.bundled_models import BUNDLED_MODELS
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.run_files.model_path import model_path
from shapes import QWEN, qwen_config
from transformers import PreTrainedModel, Qwen2ForCausalLM

CONSTANT = 0.35
"""The constant by which the added tokens are silenced (see `_silence`).

It is small compared to the norm of the final residual stream (`TYPICAL_NORM`), so it changes logits by about as much as
rounding to bfloat16 does. Adam changes this weight like any other, although the loss does not depend on it. When it
reaches 0, the added tokens get probability: in a 7B after about twenty steps of LoRA at 1e-4, or ten steps of all
weights at 1e-6 (estimated).
"""
TYPICAL_NORM = 20.0
"""Typical norm of the final residual stream of the bundled policies."""


def random_model(shape: dict[str, Any], small: PreTrainedModel, **fields: Any) -> Qwen2ForCausalLM:
    """A model of `shape` with random float32 weights, with the special tokens of `small` and on its device."""
    old = small.config
    config = qwen_config(
        shape, **fields, eos_token_id=old.eos_token_id, bos_token_id=old.bos_token_id, pad_token_id=old.pad_token_id
    )
    torch.manual_seed(0)
    with small.device:
        return Qwen2ForCausalLM(config)


def write(policy: str, shape: str, out: Path) -> Qwen2ForCausalLM:
    """Write `policy` (or "random" weights) in `shape`, in bfloat16 and with its tokenizer, to the folder `out`."""
    name = "tiny" if policy == "random" else policy
    small = load_model(name).to("cuda" if torch.cuda.is_available() else "cpu")
    large = random_model(QWEN[shape], small) if policy == "random" else grow(small, QWEN[shape])
    large.to(torch.bfloat16)
    large.save_pretrained(out)
    for path in Path(model_path(name)).iterdir():
        if path.suffix not in (".safetensors", ".md") and path.name != "config.json":
            shutil.copy(path, out)
    return large


def grow(small: PreTrainedModel, shape: dict[str, Any]) -> Qwen2ForCausalLM:
    """A float32 model of `shape` that computes what `small` does. `small`: a Qwen2 model with tied embeddings.

    `shape` must have more layers than `small`, and heads at least as wide.
    """
    old = small.config
    # Rotary pair i of a head of width n has frequency theta^(-2i/n). With this theta it is the same in both widths.
    times = shape["hidden_size"] // shape["num_attention_heads"] / (old.hidden_size // old.num_attention_heads)
    rotary = {**old.rope_parameters, "rope_theta": old.rope_parameters["rope_theta"] ** times}
    large = random_model(
        shape, small, rope_parameters=rotary, max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=old.rms_norm_eps * old.hidden_size / shape["hidden_size"],
    )  # fmt: skip
    config = large.config
    width, norm = old.hidden_size, math.sqrt(old.hidden_size / config.hidden_size)
    with torch.no_grad():
        embeddings = small.get_input_embeddings().weight
        for table in {large.get_input_embeddings().weight, large.get_output_embeddings().weight}:
            table.zero_()
            table[: len(embeddings), :width] = embeddings
        _norm(large.model.norm, small.model.norm, norm)
        for i, layer in enumerate(large.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            if i < len(small.model.layers):
                source = small.model.layers[i]
                _norm(layer.input_layernorm, source.input_layernorm, norm)
                _norm(layer.post_attention_layernorm, source.post_attention_layernorm, norm)
                _attention(layer.self_attn, source.self_attn, old, config)
                for name in ("gate_proj", "up_proj"):
                    _place(getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight)
                _place(layer.mlp.down_proj.weight, source.mlp.down_proj.weight)
        _silence(large, width, len(embeddings))
    return large


def _place(large: torch.Tensor, small: torch.Tensor) -> None:
    large[: small.shape[0], : small.shape[1]] = small


def _norm(large: torch.nn.Module, small: torch.nn.Module, scale: float) -> None:
    """Copy the weights of a norm, times `scale`, because the mean of squares is now taken over more entries.

    The weights of the added entries are 0, so nothing reads these entries, even if they are not 0.
    """
    large.weight.zero_()
    large.weight[: len(small.weight)] = scale * small.weight


def _attention(large: Any, small: Any, old: Any, new: Any) -> None:
    """Copy the small model's heads into heads of the large one. `old`, `new`: the configurations of the two models."""
    narrow, wide = old.hidden_size // old.num_attention_heads, new.hidden_size // new.num_attention_heads
    if wide < narrow:
        raise ValueError(f"heads of width {wide} cannot hold heads of width {narrow}")
    within = torch.tensor([*range(narrow // 2), *(wide // 2 + i for i in range(narrow // 2))])
    group, new_group = (
        old.num_attention_heads // old.num_key_value_heads,
        new.num_attention_heads // new.num_key_value_heads,
    )
    heads = [j // group * new_group + j % group for j in range(old.num_attention_heads)]
    own = (("q_proj", heads), ("k_proj", range(old.num_key_value_heads)), ("v_proj", range(old.num_key_value_heads)))
    for name, places in own:
        source, target = getattr(small, name), getattr(large, name)
        # Attention scores are divided by the square root of the head's width, which the scale of the queries undoes.
        scale = math.sqrt(wide / narrow) if name == "q_proj" else 1.0
        for j, place in enumerate(places):
            rows, block = within + place * wide, slice(j * narrow, (j + 1) * narrow)
            for entry in (target.weight, target.bias):
                entry[place * wide : (place + 1) * wide] = 0
            target.weight[rows, : old.hidden_size] = scale * source.weight[block]
            target.bias[rows] = scale * source.bias[block]
    for j, place in enumerate(heads):
        large.o_proj.weight[: old.hidden_size, within + place * wide] = small.o_proj.weight[
            :, j * narrow : (j + 1) * narrow
        ]


def _silence(model: Qwen2ForCausalLM, width: int, old: int) -> None:
    """Give the added tokens, those with ids from `old` on, a logit near -1000 in every context.

    The last layer, which is an added one, writes a constant into entry `width` of the residual stream: the bias of a
    value vector, which attention passes on unchanged because its weights sum to one. Only the added tokens read this
    entry.
    """
    attention = model.model.layers[-1].self_attn
    attention.v_proj.weight[0] = 0
    attention.v_proj.bias[0] = 1
    attention.o_proj.weight[width, 0] = CONSTANT
    model.model.norm.weight[width] = 1
    head = model.get_output_embeddings().weight
    head[old:, width] = -1000 / (CONSTANT * math.sqrt(model.config.hidden_size) / TYPICAL_NORM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", choices=["random", *BUNDLED_MODELS], help="a bundled policy, or random weights")
    parser.add_argument("shape", choices=QWEN, help="the shape of Qwen2.5 to make")
    parser.add_argument("out", type=Path, help="folder to write the model to")
    args = parser.parse_args()
    large = write(args.policy, args.shape, args.out)
    print(f"{args.policy} in {args.shape}: {large.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
