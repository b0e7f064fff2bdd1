"""An OpenAI-compatible server over the in-process engine, for verifiers' `vf-eval` and any other OpenAI client.

The chat route renders the whole conversation with the model's template at each request. Unlike a rollout in the
trainer's process it is therefore not token-exact: a sampled turn is tokenised again when it comes back as history. The
token route `/inference/v1/generate` takes and returns token ids, and is exact. Concurrent requests share the engine's
batches.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from plumbob.rollout import Chat, ChatTemplateError, Completion, Engine, EngineError, Sampling
from plumbob.trainer.inference.errors import PromptError
from plumbob.trainer.inference.load import load_engine_here
from plumbob.trainer.serving import openai_api as api

MAX_BODY = 64 << 20
"""Largest request body, in bytes."""
DRAIN_SECONDS = 1.0
"""How long the server waits for requests under way when it ends."""

logger = logging.getLogger(__name__)


class Server:
    """The routes over one engine and one model.

    Example:
        async with running(Server(engine, chat, model="tiny", max_length=4096)) as url:
            ...  # e.g. openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-")
    """

    def __init__(self, engine: Engine, chat: Chat, *, model: str, max_length: int) -> None:
        """`max_length`: most tokens of prompt and completion together that the engine accepts."""
        self.engine, self.chat, self.model, self.max_length = engine, chat, model, max_length

    def app(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[_errors])
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/inference/v1/generate", self.generate)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "owned_by": "plumbob", "max_model_len": self.max_length}
        return web.json_response({"object": "list", "data": [card]})

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        asked = api.read_request(api.ChatRequest, await request.read())
        self._check_model(asked.model)
        tools = asked.offered_tools
        try:
            messages = api.template_messages(asked.messages, self.chat)
            rendered = self.chat.prompt(messages, tools, asked.chat_template_kwargs)
        except ChatTemplateError as error:
            raise api.ApiError(400, str(error), param="messages") from None
        completions = await self._sample(rendered.token_ids, asked, self.chat.stop_token_ids)
        choices = [
            api.chat_choice(i, completion, self.chat, rendered, tools=tools, logprobs=bool(asked.logprobs))
            for i, completion in enumerate(completions)
        ]
        answer = api.chat_completion(self.model, choices, len(rendered.token_ids), completions)
        if not asked.stream:
            return web.json_response(answer)
        usage = bool((asked.stream_options or {}).get("include_usage"))
        # All events are sent at once after sampling, for clients that require a stream but do not show it live.
        return web.Response(body=b"".join(api.stream_events(answer, usage)), content_type="text/event-stream")

    async def generate(self, request: web.Request) -> web.Response:
        asked = api.read_request(api.GenerateRequest, await request.read())
        if asked.model is not None:
            self._check_model(asked.model)
        params = asked.sampling_params
        own = () if params.ignore_eos else self.chat.stop_token_ids
        completions = await self._sample(asked.token_ids, params, sorted({*own, *(params.stop_token_ids or ())}))
        choices = [api.generate_choice(i, completion) for i, completion in enumerate(completions)]
        return web.json_response({"request_id": asked.request_id or uuid.uuid4().hex, "choices": choices})

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


def load_server(model: str, *, max_concurrent: int = 64, **settings: Any) -> Server:
    """A server for a model that it loads, on the GPU if there is one. `settings`: of `load_engine_here`. Raises UserError."""
    loaded = load_engine_here(model, max_concurrent=max_concurrent, **settings)
    assert loaded.chat is not None
    return Server(loaded.engine, loaded.chat, model=model, max_length=loaded.max_context)
