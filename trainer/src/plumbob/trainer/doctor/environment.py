"""What can be examined before a model is loaded: an environment's tasks, tools and rewards, played by scripts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from plumbob.hub import find
from plumbob.rollout import ChatReply, Limits, run_rollout
from plumbob.rollout.scripted import ScriptedChat, replies_of_messages
from plumbob.rollout.toolcalls import ParsedCall
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.rollouts.stream import TaskStream
from plumbob.trainer.rollouts.tasks import Tasks, load_evaluation_tasks

ORACLES = 48
"""Number of training tasks whose oracle is played. If no oracle fails, at most 6% of all do (at 95% confidence)."""
HELD_OUT_ORACLES = 24
"""Number of held-out tasks whose oracle is played."""
VOCABULARY = 500
"""Number of tasks whose answers are looked for in what other tasks' transcripts read."""
UNBOUNDED = Limits(1 << 20, 1 << 40, 600.0)
"""Limits of scripted rollouts: they end by themselves, so only the seconds are bounded."""
MOST_HANGING = 2
"""Number of rollouts that may hang before no more are played, because each takes --max-tool-seconds."""
LABELLED = frozenset({"idx", "id", "name", "description", "prompt", "system_prompt"})
"""Fields of a task's data that say nothing of its answer."""
_ANSWER = re.compile(r"answer|gold|target|solution|label|expected|reference|truth", re.IGNORECASE)


@dataclass(frozen=True)
class Played:
    """A task that was played by a script."""

    task: vf.Task
    trace: vf.Trace
    seconds: float = 0.0

    @property
    def reward(self) -> float:
        return self.trace.reward

    @property
    def opening(self) -> list[tuple[str, str]]:
        """(role, text) of each message before the model's first turn. A prompt may hold worked turns of an assistant."""
        nodes = itertools.takewhile(lambda node: not node.sampled, self.trace.nodes)
        return [(node.message.role, text_of(node.message)) for node in nodes]


