"""Keep the text of messages text: a control token that is spelled in a message is not tokenised as that token.

A tool result, a document or a question is written by others. If it spells `<|im_end|>`, plain tokenisation ends its
turn there, and what follows can pose as another turn. Here such a spelling becomes the ordinary tokens of its
characters, which decode to the same text.

How: before a template is rendered, every spelling in a message is replaced by a placeholder of letters and digits,
which templates leave alone even where they trim a text or quote it as JSON. The control tokens of the rendered text are
then exactly the template's own. Afterwards the placeholders are replaced by what they stand for, and the text is
tokenised by a copy of the tokenizer that knows control tokens under secret names, which stand where the template wrote
its own. Without a spelling in any message, the tokenizer itself tokenises the rendered text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from plumbob.rollout.types import Tokenizer

Encoded = tuple[list[int], list[tuple[int, int]]]
"""The ids of a text, and for each of them the (start, end) of its characters in the text."""


@dataclass(frozen=True)
class ControlTokens:
    """Which of a tokenizer's added tokens are text in which messages.

    Example: `ControlTokens.of(tokenizer, structural={"<|im_start|>", "<|im_end|>"})`.
    """

    tokenizer: Tokenizer
    everywhere: frozenset[str]
    """Text in system and user messages and in tool declarations: tokens flagged as special, and those of turns."""
    in_results: frozenset[str]
    """Text in tool results: those of `everywhere`, and the template's marks inside of turns, such as `<tool_call>`."""
    in_replies: frozenset[str]
    """Text in earlier assistant messages, which may hold marks such as `<think>` that the model wrote."""
    _nonce: str = field(default_factory=lambda: f"plumbob{secrets.token_hex(8)}", repr=False, compare=False)
    _renamed: list[_RenamedTokenizer] = field(default_factory=list, repr=False, compare=False)
    """The copy of the tokenizer, once a text has needed it."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, structural: Iterable[str], written: str = "") -> ControlTokens:
        """The control tokens of a tokenizer with a chat template.

        `structural`: the tokens that open or close turns, which count even if the tokenizer does not flag them.
        `written`: what is put into messages for the template, whose marks count as the template's own.
        """
        added = added_tokens(tokenizer)
        # Some tokenizers have runs of spaces and line breaks as added tokens, which every text may contain.
        visible = {name for name in added.values() if name.strip(" \t\r\n▁")}
        flags = getattr(tokenizer, "added_tokens_decoder", {})
        special = {added[i] for i, token in flags.items() if getattr(token, "special", True)}
        special = visible & (special | set(getattr(tokenizer, "all_special_tokens", ())))
        turns = set(structural) & visible
        marks = {name for name in visible - turns if name in str(tokenizer.chat_template) + written}
        return cls(
            tokenizer,
            everywhere=frozenset(special | turns),
            in_results=frozenset(special | turns | marks),
            in_replies=frozenset((special | turns) - marks),
        )

    def escape(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> Escaped:
        """Replace every spelling of a control token by a placeholder, in all texts of messages and tools."""
        pieces: list[str] = []

        def placeholder(piece: str) -> str:
            pieces.append(piece)
            return f"{self._nonce}x{len(pieces) - 1}x"

        by_role = {"tool": _finder(self.in_results), "assistant": _finder(self.in_replies)}
        other = _finder(self.everywhere)
        return Escaped(
            [_mapped(m, by_role.get(m["role"], other), placeholder, keep=("role",)) for m in messages],
            [_mapped(tool, other, placeholder) for tool in tools],
            pieces,
        )

    def restore(self, rendered: str, pieces: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
        """The text without placeholders, and the (start, end) of the control tokens that the template wrote.

        Raises ValueError if the template has changed a placeholder.
        """
        parts: list[str] = []
        own: list[tuple[int, int]] = []
        length = end = 0
        for found in self._spellings(f"{self._nonce}x([0-9]+)x|").finditer(rendered):
            before = rendered[end : found.start()]
            piece = found[0] if found[1] is None else pieces[int(found[1])]
            start = length + len(before)
            if found[1] is None and piece in self.in_results:
                own.append((start, start + len(piece)))
            parts += [before, piece]
            length, end = start + len(piece), found.end()
        text = "".join([*parts, rendered[end:]])
        if self._nonce.lower() in text.lower():
            raise ValueError("it changes the letters of a message in which a control token is spelled")
        return text, own

    def encode(self, text: str, own: Sequence[tuple[int, int]]) -> Encoded:
        """Tokenise `text` with control tokens at the places `own` only."""
        if list(own) == [f.span() for f in self._spellings().finditer(text) if f[0] in self.in_results]:
            return tokenised(self.tokenizer, text)
        if not self._renamed or not self._renamed[0].fits(text):
            self._renamed[:] = [_RenamedTokenizer.of(self.tokenizer, self.in_results)]
        return self._renamed[0].encode(text, own)

    def _spellings(self, before: str = "") -> re.Pattern[str]:
        """Matches what the tokenizer takes for an added token: of several that begin at one place, the longest."""
        names = "|".join(map(re.escape, _longest_first(added_tokens(self.tokenizer).values())))
        return re.compile(f"{before}(?:{names})")


@dataclass(frozen=True)
class Escaped:
    """Messages and tools whose texts spell no control token, and what their placeholders stand for."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    pieces: list[str]
    """What placeholder 0, 1, ... stands for; empty if nothing had to be replaced."""


