"""The paged engine's share of a GPU's memory, and what it does when that runs out; simulated on a CPU."""

import asyncio
import copy
import dataclasses
import gc
import weakref

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.rollout import EngineError, Sampling
from plumbob.trainer.inference.engine import engine_module
from plumbob.trainer.inference.paged import engine as paged_engine
from plumbob.trainer.inference.paged import forward, opening
from plumbob.trainer.inference.paged.engine import PAGE, PagedEngine, pages_of
from plumbob.trainer.inference.paged.forward import bytes_of_page
from plumbob.trainer.inference.paged.memory import bytes_of_rollout, pages_that_fit
from plumbob.trainer.inference.paged.opening import check_exact, open_paged
from plumbob.trainer.inference.paged.weights import NotSupported, Weights, _Reader
from plumbob.trainer.policy.forward_plan import plan_forward
from plumbob.trainer.policy.gpu_memory import Memory

sizes = st.integers(0, 1000)


@given(sizes, sizes, st.integers(1, 20), sizes, sizes, sizes, st.floats(0.01, 0.99))
def test_pages_keep_their_share_and_leave_what_training_needs(wanted, least, size, free, taken, later, share):
    assume(wanted >= least > 0)
    memory = Memory(free, free + taken)
    pages = pages_that_fit(wanted, least, size, memory, share, later)
    assert pages <= wanted
    if pages > 0:
        assert pages * size <= memory.total * share
        assert pages * size <= free - later
    if pages > least:
        assert pages * size <= free - later - memory.margin
    if pages < wanted:  # not one more would have been right
        more = (pages + 1) * size
        margin = memory.margin if pages >= least else 0
        assert more > int(memory.total * share) or more > free - later - margin


def test_memory_is_counted_as_it_is_taken(model):
    weights = Weights.of(copy.deepcopy(model), 600)
    assert bytes_of_rollout(model, torch.float32, 512) == pages_of(512) * bytes_of_page(weights, PAGE)


def sample_all(engine, prompts, **settings):
    async def together():
        requests = [engine.generate(p, Sampling(seed=i, **settings)) for i, p in enumerate(prompts)]
        return await asyncio.gather(*requests)

    return asyncio.run(together())


@pytest.mark.slow
def test_with_less_memory_fewer_rollouts_decode_at_once_and_a_line_says_so(qwen2, monkeypatch):
    per_rollout = bytes_of_rollout(qwen2, torch.float32, 512)
    prompts = [[5 + i] * 150 for i in range(12)]
    whole = sample_all(open_paged(copy.deepcopy(qwen2), 12, 512, 0.4), prompts, max_tokens=200)
    total = 100 * per_rollout
    monkeypatch.setattr(opening, "memory_of", lambda device: Memory(15 * per_rollout, total))
    said = []
    engine = open_paged(copy.deepcopy(qwen2), 12, 512, 0.4, later=per_rollout, say=said.append)
    assert (engine.pool.count - 1) // pages_of(512) == 4  # 15 are free, training needs 1, and 10 are the margin
    (line,) = said
    assert "holds the keys and values of 4 rollouts of --max-context 512 tokens" in line and "of 12" in line
    scarce = sample_all(engine, prompts, max_tokens=200)
    assert [c.token_ids for c in scarce] == [c.token_ids for c in whole]


def test_a_cache_that_does_not_fit_after_all_is_halved_and_at_last_refused(qwen2, monkeypatch):
    of, sizes = forward.Cache.of.__func__, []

    def limited(cls, weights, pages, size):
        sizes.append(pages - 1)
        if pages - 1 > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return of(cls, weights, pages, size)

    monkeypatch.setattr(forward.Cache, "of", classmethod(limited))
    most, said = 40, []
    engine = open_paged(qwen2, 12, 512, 0.4, say=said.append)
    assert sizes == [108, 54, 27] and engine.pool.count == 28 and "of 3 rollouts" in said[0]
    most = 8
    with pytest.raises(UserError, match="one rollout of --max-context 512 tokens do not fit"):
        open_paged(qwen2, 12, 512, 0.4)
    assert sizes[3:] == [108, 54, 27, 13, 9]


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            NotSupported("it has a norm of its own"),
            "does not know this model: it has a norm of its own; use --engine tr",
        ),
        (
            RuntimeError("no kernel image\nis there"),
            "does not work with this model on this machine: no kernel image; use",
        ),
    ],
)
def test_an_engine_that_was_asked_for_and_cannot_compute_the_model_is_one_sentence(qwen2, monkeypatch, raised, said):
    def fails(*given, **more):
        raise raised

    monkeypatch.setattr(Weights, "of", fails)
    with pytest.raises(UserError, match=said):
        engine_module("paged").measure(qwen2, plan_forward(qwen2, 512), 512)


