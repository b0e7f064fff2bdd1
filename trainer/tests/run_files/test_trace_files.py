"""Stored rollouts: compressed, thinned by whole groups, read back in every form, and whole after a kill (defect 17)."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.trainer.evaluation.results import read_records
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.token_record import TokenRecord, as_line, expand
from plumbob.trainer.run_files.trace_files import (
    part_of_step,
    read,
    rollouts_of_steps,
    stored_steps,
    write_traces,
)


def records(groups: int, size: int, letters: int = 20) -> list[str]:
    """Rollouts that hold their group's number and hardly compressible text."""
    rng = random.Random(0)
    return [
        json.dumps({"group": g, "text": "".join(rng.choices("abcdefghijklmnop", k=letters))})
        for g in range(groups)
        for _ in range(size)
    ]


def store(folder: Path, lines: list[str], size: int, *, step: int = 1, steps: int | None = None) -> list[str]:
    """Write a step and read it again."""
    write_traces(folder, step, lines, size, seed=0, steps=steps)
    return read(stored_steps(folder)[step]).splitlines()


@given(st.integers(1, 12), st.integers(2, 5), st.sampled_from([None, 1, 10**8, 10**10, 10**12]))
def test_what_is_stored_are_whole_groups_in_order_and_one_at_least(tmp_path_factory, groups, size, steps):
    lines = records(groups, size)
    stored = store(tmp_path_factory.mktemp("run"), lines, size, steps=steps)
    assert stored == [line for line in lines if line in set(stored)]
    by_group = Counter(json.loads(line)["group"] for line in stored)
    assert set(by_group.values()) == {size}
    assert len(by_group) == (1 if steps in (10**10, 10**12) else len(by_group) if steps == 10**8 else groups)


@pytest.mark.slow
def test_which_groups_are_stored_depends_on_seed_and_step_alone_and_is_fair(tmp_path):
    def kept(lines: list[str], step: int) -> list[int]:
        return sorted({json.loads(line)["group"] for line in store(tmp_path, lines, 4, steps=10**10, step=step)})

    first, other = records(8, 4), [line.replace("a", "z") for line in records(8, 4)]
    assert kept(first, 5) == kept(other, 5) == kept(first, 5)
    counts = Counter(g for step in range(400) for g in kept(first, step))
    assert sum(counts.values()) == 400 and all(27 <= counts[g] <= 73 for g in range(8))  # 50 each, give or take 3.5 s


def test_all_is_kept_of_a_small_run_and_what_fits_of_a_large_one(tmp_path):
    lines = records(16, 4, letters=1000)  # about half of that compressed: 2 kB a group
    assert store(tmp_path, lines, 4, steps=1000) == lines
    steps = trace_files.MOST_BYTES // 10_000  # 10 kB for each step
    thinned = store(tmp_path, lines, 4, steps=steps)
    assert 0 < len(thinned) < len(lines) and stored_steps(tmp_path)[1].stat().st_size <= 10_000
    # One group is kept even if it is too large, because a step without any shows nothing.
    assert len(store(tmp_path, lines, 4, steps=trace_files.MOST_BYTES)) == 4


