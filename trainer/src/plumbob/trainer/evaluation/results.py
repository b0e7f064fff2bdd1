"""Result files of evaluations, read as plain rows, and the table of their scores.

A result file has one stored trace per line. Files of `evaluate`, a training run's traces/step_N.jsonl.gz and the
traces.jsonl of verifiers can all be read, compressed with gzip or not. Does not import verifiers, so that `analyze` starts at once.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.console.text import width
from plumbob.trainer.evaluation.statistics import Estimate, estimate, estimate_count, passes
from plumbob.trainer.run_files import trace_files


@dataclass(frozen=True)
class Row:
    """One rollout's scores."""

    key: str
    """Key of the task."""
    rollout: int
    """Number of the rollout among those of its task, from 0."""
    ok: bool
    reward: float
    """Reward of the rollout; 0 if it failed."""
    scores: dict[str, float]
    """Each reward component, unweighted, and each metric."""
    truncated: bool
    output_tokens: int
    hops: int | None = None
    """Number of steps that the task takes, if the environment reports it."""
    error: str = ""
    shares: frozenset[str] = frozenset()
    """Names in `scores` that are rewards, or that the environment declares to be 0 or 1; the others may be counts."""

    @classmethod
    def of_record(cls, record: Mapping[str, Any], rollout: int = 0) -> Row:
        """The row of a stored trace. `rollout`: its number if the record has none."""
        rewards = {name: value for name, value in record["rewards"].items() if value is not None}
        ok = bool(record.get("ok"))
        errors = record.get("errors") or [{}]
        hops = record["metrics"].get("hops", record["task"].get("data", {}).get("hops"))
        return cls(
            key=record["task"]["key"],
            rollout=record.get("rollout", rollout),
            ok=ok,
            reward=sum(value["score"] * value["weight"] for value in rewards.values()) if ok else 0.0,
            scores={
                **{name: value["score"] for name, value in rewards.items()},
                **{name: value for name, value in record["metrics"].items() if value is not None},
            },
            truncated=is_truncated(record),
            output_tokens=record.get("num_output_tokens", 0),
            hops=None if hops is None else int(hops),
            shares=frozenset((*rewards, *record.get("zero_one_metrics", ()))),
            error="" if ok else f"{errors[-1].get('type', 'error')}: {errors[-1].get('message', '')}".split("\n")[0],
        )


def is_truncated(trace: Mapping[str, Any]) -> bool:
    """What verifiers' `Trace.is_truncated` would say; the property itself is not stored."""
    limits = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
    calls = [call for call in trace.get("calls") or () if call.get("error") is None]
    return trace.get("stop_condition") in limits or bool(calls and calls[-1].get("finish_reason") == "length")


def first_trace(path: Path) -> dict[str, Any]:
    """The first trace of a file, of which no more is read. Raises UserError like `read_records`."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == trace_files.GZIP
        with gzip.open(path) if compressed else path.open("rb") as file:
            line = file.readline().decode()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        for trace in (found := _traces(line)):
            Row.of_record(trace)
        return found[0]
    except (*NOT_A_TRACE, IndexError):
        raise UserError(f"{path} line 1 is not a stored trace") from None


NOT_A_TRACE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _traces(line: str) -> list[Any]:
    """The traces of a line. A file of verifiers has an episode on it, with a trace of each agent; here there is one agent."""
    record = json.loads(line)
    return record.get("traces", [record])


def read_records(path: Path) -> list[dict[str, Any]]:
    """The traces of a file, without a last line that was cut off while it was written.

    Raises UserError for any other line that is not a trace, or that holds text which no tokenizer can read.
    """
    try:
        text = trace_files.read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    records: list[dict[str, Any]] = []
    lines = text.removesuffix("\n").split("\n")  # splitlines() also splits at U+2028, which may be inside a JSON string
    for number, line in enumerate(lines, 1):
        try:
            traces = _traces(line)
            for trace in traces:
                Row.of_record(trace)
        except NOT_A_TRACE:
            if number == len(lines) and not text.endswith("\n"):
                break
            raise UserError(f"{path} line {number} is not a stored trace") from None
        try:
            if "\\u" in line:
                json.dumps(traces, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"half of a surrogate pair ({error.object[error.start]!a}), which no tokenizer can read"
            raise UserError(f"{path} line {number} holds {half}; correct it or leave the line out") from None
        records += traces
    return records


def rows_of(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows in file order. Records without a rollout number are numbered per task, in file order."""
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
    """A function from a row to its reward (for the name "reward"), component or metric; None if the row has none.

    A failed rollout has a reward, which is 0, but no components or metrics.
    """
    return (lambda row: row.reward) if name == "reward" else (lambda row: row.scores.get(name) if row.ok else None)


