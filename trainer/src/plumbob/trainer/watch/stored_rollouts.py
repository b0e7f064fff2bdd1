"""Stored rollouts as the checks of a run directory see them, and where one of them can be looked at."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.rollout.toolcalls import NOT_READ
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Place
from plumbob.trainer.diagnosis.unread_calls import call_like, is_malformed
from plumbob.trainer.run_files import trace_files

LABELS = frozenset({"idx", "id", "name", "description"})
"""Fields of a task's data that say nothing of what it asks."""


@dataclass(frozen=True)
class Part:
    """One message of a rollout."""

    role: str
    text: str
    sampled: bool
    """Whether the policy wrote it."""
    start: int
    """Number of tokens of the rollout before it."""
    size: int
    """Number of its tokens."""
    calls: tuple[tuple[str, str, str], ...] = ()
    """Of each tool call: (id, name, arguments as JSON)."""
    answers: str = ""
    """Of a tool's message: id of the call that it answers."""


@dataclass(frozen=True)
class Rollout:
    """What the checks need of one line of a run's traces."""

    step: int
    line: int
    """Number of its line in the file, from 1."""
    group: int
    """Number of the group in its file: line number divided by group size, because a group's lines are consecutive."""
    task: str
    """Key of the task."""
    number: int
    """Number of the rollout among those of the task in its file, from 0."""
    ok: bool
    token_ids: tuple[int, ...]
    reward: float
    metrics: dict[str, float]
    parts: tuple[Part, ...]
    gold: tuple[str, ...]
    """Answers that the task's data names as right."""
    stop: str
    """The stop reason."""
    unread: tuple[tuple[int, str], ...]
    """Of each call in a form that was not read: (number of the turn from 0, text)."""
    gap: float | None = None
    """Mean |difference| of the engine's and the trainer's log-probabilities, in nats per sampled token; None if unknown."""
    sorted_gap: float | None = None
    """The same after both lists of log-probabilities are sorted."""
    logprob: float | None = None
    """Sum of sampled log-probabilities, in nats, of the engine or the trainer, whichever is surer, without those of tokens
    that the policy hardly ever samples."""
    excess: float | None = None
    """Sum over the sampled tokens of the trainer's log-probability plus the policy's entropy there, in nats; None if unknown.

    Its expectation is 0, because the entropy is minus the expected log-probability of a token that is drawn as it should be.
    """
    entropy: float = 0.0
    """Sum of these entropies, in nats."""
    offered: tuple[str, ...] = ()
    """Names of the tools that the policy was told of."""
    content: str = ""
    """Hash of the task's data without its labels."""

    @classmethod
    def of(cls, record: dict[str, Any], step: int, line: int, group: int, number: int) -> Rollout:
        """The rollout of a stored trace.

        Raises LookupError, TypeError, ValueError or AttributeError if it is not one.
        """
        data = record["task"]["data"]
        answers = [data.get("answer"), *(data.get("answers") or [])]
        rewards = [r for r in record["rewards"].values() if r is not None]
        every = [(noted["turn"], noted["text"]) for noted in (record.get("info") or {}).get("unread_calls") or ()]
        unread = [(turn, text) for turn, text in every if not is_malformed(text)]
        engine, trainer = _logprobs(record["nodes"])
        return cls(
            step,
            line,
            group,
            record["task"]["key"],
            number,
            bool(record["ok"]),
            tuple(t for node in record["nodes"] for t in node["token_ids"]),
            sum(r["score"] * r["weight"] for r in rewards),
            record["metrics"],
            tuple(_parts(record["nodes"])),
            tuple(_last(str(a)) for a in answers if isinstance(a, str | int | float)),
            record.get("stop_condition") or "",
            tuple(unread or _unread(record)),
            *_gaps(engine, trainer),
            max(_sure(engine), _sure(trainer)) if engine else None,
            *_excess(record["nodes"], trainer),
            tuple(tool["name"] for tool in record.get("tools") or ()),
            _content(data),
        )

    @property
    def reply(self) -> str:
        """Text of the last message if the policy wrote it, else empty."""
        return self.parts[-1].text if self.parts and self.parts[-1].sampled else ""

    @property
    def turns(self) -> list[Part]:
        """The policy's messages."""
        return [part for part in self.parts if part.sampled]

    @property
    def spoken_to(self) -> bool:
        """Whether the environment spoke as the user after the policy did, as in a game. What tells of an unread call is
        no such message.
        """
        since = itertools.dropwhile(lambda part: not part.sampled, self.parts)
        return not self.unread and any(part.role == "user" for part in since)

    @property
    def results(self) -> list[tuple[str, str, Part]]:
        """Of each result that a tool gave: (name of the tool, arguments, message).

        A call that was not read has none, nor has a call of a tool that the policy made up.
        """
        asked = {call: (name, arguments) for part in self.parts for call, name, arguments in part.calls}
        told = [part for part in self.parts if part.role == "tool" and not part.text.startswith(NOT_READ)]
        found = [(*asked.get(part.answers, ("", "")), part) for part in told]
        return [result for result in found if not (self.offered and result[0] and result[0] not in self.offered)]

    def place(self, part: Part | None = None) -> Place:
        """Where to look: the whole rollout, or one of its messages."""
        tokens = None if part is None or not part.size else (part.start, part.start + part.size - 1)
        return Place(self.step, self.task, self.number, tokens)


