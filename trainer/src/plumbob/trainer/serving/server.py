"""An OpenAI-compatible server over the in-process engine, for verifiers' `vf-eval` and any other OpenAI client.

The chat route renders the whole conversation with the model's template at each request. Unlike a rollout in the
trainer's process it is therefore not token-exact: a sampled turn is tokenised again when it comes back as history. The
token route `/inference/v1/generate` takes and returns token ids, and is exact. Concurrent requests share the engine's
batches.

The event loop moves bytes and nothing else: requests are read, rendered, tokenised and answered in a thread beside it,
so that a long one keeps neither other requests nor the engine waiting. It is one thread, because a tokenizer must not
be used by two at once. What cannot fit into the context is refused by its length, before it is tokenised.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from plumbob.rollout import Chat, ChatTemplateError, Completion, Engine, EngineError, Rendered, Sampling
from plumbob.trainer.inference.errors import PromptError
from plumbob.trainer.inference.load import load_engine_here
from plumbob.trainer.serving import openai_api as api

MAX_BODY = 64 << 20
"""Largest request body, in bytes, whatever the context."""
SPARE_BODY = 1 << 20
"""Bytes that a body may have beside its texts, such as the names of fields."""
BYTES_OF_A_CHARACTER = 12
"""Most bytes that JSON takes for one character: two escapes such as \\ud83d."""
DRAIN_SECONDS = 1.0
"""How long the server waits for requests under way when it ends."""

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


class Server:
    """The routes over one engine and one model.

    Example:
        async with running(Server(engine, chat, model="tiny", max_length=4096)) as url:
            ...  # e.g. openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-")
    """

    def __init__(self, engine: Engine, chat: Chat, *, model: str, max_length: int, hosts: Iterable[str] = ()) -> None:
        """`max_length`: most tokens of prompt and completion together that the engine accepts.

        `hosts`: the host names, besides localhost and IP addresses, under which a request may ask for this server; "*"
        allows any.
        """
        self.engine, self.chat, self.model, self.max_length = engine, chat, model, max_length
        self.hosts = frozenset({"localhost", *(host.lower() for host in hosts)})
        # No text of more characters fits, unless the tokenizer leaves characters out: a token has at most so many.
        self.max_characters = max_length * chat.longest_token
        self.max_body = min(MAX_BODY, SPARE_BODY + BYTES_OF_A_CHARACTER * self.max_characters)

    def app(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(client_max_size=self.max_body, middlewares=[_errors, self._only_ours])
        app.cleanup_ctx.append(self._reading)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/inference/v1/generate", self.generate)
        return app

    async def _reading(self, app: web.Application) -> AsyncGenerator[None]:
        """The thread that reads requests lives as long as the application: a process waits at its end for one that is left."""
        with ThreadPoolExecutor(1, thread_name_prefix="serve") as self._thread:
            yield

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "owned_by": "plumbob", "max_model_len": self.max_length}
        return web.json_response({"object": "list", "data": [card]})

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        asked, rendered = await self._beside(self._read_chat, await self._body(request))
        completions = await self._sample(rendered.token_ids, asked, self.chat.stop_token_ids)
        body = await self._beside(self._chat_answer, asked, rendered, completions)
        return web.Response(body=body, content_type="text/event-stream" if asked.stream else "application/json")

    def _read_chat(self, body: bytes) -> tuple[api.ChatRequest, Rendered]:
        asked = api.read_request(api.ChatRequest, body, self.max_characters)
        self._check_model(asked.model)
        try:
            messages = api.template_messages(asked.messages, self.chat)
            return asked, self.chat.prompt(messages, asked.offered_tools, asked.chat_template_kwargs)
        except ChatTemplateError as error:
            raise api.ApiError(400, str(error), param="messages") from None
        finally:
            self.chat.forget()  # renderings are kept for the rollouts of a group, and clients send what they like

    def _chat_answer(self, asked: api.ChatRequest, rendered: Rendered, completions: Sequence[Completion]) -> bytes:
        choices = [
            api.chat_choice(
                i, completion, self.chat, rendered, tools=asked.offered_tools, logprobs=bool(asked.logprobs)
            )
            for i, completion in enumerate(completions)
        ]
        answer = api.chat_completion(self.model, choices, len(rendered.token_ids), completions)
        if not asked.stream:
            return json.dumps(answer).encode()
        usage = bool((asked.stream_options or {}).get("include_usage"))
        # All events are sent at once after sampling, for clients that require a stream but do not show it live.
        return api.stream_events(answer, usage)

    async def generate(self, request: web.Request) -> web.Response:
        asked = await self._beside(self._read_tokens, await self._body(request))
        params = asked.sampling_params
        own = () if params.ignore_eos else self.chat.stop_token_ids
        completions = await self._sample(asked.token_ids, params, sorted({*own, *(params.stop_token_ids or ())}))
        return web.Response(
            body=await self._beside(self._tokens_answer, asked, completions), content_type="application/json"
        )

    def _read_tokens(self, body: bytes) -> api.GenerateRequest:
        asked = api.read_request(api.GenerateRequest, body)
        if asked.model is not None:
            self._check_model(asked.model)
        return asked

    def _tokens_answer(self, asked: api.GenerateRequest, completions: Sequence[Completion]) -> bytes:
        choices = [api.generate_choice(i, completion) for i, completion in enumerate(completions)]
        return json.dumps({"request_id": asked.request_id or uuid.uuid4().hex, "choices": choices}).encode()

    async def _body(self, request: web.Request) -> bytes:
        """The bytes of a request. Raises ApiError 413 if there are too many, before they are received."""
        if (request.content_length or 0) <= self.max_body:
            with contextlib.suppress(web.HTTPRequestEntityTooLarge):
                return await request.read()
        raise api.ApiError(
            413,
            f"a request to this server may have at most {self.max_body} bytes: a context of {self.max_length} tokens has "
            f"room for {self.max_characters} characters at most",
            code="context_length_exceeded",
        )

    async def _beside(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run a function in the thread beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    @web.middleware
    async def _only_ours(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse a request that a web page of somebody else has sent. Raises ApiError 403.

        A page can send requests to any address, and can read the replies if its own name leads here (DNS rebinding). A
        name is therefore answered only if it is known to be this server's; an IP address cannot lead elsewhere. An
        Origin, which browsers send, must be this server itself, or a page of this machine.
        """
        host, origin = request.headers.get("Host", "localhost"), request.headers.get("Origin")
        told = None
        if not self._is_ours(name := _host_name(f"//{host}")) and _address(name) is None:
            told = f"is not known as {name or host}"
        elif (
            origin is not None and origin.partition("://")[2] != host and not self._is_ours(name := _host_name(origin))
        ):
            told = f"is not for web pages of {name or origin}"
        if told is not None and "*" not in self.hosts:
            advice = f"start `serve` with --allow-host {name}" if name else "send the request from elsewhere"
            raise api.ApiError(403, f"this server {told}; if that is intended, {advice}")
        return await handler(request)

    def _is_ours(self, name: str) -> bool:
        address = _address(name)
        return name in self.hosts or (address is not None and address.is_loopback)

    def _check_model(self, name: str) -> None:
        if name != self.model:
            raise api.ApiError(404, f"The model `{name}` does not exist; this server has `{self.model}`", param="model")

    async def _sample(
        self, prompt: Sequence[int], asked: api.SamplingFields, stop_token_ids: Sequence[int]
    ) -> list[Completion]:
        """Sample one completion for each choice that the request asks for. Raises ApiError."""
        budget = self.max_length - len(prompt)
        if budget < 1:
            raise api.ApiError(
                400,
                f"This model's maximum context length is {self.max_length} tokens, of which a reply needs at least one, "
                f"and the prompt has {len(prompt)}",
                param="messages",
                code="context_length_exceeded",
            )

        async def one(sampling: Sampling) -> Completion:
            return await self.engine.generate(prompt, sampling)

        try:
            return await asyncio.gather(*map(one, asked.choices(budget, stop_token_ids)))
        except PromptError as error:
            raise api.ApiError(400, str(error)) from None
        except EngineError as error:
            raise api.ApiError(500, str(error)) from None


