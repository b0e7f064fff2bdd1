"""`lab run` from the first run to the verdict, with a stand-in for `train`; once, marked slow, with `train` itself."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from plumbob.console.app import run_app
from plumbob.lab.cli.lab import app
from plumbob.lab.files import sections
from plumbob.lab.files.workspace import Lab
from plumbob.lab.run_files import RunFiles

STAND_IN = Path(__file__).with_name("stand_in_trainer.py")
LAB = [sys.executable, "-c", "from plumbob.lab.cli.main import main; main()"]
FRONT = """---
id: H01
title: the treatment helps
status: {status}
env: lookup
flags: --max-steps 6
changes: [gain]
arms:
  control: {{command: "python {trainer}", flags: "{control}"}}
  treatment: {{command: "python {trainer}", flags: "{treatment}"}}
validated_if: {ok}
invalidated_if: {no}
---
My words before.
<!-- lab:results -->
<!-- /lab:results -->
My words after.
"""
OK = ["slope(reward/mean) of treatment > control", "eval/greedy lift >= 0.05 with p < 0.05"]


def write(root, control="--gain 0", treatment="--gain 0.5", ok=OK, no=(), status="pending"):
    (root / "hypotheses").mkdir(parents=True, exist_ok=True)
    (root / "01-experiments-log.md").write_text("# Log\n")
    text = FRONT.format(
        trainer=STAND_IN,
        control=control,
        treatment=treatment,
        ok=json.dumps(list(ok)),
        no=json.dumps(list(no)),
        status=status,
    )
    (root / "hypotheses" / "h01-it-helps.md").write_text(text)
    return Lab(root)


@dataclass(frozen=True)
class Done:
    stdout: str
    stderr: str


def lab(root, *words, code=0):
    """Run `lab` in this process, which saves the time of its start; its runs are processes."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
        run_app("lab", app, [*words, *(["--dir", str(root)] if root else [])])
    assert (end.value.code or 0) == code, out.getvalue() + err.getvalue()
    return Done(out.getvalue(), err.getvalue())


def status_of(root):
    (entry,) = Lab(root).entries
    return entry.hypothesis.status, entry.hypothesis.confidence


def test_an_effect_is_validated_with_effect_interval_seeds_and_confidence(tmp_path):
    write(tmp_path)
    done = lab(tmp_path, "run", "H01")
    assert "H01 validated, confidence medium, 3 seeds" in done.stdout
    assert status_of(tmp_path) == ("validated", "medium")
    text = sections.read(tmp_path / "hypotheses" / "h01-it-helps.md")
    assert "\nMy words before.\n" in text and text.endswith("\nMy words after.\n")
    results = sections.section(text, "results")
    assert "**Verdict: validated** (confidence medium, 3 seeds)" in results
    # 0.5 / 6 * (1, 1.02, 1.04): mean 0.085, and 4.30265 standard errors of 0.0016667 / sqrt(3).
    assert "+0.085 [+0.08086, +0.08914]" in results
    assert str(tmp_path) not in re.sub(re.escape(str(STAND_IN)), "", results.split("Commands")[0])
    for link in re.findall(r"!\[[^]]+\]\(([^)]+)\)", results):
        assert ElementTree.parse(tmp_path / "hypotheses" / link).getroot().tag.endswith("svg")
    (files,) = re.findall(r"^Files: .*\]\(([^)]+)\)", results, re.MULTILINE)
    assert (tmp_path / "hypotheses" / files / "verdict.json").is_file()
    assert "control-seed2" in (tmp_path / "01-experiments-log.md").read_text()
    high = lab(tmp_path, "run", "H01", "--seeds", "5")
    assert "6 of them finished already" in high.stderr and high.stderr.count("[") == 4
    assert status_of(tmp_path) == ("validated", "high")


def test_no_effect_is_invalidated_or_left_open_never_validated(tmp_path):
    write(tmp_path, treatment="--gain 0.01", ok=["eval/greedy lift > 0.1"], no=["eval/greedy lift < 0.05"])
    assert "H01 invalidated" in lab(tmp_path, "run", "H01").stdout
    write(tmp_path, treatment="--gain 0.01", ok=["eval/greedy lift >= 0.015"], status="invalidated")
    assert "the criteria of H01 changed after its verdict" in lab(tmp_path, "status").stderr
    assert "H01 inconclusive" in lab(tmp_path, "verdict", "H01").stdout


