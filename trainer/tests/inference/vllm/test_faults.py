"""Servers that are killed, slow, busy, wrong or lying: what is tried again, what is said, and that nothing hangs."""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from aiohttp import web
from plumbob.console import UserError
from plumbob.rollout import Chat, EngineError, Limits, Sampling, run_group, to_sample
from plumbob.testing.vllm_double import Double, Refused, serving
from plumbob.testing.vllm_policies import DRAW, IDS, own_logprobs, policy_of, settings_of
from plumbob.trainer.inference.http_client import Timing
from plumbob.trainer.inference.vllm import adapter_sync as adapters
from plumbob.trainer.inference.vllm.adapter_sync import LoraShape
from plumbob.trainer.inference.vllm.engine import VllmEngine
from plumbob.trainer.inference.vllm.launch import free_port
from plumbob.trainer.inference.vllm.weight_transport import NcclTransport
from plumbob.trainer.inference.weight_sync import SyncError
from plumbob.trainer.policy.loading import load_tokenizer
from vf_lookup.taskset import LookupConfig, LookupTaskset

HASTE = Timing(connect=1.0, request=0.5, total=2.0, patience=1.0, control=2.0, first_rest=0.05, longest_rest=0.2)


@contextlib.contextmanager
def connected(urls, **fields):
    engine = VllmEngine(settings_of(urls, **{"timing": HASTE, **fields}))
    try:
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def within(seconds):
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def draw(engine, sampling=DRAW):
    return asyncio.run(engine.generate(IDS, sampling))


def completions(double):
    return double.faults.paths().count("/inference/v1/generate")


# --- what may pass ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"status": 429, "count": 2}, {"status": 500, "count": 2}, {"cut": 2}, {"abort": 2}])
def test_what_may_pass_is_tried_again(fault):
    double = Double()
    with serving(double) as url, connected(url) as engine:
        before = completions(double)
        vars(double.faults).update(fault)
        assert draw(engine).token_ids
        assert completions(double) - before == 3


def test_a_busy_server_s_own_pause_is_kept():
    double = Double()
    with serving(double) as url, connected(url) as engine:
        vars(double.faults).update(status=429, count=1, retry_after="0.4")
        start = time.monotonic()
        draw(engine)
        assert time.monotonic() - start > 0.4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"status": 429, "count": 999}, "answered 429 .*overloaded; it is overloaded: lower --max-concurrent"),
        ({"status": 503, "count": 999}, "answered 503 .*see the server's log"),
        ({"cut": 999}, "broke off .*start it again with vf-vllm"),
        ({"slow": 60.0}, "did not answer /inference/v1/generate within 0.5 s; it hangs"),
    ],
)
def test_what_does_not_pass_is_told_in_time(fault, message):
    double = Double()
    with serving(double) as url, connected(url) as engine:
        vars(double.faults).update(fault)
        with within(3), pytest.raises(EngineError, match=f"the server at {url} {message}"):
            draw(engine)
        assert engine.in_flight == 0


def test_a_refusal_is_not_tried_again():
    double = Double()
    with serving(double) as url, connected(url) as engine:
        before = completions(double)
        vars(double.faults).update(status=400, count=1)
        with pytest.raises(EngineError, match="answered 400"):
            draw(engine)
        assert completions(double) - before == 1


def test_a_refusal_costs_nobody_else_anything():
    """A server that refuses hangs up, which the next request on that connection must not be told."""
    double = Double()
    with serving(double) as url, connected(url) as engine:
        for _ in range(5):
            vars(double.faults).update(status=400, count=1)
            with pytest.raises(EngineError, match="answered 400"):
                draw(engine)
            before = completions(double)
            with within(0.4):  # shorter than the rest that a failed server gets
                draw(engine)
            assert completions(double) - before == 1


@pytest.mark.parametrize("fault", [{"status": 500, "count": 999}, {"cut": 999}, {"slow": 60.0}])
def test_another_server_takes_over(fault):
    """The one at fault is left alone for a while, so most completions never wait for it."""
    with serving(bad := Double()) as a, serving(Double()) as b, connected((a, b)) as engine:
        vars(bad.faults).update(fault)

        async def many():
            return await asyncio.gather(*(engine.generate(IDS, DRAW) for _ in range(12)))

        with within(4):
            assert len(asyncio.run(many())) == 12


@pytest.mark.slow
def test_rollouts_with_faults_are_those_without(chat):
    """Groups of tool rollouts, seeded: every turn that fails for a while is drawn again, to the same tokens."""
    task = next(iter(LookupTaskset(LookupConfig()).load()))
    sampling = Sampling(max_tokens=48, stop_token_ids=chat.stop_token_ids, seed=3)

    async def group(engine):
        return await run_group(task, engine, chat, sampling, Limits(), 6)

    def rows(engine):
        return [(s.token_ids, s.reward) for s in (to_sample(t, "g") for t in asyncio.run(group(engine)))]

    double = Double()
    patient = replace(HASTE, request=60.0, total=120.0, patience=120.0)  # on a busy machine twelve faults take long
    with serving(double) as url, connected(url, seeds=True, timing=patient) as engine:
        expected = rows(engine)
        vars(double.faults).update(status=429, count=5, cut=3, abort=4)
        assert rows(engine) == expected


