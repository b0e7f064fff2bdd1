"""Nothing that a request holds keeps the event loop: what is long is refused or worked on beside it."""

import asyncio
import json
import threading
from urllib.parse import urlsplit

import pytest
from plumbob.trainer.serving import openai_api
from plumbob.trainer.serving.server import Server, running

HELLO = [{"role": "user", "content": "Start key: 1234"}]
ASK = {"model": "tiny", "messages": HELLO, "max_tokens": 8}
TOKENS = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
CHAT = "/v1/chat/completions"


class Held:
    """Functions that go on only when they are let: each call waits until /health has been answered meanwhile."""

    def __init__(self):
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.calls: list[str] = []

    def __call__(self, name, function):
        def waiting(*args, **kwargs):
            self.calls.append(name)
            self.begun.release()
            assert self.go_on.acquire(timeout=30), f"the event loop did not turn during {name}"
            return function(*args, **kwargs)

        return waiting


class HeldChat:
    """A chat that renders and parses under `Held`."""

    def __init__(self, chat, held):
        self._chat = chat
        self.prompt, self.parse = held("prompt", chat.prompt), held("parse", chat.parse)

    def __getattr__(self, name):
        return getattr(self._chat, name)


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        (CHAT, {**ASK, "n": 2}, ["read_request", "prompt", "parse", "parse", "chat_completion"]),
        (CHAT, {**ASK, "stream": True}, ["read_request", "prompt", "parse", "chat_completion", "stream_events"]),
        (CHAT, {**ASK, "messages": HELLO * 100}, ["read_request", "prompt"]),  # refused: it fills the context
        ("/inference/v1/generate", TOKENS, ["read_request", "generate_choice"]),
    ],
    ids=["chat", "stream", "refused", "tokens"],
)
def test_other_requests_are_answered_during_all_that_is_done_with_a_text(
    with_http, server, monkeypatch, path, body, work
):
    held = Held()
    for name in ("read_request", "chat_completion", "stream_events", "generate_choice"):
        monkeypatch.setattr(openai_api, name, held(name, getattr(openai_api, name)))

    async def main(http):
        async def send():
            async with http.post(path, json=body) as response:
                return response.status

        sent = asyncio.create_task(send())
        for _ in work:
            assert await asyncio.to_thread(held.begun.acquire, timeout=60)
            async with http.get("/health") as health:
                assert health.status == 200
            held.go_on.release()
        return await sent

    held_server = Server(server.engine, HeldChat(server.chat, held), model="tiny", max_length=server.max_length)
    assert with_http(main, held_server) == (400 if work[-1] == "prompt" else 200)
    assert held.calls == work


def never(*_):
    raise AssertionError("a text that cannot fit was rendered")


@pytest.fixture
def unrendered(server):
    """A server that fails if it renders anything."""
    served = Server(server.engine, server.chat, model="tiny", max_length=server.max_length)
    held = HeldChat(server.chat, Held())
    held.prompt = never
    served.chat = held
    return served


def test_fifty_megabytes_are_refused_before_they_are_received(unrendered):
    """Only the head of the request is sent, so that an answer cannot have waited for its body."""

    async def main():
        async with running(unrendered) as url:
            at = urlsplit(url)
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: {50 << 20}\r\n\r\n"
            writer.write(head.encode())
            answer = await reader.readuntil(b"context_length_exceeded")
            writer.close()
            return answer.decode()

    answer = asyncio.run(main())
    assert answer.startswith("HTTP/1.1 413") and "a context of 1024 tokens has room for 16384 characters" in answer


def test_a_body_without_a_length_is_refused_when_it_has_grown_too_long(with_http, unrendered):
    async def main(http):
        sent, healthy = 0, []

        async def endless():
            nonlocal sent
            yield b'{"messages": [{"role": "user", "content": "'
            while sent < 50 << 20:
                sent += 1 << 18
                async with http.get("/health") as health:
                    healthy.append(health.status)
                yield b"a b " * (1 << 16)

        async with http.post(CHAT, data=endless()) as response:
            return response.status, (await response.json())["error"]["message"], healthy

    status, message, healthy = with_http(main, unrendered)
    assert status == 413 and "may have at most" in message
    assert set(healthy) == {200} and len(healthy) * (1 << 18) >= unrendered.max_body


def test_a_text_that_cannot_fit_is_refused_by_its_length(with_http, unrendered):
    async def main(http):
        async with http.post(CHAT, json={**ASK, "messages": [{"role": "user", "content": "a b " * 6000}]}) as response:
            return response.status, (await response.json())["error"]

    status, error = with_http(main, unrendered)
    assert status == 400 and error["code"] == "context_length_exceeded"
    assert "this model's context has room for 16384 at most" in error["message"]


def test_no_prompt_that_fits_is_refused_by_its_length(post, server):
    """The context filled with the tokenizer's longest token is the longest text that fits."""
    tokenizer = server.chat.tokenizer
    longest = max((token for token in tokenizer.get_vocab() if token.isalpha()), key=len)
    content, before = "", 0
    while (now := len(server.chat.prompt([{"role": "user", "content": content}], []).token_ids)) < server.max_length:
        content, before = f"{content} {longest}" if content else longest, now
    content = content.removesuffix(f" {longest}")
    status, answer = post(CHAT, {**ASK, "messages": [{"role": "user", "content": content}]})
    assert status == 200 and answer["usage"]["prompt_tokens"] == before
    escaped = json.dumps("\U0001f600" * len(content))
    assert len(escaped) <= server.max_body


def test_what_a_client_sent_is_not_kept(post, server):
    for i in range(3):
        post(CHAT, {**ASK, "messages": [{"role": "user", "content": f"{i}"}]})
    assert not server.chat._memory


KNOWN = [{}, {"Host": "localhost:1"}, {"Host": "192.168.1.5:8000"}, {"Host": "[::1]"}, {"Host": "GPU-box:8000"},
         {"Origin": "http://localhost:3000"}, {"Origin": "http://gpu-box"},
         {"Host": "192.168.1.5:8000", "Origin": "http://192.168.1.5:8000"}]  # fmt: skip
FOREIGN = [{"Host": "evil.example"}, {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, {"Host": ""},
           {"Host": "localhost.evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"},
           {"Origin": "http://203.0.113.5"}, {"Origin": "http://["},
           {"Origin": "https://127.0.0.1.evil.example"}]  # fmt: skip


@pytest.mark.parametrize("headers", [*KNOWN, *FOREIGN], ids=str)
@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_web_pages_of_others_are_refused(with_http, server, headers, path):
    """By the name that they lead here (DNS rebinding), or by their own."""

    async def main(http):
        kind = {"Content-Type": "text/plain"}  # which a page may send without asking first
        data = json.dumps(ASK) if path == CHAT else None
        async with http.request("POST" if data else "GET", path, data=data, headers=headers | kind) as response:
            return response.status, await response.json()

    def served(*hosts):
        return Server(server.engine, server.chat, model="tiny", max_length=server.max_length, hosts=hosts)

    status, answer = with_http(main, served("gpu-box"))
    assert status == (200 if headers in KNOWN else 403)
    if status == 403:
        told = answer["error"]["message"]
        assert told.startswith(("this server is not known as ", "this server is not for web pages of "))
        assert with_http(main, served("*"))[0] == 200
