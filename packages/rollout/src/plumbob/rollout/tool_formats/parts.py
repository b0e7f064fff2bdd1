"""Parts of a reply that are calls, with what stands around them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from plumbob.rollout.tool_formats.base import Found

_BEFORE = re.compile(r"(?:<(tools?|code|python|tool_code|function_calls?)>\s*|```\w*\s*|<|\[\s*|`)\Z")
_AFTER = re.compile(r"[\s}\])]*</(tools?|code|python|tool_code|function_calls?)>|\s*```|>|\s*,?\s*\]|`")
_PAIRS = {"<": ">", "[": "]", "`": "`"}
_SEPARATOR = re.compile(r"[\s,;]*")
_WINDOW = 40
"""Characters before a call in which an opening tag, fence or bracket is looked for."""


def joined(text: str, found: Sequence[Found]) -> list[Found]:
    """Neighbours as one part, with the tags, the fence or the brackets around it, which are no content either."""
    parts: list[Found] = []
    for one in found:
        last = parts[-1] if parts else None
        if last and _SEPARATOR.fullmatch(text, last.end, one.start):
            parts[-1] = Found(last.start, one.end, (*last.calls, *one.calls))
        else:
            parts.append(one)
    return [_wrapped(text, part, parts[i - 1].end if i else 0) for i, part in enumerate(parts)]


def _wrapped(text: str, part: Found, least: int) -> Found:
    """The part with what encloses it on both sides; one of `<tools>` and `</tools>` may be missing."""
    before = _BEFORE.search(text, max(least, part.start - _WINDOW), part.start)
    after = _AFTER.match(text, part.end)
    tags = [match[1] if match else None for match in (before, after)]
    if any(tags):
        opened = before if tags[0] and (tags[0] == tags[1] or tags[0].startswith("tool")) else None
        closed = after if tags[1] and (tags[0] == tags[1] or tags[1].startswith("tool")) else None
    else:
        paired = before and after and _PAIRS[before[0].strip()[0]] == after[0].strip()[-1]
        opened, closed = (before, after) if paired else (None, None)
    return Found(opened.start() if opened else part.start, closed.end() if closed else part.end, part.calls)