def fails_above(monkeypatch, name: str, most: int, size):
    """Let a pass of the engine run out of memory whenever it computes more than `most`; returns the sizes that failed."""
    computed, failed = getattr(forward, name), []

    def limited(weights, cache, rows, *rest, **named):
        if size(rows) > most:
            failed.append(size(rows))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more.")
        return computed(weights, cache, rows, *rest, **named)

    monkeypatch.setattr(forward, name, limited)
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}])
def test_running_out_of_memory_while_decoding_goes_on_with_fewer_lanes(qwen2, monkeypatch, capsys, settings):
    prompts = [[5 + i, 6, 7] * (1 + 20 * (i % 3)) for i in range(24)]
    expected = sample_all(engine_of(qwen2), prompts, max_tokens=20, **settings)
    failed = fails_above(monkeypatch, "decode", 5, len)
    engine = engine_of(qwen2)
    pages = engine.pool.count - 1
    ours = sample_all(engine, prompts, max_tokens=20, **settings)
    assert failed == [16, 8]  # then 4 at once
    assert engine.pool.count - 1 == pages // 4
    for a, b in zip(ours, expected, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
    assert engine.pool.available == engine.pool.count - 1
    said = capsys.readouterr().err
    assert (
        "ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)" in said and "at most 4 rollouts" in said
    )
    sample_all(engine, prompts, max_tokens=5, **settings)
    assert failed == [16, 8]  # it stays as small as it has become


@pytest.mark.parametrize(("most", "kept"), [(300, False), (1700, True)])
def test_running_out_of_memory_while_prompts_are_read_goes_on_with_fewer_tokens_at_once(qwen2, monkeypatch, most, kept):
    """The cache is made smaller too only where passes would become too short for a GPU."""
    prompts = [[5 + i] * 200 for i in range(16)]
    expected = sample_all(engine_of(qwen2), prompts, max_tokens=6)
    failed = fails_above(monkeypatch, "prefill", most, lambda rows: sum(len(row.ids) - row.known for row in rows))
    engine = engine_of(qwen2)
    pages = engine.pool.count
    ours = sample_all(engine, prompts, max_tokens=6)
    assert failed and [c.token_ids for c in ours] == [c.token_ids for c in expected]
    assert (engine.pool.count == pages) is kept and engine.pool.available == engine.pool.count - 1


@pytest.mark.parametrize(("owner", "name"), [(forward.Cache, "copy"), (paged_engine, "draw_truncated")])
def test_running_out_of_memory_after_shared_prompts_were_read_loses_no_page(qwen2, monkeypatch, capsys, owner, name):
    prompts = [[5 + i // 4] * 150 for i in range(16)]
    expected = sample_all(engine_of(qwen2), prompts, max_tokens=6)
    computed, calls = getattr(owner, name), []

    def fails_once(*given):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return computed(*given)

    monkeypatch.setattr(owner, name, fails_once)
    monkeypatch.setattr(paged_engine, "FEWEST_PREFILL_TOKENS", 1)
    engine = engine_of(qwen2)
    pages = engine.pool.count
    ours = sample_all(engine, prompts, max_tokens=6)
    assert len(calls) > 1 and [c.token_ids for c in ours] == [c.token_ids for c in expected]
    assert engine.pool.count == pages and engine.pool.available == pages - 1
    assert "at most 300 tokens of prompts are read at once" in capsys.readouterr().err


def test_running_out_of_memory_in_the_middle_of_rollouts_loses_none_of_what_they_have_sampled(qwen2, monkeypatch):
    prompts = [[5 + i, 9] for i in range(8)]
    expected = sample_all(engine_of(qwen2), prompts, max_tokens=40)
    decode, calls = forward.decode, []

    def fails_once(*given):
        calls.append(1)
        if len(calls) == 21:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decode(*given)

    monkeypatch.setattr(forward, "decode", fails_once)
    engine = engine_of(qwen2)
    ours = sample_all(engine, prompts, max_tokens=40)
    assert [c.token_ids for c in ours] == [c.token_ids for c in expected]
    assert engine.generated_tokens == sum(len(c.token_ids) for c in expected)  # nothing is sampled twice


def test_memory_that_does_not_hold_one_rollout_fails_it_with_the_reason_and_the_engine_goes_on(qwen2, monkeypatch):
    engine = engine_of(qwen2)
    with monkeypatch.context() as broken:
        failed = fails_above(broken, "decode", 0, len)
        with pytest.raises(EngineError, match="OutOfMemoryError: CUDA out of memory"):
            sample_all(engine, [[5, 6]], max_tokens=40)
        assert failed == [1] * 5  # with 16 lanes, 8, 4, 2 and 1
    assert len(sample_all(engine, [[5, 6]], max_tokens=3)[0].token_ids) == 3


@pytest.mark.parametrize("room", [1.0, 0.4])
def test_an_engine_that_slept_samples_what_it_would_have_sampled(qwen2, monkeypatch, capsys, room):
    """Its keys and values are gone meanwhile. Where less memory is left when it wakes, fewer rollouts decode at once."""
    prompts = [[5 + i, 6, 7] * (1 + 20 * (i % 3)) for i in range(24)]
    expected = sample_all(engine_of(qwen2), prompts, max_tokens=20)
    engine = engine_of(qwen2)
    sample_all(engine, prompts, max_tokens=5)
    pages, of, cache = engine.pool.count - 1, forward.Cache.of.__func__, weakref.ref(engine._cache.keys[0])

    def limited(cls, weights, count, size):
        if count - 1 > room * pages:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return of(cls, weights, count, size)

    monkeypatch.setattr(forward.Cache, "of", classmethod(limited))
    engine.sleep()
    gc.collect()
    assert cache() is None and engine.served_weights()
    engine.forget()
    engine.wake_up()
    assert engine.pool.count - 1 == (pages if room == 1 else pages // 4)
    assert ("ran out of memory" in capsys.readouterr().err) == (room < 1)
    ours = sample_all(engine, prompts, max_tokens=20)
    assert [c.token_ids for c in ours] == [c.token_ids for c in expected]


def test_an_engine_does_not_sleep_while_it_samples(qwen2):
    engine = engine_of(qwen2)

    async def asleep_too_early():
        request = asyncio.ensure_future(engine.generate([5, 6, 7], Sampling(max_tokens=40)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="cannot sleep"):
            engine.sleep()
        return await request

    assert len(asyncio.run(asleep_too_early()).token_ids) == 40


def engine_of(model) -> PagedEngine:
    return PagedEngine(Weights.of(copy.deepcopy(model), 600), max_slots=16, max_length=512)


def test_the_comparison_takes_no_second_copy_of_the_weights_and_leaves_the_model_as_it_was(qwen2, monkeypatch):
    plan, of, joined = plan_forward(qwen2, 512), Weights.of.__func__, []
    before = {name: p.clone() for name, p in qwen2.named_parameters()}

    def shared(cls, model, positions, **more):
        weights = of(cls, model, positions, **more)
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        layer = weights.layers[0]
        joined.extend(
            x.weight.untyped_storage()._cdata in own for x in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return weights

    monkeypatch.setattr(Weights, "of", classmethod(shared))
    check_exact(qwen2, plan, 512)
    assert joined == [True] * 4
    assert all(
        p.untyped_storage().nbytes() == p.nbytes and p.equal(before[name]) for name, p in qwen2.named_parameters()
    )


def test_what_was_joined_is_gone_when_the_model_turns_out_to_be_unknown(qwen2, monkeypatch):
    cat, joined = _Reader._cat, []

    def seen(self, parameters):
        joined.append(weakref.ref(whole := cat(self, parameters)))
        return whole

    monkeypatch.setattr(_Reader, "_cat", seen)
    plan, qwen2.strange = plan_forward(qwen2, 512), torch.nn.Parameter(torch.ones(2))
    with pytest.raises(NotSupported, match="strange") as raised:
        check_exact(qwen2, plan, 512)
    assert joined and not [whole for whole in joined if whole() is not None], raised


@pytest.mark.parametrize(("rounds", "known"), [(False, True), (True, False)])
def test_a_model_that_rounds_more_than_was_measured_is_still_known_and_one_that_computes_otherwise_is_not(
    qwen2, monkeypatch, rounds, known
):
    """Seen on an H200: after SFT a 0.5B model differed by 4e-4 nats, which is rounding, and was called unknown."""
    plan, of = dataclasses.replace(plan_forward(qwen2, 512), limit=1e-9), Weights.of.__func__

    def rounded(cls, model, positions, **more):
        weights = of(cls, copy.deepcopy(model), positions, **more)
        for tensor in weights.named.values() if rounds else ():
            tensor.copy_(tensor.bfloat16())
        return weights

    monkeypatch.setattr(Weights, "of", classmethod(rounded))
    if known:
        check_exact(qwen2, plan, 512)
    else:
        with pytest.raises(NotSupported, match="differ by"):
            check_exact(qwen2, plan, 512)


@pytest.mark.parametrize(("tokens", "known"), [(1, True), (None, False)], ids=["one token", "all tokens"])
def test_one_token_that_rounding_moves_far_does_not_make_a_model_unknown(qwen2, monkeypatch, tokens, known):
    """Seen on an H200: after 199 steps of GRPO one of 36 ids drawn by lot differed by .022 nats, and no evaluation was made."""
    plan, score, moved = plan_forward(qwen2, 512), PagedEngine.score, []

    def shaken(self, token_ids):
        logprobs = score(self, token_ids)
        count = 0 if tokens and moved else tokens or len(logprobs)
        moved.append(count)
        return [x + 0.022 * (i < count) for i, x in enumerate(logprobs)]

    monkeypatch.setattr(PagedEngine, "score", shaken)
    monkeypatch.setattr(opening, "limit_by_float64", lambda *_: 5e-3)  # a large model's own rounding errors
    if known:
        check_exact(qwen2, plan, 512)
    else:
        with pytest.raises(NotSupported, match="differ by 0.022"):
            check_exact(qwen2, plan, 512)
