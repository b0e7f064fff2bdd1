"""The real server over the bundled policy: what it answers, what it refuses, and that it says what a rollout would."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest
from plumbob.hub.console import run_app
from plumbob.rollout import Limits, MalformedCall, Sampling, run_rollout
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.trainer import chat_api, serve
from plumbob.trainer.server import Server, load_server, running
from vf_lookup.taskset import LookupConfig, LookupTaskset

MAX_CONTEXT = 1024
HELLO = [{"role": "user", "content": "Start key: 1234"}]
ASK = {"model": "tiny", "messages": HELLO, "max_tokens": 8}
LOOKUP = {
    "type": "function",
    "function": {"name": "lookup", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def server():
    return load_server("tiny", max_concurrent=8, max_context=MAX_CONTEXT)


@pytest.fixture
def with_http(server):
    """Run a coroutine function of (http session, root URL) against the running server."""

    def run(main, served=server):
        async def outer():
            async with running(served) as url, aiohttp.ClientSession(base_url=url) as http:
                return await main(http)

        return asyncio.run(outer())

    return run


@asynccontextmanager
async def sdk(server):
    async with running(server) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
def post(with_http):
    def send(path, body):
        async def main(http):
            data = body if isinstance(body, bytes) else json.dumps(body)
            async with http.post(path, data=data) as response:
                return response.status, await response.json()

        return with_http(main)

    return send


@pytest.fixture
def ask(post):
    def send(**fields):
        status, answer = post("/v1/chat/completions", {**ASK, **fields})
        assert status == 200, answer
        return answer

    return send


# --- what it says ---------------------------------------------------------------------------------------------------


def test_health_and_models(with_http):
    async def main(http):
        async with http.get("/health") as health, http.get("/v1/models") as models:
            return health.status, await models.json()

    status, models = with_http(main)
    assert status == 200
    assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("tiny", MAX_CONTEXT)]


def test_a_completion_says_why_it_ended_and_what_it_took(ask, server):
    answer = ask(temperature=0, max_tokens=3)
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["role"] == "assistant"
    prompt = server.chat.prompt(HELLO, []).token_ids
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 3,
        "total_tokens": len(prompt) + 3,
    }


def test_a_seed_makes_a_reply_reproducible_and_choices_differ(ask):
    def texts(**fields):
        return [choice["message"]["content"] for choice in ask(temperature=5.0, n=4, **fields)["choices"]]

    assert texts(seed=1) == texts(seed=1)
    assert len(set(texts(seed=1))) > 1
    assert texts(seed=1)[0] == ask(temperature=5.0, seed=1)["choices"][0]["message"]["content"]
    assert texts(seed=2) != texts(seed=1)
    assert texts() != texts()


def test_what_is_left_out_takes_openai_s_defaults(server):
    asked = chat_api.read_request(chat_api.ChatRequest, json.dumps({"model": "tiny", "messages": HELLO}).encode())
    assert asked.choices(100, (2,)) == [Sampling(max_tokens=100, temperature=1.0, top_p=1.0, stop_token_ids=(2,))]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 7, "max_tokens": None}, 7),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
        ({"max_tokens": 5000}, 100),
    ],
)
def test_names_and_bounds_of_the_token_limit(fields, expected):
    asked = chat_api.read_request(chat_api.ChatRequest, json.dumps({**ASK, **fields}).encode())
    assert asked.choices(100, ())[0].max_tokens == expected


def test_log_probabilities_are_the_engine_s(ask, server):
    answer = ask(temperature=1.0, seed=3, logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    prompt = server.chat.prompt(HELLO, []).token_ids
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=3, stop_token_ids=server.chat.stop_token_ids)
    drawn = asyncio.run(server.engine.generate(prompt, sampling))
    assert [entry["logprob"] for entry in content] == pytest.approx(list(drawn.logprobs), abs=1e-5)
    assert "".join(entry["token"] for entry in content) == server.chat.tokenizer.decode(list(drawn.token_ids))
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)


def test_concurrent_requests_are_answered_as_one_by_one(with_http):
    bodies = [
        {**ASK, "messages": [{"role": "user", "content": f"Start key: {1000 + i}"}], "temperature": 1.0, "seed": i}
        for i in range(24)  # three times as many as the engine has slots
    ]

    async def main(http):
        async def one(body):
            async with http.post("/v1/chat/completions", json=body) as response:
                return (await response.json())["choices"][0]["message"]

        together = await asyncio.gather(*map(one, bodies))
        return together, [await one(body) for body in bodies]

    together, alone = with_http(main)
    for message in [*together, *alone]:
        for call in message.get("tool_calls", []):
            call.pop("id")
    assert together == alone and len({json.dumps(message) for message in together}) > 1


def test_a_client_that_goes_away_frees_its_slot(with_http, server):
    async def main(http):
        endless = {**ASK, "max_tokens": None, "temperature": 100.0, "seed": 0}
        with pytest.raises(TimeoutError):
            await http.post("/v1/chat/completions", json=endless, timeout=aiohttp.ClientTimeout(total=0.1))
        async with asyncio.timeout(5):
            while server.engine._active or server.engine._waiting:
                await asyncio.sleep(0.01)

    with_http(main)


# --- tools ----------------------------------------------------------------------------------------------------------


def lookup_tasks(count):
    return list(LookupTaskset(LookupConfig(id="vf_lookup", split="eval", num_examples=count)))


def test_a_conversation_over_the_server_is_the_rollout_in_this_process(server):
    """Greedy, with the openai package: the same calls, the same reply, from the same prompt ids at every turn."""
    prompts = []

    class Recording:
        async def generate(self, prompt_ids, sampling):
            prompts.append(list(prompt_ids))
            return await server.engine.generate(prompt_ids, sampling)

    async def over_http(client, task):
        box = await adapter.open_tools(task, adapter.new_trace(task))
        messages = [adapter.to_wire(message) for message in adapter.initial_messages(task)]
        while True:
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, tools=box.schemas, temperature=0, max_tokens=64
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return messages
            assert answer.choices[0].finish_reason == "tool_calls"
            for call in message.tool_calls:
                result = await box.tools[call.function.name].call(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    async def main():
        recording = Server(Recording(), server.chat, model="tiny", max_length=MAX_CONTEXT)
        async with sdk(recording) as client:
            for task in lookup_tasks(6):
                prompts.clear()
                theirs = await asyncio.create_task(over_http(client, task))
                asked, sampling = list(prompts), Sampling(temperature=0, max_tokens=64)
                trace = await run_rollout(task, server.engine, server.chat, sampling, Limits())
                row, ends = trace.branches[0].token_ids, [len(ids) for ids in asked]
                assert asked == [row[:end] for end in ends]
                assert len(asked) == trace.num_turns
                assert [m["content"] for m in theirs if m["role"] == "tool"] == [m.content for m in trace.tool_messages]
                assert theirs[-1]["content"].strip() == trace.last_reply

    asyncio.run(main())


def parsed(chat, text):
    """A completion of this text, over the wire and back into the prompt of the next request."""
    ids = tuple(chat.tokenizer.encode(f"{text}{chat.closer}", add_special_tokens=False))
    completion = chat_api.Completion(ids, (0.0,) * len(ids), "stop")
    choice = chat_api.chat_choice(0, completion, chat, has_tools=True, logprobs=False)
    history = [chat_api.Message.model_validate(choice["message"])]
    return choice, chat_api.template_messages(history, chat)[0]


def test_a_call_is_told_and_rendered_again_as_it_was(chat):
    text = 'Well: <tool_call>{"name": "lookup", "arguments": {"key": "ü"}}</tool_call>'
    choice, again = parsed(chat, text)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Well:"
    assert call["function"]["name"] == "lookup" and json.loads(call["function"]["arguments"]) == {"key": "ü"}
    assert again["tool_calls"][0]["function"] == {"name": "lookup", "arguments": {"key": "ü"}}


@pytest.mark.parametrize("text", ["<tool_call>{oops}</tool_call>", '<tool_call>{"name": "lookup"'])
def test_an_unreadable_call_is_told_as_a_rollout_records_it_and_rendered_verbatim(chat, text):
    reply = chat.parse(chat.tokenizer.encode(text), has_tools=True)[1]
    assert isinstance(reply.calls[0], MalformedCall)
    choice, again = parsed(chat, text)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "", "arguments": reply.calls[0].text}
    assert again["content"] == text and "tool_calls" not in again


def test_without_tools_nothing_is_read_as_a_call(chat):
    ids = tuple(chat.tokenizer.encode("<tool_call>{}</tool_call>"))
    choice = chat_api.chat_choice(
        0, chat_api.Completion(ids, (0.0,) * len(ids), "stop"), chat, has_tools=False, logprobs=False
    )
    assert choice["message"] == {"role": "assistant", "content": "<tool_call>{}</tool_call>"}


def test_tool_choice_none_offers_no_tools(ask):
    with_tools, without = (ask(tools=[LOOKUP], tool_choice=choice) for choice in ("auto", "none"))
    assert with_tools["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


def test_a_stream_holds_the_same_answer(server):
    body = {**ASK, "temperature": 0, "tools": [LOOKUP], "max_tokens": 64}

    async def main():
        async with sdk(server) as client:
            whole = await client.chat.completions.create(**body)
            stream = await client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
            return whole, [chunk async for chunk in stream]

    whole, (start, end, last) = asyncio.run(main())
    (choice,) = whole.choices
    assert start.choices[0].delta.content == choice.message.content
    calls = [
        [call.function.model_dump() for call in message.tool_calls]
        for message in (choice.message, start.choices[0].delta)
    ]
    assert calls[0] == calls[1] != []
    assert end.choices[0].finish_reason == choice.finish_reason == "tool_calls"
    assert last.usage == whole.usage and last.choices == []


# --- token ids ------------------------------------------------------------------------------------------------------


def test_the_token_route_is_the_engine(post, server):
    prompt = server.chat.prompt(HELLO, []).token_ids
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "n": 2, "logprobs": 1, "skip_special_tokens": False}
    status, answer = post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": params})
    assert status == 200 and answer["request_id"]
    for i, choice in enumerate(answer["choices"]):
        seed = 5 if i == 0 else chat_api.derive_seed(5, i)
        sampling = Sampling(max_tokens=12, seed=seed, stop_token_ids=server.chat.stop_token_ids)
        drawn = asyncio.run(server.engine.generate(prompt, sampling))
        assert (choice["index"], choice["finish_reason"]) == (i, drawn.finish_reason)
        assert choice["token_ids"] == list(drawn.token_ids)
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in drawn.token_ids]
        assert [entry["logprob"] for entry in content] == pytest.approx(list(drawn.logprobs), abs=1e-5)


def test_the_token_route_stops_where_it_is_told(post, server):
    prompt = server.chat.prompt(HELLO, []).token_ids
    greedy = {"temperature": 0, "max_tokens": 4}
    _, answer = post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": greedy})
    second = answer["choices"][0]["token_ids"][1]
    stopping = {**greedy, "stop_token_ids": [second]}
    _, answer = post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": stopping})
    assert answer["choices"][0]["token_ids"][-1] == second and answer["choices"][0]["finish_reason"] == "stop"


# --- what it refuses ------------------------------------------------------------------------------------------------

BAD = [
    (b"{", 400, "the request is not valid JSON"),
    (b"\xff", 400, "the request is not valid JSON"),
    (b"[" * 100_000, 400, "the request is not valid JSON"),
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
]


@pytest.mark.parametrize(("body", "status", "message"), BAD, ids=[case[2][:40] for case in BAD])
def test_a_request_that_cannot_be_answered(post, body, status, message):
    got, answer = post("/v1/chat/completions", body)
    assert got == status
    assert message in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


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

    status, answer = with_http(main, Server(Broken(), server.chat, model="tiny", max_length=MAX_CONTEXT))
    assert status == 500 and answer["error"]["message"] == "RuntimeError: boom"


# --- the command ----------------------------------------------------------------------------------------------------


def refused(capsys, *args):
    with pytest.raises(SystemExit) as exit_:
        run_app("serve", serve.app, list(args))
    output = capsys.readouterr()
    assert exit_.value.code == 2 and output.out == ""
    return output.err.splitlines()[-1]  # in this process, transformers may show its progress before it


def test_a_port_that_is_taken_is_one_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refused(capsys, "--port", port)
    assert message == f"serve: cannot listen on 127.0.0.1:{port}: Address already in use; try --port 0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "./nowhere"], "there is no model in './nowhere': it has no config.json"),
        (["--host", "nowhere.invalid", "--port", "0"], "cannot listen on nowhere.invalid:0: Name or service not known"),
        (["--max-context", "100000000"], "--max-context 100000000 is more than the model's"),
        (["--port", "70000"], "--port"),
    ],
)
def test_a_user_s_mistake_is_one_sentence(capsys, args, message):
    said = refused(capsys, *args)
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
        assert process.wait(timeout=20) == 0 and process.stderr.read() == "stopped\n"
    finally:
        process.kill()
        process.communicate()
    assert f"vf-eval vf_lookup -m tiny --client.base-url http://127.0.0.1:{port}/v1" in example
