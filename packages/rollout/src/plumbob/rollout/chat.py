"""Token in, token out: how a conversation becomes ids without ever tokenising a sampled turn again.

The first prompt is the chat template's rendering, tokenised once. Every later prompt is the ids so far (prompt plus
completion, verbatim) plus a suffix: what the template puts between the end of an assistant turn and the start of the
next one. The suffix is found by rendering a dummy conversation whose assistant turn is a sentinel and taking what
stands behind the sentinel, so the next assistant header is always there and no sampled text is ever rendered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plumbob.rollout.toolcalls import ParsedReply, ToolFormat, detect_format, parse_reply
from plumbob.rollout.types import Tokenizer

_SENTINEL = "PLUMBOB-SENTINEL-0f6c1d"
MAX_REMEMBERED = 4096
"""So many renderings are kept, more than one step needs."""
_QUESTION = {"role": "user", "content": "?"}


class ChatTemplateError(ValueError):
    """The tokenizer's chat template cannot carry a token-exact conversation; the message says why."""


@dataclass(frozen=True)
class Rendered:
    """Ids that the template puts before a turn, and which message each belongs to.

    `ends[i]`: where message i's last id ends. Ids behind the last end are the assistant header. `is_content` is true on
    ids that carry a message's text and false on the template's own, parallel to `token_ids`.
    """

    token_ids: list[int]
    is_content: list[bool]
    ends: list[int]

    def spans(self) -> list[slice]:
        """One slice of `token_ids` per message, each with the template's ids that lead to it."""
        return [slice(start, end) for start, end in zip([0, *self.ends], self.ends, strict=False)]

    @property
    def header_ids(self) -> list[int]:
        return self.token_ids[self.ends[-1] if self.ends else 0 :]


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template, read once: use `Chat.of(tokenizer)`.

    Example:
        chat = Chat.of(tokenizer)
        prompt = chat.prompt([{"role": "user", "content": "hi"}], tools=[]).token_ids
        ...  # the engine draws `completion`, ending with one of chat.stop_token_ids
        prompt2 = prompt + completion + chat.suffix([{"role": "tool", "content": "7"}]).token_ids
    """

    tokenizer: Tokenizer
    tool_format: ToolFormat
    closer: str
    """The text of the token that ends an assistant turn in this template, e.g. `<|im_end|>`."""
    stop_token_ids: tuple[int, ...]
    splits_reasoning: bool
    """The template keeps reasoning apart from content (Qwen3), so `<think>...</think>` is not part of the reply."""
    _memory: dict[str, Rendered] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, stop_token_ids: Sequence[int] = (), tool_format: ToolFormat | None = None
    ) -> Chat:
        """Read the template. `stop_token_ids`: the generation config's, which may hold more than the template's own.

        Raises ChatTemplateError if there is no template, or no single token ends an assistant turn in it.
        """
        template = tokenizer.chat_template
        if not template:
            raise ChatTemplateError("the tokenizer has no chat template")
        tail = _after_sentinel(_render(tokenizer, [_QUESTION, _assistant()]))
        closer, closer_id = _leading_token(tokenizer, tail)
        return cls(
            tokenizer=tokenizer,
            tool_format=tool_format or detect_format(template),
            closer=closer,
            stop_token_ids=tuple(sorted({closer_id, *stop_token_ids})),
            splits_reasoning="reasoning_content" in template,
        )

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Rendered:
        """The first prompt: the whole rendering, with tool descriptions and the assistant header."""

        def render(some: list[dict[str, Any]]) -> str:
            return _render(self.tokenizer, some, tools=tools or None, add_generation_prompt=True)

        return self._rendered_once(["prompt", messages, tools], render, messages)

    def suffix(self, messages: list[dict[str, Any]]) -> Rendered:
        """What follows a sampled turn that ended with a stop token: `messages` and the next assistant header."""

        def render(some: list[dict[str, Any]]) -> str:
            tail = _after_sentinel(
                _render(self.tokenizer, [_QUESTION, _assistant(), *some], add_generation_prompt=True)
            )
            if not tail.startswith(self.closer):
                raise ChatTemplateError(
                    f"the chat template ends an assistant turn with {tail[:20]!r}, not {self.closer!r}"
                )
            return tail[len(self.closer) :]

        return self._rendered_once(["suffix", messages], render, messages)

    def _rendered_once(
        self, key: list[Any], render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]
    ) -> Rendered:
        """Remembered: the rollouts of a group share their prompt, and often what the tools say."""
        text = json.dumps(key)
        if text not in self._memory:
            if len(self._memory) >= MAX_REMEMBERED:
                self._memory.clear()
            self._memory[text] = _encode(self.tokenizer, render(messages), render(_marked(messages)), messages)
        return self._memory[text]

    def parse(self, completion_ids: Sequence[int], *, has_tools: bool) -> tuple[str | None, ParsedReply]:
        """(reasoning, reply) of a completion. Without tools nothing is read as a call."""
        ids = list(completion_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        reasoning = None
        if self.splits_reasoning and "</think>" in text:
            reasoning, text = text.split("</think>", 1)
            reasoning = reasoning.removeprefix("<think>").strip()
        return reasoning, parse_reply(text, self.tool_format) if has_tools else ParsedReply(text.strip())


def _encode(tokenizer: Tokenizer, text: str, frame: str, messages: list[dict[str, Any]]) -> Rendered:
    """Tokenise once, and attribute the ids. `frame`: the rendering of the same messages, each content a sentinel."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    is_content, ends = [False] * len(token_ids), []
    token = 0
    for start, end in _content_spans(text, frame, messages):
        while token < len(token_ids) and offsets[token][0] < end:
            is_content[token] = offsets[token][1] > start
            token += 1
        ends.append(token)
    return Rendered(token_ids, is_content, ends)


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a sentinel for each content. An assistant's empty one stays: templates look at it."""
    return [{**m, "content": _SENTINEL} if m["content"] or m["role"] != "assistant" else m for m in messages]


