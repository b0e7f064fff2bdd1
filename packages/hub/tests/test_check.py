"""`hub check` as it is run: the environment in processes of its own, which may hang, crash and ask the network."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.console import UserError
from plumbob.hub.check.behaviour import CHECKS
from plumbob.hub.check.check import run_check
from plumbob.hub.publish.scaffold import create

REPOSITORY = Path(__file__).parents[3]


def broken(directory: Path, *edits: tuple[str, str, str], tools: bool = False) -> Path:
    """A scaffold in which each edit replaces a text of one of its modules."""
    project = create("broken", directory, tools=tools)
    for file, old, new in edits:
        path = project / "src" / "vf_broken" / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    return project


def failing(report) -> dict[str, tuple[str, ...]]:
    return {r.check: r.problems for r in report.results if r.status == "FAIL"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "musique"])
def test_the_environments_of_this_repository_pass(name):
    report = run_check(REPOSITORY / "environments" / name)
    assert report.failures == []
    assert not [r for r in report.results if r.status == "skip" and r.check != "prediction"]


@pytest.mark.slow
def test_an_installed_environment_passes_by_its_name():
    command = [sys.executable, "-c", "from plumbob.hub.cli.main import hub; hub()", "check", "vf-lookup", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["failed"] == 0 and {c["check"] for c in told["checks"]} > set(CHECKS)


@pytest.mark.slow
def test_what_is_done_at_import_and_what_differs_between_processes(tmp_path):
    written = tmp_path / "written.txt"
    (data := tmp_path / "rows.jsonl").write_text("{}\n")
    work = f"""
import socket, subprocess, sys, threading, time
threading.Thread(target=print).start()
open({str(written)!r}, "w").close()
open({str(data)!r}).close()
subprocess.run([sys.executable, "-c", ""])
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError:
    pass
socket.create_server(("127.0.0.1", 0)).close()
import jax
until = time.process_time() + 1.6
while time.process_time() < until:
    pass
"""
    project = broken(
        tmp_path,
        ("taskset.py", "import random", work + "import random"),
        ("taskset.py", "random.Random(f", "random.Random(hash('x')) if index % 2 else random.Random(f"),
    )
    (project / "src" / "jax.py").touch()  # a name that an environment may not import is enough
    found = failing(run_check(project))
    assert set(found) == {"import-work", "determinism"}
    told = "\n".join(found["import-work"])
    for phrase in (
        "starts a thread",
        f"opens {written} for writing",
        f"reads the data file {data}",
        "starts a process (subprocess.Popen)",
        "asks the network for 192.0.2.1:80",
        "imports jax",
        "more than 1.5 s; import heavy packages where they are used",
    ):
        assert phrase in told
    assert len(found["import-work"]) == 7
    assert "32 of 64 tasks differ between two loads with one seed, first task 1" in found["determinism"][0]


@pytest.mark.slow
def test_tasks_that_are_copies_are_told(tmp_path):
    project = broken(tmp_path, ("taskset.py", "{config.split}/{index}", "{config.split}/{index // 4}"))
    report = run_check(project)
    (load,) = [result for result in report.results if result.check == "load"]
    assert load.status == "ok" and "; 48 of them are copies of earlier ones but for the name" in load.measured


@pytest.mark.slow
def test_an_environment_that_takes_its_process_down_at_import(tmp_path):
    edit = (
        "__init__.py",
        "from plumbob",
        "import os, sys\nprint('no licence', file=sys.stderr)\nos._exit(3)\nfrom plumbob",
    )
    project = broken(tmp_path, edit)
    report = run_check(project)
    assert list(failing(report)) == ["import"]
    assert "importing it: the process ended with exit code 3; its last line on stderr: no licence" in report.failures[0]
    assert all(r.measured == "`import` failed" for r in report.results if r.status == "skip")


def test_without_the_libraries_that_play_rollouts_it_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "verifiers.py").write_text("raise ImportError('there is no verifiers here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no verifiers here; install it with `uv pip install plumbob-rollout`"):
        run_check(create("broken", tmp_path))


@pytest.mark.slow
def test_loading_that_asks_the_network(tmp_path):
    download = "import urllib.request\n        urllib.request.urlopen('http://data.example/rows.jsonl')\n        "
    project = broken(tmp_path, ("taskset.py", "for index in range(self", download + "for index in range(self"))
    pyproject = project / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("<0.5", ""))
    report = run_check(project)
    assert list(failing(report)) == ["dependencies", "load"], "all failures, not the first"
    assert "tried to reach data.example:80" in report.failures[1] and "check_settings" in report.failures[1]
    assert "(taskset.py, line" in report.failures[1]
    assert report.text().endswith("2 of 9 checks failed, 8 skipped")


@pytest.mark.slow
def test_loading_that_hangs_is_ended_with_what_it_started(tmp_path):
    pid = tmp_path / "pid"
    loop = "for index in range(self"
    child = f"child = subprocess.Popen(['sleep', '600'])\n        open({str(pid)!r}, 'w').write(str(child.pid))"
    hang = f"import subprocess, time\n        {child}\n        time.sleep(600)\n        "
    project = broken(tmp_path, ("taskset.py", loop, hang + loop))
    report = run_check(project, timeout=6)
    assert report.failures == ["load: loading its first tasks takes more than 3 s"]
    assert not Path(f"/proc/{pid.read_text()}").exists() or "Z" in Path(f"/proc/{pid.read_text()}/stat").read_text()


@pytest.mark.slow
def test_hooks_that_hang_or_crash_fail_their_check_and_the_next_is_made(tmp_path):
    hooks = """reply = trace.last_reply
        if "sorry" in reply:
            while True:
                pass
        if reply == "...":
            import os
            os._exit(7)
        if read_answer(reply) == self.data.answer and self.data.idx == 9:
            import asyncio
            await asyncio.sleep(600)
        """
    project = broken(tmp_path, ("taskset.py", "return float(read", hooks + "return float(read"))
    found = failing(run_check(project, timeout=8))
    assert set(found) == {"oracle", "garbage", "limits"}
    assert "task 9 (broken-train-0-9) takes more than 2 s: Stuck: stuck in `" in found["oracle"][0]
    assert "takes more than 2 s: Stuck: stuck in `" in found["garbage"][0]
    assert "playing up to the limits: the process ended with exit code 7" in found["limits"][0]