@dataclass
class Environment:
    """The tasks of a run with their tools and rewards. No model is needed."""

    config: TrainConfig
    tasks: Tasks
    runner: asyncio.Runner
    hanging: int = 0
    """Number of rollouts in which something of the environment hung."""

    def play(self, task: vf.Task, script: ScriptedChat) -> Played:
        """Play `task` with replies from a script in place of a model's, and score it."""
        start = time.perf_counter()
        trace = self.runner.run(scripted(task, script, self.config, self.tasks))
        self.hanging += any(error.type == "Stuck" for error in trace.errors)
        return Played(task, trace, time.perf_counter() - start)

    def say(self, task: vf.Task, *replies: ChatReply) -> Played:
        """Play `task` with these turns of the model. It ends after them, even if the environment waits for more."""
        return self.play(task, ScriptedChat(replies, ending="max_turns"))

    def _each(self, tasks: Sequence[vf.Task], play: Callable[[vf.Task], Played]) -> list[Played]:
        played: list[Played] = []
        for task in tasks:
            if self.hanging >= MOST_HANGING:
                break
            played.append(play(task))
        return played

    @functools.cached_property
    def sample(self) -> list[vf.Task]:
        """Training tasks that stand for all: evenly spread, or the first ones of tasks without end."""
        train = self.tasks.train
        if isinstance(train, TaskStream):
            return list(train[:ORACLES])
        return [train[i] for i in spread(len(train), ORACLES)]

    @functools.cached_property
    def has_oracle(self) -> bool:
        """Whether the environment's tasks bring a perfect transcript of their own."""
        return hasattr(self.sample[0], "oracle")

    @functools.cached_property
    def replies(self) -> list[list[ChatReply] | str]:
        """The turns of each sampled task's oracle, or the error with which its method failed; empty without oracles."""
        return [_replies(task) for task in self.sample] if self.has_oracle else []

    @functools.cached_property
    def silent(self) -> list[Played]:
        """Each sampled task, played with one empty reply."""
        return self._each(self.sample, lambda task: self.say(task, ChatReply("")))

    @functools.cached_property
    def floors(self) -> dict[int, float]:
        """`id` of each sampled task -> what an empty reply earns."""
        return {id(played.task): played.reward for played in self.silent}

    def floor(self, task: vf.Task) -> float:
        """What an empty reply earns in a sampled task, or in one of `own_oracles`."""
        if id(task) not in self.floors:
            self.floors[id(task)] = self.say(task, ChatReply("")).reward
        return self.floors[id(task)]

    @functools.cached_property
    def silent_held_out(self) -> list[Played]:
        """Held-out tasks, played with one empty reply."""
        held_out = self.tasks.held_out
        chosen = [held_out[i] for i in spread(len(held_out), ORACLES)] if held_out else []
        return self._each(chosen, lambda task: self.say(task, ChatReply("")))

    @functools.cached_property
    def oracles(self) -> list[Played]:
        """Each sampled task, played by its oracle. Tasks whose `oracle` method failed are left out."""
        known = self.turns
        playable = [task for task in self.sample if id(task) in known]
        return self._each(playable, lambda task: self.play(task, ScriptedChat(known[id(task)])))

    @functools.cached_property
    def oracle_settings(self) -> dict[str, str]:
        """The settings for which the environment's oracles are made, if it says so."""
        return dict(getattr(find(self.config.env).load(), "oracle_settings", {}))

    @functools.cached_property
    def own_oracles(self) -> list[Played]:
        """The sampled tasks played by their oracles with the settings for which these are made; [] if there are none."""
        if not self.oracle_settings:
            return []
        given = dict(pair.split("=", 1) for pair in self.config.env_args)
        if self.config.datasets is not None:
            given["datasets"] = self.config.datasets
        like = load_evaluation_tasks(self.config.env, given, 1, oracle=True).tasks[0]
        played = []
        for task in self.sample:
            other = type(task)(task.data, like.config)
            played.append(self.play(other, ScriptedChat.of_messages(oracle_of(other))))
        return [p for p in played if p.trace.ok]

    @functools.cached_property
    def held_out_oracles(self) -> list[Played]:
        """Held-out tasks, played by their oracles; tasks whose `oracle` method failed are left out. Empty without oracles."""
        known = self._held_out_turns
        playable = [task for task in self._held_out_sample if id(task) in known]
        return self._each(playable, lambda task: self.play(task, ScriptedChat(known[id(task)])))

    @functools.cached_property
    def _held_out_sample(self) -> list[vf.Task]:
        """Held-out tasks with an oracle."""
        held_out = self.tasks.held_out if self.has_oracle else ()
        return [held_out[i] for i in spread(len(held_out), HELD_OUT_ORACLES)] if held_out else []

    @functools.cached_property
    def _held_out_turns(self) -> dict[int, list[ChatReply]]:
        """`id` of such a held-out task -> the turns of its oracle."""
        return {id(task): turns for task in self._held_out_sample if isinstance(turns := _replies(task), list)}

    def turns_of(self, task: vf.Task) -> list[ChatReply]:
        """The turns of a task's oracle, training or held-out; none if there are none, or its method failed."""
        if (known := self.turns.get(id(task)) or self._held_out_turns.get(id(task))) is not None:
            return known
        turns = _replies(task) if self.has_oracle else []
        return turns if isinstance(turns, list) else []

    @functools.cached_property
    def turns(self) -> dict[int, list[ChatReply]]:
        """`id` of a sampled task -> the turns of its oracle."""
        pairs = zip(self.sample, self.replies, strict=False)
        return {id(task): turns for task, turns in pairs if isinstance(turns, list)}

    @property
    def gold_field(self) -> str | None:
        """The field of a task's data that holds its right answer, as the oracles' last replies show; None if unknown."""
        return self._gold[0] if self._gold else None

    @functools.cached_property
    def _gold(self) -> tuple[str, bool] | None:
        """(the field with the answer, whether the answer is only the last word in it, as in a worked solution)."""
        best: tuple[bool, bool, float, int, str] | None = None
        for name in type(self.sample[0].data).model_fields.keys() - LABELLED:
            values = [_first_text(getattr(task.data, name, None)) for task in self.sample]
            # What all tasks have in common is a setting, such as the form of an answer.
            if not all(values) or len(set(values)) == 1 < len(values):
                continue
            named = bool(_ANSWER.search(name))
            share = whole = 1.0 if named and not self.has_oracle else 0.0
            if self.has_oracle:
                finals = [said(turns[-1]) for turns in self.replies if isinstance(turns, list) and turns]
                whole = sum(value in final for value, final in zip(values, finals, strict=False)) / len(values)
                last = sum(v.split()[-1] in final for v, final in zip(values, finals, strict=False)) / len(values)
                share = max(whole, last if named else 0.0)
            # Of two that oracles say, the longer one says more; of two names, the longer text is a worked solution.
            length = sum(map(len, values)) * (1 if self.has_oracle else -1)
            if share >= 0.9:
                best = max(best or (False, False, 0.0, 0, ""), (named, whole >= 0.9, share, length, name))
        return (best[-1], not best[1]) if best else None

    def gold(self, task: vf.Task) -> str:
        """The right answer of a task; "" if it is unknown."""
        if self._gold is None:
            return ""
        field, last = self._gold
        text = _first_text(getattr(task.data, field))
        return text.split()[-1] if last and text else text

    @functools.cached_property
    def vocabulary(self) -> list[str]:
        """The different right answers of the first `VOCABULARY` training tasks, long ones first."""
        golds = {self.gold(task) for task in self.tasks.train[:VOCABULARY]}
        return sorted(golds - {""}, key=len, reverse=True)


