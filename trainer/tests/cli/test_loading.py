"""What `train` imports, and when: counted in modules, because seconds depend on the machine."""

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plumbob.trainer.cli.loading import use_growing_segments

BIN = Path(sys.executable).parent
SMALL = "--max-steps 1 --batch-size 4 --gradient-accumulation-steps 1 --num-generations 2 --eval-examples 2"
NOT_NEEDED = ("sklearn", "scipy", "pandas", "peft", "datasets", "vllm", "wandb", "matplotlib", "sentence_transformers")
NOT_BEFORE_THE_FIRST_ROW = (
    *("deepspeed", "starlette", "uvicorn", "cryptography", "mcp.client", "mcp.server.lowlevel", "mcp_types.methods"),
    *("anthropic._client", "anthropic.types.beta", "prime_sandboxes.sandbox", "verifiers.v1.tasksets.harbor"),
    *("torch.nn.attention.varlen"),
)
MOST_MODULES = 4700
"""Before the first row of the table. What makes it late is what is imported before it."""

LOADED = """
import sys
first = set()
def note(event, args):
    if not first and event == "open" and "step_1.jsonl" in str(args[0]):  # the first step is recorded
        first.update(sys.modules)
sys.addaudithook(note)
from plumbob.console.app import run_app
from plumbob.trainer.cli.train import app
try:
    run_app("train", app, sys.argv[1:])
except SystemExit as end:
    print("code", end.code)
print("first", *sorted(first))
print("loaded", *sorted({name.split(".")[0] for name in sys.modules}))
"""


