"""The key-value cache at all lengths around its bounds: it has a multiple of 128 positions, and prompts may fill it."""

import asyncio
import copy

import numpy as np
import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.transformers.kv_cache import _GROWTH, SlotCache

BOUNDS = [bound + near for bound in (_GROWTH, 2 * _GROWTH) for near in (-2, -1, 0, 1, 2)]
"""Lengths at and around the sizes that the cache takes."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 600, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def filled(length: int, slots: int = 4) -> SlotCache:
    """A cache of two layers whose slots hold `length` positions, each with numbers of its own."""
    cache = SlotCache(slots)
    cache.reserve(length)
    shape = (slots, 2, cache.length, 3)
    for layer in range(2):
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        cache.keys.append(numbers + 1e5 * layer)
        cache.values.append(-numbers - 1e5 * layer)
    for slot in range(slots):
        cache.remember(slot, np.arange(length) + 1000 * slot)
    return cache


@pytest.mark.parametrize("length", [1, 2, 63, 64, *BOUNDS])
@pytest.mark.parametrize("targets", [[1], [3, 1], [1, 2, 3]], ids=str)
def test_a_prefix_of_any_length_is_copied_into_any_slots(length, targets):
    """Also one as long as the cache itself, where source and target are parts of one whole tensor."""
    for copied in {1, length - 1, length} - {0}:
        cache = filled(length)
        before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
        cache.copy_prefix(0, targets, copied)
        for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
            for slot in range(cache.num_slots):
                expected = old[slot].clone()
                if slot in targets:
                    expected[:, :copied] = old[0, :, :copied]
                assert torch.equal(tensor[slot], expected)
        assert [int(cache.counts[slot]) for slot in targets] == [copied] * len(targets)
        assert all((cache.ids[slot, :copied] == cache.ids[0, :copied]).all() for slot in targets)
        assert all((cache.ids[slot, copied:] == -1).all() for slot in targets)


def completions(engine, requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(ids, sampling) for ids, sampling in requests))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("length", BOUNDS)
def test_a_group_s_prompt_of_any_length_is_computed_once_and_sampled_as_alone(model, length):
    ids = prompt_of(length)
    requests = [(ids, Sampling(max_tokens=4, seed=i)) for i in range(3)]
    engine = TransformersEngine(copy.deepcopy(model), max_slots=4, max_length=1024)
    together = completions(engine, requests)
    assert engine.prefilled_tokens == length
    for request, shared in zip(requests, together, strict=True):
        (alone,) = completions(TransformersEngine(copy.deepcopy(model), max_slots=1, max_length=1024), [request])
        assert shared.token_ids == alone.token_ids
        assert shared.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


@pytest.mark.parametrize("length", BOUNDS)
def test_a_prefix_of_any_length_is_taken_over_from_another_conversation(model, length):
    """The cache has grown to its bound before, so a prefix as long as the cache is copied between slots."""
    head = prompt_of(length)
    engine = TransformersEngine(copy.deepcopy(model), max_slots=4, max_length=1024)
    completions(engine, [(head, Sampling(max_tokens=1, seed=0))])
    requests = [([*head, *prompt_of(3, seed=i)], Sampling(max_tokens=4, seed=i)) for i in (1, 2)]
    for request, taken_over in zip(requests, completions(engine, requests), strict=True):
        (alone,) = completions(TransformersEngine(copy.deepcopy(model), max_slots=1, max_length=1024), [request])
        assert taken_over.token_ids == alone.token_ids
    assert engine.prefilled_tokens == length + 3 + 3


@pytest.mark.parametrize("length", BOUNDS)
def test_prompt_and_completion_may_end_at_any_bound(model, length):
    """The last tokens of a completion are the ones that reach the bound, and the next turn goes on behind it."""
    engine = TransformersEngine(copy.deepcopy(model), max_slots=2, max_length=1024)
    ids = prompt_of(length - 6)
    first = completions(engine, [(ids, Sampling(max_tokens=6, seed=i)) for i in range(2)])
    longer = [([*ids, *c.token_ids, 7, 8], Sampling(max_tokens=5, seed=9)) for c in first]
    second = completions(engine, longer)
    fresh = TransformersEngine(copy.deepcopy(model), max_slots=1, max_length=1024)
    for request, turn in zip(longer, second, strict=True):
        assert turn.token_ids == completions(fresh, [request])[0].token_ids
