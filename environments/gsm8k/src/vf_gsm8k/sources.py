"""Load rows from a Hugging Face dataset, a local JSONL file, or the generator of synthetic problems.

All rows have GSM8K's schema {"question": str, "answer": str}, where the answer is a worked solution that ends in
"#### 42". A row that could not be scored raises an error at load, instead of giving reward 0 during a run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vf_gsm8k.answers import gold_answer
from vf_gsm8k.notation import is_seen
from vf_gsm8k.synthetic import generate

Split = Literal["train", "test"]

DEFAULT_SYNTHETIC_EXAMPLES = 1000


@dataclass(frozen=True)
class Row:
    """One checked problem.

    Example: Row(id="gsm8k-train-17", question="Ana has 3 ...", answer="42")
    """

    id: str
    """The source's name and the row's index from 0, unique within the source."""
    question: str
    answer: str
    """The gold number, without thousands separators."""


def load_rows(source: str, split: Split, *, seed: int = 0, num_examples: int = -1) -> list[Row]:
    """Return the first `num_examples` rows of the source (-1: all), after checking every row of the source.

    Raises ValueError if the source cannot be read, has no rows, or has an invalid row; the message names the place.
    """
    path = Path(os.path.expanduser(source))
    if source == "synthetic":
        count = DEFAULT_SYNTHETIC_EXAMPLES if num_examples == -1 else num_examples
        name, located = f"gsm8k-synthetic-{split}-{seed}", _numbered(source, generate(split, seed=seed, count=count))
    elif os.path.exists(path) or _looks_like_path(source):
        file = path / f"{split}.jsonl" if os.path.isdir(path) else path
        # Ids use the file's name, because a file's content need not be the split that `split` names.
        name, located = f"gsm8k-{file.stem}", _read_jsonl(file)
    else:
        name, located = f"gsm8k-{split}", _numbered(f"{source} ({split})", _from_hub(source, split))
    rows = [_check(where, row, f"{name}-{index}") for index, (where, row) in enumerate(located)]
    if not rows:
        raise ValueError(f"{source}: no rows")
    return rows if num_examples == -1 else rows[:num_examples]


def _looks_like_path(source: str) -> bool:
    """Whether a source that does not exist was meant as a file. A hub dataset is written "name" or "owner/name"."""
    return source.endswith((".jsonl", "/")) or source.startswith((".", "/", "~")) or source.count("/") > 1


def _numbered(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name} row {index}", row) for index, row in enumerate(rows))


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, parsed JSON) for each line that is not blank.

    Raises ValueError if the file cannot be read, or if a line cannot be parsed.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"no such dataset file: {path}") from None
    except OSError as error:
        raise ValueError(f"cannot read dataset file {path}: {error.strerror}") from None
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


def _from_hub(name: str, split: Split) -> Iterable[Any]:
    # Imported here, because importing `datasets` takes seconds and only hub datasets need it.
    import datasets

    try:
        return datasets.load_dataset(name, "main", split=split)
    except Exception as error:
        # The hub raises many exception types; for the user each means that the dataset could not be loaded.
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"cannot load dataset {name!r}, split {split!r}, from the Hugging Face hub ({cause}); "
            'give the path of a local .jsonl file, or "synthetic", instead'
        ) from error


def _check(where: str, row: Any, row_id: str) -> Row:
    """Return the checked row. Raises ValueError that names the place and the field which is wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not a JSON object")
    for field in ("question", "answer"):
        if field not in row:
            raise ValueError(f"{where}: missing field '{field}'")
        if not isinstance(row[field], str):
            raise ValueError(f"{where}: '{field}' is not a string")
        try:
            row[field].encode()
        except UnicodeEncodeError as error:  # JSON can spell it, and no tokenizer can read it
            raise ValueError(
                f"{where}: '{field}' holds half of a surrogate pair ({row[field][error.start]!a}), which is no "
                "character; write the whole character or leave it out"
            ) from None
    if not is_seen(row["question"]):
        raise ValueError(f"{where}: 'question' is empty")
    gold = gold_answer(row["answer"])
    if gold is None:
        raise ValueError(f"{where}: 'answer' has no \"#### <number>\" line")
    return Row(row_id, row["question"], gold)