def test_failed_rollouts_say_so(chat):
    """A rollout whose server is gone is recorded as failed; its group has no half-drawn row to train on."""
    task = next(iter(LookupTaskset(LookupConfig()).load()))
    sampling = Sampling(max_tokens=48, stop_token_ids=chat.stop_token_ids, seed=3)
    double = Double()
    with connected_then_gone(double) as engine, within(6):
        traces = asyncio.run(run_group(task, engine, chat, sampling, Limits(), 4))
    assert len(traces) == 4 and not any(trace.ok for trace in traces)
    assert all("start it again with vf-vllm" in trace.errors[-1].message for trace in traces)


@contextlib.contextmanager
def connected_then_gone(double):
    with contextlib.ExitStack() as stack:
        with serving(double) as url:
            engine = stack.enter_context(connected(url))
        yield engine


@pytest.fixture
def chat():
    return Chat.of(load_tokenizer("tiny"))


# --- killed and started again -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_killed_in_mid_rollout_and_started_again():
    """Its adapter is loaded again before it is asked; with all weights it is not asked until the next sync."""
    patient = Timing(
        connect=1.0, request=5.0, total=20.0, patience=10.0, control=5.0, first_rest=0.05, longest_rest=0.2
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    adapter, weights = policy_of(peft=True), policy_of(peft=False)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        with serving(first := Double(), port):
            engine = stack.enter_context(connected(url, timing=patient))
            first.max_lora_rank = 0  # asked when an engine connects
            full = stack.enter_context(connected(url, lora=None, timing=patient))
            first.max_lora_rank = 16
            full.update(weights.trainable)
            engine.update(adapter.trainable)
            first.faults.slow = 60.0
            waiting = [threads.submit(draw, one) for one in (engine, full)]
            time.sleep(0.2)
        time.sleep(0.3)  # nobody listens now
        stack.enter_context(serving(Double(), port))
        assert waiting[0].result(20).policy_version == 1
        assert engine.check_parity(IDS, own_logprobs(adapter), 1e-3) < 1e-4
        with pytest.raises(EngineError, match="was restarted and does not have the trained weights"):
            waiting[1].result(20)
        assert full.update(weights.trainable).version == 2 and draw(full).policy_version == 2


def test_a_restart_that_nobody_noticed():
    """The adapter's name is unknown to the new process; it is loaded, and the completion drawn again."""
    double = Double()
    with serving(double) as url, connected(url) as engine:
        policy = policy_of(peft=True)
        engine.update(policy.trainable)
        name = engine.served.model
        del double.engines[name], double.adapters[name]
        assert draw(engine).policy_version == 1 and name in double.adapters
        assert engine.check_parity(IDS, own_logprobs(policy), 1e-3) < 1e-4


# --- syncs that fail --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"refuse_adapter": "no room for it"}, "answered 500 to /v1/load_lora_adapter: no room for it"),
        ({"unbound": 3}, r"has weights for 21 modules, but vLLM bound it to 18"),
    ],
)
def test_an_adapter_that_is_not_taken(fault, message):
    """One of two servers is enough: none keeps it, and the old one is served on."""
    with serving(good := Double()) as a, serving(bad := Double()) as b, connected((a, b)) as engine:
        policy = policy_of(peft=True)
        engine.update(policy.trainable)
        before = engine.served
        vars(bad.faults).update(fault)
        with pytest.raises(SyncError, match=message):
            engine.update(policy.trainable)
        assert engine.served == before and list(good.adapters) == list(bad.adapters) == [before.model]
        assert draw(engine).policy_version == 1


@pytest.mark.parametrize(("largest", "takes"), [(8, "only up to rank 8"), (0, "none")])
def test_an_adapter_of_too_high_a_rank_is_refused_before_anything_is_sampled(largest, takes):
    message = f"rank 16, .* takes {takes}; start vf-vllm with --sync lora --max-lora-rank 16"
    refused(Double(max_lora_rank=largest), message, lora=LoraShape(16, 16))
    with serving(Double(max_lora_rank=16)) as url, connected(url, lora=LoraShape(16, 16)):
        pass
    with serving(Double(max_lora_rank=0)) as url, connected(url, lora=None):
        pass


def test_servers_that_take_no_weights_or_each_in_another_way_are_refused():
    refused(Double(), "takes LoRA adapters, and this run trains all weights: start vf-vllm with --sync nccl", lora=None)
    one, other = Double(max_lora_rank=0), Double(max_lora_rank=0, takes="ipc")
    with (
        serving(one) as a,
        serving(other) as b,
        pytest.raises(UserError, match="takes weights by ipc and another does not"),
    ):
        VllmEngine(settings_of((a, b), lora=None))