def test_many_groups_stay_in_order_and_within_the_limit(tmp_path, monkeypatch):
    lines = records(49, 2, letters=200)
    assert store(tmp_path, lines, 2) == lines
    size = stored_steps(tmp_path)[1].stat().st_size
    monkeypatch.setattr(trace_files, "MOST_BYTES", size * 2 // 3)
    assert 0.6 * size < stored_size(tmp_path, lines) <= 0.67 * size


def stored_size(folder: Path, lines: list[str]) -> int:
    store(folder, lines, 2, steps=1)
    return stored_steps(folder)[1].stat().st_size


@example(["\ud800"], [0.0, -1.0])  # half of a surrogate pair, which UTF-8 cannot hold
@given(
    st.lists(st.text(), max_size=4),
    st.lists(st.floats(-50, 50) | st.just(math.nan), min_size=2, max_size=2),
)
def test_what_training_computed_is_stored_whatever_the_text(texts, numbers):
    trace = {"id": "a", "text": texts, "nodes": [{"mask": [False]}, {"mask": [True, True]}]}
    line = as_line(json.dumps(trace), {"a": TokenRecord(0.25, True, entropies=numbers)})
    read_back = json.loads(line.encode())
    assert read_back["text"] == texts
    assert read_back["nodes"][1]["entropies"] == pytest.approx(numbers, abs=0.51e-4, nan_ok=True)
    assert read_back["info"]["training"] == {"advantage": 0.25, "trained": True}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_numbers_stay_with_their_tokens_if_the_loss_is_on_others_than_the_sampled_ones(both):
    """`both`: of each token, whether it was sampled and whether it is in the loss. Its number is its place."""
    sampled, loss = map(list, zip(*both, strict=True))
    trace = {"id": "a", "nodes": [{"mask": sampled[:2]}, {"mask": sampled[2:]}]}
    places = [float(i) for i, used in enumerate(loss) if used]
    found = json.loads(as_line(json.dumps(trace), {"a": TokenRecord(1.0, True, places, loss_mask=loss)}))
    numbers = [value for node in found["nodes"] for value in node.get("trainer_logprobs", [])]
    assert [None if math.isnan(n) else n for n in numbers] == [
        i if loss[i] else None for i, s in enumerate(sampled) if s
    ]
    stored = found["info"]["training"].get("loss_mask")
    assert (stored is None) == (loss == sampled) and (stored is None or expand(stored) == loss)
    shorter = json.loads(as_line(json.dumps(trace), {"a": TokenRecord(1.0, True, places, loss_mask=[*loss, True])}))
    assert all(math.isnan(v) for node in shorter["nodes"] for v in node.get("trainer_logprobs", []))


def test_files_are_plain_gzip_and_equal_rollouts_give_equal_files(tmp_path):
    lines = records(3, 4)
    store(tmp_path, lines, 4)
    path = tmp_path / "traces" / "step_1.jsonl.gz"
    first = path.read_bytes()
    said = subprocess.run(["gzip", "-dc", str(path)], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == lines
    store(tmp_path, lines, 4)
    assert path.read_bytes() == first


def test_a_step_taken_again_replaces_what_any_version_stored(tmp_path):
    lines = records(2, 4)
    (tmp_path / "traces").mkdir()
    old = tmp_path / "traces" / "step_1.jsonl"
    old.write_text("".join(line + "\n" for line in lines[:4]))
    assert stored_steps(tmp_path) == {1: old} and read(old).splitlines() == lines[:4]
    assert store(tmp_path, lines, 4) == lines and not old.exists()
    write_traces(tmp_path, 1, [], 4, seed=0, steps=1)
    assert stored_steps(tmp_path) == {}


def test_a_step_without_rollouts_stores_nothing(tmp_path):
    write_traces(tmp_path, 1, [], 4, seed=0, steps=1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_off_or_damaged_is_refused_in_one_sentence(tmp_path):
    store(tmp_path, records(3, 4), 4)
    path = tmp_path / "traces" / "step_1.jsonl.gz"
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[: len(whole) // 2], whole[:40] + b"\0\0\0" + whole[43:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"step_1\.jsonl\.gz: its compressed data are cut off or damaged") as error:
            read_records(path)
        assert "\n" not in str(error.value)


def test_which_part_of_a_step_a_file_holds(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/count": 32}\n{"step": 2, "rollout/count": 8}\n{"st')
    assert rollouts_of_steps(tmp_path) == {1: 32, 2: 8}
    path = tmp_path / "traces" / "step_1.jsonl.gz"
    assert part_of_step(path, 8) == f"{path} has 8 of the 32 rollouts of step 1 (a run stores at most 10 GB)"
    for other, stored in ((path, 32), (path.with_name("step_3.jsonl"), 4), (tmp_path / "lookup.jsonl", 4)):
        assert part_of_step(other, stored) == ""


WRITER = """
import sys
from pathlib import Path
from plumbob.trainer.run_files.trace_files import write_traces
lines = Path(sys.argv[2]).read_text().splitlines()
for step in range(1, 4):
    write_traces(Path(sys.argv[1]), step, lines, 4, seed=0, steps=3)
"""


def test_a_process_killed_while_it_writes_leaves_readable_files_only(tmp_path):
    """The file of step 2 is a pipe that nobody empties, so the process is certainly in the middle of it when killed."""
    lines, run, source = records(64, 4, letters=4000), tmp_path / "run", tmp_path / "lines"
    source.write_text("".join(line + "\n" for line in lines))
    (run / "traces").mkdir(parents=True)
    partial = run / "traces" / "step_2.jsonl.gz.partial"
    os.mkfifo(partial)
    command = [sys.executable, "-c", WRITER, str(run), str(source)]
    process = subprocess.Popen(command)
    with partial.open("rb") as pipe:
        begun = pipe.read(10_000)
        assert process.poll() is None
        process.kill()
        assert process.wait(timeout=600) == -signal.SIGKILL
    with pytest.raises(EOFError):
        gzip.decompress(begun)
    partial.unlink()
    partial.write_bytes(begun)  # what a disk would hold now

    assert list(stored_steps(run)) == [1] and read(stored_steps(run)[1]).splitlines() == lines
    assert subprocess.run(command, check=False).returncode == 0  # the step is taken again
    assert {step: read(path).splitlines() == lines for step, path in stored_steps(run).items()} == dict.fromkeys(
        (1, 2, 3), True
    )
    assert not partial.exists()
