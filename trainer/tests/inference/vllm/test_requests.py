"""A server is asked, not provoked: no request can end it, and every request says how it is to be sampled."""

import asyncio
import contextlib
import dataclasses

import pytest
from plumbob.console import UserError
from plumbob.testing.vllm_double import Double, serving
from plumbob.testing.vllm_policies import DRAW, IDS, VOCAB, settings_of
from plumbob.trainer.inference import generate_api
from plumbob.trainer.inference.http_client import HttpThread, ServerFailure, Timing
from plumbob.trainer.inference.token_servers import TokenServers
from plumbob.trainer.inference.vllm.adapter_sync import LoraShape
from plumbob.trainer.inference.vllm.engine import VllmEngine


def connected(url, **fields):
    return contextlib.closing(VllmEngine(settings_of(url, **fields)))


def refused(double, message):
    with serving(double) as url, pytest.raises(UserError, match=message):
        VllmEngine(settings_of(url))


@pytest.mark.parametrize("vocab_size", [608, 609, 611, 640])
def test_another_vocabulary_is_refused_and_no_server_is_asked_an_id_that_could_end_it(vocab_size):
    """vLLM passes on every id that its tokenizer has: one beyond the model's would end the server."""
    double = Double(vocab_size=vocab_size)
    refused(double, f"a model with {vocab_size} token ids, and the trained model has 610; .*the same --model")
    assert not double.dead and asked_ids(double) < set(range(min(vocab_size, VOCAB)))


@pytest.mark.parametrize("rank", [16, 0])
def test_connecting_sends_no_id_outside_the_vocabulary(rank):
    """Where the tokenizer's vocab_size equals the model's, as of Llama 2, Mistral and SmolLM2, id vocab_size is fatal."""
    double = Double(max_lora_rank=rank)
    assert len(double.tokenizer) == double.base.vocab_size == VOCAB
    with serving(double) as url, connected(url, lora=LoraShape(8, 16) if rank else None) as engine:
        asyncio.run(engine.generate(IDS, DRAW))
        assert not double.dead and asked_ids(double) < set(range(VOCAB))


def asked_ids(double):
    return {token for path, body in double.faults.seen if path == generate_api.PATH for token in body["token_ids"]}


def test_a_server_that_cannot_be_asked_is_refused():
    double = Double(extension=False)
    refused(double, "cannot be asked how many token ids .* this version's vf-vllm, without --no-dev-endpoints")
    assert not double.dead


def test_the_double_dies_as_vllm_does():
    """Of an id that its check lets through and its model lacks; one beyond both is refused."""
    double = Double()
    with serving(double) as url, contextlib.closing(HttpThread(Timing())) as http:

        def send(token):
            body = {"model": "tiny", "token_ids": [5, token], "sampling_params": {"max_tokens": 1, "temperature": 1.0}}
            return http.result(http.request("POST", url, generate_api.PATH, body))

        assert send(VOCAB - 1)
        with pytest.raises(ServerFailure, match="400 .*Token id 611 is out of vocabulary"):
            send(VOCAB + 1)
        assert not double.dead and send(0)
        with pytest.raises(ServerFailure, match="500 .*EngineCore encountered an issue"):
            send(VOCAB)
        for _ in range(2):
            with pytest.raises(ServerFailure) as gone:
                send(0)
            assert gone.value.gone


def test_every_request_states_every_value_that_changes_what_is_sampled():
    """A server may have other defaults. These are all values that vLLM takes from a generation_config.json, and more."""
    double = Double()
    with serving(double) as url, connected(url) as engine:
        asyncio.run(engine.generate(IDS, DRAW))
        engine.score(IDS)
        servers = TokenServers(engine._http, [url], "tiny")
        asyncio.run(servers.generate(IDS, dataclasses.replace(DRAW, top_p=0.9, top_k=7, min_p=0.1)))
    requests = [body["sampling_params"] for path, body in double.faults.seen if path == generate_api.PATH]
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "n": 1}
    for sent in requests:
        assert {"temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids"} <= set(sent)
        assert {name: sent[name] for name in neutral} == neutral and sent["ignore_eos"] is True and sent["stop"] == []
    assert {(sent["top_p"], sent["min_p"]) for sent in requests} == {(1.0, 0.0), (0.9, 0.1)}
    assert requests[-1]["top_k"] == 7 and requests[-1]["stop_token_ids"] == [2]
