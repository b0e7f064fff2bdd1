"""Engines behind HTTP: messages to any OpenAI-compatible chat endpoint, or token ids to a vLLM server.

Both wait and try again when the server is busy or briefly gone; what still fails is an EngineError, which is recorded
on its rollout. A server that cannot be used at all is told before the first rollout, by `connect`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import httpx
import openai
from plumbob.hub import UserError
from plumbob.rollout import ChatReply, Completion, EngineError, Sampling, read_arguments
from plumbob.trainer import generate_route
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

ATTEMPTS = 4
CONNECT_SECONDS = 30.0
"""A burst of a thousand rollouts opens as many connections at once."""


def connect(base_url: str, model: str, api_key_var: str) -> list[str]:
    """Ask the server which models it has. Raises UserError if there is none, it refuses, or it lacks `model`."""
    try:
        answer = httpx.get(f"{base_url.rstrip('/')}/models", headers=_headers(api_key_var), timeout=CONNECT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"no server answers at {base_url} ({error or type(error).__name__}); start one, for example "
            f"`serve --model {model}`, or give its --base-url"
        ) from None
    if answer.status_code in (401, 403):
        raise UserError(f"the server at {base_url} refuses the key in ${api_key_var} ({answer.status_code})")
    if answer.status_code != 200:
        return []  # a server need not have this route
    try:
        names = [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{base_url} answers, but not as an OpenAI-compatible server; its URL ends in /v1") from None
    if names and model not in names:
        raise UserError(f"the server at {base_url} has no model {model!r}; it has {', '.join(names)}")
    return names


def _headers(api_key_var: str) -> dict[str, str]:
    key = os.environ.get(api_key_var)
    return {"Authorization": f"Bearer {key}"} if key else {}


class OpenAIChat:
    """A `ChatEngine` over `/chat/completions`. Settings that equal OpenAI's defaults are left out: not all servers know them."""

    def __init__(
        self, base_url: str, model: str, api_key_var: str = "OPENAI_API_KEY", *, timeout: float = 600.0
    ) -> None:
        self.model = model
        self.client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=os.environ.get(api_key_var) or "none",
            max_retries=ATTEMPTS - 1,
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
        )

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        given: dict[str, Any] = {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
        if sampling.seed is not None:
            given["seed"] = sampling.seed
        if sampling.top_p != 1.0:
            given["top_p"] = sampling.top_p
        extra = {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        if tools:
            given["tools"] = list(tools)
        try:
            answer: Any = await self.client.chat.completions.create(
                model=self.model, messages=list(messages), extra_body=extra or None, **given
            )  # ty: ignore[no-matching-overload]
        except openai.OpenAIError as error:
            raise EngineError(f"the server failed: {_one_line(error)}") from error
        try:
            return _chat_reply(answer)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"the server's answer cannot be read ({type(error).__name__}: {error})") from error


def _chat_reply(answer: Any) -> ChatReply:
    """Not all servers keep to the format: text in parts, arguments as an object, and usage without numbers are read too."""
    choice, usage = answer.choices[0], answer.usage
    message = choice.message
    calls = tuple(read_arguments(c.function.name or "", _text(c.function.arguments)) for c in message.tool_calls or ())
    return ChatReply(
        content=_text(message.content).strip(),
        calls=calls,
        # Servers that keep reasoning apart name it in one of two ways.
        reasoning=getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None),
        finish_reason="length" if choice.finish_reason == "length" else "stop",
        prompt_tokens=getattr(usage, "prompt_tokens", None) or 0,
        completion_tokens=getattr(usage, "completion_tokens", None) or 0,
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in value)
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


class GenerateClient:
    """An `Engine` over `/inference/v1/generate`: token ids in, token ids and log-probabilities out (vLLM >= 0.25, `serve`).

    vLLM's log-probabilities are those before temperature and truncation unless it runs with
    `--logprobs-mode processed_logprobs`.
    """

    def __init__(
        self, base_url: str, model: str, api_key_var: str = "OPENAI_API_KEY", *, timeout: float = 600.0
    ) -> None:
        parts = urlsplit(base_url)
        path = parts.path.rstrip("/").removesuffix("/v1") + "/inference/v1/generate"
        self.url = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        self.model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx.AsyncClient(
            headers=_headers(api_key_var), timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS), limits=limits
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        params: dict[str, Any] = {
            **generate_route.sampling_names(sampling),
            "logprobs": 1,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        body = {"model": self.model, "token_ids": list(prompt_ids), "sampling_params": params}
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception(_may_pass), wait=wait_random_exponential(0.5, max=10),
                stop=stop_after_attempt(ATTEMPTS), reraise=True,
            ):  # fmt: skip
                with attempt:
                    answer = await self.client.post(self.url, json=body)
                    answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            raise EngineError(
                f"the server answered {error.response.status_code}: {error.response.text[:200]}"
            ) from error
        except httpx.HTTPError as error:
            raise EngineError(f"the server failed: {_one_line(error)}") from error
        return _completion(answer)


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


def _completion(answer: httpx.Response) -> Completion:
    try:
        choice = answer.json()["choices"][0]
        token_ids = [int(token) for token in choice["token_ids"]]
        content = choice["logprobs"]["content"]
        logprobs = [float(item["logprob"]) for item in content]
        named = generate_route.are_of(content, token_ids)
        finish: Literal["stop", "length"] = "length" if choice["finish_reason"] == "length" else "stop"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise EngineError(f"the server's answer cannot be read ({type(error).__name__}: {error})") from error
    if not named or not all(map(math.isfinite, logprobs)):
        raise EngineError("the server's log-probabilities do not belong to its token ids")
    return Completion(tuple(token_ids), tuple(logprobs), finish)


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