def _last(answer: str) -> str:
    """The answer itself, of a worked solution that ends with it as those of GSM8K do."""
    return answer.rpartition("####")[2].strip()


def _content(data: dict[str, Any]) -> str:
    """`Rollout.content`."""
    told = {name: value for name, value in data.items() if name not in LABELS and value is not None}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _unread(record: dict[str, Any]) -> Iterable[tuple[int, str]]:
    """Replies without calls that name a tool beside its arguments, as `Rollout.unread`."""
    tools = [
        (tool["name"], list((tool.get("parameters") or {}).get("properties", {}))) for tool in record.get("tools") or ()
    ]
    turns = [node["message"] for node in record["nodes"] if node["sampled"]]
    for number, message in enumerate(turns):
        text = message.get("content")
        if isinstance(text, str) and not message.get("tool_calls"):
            found = next((found for tool in tools if (found := call_like(text, *tool))), "")
            if found:
                yield number, found


def _logprobs(nodes: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Log-probabilities of the sampled tokens, the engine's and the trainer's; two empty lists if one is incomplete."""
    engine, trainer = (
        [value for node in nodes if any(node.get("mask") or ()) for value in node.get(name) or ()]
        for name in ("logprobs", "trainer_logprobs")
    )
    complete = len(engine) == len(trainer) and None not in engine and None not in trainer
    return (engine, trainer) if complete else ([], [])


def _sure(logprobs: list[float]) -> float:
    """The sum of log-probabilities [N], without those of tokens that the policy hardly ever samples.

    Something else may have put these there in every rollout, such as an end token at a stop string, which makes no copies.
    """
    return math.fsum(value for value in logprobs if value > thresholds.UNLIKELY_END)


def _excess(nodes: list[dict[str, Any]], trainer: list[float]) -> tuple[float | None, float]:
    """`Rollout.excess` and `Rollout.entropy`. `trainer`: its log-probabilities of all sampled tokens, or none.

    A turn's last token is left out if the policy hardly ever samples it: then something else has ended the turn.
    """
    turns = [(node["trainer_logprobs"], node.get("entropies") or ()) for node in nodes if node.get("trainer_logprobs")]
    if not trainer or any(len(own) != len(entropies) or None in entropies for own, entropies in turns):
        return None, 0.0
    kept = [(own, h) if own[-1] > thresholds.UNLIKELY_END else (own[:-1], h[:-1]) for own, h in turns]
    entropy = math.fsum(value for _, h in kept for value in h)
    return math.fsum(value for own, _ in kept for value in own) + entropy, entropy


def _gaps(engine: list[float], trainer: list[float]) -> tuple[float | None, float | None]:
    """`Rollout.gap` and `Rollout.sorted_gap`."""
    if not engine:
        return None, None
    pairs = (zip(engine, trainer, strict=True), zip(sorted(engine), sorted(trainer), strict=True))
    apart, in_order = (sum(abs(a - b) for a, b in pair) / len(engine) for pair in pairs)
    return apart, in_order


def _parts(nodes: list[dict[str, Any]]) -> Iterable[Part]:
    start = 0
    for node in nodes:
        message, size = node["message"], len(node["token_ids"])
        text = message.get("content")
        calls = tuple((c.get("id", ""), c["name"], c["arguments"]) for c in message.get("tool_calls") or ())
        yield Part(
            message["role"],
            text if isinstance(text, str) else "",
            bool(node["sampled"]),
            start,
            size,
            calls,
            message.get("tool_call_id") or "",
        )
        start += size


def read_traces(path: Path, group_size: int) -> list[Rollout]:
    """The rollouts of one step.

    Raises OSError, ValueError, LookupError, TypeError or AttributeError for another file.
    """
    step = int(path.name.split(".")[0].removeprefix("step_"))
    seen: dict[str, int] = defaultdict(int)
    rollouts = []
    for i, line in enumerate(trace_files.read(path).splitlines()):
        record = json.loads(line)
        key = record["task"]["key"]
        rollouts.append(Rollout.of(record, step, i + 1, i // group_size, seen[key]))
        seen[key] += 1
    return rollouts


def unselected(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts with log-probabilities, of steps that have left none out of a group: of the trained ones, all or none.

    Only what was trained has the trainer's log-probabilities. Where that depends on a rollout's own reward or length, or on
    whether it failed, likely rollouts are trained more often than others, and how likely they are says nothing of the sampler.
    """
    known = defaultdict(list)
    for rollout in rollouts:
        known[rollout.step, rollout.group].append(rollout.logprob is not None)
    size = max(map(len, known.values()), default=0)
    divided = {step for (step, _), have in known.items() if len(set(have)) > 1 or len(have) < size}
    return [r for r in rollouts if r.logprob is not None and r.step not in divided]


def groups_of(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each group of each step."""
    groups: dict[tuple[int, int], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.step, rollout.group].append(rollout)
    return list(groups.values())
