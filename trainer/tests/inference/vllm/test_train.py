"""Whole runs whose rollouts come from servers that speak vLLM's protocol."""

from functools import partial

import pytest
from plumbob.console import INTERRUPTED, UserError
from plumbob.testing.processes import launch
from plumbob.testing.quick_runs import quick_config
from plumbob.testing.vllm_double import Double, serving
from plumbob.trainer.inference.vllm import adapter_sync as adapters
from plumbob.trainer.inference.vllm import connect
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training.train import run
from safetensors import SafetensorError

config_of = partial(quick_config, engine="vllm", max_tokens=48, eval_examples=8, max_steps=2, max_context=1024)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"peft": True, "lora_r": 8}, {}])
def test_a_run_draws_from_servers_that_get_its_weights(tmp_path, how):
    """Two servers, the same weights in both after each step: the gap on what was drawn is rounding."""
    rank = 16 if how else 0
    with serving(Double(max_lora_rank=rank)) as one, serving(Double(max_lora_rank=rank)) as two:
        assert run(config_of(tmp_path, vllm_url=(one, two), **how)) == 0
    rows = read_metrics(tmp_path / "r")
    assert [row["sync/version"] for row in rows] == [2, 3]
    for row in rows:
        assert row["rollout/count"] == 16 and row["rollout/errored"] == 0
        assert row["sync/parity"] < 1e-4 and row["sync/largest_gap"] < 1e-3
        assert row["sync/bytes"] > 0
    # In one of the two steps all rewards may be equal: which requests a server batches depends on their arrival.
    assert any(row["optimizer/grad_norm"] > 0 for row in rows)
    if "peft" in how:
        assert rows[0]["sync/bound_modules"] > 0


@pytest.mark.slow
def test_a_server_that_ignores_the_adapter_stops_the_run(tmp_path, capsys):
    double = Double()
    with serving(double) as url:
        double.faults.ignore_adapter = True
        settings = {"eval_examples": 0, "peft": True, "lora_r": 8, "learning_rate": 0.1}
        assert run(config_of(tmp_path, vllm_url=(url,), **settings)) == 1
    message = capsys.readouterr().err
    assert "Stopped in step" in message and url in message


@pytest.mark.slow
def test_a_full_disk_before_the_first_step_is_told_and_nothing_is_left(tmp_path, monkeypatch):
    def full(*args):
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr(adapters, "save_file", full)
    # A server on another machine reads from the run directory.
    monkeypatch.setattr(connect, "is_local", lambda url: False)
    with (
        serving(Double()) as url,
        pytest.raises(UserError, match="weight sync before the first step failed: .*No space left"),
    ):
        run(config_of(tmp_path, vllm_url=(url,), peft=True))
    assert [path.name for path in (tmp_path / "r").iterdir() if "vllm" in path.name] == []


@pytest.mark.slow
def test_a_sync_that_fails_ends_every_process(tmp_path, monkeypatch):
    """Rank 0 alone talks to the server; the others must not be left waiting in a collective."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    double = Double()
    double.faults.ignore_adapter = True
    command = (
        "-m plumbob.trainer lookup --engine vllm --peft --lora-r 8 --learning-rate 0.1 --max-steps 3 --batch-size 8"
    )
    command += (
        " --gradient-accumulation-steps 1 --num-generations 4 --max-tokens 48 --max-context 1024 --eval-examples 0"
    )
    with serving(double) as url:
        flags = ["--vllm-url", url, "--output-dir", str(tmp_path), "--run-name", "r"]
        launch([*command.split(), *flags], 2, tmp_path, code=1)
    assert "it does not serve the weights that are trained" in (tmp_path / "out0").read_text()
    assert "Traceback" not in (tmp_path / "out1").read_text()


@pytest.mark.slow
def test_the_next_steps_rollouts_are_drawn_while_one_trains(tmp_path):
    """At most one sync older than what is trained, within the bound, and corrected for."""
    double = Double()
    settings = {"max_steps": 4, "eval_examples": 0, "peft": True, "lora_r": 8, "learning_rate": 3e-3}
    with serving(double) as url:
        assert run(config_of(tmp_path, vllm_url=(url,), max_staleness=1, **settings)) == 0
    rows = read_metrics(tmp_path / "r")
    assert [row["rollout/count"] for row in rows] == [16] * 4
    assert all(row["rollout/stale"] == row["rollout/errored"] == 0 for row in rows)
    # What is waited for is less than what drawing took: the rest went on while a step trained.
    assert sum(row["time/rollout"] for row in rows[1:]) < 0.9 * sum(row["time/sampling"] for row in rows[1:])
    assert all(0.5 < row["correction/mean_weight"] < 2 for row in rows)


@pytest.mark.slow
def test_ctrl_c_while_rollouts_are_drawn_ahead(tmp_path):
    from plumbob.trainer.rollouts.collect import RolloutSource
    from plumbob.trainer.rollouts.interruption import Interruption

    closed = []
    original = RolloutSource.close

    def interrupt_first(self):
        closed.append(self.under_way)
        original(self)

    double = Double()
    settings = {"max_steps": 500, "eval_examples": 0, "peft": True, "lora_r": 8}
    with serving(double) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutSource, "close", interrupt_first)
        check = Interruption.check
        count = 0

        def third(self):
            nonlocal count
            count += 1
            self.requested = count >= 3
            check(self)

        patch.setattr(Interruption, "check", third)
        assert run(config_of(tmp_path, vllm_url=(url,), max_staleness=1, **settings)) == INTERRUPTED
    assert closed == [True]
    assert (tmp_path / "r" / "checkpoints").is_dir()