def test_a_server_without_the_route_for_adapters_says_what_to_do():
    class Fixed(Double):
        async def load_lora(self, request, body):
            raise Refused(404, "Not Found")

    advice = "start the server with vf-vllm \\(--sync lora\\)"
    with serving(Fixed()) as url, connected(url) as engine, pytest.raises(SyncError, match=advice):
        engine.update(policy_of(peft=True).trainable)


@pytest.mark.parametrize("message", ["the rank of the drive failed", "No adapter is free", "error 404 in the sky"])
def test_words_in_a_server_s_message_do_not_choose_the_advice(message):
    double = Double()
    double.faults.refuse_adapter = message
    with serving(double) as url, connected(url) as engine, pytest.raises(SyncError, match=f"{message}$"):
        engine.update(policy_of(peft=True).trainable)


def test_a_server_that_cannot_see_the_files(tmp_path, monkeypatch):
    with serving(Double()) as url, connected(url, folder=tmp_path) as engine:
        monkeypatch.setattr(adapters, "write_adapter", lambda *_: (1, 1))  # the server's machine has no such folder
        with pytest.raises(SyncError, match="No adapter found .*give an --output-dir that both machines share"):
            engine.update({})


def test_an_adapter_that_changes_nothing_is_found_out():
    """The server takes it and claims to have bound all of it: only the log-probabilities tell."""
    with serving(Double()) as a, serving(lying := Double()) as b, connected((a, b)) as engine:
        lying.faults.ignore_adapter = True
        policy = policy_of(peft=True)
        engine.update(policy.trainable)
        with pytest.raises(SyncError, match=f"the vLLM server at {b} differ .* does not serve the weights"):
            engine.check_parity(IDS, own_logprobs(policy), 0.01)


def test_weights_that_do_not_arrive():
    double = Double(max_lora_rank=0)
    with serving(double) as url, connected(url, lora=None) as engine:
        double.faults.fail_update = "CUDA error: an illegal memory access was encountered"
        with pytest.raises(SyncError, match="illegal memory access"):
            engine.update(policy_of(peft=False).trainable)
        assert engine.version == 0 and double.faults.paths()[-1] == "/resume"
        double.faults.fail_update = None
        engine.update(policy_of(peft=False).trainable)
        assert draw(engine).policy_version == 1


def test_one_end_of_a_collective_that_refuses_frees_the_other():
    """NCCL's own calls wait for ever for a peer that will not come."""
    with serving(Double()) as url, connected(url) as engine:
        transport = NcclTransport(engine._control, (0, 32), torch.bfloat16, torch.device("cpu"))
        never = threading.Event()

        def refuse():
            engine._control.each("POST", "/finish_weight_update")

        with within(2), pytest.raises(SyncError, match="without a matching start_weight_update"):
            transport._together(refuse, never.wait)
        with within(2), pytest.raises(SyncError, match="NCCL failed in the trainer: RuntimeError"):
            transport._together(never.wait, lambda: torch.zeros(2) @ torch.zeros(3))
        assert transport._together(lambda: None, lambda: 7) == 7


@pytest.mark.slow
def test_a_server_that_hangs_in_a_sync_is_given_up():
    double = Double()
    with serving(double) as url, connected(url) as engine:
        double.faults.slow = 60.0
        with within(4), pytest.raises(EngineError, match="did not answer"):
            engine.score(IDS)


# --- servers that cannot be used --------------------------------------------------------------------------------------


def refused(double, message, **fields):
    with serving(double) as url, pytest.raises(UserError, match=message):
        VllmEngine(settings_of(url, timing=HASTE, **fields))


def test_wrong_models_are_refused_at_once():
    refused(Double(name="other"), "serves other, not the model to train; start it with --model tiny")


def test_servers_not_started_for_training_are_refused():
    refused(Double(scale_out=False), "Scale-out endpoints are disabled.*start the server with vf-vllm")
    double = Double()
    double.faults.raw_logprobs = True
    refused(double, "another distribution than it samples from .*--logprobs-mode processed_logprobs")


def test_a_prompt_after_which_all_tokens_are_equally_likely_is_no_reason_to_refuse():
    double = Double()
    with torch.no_grad():  # as of a padding token, whose embedding torch makes 0
        double.base.model.get_input_embeddings().weight[0] = 0
        for layer in double.base.model.model.layers:
            layer.self_attn.v_proj.bias.zero_()
    assert len(set(double.base.model(torch.tensor([[0]])).logits.flatten().tolist())) == 1
    with serving(double) as url:
        VllmEngine(settings_of(url)).close()


def test_no_server_at_all():
    with within(5), pytest.raises(UserError, match="cannot be reached .*start one with `vf-vllm --model tiny`"):
        VllmEngine(settings_of(f"http://127.0.0.1:{free_port()}", timing=HASTE))

    class Page(Double):
        async def models(self, request, body):
            return web.Response(text="<html>")

    refused(Page(), "cannot be read")
