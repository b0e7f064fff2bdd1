"""One configuration, however it is written: flags, older flags, a TOML file, the file that a run leaves."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.trainer.cli import train as cli
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.options import flag, read_toml, resolve, settings_in, spellings, to_toml, without_none
from plumbob.trainer.config.removed import REMOVED
from plumbob.trainer.config.train import TrainConfig
from typer.main import get_command

COMMAND = get_command(cli.app)
CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def configured(*args: str) -> TrainConfig:
    """What the command line of `train` means, by its real way as far as the settings."""
    return cli.configure(COMMAND.make_context("train", list(args)).params)[0]


def changes(config: TrainConfig) -> dict:
    default = TrainConfig()
    names = [f.name for f in dataclasses.fields(config)]
    return {n: getattr(config, n) for n in names if getattr(config, n) != getattr(default, n)}


ORIGINAL = {
    "--env-id lookup": {},
    "--env gsm8k": {"env": "gsm8k"},
    "vf-gsm8k": {"env": "gsm8k"},
    "musique --datasets bdsaglam/musique,answerable,train": {
        "env": "musique",
        "datasets": "bdsaglam/musique,answerable,train",
    },
    "--eval-datasets a,b,validation[:8]": {"eval_datasets": "a,b,validation[:8]"},
    "musique --noise 0.5": {"env": "musique", "env_args": ("noise=0.5",)},
    "musique --noise-rate 0.5": {"env": "musique", "env_args": ("noise=0.5",)},
    "musique --retriever hybrid": {"env": "musique", "env_args": ("retriever=hybrid",)},
    "musique --retriever-top-k 3": {"env": "musique", "env_args": ("max_top_k=3",)},
    "--max-concurrent 16": {"max_concurrent": 16},
    "--few-shot-prob 0 --n-env-jobs 1": {},
    "--model Qwen/Qwen2.5-7B-Instruct": {"model": "Qwen/Qwen2.5-7B-Instruct"},
    "-m tiny": {},
    "--max-prompt-length 8192": {"max_prompt_length": 8192},
    "--max-tokens 1024": {"max_tokens": 1024},
    "--max-new-tokens 1024": {"max_tokens": 1024},
    "--max-completion-length 1024": {"max_tokens": 1024},
    "--temperature 0.5 --top-p 0.95 --min-p 0.1 --top-k 50": {
        "temperature": 0.5,
        "top_p": 0.95,
        "min_p": 0.1,
        "top_k": 50,
    },
    "--num-epochs 2 --max-steps -1": {"num_epochs": 2.0, "max_steps": -1},
    "--batch-size 8 --num-generations 4 --gradient-accumulation-steps 2": {
        "batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
    },
    "--bf16": {"bf16": True},
    "--bf16 --no-bf16": {},
    "--kl-beta 0.04": {"kl_beta": 0.04},
    "--beta 0.04": {"kl_beta": 0.04},
    "--scale-rewards": {"scale_rewards": "group"},
    "--scale-rewards gsm8k": {"scale_rewards": "group", "env": "gsm8k"},
    "--scale-rewards group": {"scale_rewards": "group"},
    "--scale-rewards=batch": {"scale_rewards": "batch"},
    "--scale-rewards true": {"scale_rewards": "group"},
    "--scale-rewards --no-scale-rewards": {},
    "--loss-type grpo --num-iterations 2": {"loss_type": "grpo", "num_iterations": 2},
    "--peft --lora-r 32 --lora-alpha 64 --lora-dropout 0.05": {
        "peft": True,
        "lora_r": 32,
        "lora_alpha": 64,
        "lora_dropout": 0.05,
    },
    "--peft true": {"peft": True},
    "--peft --no-peft": {},
    "--peft --peft=False": {},
    "--learning-rate 1e-5": {"learning_rate": 1e-5},
    "-lr 1e-5": {"learning_rate": 1e-5},
    "-lr=1e-5": {"learning_rate": 1e-5},
    "--learning_rate 1e-5": {"learning_rate": 1e-5},
    "--lr-scheduler-type constant_with_warmup --warmup-steps 10 --max-grad-norm 0.1": {
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "max_grad_norm": 0.1,
    },
    "--adam-beta1 0.8 --adam-beta2 0.95": {"adam_beta1": 0.8, "adam_beta2": 0.95},
    "--gradient-checkpointing": {"gradient_checkpointing": True},
    "-o outputs --run-name mine": {"output_dir": "outputs", "run_name": "mine"},
    "--push-to-hub --hub-model-id me/mine --report-to wandb": {
        "push_to_hub": True,
        "hub_model_id": "me/mine",
        "report_to": "wandb",
    },
    "--per-device-eval-batch-size 16 --eval-accumulation-steps 1": {},
    "--save-steps 100 --eval-steps 50 --logging-steps 2": {"save_steps": 100, "eval_steps": 50},
    "--log-completions": {"log_completions": 5},
    "--log-completions lookup": {"log_completions": 5},
    "--log-completions 3": {"log_completions": 3},
    "--log-completions --no-log-completions": {},
    "--log-on-each-node lookup": {},
    "--no-log-on-each-node": {},
    "--save-only-model --eval-on-start --no-report": {},
    "--seed 42": {"seed": 42},
    "--model_name_or_path tiny-gsm8k --dataset_name a,b": {"model": "tiny-gsm8k", "datasets": "a,b"},
    "--per_device_train_batch_size 8 --num_train_epochs 2 --max_steps -1": {
        "batch_size": 8,
        "num_epochs": 2.0,
        "max_steps": -1,
    },
    "--use_peft --lora_target_modules all-linear": {"peft": True, "lora_targets": "all-linear"},
    "--use_peft True --use_peft=false": {},
    "--vllm_server_base_url http://a:1 --vllm_gpu_memory_utilization 0.3 --vllm_enable_sleep_mode true": {
        "vllm_url": ("http://a:1",),
        "engine_memory": 0.3,
        "engine": "vllm",
        "vllm_sleep": True,
    },
}
"""Every flag of the original training scripts with its older names, and spellings of TRL -> what it is here."""


@pytest.mark.parametrize("line", ORIGINAL)
def test_flags_of_the_original_script(line):
    assert changes(configured(*line.split())) == ORIGINAL[line]


def test_a_flag_without_effect_says_so(capsys):
    configured("--n-env-jobs", "4")
    assert capsys.readouterr().err == (
        "--n-env-jobs has no effect: rollouts run asynchronously in the training process; --max-concurrent bounds "
        "their number\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("beta = 0.04", {"kl_beta": 0.04}),
        ("max-new-tokens = 9", {"max_tokens": 9}),
        ("lr = 1e-5", {"learning_rate": 1e-5}),
        ("scale_rewards = true", {"scale_rewards": "group"}),
        ("scale_rewards = false", {}),
        ('scale_rewards = "batch"', {"scale_rewards": "batch"}),
        ("log_completions = true", {"log_completions": 5}),
        ("learning_rate = 1", {"learning_rate": 1.0}),
        ("eval_accumulation_steps = 1", {}),
        ("min_hops = 2", {"env_args": ("min_hops=2",)}),
        ('env_args = ["min_hops=2"]', {"env_args": ("min_hops=2",)}),
        ("[env_args]\nmin_hops = 2", {"env_args": ("min_hops=2",)}),
        ('[env]\nname = "lookup"\nmin_hops = 2', {"env_args": ("min_hops=2",)}),
        (
            'env = "musique"\nhops = [2, 3]\nshuffle = false\nweights = {f1 = 0.5}',
            {"env": "musique", "env_args": ("hops=2,3", "shuffle=false", "weights=f1=0.5")},
        ),
    ],
)
def test_keys_of_a_file(tmp_path, text, expected):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert changes(configured("--config", str(path))) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("learning_rat = 1e-5", "unknown key 'learning_rat', which is not a setting of lookup either; did you mean"),
        ("min_hop = 2", "did you mean 'min_hops'?"),
        ("beta = 1\nkl_beta = 1", "gives one option twice, as 'beta' and as 'kl_beta'"),
        ("max_steps = true", "--max-steps must be a whole number, not True"),
        ('max_steps = "3"', "--max-steps must be a whole number, not '3'"),
        ('peft = "yes"', "--peft must be true or false, not 'yes'"),
        ('loss_type = "dapoo"', "not 'dapoo'; did you mean 'dapo'?"),
        ("temperature = inf", "--temperature must be a finite number, not inf"),
        ("min_hops = 0", "min_hops: input should be greater than or equal to 1, not '0'"),
        ("[optimizer]\nlr = 1", "unknown key 'optimizer'"),
    ],
)
def test_wrong_keys_of_a_file(tmp_path, text, complaint):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        configured("--config", str(path))
    assert complaint in str(error.value)


def test_flags_win_over_the_file_setting_by_setting(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('learning_rate = 1e-5\nseed = 3\nenv_args = ["min_hops=1", "max_hops=2"]')
    config = configured("--config", str(path), "--lr", "2e-5", "--max-hops", "4", "-a", "table_size=9")
    assert (config.learning_rate, config.seed) == (2e-5, 3)
    assert config.env_args == ("min_hops=1", "max_hops=4", "table_size=9")


def _values(f: dataclasses.Field) -> list:
    """Some legal values of a field that a person might give."""
    hint = without_none(get_type_hints(TrainConfig)[f.name])
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    by_name = {"env_args": [("a=1", "b=x y"), ("c=[1, 2]",)], "num_generations": [2, 4]}
    by_type = {bool: [True, False], int: [1, 3], float: [0.25, 0.9], str: ["x", 'quo"ted, name', "ünï/code"]}
    low = {"env": ["lookup", "gsm8k"], "max_staleness": [0], "rollout_processes": [0, 2]}
    by_name["vllm_url"] = [("http://a:1", "b:2"), ("c",)]
    by_name["chat_template"] = [("enable_thinking=false", "date_string=1 Jan"), ('a=["b"]', "./x.jinja")]
    return {**by_name, **low}.get(f.name) or by_type[hint]


SOME = st.fixed_dictionaries(
    {}, optional={f.name: st.sampled_from(_values(f)) for f in dataclasses.fields(TrainConfig) if f.name != "mixture"}
)


@settings(max_examples=30, deadline=None)
@given(values=SOME)
def test_flags_and_file_and_the_written_file_mean_the_same(tmp_path_factory, values):
    try:
        epochs_alone = values.get("num_epochs") is not None and "max_steps" not in values
        wanted = TrainConfig(**({"max_steps": -1} if epochs_alone else {}), **values)
    except UserError:  # values that do not go together
        reject()
    path = tmp_path_factory.mktemp("settings") / "config.toml"
    path.write_text(to_toml(values))
    assert configured("--config", str(path)) == wanted
    args = [values["env"]] if "env" in values else []
    for name, value in values.items():
        if name == "env_args":
            args += [piece for pair in value for piece in ("-a", pair)]
        elif name in ("vllm_url", "chat_template"):
            args += [piece for each in value for piece in (flag(name), each)]
        elif isinstance(value, bool):
            args.append(flag(name) if value else f"--no-{name.replace('_', '-')}")
        elif name != "env":
            args += [flag(name), str(value)]
    assert configured(*args) == wanted
    # What a run leaves: without its name, so that the file can be run again.
    path.write_text(wanted.to_toml())
    assert TrainConfig(**read_toml(path, TrainConfig)) == dataclasses.replace(wanted, run_name=None)


def test_every_spelling_is_of_one_field():
    names = spellings(TrainConfig)
    assert {"beta", "max_new_tokens", "max_completion_length", "lr"} <= set(names)
    assert set(names.values()) == {f.name for f in dataclasses.fields(TrainConfig)}


def test_the_documentation_names_every_option(repository):
    text = (repository / "docs" / "reference" / "options.md").read_text()
    names = {name.replace("_", "-") for name in spellings(TrainConfig)} - {"env-args", "mixture"}
    assert {name for name in names if f"`--{name}`" not in text} == set()


@pytest.mark.parametrize("name", ["lookup", "gsm8k", "musique"])
def test_ready_configurations(name):
    path = CONFIGS / f"{name}.toml"
    config = configured("--config", str(path))
    assert config.env == name and configured(name, "--config", str(path)) == config
    assert configured("--config", str(path), "--learning-rate", "1e-6").learning_rate == 1e-6
    assert config.rollouts_per_step(1) % config.num_generations == 0
    # Every key is there to be seen, and none is a mistake for another: each is a field of its own name.
    assert set(tomllib.loads(path.read_text())) <= {f.name for f in dataclasses.fields(TrainConfig)}
    # The environment takes its settings.
    assert configured(name, *(f"--{pair}" for pair in config.env_args)).env_args == config.env_args


def test_resuming_keeps_the_environment_and_may_change_the_rate(tmp_path):
    config = TrainConfig(env="lookup", env_args=("min_hops=2",), learning_rate=1e-3)
    (tmp_path / "config.toml").write_text(config.to_toml())
    for args in (["vf-lookup", "--min-hops", "2"], ["-a", "min_hops=2"], []):
        assert configured(*args, "--resume", str(tmp_path), "--lr", "1e-4").learning_rate == 1e-4
    with pytest.raises(UserError, match="keeps the run's own --env-args"):
        configured("--resume", str(tmp_path), "--min-hops", "3")
    with pytest.raises(UserError, match="leave --config out"):
        configured("--resume", str(tmp_path), "--config", "x")


@pytest.mark.parametrize("step", [2, 10])
def test_resuming_from_a_checkpoint_of_the_run(tmp_path, step):
    (tmp_path / "config.toml").write_text(TrainConfig(seed=5).to_toml())
    for number in (2, 10):
        (tmp_path / "checkpoints" / f"step_{number}").mkdir(parents=True)
    folder = tmp_path / "checkpoints" / f"step_{step}"
    context = COMMAND.make_context("train", ["--resume-from-checkpoint", str(folder)])
    config, resume_from = cli.configure(context.params)
    assert resume_from == folder and config.seed == 5


def test_a_dataclass_without_an_environment_has_no_unknown_options(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("min_hops = 2")
    with pytest.raises(UserError, match="unknown key 'min_hops'"):
        resolve(TrainConfig, {"config_file": str(path)}, (), kind="run", directory_is="a run")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--logging-steps 10", "--logging-steps has no effect: each step has a row in the progress table"),
        ("--save_only_model gsm8k", "--save-only-model has no effect: checkpoints hold the optimizer's state"),
        ("--save-only-model true gsm8k", "--save-only-model has no effect"),
        ("--logging-steps 1 --max-refills 3 --importance-cap 2.0 --no-task-pools --explain-unread-calls", ""),
    ],
)
def test_options_that_are_gone_are_accepted_where_they_change_nothing_that_is_learned(line, said, capsys):
    config = configured(*line.split())
    assert config.env == ("gsm8k" if "gsm8k" in line else "lookup")
    printed = capsys.readouterr().err
    assert said in printed and (said or not printed)


def test_saved_settings_that_have_another_name_now_keep_what_they_did():
    saved = 'env = "lookup"\nrandom_rewards = true\nkl_beta = 0.1\nkl_placement = "reward"\nkeep_traces = "none"\n'
    assert settings_in(saved, TrainConfig) == {"env": "lookup", "kl_beta": 0.1, "trained_reward": "random"}


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_an_option_that_is_gone_says_what_to_do_in_one_sentence(name, tmp_path, capsys):
    assert name not in {f.name for f in dataclasses.fields(TrainConfig)}
    path = tmp_path / "run.toml"
    path.write_text(f"{name} = 0.123")
    values = REMOVED[name].values.split()
    if "any" in values:
        assert configured("--config", str(path)) == TrainConfig()
        assert capsys.readouterr().err == f"{name!r} in {path} has no effect: {REMOVED[name].say}\n"
    else:
        with pytest.raises(UserError, match=f"{name!r} in .* is gone, so leave it out: "):
            configured("--config", str(path))
    assert read_toml(path, TrainConfig) == {}  # to read what an older run has done
    for value in set(values) - {"any", "-"}:
        path.write_text(to_toml({name: value}))
        assert configured("--config", str(path)) == TrainConfig() and not capsys.readouterr().err


def test_an_older_run_with_a_value_that_is_gone_can_be_read_and_not_resumed(tmp_path):
    (tmp_path / "config.toml").write_text('env = "lookup"\nkl_estimator = "reward"\nkl_beta = 0.1\n')
    assert read_toml(tmp_path / "config.toml", TrainConfig) == {"env": "lookup", "kl_beta": 0.1}
    with pytest.raises(UserError, match="config.toml: --kl-estimator reward is gone: write k2"):
        configured("--resume", str(tmp_path))


def test_a_replay_is_found_without_the_end_of_its_name(tmp_path):
    (tmp_path / "step_3.jsonl.gz").write_bytes(b"")
    for written in ("step_3.jsonl", "step_3.jsonl.gz"):
        assert EvaluateConfig(envs=("lookup",), replay=str(tmp_path / written)).replay == str(
            tmp_path / "step_3.jsonl.gz"
        )
    assert EvaluateConfig(envs=("lookup",), replay=str(tmp_path / "none.jsonl")).replay == str(tmp_path / "none.jsonl")
