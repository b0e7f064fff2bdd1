"""What an evaluation leaves on disk, read back as plain rows, and the table that is made of them.

A result file has one stored trace per line: those of `evaluate`, a training run's traces/step_N.jsonl and upstream's
traces.jsonl are all read alike. Imports no verifiers: `analyze` answers at once.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plumbob.hub.errors import UserError
from plumbob.trainer.evaluation.estimates import Estimate, estimate, pass_at_k


@dataclass(frozen=True)
class Row:
    """One rollout's scores."""

    key: str
    """The task's key."""
    rollout: int
    """Which of the task's rollouts, from 0."""
    ok: bool
    reward: float
    """0 if the rollout failed."""
    scores: dict[str, float]
    """Each named reward, unweighted, and each metric."""
    truncated: bool
    output_tokens: int
    hops: int | None = None
    """How many steps the task takes, if the environment says it."""
    error: str = ""

    @classmethod
    def of_record(cls, record: Mapping[str, Any], rollout: int = 0) -> Row:
        rewards = {name: value for name, value in record["rewards"].items() if value is not None}
        ok = bool(record.get("ok"))
        errors = record.get("errors") or [{}]
        return cls(
            key=record["task"]["key"],
            rollout=record.get("rollout", rollout),
            ok=ok,
            reward=sum(value["score"] * value["weight"] for value in rewards.values()) if ok else 0.0,
            scores={
                **{name: value["score"] for name, value in rewards.items()},
                **{name: value for name, value in record["metrics"].items() if value is not None},
            },
            truncated=_is_truncated(record),
            output_tokens=record.get("num_output_tokens", 0),
            hops=_hops(record),
            error="" if ok else f"{errors[-1].get('type', 'error')}: {errors[-1].get('message', '')}".split("\n")[0],
        )


def _hops(record: Mapping[str, Any]) -> int | None:
    hops = record["metrics"].get("hops", record["task"].get("data", {}).get("hops"))
    return None if hops is None else int(hops)


def _is_truncated(record: Mapping[str, Any]) -> bool:
    """As verifiers' `Trace.is_truncated`, which is not stored."""
    limits = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "max_turn_tokens")
    calls = record.get("calls") or [{}]
    return record.get("stop_condition") in limits or calls[-1].get("finish_reason") == "length"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The traces of a file. A last line that was cut off while it was written is left out; raises UserError for others."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    records: list[dict[str, Any]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            # Upstream's file has one episode per line, which holds the traces of its agents: here one.
            traces = record.get("traces", [record])
            for trace in traces:
                Row.of_record(trace)
        except (ValueError, KeyError, TypeError, AttributeError):
            if number == len(lines) and not text.endswith("\n"):
                break
            raise UserError(f"{path} line {number} is not a stored trace") from None
        records += traces
    return records


def rows_of(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows in file order; a file without rollout numbers gets them by counting each task's."""
    seen: dict[str, int] = defaultdict(int)
    rows = []
    for record in records:
        key = record["task"]["key"]
        rows.append(Row.of_record(record, seen[key]))
        seen[key] += 1
    return rows


def by_task(rows: Sequence[Row], value: Callable[[Row], float | None]) -> dict[str, list[float]]:
    """Task key -> the value of each of its rollouts that has one."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if (number := value(row)) is not None:
            values[row.key].append(number)
    return values


def value_of(name: str) -> Callable[[Row], float | None]:
    """The reward, or a component or metric by its name; of a failed rollout only the reward, which is 0."""
    return (lambda row: row.reward) if name == "reward" else (lambda row: row.scores.get(name) if row.ok else None)


def mean_over_tasks(rows: Sequence[Row], name: str) -> Estimate:
    """The mean of the tasks' means: rollouts of one task are no independent draws, so the task is the unit."""
    return estimate([math.fsum(values) / len(values) for values in by_task(rows, value_of(name)).values()])


@dataclass(frozen=True)
class Summary:
    """The scores of one environment. `hops`: number of hops -> the same scores on those tasks alone."""

    num_tasks: int
    num_rollouts: int
    num_failed: int
    truncated_share: float
    output_tokens: float
    """Sampled tokens per rollout."""
    scores: dict[str, Estimate]
    pass_at: dict[int, Estimate]
    hops: dict[int, dict[str, Estimate]]
    failures: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(rows: Sequence[Row], pass_threshold: float = 1.0) -> Summary:
    finished = [row for row in rows if row.ok]
    found = dict.fromkeys(name for row in finished for name in row.scores)
    # The rollout's own counts come after what the environment reports; a component of that name is not the reward.
    names = ["reward", *sorted((n for n in found if n != "reward"), key=lambda name: name.startswith("rollout/"))]
    passed = by_task(rows, lambda row: float(row.reward >= pass_threshold - 1e-9))
    fewest = min((len(values) for values in passed.values()), default=0)
    ks = sorted({2**i for i in range(fewest.bit_length()) if 2**i <= fewest} | ({fewest} if fewest else set()))
    # A failed rollout reports nothing, but its task has the hops that another rollout reported, or that the data names.
    hops_of = {row.key: row.hops for row in rows if row.hops is not None}
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.key in hops_of:
            groups[hops_of[row.key]].append(row)
    failures: dict[str, int] = defaultdict(int)
    for row in rows:
        if not row.ok:
            failures[row.error] += 1
    n = max(len(rows), 1)
    return Summary(
        num_tasks=len({row.key for row in rows}),
        num_rollouts=len(rows),
        num_failed=len(rows) - len(finished),
        truncated_share=sum(row.truncated for row in rows) / n,
        output_tokens=sum(row.output_tokens for row in rows) / n,
        scores=_means(rows, names),
        pass_at={
            k: estimate([pass_at_k(len(values), round(sum(values)), k) for values in passed.values()]) for k in ks
        },
        hops={h: _means(groups[h], [name for name in names if name != "hops"]) for h in sorted(groups)},
        failures=dict(failures),
    )


def _means(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Estimate]:
    """Those that any of the rows has: a mean of nothing is no number."""
    means = {name: mean_over_tasks(rows, name) for name in names}
    return {name: mean for name, mean in means.items() if mean.n}


def table(summary: Summary) -> str:
    """Lines for a terminal: each score's mean and 95% interval over tasks, then one column for each number of hops."""
    heads = [f"{h} hop{'s' if h != 1 else ''} ({scores['reward'].n})" for h, scores in summary.hops.items()]
    lines = [["", f"all ({summary.num_tasks})", *heads]]
    passes = [[f"pass@{k}", str(value), *("" for _ in heads)] for k, value in summary.pass_at.items()]
    for name, value in summary.scores.items():
        cells = [group.get(name) for group in summary.hops.values()]
        lines.append([name, str(value), *(f"{e.mean:.3f}" if e is not None and e.n else "" for e in cells)])
        lines += passes if name == "reward" else []
    lines.append(["truncated", f"{summary.truncated_share:.3f}", *("" for _ in heads)])
    lines.append(["tokens", f"{summary.output_tokens:.1f}", *("" for _ in heads)])
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        ).rstrip()
        for cells in lines
    )
