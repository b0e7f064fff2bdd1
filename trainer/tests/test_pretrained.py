"""A real instruct model on the CPU: SmolLM2-135M-Instruct, from the folder that $PLUMBOB_SMOLLM2 names.

Random weights hide what real ones show: log-probabilities far apart, a real tokenizer and chat template, long answers.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from plumbob.rollout import to_sample
from plumbob.testing.quick_runs import quick_config, traces
from plumbob.trainer.cli.evaluate import evaluate_app
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training.train import run

pytestmark = pytest.mark.pretrained


@pytest.fixture(scope="module")
def model() -> Generator[str]:
    folder = os.environ.get("PLUMBOB_SMOLLM2", "")
    if not (Path(folder) / "config.json").is_file():
        pytest.skip("PLUMBOB_SMOLLM2 names no folder of SmolLM2-135M-Instruct")
    with pytest.MonkeyPatch.context() as patch:
        # Two threads on two busy cores wait for each other: a minute where one takes five seconds.
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory) -> Path:
    """The run directory of one GRPO step with LoRA: 4 rollouts of up to 16 tokens of one task."""
    folder = tmp_path_factory.mktemp("pretrained")
    settings = {"env": "gsm8k", "env_args": ("datasets=synthetic",), "max_steps": 1, "max_tokens": 16}
    # Whether an answer ends in time is what the rewards of a model tell apart that has not learned the task.
    config = quick_config(
        folder, model=model, batch_size=4, eval_examples=1, peft=True, overlong="penalise", **settings
    )
    assert run(config) == 0
    return folder / "r"


def test_a_step_trains_on_rollouts_whose_probabilities_trainer_and_engine_share(directory):
    (row,) = read_metrics(directory)
    assert row["rollout/count"] == 4 and row["rollout/errored"] == 0
    assert row["sync/parity"] < 1e-4 and row["sync/sampling_gap"] < 1e-4
    assert (directory / "model" / "config.json").is_file()


def test_rows_hold_what_the_model_sampled_and_the_templates_own_tokens_between(directory, model):
    tokenizer = load_tokenizer(model)
    rollouts = traces(directory, 1)
    assert len(rollouts) == 4
    for trace in rollouts:
        sample = to_sample(trace, "g")
        text = tokenizer.decode(sample.token_ids)
        assert text.startswith("<|im_start|>") and "<|im_start|>assistant\n" in text
        answers = [m.content for m in trace.branches[0].messages if m.role == "assistant"]
        sampled = tokenizer.decode([t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m])
        for answer in answers:
            assert (answer or "").strip() in sampled.replace("<|im_end|>", "")


def test_evaluation_of_the_trained_model(directory, tmp_path, ended):
    options = [
        "--model",
        str(directory / "model"),
        "-n",
        "2",
        "--max-tokens",
        "16",
        "-o",
        str(tmp_path),
        "--json",
    ]
    code, out, _ = ended("evaluate", evaluate_app, "gsm8k", "-a", "datasets=synthetic", *options)
    assert code == 0
    assert json.loads(out)
    (result,) = tmp_path.glob("*/summary.json")
    assert json.loads(result.read_text())
