import asyncio
import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.inference.engine import WeightUpdate
from plumbob.trainer.inference.transformers.engine import TransformersEngine, draw
from plumbob.trainer.inference.weight_sync import PARITY, SyncError, parity_row, sync_weights
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.policy import Policy


def prompts(count: int, seed: int = 0, shared: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    head = torch.randint(3, 640, (shared,), generator=generator).tolist()
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [head + torch.randint(3, 640, (n,), generator=generator).tolist() for n in lengths]


async def generate_all(engine, requests):
    return await asyncio.gather(*(engine.generate(ids, sampling) for ids, sampling in requests))


def test_engine_and_trainer_agree_on_sampled_tokens(model, make_policy, run_async):
    policy = make_policy(model)
    engine = TransformersEngine(policy.engine_model(), max_slots=16)
    rows = prompts(12)
    for temperature in (1.0, 0.7):
        sampling = [Sampling(max_tokens=20, temperature=temperature, seed=i) for i in range(12)]
        completions = run_async(generate_all(engine, list(zip(rows, sampling, strict=True))))
        samples = [
            Sample(
                [*ids, *c.token_ids],
                [False] * len(ids) + [True] * len(c.token_ids),
                [0.0] * len(ids) + list(c.logprobs),
                0.0,
                "g",
                "",
                False,
            )
            for ids, c in zip(rows, completions, strict=True)
        ]
        own = policy.score(samples, temperature).logprobs
        drawn = torch.tensor([lp for c in completions for lp in c.logprobs])
        assert (own - drawn).abs().mean() < 1e-5
        assert (own - drawn).abs().max() < 1e-4


@pytest.mark.slow
def test_a_completion_does_not_depend_on_what_shares_its_batches(model, run_async):
    requests = [(ids, Sampling(max_tokens=5 + i, seed=i)) for i, ids in enumerate(prompts(20))]
    alike = prompts(1, seed=1)[0]  # some draw the same tokens for a while: they are computed once until they part
    requests += [(alike, Sampling(max_tokens=4 + i, temperature=0.2 * (i % 3), seed=i // 2)) for i in range(12)]
    alone = []
    for request in requests:
        engine = TransformersEngine(copy.deepcopy(model), max_slots=1)
        alone.append(run_async(generate_all(engine, [request]))[0])
    engine = TransformersEngine(copy.deepcopy(model), max_slots=7)
    together = run_async(generate_all(engine, requests))
    # Again in another order, with slots that hold leftovers of the first round.
    reversed_ = run_async(generate_all(engine, requests[::-1]))[::-1]
    for others in (together, reversed_):
        odd = []
        for a, b, (_, sampling) in zip(alone, others, requests, strict=True):
            n = sum(
                1
                for _ in itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(a.token_ids, b.token_ids, strict=True)
                )
            )
            assert a.logprobs[:n] == pytest.approx(b.logprobs[:n], abs=1e-4)
            odd += [(n, sampling.temperature)] if n < len(a.token_ids) else []
        # A number may lie so close to the border of two tokens that rounding decides.
        assert len(odd) <= 1 and all(n > 0 and temperature > 0 for n, temperature in odd)


def test_greedy_equals_transformers_own_generate(model, run_async):
    engine = TransformersEngine(copy.deepcopy(model), max_slots=4)
    rows = prompts(6)
    completions = run_async(generate_all(engine, [(ids, Sampling(max_tokens=12, temperature=0)) for ids in rows]))
    for ids, completion in zip(rows, completions, strict=True):
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, len(ids) :]
        assert list(completion.token_ids) == expected.tolist()
        assert set(completion.logprobs) == {0.0}


def test_later_turns_compute_only_what_is_new(qwen2, run_async):
    engine = TransformersEngine(qwen2, max_slots=8)
    rows = prompts(8, shared=0)

    async def two_turns():
        first = await generate_all(engine, [(ids, Sampling(max_tokens=6, seed=i)) for i, ids in enumerate(rows)])
        prefilled = engine.prefilled_tokens
        longer = [[*ids, *c.token_ids, 7, 8, 9] for ids, c in zip(rows, first, strict=True)]
        second = await generate_all(engine, [(ids, Sampling(max_tokens=6, seed=i)) for i, ids in enumerate(longer)])
        return prefilled, longer, second

    prefilled, longer, second = run_async(two_turns())
    assert prefilled == sum(map(len, rows))
    # The last sampled id of turn one was never fed, then three new ones.
    assert engine.prefilled_tokens - prefilled == 8 * 4
    fresh = TransformersEngine(copy.deepcopy(qwen2), max_slots=8)
    expected = run_async(generate_all(fresh, [(ids, Sampling(max_tokens=6, seed=i)) for i, ids in enumerate(longer)]))
    assert [c.token_ids for c in second] == [c.token_ids for c in expected]


def test_a_prompt_that_a_group_shares_is_computed_once(qwen2, run_async):
    engine = TransformersEngine(qwen2, max_slots=8)
    ids = prompts(1)[0]
    completions = run_async(generate_all(engine, [(ids, Sampling(max_tokens=9, seed=i)) for i in range(8)]))
    assert engine.prefilled_tokens == len(ids)
    assert len({c.token_ids for c in completions}) > 1


def test_what_all_prompts_begin_with_is_computed_once(qwen2, run_async):
    """A system prompt, for example; and once more behind it, where a part is cached already."""
    engine = TransformersEngine(copy.deepcopy(qwen2), max_slots=8)
    for shared in (40, 90):
        rows = prompts(5, shared=shared)
        before = engine.prefilled_tokens
        requests = [(ids, Sampling(max_tokens=6, seed=i)) for i, ids in enumerate(rows)]
        done = run_async(generate_all(engine, requests))
        known = engine.prefilled_tokens - before - sum(len(ids) - shared for ids in rows)
        assert known == {40: 40, 90: 50}[shared]
        for request, completion in zip(requests, done, strict=True):
            (alone,) = run_async(generate_all(TransformersEngine(copy.deepcopy(qwen2)), [request]))
            assert completion.token_ids == alone.token_ids
            assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_rollouts_of_a_prompt_are_computed_once_until_they_draw_different_tokens(run_async, monkeypatch):
    engine = TransformersEngine(load_model("tiny"), max_slots=8)
    sizes = []
    forward = engine._forward
    monkeypatch.setattr(engine, "_forward", lambda rows, ids, *a: sizes.append(len(ids)) or forward(rows, ids, *a))
    ids = [i % 600 for i in prompts(1, seed=3)[0]]
    for temperature, at_most in ((0.0, 1), (0.5, 8)):
        sizes.clear()
        how = [Sampling(max_tokens=3 + i, temperature=temperature, seed=i) for i in range(8)]
        done = run_async(generate_all(engine, [(ids, sampling) for sampling in how]))
        drawn = [c.token_ids for c in done]
        active = [[d[:n] for d in drawn if len(d) > n] for n in range(10)]
        assert sizes == [len(set(rows)) for rows in active]
        assert max(sizes) <= at_most and engine.generated_tokens


def test_a_cancelled_request_leaves_those_of_its_row_alone(run_async):
    async def main(cancelled):
        engine = TransformersEngine(load_model("tiny"), max_slots=4)
        ids = [i % 600 for i in prompts(1, seed=3)[0]]
        tasks = [asyncio.create_task(engine.generate(ids, Sampling(max_tokens=30, seed=i))) for i in range(4)]
        for _ in range(5):
            await asyncio.sleep(0)
        for i in cancelled:
            tasks[i].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    whole, left = run_async(main([])), run_async(main([0, 2]))
    assert [c.token_ids for c in left[1::2]] == [c.token_ids for c in whole[1::2]]
    assert all(isinstance(c, asyncio.CancelledError) for c in left[::2])


def test_stop_tokens_and_length(qwen2, run_async):
    engine = TransformersEngine(qwen2, max_slots=4)
    ids = prompts(1)[0]
    (free,) = run_async(generate_all(engine, [(ids, Sampling(max_tokens=10, seed=3))]))
    assert free.finish_reason == "length" and len(free.token_ids) == 10
    stop = free.token_ids[4]
    (stopped,) = run_async(generate_all(engine, [(ids, Sampling(max_tokens=10, seed=3, stop_token_ids=(stop,)))]))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({}, [0, 1, 2, 3]), ({"top_k": 2}, [1, 3]), ({"top_p": 0.7}, [1, 3]), ({"min_p": 0.4}, [1, 2, 3])],
)
def test_draw_follows_the_distribution_it_reports(settings, kept):
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    n = 40_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, logprobs = draw(probabilities.log().expand(n, 4), uniforms, **settings)
    for once, apart in zip(
        draw(probabilities.log()[None], uniforms[None], **settings), (tokens, logprobs), strict=True
    ):
        assert torch.equal(once[0], apart)
    mass = probabilities[kept].sum()
    for token in range(4):
        share = (tokens == token).double().mean().item()
        expected = (probabilities[token] / mass).item() if token in kept else 0.0
        assert share == pytest.approx(expected, abs=4 * math.sqrt(0.25 / n))
    assert torch.allclose(logprobs.exp(), probabilities[tokens] / mass, atol=1e-5)


