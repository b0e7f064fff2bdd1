"""The guide for those who come from other trainers: each of its commands runs, and its table misses no setting of TRL."""

import dataclasses
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from plumbob.trainer.cli import train as cli
from plumbob.trainer.config.options import read_toml, resolve, spellings
from plumbob.trainer.config.removed import INSTEAD, REMOVED
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.training import setup
from typer.main import get_command

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs/guides/coming_from.md").read_text()

ROW = re.compile(r"<tr><td>\n\n```(?:toml)?\n(.*?)```\n\n</td><td>\n\n```(sh|toml)\n(.*?)```\n\n</td></tr>", re.DOTALL)
ROWS = [(left, language, right) for left, language, right in ROW.findall(GUIDE)]
COMMANDS = [shlex.split(right.replace("\\\n", ""))[2:] for _, language, right in ROWS if language == "sh"]
"""The commands on the right without `uv run`, in the guide's order."""
FILES = [right for _, language, right in ROWS if language == "toml"]

# What the tests append to a command. A repeated option replaces the earlier one.
FAST_ROLLOUTS = "--engine transformers --datasets synthetic --max-tokens 24"
SMALL_RUN = f"{FAST_ROLLOUTS} --batch-size 4 --num-generations 4 --gradient-accumulation-steps 1 --eval-examples 2"
SMALL_RUN += " --max-context 1024 --no-bf16 --report-to none --no-push-to-hub"
LAUNCHED = "--num-processes 2 --mixed-precision no --main-process-port 0"
"""CPU processes, which have no bfloat16 that DeepSpeed could divide."""


def starting(*words: str) -> list[list[str]]:
    return [command for command in COMMANDS if command[: len(words)] == list(words)]


def is_training(command: list[str]) -> bool:
    return command[0] == "train" or "plumbob.trainer" in command


