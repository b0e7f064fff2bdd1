"""Tool calls in a form that no reader knows: a text that names a tool beside its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from plumbob.rollout.unread_calls import MOST_NOTED

_NAMED = r"\{\s*\"(?:name|function|tool|action)\"\s*:\s*\""
"""The beginning of a JSON object, up to the name of a tool."""


def call_like(text: str, name: str, parameters: Sequence[str]) -> str:
    """The part of a text that looks like a call of this tool; "" if none does."""
    keys = "|".join(map(re.escape, parameters)) or "$^"
    for found in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text):
        after = text[found.end() : found.end() + 200]
        before = text[max(0, found.start() - 60) : found.start()]
        named = re.search(rf"[\"']?(?:{keys})[\"']?\s*[:=]", after)
        bracket = re.match(r"\s*\(\s*[\"'\d{]", after)
        keyed = re.search(r"[\"']?(?:name|function|tool|action)[\"']?\s*[:=]\s*[\"']?$", before, re.IGNORECASE)
        if keyed and _broken(text, found.start()):
            continue
        if bracket or (named and (keyed or re.match(r"[\s\"'`>:,(]*[{(<\[]", after))):
            return " ".join(text[max(0, found.start() - 40) : found.end() + 120].split())
    return ""


def is_malformed(text: str) -> bool:
    """Whether a text that was noted as an unread call is an object of JSON, with the name of a tool, that cannot be parsed."""
    start = re.search(_NAMED, text)
    # Of a longer one the end is not known.
    return start is not None and len(text) < MOST_NOTED and _broken(text, start.end())


def _broken(text: str, at: int) -> bool:
    """Whether the place `at` stands in a JSON object with double quotes that cannot be parsed: a call that is malformed.

    That of a model which has lost the form is no other form.
    """
    start = text.rfind("{", 0, at)
    if start < 0 or not re.fullmatch(_NAMED, text[start:at]):
        return False
    try:
        json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return True
    return False
