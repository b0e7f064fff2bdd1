"""Engines behind HTTP: against our own server with the bundled policy, and against servers that misbehave."""

import asyncio
import json
import threading
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
from aiohttp import web
from plumbob.console import UserError
from plumbob.rollout import EngineError, MalformedCall, ParsedCall, Sampling
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.evaluation.results import read_records, rows_of
from plumbob.trainer.evaluation.run import run
from plumbob.trainer.inference.chat_server import ChatServer
from plumbob.trainer.inference.http_client import HttpThread, Timing
from plumbob.trainer.inference.token_servers import TokenServers, check_model, root_url
from plumbob.trainer.serving.server import load_server, running


@contextmanager
def in_a_thread(serve):
    """Run an async context manager that yields a URL in another thread; the engines bring loops of their own."""
    started, stop, urls = threading.Event(), threading.Event(), []

    async def main():
        async with serve() as url:
            urls.append(url)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert started.wait(60)
    try:
        yield urls[0]
    finally:
        stop.set()
        thread.join(30)


@pytest.fixture(scope="module")
def tiny_url():
    server = load_server("tiny", max_concurrent=16)
    with in_a_thread(lambda: running(server)) as url:
        yield f"{url}/v1"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["openai", "vllm"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_server_gives_the_rewards_of_the_process(tiny_url, tmp_path, engine, temperature):
    config = EvaluateConfig(
        envs=("lookup",),
        num_examples=12,
        max_tokens=48,
        temperature=temperature,
        output_dir=str(tmp_path),
        run_name="here",
    )
    assert run(config) == 0
    assert run(replace(config, engine=engine, base_url=tiny_url, run_name="there")) == 0

    def scores(name):
        return [(r.key, r.reward, r.scores) for r in rows_of(read_records(tmp_path / name / "lookup.jsonl"))]

    assert scores("there") == scores("here")
    assert len({reward for _, reward, _ in scores("here")}) == 2  # both outcomes, or the comparison says little


KEYS: list[str | None] = []
"""The keys that servers were shown."""


@contextmanager
def misbehaving(handler, models=("m",)):
    """A real server whose chat and generate routes are `handler(body, number of the request)`."""
    asked = []

    async def post(request):
        KEYS.append(request.headers.get("Authorization"))
        asked.append(await request.json())
        return await handler(asked[-1], len(asked))

    async def cards(request):
        return web.json_response({"data": [{"id": name} for name in models]} if models else {"hello": 1})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", post)
    app.router.add_post("/inference/v1/generate", post)
    app.router.add_get("/v1/models", cards)

    class Serving:
        async def __aenter__(self):
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", 0).start()
            return f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

        async def __aexit__(self, *exc):
            await self.runner.cleanup()

    with in_a_thread(Serving) as url:
        yield url, asked


def chat_answer(**message):
    finish = message.pop("finish_reason", "stop")
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


def token_answer(ids=(5, 6), finish="stop", tokens=None, logprob=-0.5):
    content = [{"token": t, "logprob": logprob} for t in (tokens or [f"token_id:{i}" for i in ids])]
    return {"choices": [{"token_ids": list(ids), "finish_reason": finish, "logprobs": {"content": content}}]}


def always(body, status=200):
    async def handler(asked, number):
        return web.json_response(body, status=status) if not isinstance(body, str) else web.Response(text=body)

    return handler


def after(failures, status, body):
    async def handler(asked, number):
        if number <= failures:
            return web.json_response({"error": {"message": "busy"}}, status=status, headers={"retry-after": "0"})
        return web.json_response(body)

    return handler


TIMING = Timing(request=20.0, total=20.0, patience=5.0, first_rest=0.05)


def say(url, sampling=None, tools=()):
    with closing(HttpThread(TIMING)) as http:
        chat = ChatServer(http, root_url(url), "m")
        return asyncio.run(chat.reply([{"role": "user", "content": "hi"}], tools, sampling or Sampling()))


def draw(url, **timing):
    with closing(HttpThread(replace(TIMING, **timing), "s3cret")) as http:
        servers = TokenServers(http, [root_url(url)], "m")
        return asyncio.run(servers.generate([1, 2], Sampling(stop_token_ids=(6,), seed=3)))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(status):
    with misbehaving(after(2, status, chat_answer(content=" done "))) as (url, asked):
        assert say(url).content == "done" and len(asked) == 3
    with misbehaving(after(2, status, token_answer())) as (url, asked):
        assert draw(url).token_ids == (5, 6) and len(asked) == 3


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_not(status):
    body = {"error": {"message": "the prompt is too long"}}
    with misbehaving(always(body, status)) as (url, asked):
        with pytest.raises(EngineError, match="too long"):
            say(url)
        with pytest.raises(EngineError, match=f"{status}.*too long"):
            draw(url)
        assert len(asked) == 2


@pytest.mark.slow
def test_a_server_that_stays_down_and_one_that_hangs():
    with pytest.raises(EngineError, match="the server at http://127.0.0.1:1 cannot be reached"):
        say("http://127.0.0.1:1/v1")

    async def hang(asked, number):
        await asyncio.sleep(30)

    with misbehaving(hang) as (url, _), pytest.raises(EngineError, match="did not answer .* within 0.2 s"):
        draw(url, request=0.2, patience=0.5)


def test_a_completion_that_the_server_breaks_off_is_asked_for_again():
    async def handler(asked, number):
        return web.json_response(token_answer(finish="abort" if number == 1 else "stop"))

    with misbehaving(handler) as (url, asked):
        assert draw(url).token_ids == (5, 6) and len(asked) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html>", "cannot be read"),
        ({"choices": []}, "cannot be read"),
        (token_answer(tokens=["token_id:5", "token_id:9"]), "do not belong"),
        (token_answer(tokens=["a", "b"]), "do not belong"),
        (token_answer(logprob=float("nan")), "no log-probability"),
    ],
)
def test_answers_that_cannot_be_trained_or_scored(body, message):
    with misbehaving(always(body)) as (url, _), pytest.raises(EngineError, match=message):
        draw(url)


