"""The stored rollouts of runs, in the compact form that the page holds: one compressed chunk per step."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from plumbob.trainer.evaluation.results import is_truncated
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.token_record import expand, run_lengths

ROLES = ("system", "user", "assistant", "tool", "template")
"""Origins of tokens, by the number that stands for them in the page."""
PREVIEW = 80
"""Characters of a rollout's last reply in the list."""
LEVEL = 6
"""Compression level of the data in the page."""
COLUMNS = (
    "run", "step", "task", "rollout", "reward", "advantage", "stop", "tool_errors", "tokens",
    "sampled", "odd", "truncated", "reply", "chunk", "place",
)  # fmt: skip
"""What the page's list knows of each rollout without opening its chunk."""


@dataclass
class Rollouts:
    """The rollouts of all runs of a page."""

    index: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    tasks: list[dict[str, Any]] = field(default_factory=list)
    """{"key", "env", "answer"} of each task; the index holds its number."""
    stops: list[str] = field(default_factory=list)
    chunks: list[str] = field(default_factory=list)
    """Rollouts of one step of one run, each a packed JSON array."""
    token_ids: list[set[int]] = field(default_factory=list)
    """Of each run, the ids that its rollouts have."""
    steps_left_out: int = 0
    """Number of steps whose stored rollouts are not in the page, because it has a limit."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, in words."""


