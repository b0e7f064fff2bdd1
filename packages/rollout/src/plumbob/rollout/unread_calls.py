"""What becomes of a reply that looks like a tool call in a form that no reader knows.

It is counted, and noted on the trace. The model is told the form of a call, as a user's message, because a call that
was not read has no id that a tool's message could answer. Every chat template can render a user's message after an
assistant's. A reply that also has an answer is left alone: it ends the rollout as if nothing had happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plumbob.rollout.tool_formats import ToolFormat, named, tools_of
from plumbob.rollout.toolcalls import ParsedReply

NOTED = "unread_calls"
"""Key of `trace.info`: a list of {"turn": number from 0, "text": the unread part, "explained": whether a message says
so}."""
MOST_NOTED = 400
"""Most characters of such a part that are noted."""
_ANSWER = re.compile(r"</answer>|\\boxed\{|^#### |\banswer(?: is|:)|^\W*answer\W*:", re.IGNORECASE | re.MULTILINE)
MAX_QUOTED = 120
"""Most characters of a reply that its explanation quotes."""


def explanation(reply: ParsedReply, tool_format: ToolFormat, tools: Iterable[str]) -> str:
    """What the model is told of its unread call; "" if the reply has an answer, or nothing unread."""
    if not reply.unread or _ANSWER.search(reply.content):
        return ""
    quoted = " ".join(reply.unread.split())
    quoted = quoted if len(quoted) <= MAX_QUOTED else f"{quoted[:MAX_QUOTED]}..."
    return (
        f"Error: this looks like a tool call, but it could not be read: {quoted}\n"
        f"To call a tool, write its name and its arguments in this form:\n{tool_format.example()}\n"
        f"The tools are: {', '.join(tools)}."
    )


def unread_in(content: str, schemas: Sequence[Mapping[str, Any]]) -> str:
    """The part of a reply without calls, as a chat server returned it, that looks like a call; "" if none does.

    `schemas`: the tools, in OpenAI's wire format.
    """
    if not schemas or not content:
        return ""
    reply = named("auto").read(content, tools_of(schemas))
    return content if reply.calls else reply.unread


def note(info: dict[str, Any], turn: int, text: str, *, explained: bool) -> None:
    """Note an unread call on a trace's `info`."""
    info.setdefault(NOTED, []).append({"turn": turn, "text": text[:MOST_NOTED], "explained": explained})


def explained_turns(info: Mapping[str, Any]) -> set[int]:
    """The turns of a stored trace after which the model was told the form of a call."""
    return {noted["turn"] for noted in info.get(NOTED) or () if noted["explained"]}
