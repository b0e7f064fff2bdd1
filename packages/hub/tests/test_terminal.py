"""What people see: versions, completion, texts that fit a narrow terminal, and no colours."""

import json
import os
import pty
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from plumbob.console.text import table
from plumbob.hub.index.static_index import add_files

COMMANDS = ["list", "info", "search", "check", "new", "publish", "index", "yank"]


def run(*command: str | Path, **environ: str) -> str:
    program = Path(sys.executable).parent / command[0]
    return subprocess.run(
        [program, *command[1:]], capture_output=True, text=True, check=True, env={**os.environ, **environ}
    ).stdout


@pytest.mark.parametrize("command", ["hub", "vf-install"])
def test_the_version(command):
    assert run(command, "--version") == f"plumbob-hub {version('plumbob-hub')}\n"


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    for command in ("hub", "vf-install"):
        # Without this, the shell is not an argument: typer finds out which one runs the test.
        assert command in run(command, "--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    words = {"COMP_WORDS": "hub pu", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "hub pu"}
    environ = words | {"_HUB_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert "publish" in run("hub", **environ)


HELP = """
import contextlib, sys
from plumbob.console.app import run_app
from plumbob.hub.cli import hub, vf_install

for command in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        run_app("hub", hub.app, [command, "--help"])
for name, app in (("hub", hub.app), ("vf-install", vf_install.app)):
    with contextlib.suppress(SystemExit):
        run_app(name, app, ["--help"])
"""


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_help_fits(columns):
    text = run("python", "-c", HELP, *COMMANDS, COLUMNS=str(columns), NO_COLOR="1", FORCE_COLOR="1")
    assert text.count("Usage: ") == len(COMMANDS) + 2
    assert max(map(len, text.splitlines())) <= columns, text
    assert "\x1b" not in text


@pytest.mark.parametrize("columns", [40, 60])
def test_lists_fit(columns, hub, make_wheel, tmp_path):
    text = run("hub", "list", COLUMNS=str(columns), FORCE_COLOR="1", NO_COLOR="1")
    assert max(map(len, text.splitlines())) <= columns and "\x1b" not in text
    names = ("a", "an-environment-with-a-long-name", "other")
    wheels = [make_wheel(f"vf-{name}", "1.0", (), name) for name in names]
    add_files(wheels, tmp_path / "hub")
    environ = {"COLUMNS": str(columns)}
    for command in (["search"], ["info", "other"]):
        lines = hub(*command, "--index", "./hub", cwd=tmp_path, **environ).stdout.splitlines()
        # A word such as a URL or a hash is not broken.
        assert all(len(line) <= columns or len(line.split()) == 1 for line in lines), lines


def test_in_a_pipe_each_row_is_one_line(hub, make_wheel, tmp_path):
    add_files([make_wheel("vf-an-environment-with-a-long-name", "1.0", (), "an-environment")], tmp_path / "hub")
    done = hub("search", "--index", "./hub", cwd=tmp_path)
    assert done.stdout.count("\n") == 1 and len(run("hub", "list").splitlines()) == len(
        json.loads(run("hub", "list", "--json"))
    )


def test_a_table(monkeypatch):
    rows = [("a", "1 2 3"), ("bcd", "one two three")]
    assert table(rows) == "a    1 2 3\nbcd  one two three"
    monkeypatch.setenv("COLUMNS", "20")
    assert table([*rows, ("e", "some words that fill a line")]).splitlines()[-2:] == [
        "e    some words that",
        "     fill a line",
    ]
    assert table([("a-name-of-a-certain-length", "v 1.0 text")]).splitlines() == [
        "a-name-of-a-certain-length",
        "  v 1.0 text",
    ]
    assert table([]) == ""


def test_without_environments_the_list_says_what_to_do(new_python):
    done = new_python().run("hub", "list")
    assert (
        done.stdout
        == "no environment is installed; find one with `hub search`, and install it with `vf-install NAME`\n"
    )
    assert new_python().run("hub", "list", "--json").stdout == "[]\n"


@pytest.mark.parametrize(
    "command", [["--from-repo", "--repo", "ssh://git@host.invalid/x.git", "toy"], ["./toy"]], ids=str
)
def test_nothing_is_written_over_a_question_of_ssh(make_project, tmp_path, command):
    make_project(tmp_path / "toy", "vf-toy", needs=["six @ git+ssh://git@host.invalid/six.git"], environment="toy")
    (tmp_path / "ssh").write_text("#!/bin/sh\nprintf 'Passphrase? ' > /dev/tty\nsleep 2.5\nexit 1\n")
    (tmp_path / "ssh").chmod(0o755)
    child, terminal = pty.fork()
    if child == 0:  # its own session, with a terminal that ssh can ask on
        os.chdir(tmp_path)
        os.environ["GIT_SSH_COMMAND"] = str(tmp_path / "ssh")
        os.execv(Path(sys.executable).parent / "vf-install", ["vf-install", *command])
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the terminal's end
            break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (1, 2)
    before, _, after = shown.partition(b"Passphrase? ")
    assert after and (b"looking for" in before or b"cloning" in before), shown
    assert b"looking for" not in after and b"\x1b[K" not in after.partition(b"failed")[0], shown