@pytest.mark.slow
def test_rare_tokens_are_drawn_as_often_as_they_should():
    """A float32 running sum over a large vocabulary would drop or double tokens this rare."""
    logits = torch.zeros(1, 150_000)
    uniforms = (torch.arange(150_000, dtype=torch.float64) + 0.5) / 150_000
    tokens, _ = draw(logits.expand(150_000, -1)[::1000], uniforms[::1000])
    assert torch.equal(tokens, torch.arange(0, 150_000, 1000))


def test_an_update_changes_what_is_served_and_forgets_the_cache(qwen2, run_async):
    engine = TransformersEngine(copy.deepcopy(qwen2), max_slots=4)
    ids = prompts(1)[0]
    request = (ids, Sampling(max_tokens=8, seed=0))
    (before,) = run_async(generate_all(engine, [request]))
    weights = {name: p + 0.1 * torch.randn_like(p) for name, p in qwen2.named_parameters()}
    assert engine.update(weights).version == 1
    (after,) = run_async(generate_all(engine, [request]))
    assert (before.policy_version, after.policy_version) == (0, 1)
    other = copy.deepcopy(qwen2)
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(weights[name])
    (expected,) = run_async(generate_all(TransformersEngine(other), [request]))
    assert after.token_ids == expected.token_ids != before.token_ids
    assert after.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_a_refused_update_changes_nothing(qwen2):
    engine = TransformersEngine(copy.deepcopy(qwen2))
    name = next(iter(dict(qwen2.named_parameters())))
    with pytest.raises(SyncError, match="no weight 'lm_head_typo'"):
        engine.update({name: torch.zeros_like(dict(qwen2.named_parameters())[name]), "lm_head_typo": torch.zeros(1)})
    with pytest.raises(SyncError, match="has shape .* in the engine and .* in the trainer"):
        engine.update({name: torch.zeros(3)})
    assert engine.version == 0
    assert torch.equal(dict(engine.model.named_parameters())[name], dict(qwen2.named_parameters())[name])


