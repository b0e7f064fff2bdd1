"""A chat engine that reads its turns from a script: an environment's oracle, or a transcript to score again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from plumbob.rollout.dialogue import EndOfScript
from plumbob.rollout.toolcalls import read_arguments
from plumbob.rollout.types import ChatReply, EngineError, Sampling


class ScriptedChat:
    """Says the given assistant messages in order, whatever it is told; use one for each rollout.

    `ending`: the stop reason of a rollout that goes on after the last message, as a stored one that was cut; without it
    a script that is too short is an EngineError.
    """

    def __init__(self, replies: Iterable[ChatReply], ending: str | None = None) -> None:
        self.replies = list(replies)
        self.ending = ending
        self.said = 0

    async def reply(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], sampling: Sampling
    ) -> ChatReply:
        if self.said == len(self.replies):
            if self.ending is not None:
                raise EndOfScript(self.ending)
            raise EngineError(f"the script has only {self.said} turns, and the rollout goes on")
        self.said += 1
        return self.replies[self.said - 1]

    @classmethod
    def of_messages(cls, messages: Iterable[Any]) -> ScriptedChat:
        """Of verifiers' `AssistantMessage`s, such as a task's `oracle()` gives."""
        return cls(
            _reply(m.content, m.reasoning_content, [(c.name, c.arguments) for c in m.tool_calls or ()])
            for m in messages
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ScriptedChat:
        """Of a stored trace: a line of traces/step_N.jsonl, of an evaluation, or of upstream's vf-eval."""
        finish = {call.get("node"): call.get("finish_reason") for call in record.get("calls") or ()}
        replies = [
            _reply(
                node["message"].get("content"),
                node["message"].get("reasoning_content"),
                [(call["name"], call["arguments"]) for call in node["message"].get("tool_calls") or ()],
                "length" if finish.get(i) == "length" else "stop",
            )
            for i, node in enumerate(record["nodes"])
            if node.get("sampled")
        ]
        return cls(replies, ending=record.get("stop_condition") or "max_turns")


def _reply(
    content: Any, reasoning: str | None, calls: Sequence[tuple[str, str]], finish: Literal["stop", "length"] = "stop"
) -> ChatReply:
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
    return ChatReply(text, tuple(read_arguments(*call) for call in calls), reasoning, finish)
