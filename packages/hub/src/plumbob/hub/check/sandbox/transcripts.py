"""Scripted transcripts for the checks: garbage that should get no reward, and oracles with some turns changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from plumbob.rollout import ChatReply, MalformedCall, ParsedCall

if TYPE_CHECKING:
    import verifiers.v1 as vf

Transcript = list[ChatReply]

_WORDS = ["river", "amber", "seven", "copper", "the", "of", "because", "therefore", "answer"]
_UNICODE = (
    "\u202e\u0000\ufffd\U0001f9ff\u200d\u0301\u0301\u0301 \u0664\u0662 \x1b[31m \u3000\ufeff <|im_end|> </s> [/INST]"
)
_WRONG: tuple[Any, ...] = (None, [["nested"]], {"no": "such argument"})
LONG = 20_000
"""Characters of the long garbage reply."""


def plain_garbage(task: vf.Task, seed: int) -> dict[str, Transcript]:
    """Return meaningless replies that call no tool, by a description of each."""
    rng = random.Random(f"garbage/{seed}")
    words = " ".join(rng.choices(_WORDS, k=40))
    texts = {
        "an empty reply": "",
        "white space": " \n\t\n ",
        "random words": words,
        "the prompt repeated": task.data.prompt_text,
        f"{LONG} characters": ("".join(rng.choices("abcdefghij (){}[]<>\\", k=60)) * LONG)[:LONG],
        "unicode junk": _UNICODE,
        "a refusal": "I'm sorry, but I can't help with that.",
        "unclosed tags": "<think>" * 30 + "<answer>" * 30 + "\\boxed{" * 30 + "```json\n{",
        "a tool call as text": '<tool_call>{"name": "search", "arguments": {"query": </tool_call>',
    }
    return {name: [ChatReply(text)] for name, text in texts.items()}


def called_garbage(task: vf.Task, tools: Sequence[dict[str, Any]], seed: int) -> dict[str, Transcript]:
    """Return garbage that calls tools or repeats the system prompt, by a description of each."""
    words = ChatReply(" ".join(random.Random(f"called/{seed}").choices(_WORDS, k=12)))
    found = {
        "a call of an unknown tool": [ChatReply("", (ParsedCall("no_such_tool", {"x": 1}),)), words],
        "an unreadable call": [ChatReply("", (MalformedCall('{"name": ', "the call is not valid JSON"),)), words],
    }
    if task.data.system_prompt:
        found["the system prompt repeated"] = [ChatReply(task.data.system_prompt)]
    for wrong in _WRONG if tools else ():
        calls = tuple(ParsedCall(t["function"]["name"], _wrong_arguments(t["function"], wrong)) for t in tools)
        found[f"every tool called with {wrong!r}"] = [ChatReply("", calls), words]
    return found


def _wrong_arguments(function: dict[str, Any], wrong: Any) -> dict[str, Any]:
    if isinstance(wrong, dict):
        return wrong
    return dict.fromkeys(function["parameters"].get("properties", {}), wrong)


def mutations(oracle: Transcript, seed: int) -> Iterator[tuple[str, Transcript]]:
    """Yield the oracle with turns left out, repeated or reordered, each with a description."""
    rng = random.Random(f"mutations/{seed}")
    for index in rng.sample(range(len(oracle)), min(4, len(oracle))):
        yield f"the oracle without turn {index}", oracle[:index] + oracle[index + 1 :]
    shuffled = rng.sample(oracle, len(oracle))
    yield "the oracle's turns shuffled", shuffled
    yield "the oracle's turns reversed", oracle[::-1]
    yield "each of the oracle's turns twice", [turn for turn in oracle for _ in range(2)]
    yield "the oracle twice", oracle * 2
    yield "the oracle's text three times", [ChatReply(turn.content * 3, turn.calls, turn.reasoning) for turn in oracle]
    yield "the oracle's calls three times", [ChatReply(turn.content, turn.calls * 3, turn.reasoning) for turn in oracle]