def _host_name(url: str) -> str:
    """The host of a URL in lower case, without its port; "" if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer every error with an OpenAI error object, including an unknown route or method."""
    try:
        return await handler(request)
    except api.ApiError as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        return web.json_response(
            api.ApiError(error.status, f"{request.path}: {error.reason}").body, status=error.status
        )
    except Exception as error:  # one failed request must not end the server
        logger.exception("%s failed", request.path)
        return web.json_response(api.ApiError(500, f"{type(error).__name__}: {error}").body, status=500)


@asynccontextmanager
async def running(server: Server, host: str = "127.0.0.1", port: int = 0) -> AsyncGenerator[str]:
    """Context in which the server runs; yields its root URL.

    Port 0 takes a free port. Raises OSError if the port is in use.
    """
    # When a client disconnects, its handler is cancelled, which frees the engine's slot.
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=DRAIN_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address = runner.addresses[0]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        yield f"http://{shown}:{address[1]}"
    finally:
        await runner.cleanup()


def load_server(model: str, *, max_concurrent: int = 64, hosts: Iterable[str] = (), **settings: Any) -> Server:
    """A server for a model that it loads, on the GPU if there is one.

    `hosts`: see `Server`. `settings`: of `load_engine_here`. Raises UserError.
    """
    loaded = load_engine_here(model, max_concurrent=max_concurrent, **settings)
    assert loaded.chat is not None
    return Server(loaded.engine, loaded.chat, model=model, max_length=loaded.max_context, hosts=hosts)
