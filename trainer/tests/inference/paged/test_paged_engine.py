"""The paged engine on a CPU in float32: the same scheduler, cache and sampling as on a GPU, without graphs."""

import asyncio
import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import EngineError, Sampling
from plumbob.trainer.inference.paged import engine as paged
from plumbob.trainer.inference.paged import forward, sampling
from plumbob.trainer.inference.paged.decoding import UNIFORMS, draw_truncated
from plumbob.trainer.inference.paged.engine import PagedEngine
from plumbob.trainer.inference.paged.opening import open_paged
from plumbob.trainer.inference.paged.pages import TRASH, OutOfPages, PagePool
from plumbob.trainer.inference.paged.sampling import BLOCK, sample
from plumbob.trainer.inference.paged.weights import Weights
from plumbob.trainer.inference.transformers.engine import TransformersEngine, draw
from plumbob.trainer.inference.weight_sync import parity_row, sync_weights


def make_engine(model, ahead: bool = True, **settings) -> PagedEngine:
    """`ahead`: whether runs are queued behind each other, as on a GPU."""
    engine = PagedEngine(Weights.of(copy.deepcopy(model), 600), max_length=512, **settings)
    engine.queues_ahead = ahead
    return engine


async def play(engine, conversation, seed: int) -> list:
    """Turns of one rollout: each prompt is what was said so far and some new ids. Returns the completions."""
    ids, said = [], []
    for turn, (new, most, pause) in enumerate(conversation):
        for _ in range(pause):
            await asyncio.sleep(0)
        ids = [*ids, *new]
        sampling = Sampling(max_tokens=most, seed=seed * 100 + turn, stop_token_ids=(7, 8))
        completion = await engine.generate(ids, sampling)
        said.append(completion)
        ids += completion.token_ids
    return said


