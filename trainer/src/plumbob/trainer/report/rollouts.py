"""The stored rollouts of runs, in the compact form that the page holds: one compressed chunk per step."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from plumbob.trainer.run_files import trace_files

ROLES = ("system", "user", "assistant", "tool", "template")
"""Origins of tokens, by the number that stands for them in the page."""
CUT_OFF = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
"""Stop conditions that are limits."""
PREVIEW = 80
"""Characters of a rollout's last reply in the list."""
COLUMNS = (
    "run", "step", "task", "rollout", "reward", "advantage", "stop", "tool_errors", "tool_calls", "turns", "tokens",
    "sampled", "truncated", "reply", "chunk", "place",
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
    """Rollouts of one step of one run, each as a JSON array."""
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
    """Read the stored rollouts of runs, at most about `limit` of them: whole steps, spread evenly over each run.

    `named`: of each run, steps that a finding names; they are taken first, and after them the first and the last step.
    `say` is told what is being read.
    """
    found = Rollouts()
    numbers: dict[str, int] = {}
    for run, directory in enumerate(directories):
        found.token_ids.append(set())
        files = trace_files.stored_steps(directory)
        sizes = trace_files.rollouts_of_steps(directory)
        share = None if limit is None else limit // len(directories)
        chosen = _chosen(files, sizes, share, named[run] if named else set())
        found.steps_left_out += len(files) - len(chosen)
        say(f"reading {sum(sizes.get(step, 0) for step in chosen):,} rollouts of {directory}")
        for step in chosen:
            try:
                lines = trace_files.read(files[step]).splitlines()
            except (OSError, UnicodeDecodeError) as error:
                found.problems.append(f"{files[step]} cannot be read: {error}")
                continue
            _add_step(found, numbers, run, step, lines)
    return found


def _chosen(files: dict[int, Path], sizes: dict[int, int], limit: int | None, named: set[int | None]) -> list[int]:
    """The steps to show, in order: all, or those that are about `limit` rollouts together."""
    steps = list(files)
    if limit is None or sum(sizes.get(step, 0) for step in steps) <= limit:
        return steps
    each = max(1, sum(sizes.get(step, 0) for step in steps) // len(steps))
    wanted = max(2, limit // each)
    first = [step for step in steps if step in named][:wanted]
    spread = [steps[round(i * (len(steps) - 1) / (wanted - 1))] for i in range(wanted)]
    ends = [steps[0], steps[-1]]
    return sorted(list(dict.fromkeys([*first, *ends, *spread]))[: max(wanted, len(first) + 2)])


def _add_step(found: Rollouts, numbers: dict[str, int], run: int, step: int, lines: Sequence[str]) -> None:
    """Add the rollouts of one file. A line that is no trace is counted among the problems."""
    chunk: list[dict[str, Any]] = []
    seen: dict[str, int] = defaultdict(int)
    for line_number, line in enumerate(lines, start=1):
        try:
            trace = json.loads(line)
            key = str(trace["task"]["key"])
            number = seen[key]
            rollout: dict[str, Any] = {
                "task": key,
                "rollout": number,
                "step": step,
                "line": line_number,
                **compact(trace),
            }
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            found.problems.append(f"line {line_number} of step {step} is no trace: {type(error).__name__}: {error}")
            continue
        seen[key] += 1
        found.token_ids[run].update(rollout["ids"])
        if key not in numbers:
            numbers[key] = len(found.tasks)
            found.tasks.append({"key": key, "env": trace["task"].get("type", ""), "answer": _answer(trace)})
        _add_to_index(found, rollout, trace, run, numbers[key], len(chunk))
        chunk.append(rollout)
    found.chunks.append(json.dumps(chunk, separators=(",", ":"), ensure_ascii=False))


def _add_to_index(found: Rollouts, rollout: dict, trace: dict, run: int, task: int, place: int) -> None:
    if rollout["stop"] not in found.stops:
        found.stops.append(rollout["stop"])
    metrics, sampled = rollout["metrics"], sum(rollout["mask"][1::2])
    values = {
        "run": run,
        "step": rollout["step"],
        "task": task,
        "rollout": rollout["rollout"],
        "reward": rollout["reward"],
        "advantage": rollout["advantage"],
        "stop": found.stops.index(rollout["stop"]),
        "tool_errors": metrics.get("rollout/tool_errors", 0) + metrics.get("rollout/malformed_calls", 0),
        "tool_calls": metrics.get("rollout/tool_calls", 0),
        "turns": sum(bool(node["sampled"]) for node in trace["nodes"]),
        "tokens": len(rollout["ids"]),
        "sampled": sampled,
        "truncated": int(rollout["truncated"]),
        "reply": _reply(trace)[:PREVIEW],
        "chunk": len(found.chunks),
        "place": place,
    }
    for name, value in values.items():
        found.index[name].append(value)


def compact(trace: dict[str, Any]) -> dict[str, Any]:
    """A stored trace in the page's form.

    Of T tokens, `ids` has all. `nodes` is [[role, number of tokens]], the role as a number of `ROLES`. `content` and
    `mask` are lengths of runs, alternately of false and true, beginning with false; the mask is true where training
    takes a token into the loss. Lists named after log-probabilities have one number per token of the mask, or are null.
    """
    nodes, info = trace["nodes"], (trace.get("info") or {}).get("training") or {}
    mask = [bool(value) for node in nodes for value in node["mask"]]
    content = [bool(value) for node in nodes for value in node.get("is_content") or [True] * len(node["token_ids"])]
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
        "logprobs": _joined(nodes, "logprobs"),
        "trainer": _joined(nodes, "trainer_logprobs"),
        "reference": _joined(nodes, "reference_logprobs"),
        "entropies": _joined(nodes, "entropies"),
        "after": info.get("logprobs_after"),
        "advantages": advantages if advantages and len(set(advantages)) > 1 else None,
        "advantage": per_rollout,
        "trained": info.get("trained"),
        "env": info.get("env"),
        "messages": None if ids else [[_role(node), _message(node)] for node in nodes],
        "reward": finite(sum(r["score"] * r["weight"] for r in rewards.values())),
        "rewards": {name: [finite(r["score"]), r["weight"]] for name, r in rewards.items()},
        "metrics": {name: finite(value) for name, value in (trace.get("metrics") or {}).items() if value is not None},
        "stop": str(trace.get("stop_condition") or ("failed" if trace.get("errors") else "")),
        "truncated": _truncated(trace),
        "errors": [f"{e.get('type', '')}: {e.get('message', '')}" for e in trace.get("errors") or ()],
        "seconds": round(max(timing.get("end", 0) - timing.get("start", 0), 0), 3),
        "versions": (trace.get("info") or {}).get("policy_versions"),
    }


def run_lengths(values: Sequence[bool]) -> list[int]:
    """Lengths of runs of equal values, beginning with one of false. Example: run_lengths([True, False]) == [0, 1, 1]."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    lengths = [length for _, length in runs]
    return [0, *lengths] if runs and runs[0][0] else lengths


def _joined(nodes: Sequence[dict[str, Any]], name: str) -> list[float | None] | None:
    """The numbers of all sampled tokens of a trace; None if a node with sampled tokens has none."""
    values: list[float | None] = []
    for node in nodes:
        own = node.get(name)
        if any(node["mask"]) and not own:
            return None
        values += map(finite, own or ())
    return values


def _truncated(trace: dict[str, Any]) -> bool:
    """Whether a limit cut the rollout off, as verifiers' `Trace.is_truncated` and `is_timeout` say."""
    calls = [call for call in trace.get("calls") or () if call.get("error") is None]
    return bool(
        trace.get("is_timeout")
        or trace.get("stop_condition") in CUT_OFF
        or (calls and calls[-1].get("finish_reason") == "length")
    )


def _role(node: dict[str, Any]) -> int:
    role = node["message"].get("role", "template")
    return ROLES.index(role) if role in ROLES else ROLES.index("user")


def _message(node: dict[str, Any]) -> str:
    """The text of a message, with its tool calls."""
    message = node["message"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content)
    calls = [f"{call.get('name')}({call.get('arguments')})" for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (message.get("reasoning_content"), content, *calls) if part)


def _reply(trace: dict[str, Any]) -> str:
    """The last message that the model wrote, in one line."""
    last = next((node for node in reversed(trace["nodes"]) if node["sampled"]), None)
    return " ".join(_message(last).split()) if last else ""


def _answer(trace: dict[str, Any]) -> str:
    """The right answer, if the task's data has one under a usual name."""
    data = trace["task"].get("data") or {}
    answer = data.get("answer")
    return str(answer)[:PREVIEW] if answer is not None else ""


def finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def lines_of(found: Rollouts, texts: Sequence[dict[int, Any]], runs: Sequence[str]) -> Iterator[str]:
    """The page's rollouts as lines of JSON, for other programs: ids, texts, origin, mask and numbers of each token."""
    run_of_chunk = dict(zip(found.index["chunk"], found.index["run"], strict=True))
    for number, chunk in enumerate(found.chunks):
        run = run_of_chunk.get(number, 0)
        for rollout in json.loads(chunk):
            words = [texts[run].get(token) for token in rollout["ids"]]
            texts_ = [bytes(word).decode(errors="replace") if isinstance(word, list) else word for word in words]
            full = {
                **rollout,
                "nodes": [[ROLES[role], count] for role, count in rollout["nodes"]],
                "mask": expand(rollout["mask"]),
                "content": expand(rollout["content"]),
            }
            yield json.dumps({"run": runs[run], **full, "texts": texts_}, ensure_ascii=False)


def expand(lengths: Sequence[int]) -> list[bool]:
    """The values of `run_lengths`."""
    return [bool(i % 2) for i, length in enumerate(lengths) for _ in range(length)]
