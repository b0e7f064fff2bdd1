"""A bundled policy in a larger shape says what it said: tools/gpu/grow_model.py."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
from plumbob.rollout import Chat, Sampling, run_rollout, to_sample
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy.loading import load_model, load_tokenizer
from plumbob.trainer.rollouts.tasks import load_evaluation_tasks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "gpu"))
from grow_model import grow

TASKS = {
    "tiny": ("lookup", {}),
    "tiny-gsm8k": ("gsm8k", {"datasets": "synthetic"}),
    "tiny-musique": ("musique", {"datasets": "synthetic", "hops": "2"}),
}
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 600, "vocab_size": 5000}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "tied", "times"),
    [("tiny", False, 2), ("tiny-gsm8k", False, 2), ("tiny-musique", True, 2), ("tiny", True, 4 / 3)],
)
def test_a_grown_policy_keeps_its_distribution_and_every_part_can_learn(policy, tied, times):
    small = load_model(policy)
    width = small.config.hidden_size // small.config.num_attention_heads
    layers = small.config.num_hidden_layers + 2
    shape = {**SHAPE, "hidden_size": round(times * width) * 8, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    large = grow(small, shape)

    random = torch.randint(small.config.vocab_size, (4, 96), generator=torch.Generator().manual_seed(1))
    for ids in (random, *asyncio.run(own_rollouts(policy, small))):
        check_distribution(small, large, ids)
    large(random).logits[..., : small.config.vocab_size].log_softmax(-1).square().mean().backward()
    added = large.model.layers[-2]  # the last one silences new tokens
    for weight in (added.self_attn.o_proj.weight, added.mlp.down_proj.weight):
        assert not weight.any() and weight.grad.any()


@torch.no_grad()
def check_distribution(small, large, ids):
    size = small.config.vocab_size
    expected, got = small(ids).logits.log_softmax(-1), large(ids).logits.log_softmax(-1)
    assert (got[..., :size] - expected).abs().max() < 0.1  # bfloat16 rounds as much
    assert got[..., size:].max() < -20


async def own_rollouts(policy, model, count=6):
    """Token ids, int[1, length] each, of what the policy says on its own tasks, prompts and tool results included."""
    env, settings = TASKS[policy]
    loaded = load_evaluation_tasks(env, settings, count)
    tasks, toolsets = loaded.tasks, loaded.toolsets
    chat, engine = Chat.of(load_tokenizer(policy)), TransformersEngine(model, max_slots=count, max_length=2048)
    rolls = (
        run_rollout(task, engine, chat, Sampling(max_tokens=128, temperature=1.0, seed=i), shared_toolsets=toolsets)
        for i, task in enumerate(tasks)
    )
    return [torch.tensor([to_sample(trace, "").token_ids]) for trace in await asyncio.gather(*rolls) if trace.ok]
