"""What the server and its command refuse, and that a request that is refused harms no other."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.rollout import EngineError, Sampling
from plumbob.trainer.cli import serve
from plumbob.trainer.serving.openai_api import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiError,
    Call,
    ChatRequest,
    Message,
    read_request,
    template_messages,
)
from plumbob.trainer.serving.server import Server

HELLO = [{"role": "user", "content": "Start key: 1234"}]
ASK = {"model": "tiny", "messages": HELLO, "max_tokens": 8}
TOKENS = "/inference/v1/generate"


def nested(depth):
    inside = {}
    for _ in range(depth):
        inside = {"a": [inside]}
    return inside


def offered(**function):
    return {**ASK, "tools": [{"type": "function", "function": function}]}


BAD = [
    (b"{", 400, "the request is not JSON that can be read"),
    (b"\xff", 400, "the request is not JSON that can be read"),
    (b"[" * 100_000, 400, "the request is not JSON that can be read"),
    (b"[" + b"1" * 5000 + b"]", 400, "the request is not JSON that can be read"),
    (b'{"model": "a\\ud800b"}', 400, "not valid Unicode: a lone surrogate, '\\ud800'"),
    ({**ASK, "messages": [{"role": "user", "content": "a\ud800b"}]}, 400, "not valid Unicode: a lone surrogate"),
    ({**ASK, "tools": [{"type": "function", "function": {"name": "\udc00"}}]}, 400, "not valid Unicode: a lone"),
    (b'{"model": "a\xed\xa0\x80b"}', 400, "not valid Unicode: a lone surrogate"),
    ([], 400, "Input should be"),
    ({"messages": HELLO}, 400, "model: Field required"),
    ({**ASK, "model": "gpt"}, 404, "The model `gpt` does not exist; this server has `tiny`"),
    ({**ASK, "messages": []}, 400, "messages: "),
    ({**ASK, "messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
    ({**ASK, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "messages.0"),
    ({**ASK, "temperature": -1}, 400, "temperature: "),
    ({**ASK, "temperature": "hot"}, 400, "temperature: "),
    ({**ASK, "n": 0}, 400, "n: "),
    ({**ASK, "stop": ["x"]}, 400, 'this server does not support stop=["x"]; leave it out'),
    ({**ASK, "tool_choice": "required"}, 400, "does not support tool_choice"),
    ({**ASK, "response_format": {"type": "json_object"}}, 400, "does not support response_format"),
    ({**ASK, "messages": [{"role": "user", "content": "x" * 5000}]}, 400, "maximum context length is 1024 tokens"),
    ({**ASK, "messages": [{"role": "user", "content": "x" * 50_000}]}, 400, "the request has 50042 characters of text"),
    ({**ASK, "messages": HELLO * 50_000}, 413, "a request to this server may have at most"),
    (offered(name="f", parameters=nested(400)), 400, "its lists and objects are nested more than 63 deep"),
    ({**ASK, "chat_template_kwargs": nested(40)}, 400, "its lists and objects are nested more than 63 deep"),
    (offered(), 400, "tools.0.function: a tool needs a name, as text"),
    (offered(name=5), 400, "tools.0.function: a tool needs a name, as text"),
    (offered(name="f", parameters="x"), 400, "and its parameters, if it has any, as an object"),
    ({**ASK, "stop": "x" * 2000}, 400, "xxx..."),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD, ids=[case[2][:40] for case in BAD])
def test_a_request_that_cannot_be_answered(post, body, status, message):
    got, answer = post("/v1/chat/completions", body)
    assert got == status
    assert message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_the_number_of_messages_and_tools_is_limited(chat):
    for field, most, one in (("messages", MAX_MESSAGES, HELLO[0]), ("tools", MAX_TOOLS, offered(name="f")["tools"][0])):
        read_request(ChatRequest, json.dumps({**ASK, field: [one] * most}).encode())
        with pytest.raises(ApiError, match=f"{field}: List should have at most {most} items .* not {most + 1}"):
            read_request(ChatRequest, json.dumps({**ASK, field: [one] * (most + 1)}).encode())


@pytest.mark.parametrize("arguments", ["[" * 100_000, json.dumps(nested(400))], ids=["unclosed", "nested"])
def test_arguments_that_are_nested_too_deep_stay_the_text_that_they_are(chat, arguments):
    call = Call.model_validate({"function": {"name": "lookup", "arguments": arguments}})
    (message,) = template_messages([Message(role="assistant", tool_calls=[call])], chat)
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert chat.prompt([*HELLO, message], []).token_ids


def test_a_surrogate_within_a_call_s_arguments_is_no_failure(post):
    """A model may write one; the call then comes back with the history, as the text it was."""
    call = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "\\ud800"}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    status, answer = post("/v1/chat/completions", {**ASK, "messages": [*HELLO, said, *HELLO]})
    assert status == 200, answer


@pytest.mark.parametrize("token", [640, 99999999, 2**70])
def test_a_token_id_that_the_model_does_not_have_fails_no_other_request(with_http, server, token):
    """It once was an IndexError for the whole batch, and would have ended a GPU's process."""
    vocab_size = server.engine.model.get_input_embeddings().num_embeddings
    token = max(token, vocab_size)

    async def main(http):
        async def send(path, body):
            async with http.post(path, json=body) as response:
                return response.status, await response.json()

        async def when_busy():
            while not (server.engine._active or server.engine._waiting):
                await asyncio.sleep(0)
            return await send(TOKENS, {"token_ids": [5, token, 6], "sampling_params": {"n": 2}})

        asked = [send("/v1/chat/completions", {**ASK, "seed": i, "max_tokens": 64}) for i in range(3)]
        return await asyncio.gather(when_busy(), *asked)

    (status, answer), *others = with_http(main)
    assert [other for other, _ in others] == [200] * 3
    assert status == 400
    assert answer["error"]["message"] == f"there is no token id {token}: the model's ids are 0 to {vocab_size - 1}"


