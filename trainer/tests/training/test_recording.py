"""Records of training steps: they change nothing, hold what the step did, and the doctor's stages agree with them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from plumbob.doctor import record as records
from plumbob.doctor import stages
from plumbob.doctor.reference.model import load
from plumbob.doctor.reference.rows import load_tokenizer
from plumbob.testing.quick_runs import quick_config
from plumbob.trainer.distributed.world import World
from plumbob.trainer.doctor.live import load_subject, record_steps
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.training.recording import Recording
from plumbob.trainer.training.setup import set_up
from plumbob.trainer.training.step import train_step
from plumbob.trainer.training.train import run

HERE = World(0, 1, torch.device("cpu"))
config_of = partial(quick_config, max_steps=4, learning_rate=1e-3)
SETTINGS = [
    {},
    {"peft": True, "lora_dropout": 0.1, "bf16": True},
    {"num_minibatches": 2, "num_iterations": 2, "kl_beta": 0.1, "microbatch_tokens": 1500},
]


class Sink:
    """Keeps the records of all steps, or wants none."""

    def __init__(self, wanted: bool) -> None:
        self.wanted, self.records = wanted, []

    def wants(self, step: int) -> bool:
        return self.wanted

    def keep(self, made: Callable[[], records.StepRecord]) -> None:
        self.records.append(made())


def two_steps(folder: Path, wanted: bool, **settings) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], Sink]:
    """(metrics of two steps, weights after them, the sink)."""
    run_ = set_up(config_of(folder, str(wanted), **settings), HERE, None)
    sink, found, interruption = Sink(wanted), [], Interruption()
    with run_.lock, closing(run_.engine), asyncio.Runner() as runner:
        source = RolloutSource(run_.sampler, HERE, runner, interruption, sink.wants)
        for _ in range(2):
            metrics, _ = train_step(run_, source, interruption, lambda _: None, sink)
            run_.state.step += 1
            found.append({k: v for k, v in metrics.items() if not k.startswith(("time/", "memory/", "system/"))})
        weights = {name: p.detach().clone() for name, p in run_.policy.trainable.items()}
    return found, weights, sink


@pytest.mark.parametrize(
    "settings", [SETTINGS[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SETTINGS[1:])], ids=str
)
def test_a_recorded_step_is_the_same_step_to_the_last_bit(tmp_path, settings):
    plain, recorded = two_steps(tmp_path, False, **settings), two_steps(tmp_path, True, **settings)
    assert plain[0] == recorded[0]
    assert all(torch.equal(w, recorded[1][name]) for name, w in plain[1].items())
    assert not plain[2].records and len(recorded[2].records) == 2


def test_numbers_of_a_step_come_to_the_host_by_column_and_not_by_row(tmp_path, monkeypatch):
    """On a GPU each transfer waits for its queue: thousands made a recorded step twice as long."""

    def transfers(batch_size: int) -> int:
        counted = 0
        gradients, cpu = Recording.gradients, torch.Tensor.cpu

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal counted
            counted += 1
            return cpu(tensor)

        def counting(recording: Recording) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "cpu", count)
                gradients(recording)

        with monkeypatch.context() as patch:
            patch.setattr(Recording, "gradients", counting)
            *_, sink = two_steps(tmp_path / str(batch_size), True, batch_size=batch_size, microbatch_tokens=100_000)
        assert len(sink.records[0].updates[0].trained) > batch_size / 4
        return counted

    assert 0 < transfers(8) == transfers(24)


def test_a_record_holds_what_the_step_did(tmp_path):
    metrics, weights, sink = two_steps(tmp_path, True, microbatch_tokens=1500)
    first, second = sink.records
    assert [r.step for r in sink.records] == [0, 1] and len(first.rows) == len(first.rollouts) == 16
    assert all(rollout.requests and rollout.messages for rollout in first.rollouts)
    (update,) = first.updates
    assert len({t.microbatch for t in update.trained}) > 1
    assert sum(len(t.slopes) for t in update.trained) == metrics[0]["train/tokens"]
    assert {t.name for t in update.tensors} == set(weights)
    for now, then in zip(second.updates[0].tensors, update.tensors, strict=True):
        assert now.updates == 2 and now.moments_before is not None
        assert np.isin(now.before[np.isin(now.indices, then.indices)], then.after).all()
    after = {t.name: t for t in second.updates[0].tensors}
    for name, tensor in weights.items():
        assert np.array_equal(tensor.reshape(-1)[torch.from_numpy(after[name].indices)].numpy(), after[name].after)
    records.write(first, tmp_path / "first.npz")
    tokens = sum(len(row.token_ids) for row in first.rows)
    assert (tmp_path / "first.npz").stat().st_size < 25 * tokens + 4000 * len(weights)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS[::2], ids=str)
def test_all_stages_agree_with_a_healthy_run(tmp_path, settings):
    subject = load_subject(config_of(tmp_path, **settings), HERE, tmp_path, lambda _: None, groups=4)
    with closing(subject):
        kept = record_steps(subject, 2)
        before = {name: t.clone() for name, t in kept.live.tensors().items()}
        plain, tokenizer = load(kept.records[0].settings), load_tokenizer(kept.records[0].settings)
        found = stages.examine(stages.Examined(kept.records[0], plain, tokenizer, subject, rows=8))
        # Whether tasks come twice takes a second record, of the step before.
        assert [str(o) for o in found if o.verdict != "pass" and o.stage != "tasks"] == []
        with plain.having(kept.weights[1]):
            later = stages.Examined(kept.records[1], plain, tokenizer, rows=8, previous=kept.records[0])
            found = stages.examine(later)
        assert [str(o) for o in found if o.verdict == "fail"] == []
        assert all(torch.equal(t, before[name]) for name, t in kept.live.tensors().items())


def test_a_run_has_records_of_its_first_steps_also_after_it_was_resumed(tmp_path):
    config = config_of(tmp_path, save_steps=1)
    assert run(config) == 0
    folder = tmp_path / "r" / "records"
    assert sorted(p.name for p in folder.iterdir()) == [f"step_0000{k}.npz" for k in (1, 2, 3)]
    assert run(dataclasses.replace(config, max_steps=6), resume_from=tmp_path / "r") == 0
    assert sorted(p.name for p in folder.iterdir()) == [f"step_0000{k}.npz" for k in (1, 2, 3, 5, 6)]
    assert records.read(folder / "step_00005.npz").step == 4
