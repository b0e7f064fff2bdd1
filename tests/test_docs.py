"""What the documentation says of the code is true: links, the data flow, the generated pages, the names of metrics."""

import ast
import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer.core
from plumbob.trainer.cli.train import app, configure
from plumbob.trainer.config.options import flag
from plumbob.trainer.config.removed import REMOVED
from plumbob.trainer.run_files.metric_names import METRICS, describe

ROOT = Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True
)
PAGES = [path for name in TRACKED.stdout.split() if (path := ROOT / name).is_file()]
PROGRAMS = {e.name: e for e in entry_points(group="console_scripts") if e.value.startswith("plumbob.")}
del PROGRAMS["vf-vllm"]  # vLLM reads its options, and needs a GPU


def commands_of(page: Path) -> list[list[str]]:
    """The command lines of plumbob's programs in a page's blocks of code, without `uv run` and what precedes it."""
    blocks = re.findall(r"^```(?:sh|bash)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if not line.startswith(" ")]
    parts = [part.split(" #")[0] for line in lines for part in line.split(" && ") if '"""' not in part]
    words = [part.removeprefix("uv run ").split(maxsplit=1) for part in parts if part.strip()]
    return [
        [name, *shlex.split("".join(rest))] for name, *rest in words if name in PROGRAMS and "[--" not in "".join(rest)
    ]


COMMANDS = {
    shlex.join(c): c
    for page in PAGES
    for c in commands_of(page)
    # What the lab has run is told as it was run, with options of its day.
    if "results/lab" not in str(page)
    or not {flag(name) for name in REMOVED if "any" not in REMOVED[name].values} & set(c)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, anchor = link.partition("#")
        if "://" in link:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            assert anchor in slugs, link


def test_the_data_s_way_names_functions_that_exist_and_no_file_twice():
    steps = re.findall(r"^\| \d+ \| `([^`]+):(\w+)` \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    files = [file for file, _ in steps]
    assert len(steps) >= 15 and len(set(files)) == len(files)
    for file, function in steps:
        defined = {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert function in defined, f"{file}:{function}"


def test_every_room_of_the_trainer_is_described():
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [path.name for path in (ROOT / "trainer/src/plumbob/trainer").iterdir() if (path / "__init__.py").exists()]
    assert rooms and all(f"| `{room}/` |" in text for room in rooms)


def test_the_reference_pages_are_what_the_code_says():
    command = [sys.executable, str(ROOT / "tools/make_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_metric_of_a_run_has_a_meaning(tmp_path):
    """Two runs with most of what adds metrics."""
    for name, options in (
        ("full", ["--kl-beta", "0.01", "--zero-signal", "refill"]),
        ("lora", ["--peft", "--num-minibatches", "2", "--importance-correction", "sequence_mask"]),
    ):
        sizes = ["--max-steps", "1", "--batch-size", "16", "--gradient-accumulation-steps", "1", "--eval-examples", "4"]
        arguments = ["lookup", *sizes, "--output-dir", str(tmp_path), "--run-name", name, "--max-tokens", "40"]
        assert app([*arguments, *options], standalone_mode=False) == 0
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines():
            assert [metric for metric in json.loads(line) if describe(metric) is None] == []
    assert describe("env/turns").name == "env/NAME" and describe("reward/mean").name == "reward/mean"
    assert describe("reward/correct/variance_share").unit == "share" and describe("nonsense") is None
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_pages_show_every_program():
    assert len(COMMANDS) > 100 and {command[0] for command in COMMANDS.values()} == set(PROGRAMS)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_a_page_has_options_that_exist(command, monkeypatch, tmp_path):
    """Each is read by its own program, up to where it would begin to work. Whether it works, other tests ask."""
    monkeypatch.chdir(ROOT)
    read = []
    command_class = typer.core.TyperCommand.__mro__[1]  # typer's own copy of click's
    monkeypatch.setattr(command_class, "invoke", lambda self, context: read.append(context))
    # An environment that the reader has made is like any other.
    monkeypatch.setattr(sys, "argv", ["lookup" if word == "my-env" else word for word in command])
    if command == ["hub", "list"]:  # it answers without typer, whose import takes most of its time
        return
    with pytest.raises(SystemExit) as end:
        PROGRAMS[command[0]].load()()
    assert not end.value.code and (read or {"--help", "--version"} & set(command)), command
    if command[0] == "train" and read and not {"--resume", "runs/NAME/config.toml"} & set(command):
        assert configure(read[-1].params)[0].env  # with the settings of the environment
