"""Small random models of the architectures that users train, with the bundled tokenizer's vocabulary.

For tests and for tools/model_matrix.py. Each is there for something that its attention, its positions, its states or
its logits do differently; weights are large enough that every one of these changes its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from plumbob.trainer.policy.loading import load_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 640

WINDOW = 8
"""Length of the sliding windows, in tokens."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}

_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, **_SLIDING}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gemma 2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
        | _SLIDING,
    ),
    "gemma 3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0} | _SLIDING),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "phi 3": ("phi3", {"sliding_window": WINDOW}),
    "gpt-2": ("gpt2", {"n_positions": 512}),
    "gpt-neox": ("gpt_neox", {"num_key_value_heads": None}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "granite": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.5}),
    "olmo 2": ("olmo2", {}),
    "smollm 3": ("smollm3", {}),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, **_SLIDING, **_EXPERTS}),
    "qwen3 moe": ("qwen3_moe", {"head_dim": 16, **_EXPERTS}),
    "mixtral": ("mixtral", _EXPERTS),
    "olmoe": ("olmoe", _EXPERTS),
    "deepseek v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        },
    ),
    "qwen3-next": ("qwen3_next", _HYBRID | _EXPERTS),
    "qwen3.5": ("qwen3_5_text", _HYBRID),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "mamba": ("mamba", {"state_size": 8}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": True}),
}  # fmt: skip
"""What people call it -> (transformers' name of the configuration, its settings beside the common sizes)."""


WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "initializer_range": 0.1}
"""Sizes with heads of 64, which a server's kernels can compute."""


def small_model(name: str, seed: int = 0, sizes: Mapping[str, Any] = MappingProxyType({})) -> PreTrainedModel:
    """A random float32 model of 2 layers; `name` is one of `ARCHITECTURES`, `sizes` takes the place of its own."""
    kind, settings = ARCHITECTURES[name]
    config = AutoConfig.for_model(kind, **{**_SIZES, **settings, **sizes})
    config.get_text_config().architectures = None
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if tensor_name.endswith("bias") or "sinks" in tensor_name:  # else 0, so that forgetting it goes unnoticed
                tensor.normal_(std=0.3)
    return model.eval()


def write_small_model(name: str, folder: Path, end_tokens: Sequence[int] = (2,)) -> Path:
    """Write a small model with the bundled tokenizer as users have models; returns `folder`.

    `end_tokens`: the ids in its generation config that end a turn.
    """
    model = small_model(name)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = list(end_tokens)
    model.save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    return folder
