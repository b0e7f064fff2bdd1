"""The saved model is loaded afresh at a run's end and compared with the trained one, where memory allows it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import psutil
import pytest
import torch
from plumbob.testing.quick_runs import quick_config
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.policy.forward_plan import ForwardPlan, own_logprobs
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.policy.token_scorer import LogitMap
from plumbob.trainer.training.finish import free_memory, saved_gap, saved_limit
from plumbob.trainer.training.train import run

MODEL_BYTES = 4 * 363_936  # the bundled policy in float32


@pytest.mark.slow
@pytest.mark.parametrize(("free", "verdict"), [(2**40, "compared"), (MODEL_BYTES // 4, "not compared")])
def test_a_model_is_compared_if_it_takes_at_most_half_of_the_free_memory(tmp_path, monkeypatch, free, verdict):
    memory = psutil.virtual_memory()._replace(available=free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert run(quick_config(tmp_path, batch_size=4, num_generations=2, max_steps=1, max_tokens=16)) == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert ("saved_gap" in summary) == (verdict == "compared")
    if verdict == "not compared":
        assert "half of the 0.0 GB that are free on the machine" in summary["saved_not_compared"]


@pytest.mark.parametrize(
    ("limit", "expected"), [("4096", 1096), ("2000", 0), ("max", 10_000), ("1000000", 10_000), (None, 10_000)]
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, limit, expected):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("3000\n")
    assert free_memory(tmp_path) == expected


@pytest.mark.parametrize(
    ("bf16", "rounding", "expected"), [(False, 1e-5, 1e-5), (False, 5e-4, 5e-4), (True, 5e-4, 0.01), (True, 0.02, 0.02)]
)
def test_a_models_own_rounding_errors_do_not_make_it_another_model(bf16, rounding, expected):
    """Seen with Qwen2.5-Coder-0.5B on a CPU: 2.7e-5 nats between packed rows and the saved model's own forward pass."""
    plan = ForwardPlan("packed", LogitMap(), "sdpa", 100, limit=rounding)
    of_run = SimpleNamespace(config=TrainConfig(bf16=bf16), policy=SimpleNamespace(plan=plan))
    assert saved_limit(of_run) == expected


def test_an_adapters_rounding_in_bfloat16_hides_no_other_model_and_is_none(tmp_path):
    """Seen with Qwen2.5-Coder-0.5B: unharmed LoRA runs came within 0.04 nats of the limit by rounding alone."""
    name = TrainConfig().model
    config = TrainConfig(peft=True, bf16=True)
    policy = Policy(load_model(name), config, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor_name, tensor in policy.trainable.items():
            if "lora_B" in tensor_name:
                tensor.normal_(std=0.05)
    row = SimpleNamespace(token_ids=list(range(5, 60)))
    of_run = SimpleNamespace(policy=policy, config=config, parity_row=row)
    policy.save_final(tmp_path)
    dtypes = {n: p.dtype for n, p in policy.model.named_parameters()}
    gap = saved_gap(of_run, tmp_path)
    assert gap < 1e-4
    assert {n: p.dtype for n, p in policy.model.named_parameters()} == dtypes
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = own_logprobs(load_model(str(tmp_path)), row.token_ids) - own_logprobs(policy.model, row.token_ids)
    assert rounded.abs().mean() > 10 * gap  # what was compared before
    with torch.no_grad():
        next(t for n, t in policy.trainable.items() if "lora_B" in n).add_(0.05)
    assert saved_gap(of_run, tmp_path) > saved_limit(of_run)
