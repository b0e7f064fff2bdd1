"""Completions, adapters and weights through vLLM's protocol: the engine against a server that serves real ones."""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.rollout import EngineError
from plumbob.testing.processes import two_ranks
from plumbob.testing.vllm_double import Double, serving
from plumbob.testing.vllm_policies import DRAW, IDS, VOCAB, move, own_logprobs, policy_of, settings_of
from plumbob.trainer.inference.errors import PromptError, SyncError
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.vllm.adapter_sync import LoraShape, write_adapter
from plumbob.trainer.inference.vllm.engine import VllmEngine
from plumbob.trainer.inference.vllm.weight_transport import IpcTransport, packed_chunks
from plumbob.trainer.policy.loading import load_model


@pytest.fixture(scope="module")
def model():
    return load_model("tiny")


@pytest.fixture
def connect():
    """Engines that are closed after the test."""
    engines = []

    def make(url, world=None, **fields):
        engines.append(VllmEngine(settings_of(url, **fields), world))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(params=["0.25.1", "0.32.0"])
def double(request):
    return Double(version=request.param)


def test_completions_are_those_of_the_process(connect, double, model):
    """With the seed sent the two draw the same; the version and the count of tokens are the engine's own."""
    with serving(double) as url:
        engine = connect(url + "/v1", seeds=True)
        drawn = asyncio.run(engine.generate(IDS, DRAW))
        greedy = asyncio.run(engine.generate(IDS, dataclasses.replace(DRAW, temperature=0.0)))
        here = TransformersEngine(model, max_length=1024)
        for there, sampling in ((drawn, DRAW), (greedy, dataclasses.replace(DRAW, temperature=0.0))):
            expected = asyncio.run(here.generate(IDS, sampling))
            assert there.token_ids == expected.token_ids and there.finish_reason == expected.finish_reason
            assert there.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert set(greedy.logprobs) == {0.0}
        assert engine.generated_tokens == len(drawn.token_ids) + len(greedy.token_ids)
        assert engine.score(IDS) == pytest.approx(here.score(IDS), abs=1e-5)


@pytest.mark.parametrize(
    ("ids", "message"), [([], "empty"), ([1, 610], "no token id 610"), ([-1], "no token id -1"), ([1] * 1010, "exceed")]
)
def test_prompts_that_no_server_is_asked(connect, ids, message):
    double = Double()
    with serving(double) as url:
        engine = connect(url)
        before = len(double.faults.seen)
        with pytest.raises(PromptError, match=message):
            asyncio.run(engine.generate(ids, DRAW))
        assert len(double.faults.seen) == before


@pytest.mark.slow
def test_adapters_step_by_step(connect, double):
    """Each sync: a new name, the trainer's log-probabilities, the old adapter gone, the prefix cache reset."""
    with serving(double) as url:
        engine, policy = connect(url), policy_of(peft=True)
        names = []
        for step in range(1, 4):
            move(policy, step)
            update = engine.update(policy.trainable)
            assert update.version == engine.version == step
            assert engine.check_parity(IDS, own_logprobs(policy), 1e-3) < 1e-4
            assert update.bound_modules == update.num_weights // 2 > 0
            assert list(double.adapters) == [engine.served.model] and double.prefix_resets == step
            assert asyncio.run(engine.generate(IDS, DRAW)).policy_version == step
            names.append(engine.served.model)
        assert len(set(names)) == 3
        folder = engine._folder
        engine.close()
        assert double.adapters == {} and not folder.exists()


