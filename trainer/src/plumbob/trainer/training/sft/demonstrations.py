"""The rows that `sft` trains on: rollouts in which a script plays the model's turns, so that tools and rewards are real.

A demonstration comes from the environment's own oracle, or from a stored rollout. A stored rollout with token ids of this
model's own tokenizer and chat template is used as it is; any other one is played again, in the form that this model's
template and tool calls have.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from plumbob.console import UserError, first_line
from plumbob.console.files import write_whole
from plumbob.rollout import (
    Chat,
    ChatReply,
    Limits,
    Sample,
    Sampling,
    ScriptedEngine,
    read_arguments,
    run_rollout,
    to_sample,
    verifiers_messages,
)
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.scripted import replies_of_messages, replies_of_record
from plumbob.trainer.config.sft import ORACLE, SftConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.evaluation.results import read_records
from plumbob.trainer.rollouts.failures import failure
from plumbob.trainer.rollouts.identity import marks, marks_of
from plumbob.trainer.rollouts.limits import limits_of
from plumbob.trainer.rollouts.stream import TaskStream
from plumbob.trainer.rollouts.tasks import Tasks
from plumbob.trainer.run_files import trace_files

FILE = "demonstrations.jsonl.gz"
"""File of a run directory with the traces of its demonstrations: a resumed run trains on them, and plays none again."""

GIVE_UP_AFTER = 256
"""Playing stops if this many demonstrations are played before the first usable one: the reason is the same for all."""


@dataclass
class Demonstrations:
    """The demonstrations of a run, equal on every process, and what was left out."""

    rows: list[Sample] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    """The trace of each row, as a line of JSON."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> number of demonstrations that were left out for it."""
    verbatim: int = 0
    """Number of rows that are stored rollouts as they are, token by token."""
    best_reward: float | None = None
    """Highest reward among those left out because of their reward."""

    @property
    def checksum(self) -> str:
        """A checksum of all rows: their token ids and loss masks."""
        rows = [[row.token_ids, row.loss_mask] for row in self.rows]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint keeps of the demonstrations; empty without any."""
        return {"demonstrations": [len(self.rows), self.checksum]} if self.rows else {}

    def notes(self) -> list[str]:
        """What the user should know, one sentence each."""
        count = counts(self.rows)
        told = (
            f"Demonstrations: {len(self.rows):,} with {count['tokens']:,} tokens, {count['trained_tokens']:,} of them "
            "trained (the model's own turns)"
        )
        if self.verbatim:
            told += f"; {self.verbatim:,} are stored rollouts token by token"
        return [told, *([f"Left out: {self.reasons()}"] if self.left_out else [])]

    def reasons(self) -> str:
        """Why demonstrations were left out, the commonest reasons first."""
        parts = [f"{count:,} x {reason}" for reason, count in self.left_out.most_common(5)]
        more = len(self.left_out) - len(parts)
        best = "" if self.best_reward is None else f" (the highest reward below it is {self.best_reward:.3g})"
        return "; ".join(parts) + (f"; and {more} other reasons" if more > 0 else "") + best


def counts(rows: Sequence[Sample]) -> dict[str, int]:
    """Number of demonstrations, of their tokens, and of the tokens that are trained."""
    return {
        "demonstrations": len(rows),
        "tokens": sum(len(row.token_ids) for row in rows),
        "trained_tokens": sum(row.num_sampled for row in rows),
    }


@dataclass(frozen=True)
class Candidate:
    """One demonstration before it is played."""

    task: vf.Task
    replies: Sequence[ChatReply]
    """The model's turns."""
    stored: Mapping[str, Any] | None = None
    """The stored rollout that the turns are from; None for an oracle's."""


@dataclass(frozen=True)
class _Judged:
    """A demonstration that was played, or why it cannot be used."""

    number: int
    key: str
    """Key of the task."""
    reward: float = 0.0
    why: str = ""
    """Reason to leave it out; empty if its row can be used."""
    row: Sample | None = None
    record: str = ""
    verbatim: bool = False


def make_demonstrations(
    config: SftConfig,
    tasks: Tasks,
    chat: Chat,
    world: World,
    status: Callable[[str], None] = lambda text: None,
) -> Demonstrations:
    """Play or read the demonstrations that the settings ask for. Collective.

    Raises UserError if there is none to train on, with the reasons.
    """
    found = Demonstrations()
    read = _of_oracle if config.demonstrations == ORACLE else _of_files
    candidates = read(config, tasks, found)
    asyncio.run(_play(config, tasks, chat, world, candidates, found, status))
    if not found.rows:
        raise UserError(_nothing(config, found))
    return found