def test_criteria_on_both_sides_are_partial(tmp_path):
    write(tmp_path, no=["every max(advantage/largest) < 10 * reward range"])
    assert "H01 partial, confidence low" in lab(tmp_path, "run", "H01").stdout


def test_two_seeds_are_inconclusive(tmp_path, monkeypatch):
    write(tmp_path)
    done = lab(tmp_path, "run", "H01", "--seeds", "2")
    assert "H01 inconclusive, confidence low, 2 seeds" in done.stdout
    assert "too few seeds: 2 of at least 3" in done.stdout
    assert f"more seeds:  lab run H01 --seeds 3 -C {os.path.relpath(tmp_path)}\n" in done.stdout
    monkeypatch.chdir(tmp_path / "hypotheses")
    assert "more seeds:  lab run H01 --seeds 3\n" in lab(None, "verdict").stdout
    (one,) = json.loads(lab(tmp_path, "verdict", "--json").stdout).values()
    assert one["seeds"] == 2


def test_files_are_json_that_every_reader_takes_also_with_one_seed(tmp_path):
    write(tmp_path)
    lab(tmp_path, "run", "H01", "--seeds", "1")
    warnings = tmp_path / "experimental-results/h01/control-seed0/warnings.jsonl"
    warnings.write_text('{"cause": "entropy-collapse"}\n{"cause": "entropy-collapse"}\n{"cau')
    assert "| entropy-collapse |" in lab(tmp_path, "verdict").stdout + lab(tmp_path, "show", "H01").stdout
    text = (tmp_path / "experimental-results/h01/verdict.json").read_text()
    effect = json.loads(text, parse_constant=pytest.fail)["validated_if"][0]["effect"]
    assert (effect["low"], effect["high"], effect["n"]) == (None, None, 1)


def test_a_command_that_is_refused_stops_the_experiment_and_a_run_that_fails_does_not(tmp_path):
    write(tmp_path, treatment="--fail 2")
    done = lab(tmp_path, "run", "H01", code=2)
    assert "nothing works" in done.stderr and "correct the flags in" in done.stderr
    write(tmp_path, treatment="--fail 1")
    done = lab(tmp_path, "run", "H01", "--fresh", code=1)
    assert done.stderr.count("exit code 1") == 3
    assert "no verdict yet" in done.stdout
    assert sorted(p.name for p in (tmp_path / "experimental-results").iterdir()) == ["h01", "h01-set-aside-1"]


def test_runs_of_other_flags_are_never_taken_for_the_hypothesis(tmp_path):
    write(tmp_path)
    lab(tmp_path, "run", "H01", "--seeds", "1")
    write(tmp_path, treatment="--gain 0.9")
    for command in ("run", "verdict"):
        done = lab(tmp_path, command, "H01", code=2)
        assert "was made with" in done.stderr and "--fresh" in done.stderr


def test_a_second_difference_between_the_arms_is_told_before_and_after(tmp_path):
    write(tmp_path, treatment="--gain 0.5 --fog 1", ok=OK)
    done = lab(tmp_path, "run", "H01", "--seeds", "1")
    assert "Warning: the arms differ also in fog: control (not given), treatment 1" in done.stderr


def add(root, name):
    """Another hypothesis in the lab of `write`, with the same control and another treatment."""
    first = (root / "hypotheses" / "h01-it-helps.md").read_text()
    text = first.replace("id: H01", f"id: {name}").replace("--gain 0.5", "--gain 0.25")
    (root / "hypotheses" / f"{name.lower()}-again.md").write_text(text)