def test_the_engine_takes_the_ids_that_its_model_has(server):
    async def draw(token):
        return await server.engine.generate([5, token], Sampling(max_tokens=1))

    last = server.engine.vocab_size - 1
    assert len(asyncio.run(draw(last)).token_ids) == len(asyncio.run(draw(0)).token_ids) == 1
    for token in (-1, last + 1):
        with pytest.raises(EngineError, match=f"there is no token id {token}"):
            asyncio.run(draw(token))


def test_paths_and_methods_that_do_not_exist_are_error_objects(with_http):
    async def main(http):
        async with http.get("/v1/nothing") as missing, http.get("/v1/chat/completions") as wrong:
            return missing.status, await missing.json(), wrong.status, await wrong.json()

    missing, said, wrong, why = with_http(main)
    assert (missing, wrong) == (404, 405)
    assert said["error"]["message"] and why["error"]["message"]


def test_an_engine_that_fails_is_a_server_error(with_http, server):
    class Broken:
        async def generate(self, prompt_ids, sampling):
            raise RuntimeError("boom")

    async def main(http):
        async with http.post("/v1/chat/completions", json=ASK) as response:
            return response.status, await response.json()

    status, answer = with_http(main, Server(Broken(), server.chat, model="tiny", max_length=server.max_length))
    assert status == 500 and answer["error"]["message"] == "RuntimeError: boom"


# --- the command ----------------------------------------------------------------------------------------------------


def refused(ended, *args):
    code, out, err = ended("serve", serve.app, *args)
    assert code == 2 and out == ""
    return err.splitlines()[-1]  # in this process, transformers may show its progress before it


def test_a_port_that_is_taken_is_one_sentence(ended):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refused(ended, "--port", port)
    assert message == f"serve: cannot listen on 127.0.0.1:{port}: Address already in use; try --port 0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "./nowhere"], "there is no model in './nowhere': it has no config.json"),
        (["--host", "nowhere.invalid", "--port", "0"], "cannot listen on nowhere.invalid:0: Name or service not known"),
        (["--max-context", "100000000"], "--max-context 100000000 is more than the 4096 positions of the model"),
        (["--port", "70000"], "--port"),
        (["--model", ""], "--model is empty; give a model's name or folder"),
        (["--model", __file__], "it has no config.json"),
        (["--host", "a" * 80], "is not a host name or an address"),
        (
            ["--allow-host", "http://gpu-box:8000"],
            "takes a host name such as gpu-box, without scheme and port, so not 'http://gpu-box:8000'",
        ),
        (["--allow-host", ""], "--allow-host takes a host name such as gpu-box, without scheme and port, so not ''"),
    ],
)
def test_a_user_s_mistake_is_one_sentence(ended, args, message):
    said = refused(ended, *args)
    assert message in said and said.startswith("serve: ")


@pytest.mark.slow
def test_it_says_where_it_serves_and_ends_when_asked():
    command = [Path(sys.executable).parent / "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r"serving tiny at http://127.0.0.1:(\d+)/v1", process.stdout.readline())[1])
        example = process.stdout.readline()
        socket.create_connection(("127.0.0.1", port)).close()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=600) == 0
        *working, last = process.stderr.read().splitlines()
        assert last == "stopped" and all("loading" in line for line in working)
    finally:
        process.kill()
        process.communicate()
    assert f"vf-eval vf_lookup -m tiny --client.base-url http://127.0.0.1:{port}/v1" in example
