"""A user's mistake is one sentence on stderr and exit code 2, and leaves nothing behind."""

import importlib.util
import json
from dataclasses import fields, replace

import pytest
from plumbob.console import UserError
from plumbob.trainer.cli import train as cli
from plumbob.trainer.config.options import flag, read_toml
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.policy.loading import load_tokenizer
from typer.main import get_command

ROW = {"question": "2 + 2?", "answer": "4\n#### 4"}


def args_env(args: tuple[str, ...]) -> str:
    return args[0] if args and not args[0].startswith("-") else "lookup"


@pytest.fixture
def refused(tmp_path, ended, monkeypatch):
    """Run `train` in an empty folder; return its one line of complaint.

    `loads`: whether torch and verifiers are loaded before it, which a line says.
    """
    monkeypatch.chdir(tmp_path)

    def run(*args: str, loads: bool = False) -> str:
        code, out, err = ended("train", cli.app, *args)
        assert (code, out) == (2, "")
        *loading, complaint = err.splitlines(keepends=True)
        asked = f"  loading the environment {args_env(args)}\n"  # where the type of one of its settings refuses a value
        loading = [line for line in loading if line != asked and not line.startswith("  loading the tasks of ")]
        assert loading == (["  loading torch, verifiers and the environment " + args_env(args) + "\n"] if loads else [])
        assert complaint.startswith("train: ")
        assert not (tmp_path / "runs").exists()
        return complaint

    return run


def test_unknown_environment(refused):
    assert "there is no environment 'lokup'; did you mean 'lookup'?" in refused("lokup")


def test_environments_with_a_comma(refused):
    assert "several environments are separated by spaces: lookup gsm8k:2" in refused("lookup,gsm8k:2")


def test_unknown_flag(refused):
    message = refused("lookup", "--learning-rat", "1")
    assert "--learning-rat" in message and "--learning-rate" in message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--max-steps many", "--max-steps must be a whole number, not 'many'"),
        ("--max-steps 1.5", "--max-steps must be a whole number, not '1.5'"),
        ("--max-steps", "'--max-steps' requires an argument"),
        ("--beta x", "--kl-beta must be a number, not 'x'"),
        ("--temperature nan", "--temperature must be a finite number, not nan"),
        ("--loss-type drgrpo", "--loss-type must be one of dr_grpo, grpo, bnpo, dapo, cispo, gspo, not 'drgrpo'; did"),
        ("--scale-rewards=std", "--scale-rewards must be one of none, group, batch, not 'std'"),
        ("--peft=3", "--peft must be true or false, not '3'"),
        (
            "--min-hops three",
            "--min-hops: input should be a valid integer, unable to parse string as an integer, not 'three'",
        ),
        ("--min-hops", "--min-hops needs a value"),
        ("--min-hop 3", "there is no option --min-hop, and lookup has no such setting; did you mean '--min-hops'?"),
        ("--retriever bm25", "lookup has no such setting; `train lookup --help-all` lists all options and settings"),
        ("--env lokup", "did you mean 'lookup'?"),
        ("gsm8k --env lookup", "--env names one environment, but two are named: gsm8k and lookup"),
        ("lookup lookup:2", "an environment is named twice: lookup lookup; name each one once"),
        ("--save-step 3", "did you mean '--save-steps'?"),
        ("--beta2 0.9", "did you mean '--adam-beta2'?"),
        ("--noise 0.5", "lookup has no such setting; `train lookup --help-all` lists all"),  # --seed is not like it
        (
            "--difficulty brutal",
            "--difficulty: input should be 'trivial', 'easy', 'medium', 'hard' or 'extreme', not 'brutal'",
        ),
        ("gsm8k --datasets ./no.jsonl", "no such dataset file: ./no.jsonl"),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_what_is_allowed(refused, args, message):
    assert message in refused(*args.split())


def test_batch_that_does_not_hold_whole_groups(refused):
    message = refused("--batch-size", "10", "--gradient-accumulation-steps", "2", "--num-generations", "8")
    assert "a step of 20 rollouts" in message and "is not a multiple of --num-generations 8" in message


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-generations", "1"], "a group of one has no baseline"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--max-grad-norm", "-1"], "--max-grad-norm must be at least 0"),
        (["--config", "."], "cannot read .: Is a directory"),
        (["--max-steps", "0"], "--max-steps must be at least 1, or -1, not 0"),
        (["--loss-type", "ppo"], "--loss-type"),
        (["--env-arg", "hops"], "--env-arg needs key=value, not 'hops'"),
        (["-a", "min_hop=3"], "lookup: there is no setting 'min_hop'; did you mean 'min_hops'?"),
        (["-a", "min_hops=three"], "lookup: min_hops: Input should be a valid integer"),
        (["--datasets", "x.jsonl"], "lookup has no setting 'datasets'"),
        (["--eval-datasets", "x.jsonl"], "lookup has no setting 'datasets'"),
        (["--max-hops", "0"], "--max-hops: input should be greater than or equal to 1, not '0'"),
        (["--warmup-steps", "-1"], "--warmup-steps must be at least 0, not -1"),
        (["--resume", "nowhere"], "nowhere is not a run directory: it has no config.toml"),
        (["--config", "nowhere.toml"], "there is no config file nowhere.toml"),
        (["--model", "./nowhere"], "there is no model in './nowhere': it has no config.json"),
    ],
)
def test_settings_that_cannot_be(refused, args, message):
    assert message in refused(*args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-a", "min_hops=9"], "lookup: max_hops (5) is less than min_hops (9)"),
        (
            ["--max-context", "10"],
            "--max-context 10 leaves no room for a reply: the shortest prompt of lookup's first 8",
        ),
        (["--max-context", "100000"], "--max-context 100000 is more than the 4096 positions of the model"),
        (["--peft", "--lora-targets", "c_attn"], "--lora-targets names no module of this model: c_attn"),
    ],
)
def test_settings_that_do_not_fit_together_or_the_model(refused, args, message):
    assert message in refused(*args, loads=True)


