"""A run that hangs says what it was doing, where its threads are, and `doctor RUN_DIR` reads it."""

from __future__ import annotations

import os
import queue
import threading
from contextlib import closing
from pathlib import Path

from plumbob.trainer.run_files.silence import STACKS, SilenceWatch, last_silence
from plumbob.trainer.watch.warnings import stop_finding


def wait_for_a_lock_that_nobody_releases(released: threading.Event) -> None:
    released.wait()


def test_a_silent_run_writes_once_where_its_threads_are(tmp_path: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    released = threading.Event()
    hangs = threading.Thread(target=wait_for_a_lock_that_nobody_releases, args=(released,))
    hangs.start()
    try:
        with closing(SilenceWatch(tmp_path, told.put, seconds=0.05)) as watch:
            watch.news("step 3/100: training on 240 of 512 rollouts")
            sentence = told.get(timeout=60)
            # Later looks do not say so again: a screen full of the same sentence hides what came before.
            assert not released.wait(0.1)
            watch.news("step 4/100: rollouts")
            again = told.get(timeout=60)
    finally:
        released.set()
        hangs.join()
    assert sentence.startswith("step 3/100: training on 240 of 512 rollouts: nothing new for 0 seconds")
    assert str(tmp_path / STACKS) in sentence and again.startswith("step 4/100: rollouts")
    stacks = (tmp_path / STACKS).read_text()
    assert stacks.count("step 3/100") == 1 and "wait_for_a_lock_that_nobody_releases" in stacks


def test_the_doctor_reads_it_until_a_step_is_finished(tmp_path: Path) -> None:
    assert last_silence(tmp_path) is None and stop_finding(tmp_path, []) is None
    (tmp_path / STACKS).write_text(
        "# 2026-11-25 23:16:00 step 1/9: rollouts: nothing new for 900 seconds\nThread 0x1\n\n"
        "# 2026-11-25 23:40:00 step 2/9: training on 5 of 8 rollouts: nothing new for 900 seconds\nThread 0x1\n\n"
    )
    found = stop_finding(tmp_path, [{"step": 1.0}])
    assert found is not None and (found.verdict, found.cause, found.step) == ("error", None, 2)
    assert "step 2/9: training on 5 of 8 rollouts" in found.evidence and "step 1/9" not in found.evidence
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    os.utime(metrics, (0, 0))
    assert last_silence(tmp_path) is not None  # the last step was finished before
    now = (tmp_path / STACKS).stat().st_mtime + 1
    os.utime(metrics, (now, now))
    assert last_silence(tmp_path) is None


def test_a_disk_that_refuses_the_file_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / STACKS).mkdir()
    told: queue.Queue[str] = queue.Queue()
    with closing(SilenceWatch(tmp_path, told.put, seconds=0.01)):
        assert not threading.Event().wait(0.1)
    assert told.empty() and last_silence(tmp_path) is None
