"""What a trainer provides so that its environments can be examined: tasks, and a way to play them with turns of a script.

Nothing here knows verifiers, TRL or a tokenizer. A trainer implements `Player`; its tests are the contract.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Split = Literal["train", "held-out"]
Failure = Literal["fails", "hangs", "not-finite"]
"""How a rollout failed: with an error, by not returning in time, or with a reward that is no finite number."""


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: Any
    """An object (a dict) of arguments; their text, if it could not be read."""


@dataclass(frozen=True)
class Turn:
    """A turn of the model: text, calls, or both."""

    text: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Message:
    """A message of a conversation."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    text: str
    calls: tuple[Call, ...] = ()
    answers: Call | None = None
    """The call whose result this is; None for other messages, and for results that do not say it."""
    sampled: bool = False
    """Whether it is a turn of the model. A prompt may hold turns of an assistant that are none."""


@dataclass(frozen=True, eq=False)
class Task:
    """A task. Two tasks are equal if they are the same object."""

    key: str
    split: Split
    fields: Mapping[str, Any]
    """Its data by name: questions, answers, documents; without prompts, names and numbers of rows."""
    prompt: str
    """The text with which it is put to the model, as far as it is known before the task is played."""
    handle: Any = None
    """The trainer's own object."""


@dataclass(frozen=True, eq=False)
class Played:
    """One rollout of a task, whose turns were those of a script."""

    task: Task
    reward: float
    """The weighted sum; NaN if the rollout failed."""
    components: Mapping[str, float] = field(default_factory=dict)
    """What each reward function returned, times its weight."""
    messages: tuple[Message, ...] = ()
    failure: Failure | None = None
    error: str = ""
    """What failed, in one line: the type of the error, and its message."""

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages before the model's first turn."""
        return tuple(itertools.takewhile(lambda message: not message.sampled, self.messages))

    @property
    def prompt(self) -> str:
        """The text of the messages before the model's first turn."""
        return "\n".join(message.text for message in self.opening)

    @property
    def results(self) -> list[str]:
        """The texts of the tool results, in order."""
        return [message.text for message in self.messages if message.role == "tool"]

    @property
    def last(self) -> str:
        """The text of the model's last turn."""
        return next((m.text for m in reversed(self.messages) if m.sampled), "")


@dataclass(frozen=True)
class Script:
    """A task, and the turns that a model would take in it. The rollout ends after them, whatever the environment waits for."""

    task: Task
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class RunSettings:
    """What the examination must know of the run that is planned."""

    at_once: int = 64
    """Number of rollouts that the run plays at the same time."""
    as_given: bool = False
    """Whether tasks are taken in the order in which the environment gives them, and none was asked for."""
    taken: int = 0
    """Number of tasks that the run takes in all, counting those that it takes again; 0: unknown."""


class Player(Protocol):
    """An environment with its tasks."""

    train: Sequence[Task]
    """All training tasks; the first thousand of tasks without end."""
    held_out: Sequence[Task]
    settings: RunSettings

    def oracle(self, task: Task) -> tuple[Turn, ...] | str | None:
        """The turns of a perfect transcript of the task. None: the environment has none. A text: the error that it raised."""

    def play(self, scripts: Sequence[Script]) -> list[Played]:
        """Play these at the same time, `settings.at_once` of them at most, and score them. What an environment raises is in
        `Played.error`. Each rollout lets the others go on before every turn.
        """

    def direct(self, task: Task, calls: Sequence[Call]) -> list[str | None]:
        """What the tools return to these calls, one after another, without anything between them and the caller.

        None for a call that cannot be made so.
        """

    def place(self, kind: Literal["reward", "tool", "tasks"], name: str = "") -> str:
        """Where the user's code is, as "file.py:12 Class.function"; "" if it is unknown."""


@dataclass
class Given:
    """A `Player` of which only the tasks are asked: what was played, or scored, is known already."""

    train: Sequence[Task]
    held_out: Sequence[Task] = ()
    settings: RunSettings = field(default_factory=RunSettings)
    code: Mapping[str, str] = field(default_factory=dict)
    """Name of each reward function -> where it is."""

    def place(self, kind: str, name: str = "") -> str:
        return self.code.get(name) or next(iter(self.code.values()), "") if kind == "reward" else ""


def messages_of(nodes: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages of a rollout, each given as a JSON object {"message": ..., "sampled": ...}. Raises KeyError if they are none.

    Calls are those of verifiers, whose results name them, or those of TRL, whose results stand in their order.
    """
    named, waiting, found = dict[str, Call](), list[Call](), list[Message]()
    for node in nodes:
        said, content = node["message"], node["message"].get("content") or ""
        calls = enumerate(said.get("tool_calls") or ())
        own = {call.get("id", k): _call(call.get("function", call)) for k, call in calls}
        named |= own
        waiting += own.values()
        text = content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content)
        answers = named.get(said.get("tool_call_id") or "")
        if answers is None and waiting and said["role"] == "tool":
            answers = waiting.pop(0)
        found.append(Message(said["role"], text, tuple(own.values()), answers, bool(node.get("sampled"))))
    return tuple(found)


def _call(said: Mapping[str, Any]) -> Call:
    """A call whose arguments are an object or its text, which may be no JSON."""
    arguments = said["arguments"]
    with suppress(ValueError, TypeError):
        arguments = json.loads(arguments)
    return Call(said["name"], arguments)


def place_of(function: Any) -> str:
    """Where a function is written, as "file.py:12 Class.function"; "" if it has no source."""
    try:
        code = inspect.unwrap(getattr(function, "__func__", function))
        return f"{Path(inspect.getsourcefile(code) or '').name}:{inspect.getsourcelines(code)[1]} {code.__qualname__}"
    except (TypeError, OSError):
        return ""