@pytest.mark.parametrize("way", ["disk", "ipc"])
def test_all_weights(connect, double, way, monkeypatch):
    """In the way that the server says it takes them."""
    double.max_lora_rank, double.takes = 0, way
    with serving(double) as url:
        engine, policy = connect(url, lora=None), policy_of(peft=False)
        if way == "ipc":
            assert isinstance(engine._transfer.transport, IpcTransport)
            # On the CPU the double opens the buffer by its address; small, so that the weights travel in many pieces.
            version = tuple(map(int, double.version.split(".")[:2]))
            transport = IpcTransport(engine._control, version, torch.float32, torch.device("cpu"), 300_000)
            transport.export = lambda buffer: {"here": buffer.data_ptr()}
            engine._transfer.transport = transport
        with pytest.raises(SyncError, match="does not serve the weights that are trained"):
            engine.check_parity(IDS, own_logprobs(policy), 1e-3)
        for step in (1, 2):
            move(policy, step)
            assert engine.update(policy.trainable).version == step
            assert engine.check_parity(IDS, own_logprobs(policy), 1e-3) < 1e-4
        assert double.marked == 2 and not double.updating
        paths = double.faults.paths()
        assert paths.index("/pause") < paths.index("/resume") < paths.index("/reset_prefix_cache")
        if way == "ipc":
            assert paths.count("/update_weights") >= 8 and paths.count("/init_weight_transfer_engine") == 1
        assert asyncio.run(engine.generate(IDS, DRAW)).policy_version == 2


def test_completions_in_flight(connect):
    """Weights do not change under them; an adapter may, and they end with the one that they began with."""
    double = Double()
    with serving(double) as url:
        engine, policy = connect(url, seeds=True), policy_of(peft=True)
        engine.update(policy.trainable)
        alone = asyncio.run(engine.generate(IDS, DRAW))

        async def main():
            double.faults.slow = 0.3
            under_way = asyncio.ensure_future(engine.generate(IDS, DRAW))
            await asyncio.sleep(0.1)
            with pytest.raises(EngineError, match="weights cannot change while 1 completions"):
                engine.update(policy.trainable)
            with pytest.raises(EngineError, match="cannot sleep while 1"):
                engine.sleep()
            move(policy, 9)
            double.faults.slow = 0.0
            update = await asyncio.to_thread(engine.update, policy.trainable, in_flight="finish")
            assert update.version == 2
            after = await engine.generate(IDS, DRAW)
            return await under_way, after

        before, after = asyncio.run(main())
        assert (before.policy_version, after.policy_version) == (1, 2)
        assert before.token_ids == alone.token_ids and before.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert after.logprobs != pytest.approx(before.logprobs, abs=1e-3)
        assert len(double.adapters) == 2  # the old one goes at the next sync
        engine.update(policy.trainable)
        assert list(double.adapters) == [engine.served.model]


def test_other_ranks_ask_for_what_rank_0_synced(connect):
    worlds, double = two_ranks(), Double()
    with serving(double) as url, ThreadPoolExecutor(2) as threads:
        main, other = (connect(url, world=world) for world in worlds)
        policy, sent = policy_of(peft=True), len(double.faults.seen)

        def on_both(act):
            return [future.result(30) for future in [threads.submit(act, engine) for engine in (main, other)]]

        first, second = on_both(lambda engine: engine.update(policy.trainable))
        assert first == second and first.version == 1 and len(double.adapters) == 1
        parities = on_both(lambda engine: engine.check_parity(IDS, own_logprobs(policy), 1e-3))
        assert parities[0] == parities[1] < 1e-4
        assert asyncio.run(other.generate(IDS, DRAW)).policy_version == 1 and other.served == main.served
        assert sum("unload" not in path and "load_lora" in path for path, _ in double.faults.seen[sent:]) == 1
        # What rank 0 is refused, every process hears: none is left waiting.
        wrong = [0.0] * (len(IDS) - 1)
        for future in [threads.submit(engine.check_parity, IDS, wrong, 1e-3) for engine in (main, other)]:
            with pytest.raises(SyncError, match="differ from the trainer's"):
                future.result(30)


def test_a_resumed_run_s_versions_go_on(connect):
    with serving(Double()) as url:
        engine = connect(url)
        engine.version = 7
        assert engine.update(policy_of(peft=True).trainable).version == 8


def test_sleeping_between_phases(connect):
    double = Double()
    with serving(double) as url:
        engine = connect(url)
        engine.sleep()
        assert double.asleep
        engine.wake_up()
        assert not double.asleep


