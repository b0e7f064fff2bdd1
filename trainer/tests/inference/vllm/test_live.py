"""The same promises as in test_vllm_engine.py, kept by a real vLLM server. Skipped unless one runs:

vf-vllm --model tiny --port 8137 --dtype float32 --max-model-len 1024 --enforce-eager
PLUMBOB_VLLM_URL=http://127.0.0.1:8137 pytest -n 0 trainer/tests/test_vllm_live.py
"""

import asyncio
import dataclasses
import json
import os
import time

import pytest
import torch
from plumbob.rollout import EngineError
from plumbob.testing.vllm_policies import DRAW, IDS, VOCAB, move, own_logprobs, policy_of, settings_of
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.vllm.adapter_sync import LoraShape
from plumbob.trainer.inference.vllm.engine import VllmEngine
from plumbob.trainer.inference.weight_sync import SyncError
from plumbob.trainer.policy.loading import load_model

URL = os.environ.get("PLUMBOB_VLLM_URL")
PARITY = 0.02
"""Mean, in nats. In float32 a GPU's tensor cores round to TF32 by default in attention."""

pytestmark = pytest.mark.skipif(URL is None, reason="PLUMBOB_VLLM_URL names no server")


@pytest.fixture
def engine():
    made = VllmEngine(settings_of(URL, folder=None))
    yield made
    made.close()


def cards(engine):
    read = lambda content: [card["id"] for card in json.loads(content)["data"]]  # noqa: E731
    return engine._control.each("GET", "/v1/models", read=read)[0]


def test_the_server_says_what_its_model_takes(engine):
    read = lambda content: json.loads(content)["results"]  # noqa: E731
    (told,) = engine._control.each("POST", "/collective_rpc", {"method": "plumbob_model"}, read=read)[0]
    assert told == {"vocab_size": VOCAB, "max_lora_rank": 16, "transfer": "disk"}


def test_completions_are_of_the_model(engine):
    """Their log-probabilities are those of the process, with and without a temperature; greedy ones agree."""
    here = TransformersEngine(load_model("tiny"), max_length=1024)
    for temperature in (1.0, 0.7):
        sampling = dataclasses.replace(DRAW, temperature=temperature)
        drawn = asyncio.run(engine.generate(IDS, sampling))
        scored = here.score([*IDS, *drawn.token_ids], temperature)[len(IDS) - 1 :]
        assert drawn.logprobs == pytest.approx(scored, abs=PARITY)
        assert (drawn.token_ids[-1] == 2) == (drawn.finish_reason == "stop")
    greedy = dataclasses.replace(DRAW, temperature=0.0)
    assert asyncio.run(engine.generate(IDS, greedy)).token_ids == asyncio.run(here.generate(IDS, greedy)).token_ids


def test_truncated_distributions(engine):
    """With top-p and top-k the log-probabilities are those after truncation."""
    drawn = asyncio.run(engine.generate(IDS, dataclasses.replace(DRAW, top_k=1)))
    assert drawn.logprobs == pytest.approx([0.0] * len(drawn.logprobs), abs=1e-4)
    here = TransformersEngine(load_model("tiny"), max_length=1024)
    drawn = asyncio.run(engine.generate(IDS, dataclasses.replace(DRAW, top_p=0.5)))
    full = here.score([*IDS, *drawn.token_ids])[len(IDS) - 1 :]
    assert all(a >= b - PARITY for a, b in zip(drawn.logprobs, full, strict=True))


def test_stop_tokens_alone_end_a_completion(engine):
    """Not the model's own end token; and the one that ends it stays in it."""
    free = asyncio.run(engine.generate(IDS, dataclasses.replace(DRAW, stop_token_ids=(), max_tokens=200)))
    assert len(free.token_ids) == 200 and free.finish_reason == "length"
    stop = free.token_ids[10]
    greedy = dataclasses.replace(DRAW, temperature=0.0, stop_token_ids=(), max_tokens=50)
    whole = asyncio.run(engine.generate(IDS, greedy)).token_ids
    stop = whole[10]
    cut = asyncio.run(engine.generate(IDS, dataclasses.replace(greedy, stop_token_ids=(stop,))))
    assert cut.token_ids == whole[: whole.index(stop) + 1] and cut.finish_reason == "stop"