def scripted(
    task: vf.Task, script: ScriptedChat, config: TrainConfig, tasks: Tasks, slots: asyncio.Semaphore | None = None
) -> Coroutine[Any, Any, vf.Trace]:
    """The rollout of `task` in which a script answers in place of a model. `slots`: as those of `run_rollout`."""
    limits = dataclasses.replace(UNBOUNDED, max_tool_seconds=config.max_tool_seconds)
    return run_rollout(
        task, script, None, limits=limits, shared_toolsets=tasks.toolsets, driver=tasks.driver, slots=slots
    )


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` indices below `count` (all, if there are fewer), evenly spread."""
    return [count * k // min(count, wanted) for k in range(min(count, wanted))]


def oracle_of(task: vf.Task) -> list[vf.AssistantMessage]:
    """The replies of a task's perfect transcript."""
    return getattr(task, "oracle")()  # noqa: B009 - not every task has it


def _replies(task: vf.Task) -> list[ChatReply] | str:
    try:
        return replies_of_messages(oracle_of(task))
    except Exception as error:  # an environment's code may raise anything
        return f"{type(error).__name__}: {error}"


def said(reply: ChatReply) -> str:
    """Everything that a turn says: its text, and the arguments of its calls."""
    calls = [text for call in reply.calls if isinstance(call, ParsedCall) for text in strings(call.arguments)]
    return "\n".join([reply.content, *calls])


def strings(value: Any) -> list[str]:
    """All texts and numbers in a nested value, as texts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int | float):
        return [f"{value}"]
    if isinstance(value, dict):
        return [text for part in value.values() for text in strings(part)]
    if isinstance(value, list | tuple | set):
        return [text for part in value for text in strings(part)]
    return strings(value.model_dump()) if hasattr(value, "model_dump") else []


def text_of(message: Any) -> str:
    """The text of a message, whose content may be text or parts."""
    content = message.content
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(getattr(part, "text", "") for part in content)


def tool_texts(trace: vf.Trace) -> list[str]:
    """The texts of a trace's tool results, in order."""
    return [text_of(node.message) for node in trace.nodes if node.message.role == "tool"]


def arguments_of(call: Any) -> Any:
    """The arguments of a stored tool call, as an object; its text if it is not JSON."""
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments


def _first_text(value: Any) -> str:
    """A text or a number as text, or the first one of a list; "" for anything else."""
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return "" if isinstance(value, bool | dict) or value is None else next(iter(strings(value)), "").strip()


def normalised(text: str) -> str:
    """The text in lower case, without punctuation and with single spaces."""
    return " ".join(re.findall(r"\w+", text.casefold()))
