"""Replies from any OpenAI-compatible chat endpoint: messages in, a message out, no token ids. For evaluation only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from plumbob.rollout import ChatReply, Sampling, read_arguments
from plumbob.trainer.inference.http_client import HttpThread
from plumbob.trainer.inference.server_pool import Server, ServerPool


class ChatServer:
    """A `ChatEngine` over `/v1/chat/completions`.

    Sampling settings that equal OpenAI's defaults are left out of requests: not all servers know them.
    """

    def __init__(self, http: HttpThread, url: str, model: str, template_args: Mapping[str, Any] | None = None) -> None:
        """`url`: the server's root URL, in the form that `root_url` returns.

        `template_args`: values of variables of the server's chat template, sent as vLLM's `chat_template_kwargs`.
        """
        self.http, self.model, self.template_args = http, model, template_args
        self.pool = ServerPool(http, [url])

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        """Ask for the next assistant turn. Raises EngineError without an answer in time, or for one that is unreadable."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.top_p != 1.0:
            body["top_p"] = sampling.top_p
        body |= {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        if tools:
            body["tools"] = list(tools)
        if self.template_args:
            body["chat_template_kwargs"] = dict(self.template_args)

        async def send(server: Server, seconds: float) -> ChatReply:
            return await self.http.request(
                "POST", server.url, "/v1/chat/completions", body, seconds=seconds, read=read_reply, pooled=True
            )

        return await self.http.awaited(self.pool.ask([], send))


def read_reply(content: bytes) -> ChatReply:
    """Read a chat completion. Raises ValueError, KeyError, TypeError or IndexError if it cannot be read.

    Some servers deviate from OpenAI's format, so text in parts, arguments as an object and usage without numbers are
    accepted.
    """
    answer = json.loads(content)
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    message = choice["message"]
    calls = tuple(
        read_arguments(call["function"].get("name") or "", _text(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    )
    return ChatReply(
        content=_text(message.get("content")).strip(),
        calls=calls,
        # Servers that return reasoning separately use one of these two field names.
        reasoning=message.get("reasoning_content") or message.get("reasoning"),
        finish_reason="length" if choice.get("finish_reason") == "length" else "stop",
        prompt_tokens=usage.get("prompt_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in value)
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