def collect(
    directories: Sequence[Path],
    limit: int | None = None,
    named: Sequence[set[int | None]] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Rollouts:
    """Read the stored rollouts of runs: whole steps, as many as take up `limit` bytes of the page, at least one of a run.

    `named`: of each run, steps that a finding names; they are taken first, then the first and the last one, then those
    between, evenly spread. `say` is told what is being read.
    """
    found = Rollouts()
    numbers: dict[str, int] = {}
    for run, directory in enumerate(directories):
        found.token_ids.append(set())
        files = trace_files.stored_steps(directory)
        left = math.inf if limit is None else limit / len(directories)
        say(f"reading the rollouts of {directory}")
        chosen: dict[int, _Step] = {}
        for step in _by_use(list(files), named[run] if named else set()):
            chosen[step] = _read_step(files[step], step, files[step].stat().st_mtime_ns)
            left -= len(chosen[step].packed)
            if left <= 0:
                break
        found.steps_left_out += len(files) - len(chosen)
        for _, read in sorted(chosen.items()):
            _add_step(found, numbers, run, read)
    return found


def _by_use(steps: list[int], named: set[int | None]) -> list[int]:
    """Steps in the order in which they are taken while there is room: every prefix is spread over the run."""
    halving = (steps[i] for k in range(len(steps).bit_length(), -1, -1) for i in range(0, len(steps), 2**k))
    return list(dict.fromkeys([*(step for step in steps if step in named), *steps[:1], *steps[-1:], *halving]))


@dataclass(frozen=True)
class _Step:
    """The rollouts of one file, as the page holds them."""

    index: list[dict[str, Any]]
    """Of each rollout, its values in the index, with the key of its task, and its stop reason in words."""
    tasks: dict[str, dict[str, Any]]
    token_ids: set[int]
    packed: str
    problems: list[str]


@lru_cache(maxsize=10_000)  # of a run in progress, only what is new is read again
def _read_step(path: Path, step: int, changed: int) -> _Step:
    """Read a file, which was written at the time `changed` and is not changed again."""
    rollouts: list[dict[str, Any]] = []
    read = _Step([], {}, set(), "", [])
    seen: dict[str, int] = defaultdict(int)
    try:
        lines = trace_files.read(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        read.problems.append(f"{path} cannot be read: {error}")
        lines = []
    for number, line in enumerate(lines, start=1):
        try:
            trace = json.loads(line)
            key = str(trace["task"]["key"])
            rollout: dict[str, Any] = {
                "task": key,
                "rollout": seen[key],
                "step": step,
                "line": number,
                **compact(trace),
            }
            read.index.append({**_index_of(rollout, trace), "place": len(rollouts)})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            read.problems.append(f"line {number} of step {step} is no trace: {type(error).__name__}: {error}")
            continue
        seen[key] += 1
        read.token_ids.update(rollout["ids"])
        read.tasks.setdefault(key, {"key": key, "env": trace["task"].get("type", ""), "answer": _answer(trace)})
        rollouts.append(rollout)
    return replace(read, packed=packed(json.dumps(rollouts, separators=(",", ":"), ensure_ascii=False)))


def packed(text: str) -> str:
    """Text as gzip in base64, which has no character that could end an element of the page."""
    return base64.b64encode(gzip.compress(text.encode(errors="surrogatepass"), LEVEL, mtime=0)).decode()


def _add_step(found: Rollouts, numbers: dict[str, int], run: int, step: _Step) -> None:
    found.token_ids[run] |= step.token_ids
    found.problems += step.problems
    for values in step.index:
        if (key := values["task"]) not in numbers:
            numbers[key] = len(found.tasks)
            found.tasks.append(step.tasks[key])
        if values["stop"] not in found.stops:
            found.stops.append(values["stop"])
        own = {"run": run, "task": numbers[key], "stop": found.stops.index(values["stop"]), "chunk": len(found.chunks)}
        for name, value in {**values, **own}.items():
            found.index[name].append(value)
    found.chunks.append(step.packed)


def _index_of(rollout: dict[str, Any], trace: dict[str, Any]) -> dict[str, Any]:
    metrics = rollout["metrics"]
    return {
        **{name: rollout[name] for name in ("step", "task", "rollout", "reward", "advantage", "stop", "odd")},
        "tool_errors": metrics.get("rollout/tool_errors", 0) + metrics.get("rollout/malformed_calls", 0),
        "tokens": len(rollout["ids"]),
        "sampled": sum(rollout["mask"][1::2]),
        "truncated": int(rollout["truncated"]),
        "reply": _reply(trace)[:PREVIEW],
    }


def compact(trace: dict[str, Any]) -> dict[str, Any]:
    """A stored trace in the page's form.

    Of T tokens, `ids` has all. `nodes` is [[role, number of tokens]], the role as a number of `ROLES`. `content` and
    `mask` are lengths of runs, alternately of false and true, beginning with false; the mask is true where the model
    sampled a token. `loss` is the loss mask of the row in the same form, null if it is the same. `odd` is the place of
    the first token where they differ, -1 if there is none. Lists named after log-probabilities have one number per
    sampled token, or are null. `said` is [text, calls] of each message of the model, of all messages if there
    are no tokens, else null.
    """
    nodes, info = trace["nodes"], (trace.get("info") or {}).get("training") or {}
    mask = [bool(value) for node in nodes for value in node["mask"]]
    content = [bool(value) for node in nodes for value in node.get("is_content") or [True] * len(node["token_ids"])]
    loss = info.get("loss_mask")
    both = zip_longest(mask, mask if loss is None else expand(loss))
    rewards = {name: reward for name, reward in (trace.get("rewards") or {}).items() if reward is not None}
    advantages = _joined(nodes, "advantages")
    per_rollout = info.get("advantage", advantages[0] if advantages and len(set(advantages)) == 1 else None)
    ids = [token for node in nodes for token in node["token_ids"]]
    timing = (trace.get("timing") or {}).get("agent") or {}
    return {
        "ids": ids,
        "nodes": [[_role(node), len(node["token_ids"])] for node in nodes],
        "content": run_lengths(content),
        "mask": run_lengths(mask),
        "loss": loss,
        "odd": next((at for at, (sampled, trained) in enumerate(both) if sampled != trained), -1),
        "logprobs": _joined(nodes, "logprobs"),
        "trainer": _joined(nodes, "trainer_logprobs"),
        "reference": _joined(nodes, "reference_logprobs"),
        "entropies": _joined(nodes, "entropies"),
        "after": [finite(value) for value in info["logprobs_after"]] if info.get("logprobs_after") else None,
        "advantages": advantages if advantages and len(set(advantages)) > 1 else None,
        "advantage": per_rollout,
        "trained": info.get("trained"),
        "env": info.get("env"),
        "said": [None if ids and not node["sampled"] else _said(node) for node in nodes],
        "reward": finite(sum(r["score"] * r["weight"] for r in rewards.values())),
        "rewards": {name: [finite(r["score"]), r["weight"]] for name, r in rewards.items()},
        "metrics": {name: finite(value) for name, value in (trace.get("metrics") or {}).items() if value is not None},
        "stop": str(trace.get("stop_condition") or ("failed" if trace.get("errors") else "")),
        "truncated": bool(trace.get("is_timeout")) or is_truncated(trace),
        "errors": [f"{e.get('type', '')}: {e.get('message', '')}" for e in trace.get("errors") or ()],
        "seconds": round(max(timing.get("end", 0) - timing.get("start", 0), 0), 3),
        "versions": (trace.get("info") or {}).get("policy_versions"),
    }


def _joined(nodes: Sequence[dict[str, Any]], name: str) -> list[float | None] | None:
    """The numbers of all sampled tokens of a trace; None if a node with sampled tokens has none."""
    values: list[float | None] = []
    for node in nodes:
        own = node.get(name)
        if any(node["mask"]) and not own:
            return None
        values += map(finite, own or ())
    return values


def _role(node: dict[str, Any]) -> int:
    role = node["message"].get("role", "template")
    return ROLES.index(role) if role in ROLES else ROLES.index("user")


def _said(node: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """The text of a message, and its tool calls as [name, arguments]."""
    message = node["message"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content)
    calls = [[str(call.get("name")), str(call.get("arguments"))] for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (message.get("reasoning_content"), content) if part), calls


def _reply(trace: dict[str, Any]) -> str:
    """The last message that the model wrote, in one line."""
    last = next((node for node in reversed(trace["nodes"]) if node["sampled"]), None)
    text, calls = _said(last) if last else ("", [])
    return " ".join([*text.split(), *(f"{name}({arguments})" for name, arguments in calls)])


def _answer(trace: dict[str, Any]) -> str:
    """The right answer, if the task's data has one under a usual name."""
    answer = (trace["task"].get("data") or {}).get("answer")
    return str(answer)[:PREVIEW] if answer is not None else ""


def finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