def test_the_engine_serves_any_event_loop(connect):
    """Each phase of a run has its own; a cancelled completion frees its place at the server."""
    double = Double()
    with serving(double) as url:
        engine = connect(url)

        async def cancelled():
            double.faults.slow = 20.0
            task = asyncio.ensure_future(engine.generate(IDS, DRAW))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            double.faults.slow = 0.0

        asyncio.run(cancelled())
        assert engine.in_flight == 0
        results = asyncio.run(_many(engine, 64))
        assert len(results) == 64 and engine.generated_tokens == sum(len(r.token_ids) for r in results)


async def _many(engine, count):
    return await asyncio.gather(*(engine.generate(IDS, DRAW) for _ in range(count)))


@pytest.mark.slow
def test_a_conversation_stays_where_its_prefix_is(connect):
    """Later turns and the rest of a group go to the server that has their beginning; new prompts to the idler one."""
    with serving(first := Double()) as a, serving(second := Double()) as b:
        engine = connect((a, b))
        counts = lambda: [d.faults.paths().count("/inference/v1/generate") for d in (first, second)]  # noqa: E731
        start = counts()

        async def conversation(seed):
            prompt = torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
            for _ in range(4):
                drawn = await engine.generate(prompt, DRAW)
                prompt += [*drawn.token_ids, *range(3, 40)]

        asyncio.run(conversation(1))
        used = [after - before for after, before in zip(counts(), start, strict=True)]
        assert sorted(used) == [0, 4]

        async def group(seed):
            prompt = torch.randint(VOCAB, (100,), generator=torch.Generator().manual_seed(seed)).tolist()
            await asyncio.gather(*(engine.generate(prompt, DRAW) for _ in range(6)))

        async def two_groups():
            await asyncio.gather(group(20), group(21))

        start = counts()
        asyncio.run(two_groups())
        assert [after - before for after, before in zip(counts(), start, strict=True)] == [6, 6]

        async def several():
            await asyncio.gather(*(conversation(seed) for seed in range(2, 10)))

        start = counts()
        asyncio.run(several())
        used = [after - before for after, before in zip(counts(), start, strict=True)]
        assert sum(used) == 32 and min(used) >= 8 and all(n % 4 == 0 for n in used)


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=8),
    capacity=st.integers(125, 400),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_packed_weights_unpack_to_themselves(shapes, capacity, dtype):
    weights = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    buffer = torch.zeros(capacity * dtype.itemsize, dtype=torch.uint8)
    seen = {}
    for chunk in packed_chunks(weights, dtype, buffer):
        assert sum(chunk.tensor_sizes) <= len(buffer)
        parts = buffer[: sum(chunk.tensor_sizes)].clone().split(chunk.tensor_sizes)
        for name, shape, part in zip(chunk.names, chunk.shapes, parts, strict=True):
            seen[name] = part.view(dtype).view(shape)
    assert list(seen) == list(weights)
    assert all(torch.equal(seen[name], weights[name].to(dtype)) for name in weights)


def test_the_adapter_s_files_are_peft_s(tmp_path):
    """peft applies them to the plain model as the policy computes."""
    from peft import PeftModel

    policy = policy_of(peft=True)
    modules, size = write_adapter(tmp_path / "a", policy.trainable, LoraShape(8, 16))
    assert modules == len(policy.trainable) // 2 and size == sum(t.nbytes for t in policy.trainable.values())
    loaded = PeftModel.from_pretrained(load_model("tiny"), tmp_path / "a").merge_and_unload()
    assert TransformersEngine(loaded).score(IDS) == pytest.approx(own_logprobs(policy), abs=1e-4)
    with pytest.raises(SyncError, match=r"'model.norm.weight' is not a weight of a LoRA adapter"):
        write_adapter(tmp_path / "b", {"model.norm.weight": torch.ones(3)}, LoraShape(8, 16))


@pytest.mark.parametrize(
    ("urls", "message"), [((), "no server"), (("http://a:1", "http://a:1/v1"), "twice"), (("ftp://a",), "not the URL")]
)
def test_urls_that_cannot_be(urls, message):
    with pytest.raises(UserError, match=message):
        VllmEngine(settings_of(urls))