def _content_spans(text: str, frame: str, messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Where each message's content stands in `text`. Searching for it would not do: "e" stands in any template.

    If the template leaves a content out, repeats it or looks at it, all of `text` counts as the template's own.
    """
    lead, *pieces = frame.split(_SENTINEL)
    nowhere = [(0, 0)] * len(messages)
    shown = sum(bool(m["content"]) or m["role"] != "assistant" for m in messages)
    if len(pieces) != shown or not text.startswith(lead):
        return nowhere
    spans, cursor = [], len(lead)
    for message in messages:
        content = message["content"]
        if not content and message["role"] == "assistant":
            spans.append(spans[-1] if spans else (0, 0))
            continue
        after = pieces.pop(0)
        # Verbatim, or trimmed, or rewritten (Llama 3.1 quotes tool results): then it ends where the template goes on.
        verbatim = (cursor + len(c) for c in (content, content.strip()) if text.startswith(c + after, cursor))
        end = next(verbatim, text.find(after, cursor))
        spans.append((cursor, end))
        cursor = end + len(after)
    return spans if cursor == len(text) else nowhere


def _assistant() -> dict[str, Any]:
    return {"role": "assistant", "content": _SENTINEL}


def _render(tokenizer: Tokenizer, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    except Exception as error:  # a template raises whatever it likes
        raise ChatTemplateError(f"the chat template refuses the conversation: {error}") from error


def _after_sentinel(text: str) -> str:
    # The first occurrence: a tool result behind it may hold the sentinel too, the dummy question before it does not.
    _, found, tail = text.partition(_SENTINEL)
    if not found:
        raise ChatTemplateError("the chat template drops an assistant message's content")
    # Some templates put a space between a reply and its end token; a model draws the token alone.
    return tail.lstrip()


def _leading_token(tokenizer: Tokenizer, tail: str) -> tuple[str, int]:
    """The added token that `tail` starts with. Its left context cannot change how it is tokenised, nor what follows."""
    ids = tokenizer.encode(tail, add_special_tokens=False)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    if not ids or ids[0] not in added:
        raise ChatTemplateError(
            f"no special token ends an assistant turn in the chat template (it is followed by {tail[:20]!r})"
        )
    return str(added[ids[0]]), ids[0]
