"""Small policies and settings for the tests of VllmEngine."""

from __future__ import annotations

import torch
from plumbob.rollout import Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.vllm.adapter_sync import LoraShape
from plumbob.trainer.inference.vllm.engine import VllmSettings
from plumbob.trainer.inference.weight_sync import parity_row
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.policy import Policy

VOCAB = 610
"""Vocabulary size of the bundled policy."""
IDS = list(range(40, 90))
"""Fixed ids that engine and policy are compared on."""
DRAW = Sampling(max_tokens=24, temperature=1.0, stop_token_ids=(2,), seed=5)


def policy_of(peft: bool, seed: int = 0, **settings) -> Policy:
    """A policy of the bundled model whose trained weights differ from the initial ones."""
    policy = Policy(
        load_model("tiny"), TrainConfig(peft=peft, lora_r=8, lora_alpha=16, **settings), torch.device("cpu")
    )
    move(policy, seed)
    return policy


@torch.no_grad()
def move(policy: Policy, seed: int) -> None:
    """Add random noise to all trained weights."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in policy.trainable.values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)


def own_logprobs(policy: Policy, ids=IDS):
    """The policy's log-probabilities of all ids but the first."""
    with torch.no_grad():
        return policy.score([parity_row(ids)], temperature=1.0).logprobs.tolist()


def settings_of(url, **fields):
    """Settings of a VllmEngine for one server's URL or several."""
    urls = (url,) if isinstance(url, str) else tuple(url)
    defaults = {"model": "tiny", "vocab_size": VOCAB, "lora": LoraShape(8, 16), "dtype": torch.float32}
    return VllmSettings(urls, **{**defaults, **fields})
