"""A chat engine that replays a script: an environment's oracle, or a stored transcript that is scored again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from plumbob.rollout.dialogue import EndOfScript
from plumbob.rollout.toolcalls import read_arguments
from plumbob.rollout.types import ChatReply, EngineError, Sampling
from plumbob.rollout.unread_calls import explained_turns


class ScriptedChat:
    """Returns the given assistant messages in order, whatever the conversation is. Each rollout needs its own instance.

    `ending`: the stop reason with which a rollout ends that continues after the last message, as for a stored rollout
    that was cut off by a limit. Without it, a rollout that continues after the last message raises EngineError.
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
            raise EngineError(f"the stored transcript has only {self.said} turns, and the rollout needs another one")
        self.said += 1
        return self.replies[self.said - 1]

    @classmethod
    def of_messages(cls, messages: Iterable[Any]) -> ScriptedChat:
        """Make a script from verifiers' `AssistantMessage`s, such as those of a task's `oracle()`."""
        return cls(
            _reply(m.content, m.reasoning_content, [(c.name, c.arguments) for c in m.tool_calls or ()])
            for m in messages
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ScriptedChat:
        """Make a script from a stored trace, of a training run, an evaluation, or verifiers' vf-eval."""
        finish = {call.get("node"): call.get("finish_reason") for call in record.get("calls") or ()}
        nodes = record["nodes"]
        sampled = [i for i, node in enumerate(nodes) if node.get("sampled")]
        explained = explained_turns(record.get("info") or {})
        replies = [
            _reply(
                nodes[i]["message"].get("content"),
                nodes[i]["message"].get("reasoning_content"),
                [(call["name"], call["arguments"]) for call in nodes[i]["message"].get("tool_calls") or ()],
                "length" if finish.get(i) == "length" else "stop",
                _told(nodes[i + 1 :]) if turn in explained else "",
            )
            for turn, i in enumerate(sampled)
        ]
        return cls(replies, ending=record.get("stop_condition") or "max_turns")


def _told(following: Sequence[Mapping[str, Any]]) -> str:
    """What the model was told after a turn. A trace that ends with the turn does not hold it, nor needs it."""
    return following[0]["message"]["content"] if following else "..."


def _reply(
    content: Any,
    reasoning: str | None,
    calls: Sequence[tuple[str, str]],
    finish: Literal["stop", "length"] = "stop",
    explanation: str = "",
) -> ChatReply:
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())
    return ChatReply(text, tuple(read_arguments(*call) for call in calls), reasoning, finish, explanation=explanation)
