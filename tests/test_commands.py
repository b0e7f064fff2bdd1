"""Every command answers `--help` at once, without loading what only work needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = [
    ["train", "--help"],
    ["train", "lookup", "--help"],
    *[[name, "--help"] for name in ("sft", "serve", "evaluate", "predict", "benchmark", "analyze", "doctor", "report")],
    ["hub", "--help"],
    ["vf-install", "--help"],
    ["hub", "list"],
    ["hub", "list", "--json"],
    ["lab", "--help"],
    ["lab", "status", "--dir", str(Path(__file__).resolve().parents[1] / "docs/results/lab")],
]
MOST_MODULES = 450
HEAVY = {
    *("torch", "transformers", "verifiers", "datasets", "rich", "requests", "numpy", "scipy", "pypi_simple"),
    *("vf_lookup", "vf_gsm8k", "vf_musique"),
}


def run(command: list[str], cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    executable = Path(sys.executable).parent / command[0]
    return subprocess.run(
        [executable, *command[1:]], capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_heavy_import(command):
    result = run(command, PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    modules = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines()]
    imported = {name.split(".")[0] for name in modules}
    assert "plumbob" in imported
    assert not imported & HEAVY
    # What makes a command slow to answer is what it imports: a number of modules does not depend on a busy machine.
    assert len(modules) < MOST_MODULES


MISTAKES = [
    ("train lookup --learning-rate x", "--learning-rate must be a number, not 'x'"),
    ("train lookup --max-step 3", "there is no option --max-step, and lookup has no such setting; did you mean"),
    ("train lookup --batch-size 0", "--batch-size must be at least 1, not 0"),
    ("train lookup --batch-size 3", "a step of 12 rollouts"),
    ("train gsm8k -a datasetz=x", "gsm8k: there is no setting 'datasetz'; did you mean 'datasets'?"),
    ("train lookup --model ./nowhere", "there is no model in './nowhere'"),
    ("train lookup --model cut", "no whole model in 'cut': model.safetensors is a pointer of Git LFS, not the file"),
    (
        "train lookup --model https://huggingface.co/a/b",
        "not the address 'https://huggingface.co/a/b': on the Hugging Face",
    ),
    ("train lookup --seed 18446744073709551616", "--seed must be a number of 64 bits"),
    ("train --config twice.toml", "gives one option twice, as 'lr' and as 'learning_rate'"),
    ("train --resume cut", "the checkpoint cut/checkpoints/step_2 is damaged: trainer.pt is missing"),
    ("evaluate lookup --engine openai --api-key-var sk-x", "--api-key-var takes the name of a variable"),
    ("report . -o twice.toml", "--output twice.toml is there already, and does not hold what is to be written"),
    ("doctor lookup --html twice.toml", "--html twice.toml is there already, and does not hold what is to be written"),
    ("serve --host http://127.0.0.1", "--host takes an address or a host name, without scheme"),
    ("vf-vllm cut --model tiny", "two models are given, cut and --model tiny"),
    ("train lokup", "did you mean 'lookup'?"),
    ("train --config typo.toml", "has an unknown key 'min_hop', which is not a setting of lookup either"),
    ("train --config value.toml", "--lora-dropout must be at least 0 and below 1, not 1.0"),
    ("doctor lookup --max-step 3", "did you mean '--max-steps'?"),
    ("doctor lookup --batch-size 3", "a step of 12 rollouts"),
    ("predict lookup -a hops=3", "lookup: there is no setting 'hops'"),
    ("benchmark lookup -a lookup.min_hop=3", "did you mean 'min_hops'?"),
]
REFUSED_VALUES = [
    ("train lookup --max-hops 0", "--max-hops: input should be greater than or equal to 1, not '0'"),
    ("train lookup --difficulty hrd", "--difficulty: input should be 'trivial'"),
    ("train musique --noise 2", "--noise: input should be less than or equal to 1, not '2'"),
    ("train --config setting.toml", "setting.toml: max_hops: input should be greater than or equal to 1, not '0'"),
    ("evaluate lookup --engine openai --base-url http://h:8a", "--base-url 'http://h:8a' is not the URL of a server"),
    ("evaluate lookup -a max_hops=0", "lookup: max_hops: Input should be greater than or equal to 1"),
]
FILES = {
    "typo.toml": 'env = "lookup"\nmin_hop = 3\n',
    "value.toml": "lora_dropout = 1\n",
    "setting.toml": "\ufeffmax_hops = 0\n",  # the mark with which some editors begin a file
    "twice.toml": "lr = 1\nlearning_rate = 2\n",
    "cut/config.json": "{}",
    "cut/model.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:46\n",
    "cut/config.toml": 'env = "lookup"\n',
    "cut/checkpoints/step_2/manifest.json": '{"trainer.pt": {"bytes": 3, "sha256": ""}}',
}


def imported_by_mistake(folder: Path, command: str, message: str) -> list[str]:
    """The modules that a command imports before it refuses what it was given with `message`."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    result = run(command.split(), cwd=folder, PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 2 and message in result.stderr
    return [line.rpartition("|")[2].strip() for line in result.stderr.splitlines()]


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_of_the_command_line_loads_nothing_heavy(tmp_path, command, message):
    modules = imported_by_mistake(tmp_path, command, message)
    assert not {name.split(".")[0] for name in modules} & (HEAVY | {"peft", "sklearn", "scipy", "numpy"})
    assert len(modules) < MOST_MODULES


@pytest.mark.parametrize(("command", "message"), REFUSED_VALUES, ids=[command for command, _ in REFUSED_VALUES])
def test_a_refused_value_of_an_environment_does_not_load_torch(tmp_path, command, message):
    """The environment itself is asked, because a validator of it may convert the value."""
    modules = imported_by_mistake(tmp_path, command, message)
    assert not {name.split(".")[0] for name in modules} & {"torch", "transformers"}