def test_adapters(engine):
    policy = policy_of(peft=True)
    for step in (1, 2, 3):
        move(policy, step)
        update = engine.update(policy.trainable)
        assert update.version == step and update.bound_modules == len(policy.trainable) // 2
        assert engine.check_parity(IDS, own_logprobs(policy), PARITY) < PARITY
        drawn = asyncio.run(engine.generate(IDS, DRAW))
        assert drawn.policy_version == step
        served = [name for name in cards(engine) if name.startswith(f"plumbob-{engine._transfer._run}")]
        assert served == [engine.served.model]


def test_an_adapter_that_does_not_fit(engine):
    """Refused with the server's reason, or bound to fewer modules than it has: found out either way."""
    policy = policy_of(peft=True)
    wrong = {name.replace("self_attn.q_proj", "self_attn.r_proj"): t for name, t in policy.trainable.items()}
    with pytest.raises(SyncError, match="r_proj|bound it to"):
        engine.update(wrong)
    gone = {name.replace(".layers.", ".blocks."): t for name, t in policy.trainable.items()}
    with pytest.raises(SyncError, match="blocks|bound it to 0"):
        engine.update(gone)
    high = VllmEngine(settings_of(URL, lora=LoraShape(999, 16)))
    with pytest.raises(SyncError, match="rank.*--max-lora-rank 999"):
        high.update(policy.trainable)
    high.close()
    assert asyncio.run(engine.generate(IDS, DRAW)).policy_version == 0


def test_an_adapter_may_change_under_completions_in_flight(engine):
    policy = policy_of(peft=True)
    engine.update(policy.trainable)

    async def main():
        long = dataclasses.replace(DRAW, max_tokens=400, stop_token_ids=())
        under_way = [asyncio.ensure_future(engine.generate(IDS, long)) for _ in range(8)]
        await asyncio.sleep(0.2)
        with pytest.raises(EngineError, match="cannot change"):
            engine.update(policy.trainable)
        move(policy, 5)
        await asyncio.to_thread(engine.update, policy.trainable, in_flight="finish")
        after = await engine.generate(IDS, DRAW)
        return await asyncio.gather(*under_way), after

    before, after = asyncio.run(main())
    assert {c.policy_version for c in before} == {1} and after.policy_version == 2
    assert engine.check_parity(IDS, own_logprobs(policy), PARITY) < PARITY


def test_a_cancelled_completion_frees_its_place(engine):
    async def main():
        long = dataclasses.replace(DRAW, max_tokens=900, stop_token_ids=())
        task = asyncio.ensure_future(engine.generate(IDS, long))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.in_flight == 0 and asyncio.run(engine.generate(IDS, DRAW)).token_ids


@pytest.mark.skipif(
    os.environ.get("PLUMBOB_VLLM_FULL") != "1", reason="PLUMBOB_VLLM_FULL=1 changes the server's weights"
)
def test_weights_from_disk():
    """Last, for it changes the server's model; what it was is put back. The server must run with --sync disk.

    A CPU build of 0.32.0 failed here: its output head, tied to the embedding, kept the first weights (packed, it seems,
    when it started). The check of log-probabilities said so.
    """
    engine = VllmEngine(settings_of(URL, lora=None))
    try:
        policy = policy_of(peft=False)
        for step in (1, 2):
            move(policy, step)
            start = time.perf_counter()
            assert engine.update(policy.trainable).version == step
            print(f"{time.perf_counter() - start:.3f} s")
            assert engine.check_parity(IDS, own_logprobs(policy), PARITY) < PARITY
        first = {name: p.detach() for name, p in load_model("tiny").named_parameters()}
        engine.update(first)
        assert torch.tensor(engine.score(IDS)) == pytest.approx(
            torch.tensor(TransformersEngine(load_model("tiny")).score(IDS)), abs=PARITY
        )
    finally:
        engine.close()
