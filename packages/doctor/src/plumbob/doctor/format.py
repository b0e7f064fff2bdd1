"""The documented form of records: what a file must hold, and one sentence for each mistake in it.

A file of records is the `.npz` file of one step that `record.write` makes, or a `.jsonl` file with one step a line, in which
arrays are lists. Its JSON schema is that of the dataclasses of `plumbob.doctor.record`.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from plumbob.doctor import record as records
from plumbob.doctor.record import StepRecord, adapter
from pydantic import ValidationError

MOST_MISTAKES = 20
"""Most sentences about one record."""


def schema() -> dict[str, Any]:
    """The JSON schema of a line of a `.jsonl` file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **adapter().json_schema()}


def files_of(path: Path) -> list[Path]:
    """The files of records that `path` is or holds, in the order of their names."""
    if path.is_file():
        return [path]
    return next((found for p in ("step_*.npz", "*/step_*.npz", "*.jsonl") if (found := sorted(path.glob(p)))), [])


def read_all(path: Path) -> Iterator[tuple[str, StepRecord | list[str]]]:
    """(where it is, the record, or a sentence for each mistake in it) of each record that `path` is or holds."""
    for file in files_of(path):
        if file.suffix != ".jsonl":
            yield file.name, _checked(file)
            continue
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{file.name}, line {number}", _checked(line)


def read_right(path: Path) -> Iterator[tuple[str, StepRecord]]:
    """(where it is, the record) of each record that `path` is or holds. Raises ValueError for one that is not as documented."""
    for where, record in read_all(path):
        if isinstance(record, list):
            raise ValueError(f"{where}: {record[0]}; `validate {path}` lists all mistakes")
        yield where, record


def _checked(given: Path | str) -> StepRecord | list[str]:
    try:
        made = json.loads(given) if isinstance(given, str) else dataclasses.asdict(records.read(given))
        record = adapter().validate_python(made)
    except ValidationError as error:
        return [_field(one["loc"]) + one["msg"].removeprefix("Value error, ") for one in error.errors()][:MOST_MISTAKES]
    except (ValueError, TypeError, RecursionError) as error:
        return [f"it cannot be read: {error}"]
    return list(_contradictions(record))[:MOST_MISTAKES] or record


def _field(place: Sequence[str | int]) -> str:
    text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in place).removeprefix(".")
    return f"{text}: " if text else ""


def _contradictions(x: StepRecord) -> Iterator[str]:
    """A sentence for each field that does not fit another one."""
    for name, count in Counter(rollout.name for rollout in x.rollouts).items():
        if count > 1:
            yield f"rollouts: {count} have the name {name!r}"
    for i, rollout in enumerate(x.rollouts):
        if not -1 <= rollout.tools < len(x.tools):
            yield f"rollouts[{i}].tools: is {rollout.tools}, and there are {len(x.tools)} lists of tools"
        for k, one in enumerate(rollout.requests):
            yield from _lengths(f"rollouts[{i}].requests[{k}]", one, ("logprobs",), len(one.token_ids), "token_ids")
    for i, row in enumerate(x.rows):
        yield from _lengths(f"rows[{i}]", row, ("loss_mask",), len(row.token_ids), "token_ids")
        if row.loss_mask[:1].any():
            yield f"rows[{i}].loss_mask: is true for the first token, which has no log-probability"
        columns = ("sampling_logprobs", "logprobs", "reference_logprobs")
        yield from _lengths(f"rows[{i}]", row, columns, int(row.loss_mask.sum()), "loss_mask true for")
    for u, update in enumerate(x.updates):
        yield from _in_update(f"updates[{u}]", update, x.rows)


def _in_update(place: str, update: records.Update, rows: Sequence[records.Row]) -> Iterator[str]:
    columns = [f.name for f in dataclasses.fields(records.TrainedRow)[2:]]
    for i in update.members:
        if not -1 <= i < len(rows):
            yield f"{place}.members: holds {i}, and there are {len(rows)} rows"
    for k, t in enumerate(update.trained):
        if not -1 <= t.row < len(rows):
            yield f"{place}.trained[{k}].row: is {t.row}, and there are {len(rows)} rows"
        elif t.row >= 0:
            of = f"row {t.row} has loss_mask true for"
            yield from _lengths(f"{place}.trained[{k}]", t, columns, int(rows[t.row].loss_mask.sum()), of)
    for k, tensor in enumerate(update.tensors):
        columns = ["before", "after", "gradient", "moments_before"]
        yield from _lengths(f"{place}.tensors[{k}]", tensor, columns, len(tensor.indices), "indices")


def _lengths(place: str, thing: Any, names: Sequence[str], expected: int, of: str) -> Iterator[str]:
    """A sentence for each array of these names that has another length than `of`."""
    for name in names:
        values = getattr(thing, name)
        if values is not None and values.shape[-1] != expected:
            yield f"{place}.{name}: has {values.shape[-1]} entries, and {of} {expected}"
