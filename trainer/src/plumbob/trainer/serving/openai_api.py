"""The wire format of `serve`: OpenAI's chat completions and vLLM's token route, read and written without HTTP.

Two choices differ from what a client may expect. Sampling fields that a request leaves out take OpenAI's defaults
(temperature 1, top_p 1, as many tokens as fit into the context), not those of the model's generation config. A tool
call that cannot be parsed is returned as a call with an empty name and the model's raw text as its arguments, while
vLLM returns it as content. Plumbob's own rollouts record such a call in the same way, so a transcript gets the same
score whether it comes from a rollout or from here.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from plumbob.rollout import Chat, Completion, MalformedCall, ParsedCall, Rendered, Sampling, derive_seed
from plumbob.trainer.config.chat_template import RESERVED
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_CHOICES = 128
"""Most completions that one request may ask for (`n`)."""
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_DEPTH = 64
"""How deep the lists and objects of a request may be nested: templates print them recursively."""
_MAX_SAID = 1_000
"""Most characters of an error's message, which may quote what a client has sent."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, "", []),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}
"""Fields that the engine does not support, with the values that leave the reply unchanged; other values are refused."""


class ApiError(Exception):
    """A request that cannot be answered, as an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        message = message if len(message) <= _MAX_SAID else f"{message[:_MAX_SAID]}..."
        super().__init__(message)
        self.status = status
        kinds = {403: "PermissionDeniedError", 404: "NotFoundError", 500: "InternalServerError"}
        kind = kinds.get(status, "BadRequestError")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


Content = str | list[TextPart] | None


class Function(BaseModel):
    name: str = ""
    arguments: str = ""
    """JSON text of the arguments, as the model wrote it or a client serialised it."""


class Call(BaseModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: dict[str, Any]

    @field_validator("function")
    @classmethod
    def _refuse_unnamed(cls, function: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters") or {}, dict):
            raise ValueError("a tool needs a name, as text, and its parameters, if it has any, as an object")
        return function


class SamplingFields(BaseModel):
    """The sampling fields of both routes, under the names that OpenAI and vLLM use."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name, values in NEUTRAL.items() if isinstance(data, dict) else ():
            if name in data and data[name] not in values:
                raise ValueError(f"this server does not support {name}={json.dumps(data[name])}; leave it out")
        return data

    def choices(self, budget: int, stop_token_ids: Sequence[int]) -> list[Sampling]:
        """The sampling settings of each choice; all but the first have seeds derived from the request's.

        `budget`: most tokens that still fit into the context; a request for more is cut to it, as in a rollout.
        """
        first = Sampling(
            max_tokens=min(self.max_tokens or budget, budget),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            stop_token_ids=tuple(stop_token_ids),
            seed=self.seed,
        )
        seeds = [None if self.seed is None else derive_seed(self.seed, i) for i in range(1, self.n or 1)]
        return [first, *(replace(first, seed=seed) for seed in seeds)]


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`. Fields that change nothing about the reply (`user`, `metadata`, ...) are ignored."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Values of variables of the chat template (vLLM's extension)."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    def model_post_init(self, _: Any) -> None:
        self.max_tokens = self.max_completion_tokens or self.max_tokens

    @field_validator("chat_template_kwargs")
    @classmethod
    def _refuse_reserved(cls, values: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := RESERVED.intersection(values or {}):
            raise ValueError(f"{min(taken)} is not a variable that a request can set")
        return values

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools for the chat template, with all fields that the client sent, because templates print them."""
        return [] if self.tool_choice == "none" else [tool.model_dump() for tool in self.tools or []]


class GenerateParams(SamplingFields):
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False


class GenerateRequest(BaseModel):
    """`POST /inference/v1/generate`: token ids in, token ids and log-probabilities out, as vLLM 0.25 has it."""

    model: str | None = None
    request_id: str | None = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    sampling_params: GenerateParams = GenerateParams()
    stream: Literal[False] = False


Request = TypeVar("Request", ChatRequest, GenerateRequest)


def read_request(kind: type[Request], body: bytes, max_characters: int | None = None) -> Request:
    """Parse the body of a request.

    `max_characters`: most characters of all its texts together; a prompt of more cannot fit into the context. Raises
    ApiError 400 for invalid JSON or Unicode, for what is too long or nested too deep, and for the first wrong field,
    naming it.
    """
    try:
        content, characters = _read_json(body)
    except UnicodeEncodeError as error:
        lone = error.object[error.start : error.start + 1]
        raise ApiError(400, f"the request holds text that is not valid Unicode: a lone surrogate, {lone!r}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also a number with more digits than Python parses
        raise ApiError(400, f"the request is not JSON that can be read: {error}") from None
    if max_characters is not None and characters > max_characters:
        raise ApiError(
            400,
            f"the request has {characters} characters of text, and this model's context has room for {max_characters} at "
            "most; shorten its messages and tools",
            param="messages",
            code="context_length_exceeded",
        )
    try:
        return kind.model_validate(content)
    except ValidationError as invalid:
        first = invalid.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{name}: {message}" if name else message, param=name or None) from None


def _read_json(text: str | bytes) -> tuple[Any, int]:
    """Parse JSON. Return the value, and the number of characters of all texts and keys in it.

    Raises ValueError if it is invalid or nested too deep, and UnicodeEncodeError for a lone surrogate, which JSON can
    express ("\\ud800") and no tokenizer accepts.
    """
    value = json.loads(text)
    characters, layer = 0, [value]
    for _ in range(MAX_DEPTH):
        if not layer:
            return value, characters
        keys = [key for item in layer if isinstance(item, dict) for key in item]
        for text in [*keys, *(item for item in layer if isinstance(item, str))]:
            text.encode()
            characters += len(text)
        inside = [item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, dict | list)]
        layer = [item for items in inside for item in items]
    raise ValueError(f"its lists and objects are nested more than {MAX_DEPTH - 1} deep")


def template_messages(messages: Sequence[Message], chat: Chat) -> list[dict[str, Any]]:
    """The conversation for a chat template: arguments as objects, and malformed calls as the model's text."""
    rendered = []
    for message in messages:
        wire: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.role == "developer":
            wire["role"] = "system"
        if message.role == "tool":
            wire |= {"name": message.name, "tool_call_id": message.tool_call_id}
        if message.role == "assistant" and message.reasoning_content:
            wire["reasoning_content"] = message.reasoning_content
        calls = [_template_call(call) for call in message.tool_calls or [] if call.function.name]
        for call in message.tool_calls or []:
            if not call.function.name:
                wire["content"] += _verbatim(call.function.arguments, chat)
        if calls:
            wire["tool_calls"] = calls
        rendered.append(wire)
    return rendered


def _template_call(call: Call) -> dict[str, Any]:
    try:
        arguments, _ = _read_json(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.function.arguments  # templates print any value as JSON
    return {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": arguments}}


def _verbatim(text: str, chat: Chat) -> str:
    """A call that could not be parsed, as the model wrote it."""
    if chat.tool_format.name in ("hermes", "auto") and not text.startswith("<tool_call>"):
        return f"<tool_call>{text}</tool_call>"
    return text


def chat_choice(
    index: int,
    completion: Completion,
    chat: Chat,
    prompt: Rendered,
    *,
    tools: Sequence[dict[str, Any]],
    logprobs: bool,
) -> dict[str, Any]:
    """One choice of a chat completion: the completion, parsed into content, reasoning and calls of `tools`."""
    reasoning, reply = chat.parse(completion.token_ids, tools, opens_thought=prompt.opens_thought)
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    finish: str = completion.finish_reason
    if reply.calls:
        message["tool_calls"] = [_wire_call(call) for call in reply.calls]
        if finish == "stop":
            finish = "tool_calls"
    texts = [chat.tokenizer.decode([i]) for i in completion.token_ids] if logprobs else []
    return {
        "index": index,
        "message": message,
        "finish_reason": finish,
        "logprobs": {"content": _logprobs(texts, completion)} if logprobs else None,
    }


def _wire_call(call: ParsedCall | MalformedCall) -> dict[str, Any]:
    arguments = call.text if isinstance(call, MalformedCall) else json.dumps(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _logprobs(texts: Sequence[str], completion: Completion) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, completion.logprobs, strict=True)
    ]


def chat_completion(
    model: str, choices: list[dict[str, Any]], prompt_tokens: int, completions: Sequence[Completion]
) -> dict[str, Any]:
    """The answer of `/v1/chat/completions`, with the usage of all choices together."""
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
    }


def stream_events(answer: dict[str, Any], include_usage: bool) -> bytes:
    """A finished answer as server-sent events: per choice, a delta with the whole message, then the finish reason."""
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        start = {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
        end = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        chunks += [{**head, "choices": [start]}, {**head, "choices": [end]}]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return b"".join([*(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"])


def generate_choice(index: int, completion: Completion) -> dict[str, Any]:
    """One choice of the token route.

    Each log-probability names its token id, so that a client can check that none was lost.
    """
    return {
        "index": index,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": {"content": _logprobs([f"token_id:{i}" for i in completion.token_ids], completion)},
    }
