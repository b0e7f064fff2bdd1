"""What all commands of the trainer have: a version, completion, help of any width, output in any encoding, exit codes."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from plumbob.console import UserError
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.train import TrainConfig

BIN = Path(sys.executable).parent
TYPED = ("train", "doctor", "evaluate", "predict", "benchmark", "analyze", "serve")
ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SMALL = "--max-steps 1 --batch-size 4 --gradient-accumulation-steps 1 --num-generations 2 --eval-examples 2"


def run(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **environment}
    return subprocess.run([BIN / args[0], *args[1:]], capture_output=True, text=True, env=environment, cwd=cwd)


@pytest.mark.parametrize("command", [*TYPED, "vf-vllm"])
def test_version(command):
    done = run(command, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"plumbob-trainer {version('plumbob-trainer')}\n", "")


@pytest.mark.parametrize("command", TYPED)
def test_the_shell_completes_options(command):
    """Through typer: --install-completion adds a function to the shell that calls the command like this."""
    variable = f"_{command.upper()}_COMPLETE"
    done = run(command, COMP_WORDS=f"{command} --ver", COMP_CWORD="1", **{variable: "complete_bash"})
    assert done.stdout.split() == ["--version"]
    assert "--install-completion" in run(command, "--help").stdout


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
@pytest.mark.parametrize(
    "command", [(name, "--help") for name in TYPED] + [("train", "musique", "--help")], ids=" ".join
)
def test_help_fits_the_terminal(command, columns):
    done = run(*command, COLUMNS=str(columns))
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= columns


def test_narrow_help_says_the_same():
    """Apart from where lines are broken: in names of options after a bar, in texts at a blank."""
    narrow, wide = (re.sub(r"\s", "", run("train", "lookup", "--help", COLUMNS=c).stdout) for c in ("40", "300"))
    assert narrow == wide


@pytest.mark.parametrize("name", ["../../x", "a/b", "/tmp/x", "..", ".", "", "a\\b", "a\0b"])
def test_a_run_name_cannot_leave_the_output_folder(name):
    for make in (lambda: TrainConfig(run_name=name), lambda: EvaluateConfig(envs=("lookup",), run_name=name)):
        with pytest.raises(UserError, match="--run-name is the name of a folder in --output-dir"):
            make()


def test_run_names_that_are_plain_names():
    for name in ("r", "my run", "1.5e-4", "..x", "é", None):
        assert TrainConfig(run_name=name).run_name == name


def test_an_encoding_never_ends_a_command():
    code = """
import typer
from plumbob.console.app import run_app
app = typer.Typer()
@app.command()
def command() -> None:
    print("caf\\u00e9 \\u2581")
run_app("command", app, [])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, **ASCII})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == rb"caf\xe9 \u2581"


@pytest.mark.slow
@pytest.mark.long
def test_a_run_and_its_report_where_everything_is_ascii(tmp_path):
    args = ["lookup", *SMALL.split(), "--run-name", "r", "--log-completions", "2"]
    done = run("train", *args, cwd=tmp_path, **ASCII)
    assert done.returncode == 0, done.stderr
    assert "training reward" in done.stdout and done.stdout.isascii() and "\\u" not in done.stdout
    (tmp_path / "runs/r/config.toml").write_text('env = "lookup"\n# caf\u00e9\n', encoding="utf-8")
    done = run("doctor", "runs/r", "--html", "page.html", cwd=tmp_path, **ASCII)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_ctrl_c_while_loading_exits_as_ctrl_c_later_does(tmp_path):
    process = subprocess.Popen([BIN / "train", "lookup"], stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None and process.stderr.readline().startswith("  loading ")
    while process.poll() is None:  # a signal that arrives while Python runs a destructor is lost, as it is for a user
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    # A second signal can meet a Python that is ending and ends it at once, for which a shell shows 130 as well.
    assert process.returncode in (130, -signal.SIGINT)
    assert not (tmp_path / "runs").exists()