def test_hypotheses_run_side_by_side_and_share_the_runs_of_one_command(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write(tmp_path)
    add(tmp_path, "H02")
    assert "--gpus takes numbers of GPUs such as 0,1" in lab(tmp_path, "run", "H01", "--gpus", "0,b", code=2).stderr
    done = lab(tmp_path, "run", "H01", "H02", "H01", "--jobs", "4", "--gpus", "3, 5")
    assert done.stdout.count("validated, confidence medium, 3 seeds") == 2
    ended = re.findall(r"^\[\d/6\] (H\d+ \w+ seed \d)  step 6 of 6", done.stderr, re.MULTILINE)
    assert len(ended) == 9 and not [title for title in ended if title.startswith("H02 control")]
    assert "h02/control-seed2 is " in done.stderr
    results = tmp_path / "experimental-results"
    for arm, gpu in (("control", "3"), ("treatment", "5")):
        began_with = json.loads((results / "h01" / f"{arm}-seed0/checkpoint.json").read_text())
        assert began_with["variables"] == ["1", gpu]
    page = (tmp_path / "hypotheses" / "h02-again.md").read_text()
    assert "Run once for another hypothesis with the same command: control-seed0 (h01), " in page
    add(tmp_path, "H03")
    assert "h03/control-seed0 is " in lab(tmp_path, "run", "H03", "--seeds", "1").stderr
    assert " is " not in lab(tmp_path, "run", "H03", "--seeds", "1", "--fresh").stderr.replace("runs are in", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "jobs"),
    [
        *((signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGINT, " --jobs 2")),
        # Nothing can be passed on when the lab itself is killed, but Linux tells its runs.
        pytest.param(signal.SIGKILL, "", marks=pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")),
    ],
    ids=str,
)
def test_ctrl_c_ends_the_runs_that_are_under_way_and_lab_run_goes_on_with_them(tmp_path, number, jobs):
    write(tmp_path, treatment="--gain 0.5 --stop-at 3")
    process = subprocess.Popen(
        [*LAB, "run", "H01", *jobs.split(), "-C", str(tmp_path)], stderr=subprocess.PIPE, text=True
    )
    half = RunFiles(tmp_path / "experimental-results/h01/treatment-seed0")
    control = half.directory.with_name("control-seed0")
    deadline = time.monotonic() + 600
    while (
        len(RunFiles(half.directory).rows) < 2 or RunFiles(control).state != "finished"
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, told = process.communicate(timeout=600)
    run = int(json.loads((half.directory / "checkpoint.json").read_text())["process"])
    while _is_alive(run) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(run)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    assert number == signal.SIGKILL or f"go on with:  lab run H01{jobs} -C {os.path.relpath(tmp_path)}" in told
    assert half.state == "unfinished"
    first = control / "metrics.jsonl"
    before = first.stat().st_mtime_ns
    write(tmp_path, treatment="--gain 0.5 --stop-at 3", status="testing")
    again = subprocess.Popen(
        [*LAB, "run", "H01", "-C", str(tmp_path), "--seeds", "1"], stderr=subprocess.PIPE, text=True
    )
    assert "treatment seed 0 (resumed)  step 6 of 6" in again.communicate(timeout=600)[1]
    assert [row["step"] for row in RunFiles(half.directory).rows] == [1, 2, 3, 4, 5, 6]
    assert first.stat().st_mtime_ns == before


def _is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    "wrong", ["--flags=--no-such-option 3", "--flags=--max-steps 'x", "--env=lokup", "--model=./no"]
)
def test_a_lab_whose_runs_train_would_refuse_is_not_laid_out(tmp_path, wrong):
    done = subprocess.run([*LAB, "init", str(tmp_path / "lab"), wrong], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "lab").exists()
    assert wrong.partition("=")[2].split()[0] in done.stderr


def test_log_show_and_compare_as_text_and_json(tmp_path):
    write(tmp_path)
    lab(tmp_path, "run", "H01", "--seeds", "3")
    runs = json.loads(lab(tmp_path, "log", "--json").stdout)
    assert [(r["hypothesis"], r["steps"], r["state"]) for r in runs] == [("H01", 6, "finished")] * 6
    assert runs[0]["options"]["max_steps"] == 6
    assert "gain=0.5 seed=2" in lab(tmp_path, "log").stdout.replace("seed=2 gain=0.5", "gain=0.5 seed=2")
    shown = json.loads(lab(tmp_path, "show", "h01", "--json").stdout)
    assert shown["verdict"]["validated_if"][0]["effect"]["n"] == 3
    assert "Verdict: validated" in lab(tmp_path, "show", "H01").stdout
    both = [str(tmp_path / "experimental-results/h01" / f"{arm}-seed0") for arm in ("control", "treatment")]
    found = json.loads(lab(None, "compare", *both, "--json").stdout)
    assert found["options"] == {"gain": [0.0, 0.5]}
    assert re.search(r"gain +0.0 +0.5", lab(None, "compare", *both).stdout)
    assert found["evaluations"][0]["difference"][0] == pytest.approx(0.5)
    (reward,) = [row for row in found["metrics"] if row["name"] == "reward/mean"]
    assert reward["difference"][0] == pytest.approx(0.5 * 5 / 6)  # the mean of steps 4 to 6 of 6
    (status,) = json.loads(lab(tmp_path, "status", "--json").stdout)
    assert (status["status"], status["id"]) == ("validated", "H01")


REPORT = {
    "title": "doctor lookup",
    "findings": [
        {"check": "a", "verdict": "pass", "evidence": "1", "cause": None},
        {"check": "no tiny deviations", "verdict": "fail", "evidence": "40% of groups", "cause": "tiny-std-scaling"},
        {"check": "steps are small", "verdict": "fail", "evidence": "2 nats", "cause": "learning-rate-too-high"},
    ],
}


@pytest.mark.parametrize(("causes", "code"), [("[tiny-std-scaling]", 1), ("[reward-constant]", 0)])
def test_probe_says_whether_doctor_names_a_cause_of_the_hypothesis(tmp_path, monkeypatch, causes, code):
    """With a program in doctor's place that prints the form of its report, whose keys tests/test_lab.py compares."""
    write(tmp_path)
    path = tmp_path / "hypotheses" / "h01-it-helps.md"
    path.write_text(path.read_text().replace("env: lookup", f"env: lookup\ncauses: {causes}"))
    doctor = [sys.executable, "-c", f"print({json.dumps(REPORT)!r})"]
    monkeypatch.setattr("plumbob.lab.probe.program", lambda words: doctor)
    done = lab(tmp_path, "probe", "H01", code=code)
    assert "(`doctor lookup --model tiny --max-steps 6 --gain 0 --all`): 3 checks" in done.stdout
    assert ("- `tiny-std-scaling`: no tiny deviations: 40% of groups" in done.stdout) == bool(code)
    assert "`learning-rate-too-high`" in done.stdout
    lab(tmp_path, "run", "H01", "--seeds", "1")
    assert "**Doctor**, arm control (`doctor lookup" in sections.section(sections.read(path), "results")


def test_probe_examines_the_arm_that_is_named(tmp_path, monkeypatch):
    write(tmp_path, treatment="--gain 0.5")
    doctor = [sys.executable, "-c", f"print({json.dumps(REPORT)!r})"]
    monkeypatch.setattr("plumbob.lab.probe.program", lambda words: doctor)
    done = lab(tmp_path, "probe", "H01", "--arm", "treatment", code=0)
    assert "arm treatment (`doctor lookup --model tiny --max-steps 6 --gain 0.5 --all`)" in done.stdout
    assert (
        "H01 has no arm 'other'; it has control, treatment"
        in lab(tmp_path, "probe", "H01", "--arm", "other", code=2).stderr
    )
    assert f"The arm runs `python {STAND_IN}`; doctor examined plumbob's own trainer" in done.stdout


def test_mistakes_are_one_sentence(tmp_path):
    write(tmp_path)
    for words, says in [
        (["run", "H09"], "there is no hypothesis H09"),
        (["show", "H1x"], "there is no hypothesis"),
    ]:
        assert says in lab(tmp_path, *words, code=2).stderr
    done = lab(None, "compare", "a", "b", code=2)
    assert done.stderr == "lab: a is not a run directory: it has no config.toml\n"
    write(tmp_path, control="--gain 0")
    path = tmp_path / "hypotheses" / "h01-it-helps.md"
    path.write_text(path.read_text().replace(f"python {STAND_IN}", "no-such-trainer"))
    assert "there is no command 'no-such-trainer'" in lab(tmp_path, "run", "H01", code=2).stderr


@pytest.mark.slow
@pytest.mark.long
def test_the_shipped_h01_runs_with_train_itself(tmp_path):
    root = tmp_path / "lab"
    flags = "--max-steps 2 --batch-size 8 --gradient-accumulation-steps 1 --eval-examples 4 --max-tokens 40"
    subprocess.run([*LAB, "init", str(root), "--flags", flags], check=True, capture_output=True)
    done = lab(root, "run", "H01", "--seeds", "1")
    assert "H01 inconclusive, confidence low, 1 seeds" in done.stdout
    assert "Warning" not in done.stderr  # the arms' config.toml differ in scale_rewards alone
    text = sections.read(root / "hypotheses" / "h01-advantage-scaling-instability.md")
    assert "Caution" not in text and "no metric" not in text
    first, second = (RunFiles(root / "experimental-results/h01" / f"{arm}-seed0") for arm in ("control", "treatment"))
    assert (first.options["scale_rewards"], second.options["scale_rewards"]) == ("group", "none")