def test_a_cancelled_request_leaves_and_the_others_go_on(qwen2, run_async):
    engine = TransformersEngine(qwen2, max_slots=4)
    rows = prompts(4)

    async def main():
        tasks = [
            asyncio.create_task(engine.generate(ids, Sampling(max_tokens=200, seed=i))) for i, ids in enumerate(rows)
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run_async(main())
    assert isinstance(results[1], asyncio.CancelledError)
    assert [len(r.token_ids) for i, r in enumerate(results) if i != 1] == [200] * 3
    assert engine.generated_tokens < 4 * 200


def test_requests_that_cannot_be_served_say_why(qwen2, run_async):
    engine = TransformersEngine(qwen2, max_length=50)
    with pytest.raises(EngineError, match="exceed the engine's limit of 50"):
        run_async(engine.generate([1] * 40, Sampling(max_tokens=20)))
    with pytest.raises(EngineError, match="prompt is empty"):
        run_async(engine.generate([], Sampling(max_tokens=20)))


def test_a_failing_forward_pass_reaches_every_waiting_rollout_and_the_engine_recovers(qwen2, run_async, monkeypatch):
    engine = TransformersEngine(qwen2, max_slots=2)
    requests = [(ids, Sampling(max_tokens=5, seed=0)) for ids in prompts(4)]

    async def collect():
        return await asyncio.gather(*(engine.generate(i, s) for i, s in requests), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_forward", lambda *a: (_ for _ in ()).throw(RuntimeError("out of memory")))
        assert all(isinstance(r, EngineError) and "out of memory" in str(r) for r in run_async(collect()))
    assert all(len(r.token_ids) == 5 for r in run_async(collect()))


def test_a_failing_prefill_reaches_the_whole_group_that_shares_its_prompt(qwen2, run_async, monkeypatch):
    """Only the first of a group is active during the pass; the others were forgotten and waited for ever."""
    engine = TransformersEngine(qwen2, max_slots=8)
    ids = prompts(1)[0]

    async def collect():
        jobs = (engine.generate(ids, Sampling(max_tokens=5, seed=i)) for i in range(8))
        return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 10)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_forward", lambda *a: (_ for _ in ()).throw(RuntimeError("out of memory")))
        assert all(isinstance(r, EngineError) for r in run_async(collect()))
    assert all(len(r.token_ids) == 5 for r in run_async(collect()))


def test_a_prefill_holds_no_more_than_its_share_of_positions(qwen2, run_async, monkeypatch):
    monkeypatch.setattr("plumbob.trainer.inference.transformers.engine.PREFILL_TOKENS", 64)
    engine = TransformersEngine(copy.deepcopy(qwen2), max_slots=16)
    requests = [(ids, Sampling(max_tokens=4, seed=i)) for i, ids in enumerate(prompts(16))]
    sizes = []
    forward = engine._forward
    monkeypatch.setattr(engine, "_forward", lambda rows, ids, *a: sizes.append(ids.numel()) or forward(rows, ids, *a))
    completions = run_async(generate_all(engine, requests))
    assert max(sizes) <= 64
    expected = run_async(generate_all(TransformersEngine(copy.deepcopy(qwen2)), requests))
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]