def tokenised(tokenizer: Tokenizer, text: str) -> Encoded:
    """The ids of a text without special tokens around it, and the (start, end) of each in characters.

    transformers hands even a single text to a pool with a thread for each core, which takes milliseconds to wake on a large
    host: the tokenizer behind it is asked in this thread instead.
    """
    behind: Any = getattr(tokenizer, "backend_tokenizer", None)
    if behind is None or behind.truncation or behind.padding or behind.encode_special_tokens:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]
    found = behind.encode(text, add_special_tokens=False)
    return found.ids, found.offsets


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The text of ids, special tokens included, without transformers' look at the type of each id where nothing else differs."""
    kind, behind = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    ways = [getattr(getattr(kind, name, None), "__qualname__", "") for name in ("decode", "_decode")]
    usual = ways == ["PreTrainedTokenizerBase.decode", "TokenizersBackend._decode"]
    if behind is not None and usual and not getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return behind.decode(token_ids, skip_special_tokens=False)
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def added_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """The tokenizer's added tokens, which are found in any text before it is tokenised: id -> text."""
    return {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}


class _Finder:
    """Finds spellings of some tokens in a text, also of those that a template's text before or behind may complete."""

    def __init__(self, names: frozenset[str]) -> None:
        self.whole = re.compile("|".join(map(re.escape, _longest_first(names))) or r"(?!)")
        self.starts = {name[:i] for name in names for i in range(1, len(name))}
        self.ends = {name[i:] for name in names for i in range(1, len(name))}
        self.longest = max(map(len, names), default=1) - 1

    def replace(self, text: str, placeholder: Callable[[str], str]) -> str:
        """`text` with a placeholder for each whole token, and for a part of one at its beginning or end."""
        core = text.strip()  # a template may strip a text
        head = 0 if self.whole.match(core) else self._longest(core, self.ends, lambda size: core[:size])
        rest = core[head:]
        tail = self._longest(rest, self.starts, lambda size: rest[-size:])
        middle = rest[: len(rest) - tail]
        left = text[: len(text) - len(text.lstrip())] if core else text
        parts = [
            placeholder(core[:head]) if head else "",
            self.whole.sub(lambda found: placeholder(found[0]), middle),
            placeholder(rest[-tail:]) if tail else "",
        ]
        return left + "".join(parts) + text[len(left) + len(core) :]

    def _longest(self, text: str, parts: set[str], cut: Callable[[int], str]) -> int:
        """The size of the longest of `parts` that `cut` finds in `text`; 0 if there is none."""
        return next((size for size in range(min(self.longest, len(text)), 0, -1) if cut(size) in parts), 0)


@lru_cache(16)
def _finder(names: frozenset[str]) -> _Finder:
    return _Finder(names)


def _mapped(value: Any, finder: _Finder, placeholder: Callable[[str], str], keep: Sequence[str] = ()) -> Any:
    """A copy of a JSON value in which every text is replaced; `keep`: keys whose values stay as they are."""
    if isinstance(value, str):
        return finder.replace(value, placeholder)
    if isinstance(value, dict):
        return {
            _mapped(k, finder, placeholder): v if k in keep else _mapped(v, finder, placeholder)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(v, finder, placeholder) for v in value]
    return value


@dataclass(frozen=True)
class _RenamedTokenizer:
    """A copy of a tokenizer that knows some tokens under other names, of the same length, that no text contains."""

    backend: Any
    """A `tokenizers.Tokenizer`."""
    names: dict[str, str]
    """A token's text -> its name here."""
    ids: dict[int, int]
    """Ids of added tokens here -> the tokenizer's own."""

    @classmethod
    def of(cls, tokenizer: Any, tokens: frozenset[str]) -> _RenamedTokenizer:
        own = tokenizer.backend_tokenizer
        # Characters of a plane for private use, at random: who writes a message cannot know them.
        names = {t: "".join(chr(0xF0000 + secrets.randbelow(0xFFFD)) for _ in t) for t in sorted(tokens)}
        state = json.loads(own.to_str())
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        state["truncation"] = state["padding"] = None
        _rename_in_model(state["model"], names)
        renamed = type(own).from_str(json.dumps(state))
        added = {t["content"]: t["id"] for t in state["added_tokens"]}
        return cls(renamed, names, {renamed.token_to_id(name): i for name, i in added.items()})

    def fits(self, text: str) -> bool:
        return not any(name in text for name in self.names.values())

    def encode(self, text: str, own: Sequence[tuple[int, int]]) -> Encoded:
        parts, end = [], 0
        for start, stop in own:
            parts += [text[end:start], self.names[text[start:stop]]]
            end = stop
        encoding = self.backend.encode("".join([*parts, text[end:]]), add_special_tokens=False)
        return [self.ids.get(i, i) for i in encoding.ids], encoding.offsets


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens in a model's own vocabulary, so that it cannot put them together from parts either."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
    elif isinstance(vocab, list):  # a unigram model
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
        gone = set(names)
        model["merges"] = [m for m, pair in pairs if "".join(pair) not in gone and gone.isdisjoint(pair)]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def _longest_first(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (-len(name), name))
