"""Small real models: random weights in the architectures that users train, with the bundled tokenizer; and a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
import torch
from plumbob.rollout import Chat, Sample
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.serving.server import load_server, running
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

# Two threads that share two busy cores wait for each other: tiny models are many times faster with one.
torch.set_num_threads(1)

CONFIGS = {
    "qwen2": Qwen2Config(tie_word_embeddings=True),
    "qwen3": Qwen3Config(head_dim=16),
    "llama": LlamaConfig(),
}


def make_model(architecture: str = "qwen2", seed: int = 0, vocab_size: int = 640):
    config = CONFIGS[architecture].__class__.from_dict(
        {
            **CONFIGS[architecture].to_dict(),
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": None,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            # Large enough that attention and context matter to the output.
            "initializer_range": 0.3,
        }
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture(params=list(CONFIGS))
def model(request):
    return make_model(request.param)


@pytest.fixture
def qwen2():
    return make_model("qwen2")


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.fixture(scope="session")
def chat(tokenizer):
    return Chat.of(tokenizer)


@pytest.fixture
def make_policy():
    def make(model, **settings) -> Policy:
        return Policy(model, TrainConfig(**settings), torch.device("cpu"))

    return make


@pytest.fixture
def random_rows():
    """Rows as a multi-turn rollout leaves them: context and sampled spans in turn."""

    def make(count: int, seed: int = 0, vocab_size: int = 640) -> list[Sample]:
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for i in range(count):
            length = int(torch.randint(8, 40, (1,), generator=generator))
            ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
            mask = (torch.rand(length, generator=generator) < 0.5).tolist()
            mask[0], mask[-1] = False, True
            rows.append(Sample(ids, mask, [0.0] * length, float(i % 2), f"g{i // 4}", "agent_completed", False))
        return rows

    return make


@pytest.fixture
def run_async():
    return asyncio.run


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def server():
    return load_server("tiny", max_concurrent=8, max_context=1024)


@pytest.fixture
def with_http(server):
    """Run a coroutine function of (http session, root URL) against the running server."""

    def run(main, served=server):
        async def outer():
            async with running(served) as url, aiohttp.ClientSession(base_url=url) as http:
                return await main(http)

        return asyncio.run(outer())

    return run


@pytest.fixture
def post(with_http):
    def send(path, body):
        async def main(http):
            data = body if isinstance(body, bytes) else json.dumps(body)
            async with http.post(path, data=data) as response:
                return response.status, await response.json()

        return with_http(main)

    return send
