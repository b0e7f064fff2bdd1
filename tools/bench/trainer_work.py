"""The work that both arms of the trainer's benchmark share: model shapes, fixed rows, rewards, FLOPs of a step."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))
from shapes import qwen_config

GROUP, MAX_COMPLETION, PROMPT = 8, 256, 100
"""Completions per prompt, most tokens of a completion, tokens of a prompt."""
LORA = {"r": 16, "lora_alpha": 32}
WARM_UP = 2
"""Steps at the start that are not counted."""


def make_rows(args: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of every rollout, with the rollouts of a group next to each other."""
    generator = torch.Generator().manual_seed(0)
    vocab = qwen_config(args.shape).vocab_size
    rows = []
    for _ in range(args.prompts):
        prompt = torch.randint(3, vocab, (PROMPT,), generator=generator).tolist()
        for _ in range(GROUP):
            # With these bounds the mean length is 156.
            length = torch.empty(1).log_normal_(5.0, 0.5, generator=generator).clamp(8, MAX_COMPLETION)
            rows.append((prompt, torch.randint(3, vocab, (int(length),), generator=generator).tolist()))
    return rows


def make_model(shape: str) -> Any:
    """A model of this shape with random weights in float32; the same weights at each call."""
    torch.manual_seed(0)
    config = qwen_config(shape, eos_token_id=2, bos_token_id=None, pad_token_id=0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def reward_of(i: int) -> float:
    """The reward of rollout `i`: alternately 0 and 1, because plumbob would leave out groups without a signal."""
    return float(i % 2)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Any) -> float:
    """Seconds that a call takes, the work that it queues on the GPU included."""
    start = time.perf_counter()
    function()
    synchronise()
    return time.perf_counter() - start


def count_flops(args: argparse.Namespace, rows: list[tuple[list[int], list[int]]], prompts: int | None = None) -> float:
    """FLOPs of one step: 2 per weight and token forward, 4 backward (2 where the weight is frozen).

    `prompts`: how many prompts are computed, where rows of a group share theirs; by default one for each row. The head is
    computed at sampled positions only. Attention needs 4 FLOPs per head dimension and pair of positions
    forward, and twice that backward. Recomputed values, such as the logits of the head, are not counted a second time.
    """
    c = qwen_config(args.shape)
    head_dim = c.hidden_size // c.num_attention_heads
    kv = head_dim * c.num_key_value_heads
    layer = 2 * c.hidden_size**2 + 2 * c.hidden_size * kv + 3 * c.hidden_size * c.intermediate_size
    prompts = len(rows) if prompts is None else prompts
    sampled = sum(len(r) for _, r in rows)
    tokens = sampled + prompts * PROMPT
    pairs = sum(((PROMPT + len(r)) ** 2 - PROMPT**2) / 2 for _, r in rows) + prompts * PROMPT**2 / 2
    flops_per_weight = 4 if args.mode == "lora" else 6
    lora = 0
    if args.mode == "lora":
        sides = 4 * c.hidden_size + 2 * (c.hidden_size + kv) + 3 * (c.hidden_size + c.intermediate_size)
        lora = 6 * LORA["r"] * sides
    return (
        tokens * c.num_hidden_layers * (flops_per_weight * layer + lora)
        + sampled * flops_per_weight * c.hidden_size * c.vocab_size
        + 12 * c.num_hidden_layers * c.hidden_size * pairs
    )


def matmul_rate() -> float:
    """FLOP/s of a large bfloat16 product of random numbers, median of 10."""
    if not torch.cuda.is_available():
        a, b = torch.randn(2, 1024, 1024).unbind()
    else:
        a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16).unbind()
    timed(lambda: a @ b)
    return 2 * len(a) ** 3 / statistics.median(timed(lambda: a @ b) for _ in range(10))