def interval_of(rows: Sequence[Row], name: str) -> Callable[[Sequence[float]], Estimate]:
    """The function that estimates the mean of this score: `estimate` or `estimate_count`.

    The interval of a metric that may be a count is not that of a proportion.
    """
    return estimate if name == "reward" or any(name in row.shares for row in rows) else estimate_count


@dataclass(frozen=True)
class Summary:
    """The scores of one environment."""

    num_tasks: int
    num_rollouts: int
    num_failed: int
    truncated_share: float
    """Share of rollouts that a limit cut off."""
    output_tokens: float
    """Mean number of sampled tokens per rollout."""
    scores: dict[str, Estimate]
    """Reward, component or metric -> its mean over tasks."""
    pass_at: dict[int, Estimate]
    """k -> pass@k."""
    hops: dict[int, dict[str, Estimate]]
    """Number of hops -> scores on the tasks with that number."""
    failures: dict[str, int]
    """Error -> number of rollouts that failed with it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(rows: Sequence[Row], pass_threshold: float = 1.0) -> Summary:
    """The scores of one environment's rollouts. A rollout passes if its reward is at least `pass_threshold`."""
    finished = [row for row in rows if row.ok]
    found = dict.fromkeys(name for row in finished for name in row.scores)
    # Counts of the rollout come after the scores of the environment. A component named "reward" is not the total
    # reward.
    names = ["reward", *sorted((n for n in found if n != "reward"), key=lambda name: name.startswith("rollout/"))]
    # A failed rollout reports no hops, so the number comes from another rollout of its task, or from the task's data.
    hops_of = {row.key: row.hops for row in rows if row.hops is not None}
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.key in hops_of:
            groups[hops_of[row.key]].append(row)
    n = max(len(rows), 1)
    return Summary(
        num_tasks=len({row.key for row in rows}),
        num_rollouts=len(rows),
        num_failed=len(rows) - len(finished),
        truncated_share=sum(row.truncated for row in rows) / n,
        output_tokens=sum(row.output_tokens for row in rows) / n,
        scores=_means(rows, names),
        pass_at=passes(list(by_task(rows, value_of("reward")).values()), pass_threshold),
        hops={h: _means(groups[h], [name for name in names if name != "hops"]) for h in sorted(groups)},
        failures=dict(Counter(row.error for row in rows if not row.ok)),
    )


def _means(rows: Sequence[Row], names: Sequence[str]) -> dict[str, Estimate]:
    """The mean of the tasks' means of each of these scores, without scores that no row has.

    The unit is the task, because rollouts of one task are not independent samples.
    """
    values = {name: by_task(rows, value_of(name)).values() for name in names}
    means = {name: [math.fsum(own) / len(own) for own in of_tasks] for name, of_tasks in values.items()}
    return {name: interval_of(rows, name)(of_tasks) for name, of_tasks in means.items() if of_tasks}


def table(summary: Summary) -> str:
    """Table for a terminal: each score's mean and 95% interval over tasks, then its mean for each number of hops."""
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


def aligned(lines: Sequence[Sequence[str]], columns: int | None = None) -> str:
    """The cells in columns; the first column is left-aligned, the others are right-aligned.

    Columns that do not fit beside each other into `columns` characters, by default those of the terminal, follow below,
    beside the first one again. A first column that takes more than half of them gets lines of its own.
    """
    columns = columns or width() or sys.maxsize
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    above = widths[0] > columns // 2 and sum(widths) + 2 * (len(widths) - 1) > columns
    left = 2 if above else widths[0]
    blocks: list[list[int]] = [[]]
    for i, size in enumerate(widths[1:], 1):
        if blocks[-1] and left + sum(2 + widths[j] for j in blocks[-1]) + 2 + size > columns:
            blocks.append([])
        blocks[-1].append(i)
    texts = []
    for block in blocks:
        for cells in lines:
            if above and cells[0]:
                texts.append(cells[0])
            first = "  " if above else cells[0].ljust(left)
            texts.append("  ".join([first, *(cells[i].rjust(widths[i]) for i in block)]).rstrip())
        texts.append("")
    return "\n".join(texts[:-1])
