"""What a tool call format provides, and what the formats share.

A family's module has a finder, which finds calls of its form in a reply, and a writer. `Format` makes a `ToolFormat` of
the two: it reads the family's own form first, and where a reply has none, the unmistakable forms of the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plumbob.rollout.toolcalls import MalformedCall, ParsedCall, ParsedReply

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a rollout: each name with the JSON schema of its parameters, which may be empty."""

MAX_CALLS = 16
"""Most calls of one reply that are run. A reply with more is repeating itself."""
MAX_UNREAD = 400
"""Most characters of `ParsedReply.unread`."""


class ToolFormat(Protocol):
    """The form in which a family of models writes tool calls."""

    @property
    def name(self) -> str:
        """The value of `--tool-format`, e.g. "hermes"."""
        ...

    def read(self, text: str, tools: Tools) -> ParsedReply:
        """Split a reply into content and calls. Never raises. `text`: the reply without its stop token."""
        ...

    def write(self, content: str, calls: Sequence[ParsedCall]) -> str:
        """The text of an assistant turn with this content and these calls, as models of the family write it.

        `read` gives the same content and calls back, if `content` is stripped and has no call itself, the names are
        those of tools, and there are at most `MAX_CALLS`. What a family cannot express is said in its module.
        """
        ...

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """What a system message says of the tools where the chat template leaves them out.

        `tools`: as OpenAI's wire format describes them. The text names each tool and shows the form of a call.
        """
        ...

    def example(self) -> str:
        """One call in this form, to show to a model."""
        ...


EXAMPLE = ParsedCall("tool_name", {"parameter": "value"})
"""The call of `ToolFormat.example`."""


@dataclass(frozen=True)
class Found:
    """A part of a reply that is calls: the characters from `start` to `end`."""

    start: int
    end: int
    calls: tuple[ParsedCall | MalformedCall, ...] = ()


@dataclass(frozen=True)
class Search:
    """What a finder found, in the order of the text."""

    found: Sequence[Found] = ()
    unread: str = ""
    """A part that looks like a call and could not be read; "" if there is none."""

    def reads_a_call(self) -> bool:
        """Whether at least one call could be read."""
        return any(isinstance(call, ParsedCall) for found in self.found for call in found.calls)


Finder = Callable[[str, Tools], Search]
"""Finds a family's calls in a reply. Takes time linear in the length of the reply, and never raises."""


@dataclass(frozen=True)
class Format:
    """A family's form of calls. See `ToolFormat`."""

    name: str
    find: Finder = field(repr=False)
    """Finds calls in the family's own form."""
    write_calls: Callable[[Sequence[ParsedCall]], str] = field(repr=False)
    """Writes one or more calls."""
    others: Sequence[Finder] = field(default=(), repr=False)
    """What finds calls in a reply that has none in the family's own form. The first that reads one decides."""

    def read(self, text: str, tools: Tools) -> ParsedReply:
        """See `ToolFormat.read`."""
        malformed, unread = None, ""
        for find in (self.find, *(f for f in self.others if f is not self.find)):
            search = find(text, tools)
            if search.reads_a_call() and (not malformed or _reads_all(malformed, search.found)):
                return _split(text, search.found)
            malformed = malformed or search.found
            unread = unread or search.unread
        if malformed:
            return _split(text, malformed)
        return ParsedReply(text.strip(), (), unread[:MAX_UNREAD])

    def write(self, content: str, calls: Sequence[ParsedCall]) -> str:
        """See `ToolFormat.write`."""
        return "\n".join(part for part in (content, self.write_calls(calls) if calls else "") if part)

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """See `ToolFormat.instructions`."""
        described = "\n".join(dumps(tool) for tool in tools)
        return (
            f"# Tools\n\nYou may call these functions, each described by a JSON schema:\n{described}\n\n"
            f"To call a function, write its name and its arguments in this form, and nothing after it:\n"
            f"{self.example()}\n\nThe result is the next message."
        )

    def example(self) -> str:
        """See `ToolFormat.example`."""
        return self.write_calls([EXAMPLE])


def _reads_all(malformed: Sequence[Found], found: Sequence[Found]) -> bool:
    """Whether another form's calls stand in all parts that the model's own form could not read: else one would be lost."""
    return all(any(f.start < m.end and m.start < f.end for f in found) for m in malformed)


_INVENTED = re.compile(
    r"<\|(?:endoftext|im_start|im_end|eot_id|start_header_id)\|>|</?tool_response>|\[TOOL_RESULTS\]"
    r"|^[ \t]*(?:Human|User|Observation|Tool (?:response|result|output))[ \t]*:"
    r'|\{\s*"(?:response|result|results|output|tool_response)"\s*:',
    re.MULTILINE,
)
"""Where a model goes on after its call as somebody else: it plays the user, or makes up the tool's result."""


def _split(text: str, found: Sequence[Found]) -> ParsedReply:
    """Content and calls. Calls after a made-up result were written on its ground, so they stay content."""
    invented = _INVENTED.search(text, found[0].end)
    last = len(text) if invented is None else invented.start()
    calls: list[ParsedCall | MalformedCall] = []
    pieces, at = [], 0
    for part in found:
        if part.start > last or len(calls) >= MAX_CALLS:
            break
        calls += part.calls[: MAX_CALLS - len(calls)]
        pieces.append(text[at : part.start])
        at = part.end
    return ParsedReply("".join([*pieces, text[at:]]).strip(), tuple(calls))


def tools_of(schemas: Sequence[Mapping[str, Any]]) -> Tools:
    """The tools of OpenAI's wire format, by name."""
    functions = [schema["function"] for schema in schemas]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters that a tool's schema declares, in their order."""
    declared = schema.get("properties")
    return declared if isinstance(declared, Mapping) else {}


def dumps(value: Any) -> str:
    """JSON on one line with letters as they are, as chat templates print it."""
    return json.dumps(value, ensure_ascii=False)