def _of_oracle(config: SftConfig, tasks: Tasks, found: Demonstrations) -> Iterator[Candidate]:
    """The oracle's transcript of each training task, in the order of a run's first epoch."""
    if not hasattr(tasks.train[0], "oracle"):
        raise UserError(
            f"environment {config.env!r} has no oracle: its task has no method 'oracle'; give --demonstrations a file of "
            f"good rollouts, such as those of `evaluate {config.env} --env-arg split=train -r 8`"
        )
    number = config.most_demonstrations if isinstance(tasks.train, TaskStream) else len(tasks.train)
    for i in range(number or 0):
        (task,) = tasks.take(i, 1)
        try:
            yield Candidate(task, replies_of_messages(task.oracle()))
        except Exception as error:  # an environment's code may raise anything
            found.left_out[f"its `oracle` method failed: {type(error).__name__}: {first_line(error)}"] += 1


def _of_files(config: SftConfig, tasks: Tasks, found: Demonstrations) -> Iterator[Candidate]:
    """The stored rollouts of all files, without those of held-out tasks."""
    held_out = marks_of(tasks.held_out)
    like = tasks.train[0]
    for path in trace_files.trace_paths(config.demonstrations, config.env):
        for number, record in enumerate(read_records(path)):
            if not number:
                tasks.check_is_one_of(record, path)
            try:
                task = type(like)(type(like.data).model_validate(record["task"]["data"]), like.config)
            except ValueError as error:
                raise UserError(
                    f"{path} holds tasks of another environment than {config.env}: {first_line(error)}"
                ) from None
            if not held_out.isdisjoint(marks(task)):
                found.left_out["of held-out tasks, which are never trained on"] += 1
            elif not record.get("ok"):
                found.left_out["failed when it was sampled"] += 1
            elif any(record["metrics"].get(f"rollout/{kind}_calls") for kind in ("malformed", "unread")):
                found.left_out["with a tool call that could not be read"] += 1
            else:
                yield Candidate(task, replies_of_record(record), record)


async def _play(
    config: SftConfig,
    tasks: Tasks,
    chat: Chat,
    world: World,
    candidates: Iterator[Candidate],
    found: Demonstrations,
    status: Callable[[str], None],
) -> None:
    """Play candidates in order, until there are as many demonstrations as wanted; adds them to `found`. Collective.

    Candidate i of a round is played by process i mod size; every process keeps the results of all.
    """
    wanted = config.most_demonstrations
    limits = limits_of(config)
    slots = asyncio.Semaphore(config.max_concurrent)
    of_task: Counter[str] = Counter()
    seen: set[tuple[int, ...]] = set()
    tried = 0
    while wanted is None or len(found.rows) < wanted:
        size = config.max_concurrent * world.size
        part = list(itertools.islice(candidates, size if wanted is None else min(size, wanted - len(found.rows))))
        if not part:
            break
        mine = range(world.rank, len(part), world.size)
        judged = await asyncio.gather(*(_judge(i, part[i], config, tasks, chat, limits, slots) for i in mine))
        everything = [one for share in world.gather(judged) for one in share]
        for one in sorted(everything, key=lambda one: one.number):
            _add(config, one, found, of_task, seen)
        tried += len(part)
        status(f"playing demonstrations: {len(found.rows):,} of {tried:,} can be used")
        if tried >= GIVE_UP_AFTER and not found.rows and config.demonstrations == ORACLE:
            break


async def _judge(
    number: int,
    candidate: Candidate,
    config: SftConfig,
    tasks: Tasks,
    chat: Chat,
    limits: Limits,
    slots: asyncio.Semaphore,
) -> _Judged:
    """Play one candidate, unless it can be used as it is stored, and find out whether it can be trained on."""
    key = candidate.task.key
    trace = None if candidate.stored is None else stored_as_is(candidate.stored, chat)
    verbatim = trace is not None
    if trace is None:
        trace = await run_rollout(
            candidate.task,
            ScriptedEngine(chat, candidate.replies),
            chat,
            Sampling(max_tokens=config.max_tokens),
            limits,
            shared_toolsets=tasks.toolsets,
            driver=tasks.driver,
            slots=slots,
        )
    if not trace.ok:
        return _Judged(number, key, why=failure(trace))
    if len(trace.branches) != 1 or not trace.num_turns:
        return _Judged(number, key, why="not one conversation with a turn of the model")
    row = to_sample(trace, key)
    if row.truncated or len(row.token_ids) > config.max_context:
        limits_ = (
            f"--max-context {config.max_context}, --max-tokens {config.max_tokens}, --max-turns {config.max_turns}"
        )
        return _Judged(number, key, why=f"longer than a limit ({limits_}), or cut off by one when it was sampled")
    if not verbatim and _calls(trace) != [list(reply.calls) for reply in candidate.replies][: trace.num_turns]:
        return _Judged(number, key, why=f"has tool calls that the form {chat.tool_format.name} does not give back")
    record = json.dumps(candidate.stored if verbatim else trace.to_record())
    return _Judged(number, key, row.reward, row=row, record=record, verbatim=verbatim)


