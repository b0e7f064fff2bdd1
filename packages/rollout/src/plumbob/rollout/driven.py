"""Rollouts of environments that drive the conversation: a user simulator or a game that answers the model's turns.

A verifiers package may export an `Env` whose `run(task, agents)` decides what happens in an episode: it opens
`agents.NAME.interaction(task)` and sends user messages with `turn(message)`, each of which returns the model's reply.
Here `run` gets an `InProcessAgent` in place of verifiers' agent. It has the same methods, and plays with plumbob's own
dialogue in this process, so the trace is the same exact training row as that of any other rollout.

An episode becomes one row, so it must hold one conversation of one agent. `driver_of` refuses every other `Env`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import verifiers.v1 as vf
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout import verifiers_messages, verifiers_scoring
from plumbob.rollout.chat import Chat
from plumbob.rollout.dialogue import COUNTS, Dialogue, make_dialogue, of_the_engine, play_turns, record_counts
from plumbob.rollout.environment_code import Caller, extended, outside
from plumbob.rollout.harness import InProcessHarness, LocalEnv
from plumbob.rollout.scripted import ScriptedChat
from plumbob.rollout.tasksets import with_objects
from plumbob.rollout.types import ChatEngine, ChatReply, Engine, Limits, Sampling, StopReason, UnsupportedTaskset

_DRIVES = ("setup", "run", "finalize")
"""Methods of an `Env` that in-process rollouts call. One that overrides none of them is played as a plain taskset."""
_SERVES = ("start", "stop", "shared_tools", "serving", "run_slot", "run_episode")
"""Methods of an `Env` that in-process rollouts do not call, so an `Env` that overrides one is refused."""
_CHAT_HARNESSES = ("null", "")
"""Ids of verifiers' harnesses that only relay messages, as `InProcessAgent` does."""
REHEARSAL_SECONDS = 60.0
"""Time limit of `rehearse`."""


def driver_of(module: str, settings: dict[str, Any]) -> vf.Env | None:
    """The package's own `Env` if it drives the conversation; None if the package is a plain taskset.

    `module`: the taskset's id. `settings`: the taskset's settings. Raises UnsupportedTaskset with one sentence if the
    `Env` or the harness cannot be played in process, and ValueError if the package exports several of either.
    """
    cls = vf.environment_class(module)
    config_type = vf.env_config_type(module)
    seats = {name: f.default for name, f in config_type.model_fields.items() if isinstance(f.default, vf.AgentConfig)}
    if len(seats) > 1:
        raise UnsupportedTaskset(
            f"{cls.__name__} has {len(seats)} agents ({', '.join(seats)}), and a rollout trains one agent in one "
            "conversation; write the others as code in Env.run, or as calls of a model of their own"
        )
    for seat in seats.values():
        _check_harness(module, seat)
    if extra := [name for name in _SERVES if not _inherited(cls, name)]:
        raise UnsupportedTaskset(f"{cls.__name__} overrides Env.{extra[0]}, which in-process rollouts do not call")
    if all(_inherited(cls, name) for name in _DRIVES):
        return None
    return cls(vf.resolve_env_config({"taskset": {"id": module, **with_objects(module, settings)}}))


def _inherited(cls: type[vf.Env], name: str) -> bool:
    """Whether a method is verifiers' own or `LocalEnv`'s, so that a plain rollout does the same."""
    return getattr(cls, name) in [getattr(base, name) for base in (vf.Env, vf.SingleAgentEnv, LocalEnv)]


def _check_harness(module: str, seat: vf.AgentConfig) -> None:
    """Raise UnsupportedTaskset if the agent is another program than a chat with tools, or another model."""
    if seat.model is not None:
        raise UnsupportedTaskset(f"its agent is always the model {seat.model!r}, so there is nothing to train")
    chosen = vf.default_harness_id(module) if seat.harness is None else seat.harness.id
    if chosen in _CHAT_HARNESSES or (chosen == "bash" and seat.harness is None):  # nothing was chosen
        return
    harness = type(vf.load_harness(vf.harness_config_type(chosen).model_validate({"id": chosen})))
    if not issubclass(harness, InProcessHarness):
        raise UnsupportedTaskset(
            f"its agent runs in the harness {chosen!r} ({harness.__name__}), a program of its own, and in-process "
            "rollouts only relay messages and tool calls"
        )


@dataclass
class _Episode:
    """What the agents of one episode share."""

    env: vf.Env
    engine: Engine | ChatEngine
    chat: Chat | None
    sampling: Sampling
    limits: Limits
    shared: Sequence[vf.Toolset]
    deadline: float
    """When the turns of the model must have ended, by the event loop's clock."""
    conversation: Conversation | None = None
    """The episode's only conversation, once it is opened."""
    unsupported: UnsupportedTaskset | None = None
    """What the environment asked for that is not supported, kept because its code may catch the exception."""

    def refuse(self, what: str) -> UnsupportedTaskset:
        """The exception to raise when the environment asks for something that is not supported."""
        self.unsupported = UnsupportedTaskset(f"{type(self.env).__name__}.run {what}")
        return self.unsupported


