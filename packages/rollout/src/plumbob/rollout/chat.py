"""Turn a conversation into token ids without ever tokenising a sampled turn again.

The first prompt is the chat template's rendering, tokenised once. Every later prompt is the ids so far (prompt and
completion, verbatim) followed by a suffix: what the template puts between the end of an assistant turn and the start of
the next one. To find the suffix, a dummy conversation whose assistant turn is a sentinel is rendered, and the text
after the sentinel is taken. The suffix therefore always contains the next assistant header, and sampled text is never
rendered. A control token that is spelled in a message stays text (control_tokens.py). What the template has no place
for, such as tool descriptions, becomes text of a message that it renders (template_gaps.py).
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from plumbob.rollout.control_tokens import ControlTokens, Encoded, added_tokens, text_of, tokenised
from plumbob.rollout.template_gaps import (
    QUESTION,
    SENTINEL,
    ChatTemplateError,
    TemplateGaps,
    describes,
    render,
    said,
    tool_call,
    written_text,
)
from plumbob.rollout.tool_formats import ToolFormat, detect, tools_of
from plumbob.rollout.tool_formats.base import EXAMPLE
from plumbob.rollout.toolcalls import ParsedReply
from plumbob.rollout.types import Tokenizer

MAX_REMEMBERED = 4096
"""Most renderings that a `Chat` keeps, which is more than one training step needs."""
LONGEST_REMEMBERED = 100_000
"""Characters of messages above which their rendering is not kept: few rollouts share it, and 4096 of them fill a memory."""
LONGEST_TOKEN = 256
"""Characters of a token of a model whose tokenizer is not at hand: no tokenizer in use has a longer one but of spaces."""


@dataclass(frozen=True)
class Rendered:
    """The ids that precede a turn of the model, and the message that each of them belongs to."""

    token_ids: list[int]
    """[T] the ids of all messages and of the assistant header after them."""
    is_content: list[bool]
    """[T] true on ids that carry a message's text, false on ids of the template's own text."""
    ends: list[int]
    """For each message, the index after its last id in `token_ids`; the remaining ids are the assistant header."""
    opens_thought: bool = False
    """Whether the assistant header ends with an open `<think>`, so that the reply begins inside a thought."""

    def spans(self) -> list[slice]:
        """One slice of `token_ids` per message; it begins with the template's ids before the message."""
        return [slice(start, end) for start, end in zip([0, *self.ends], self.ends, strict=False)]

    @property
    def header_ids(self) -> list[int]:
        """The ids after the last message: the assistant header."""
        return self.token_ids[self.ends[-1] if self.ends else 0 :]