def _calls(trace: vf.Trace) -> list[list[Any]]:
    """The tool calls of each turn of the model, as they were read from its text."""
    return [[read_arguments(c.name, c.arguments) for c in m.tool_calls or ()] for m in trace.assistant_messages]


def stored_as_is(record: Mapping[str, Any], chat: Chat) -> vf.Trace | None:
    """A stored rollout whose token ids can be trained on as they are; None if it has to be played again.

    Its ids are those of this tokenizer and chat template if rendering its first messages anew gives its first ids.
    """
    trace = verifiers_messages.read_trace(record)
    first = next((i for i, node in enumerate(trace.nodes) if node.sampled), None)
    if first is None or not all(node.token_ids for node in trace.nodes) or len(trace.branches) != 1:
        return None
    ids, sampled = trace.branches[0].token_ids, trace.branches[0].sampled_mask
    messages = [verifiers_messages.to_wire(node.message) for node in trace.nodes[:first]]
    prompt = chat.prompt(messages, adapter.schemas_of(trace.tools)).token_ids
    same = True in sampled and ids[: sampled.index(True)] == prompt
    return trace if same and ids[-1] in chat.stop_token_ids else None


def _add(
    config: SftConfig, one: _Judged, found: Demonstrations, of_task: Counter[str], seen: set[tuple[int, ...]]
) -> None:
    """Keep a demonstration, or count why it is left out."""
    if one.row is None:
        found.left_out[one.why] += 1
    elif one.reward < config.min_reward - 1e-9:
        found.left_out[f"below --min-reward {config.min_reward:g}"] += 1
        found.best_reward = max(one.reward, found.best_reward if found.best_reward is not None else one.reward)
    elif (ids := tuple(one.row.token_ids)) in seen:
        found.left_out["equal to another one"] += 1
    elif of_task[one.key] >= config.per_task:
        found.left_out[f"beyond --per-task {config.per_task}"] += 1
    else:
        seen.add(ids)
        of_task[one.key] += 1
        found.rows.append(one.row)
        found.records.append(one.record)
        found.verbatim += one.verbatim


def _nothing(config: SftConfig, found: Demonstrations) -> str:
    """Why there is nothing to train on, and what to do about it."""
    what = "oracle" if config.demonstrations == ORACLE else config.demonstrations
    if not found.left_out:
        return f"--demonstrations {what} has no rollouts"
    remedy = ""
    if found.best_reward is not None:
        remedy = "; lower --min-reward"
    elif all("held-out" in reason for reason in found.left_out):
        remedy = f"; sample rollouts of training tasks instead:  evaluate {config.env} --env-arg split=train -r 8"
    return f"no demonstration of --demonstrations {what} can be used: {found.reasons()}{remedy}"


def store(directory: Path, found: Demonstrations) -> None:
    """Write the demonstrations into a run directory. Raises OSError."""
    text = "".join(line + "\n" for line in found.records)
    write_whole(directory / FILE, gzip.compress(text.encode(), trace_files.LEVEL, mtime=0))


def read_stored(directory: Path) -> Demonstrations | None:
    """The demonstrations of a run directory; None if it has none. Raises UserError if they cannot be read."""
    path = directory / FILE
    if not path.is_file():
        return None
    found = Demonstrations()
    for record in read_records(path):
        found.rows.append(to_sample(verifiers_messages.read_trace(record), record["task"]["key"]))
        found.records.append(json.dumps(record))
    if not found.rows:
        raise UserError(f"{path} is empty; restore it, or start a new run")
    return found


def shown(tokenizer: Any, row: Sample) -> str:
    """The text of a row, with what is trained between ⟦ and ⟧."""
    parts = []
    for trained, run in itertools.groupby(zip(row.token_ids, row.loss_mask, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        parts.append(f"⟦{text}⟧" if trained else text)
    return "".join(parts)
