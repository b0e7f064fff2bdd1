"""Whole runs on small random models of other architectures than the bundled one."""

from pathlib import Path

import pytest
import torch
from plumbob.rollout import to_sample
from plumbob.testing.quick_runs import quick_config, traces
from plumbob.testing.small_models import VOCABULARY, small_model, write_small_model
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training.train import run
from transformers import AutoModelForCausalLM

ENDS = range(300, 500)
"""With so many of the ids as end tokens, turns of a random model end after about three tokens, with many of them."""


def train(folder: Path, name: str) -> Path:
    """One step; half of the rollouts of a random model end in time, which is all that their rewards tell apart."""
    model = str(write_small_model(name, folder / "model", ENDS))
    settings = {"max_steps": 1, "max_tokens": 3, "eval_examples": 2, "overlong": "penalise"}
    assert run(quick_config(folder, model=model, env="lookup", **settings)) == 0
    return folder / "r"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("qwen3.5", ["rows of this model are padded", "computes the whole row again"]),
        ("gemma 3", []),
        ("qwen3 moe", []),
        ("gpt-2", []),
    ],
)
def test_a_step_trains_and_the_final_model_loads(name, lines, tmp_path, capsys):
    directory = train(tmp_path, name)
    printed = capsys.readouterr().err
    assert all(line in printed for line in lines)
    assert ("of this model" in printed) == bool(lines)
    (row,) = read_metrics(directory)
    assert row["rollout/count"] == 16 and row["rollout/errored"] == 0
    assert row["sync/parity"] < 1e-5 and row["sync/sampling_gap"] < 1e-5
    final = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    before = dict(small_model(name).named_parameters())
    after = dict(final.named_parameters())
    assert {n: p.shape for n, p in after.items()} == {n: p.shape for n, p in before.items()}
    moved = {n for n, p in after.items() if not torch.equal(p, before[n])}
    assert len(moved) > len(before) / 2


@pytest.mark.slow
def test_every_end_token_of_the_generation_config_ends_a_turn(tmp_path):
    seen = set()
    for trace in traces(train(tmp_path, "llama"), 1):
        sample = to_sample(trace, "g")
        following = [*sample.loss_mask[1:], False]
        tokens = [
            (t, more) for t, mask, more in zip(sample.token_ids, sample.loss_mask, following, strict=True) if mask
        ]
        assert all(0 <= t < VOCABULARY and t not in ENDS for t, more in tokens if more)
        seen |= {t for t, more in tokens if not more and t in ENDS}
    assert len(seen) > 3