@dataclass
class InProcessAgent:
    """The agent that `Env.run` gets, in place of a `vf.Agent`."""

    name: str
    config: vf.AgentConfig
    episode: _Episode = field(repr=False)
    trainable: bool = True
    harness: Any = None
    """Always None: there is no program between the environment and the model."""

    async def run(self, task: vf.Task, **borrowed: Any) -> vf.Trace:
        """Play `task` until the model answers without a tool call; returns the scored trace."""
        async with self.interaction(task, **borrowed) as conversation:
            if not (await conversation.turn()).terminated:
                conversation.end(StopReason.COMPLETED)
        return conversation.trace

    @asynccontextmanager
    async def interaction(
        self, task: vf.Task, *, on_trace: Callable[[vf.Trace], None] | None = None, **borrowed: Any
    ) -> AsyncGenerator[Conversation]:
        """A conversation in which the caller is the user. The trace is scored when the context is left."""
        episode = self.episode
        if given := [name for name, value in borrowed.items() if value]:
            raise episode.refuse(f"gives its agent {given[0]}=..., which in-process rollouts do not support")
        if episode.conversation is not None:
            raise episode.refuse("runs its agent more than once for one task, and a rollout is one conversation")
        if not self.trainable:
            raise episode.refuse("has only an agent that it marks as not trainable, so there is nothing to train")
        conversation = episode.conversation = Conversation(task, self.config, episode)
        if on_trace is not None:
            on_trace(conversation.trace)
        await conversation.open()
        try:
            yield conversation
        except Exception as error:
            conversation.fail(error)
            await conversation.close()
            raise
        await conversation.close()  # not after a cancellation, which leaves nothing to score

    def provision(self, task: vf.Task | None = None) -> Any:
        """Not supported: in-process rollouts have no runtime."""
        raise self.episode.refuse("provisions a runtime, which in-process rollouts do not have")


class Conversation:
    """The model's side of a conversation that `Env.run` drives, in place of a `vf.Interaction`."""

    def __init__(self, task: vf.Task, config: vf.AgentConfig, episode: _Episode) -> None:
        self.task, self.episode = task, episode
        self.plan = verifiers_scoring.Plan(task)
        most = episode.limits.max_turns if config.max_turns is None else config.max_turns
        self.limits = replace(episode.limits, max_turns=min(most, episode.limits.max_turns))
        self.trace = verifiers_messages.new_trace(task)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.box = adapter.ToolBox()
        self._dialogue: Dialogue | None = None
        """The dialogue, once the first turn has opened it."""
        self._ended = self._over = self._closed = False
        # Ended: the model takes no further turn. Over: the environment was told so.

    async def open(self) -> None:
        """Set up the task and its tools. A failure is recorded on the trace, and the first turn is `terminated`."""
        episode = self.episode
        self.trace.timing.agent.start = time.time()
        shared = episode.shared if isinstance(self.task, type(episode.env.taskset).task_type()) else ()
        try:
            adapter.check_supported(self.task, driven=True)
            async with asyncio.timeout_at(episode.deadline) as deadline:
                with extended(deadline, caller := Caller(self.limits.max_seconds, deadline)):
                    self.box = await adapter.open_tools(self.task, self.trace, shared, caller)
        except UnsupportedTaskset as error:
            episode.unsupported = error
            raise
        except Exception as error:  # a failed rollout is left out of its group and must not end the others
            self.fail(error)

    async def turn(self, message: Any = None) -> vf.Segment:
        """Say `message` and let the model answer, tool calls included. Like `vf.Interaction.turn`.

        `message`: a text, or messages; None for the model's first turn on a task that has a prompt. If the model takes
        no further turn, the segment is `terminated` and has no messages.
        """
        first = self._dialogue is None
        prompted = first and self.task.data.prompt is not None
        if self._closed or self._over:
            raise RuntimeError("this conversation is over; read its trace")
        if (message is None) is not prompted:
            raise ValueError(
                "the task's prompt opens this conversation: its first turn() takes no message"
                if prompted
                else "turn() needs the next user message"
            )
        nodes, turns = len(self.trace.nodes), self.trace.num_turns
        if not self._ended:
            await self._play(None if message is None else verifiers_messages.typed_messages(message))
        if self.trace.num_turns > turns:
            said = [n.message for n in self.trace.nodes[nodes:]]
            start = next(i for i, m in enumerate(said) if isinstance(m, vf.AssistantMessage))
            return vf.Segment(messages=said[start:])
        self._over = True
        return vf.Segment(messages=[], terminated=True)

    async def _play(self, messages: list[Any] | None) -> None:
        """Give the model these messages (None: the task's prompt) and play until it answers or a limit ends it."""
        try:
            async with asyncio.timeout_at(self.episode.deadline) as deadline:
                with outside(), extended(deadline, caller := Caller(self.limits.max_tool_seconds, deadline)):
                    if self._dialogue is None:
                        self._dialogue = self._open_dialogue(messages)
                    else:
                        with of_the_engine(self.trace):
                            self._dialogue.add_messages(messages or [])
                    stop = await play_turns(self.plan, self.trace, self.box, self._dialogue, self.counts, caller)
            if stop != StopReason.COMPLETED:
                self.end(stop)
        except TimeoutError as error:
            if deadline.expired():
                self.end(StopReason.TIMEOUT)
            else:
                self.fail(error)
        except UnsupportedTaskset as error:
            self.episode.unsupported = error
            raise
        except Exception as error:  # the engine or a tool failed; the environment sees a terminated segment
            self.fail(verifiers_scoring.cause(error))

    def _open_dialogue(self, messages: list[Any] | None) -> Dialogue:
        episode = self.episode
        dialogue = make_dialogue(self.trace, self.box, episode.engine, episode.chat, episode.sampling, self.limits)
        task = self.task
        opening = (
            verifiers_messages.initial_messages(task)
            if messages is None
            else verifiers_messages.with_system_prompt(task, messages)
        )
        with of_the_engine(self.trace):
            dialogue.open(opening)
        return dialogue

    def end(self, stop: str) -> None:
        """Take no further turn of the model, because of `stop`."""
        self._ended = True
        verifiers_scoring.stop(self.trace, stop)

    def fail(self, error: Exception) -> None:
        """Record that the rollout failed; it takes no further turn. The first failure is kept, as the cause."""
        self._ended = True
        if not self.trace.errors:
            self.trace.record_error(error)

    async def close(self) -> vf.Trace:
        """End the conversation and score it; returns the trace. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            if not self._ended:
                self.end(StopReason.ENV_ENDED)
            await verifiers_scoring.finish(self.plan, self.trace, self.limits.max_seconds, self.limits.max_tool_seconds)
        return self.trace

    async def send(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: a message in the middle of a turn would have no place in the row."""
        raise self.episode.refuse("sends messages while the model is speaking (send or steer); use turn()")

    steer = send