def test_half_of_what_a_launcher_says(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "WORLD_SIZE is '2', but MASTER_ADDR and MASTER_PORT are not set; unset it, or start" in refused("lookup")


def test_missing_dataset(refused, tmp_path):
    path = tmp_path / "missing.jsonl"
    assert f"no such dataset file: {path}" in refused("gsm8k", "--datasets", str(path))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "a"', "not valid JSON"),
        (json.dumps({"question": "a"}), "'answer'"),
        (json.dumps({"question": "a", "answer": "no number"}), "####"),
    ],
)
def test_broken_dataset_row_is_named_by_file_and_line(refused, tmp_path, line, complaint):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{line}\n{json.dumps(ROW)}\n")
    message = refused("gsm8k", "--datasets", str(path), loads=True)
    assert f"{path} line 2" in message and complaint in message


def test_all_data_held_out(refused, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    assert "gsm8k has too few different tasks (1) to hold one out" in refused(
        "gsm8k", "--datasets", str(path), loads=True
    )


def test_model_without_a_chat_template(refused, tmp_path, qwen2):
    folder = tmp_path / "base-model"
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    qwen2.save_pretrained(folder)
    assert "has no chat template" in refused("--model", str(folder), loads=True)


def test_template_that_refuses_every_conversation(refused, tmp_path, qwen2):
    folder = tmp_path / "refusing"
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{{ raise_exception('No conversations here') }}" + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    qwen2.save_pretrained(folder)
    message = refused("--model", str(folder), loads=True)
    assert "chat template" in message and "No conversations here" in message


def test_run_name_that_exists(tmp_path, ended, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine" / "traces").mkdir(parents=True)
    code, _, err = ended("train", cli.app, "--run-name", "mine")
    assert code == 2 and "runs/mine exists already" in err


def test_config_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('env = "gsm8k"\nlearning_rat = 1e-5\n')
    with pytest.raises(UserError, match="unknown key 'learning_rat'; did you mean 'learning_rate'"):
        read_toml(path, TrainConfig)
    path.write_text("env = [")
    with pytest.raises(UserError, match="is not valid TOML"):
        read_toml(path, TrainConfig)
    with pytest.raises(UserError, match="--max-steps must be a whole number, not '3'"):
        TrainConfig(max_steps="3")  # ty: ignore[invalid-argument-type]


def test_help_is_in_groups_and_lists_the_settings_of_the_environment(ended):
    def shown(*args):
        code, out, _ = ended("train", cli.app, "lookup", *args)
        assert code == 0
        return out

    short, help_ = shown("--help"), shown("--help-all")
    assert (
        len(short.splitlines()) < len(help_.splitlines()) / 2 and "--help-all" in short and "--learning-rate" in short
    )
    assert "--min-hops <int>" in short and "--adam-beta1" not in short
    titles = [line[:-1] for line in help_.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[0] == "The run" and titles[-1] == "Settings of lookup"
    assert {"The schedule", "The optimizer", "The objective", "Sampling", "Output"} <= set(titles)
    assert "--min-hops <int>" in help_ and "--kl-beta, --beta <float>" in help_ and "unknown-options" not in help_
    # Every setting is there.
    assert all(flag(f.name) in help_ for f in fields(TrainConfig) if f.name not in ("env_args", "mixture"))


def test_a_missing_reporting_library_leaves_nothing_behind(refused):
    for library in ("wandb", "trackio"):
        if importlib.util.find_spec(library) is None:
            assert f"pip install {library}" in refused("--report-to", library)


@pytest.mark.slow
def test_a_ready_configuration_runs_and_its_run_reruns(tmp_path, repository, ended):
    small = "--max-steps 1 --batch-size 4 --gradient-accumulation-steps 1 --num-generations 2 --eval-examples 2"
    args = ["--config", str(repository / "configs" / "lookup.toml"), *small.split(), "--max-hops", "2"]
    assert ended("train", cli.app, *args, "--max-tokens", "24", "-o", tmp_path, "--run-name", "r")[0] == 0
    again = cli.configure(get_command(cli.app).make_context("train", ["--config", f"{tmp_path}/r/config.toml"]).params)
    assert again[0].env_args == ("min_hops=1", "max_hops=2") and again[0].max_steps == 1 and again[0].run_name is None


def test_the_written_configuration_is_the_one_given(tmp_path):
    config = TrainConfig(env="gsm8k", learning_rate=1, env_args=("a=1", "b=x"), peft=True, run_name="r")
    (tmp_path / "config.toml").write_text(config.to_toml())
    # Without the run's name, so that the file can be run again.
    assert TrainConfig(**read_toml(tmp_path / "config.toml", TrainConfig)) == replace(config, run_name=None)
    assert config.learning_rate == 1.0
