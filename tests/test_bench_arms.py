"""Arms of a comparison: steps are printed as they end, limits are kept, and arms run side by side: tools/bench/arms.py."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "bench"))
from arms import TRL_STEP, Arm, run_arms

STEPS = """
import time
for step in range(1, 4):
    now = time.time()
    print(f"ROLLOUT {now - 2:.3f} {now:.3f}")
    print('NOTE {"turns": %d}' % step)
    print(f"STEP {step} 0.{step}", flush=True)
"""
HANGS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(f"STEP 1 0.5 {child.pid}", flush=True)
time.sleep(100)
"""
MEETS = """
import pathlib, time
own, other = pathlib.Path({own!r}), pathlib.Path({other!r})
own.touch()
while not other.exists():
    time.sleep(0.01)
print("STEP 1 1.0", flush=True)
"""


def arm(name, code):
    return Arm(name, [sys.executable, "-c", code], TRL_STEP, {"about": name})


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_step_is_a_line_with_its_notes_and_the_arm_ends_in_one(tmp_path, capsys):
    run_arms([arm("a", STEPS)], tmp_path, "", 60)
    *steps, result = printed = lines(capsys)
    assert [(s["step"], s["reward"], s["rollouts s"], s["turns"]) for s in steps] == [
        (1, 0.1, 2.0, 1), (2, 0.2, 2.0, 2), (3, 0.3, 2.0, 3)
    ]  # fmt: skip
    assert result["rewards"] == [0.1, 0.2, 0.3] and len(result["steps s"]) == 2
    assert result["about"] == "a" and result["exit code"] == 0 and not result["cut off"]
    assert [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == printed


@pytest.mark.slow
def test_an_arm_beyond_its_limit_is_ended_with_its_children_and_keeps_its_steps(tmp_path, capsys):
    run_arms([arm("slow", HANGS)], tmp_path, "", 4)
    slow = lines(capsys)[-1]
    assert slow["cut off"] and slow["rewards"] == [0.5] and slow["exit code"] != 0
    child = int((tmp_path / "slow.log").read_text().split()[3])
    assert not alive(child)


def alive(process):
    """Whether the process runs; a dead one may be left for a moment until it is collected."""
    for _ in range(100):
        try:
            os.kill(process, 0)
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return False
        except (ProcessLookupError, FileNotFoundError):
            return False
        time.sleep(0.05)
    return True


def test_an_arm_that_fails_says_its_last_lines_and_the_others_go_on(tmp_path, capsys):
    run_arms([arm("bad", "raise SystemExit('no such model')"), arm("good", STEPS)], tmp_path, "", 60)
    results = [p for p in lines(capsys) if "exit code" in p]
    assert [r["exit code"] for r in results] == [1, 0]
    assert results[0]["last lines"] == ["no such model"]


def test_arms_with_a_gpu_each_run_at_the_same_time(tmp_path, capsys):
    a, b = (str(tmp_path / name) for name in "ab")
    run_arms([arm("a", MEETS.format(own=a, other=b)), arm("b", MEETS.format(own=b, other=a))], tmp_path, "0,1", 60)
    assert {p["arm"]: p["rewards"] for p in lines(capsys) if "exit code" in p} == {"a": [1.0], "b": [1.0]}