def test_calls_reasoning_and_finish_reasons_are_read():
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"a": '}},
    ]
    message = {"tool_calls": calls, "reasoning_content": "hm", "finish_reason": "tool_calls"}
    with misbehaving(always(chat_answer(**message))) as (url, _):
        reply = say(url)
    good, bad = reply.calls
    assert (
        good == ParsedCall("f", {"a": 1}) and isinstance(bad, MalformedCall) and (bad.name, bad.text) == ("f", '{"a": ')
    )
    assert (reply.content, reply.reasoning, reply.finish_reason, reply.prompt_tokens) == ("", "hm", "stop", 5)
    with misbehaving(always(chat_answer(content="cut", finish_reason="length"))) as (url, _):
        assert say(url).finish_reason == "length"


def test_servers_that_bend_the_format_are_read():
    odd = chat_answer(
        content=[{"type": "text", "text": "so"}, {"type": "text", "text": "be it"}],
        tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    )
    odd["usage"] = {"prompt_tokens": None, "completion_tokens": None}
    with misbehaving(always(odd)) as (url, _):
        reply = say(url)
    assert reply.content == "so\nbe it" and reply.calls == (ParsedCall("f", {"a": 1}),)
    assert (reply.prompt_tokens, reply.completion_tokens) == (0, 0)
    with misbehaving(always({**odd, "choices": [{"message": None}]})) as (url, _), pytest.raises(EngineError):
        say(url)


def test_settings_reach_the_server_and_defaults_stay_out():
    with misbehaving(always(chat_answer(content="x"))) as (url, asked):
        say(url)
        say(url, Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3), [{"type": "function"}])
    assert set(asked[0]) == {"model", "messages", "max_tokens", "temperature"}
    assert asked[1].items() >= {
        "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
    }.items()  # fmt: skip
    assert json.dumps(asked[1]["tools"]) == '[{"type": "function"}]'


def test_connecting_tells_what_is_wrong():
    def connect(url, model):
        with closing(HttpThread(TIMING)) as http:
            check_model(http, root_url(url, "--base-url"), EvaluateConfig(envs=("lookup",), model=model, base_url=url))

    with misbehaving(always({}), models=("a", "b")) as (url, _):
        with pytest.raises(UserError, match="has no model 'm'; it has a, b"):
            connect(url, "m")
        connect(url, "a")
        with pytest.raises(UserError, match="not the URL of a server; give one like"):
            connect("ftp://x", "m")
        with pytest.raises(UserError, match="no server answers at http://127.0.0.1:1/v1 .*start one"):
            connect("http://127.0.0.1:1/v1", "m")
    with (
        misbehaving(always({}), models=None) as (url, _),
        pytest.raises(UserError, match="not as an OpenAI-compatible"),
    ):
        connect(url, "m")


def test_a_path_before_v1_is_kept():
    assert root_url("http://host:1/proxy/v1/") == "http://host:1/proxy"
    assert root_url("host:8000") == "http://host:8000"


def test_the_key_goes_to_the_server():
    async def handler(asked, number):
        return web.json_response(token_answer())

    with misbehaving(handler) as (url, _):
        draw(url)
        assert KEYS[-1] == "Bearer s3cret"