def small(command: list[str]) -> tuple[list[str], list[str]]:
    """(a training command of the guide with small sizes, its own arguments of `train`)."""
    launcher, arguments = [command[0]], command[1:]
    if command[0] == "accelerate":
        at = command.index("plumbob.trainer")
        launcher, arguments = [*command[: at - 1], *LAUNCHED.split(), *command[at - 1 : at + 1]], command[at + 1 :]
    if any(argument.startswith("--resume") for argument in arguments):
        return [*launcher, *arguments, "--max-steps", "2"], arguments
    text = shlex.join(arguments)
    env = "musique" if "musique" in text else "gsm8k"
    sizes = [*SMALL_RUN.split(), "--model", f"tiny-{env}"]
    sizes += ["--eval-datasets", "synthetic"] if env == "musique" else []
    by_epochs = "epochs" in text
    sizes += ["-a", "num_examples=4"] if by_epochs else ["--max-steps", "1"]
    return [*launcher, *arguments, *sizes], arguments


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    """Run a command in `folder`, which must succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PLUMBOB_CACHE": str(folder / "cache")}
    program = [str(Path(sys.executable).parent / command[0])]
    done = subprocess.run([*program, *command[1:]], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done


def run_here(command: list[str], folder: Path, monkeypatch, capsys) -> str:
    """Run a command in `folder` like `run`, in this process, which has loaded torch and verifiers; returns its stdout."""
    (entry,) = entry_points(group="console_scripts", name=command[0])
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("PLUMBOB_CACHE", str(folder / "cache"))
    with pytest.raises(SystemExit) as end:
        entry.load()()
    done = capsys.readouterr()
    assert not end.value.code, f"{shlex.join(command)}\n{done.out}{done.err}"
    return done.out


def settings_of(arguments: list[str]) -> TrainConfig:
    """What the arguments of `train` mean, by its own way as far as the settings."""
    return cli.configure(get_command(cli.app).make_context("train", list(arguments)).params)[0]


def check_run(folder: Path, arguments: list[str], steps: int = 1) -> TrainConfig:
    """The run trained, with every setting of the guide's command that the test's sizes leave alone."""
    (directory,) = [p.parent for p in folder.rglob("config.toml")] if folder.is_dir() else []
    recorded = TrainConfig(**read_toml(directory / "config.toml", TrainConfig))
    changed = {name.lstrip("-").replace("-", "_").removeprefix("no_") for name in SMALL_RUN.split() if name[:2] == "--"}
    # A run records no name, and how many steps and which learning rate its settings came to.
    changed |= {"model", "env_args", "eval_datasets", "run_name", "max_steps", "num_epochs"}
    changed |= {"learning_rate"} if settings_of(arguments).learning_rate is None else set()
    wanted = settings_of(arguments)
    for f in dataclasses.fields(TrainConfig):
        if f.name not in changed:
            assert getattr(recorded, f.name) == getattr(wanted, f.name), f.name
    assert set(wanted.env_args) <= set(recorded.env_args)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == steps and (directory / "model" / "model.safetensors").is_file()
    return recorded


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that looks like the repository to the guide's commands."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_guide_has_a_command_for_each_thing_to_do():
    programs = {command[0] for command in COMMANDS}
    assert programs == {"vf-vllm", "vf-install", "accelerate", "train", "evaluate", "predict", "benchmark"}
    assert GUIDE.count("</td><td>") == len(ROWS) == len(COMMANDS) + len(FILES) and len(FILES) == 1


@pytest.mark.parametrize("command", starting("vf-vllm"), ids=" ".join)
def test_server_commands_are_commands_of_vllm(command, tmp_path):
    printed = run([*command, "--print-command"], tmp_path).stdout
    for argument in command[1:]:
        assert argument in ("--model", "--sync", "nccl") or argument in printed


@pytest.mark.slow
@pytest.mark.parametrize("command", starting("vf-install"), ids=" ".join)
def test_environments_are_installed_by_their_names(command, tmp_path):
    assert "already there  vf-gsm8k" in run(command, tmp_path).stdout


@pytest.mark.parametrize("command", [*filter(is_training, COMMANDS)], ids=lambda command: command[-1])
def test_training_commands_are_understood_as_they_stand(command, folder, monkeypatch):
    """Without the test's sizes: every option is one of `train`, or says that it has no effect."""
    command, arguments = small(command)
    if "--resume-from-checkpoint" not in arguments:
        config = settings_of(arguments)
        monkeypatch.setenv("WORLD_SIZE", "3" if command[0] == "accelerate" else "1")
        assert config.rollouts_per_step(int(os.environ["WORLD_SIZE"])) % config.num_generations == 0
        assert config.engine == "vllm" or config.env == "gsm8k"


def launched(text: str) -> list[str]:
    """The guide's command for `accelerate launch` that contains `text`."""
    (command,) = [command for command in starting("accelerate") if text in shlex.join(command)]
    return command


needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")


@pytest.mark.slow
@needs_deepspeed
def test_the_main_job_with_every_flag_of_the_original_script(folder, monkeypatch, capsys):
    """Also what the guide does with its run: `predict`."""
    command, arguments = small(launched("plumbob.trainer musique"))
    done = run(command, folder)
    assert "in 2 processes, zero3" in done.stderr
    for flag in (
        *("--few-shot-prob", "--n-env-jobs", "--eval-accumulation-steps", "--log-on-each-node"),
        *("--per-device-eval-batch-size", "--save-only-model"),
    ):
        assert f"{flag} has no effect" in done.stderr
    config = check_run(folder / "outputs" / "qwen-7b-musique", arguments, steps=2)
    assert {"noise=1.0", "retriever=hybrid", "max_top_k=3"} <= set(config.env_args)
    (command,) = starting("predict")
    run_here([*command, "--datasets", "synthetic", "-n", "2", "--max-tokens", "16"], folder, monkeypatch, capsys)
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all("predicted_answer" in row for row in rows)


