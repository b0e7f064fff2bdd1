"""Every architecture in the in-process engine: what it samples has the probability that the trainer computes."""

import asyncio

import pytest
import torch
from plumbob.rollout import Sample, Sampling
from plumbob.testing.small_models import ARCHITECTURES, VOCABULARY, WINDOW, small_model
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.transformers import make_engine, measure
from plumbob.trainer.inference.transformers.decoding import choose_decoding
from plumbob.trainer.inference.transformers.whole_rows import WholeRowsEngine
from plumbob.trainer.inference.weight_sync import parity_row, sync_weights
from plumbob.trainer.policy.forward_plan import plan_forward
from plumbob.trainer.policy.policy import Policy

WITHOUT_A_CACHE = {"qwen3-next", "qwen3.5", "lfm2", "mamba", "bloom"}
"""Recurrent states, and attention that does not take the engine's mask."""

JOINED = {"granite", "llama", "qwen2", "qwen3", "smollm 3"}
"""Whose weights are joined to decode in few operations."""

NEW = 12


def opened(name: str, max_slots: int = 8):
    """A policy and its engine, as a run opens them."""
    model = small_model(name)
    plan = plan_forward(model, 4096)
    decoding = measure(model, plan, 4096)
    policy = Policy(model, TrainConfig(), torch.device("cpu"), plan=plan)
    return policy, make_engine(policy.engine_model(), decoding, max_slots, 4096)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


async def two_turns(engine, rows: list[list[int]]) -> list[Sample]:
    """Each prompt, a sampled turn, three ids of a tool result, and another sampled turn."""

    async def play(ids: list[int], seed: int) -> Sample:
        mask, logprobs = [False] * len(ids), [0.0] * len(ids)
        for turn in range(2):
            completion = await engine.generate(ids, Sampling(max_tokens=NEW, temperature=0.8, seed=10 * seed + turn))
            ids = [*ids, *completion.token_ids, *rows[0][:3]]
            mask += [True] * NEW + [False] * 3
            logprobs += [*completion.logprobs, 0.0, 0.0, 0.0]
        return Sample(ids, mask, logprobs, 0.0, "g", "", False)

    return await asyncio.gather(*(play(ids, seed) for seed, ids in enumerate(rows)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampled_tokens_have_the_trainers_probabilities_over_two_turns(name):
    policy, engine = opened(name)
    assert isinstance(engine, WholeRowsEngine) == (name in WITHOUT_A_CACHE)
    assert engine.decoding.joined == (name in JOINED)
    rows = prompts(5)
    samples = asyncio.run(two_turns(engine, [*rows, rows[1]]))  # a group shares a prompt
    assert max(len(s.token_ids) for s in samples) > 4 * WINDOW
    with torch.no_grad():
        ours = policy.score(samples, 0.8).logprobs
    theirs = torch.tensor([lp for s in samples for lp in s.sampled_logprobs])
    assert len(theirs) == 6 * 2 * NEW and (ours - theirs).abs().max() < 1e-5
    if name not in WITHOUT_A_CACHE:
        # A prompt that two share is computed once, and of a second turn its three ids and the last of the first turn.
        assert engine.prefilled_tokens == sum(map(len, rows)) + 6 * 4


@pytest.mark.parametrize("name", ["qwen3.5", "gemma 3", "bloom", "gpt-oss", "qwen3"])
def test_synced_weights_are_served_whatever_the_way_of_decoding(name):
    policy, engine = opened(name)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.mul_(0.9)
    assert sync_weights(policy, engine, parity_row(prompts(1)[0])).parity < 1e-5
    samples = asyncio.run(two_turns(engine, prompts(3)))
    with torch.no_grad():
        ours = policy.score(samples, 0.8).logprobs
    assert (ours - torch.tensor([lp for s in samples for lp in s.sampled_logprobs])).abs().max() < 1e-5


def test_what_is_added_to_a_forward_pass_after_it_was_measured_is_not_left_out():
    _, engine = opened("llama")
    sizes = []
    engine.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    asyncio.run(engine.generate([3, 4, 5, 6, 7], Sampling(max_tokens=4)))
    assert sizes == [5, 1, 1, 1]


@pytest.mark.parametrize("name", sorted(WITHOUT_A_CACHE))
def test_a_line_says_that_a_model_is_decoded_slowly_and_what_is_faster(name):
    model = small_model(name)
    decoding = choose_decoding(model, plan_forward(model, 4096), 4096)
    (line,) = decoding.lines()
    assert "computes the whole row again for each token" in line and "--engine vllm" in line


def test_a_model_that_is_loaded_inside_an_event_loop_is_measured_like_any_other():
    """`serve` loads its model there; the measurement, which runs the engine, once failed for want of a loop of its own."""

    async def load():
        model = small_model("llama")
        return choose_decoding(model, plan_forward(model, 4096), 4096)

    assert asyncio.run(load()).cached


def test_an_engine_that_ignores_windows_is_found_out(monkeypatch):
    """The cache of such a model is wrong only in rows beyond its window, which no parity row of a run reaches."""
    from plumbob.trainer.inference.transformers import kv_cache
    from transformers import AttentionInterface

    def blind(*args, sliding_window=None, **kwargs):
        return kv_cache.decode_attention(*args, **kwargs)

    model = small_model("mistral")
    model.config.sliding_window = 1000
    plan = plan_forward(model, 4096)
    assert choose_decoding(model, plan, 4096).cached
    monkeypatch.setitem(AttentionInterface._global_mapping, "plumbob_decode", blind)
    decoding = choose_decoding(model, plan, 4096)
    assert not decoding.cached and decoding.difference > 0.01
    assert choose_decoding(model, plan, 900).cached  # no row of this run exceeds the window
