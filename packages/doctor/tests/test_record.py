"""A record is what was written, and a file of another format is refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plumbob.doctor import record as records

Made = Callable[..., Any]


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(v, getattr(b, n)) for n, v in vars(a).items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    return a == b


def test_a_record_is_read_as_it_was_written(made_record: Made, tmp_path: Path) -> None:
    record = made_record()
    records.write(record, tmp_path / "step.npz")
    assert same(record, records.read(tmp_path / "step.npz"))
    assert [p.name for p in tmp_path.iterdir()] == ["step.npz"]


def test_a_record_takes_about_twenty_bytes_a_token(made_record: Made, tmp_path: Path) -> None:
    record = made_record(groups=16, tokens=400)
    records.write(record, tmp_path / "step.npz")
    tokens = sum(len(row.token_ids) for row in record.rows)
    size = (tmp_path / "step.npz").stat().st_size
    assert size < 25 * tokens, size / tokens


def test_files_of_another_kind_or_version_are_refused(
    made_record: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no record"):
        records.read(tmp_path / "no.npz")
    monkeypatch.setattr(records, "FORMAT", 99)
    records.write(made_record(), tmp_path / "later.npz")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format 99"):
        records.read(tmp_path / "later.npz")


def test_a_field_that_this_version_does_not_know_is_left_out(made_record: Made, tmp_path: Path) -> None:
    record, later = made_record(), dataclasses.make_dataclass("Later", [("new", int, 3)], bases=(records.Row,))
    records.write(dataclasses.replace(record, rows=[later(**vars(row)) for row in record.rows]), tmp_path / "step.npz")
    assert same(records.read(tmp_path / "step.npz"), record)


def test_the_first_steps_and_every_few_are_recorded(made_record: Made, tmp_path: Path) -> None:
    told: list[str] = []
    sink = records.RecordFolder(tmp_path / "records", told.append, began=10)
    assert [s for s in range(10, 60) if sink.wants(s)] == [10, 11, 12, 24, 49]
    sink.keep(lambda: dataclasses.replace(made_record(), step=10))
    assert [p.name for p in (tmp_path / "records").iterdir()] == ["step_00011.npz"]
    (tmp_path / "file").write_text("")
    records.RecordFolder(tmp_path / "file" / "x", told.append).keep(made_record)
    assert len(told) == 1 and "is lost" in told[0]