def in_one_process(command: list[str]) -> list[str]:
    """A command for `accelerate launch` as one of `train`; the test of the main job runs one with the launcher."""
    main_job = launched("plumbob.trainer musique")
    assert set(command[: command.index("-m")]) - {"--config_file"} <= set(main_job)
    return ["train", *command[command.index("plumbob.trainer") + 1 :]]


@pytest.mark.slow
def test_gsm8k_and_its_continuation(folder, monkeypatch, capsys):
    command, arguments = small(in_one_process(launched("plumbob.trainer gsm8k --config")))
    run_here(command, folder, monkeypatch, capsys)
    assert check_run(folder / "runs" / "gsm8k", arguments).loss_type == "grpo"
    command, _ = small(in_one_process(launched("--resume-from-checkpoint")))
    run_here(command, folder, monkeypatch, capsys)
    lines = (folder / "runs" / "gsm8k" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_the_command_line_of_trl(folder, monkeypatch, capsys):
    command, arguments = small(in_one_process(launched("--per_device_train_batch_size")))
    run_here(command, folder, monkeypatch, capsys)
    config = check_run(folder / "outputs" / "trl-gsm8k", arguments, steps=4)
    assert (config.loss_type, config.scale_rewards, config.kl_beta) == ("dapo", "group", 0.001)
    assert config.peft and config.lora_targets == "all-linear" and config.importance_correction == "token_truncate"


@pytest.mark.slow
@pytest.mark.parametrize("command", starting("train"), ids=" ".join)
def test_commands_of_one_process(command, folder, monkeypatch, capsys):
    command, arguments = small(command)
    run_here(command, folder, monkeypatch, capsys)
    check_run(folder / "runs", arguments)


@pytest.mark.slow
@pytest.mark.parametrize("command", [*starting("evaluate"), *starting("benchmark")], ids=" ".join)
def test_evaluations(command, folder, monkeypatch, capsys):
    env = command[1]
    model = ["--models", f"tiny-{env}"] if command[0] == "benchmark" else ["--model", f"tiny-{env}"]
    printed = run_here([*command, *model, *FAST_ROLLOUTS.split(), "-n", "2", "--json"], folder, monkeypatch, capsys)
    assert json.loads(printed) and list((folder / "evaluations").rglob("*.jsonl"))


@pytest.mark.slow
def test_the_file_of_vf_rl(folder, monkeypatch, capsys):
    (text,) = FILES
    (folder / "gsm8k.toml").write_text(text)
    command, arguments = small(["train", "--config", "gsm8k.toml"])
    assert settings_of(arguments).engine == "vllm"
    run_here(command, folder, monkeypatch, capsys)
    assert tomllib.loads(text)["microbatch_tokens"] == check_run(folder / "runs", arguments).microbatch_tokens


# --- the table ------------------------------------------------------------------------------------------------------

TABLE = GUIDE.partition("## TRL's GRPOConfig, option by option")[2]
CELLS = [line.split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]


def test_every_option_in_the_table_exists():
    known = {f"--{name.replace('_', '-')}" for name in spellings(TrainConfig)} | {"--resume"}
    named = {option for cells in CELLS for option in re.findall(r"`(--[\w-]+)`", cells[1])}
    assert len(named) > 45 and named - {"--tensor-parallel-size"} <= known
    for cells in CELLS:
        assert re.match(r"`--|`accelerate launch|not there|not needed", cells[1]), cells


def test_every_setting_of_trl_is_in_the_guide():
    """An upgrade of TRL shows here which of its settings the guide does not answer for."""
    trl = pytest.importorskip("trl")
    named = [name for cells in CELLS for name in re.findall(r"`(\w+)`", cells[0])]
    named += re.findall(r"`(\w+)`", TABLE.partition("have no counterpart:")[2])
    fields = {f.name for f in dataclasses.fields(trl.GRPOConfig)}
    assert sorted(fields - set(named)) == [] and sorted(set(named) - fields) == []
    assert len(named) == len(set(named))


NO_DEFAULT = ("run_name", "output_dir", "vllm_server_base_url", "report_to")
"""Settings whose defaults are names of things, or a list instead of "none"."""


def test_defaults_that_differ_are_said():
    """The values in bold, and that all others of the compared fields agree."""
    trl = pytest.importorskip("trl")
    theirs, ours = trl.GRPOConfig(output_dir="x", bf16=False), TrainConfig()
    names = spellings(TrainConfig)
    for cells in CELLS:
        for name in re.findall(r"`(\w+)`", cells[0]):
            if name not in names or "**" in cells[2] or name in NO_DEFAULT:
                continue
            wanted, default = getattr(theirs, name), getattr(ours, names[name])
            same = wanted == default or (not wanted and not default) or str(getattr(wanted, "value", wanted)) == default
            assert same or default is None, f"{name}: TRL {wanted}, here {default}"


def test_an_option_of_another_trainer_is_answered_with_ours(capsys, monkeypatch):
    """Every setting of TRL in the guide's table is an option here, or its refusal says what to write instead."""
    known = {*spellings(TrainConfig), "resume_from_checkpoint"}
    named = {
        n
        for cell in re.findall(r"^\| (`[a-z_0-9`, ]+`) \|", GUIDE, re.MULTILINE)
        for n in re.findall(r"[a-z_0-9]+", cell)
    }
    assert len(named) > 100 and not named - known - set(REMOVED) - set(INSTEAD)
    assert not set(INSTEAD) & known and not set(INSTEAD) & set(REMOVED)
    launcher = {"num_processes", "config_file", "tensor_parallel_size"}
    for say in INSTEAD.values():
        ours = {name.replace("-", "_") for name in re.findall(r"--([a-z0-9-]+)", say)}
        assert ours <= known | launcher, say
    for given, answer in (
        ("--use_vllm true", "there is no option --use-vllm; here it is --engine vllm"),
        ("--num-processes 2", "here it is `accelerate launch --num-processes N -m plumbob.trainer ENV ...`"),
        ("--load_in_4bit true", "there is no option --load-in-4bit: base models are not quantised"),
        ("--load_in_8bit true", "there is no option --load-in-8bit: base models are not quantised"),
    ):
        monkeypatch.setattr(sys, "argv", ["train", "lookup", *given.split()])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 2 and answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (
            "scripts/train_gsm8k.py train --model tiny-gsm8k --num-generations 9",
            "is not a multiple of --num-generations 9",
        ),
        (
            "scripts/train_musique.py train --model tiny-musique --num-generations 9",
            "is not a multiple of --num-generations 9",
        ),
        ("scripts/train_gsm8k.py --model nope/none/x", "train: "),
        (
            "scripts/train_musique.py evaluate --model ./none --noise 1.0 --retriever hybrid",
            "there is no model in './none'",
        ),
        ("scripts/train_musique.py predict --model ./none --noise-rate 1", "predict: there is no model in './none'"),
        (
            "scripts/train_gsm8k.py trian",
            "there is no command 'trian'; the first argument is one of train, sft, evaluate",
        ),
    ],
)
def test_the_scripts_of_older_command_lines_run(line, read, monkeypatch, capsys):
    script, *arguments = line.split()
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    said = capsys.readouterr()
    assert end.value.code == 2 and read in said.err, said


def test_the_word_train_may_stand_before_the_environment(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "train", "lookup", "--batch-size", "7", "--data-parallel-size", "3"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and "--data-parallel-size has no effect: `accelerate launch --num-processes`" in said
    assert "a step of 28 rollouts" in said


@pytest.mark.parametrize(
    ("given", "steps"), [({}, 30), ({"max_steps": 2, "num_epochs": 9}, 2), ({"num_epochs": 0.5}, 2)]
)
def test_the_smaller_of_steps_and_epochs_ends_a_run(given, steps):
    config, _ = resolve(
        TrainConfig, {k: str(v) for k, v in given.items()}, (), kind="run", directory_is="a run directory"
    )
    config = dataclasses.replace(config, learning_rate=1e-4)
    assert setup._resolved(config, None, num_tasks=16, rollouts=32).max_steps == steps