def conversations(seed: int, count: int):
    rng = random.Random(seed)
    shared = [[rng.randrange(3, 640) for _ in range(n)] for n in (1, 63, 64, 65, 130)]
    for _ in range(count):
        turns = []
        for turn in range(rng.randint(1, 3)):
            start = rng.choice(shared) if turn == 0 else []
            extra = [rng.randrange(3, 640) for _ in range(rng.choice([0, 0, 1, 5, 40]))]
            turns.append((start + extra or [5], rng.choice([1, 2, 5, 30]), rng.randint(0, 12)))
        yield turns


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "ahead"), [(None, True), (24, True), (24, False)])
def test_every_completion_is_what_its_prompt_alone_gives(model, pages, ahead, run_async, monkeypatch):
    """Under joins, leaves, shared prompts, later turns and too few pages, against transformers' engine with one slot."""
    monkeypatch.setattr(paged, "PAGE", 16) if pages else None
    played = list(conversations(3, 24))
    engine = make_engine(model, ahead, max_slots=9, num_pages=3 * 24 if pages else None)

    async def together():
        return await asyncio.gather(*(play(engine, turns, i) for i, turns in enumerate(played)))

    ours = run_async(together())
    alone = TransformersEngine(copy.deepcopy(model), max_slots=1, max_length=4096)
    for i, turns in enumerate(played):
        theirs = run_async(play(alone, [(new, most, 0) for new, most, _ in turns], i))
        assert [c.token_ids for c in ours[i]] == [c.token_ids for c in theirs], i
        for a, b in zip(ours[i], theirs, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
            assert a.finish_reason == b.finish_reason
    assert engine.pool.available == engine.pool.count - 1  # nobody holds a page any more


@pytest.mark.slow
def test_a_completion_ends_at_its_own_stop_token_wherever_in_a_run_it_is_sampled(qwen2, run_async):
    """Others' stop tokens are ordinary ones, and neither what a run samples behind the end nor its length is recorded."""
    stops = [tuple(range(first, 640, every)) for first, every in ((0, 5), (1, 5), (2, 40), (3, 640))]
    requests = [
        ([5, 6, 7 + i % 3], Sampling(max_tokens=most, seed=i, stop_token_ids=stops[(i + i // 20) % 4]))
        for i, most in enumerate([1, 2, 3, 6, *range(30, 38), *range(150, 158)] * 4)
    ]

    async def all_of(engine):
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    engine = make_engine(qwen2, max_slots=20)
    ours = run_async(all_of(engine))
    theirs = run_async(all_of(TransformersEngine(copy.deepcopy(qwen2))))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
    ends = {((len(c.token_ids) - 1) % paged.TOKENS_PER_RUN, c.finish_reason) for c in ours}
    assert len(ends) == 2 * paged.TOKENS_PER_RUN  # both ends, at each place of a run
    assert max(len(c.token_ids) for c in ours) > 2 * UNIFORMS
    assert engine.generated_tokens == sum(len(c.token_ids) for c in ours)


def test_while_a_run_computes_completions_are_handed_out_one_in_a_round(qwen2, run_async, monkeypatch):
    """So that a hundred rollouts that end at once, and are scored for a while, do not keep the next run waiting."""
    engine, done, seen = make_engine(qwen2, False, max_slots=16), [], []
    rounds = iter([True] * 2 + [False] * 5 + [True] * 100)  # a run is over when this is True

    def is_done() -> bool:
        seen.append(len(done))
        return next(rounds)

    monkeypatch.setattr(paged.Run, "done", lambda _: is_done())

    async def one(seed: int, tokens: int):
        completion = await engine.generate([5, 6, 7], Sampling(max_tokens=tokens, seed=seed))
        done.append(seed)
        return completion

    async def all_of_them():
        return await asyncio.gather(*(one(i, 9 if i else 60) for i in range(12)))

    completions = run_async(all_of_them())
    # 11 completions end in the first run. The second one computes for five rounds, and is followed at once by the third,
    # after which the others are handed out, because nothing computes (on a CPU, a run ends before it is asked for).
    assert seen[:10] == [0, 0, 0, 1, 2, 3, 4, 5, 5, 11]
    assert done == [*range(1, 12), 0]
    assert [len(c.token_ids) for c in completions] == [60] + [9] * 11


@pytest.mark.parametrize("ahead", [True, False])
def test_a_late_request_waits_for_as_long_as_its_prefill_costs_the_others_and_no_longer(qwen2, run_async, ahead):
    engine, ended = make_engine(qwen2, ahead, max_slots=16), []

    async def one(name: str, tokens: int, rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.sleep(0)
        await engine.generate([5, 6, 7], Sampling(max_tokens=tokens, seed=1))
        ended.append((name, engine.generated_tokens))

    async def all_of_them() -> None:
        await asyncio.gather(*(one("early", 240, 0) for _ in range(12)), one("late", 2, 8))

    run_async(all_of_them())
    assert [name for name, _ in ended] == ["late"] + 12 * ["early"]
    assert 12 * 90 < ended[0][1] < 12 * 200  # one has lost in 12 runs of 8 tokens as much as 12 others in one


def test_completions_that_have_ended_are_handed_out_when_decoding_fails(qwen2, run_async, monkeypatch):
    engine, begin, runs = make_engine(qwen2, max_slots=16), paged.Decoding.begin, []

    def fails_in_the_third_run(self, *given, **more):
        runs.append(given)
        if len(runs) == 3:
            raise RuntimeError("an illegal memory access")
        return begin(self, *given, **more)

    monkeypatch.setattr(paged.Decoding, "begin", fails_in_the_third_run)

    async def all_of_them():
        requests = (engine.generate([5], Sampling(max_tokens=9 if i else 60, seed=i)) for i in range(12))
        return await asyncio.gather(*requests, return_exceptions=True)

    first, *others = run_async(all_of_them())
    assert isinstance(first, EngineError) and "an illegal memory access" in str(first)
    assert [len(c.token_ids) for c in others] == [9] * 11


def test_a_group_s_prompt_is_read_once_and_a_later_turn_reads_only_what_is_new(qwen2, run_async):
    engine = make_engine(qwen2, max_slots=8)
    prompt = list(range(10, 110))

    async def group():
        return await asyncio.gather(
            *(engine.generate(prompt, Sampling(max_tokens=20, seed=i, temperature=1.0)) for i in range(8))
        )

    first = run_async(group())
    assert engine.prefilled_tokens == 100
    later = [*prompt, *first[3].token_ids, 40, 41, 42]
    run_async(engine.generate(later, Sampling(max_tokens=4, seed=1)))
    assert engine.prefilled_tokens == 100 + 1 + 3  # the last sampled id, which was never computed, and the new ones


def test_score_takes_the_ways_of_a_rollout_and_equals_a_whole_pass(model):
    engine = make_engine(model)
    ids = torch.randint(3, 640, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    whole = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert engine.score(ids) == pytest.approx(whole.tolist(), abs=2e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_frozen_base_is_held_once_and_trainer_and_engine_compute_what_they_did(model, make_policy, bf16):
    """Under LoRA the trainer's frozen matrices become views of the engine's joined ones; all weights are never shared."""
    ids, row = list(range(5, 60)), parity_row(list(range(5, 60)))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())  # as models are published, so that they are held in bfloat16
    policy = make_policy(copy.deepcopy(model), peft=True, bf16=bf16)
    scored, apart = (
        policy.score([row], 1.0).logprobs,
        PagedEngine(Weights.of(policy.engine_model(), 600), max_length=512),
    )
    engine = open_paged(policy.engine_model(), 4, 512, 0.4)
    served = engine.served_weights()
    for name, p in policy.model.named_parameters():
        assert (served[name].data_ptr() == p.data_ptr()) == (not p.requires_grad and "norm" not in name), name
    assert torch.equal(policy.score([row], 1.0).logprobs, scored)
    assert engine.score(ids) == apart.score(ids)
    policy.score([row], 1.0).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.trainable.values())
    with policy.in_float32():
        policy.score([row], 1.0)
    assert engine.score(ids) == apart.score(ids)
    whole = make_policy(model)
    engine = open_paged(whole.engine_model(), 4, 512, 0.4)
    mine = {p.untyped_storage().data_ptr() for p in whole.model.parameters()}
    assert not mine & {t.untyped_storage().data_ptr() for t in engine.served_weights().values()}


@pytest.mark.parametrize("peft", [False, True])
def test_sync_is_acknowledged_and_moves_every_weight(model, make_policy, peft):
    policy = make_policy(model, peft=peft)
    engine = PagedEngine(Weights.of(policy.engine_model(), 600), max_length=512)
    row = parity_row(list(range(5, 120)))
    with torch.no_grad():
        for i, p in enumerate(policy.trainable.values()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.05)
    report = sync_weights(policy, engine, row)
    assert report.parity < 1e-5
    served = engine.served_weights()
    assert set(policy.trainable) <= set(served)
    assert all(torch.equal(served[name], p) for name, p in policy.trainable.items())


def test_a_refused_update_changes_nothing_and_one_under_way_is_refused(qwen2, run_async):
    engine = make_engine(qwen2)
    before = {name: t.clone() for name, t in engine.served_weights().items()}
    with pytest.raises(Exception, match="has no weight 'nonsense'"):
        engine.update({**before, "nonsense": torch.zeros(1)})
    assert all(torch.equal(t, before[name]) for name, t in engine.served_weights().items())

    async def update_while_sampling():
        task = asyncio.ensure_future(engine.generate([5, 6], Sampling(max_tokens=50)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="while completions"):
            engine.update(before)
        await task

    run_async(update_while_sampling())


def test_truncated_sampling_and_greedy_in_one_batch_equal_the_other_engine(qwen2, run_async):
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1, "temperature": 0.8}]
    requests = [([5, 6, 7 + i], Sampling(max_tokens=12, seed=i, **kind)) for i, kind in enumerate(kinds * 2)]

    async def all_of(engine):
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    ours = run_async(all_of(make_engine(qwen2)))
    theirs = run_async(all_of(TransformersEngine(copy.deepcopy(qwen2))))
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)


def test_a_cancelled_request_leaves_and_its_pages_come_back(qwen2, run_async):
    engine = make_engine(qwen2)

    async def cancel_one():
        kept = asyncio.ensure_future(engine.generate([5, 6, 7], Sampling(max_tokens=40, seed=1)))
        gone = asyncio.ensure_future(engine.generate([5, 6, 8], Sampling(max_tokens=400, seed=2)))
        for _ in range(3):
            await asyncio.sleep(0)
        gone.cancel()
        return await kept

    assert len(run_async(cancel_one()).token_ids) == 40
    assert engine.pool.available == engine.pool.count - 1


def test_what_a_loop_left_when_its_last_rollout_was_cancelled_holds_up_no_other(qwen2, monkeypatch):
    engine, ask = make_engine(qwen2), lambda of: of.generate([5, 6, 7], Sampling(max_tokens=90, seed=1))
    with asyncio.Runner() as runner:
        with monkeypatch.context() as slow:
            slow.setattr(paged.Run, "done", lambda _: False)  # as on a GPU, which computes when the loop ends
            with pytest.raises(TimeoutError):
                runner.run(asyncio.wait_for(ask(engine), 0.1))
        assert engine.busy
        engine.forget()
        assert not engine.busy and engine.pool.available == engine.pool.count - 1
        said = [asyncio.run(ask(engine)), runner.run(ask(engine)), asyncio.run(ask(make_engine(qwen2)))]
    assert said[0].token_ids == said[1].token_ids == said[2].token_ids


@pytest.mark.parametrize(("size", "rows"), [(23 * 10**9, 147), (80 * 10**9, 512), (10**6, 1)])
def test_logits_take_a_small_part_of_a_gpu_s_memory(size, rows, monkeypatch):
    monkeypatch.setattr(sampling, "total_memory", lambda device: size)
    head = type("Head", (), {"is_cuda": True, "device": None, "__len__": lambda self: 152_064})()
    assert sampling.rows_at_once(head) == rows
    assert rows == 1 or 4 * 152_064 * rows <= size / 256


def test_tokens_do_not_depend_on_how_many_rows_have_logits_at_once(qwen2, monkeypatch):
    weights = Weights.of(qwen2, 16)
    hidden = torch.randn(10, weights.embed.shape[1])
    uniforms, temperatures = torch.rand(10, dtype=torch.float64), torch.linspace(0, 2, 10)
    settings = [Sampling(temperature=0.7, top_p=0.5, max_tokens=1)] * 10

    def both():
        plain = forward.draw(weights, hidden, temperatures, uniforms)
        return [*plain, *draw_truncated(weights, hidden, settings, uniforms.tolist())]

    ids, logprobs, nucleus, of_nucleus = both()
    monkeypatch.setattr(forward, "rows_at_once", lambda head: 3)
    again = both()
    assert torch.equal(ids, again[0]) and torch.allclose(logprobs, again[1], atol=1e-5)
    assert torch.equal(nucleus, again[2]) and torch.allclose(of_nucleus, again[3], atol=1e-5)


def test_logits_that_are_not_numbers_fail_that_rollout_by_name(qwen2, run_async):
    engine = make_engine(qwen2)
    engine.weights.embed[9] = torch.nan

    async def both():
        requests = [engine.generate([first], Sampling(max_tokens=5, seed=first)) for first in (9, 5)]
        return await asyncio.gather(*requests, return_exceptions=True)

    engine.weights.head = engine.weights.head.nan_to_num(0.0)
    bad, good = run_async(both())
    assert isinstance(bad, EngineError)
    assert "not numbers" in str(bad)
    assert len(good.token_ids) == 5


def test_logits_that_become_nan_during_a_run_of_tokens_are_no_error_of_the_others(qwen2, run_async):
    engine = make_engine(qwen2)
    engine.weights.head = engine.weights.head.clone()
    engine.weights.embed[:] = torch.nan
    engine.weights.embed[5] = 1.0

    async def both():
        requests = [engine.generate([5], Sampling(max_tokens=most, seed=0)) for most in (1, 5)]
        return await asyncio.gather(*requests, return_exceptions=True)

    good, bad = run_async(both())
    assert len(good.token_ids) == 1  # whose one token is not embedded
    assert isinstance(bad, EngineError)
    assert "not numbers" in str(bad)


@given(st.integers(0, 2**32 - 1), st.sampled_from([40, BLOCK, BLOCK + 1, 3 * BLOCK - 7]))
@settings(max_examples=60)
def test_a_uniform_number_gives_the_token_of_one_cumulative_sum(seed, vocab):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, vocab, generator=generator) * 6
    uniforms = torch.rand(6, generator=generator, dtype=torch.float64)
    logits[:, : vocab // 3] = -torch.inf  # whole blocks may hold no token
    ids, logprobs = sample(logits, torch.full((6,), 0.8), uniforms)
    theirs, own = draw(logits / 0.8, uniforms)
    assert ids.tolist() == theirs.tolist()
    torch.testing.assert_close(logprobs, own, atol=1e-5, rtol=0)
    likeliest, certain = sample(logits, torch.zeros(6), uniforms)
    assert likeliest.tolist() == logits.argmax(dim=1).tolist()
    assert certain.tolist() == [0.0] * 6


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.booleans()), max_size=40), st.integers(6, 30))
def test_pages_are_never_held_twice_by_strangers_and_never_lost(events, count):
    """Conversations over few distinct ids begin, end and continue at random."""
    pool = PagePool(count, 4)
    holding: list[tuple[np.ndarray, list[int]]] = []
    rng = random.Random(0)
    for kind, length, flag in events:
        if kind and holding:
            ids, pages = holding.pop(rng.randrange(len(holding)))
            pool.publish(pages, ids, ended=flag)
            pool.release(pages)
            continue
        ids = np.asarray([rng.randrange(2) for _ in range(length)], dtype=np.int64)
        pages, known = pool.find(ids)
        assert known < len(ids)
        try:
            pages += pool.take(-(-len(ids) // 4) - len(pages))
        except OutOfPages:
            pool.release(pages)
            continue
        assert TRASH not in pages
        written = set(pages[known // 4 :])
        for other, theirs in holding:
            assert not written & set(theirs)
            shared = set(pages) & set(theirs)
            full = len(shared) * 4
            assert ids[:full].tolist() == other[:full].tolist()
        holding.append((ids, pages))
    for _, pages in holding:
        pool.release(pages)
    assert pool.available == count - 1
