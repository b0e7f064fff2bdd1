"""Load questions from hub datasets, local JSONL or Parquet files, and the generator, all in the official schema.

A source is written `path,name,split`; several parts are joined by `;`. Name and split may be left out. A part that is
named `full`, or that holds an unanswerable question, is full: its prompts say that a question may be unanswerable.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from plumbob.retrieval import folded

from vf_musique.metrics import normalize
from vf_musique.records import Record, check_record
from vf_musique.slices import Slice, name_terms, parse_split
from vf_musique.synthetic import generate
from vf_musique.synthetic_world import Split

NAMES = ("answerable", "full")
SPLITS = ("train", "validation")
SYNTHETIC_ROWS = 1000
"""Number of rows of a synthetic split, unless more are requested."""

_HUB_CONFIGS = {"bdsaglam/musique": {"full": "default"}}
"""Configuration names of hub datasets that differ from `NAMES`: {dataset: {name: configuration}}."""
_FILE_NAMES = {"answerable": "ans", "full": "full", "train": "train", "validation": "dev"}

Located = tuple[str, Any]
"""A row with its place, which error messages name."""


@dataclass(frozen=True)
class Source:
    """One part of the setting `datasets`. Example: Source("bdsaglam/musique", "answerable", "train[:100]")"""

    path: str
    name: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        return ",".join(part for part in (self.path, self.name, self.split) if part is not None)


@dataclass(frozen=True)
class Synthetic:
    """Settings of the generator.

    `rows`: smallest number of rows of a split that is not sliced. `paragraphs`: paragraphs of one question. `hops`: the
    hop counts to generate; empty for all.
    """

    seed: int = 0
    rows: int = SYNTHETIC_ROWS
    paragraphs: int = 20
    hops: tuple[int, ...] = ()


def parse_spec(spec: str) -> list[Source]:
    """Parse `path,name,split;path,name,split` into its parts. Raises ValueError that names the part and the field."""
    sources = []
    for number, part in enumerate(spec.split(";"), start=1):
        if not part.strip():
            continue  # the spec may end with ";"
        where = f"datasets part {number} ({part.strip()!r})"
        path, *rest = (piece.strip() for piece in part.split(","))
        if not path:
            raise ValueError(f"{where}: the path is empty; a part is written path,name,split")
        if len(rest) > 2:
            raise ValueError(f"{where}: has {len(rest) + 1} fields; a part is written path,name,split")
        name, split = (piece or None for piece in (*rest, "", "")[:2])
        if split is None and name is not None and (name in SPLITS or "[" in name):
            name, split = None, name  # the part is written path,split: no name has the form of a split
        if split is not None:
            parse_split(split, where)
        sources.append(Source(path, name, split))
    if not sources:
        raise ValueError("datasets is empty; a part is written path,name,split")
    return sources


def load_records(spec: str, split: str, synthetic: Synthetic) -> list[Record]:
    """Return the checked records of all parts, in order and without duplicates. `split`: used by parts that name none.

    Raises ValueError if a part cannot be read, has no rows, or has an invalid row, or if two rows with one id are not
    the same question; the message names the place.
    """
    first: dict[str, tuple[str, Record]] = {}
    for source in parse_spec(spec):
        loaded = _load(source, split, synthetic)
        if not loaded:
            raise ValueError(f"datasets: {source} has no rows")
        for where, record in loaded:
            before, kept = first.setdefault(record.key, (where, record))
            if difference := _difference(kept, record):
                raise ValueError(
                    f"datasets: the id {record.id!r} is in {before} and in {where}, with another {difference}; "
                    "correct or remove one of the two rows"
                )
    return [record for _, record in first.values()]


def _difference(first: Record, second: Record) -> str | None:
    """Return what two rows with one id disagree about, or None if they are the same question.

    Distractors may differ, because the official files give a question other distractors in the full set.
    """
    for name, parts in (
        ("question", [folded(record.question) for record in (first, second)]),
        ("answer", [{normalize(a) or folded(a) for a in record.answers} for record in (first, second)]),
        ("supporting paragraph", [{folded(p.text) for p in r.paragraphs if p.supporting} for r in (first, second)]),
    ):
        if parts[0] != parts[1]:
            return name
    return None


def _load(source: Source, default_split: str, synthetic: Synthetic) -> list[tuple[str, Record]]:
    """Return the checked records of one part, each with its place."""
    located = [(where, check_record(row, where)) for where, row in _rows(source, default_split, synthetic)]
    if source.name == "answerable":
        located = [(where, record) for where, record in located if record.answerable]
    full = source.name == "full" or not all(record.answerable for _, record in located)
    return [(where, replace(record, full=True)) for where, record in located] if full else located


def _rows(source: Source, default_split: str, synthetic: Synthetic) -> Sequence[Located]:
    path = Path(os.path.expanduser(source.path))
    split = name_terms(source.split, default_split) if source.split else default_split
    if source.path == "synthetic":
        full = _known_name(source) == "full"
        return _sliced(split, source, lambda term: _synthetic(term, full, synthetic))
    if path.is_dir():
        name = _known_name(source)
        return _sliced(split, source, lambda term: _read(_official_file(path, name, term.name)))
    if path.exists() or _looks_like_path(source.path):
        return _from_file(path, source)
    name = source.name or NAMES[0]
    return _from_hub(source.path, _HUB_CONFIGS.get(source.path, {}).get(name, name), split)


def _known_name(source: Source) -> str:
    if source.name not in (None, *NAMES):
        raise ValueError(f"datasets: {source}: the name {source.name!r} is not one of {', '.join(NAMES)}")
    return source.name or NAMES[0]


def _sliced(split: str, source: Source, read: Callable[[Slice], Sequence[Located]]) -> list[Located]:
    """Return the rows of all terms of a split, in order. `read` returns all rows of the split that a term names."""
    rows: list[Located] = []
    for term in parse_split(split, f"datasets: {source}"):
        if term.name not in SPLITS:
            raise ValueError(f"datasets: {source}: the split {term.name!r} is not one of {', '.join(SPLITS)}")
        rows += term.of(read(term))
    return rows


def _synthetic(term: Slice, full: bool, settings: Synthetic) -> list[Located]:
    """Generate the split that a term selects from.

    If the term is a slice, the split's size depends on the term alone, so that the slice always holds the same rows. If
    it is not, the split has as many rows as are requested.
    """
    reach = 0 if term.percent else term.stop or 0
    size = max(SYNTHETIC_ROWS, reach, 0 if term.sliced else settings.rows)
    split: Split = "train" if term.name == "train" else "validation"
    rows = _generated(split, full, settings.seed, settings.paragraphs, settings.hops, size)
    return _numbered(f"synthetic {split}", rows)


@lru_cache(maxsize=4)
def _generated(
    split: Split, full: bool, seed: int, paragraphs: int, hops: tuple[int, ...], size: int
) -> tuple[dict[str, Any], ...]:
    # A row depends only on the settings and its index, so the filter by hops and the size do not change any row.
    rows = generate(split, seed=seed, paragraphs=paragraphs, unanswerable=full)
    wanted = (row for row in rows if not hops or len(row["question_decomposition"]) in hops)
    return tuple(itertools.islice(wanted, size))


def _numbered(name: str, rows: Iterable[Any]) -> list[Located]:
    return [(f"{name} row {index}", row) for index, row in enumerate(rows)]


# --- files ----------------------------------------------------------------------------------------------------------


def _looks_like_path(path: str) -> bool:
    """Whether a path that does not exist was meant as a file. A hub dataset is written "name" or "owner/name"."""
    return (
        path.endswith((".jsonl", ".json", ".parquet", "/")) or path.startswith((".", "/", "~")) or path.count("/") > 1
    )


def _official_file(directory: Path, name: str, split: str) -> Path:
    return directory / f"musique_{_FILE_NAMES[name]}_v1.0_{_FILE_NAMES[split]}.jsonl"


def _from_file(path: Path, source: Source) -> Sequence[Located]:
    """Read a file, which is one split under any name; slices of it are applied."""
    _known_name(source)
    rows = _read(path)
    if source.split is None:
        return rows
    terms = parse_split(source.split, f"datasets: {source}")
    if len({term.name for term in terms}) > 1:
        raise ValueError(f"datasets: {source}: a file holds one split; the split may give slices of it, as [:100]")
    return [row for term in terms for row in term.of(rows)]


def _read(path: Path) -> list[Located]:
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        return list(_parse_lines(path, path.read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"no such dataset file: {path}") from None
    except OSError as error:
        raise ValueError(f"cannot read dataset file {path}: {error.strerror or error}") from None


def _read_parquet(path: Path) -> list[Located]:
    import pyarrow
    import pyarrow.parquet

    try:
        return _numbered(str(path), pyarrow.parquet.read_table(path).to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from None


def _parse_lines(path: Path, content: bytes) -> Iterator[Located]:
    # The bytes are split, because str.splitlines() also splits at U+2028, which may be inside a JSON string.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            yield where, json.loads(line.decode())
        except UnicodeDecodeError:
            raise ValueError(f"{where}: not UTF-8 text") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
        except (ValueError, RecursionError) as error:
            # Python cannot parse integers of more than 4300 digits or very deep nesting.
            raise ValueError(f"{where}: not readable JSON ({error})") from None


# --- the hub --------------------------------------------------------------------------------------------------------


def _from_hub(path: str, name: str, split: str) -> list[Located]:
    # Imported here, because importing `datasets` takes seconds and only hub datasets need it.
    import datasets

    try:
        rows = datasets.load_dataset(path, name, split=split)
    except Exception as error:
        # The hub raises many exception types; for the user each means that the dataset could not be loaded.
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"cannot load dataset {path!r}, {name!r}, split {split!r}, from the Hugging Face hub ({cause}); give the path "
            'of a local .jsonl or .parquet file, of a directory with the official files, or "synthetic", instead'
        ) from error
    return _numbered(f"{path} {name} {split}", rows)
