"""traces/step_N.jsonl.gz: the stored rollouts of step N, one line of JSON each, compressed with gzip.

A file is written under another name and then renamed, so a kill at any moment leaves whole files only. It holds whole
groups, whose lines follow each other. Runs of earlier versions have traces/step_N.jsonl, which is read as well.
"""

from __future__ import annotations

import gzip
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plumbob.console import UserError
from plumbob.console.files import write_whole
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.run_files.token_record import TokenRecord, as_line

if TYPE_CHECKING:
    import verifiers.v1 as vf

MOST_BYTES = 10_000_000_000
"""The traces of a whole run take at most about this much space on disk, an equal part of it for each step."""

GZIP = b"\x1f\x8b"
"""The first bytes of a file that gzip has compressed."""

LEVEL = 6
"""Compression level. Level 9 takes twice the time for a tenth less space."""

BYTES_PER_TOKEN = 10
"""Compressed bytes of traces per token of a rollout: 7 to 9 if ids and log-probabilities are random and text is
English, less if text repeats (measured: docs/results)."""

BYTES_PER_ROLLOUT = 1_000
"""Compressed bytes of a rollout's task, scores and times."""

NOT_ROLLOUTS = ("metrics.jsonl", "warnings.jsonl")
"""Names of the files of lines of JSON that a run writes of something else."""

_NAME = re.compile(r"step_(\d+)\.jsonl(\.gz)?")


def groups_to_store(count: int, *, seed: int, step: int) -> list[int]:
    """The numbers of the `count` groups of a step; as many of the first are stored as there is space.

    They are drawn at random, whatever their tasks and rewards, so that they are a fair sample of the step. The draw
    depends on `seed` and `step` alone, so a step that is taken again stores the same groups.
    """
    return random.Random(f"traces/{seed}/{step}").sample(range(count), count)


def write_traces(
    directory: Path,
    step: int,
    records: Sequence[vf.Trace | str],
    group_size: int,
    *,
    seed: int,
    steps: int | None,
    tokens: Mapping[str, TokenRecord] | None = None,
) -> None:
    """Store rollouts of step `step` (from 1) of a run of `steps` steps, in place of what an earlier attempt stored.

    At least one group is stored, and with `steps` None all of them.

    `records`: every rollout, as a trace or as its line of JSON, group by group. `tokens`: what training computed for the
    tokens of a rollout, by the id of its trace. Raises OSError; no part of the new file is then left behind.
    """
    groups = [records[i : i + group_size] for i in range(0, len(records), group_size)]
    stored: dict[int, bytes] = {}
    size = 0
    for i in groups_to_store(len(groups), seed=seed, step=step):
        text = "".join(as_line(record, tokens) + "\n" for record in groups[i])
        compressed = gzip.compress(text.encode(), LEVEL, mtime=0)  # no time in it: equal rollouts give equal files
        size += len(compressed)
        if steps is not None and stored and size > MOST_BYTES / steps:
            break
        stored[i] = compressed
    path = directory / "traces" / f"step_{step}.jsonl.gz"
    if stored:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, b"".join(stored[i] for i in sorted(stored)))  # gzip files can be joined: gzip(1) reads all
    else:
        path.unlink(missing_ok=True)
    path.with_suffix("").unlink(missing_ok=True)


def stored_steps(directory: Path) -> dict[int, Path]:
    """Step -> file of its traces, for every step that a run directory has traces of, in order."""
    found: dict[int, Path] = {}
    for path in sorted((directory / "traces").glob("step_*")):  # .jsonl sorts before .jsonl.gz, which is newer
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def read(path: Path) -> str:
    """The text of a file of traces, compressed or not.

    Raises OSError for a file that cannot be read or decompressed, and UnicodeDecodeError for one that is not text.
    """
    data = path.read_bytes()
    if not data.startswith(GZIP):
        return data.decode()
    try:
        return gzip.decompress(data).decode()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"its compressed data are cut off or damaged ({error})") from None


def part_of_step(path: Path, stored: int) -> str:
    """Which part of its step a run's file of traces holds, in words; empty if it holds all, or is another file.

    `stored`: number of rollouts in the file. Example: "RUN/traces/step_3.jsonl.gz has 16 of the 128 rollouts of step 3
    (a run stores at most 10 GB)".
    """
    match = _NAME.fullmatch(path.name)
    if match is None or path.parent.name != "traces":
        return ""
    total = rollouts_of_steps(path.parent.parent).get(int(match[1]), stored)
    of = f"{stored} of the {total} rollouts of step {match[1]} (a run stores at most {MOST_BYTES / 1e9:.0f} GB)"
    return "" if stored >= total else f"{path} has {of}"


def rollouts_of_steps(directory: Path) -> dict[int, int]:
    """Step -> number of rollouts that were sampled in it, from metrics.jsonl; without steps that cannot be read."""
    rows = read_metrics(directory)
    return {int(row["step"]): int(row["rollout/count"]) for row in rows if {"step", "rollout/count"} <= row.keys()}


def trace_paths(where: str, env: str) -> list[Path]:
    """The files of stored rollouts that --demonstrations names: a file, a folder, a run directory or a pattern.

    Of an evaluation's folder, the file of the environment. Raises UserError if there is none.
    """
    path = Path(where).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        own = path / f"{env}.jsonl"
        every = (*path.glob("*.jsonl"), *path.glob("*.jsonl.gz"))
        found = list(stored_steps(path).values()) or ([own] if own.is_file() else [])
        found = found or sorted(p for p in every if p.name not in NOT_ROLLOUTS)
    else:
        pattern = path.relative_to("/") if path.is_absolute() else path
        found = sorted(p for p in Path("/" if path.is_absolute() else ".").glob(str(pattern)) if p.is_file())
    if not found:
        raise UserError(
            f"--demonstrations {where} is neither 'oracle' nor a file, folder or pattern with stored rollouts (.jsonl or "
            ".jsonl.gz)"
        )
    return found