async def run_driven(
    env: vf.Env,
    task: vf.Task,
    engine: Engine | ChatEngine,
    chat: Chat | None,
    sampling: Sampling,
    limits: Limits,
    shared: Sequence[vf.Toolset],
) -> vf.Trace:
    """One episode of `env`: its setup, run and finalize. Returns the trace of the episode's only conversation.

    Like `run_rollout`, which calls it: a failure is recorded on the trace, UnsupportedTaskset and cancellation are
    raised. The turns of the model have `limits.max_seconds`, and the environment's own code another such time.
    """
    episode = _Episode(
        env, engine, chat, sampling, limits, shared, asyncio.get_running_loop().time() + limits.max_seconds
    )
    agents = vf.Agents(env.config, cast(Any, lambda name, config: InProcessAgent(name, config, episode)))
    failed: Exception | None = None
    try:
        async with asyncio.timeout(2 * limits.max_seconds) as deadline:
            with extended(deadline, caller := Caller(limits.max_tool_seconds, deadline)):
                await caller.call("`Env.setup`", lambda: env.setup(agents))
                await caller.call("`Env.run`", lambda: env.run(task, agents))
                if episode.conversation is None:
                    raise RuntimeError(f"{type(env).__name__}.run has run no agent")
                record = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=episode.conversation.trace.task)
                record.traces.append(await episode.conversation.close())
                await caller.call("`Env.finalize`", lambda: env.finalize(task, record))
    except TimeoutError as error:
        expired = TimeoutError(f"{type(env).__name__} took more than {2 * limits.max_seconds} s for one episode")
        failed = expired if deadline.expired() else error
    except Exception as error:  # a failed rollout is left out of its group and must not end the others
        failed = error
    if episode.unsupported is not None:
        raise episode.unsupported
    return _closed(task, episode.conversation, failed)


def _closed(task: vf.Task, conversation: Conversation | None, failed: Exception | None) -> vf.Trace:
    """The trace of a finished episode, with the failure of the environment's own code if there was one."""
    trace = verifiers_messages.new_trace(task) if conversation is None else conversation.trace
    if failed is None and not trace.nodes:
        failed = RuntimeError("the environment has said nothing to the model, so there is no row to train on")
    if failed is not None and not trace.errors:
        trace.record_error(failed)
    trace.is_completed, trace.ok = True, not trace.errors
    record_counts(trace, {} if conversation is None else conversation.counts)
    return trace


def rehearse(env: vf.Env, task: vf.Task, shared: Sequence[vf.Toolset] = ()) -> None:
    """Play `task` with a model that says nothing, to learn what only running `Env.run` shows.

    Raises UnsupportedTaskset if the environment asks for something that in-process rollouts do not support. Every other
    failure is left to the rollouts themselves, because it may depend on what the model says.
    """
    silent = ScriptedChat([ChatReply("")] * 4, ending=StopReason.MAX_TURNS)
    limits = Limits(max_turns=8, max_context=1 << 30, max_seconds=REHEARSAL_SECONDS)
    asyncio.run(run_driven(env, task, silent, None, Sampling(), limits, shared))