def imported(args: list[str], cwd: Path) -> tuple[str, set[str], set[str]]:
    """(output, modules in memory when the first step is recorded, top-level packages at the end) of a `train`."""
    done = subprocess.run([sys.executable, "-c", LOADED, *args], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    *output, first, last = done.stdout.splitlines()
    assert first.startswith("first ") and last.startswith("loaded ")
    return done.stderr + "\n".join(output), set(first.split()[1:]), set(last.split()[1:])


@pytest.mark.slow
def test_a_run_without_lora_imports_neither_peft_nor_what_libraries_would_import_for_others(tmp_path):
    output, first, loaded = imported(["lookup", *SMALL.split(), "--run-name", "r"], tmp_path)
    assert "code 0" in output and (tmp_path / "runs/r/model/model.safetensors").is_file()
    assert {"torch", "transformers", "verifiers"} <= loaded
    assert not loaded & set(NOT_NEEDED)
    assert first.intersection(NOT_BEFORE_THE_FIRST_ROW) == set()
    assert len(first) < MOST_MODULES


@pytest.mark.slow
@pytest.mark.long
def test_lora_works_after_the_short_imports(tmp_path):
    output, _, loaded = imported(["lookup", "--peft", *SMALL.split(), "--run-name", "r"], tmp_path)
    assert "code 0" in output and (tmp_path / "runs/r/model/adapter/adapter_model.safetensors").is_file()
    assert "peft" in loaded


@pytest.mark.slow
def test_other_code_in_the_process_finds_what_was_not_imported():
    """Also transformers itself: only the modules that asked while they were imported keep the short answer."""
    code = """
from plumbob.trainer.cli.loading import import_transformers
import_transformers()
import sys
from transformers import utils
assert utils.is_sklearn_available() and utils.is_scipy_available() and utils.is_peft_available()
from transformers.integrations import peft as integration
from transformers.models.auto import auto_factory
assert integration.is_peft_available() and auto_factory.is_peft_available()
import sklearn.metrics, scipy.optimize, peft
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_first_line_comes_before_anything_heavy_is_imported(tmp_path):
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    process = subprocess.Popen(
        [BIN / "train", "lookup", "--max-hops", "3"], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    assert process.stderr is not None
    before = set()
    for line in process.stderr:
        if line.startswith("  loading "):
            break
        before.add(line.rpartition("|")[2].strip().split(".")[0])
    else:
        pytest.fail("no line says what is being loaded")
    process.kill()
    process.communicate()
    assert "lookup" in line and "torch" in line
    assert "plumbob" in before
    assert not before & {"torch", "verifiers", "transformers", "sklearn", "peft", "vf_lookup", "numpy"}


def test_only_the_first_process_of_a_run_says_what_is_loaded(capsys, monkeypatch):
    from plumbob.trainer.cli.loading import announce

    monkeypatch.setenv("RANK", "1")
    with announce("torch"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    with announce("torch"):
        pass
    assert capsys.readouterr().err == "  loading torch\n"


def test_garbage_is_collected_again_after_the_imports():
    from plumbob.trainer.cli.loading import fast_imports

    try:
        with fast_imports("modules"):
            assert not gc.isenabled()
        assert gc.isenabled()
        with pytest.raises(ModuleNotFoundError), fast_imports("modules"):
            importlib.import_module("a_module_that_is_not_there")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        ("auto", {}, "expandable_segments:True"),
        ("paged", {}, "expandable_segments:True"),
        ("vllm", {}, None),  # its server would inherit it
        ("auto", {"WORLD_SIZE": "2"}, None),
        ("auto", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("auto", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_memory_comes_in_growing_segments_where_that_is_known_to_help(engine, given, expected, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards, whoever sets it
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    use_growing_segments(engine)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


WRONG = """
train lookup --difficulty brutal
train musique --datasets no/such.jsonl,answerable
train lookup --dry-run --eval-datasets x.jsonl
sft lookup --demonstrations none/*.jsonl
sft lookup --demonstrations wrong.jsonl
sft lookup --demonstrations cut.npz
sft lookup --num-generations 8
train lookup --loss exits.py:loss
train lookup --loss breaks.py:loss
train lookup --engine vllm --vllm-url http://127.0.0.1:1 --peft
train lookup --output-dir cut.npz/runs
train lookup --report-to wandb
train --config words.toml
evaluate gsm8k --datasets ./no.jsonl
evaluate lookup --engine openai --base-url http://127.0.0.1:1/v1 --model m
doctor cut.npz
doctor wrong.jsonl
doctor trl wrong.jsonl
doctor trl --every 0 wrong.jsonl
report empty
evaluate lookup --model runs/nobody
evaluate --resume run
predict lookup --oracle --output-file empty
"""
WRONG_FOR_THE_ENVIRONMENT = """
train gsm8k --model tiny-gsm8k --datasets wrong.jsonl
train gsm8k --model tiny-gsm8k --datasets empty.jsonl
train gsm8k --model tiny-gsm8k --datasets synthetic --eval-datasets wrong.jsonl
train gsm8k lookup --model tiny-gsm8k --gsm8k.datasets wrong.jsonl
train musique --model tiny-musique --datasets synthetic --retriever bm52
train musique --model tiny-musique --datasets synthetic -a hops=nine
train lookup --trained-reward correkt=1
train lookup --trained-reward correct=0
train lookup --max-hops 1 --min-hops 3
evaluate gsm8k --datasets wrong.jsonl
evaluate lookup --replay wrong.jsonl
benchmark lookup --oracle --retrievers bm25,golden
"""
"""What is refused after verifiers is imported, which takes one to two seconds, and before torch is."""


@pytest.mark.parametrize(("lines", "heavy"), [(WRONG, ("torch", "verifiers")), (WRONG_FOR_THE_ENVIRONMENT, ("torch",))])
def test_what_is_known_to_be_wrong_is_told_before_anything_heavy_is_imported(tmp_path, lines, heavy):
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('command = "train"\nenv = "lookup"')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "cut.npz").write_bytes(b"PK cut \xff")
    (tmp_path / "wrong.jsonl").write_text('{"step": "zero"}\n{')
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\ndef loss(tokens, settings): ...")
    (tmp_path / "breaks.py").write_text("import nothing_of_that_name\ndef loss(tokens, settings): ...")
    (tmp_path / "words.toml").write_text('max_steps = "thirty"')
    code = """
import importlib, sys
for line in sys.stdin.read().split("\\n"):
    if line:
        command, *sys.argv[1:] = line.split()
        try:
            module = {"predict": "evaluate", "benchmark": "evaluate"}.get(command, command)
            main = "main" if module == command else f"{command}_main"
            getattr(importlib.import_module(f"plumbob.trainer.cli.{module}"), main)()
        except SystemExit as error:
            print(line, error.code, *(set(HEAVY) & set(sys.modules)), sep=": ")
"""
    python = [sys.executable, "-c", code.replace("HEAVY", repr(heavy))]
    done = subprocess.run(python, input=lines, capture_output=True, text=True, cwd=tmp_path)
    cases = lines.strip().split("\n")
    assert done.stdout.split("\n")[:-1] == [f"{case}: 2" for case in cases], done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("  loading ")]
    assert len(said) == len(cases) and not (tmp_path / "runs").exists(), done.stderr