@pytest.mark.parametrize("peft", [False, True])
def test_sync_is_acknowledged_and_a_lost_update_is_caught(qwen2, make_policy, peft, monkeypatch):
    policy: Policy = make_policy(qwen2, peft=peft)
    engine = TransformersEngine(policy.engine_model())
    row = parity_row(prompts(1)[0])
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    with torch.no_grad():
        trained = policy.score([row], 1.0).logprobs.tolist()
    with pytest.raises(SyncError, match="does not serve the weights"):
        engine.check_parity(row.token_ids, trained, 1e-3)
    report = sync_weights(policy, engine, row)
    assert report.update.version == 1 and report.parity < 1e-5
    assert report.update.num_weights == len(policy.trainable)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    monkeypatch.setattr(engine, "update", lambda weights, **_: WeightUpdate(2, 0))
    with pytest.raises(SyncError, match="does not serve the weights"):
        sync_weights(policy, engine, row)
    assert sync_weights(policy, engine, row, checked=False).parity > 1e-3


def test_a_sync_may_differ_by_more_where_its_ids_are_unlikely(qwen2, make_policy, monkeypatch):
    """A run in bfloat16 stopped at a difference of .32 nats by rounding alone, on a prompt that its policy found unlikely."""
    policy, row, limits = make_policy(qwen2), parity_row(prompts(1)[0]), []
    engine = TransformersEngine(policy.engine_model())
    monkeypatch.setattr(engine, "check_parity", lambda ids, logprobs, limit: limits.append(limit) or 0.0)
    for mean in (2.0, 5.0, 10.0):
        scores = SimpleNamespace(logprobs=torch.full((len(row.token_ids) - 1,), -mean))
        monkeypatch.setattr(policy, "score", lambda rows, temperature, scores=scores: scores)
        sync_weights(policy, engine, row)
    assert limits == pytest.approx([PARITY, PARITY, 2 * PARITY])