@dataclass(frozen=True)
class Chat:
    """A tokenizer's chat template and what was read from it. Make one with `Chat.of(tokenizer)`.

    Example:
        chat = Chat.of(tokenizer)
        prompt = chat.prompt([{"role": "user", "content": "hi"}], tools=[]).token_ids
        ...  # the engine samples `completion`, which ends with one of chat.stop_token_ids
        prompt2 = prompt + completion + chat.suffix([{"role": "tool", "content": "7"}]).token_ids
    """

    tokenizer: Tokenizer
    tool_format: ToolFormat
    closer: str
    """The text of the token that ends an assistant turn in this template, e.g. `<|im_end|>`."""
    stop_token_ids: tuple[int, ...]
    """The ids that end a completion: the closer's, and those of the generation config."""
    splits_reasoning: bool
    """Whether the template separates reasoning from content (Qwen3), so that `<think>...</think>` is not content."""
    header: str = ""
    """The text that the template adds to open an assistant turn after a question."""
    gaps: TemplateGaps = field(default_factory=TemplateGaps)
    """What the template has no place for."""
    control: ControlTokens | None = None
    """The control tokens that are text where a message spells them; None: such a spelling is tokenised as the token."""
    _memory: dict[str, Rendered] = field(default_factory=dict, repr=False, compare=False)
    """Renderings that `_rendered_once` keeps, by the JSON text of their arguments."""
    _named: dict[tuple[str, ...], bool] = field(default_factory=dict, repr=False, compare=False)
    """Whether the template describes tools, by the roles of the messages: see `names_tools`."""

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Sequence[int] = (),
        tool_format: ToolFormat | None = None,
        keep_control_tokens: bool = False,
    ) -> Chat:
        """Read a tokenizer's chat template.

        `stop_token_ids`: stop tokens of the generation config, used in addition to the template's own. `tool_format`:
        by default detected from the template. `keep_control_tokens`: tokenise a control token that is spelled in a
        message as that token, so that a message can end its own turn; for templates that expect it. Raises
        ChatTemplateError if there is no template, or if it does not end an assistant turn with one special token.
        """
        template = tokenizer.chat_template
        if not template:
            raise ChatTemplateError("the tokenizer has no chat template")
        tail = _after_sentinel(render(tokenizer, [QUESTION, said(SENTINEL)]))
        closer, closer_id = _leading_token(tokenizer, tail)
        stops = {closer_id, *stop_token_ids}
        form = tool_format or detect(template)
        turns = _turn_tokens(tokenizer, stops)
        return cls(
            tokenizer=tokenizer,
            tool_format=form,
            closer=closer,
            stop_token_ids=tuple(sorted(stops)),
            splits_reasoning="reasoning_content" in template or "</think>" in template,
            header=assistant_header(tokenizer),
            gaps=TemplateGaps.of(tokenizer),
            control=None if keep_control_tokens else ControlTokens.of(tokenizer, turns, written_text(form)),
        )

    @functools.cached_property
    def longest_token(self) -> int:
        """Most characters that one token stands for: a text of N characters has at least N / longest_token tokens."""
        return max(map(len, self.tokenizer.get_vocab()))

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: dict[str, Any] | None = None
    ) -> Rendered:
        """The first prompt: `messages` rendered with tool descriptions and the assistant header.

        `variables`: values of further variables of the template. Raises ChatTemplateError.
        """
        values = variables or {}

        def shown(some: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
            told = bool(tools) and self.names_tools(some)
            described = self.tool_format.instructions(tools) if tools and not told else ""
            filled = self.gaps.filled(some, described, self.tool_format)
            return render(self.tokenizer, filled, tools=tools if told else None, add_generation_prompt=True, **values)

        return self._rendered_once(f"prompt {json.dumps(values)}", shown, messages, tools)

    def names_tools(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the template tells the model which tools it has, in a first prompt of messages with these roles.

        Many templates leave tools out silently; `prompt` then describes them in the system message.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._named:
            filled = self.gaps.filled(messages, "", self.tool_format)
            self._named[roles] = describes(self.tokenizer, filled)
        return self._named[roles]

    def suffix(self, messages: list[dict[str, Any]]) -> Rendered:
        """The ids after a sampled turn that ended with a stop token: `messages` and the next assistant header.

        Any stop token takes the place of the template's closer: what follows is the same after each of them. (Llama 3.1
        ends a turn with `<|eot_id|>` or `<|eom_id|>`, and its template, too, writes the same text after both.) Raises
        ChatTemplateError.
        """

        def shown(some: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
            filled = self.gaps.filled(some, "", self.tool_format)
            tail = _after_sentinel(
                render(self.tokenizer, [QUESTION, said(SENTINEL), *filled], add_generation_prompt=True)
            )
            if not tail.startswith(self.closer):
                raise ChatTemplateError(
                    f"the chat template ends an assistant turn with {tail[:20]!r}, not {self.closer!r}"
                )
            return tail[len(self.closer) :]

        return self._rendered_once("suffix", shown, messages, [])

    def forgets(self, following: dict[str, Any]) -> Literal["", "thoughts", "headers"]:
        """What the template leaves out of an earlier turn when it renders a conversation as a whole, as chat servers do.

        `following`: the message after the turn. "thoughts": the turn's thinking. "headers": the empty thought that its
        assistant header holds (Qwen3 with enable_thinking=false). In a rollout both stay where they are, because its
        prompts are never rendered again. "": nothing is left out, or the model does not think.
        """
        if not self.splits_reasoning:
            return ""
        calls = [tool_call("tool", {})] if following["role"] == "tool" else []

        def whole(*forms: Any) -> list[str]:
            filled = (self.gaps.filled([QUESTION, form, following], "", self.tool_format) for form in forms)
            return [render(self.tokenizer, each, add_generation_prompt=True) for each in filled]

        if "</think>" in self.header:
            (text,) = whole(said("!", calls))
            return "headers" if text.count("</think>") < 2 else ""
        texts = whole(said("!", calls, reasoning_content=SENTINEL), said(f"<think>\n{SENTINEL}\n</think>\n\n!", calls))
        return "" if any(SENTINEL in text for text in texts) else "thoughts"

    def turn(self, message: dict[str, Any]) -> str | None:
        """The text of an assistant's message as the template itself writes it, between header and end token.

        None if the template refuses the message, or writes another header before it than before a model's turn.
        """
        try:
            header = render(self.tokenizer, [QUESTION], add_generation_prompt=True)
            text, end, _ = render(self.tokenizer, [QUESTION, message]).rpartition(self.closer)
        except ChatTemplateError:
            return None
        # Some templates put a space between a reply and its end token, which a model does not sample.
        return text[len(header) :].rstrip() if end and text.startswith(header) else None

    def call_text(self) -> str:
        """The text of a turn that calls a tool, as the template or the tool format writes it."""
        example = said("", [tool_call(EXAMPLE.name, EXAMPLE.arguments)])
        (message,) = self.gaps.filled([example], "", self.tool_format)
        return self.turn(message) or self.tool_format.write("", [EXAMPLE])

    def unread_call(self, messages: list[dict[str, Any]] | None = None) -> str:
        """A turn that calls a tool as the template writes it, if the tool format in use does not give its call back; else "".

        Also "" if the template leaves tools out of a prompt that begins with `messages`, if given: then it asks for no form.
        """
        if messages is not None and not self.names_tools(messages):
            return ""
        (message,) = self.gaps.filled([said("", [tool_call(EXAMPLE.name, EXAMPLE.arguments)])], "", self.tool_format)
        text = self.turn(message)
        if text is None:  # another header stands before it than before a model's turn
            question, whole = render(self.tokenizer, [QUESTION]), render(self.tokenizer, [QUESTION, message])
            text = whole.removeprefix(question).rpartition(self.closer)[0]
        read = self.tool_format.read(text.rpartition("</think>")[2], {EXAMPLE.name: {}})
        return "" if EXAMPLE.name not in text or EXAMPLE in read.calls else text

    def _rendered_once(
        self, kind: str, shown: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> Rendered:
        """Render and tokenise once: the rollouts of a group share their prompt, and often tool results."""
        key = json.dumps([kind, messages, tools])
        if key in self._memory:
            return self._memory[key]
        text, encoded = self._tokenised(shown, messages, tools)
        rendered = _attributed(encoded, text, shown(_marked(messages), tools), messages)
        if len(key) <= LONGEST_REMEMBERED:
            if len(self._memory) >= MAX_REMEMBERED:
                self._memory.clear()
            self._memory[key] = rendered
        return rendered

    def _tokenised(
        self, shown: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[str, Encoded]:
        """The rendered text and its ids, among which the control tokens are the template's own."""
        escaped = self.control.escape(messages, tools) if self.control is not None else None
        if self.control is None or escaped is None or not escaped.pieces:
            text = shown(messages, tools)
            return text, tokenised(self.tokenizer, text)
        try:
            text, own = self.control.restore(shown(escaped.messages, escaped.tools), escaped.pieces)
        except ValueError as error:
            raise ChatTemplateError(
                f"the chat template cannot render a message that spells a control token: {error}; give one that writes "
                "messages as they are with --chat-template"
            ) from None
        return text, self.control.encode(text, own)

    def forget(self) -> None:
        """Drop the renderings that are kept for other rollouts."""
        self._memory.clear()

    def parse(
        self, completion_ids: Sequence[int], tools: Sequence[dict[str, Any]], *, opens_thought: bool | None = None
    ) -> tuple[str | None, ParsedReply]:
        """Split a completion into (reasoning or None, reply).

        `tools`: the rollout's tools, in OpenAI's wire format. Without tools, no text is read as a tool call.
        `opens_thought`: whether the reply begins inside a thought, as in `Rendered.opens_thought`; by default, whether
        it does after a question. Such a reply is all reasoning until it closes the thought.
        """
        ids = list(completion_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = text_of(self.tokenizer, ids)
        reasoning = None
        opened = _opens_thought(self.header) if opens_thought is None else opens_thought
        if self.splits_reasoning and (opened or "</think>" in text):
            reasoning, _, text = text.partition("</think>")
            reasoning = reasoning.removeprefix("<think>").strip()
        return reasoning, self.tool_format.read(text, tools_of(tools)) if tools else ParsedReply(text.strip())


Render = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""A function from messages and tools to the template's text."""


def _attributed(encoded: Encoded, text: str, frame: str, messages: list[dict[str, Any]]) -> Rendered:
    """Assign the ids of `text` to messages. `frame`: the same messages rendered with a sentinel for each content."""
    token_ids, offsets = encoded
    is_content, ends = [False] * len(token_ids), []
    token = 0
    spans = _content_spans(text, frame, messages)
    for start, end in spans:
        while token < len(token_ids) and offsets[token][0] < end:
            is_content[token] = offsets[token][1] > start
            token += 1
        ends.append(token)
    return Rendered(token_ids, is_content, ends, _opens_thought(text[spans[-1][1] :] if spans else text))


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a sentinel for each content, except an assistant's empty one, which templates test for."""
    return [{**m, "content": SENTINEL} if m["content"] or m["role"] != "assistant" else m for m in messages]


def _content_spans(text: str, frame: str, messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The (start, end) of each message's content in `text`, in characters.

    A search for the content would find wrong places: "e" occurs in every template. If the template leaves a content
    out, repeats it or depends on it, all spans are (0, 0), and all of `text` counts as the template's own.
    """
    lead, *pieces = frame.split(SENTINEL)
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
        # The template prints the content verbatim or stripped. If it rewrites it (Llama 3.1 quotes tool results), the
        # content ends where the template's next text begins.
        verbatim = (cursor + len(c) for c in _trimmed(content) if text.startswith(c + after, cursor))
        end = next(verbatim, text.find(after, cursor))
        if end < 0:
            return nowhere
        spans.append((cursor, end))
        cursor = end + len(after)
    return spans if cursor == len(text) else nowhere


def _trimmed(content: str) -> tuple[str, ...]:
    """A content as templates print it: verbatim, or without white space at its ends, of which one may be inside."""
    return content, content.strip(), content.lstrip(), content.rstrip()


def assistant_header(tokenizer: Tokenizer) -> str:
    """The text that the chat template adds to a question to open an assistant turn.

    Some templates end a conversation with a token of their own if no turn is to follow (Phi-3), so it is what follows
    the text that both renderings begin with. Raises ChatTemplateError.
    """
    closed, opened = (render(tokenizer, [QUESTION], add_generation_prompt=flag) for flag in (False, True))
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(closed, opened, strict=False))
    return opened[len(list(same)) :]


def _opens_thought(header: str) -> bool:
    return header.rstrip().endswith("<think>")


def _after_sentinel(text: str) -> str:
    # Split at the first occurrence: a tool result after the sentinel may hold it too, the dummy question does not.
    _, found, tail = text.partition(SENTINEL)
    if not found:
        raise ChatTemplateError("the chat template drops an assistant message's content")
    # Some templates put a space between a reply and its end token, which a model does not sample.
    return tail.lstrip()


def _leading_token(tokenizer: Tokenizer, tail: str) -> tuple[str, int]:
    """The added token that `tail` starts with, and its id. Raises ChatTemplateError if it starts with another token.

    Added tokens are split off before tokenisation, so the sampled text before one cannot change how the text after it
    is tokenised.
    """
    ids = tokenizer.encode(tail, add_special_tokens=False)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    if not ids or ids[0] not in added:
        raise ChatTemplateError(
            f"no special token ends an assistant turn in the chat template (it is followed by {tail[:20]!r})"
        )
    return str(added[ids[0]]), ids[0]


def _turn_tokens(tokenizer: Tokenizer, stops: set[int]) -> set[str]:
    """The added tokens that open or close turns: those around a user's message, the one that opens the assistant's
    turn, and the stop tokens.
    """
    added = added_tokens(tokenizer)
    names = set(added.values())
    user = render(tokenizer, [QUESTION])
    header = render(tokenizer, [QUESTION], add_generation_prompt=True).removeprefix(user)
    found = {name for name in names if name in user} | {added[i] for i in stops if i in added}
    opening = [name for name in sorted(names, key=len, reverse=True) if header.startswith(name)]
    return found | set(opening[:1])
