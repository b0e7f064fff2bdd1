"""What the documentation says of the code is true: links, the data flow, the generated pages, the names of metrics."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.trainer.cli.train import app
from plumbob.trainer.run_files.metric_names import METRICS, describe

ROOT = Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(
    ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True
)
PAGES = [path for name in TRACKED.stdout.split() if (path := ROOT / name).is_file()]


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
        ("full", ["--kl-beta", "0.01", "--kl-placement", "reward", "--zero-signal", "refill", "--max-refills", "1"]),
        ("lora", ["--peft", "--num-minibatches", "2", "--importance-correction", "token_mask"]),
    ):
        sizes = ["--max-steps", "1", "--batch-size", "16", "--gradient-accumulation-steps", "1", "--eval-examples", "4"]
        arguments = ["lookup", *sizes, "--output-dir", str(tmp_path), "--run-name", name, "--max-tokens", "40"]
        assert app([*arguments, *options], standalone_mode=False) == 0
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines():
            assert [metric for metric in json.loads(line) if describe(metric) is None] == []
    assert describe("env/turns").name == "env/NAME" and describe("reward/mean").name == "reward/mean"
    assert describe("reward/correct/variance_share").unit == "share" and describe("nonsense") is None
    assert len({metric.name for metric in METRICS}) == len(METRICS)
