"""What settings say before a model is loaded, and how sure an examination is."""

import json

import pytest
from plumbob.testing.examinations import causes
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes import CAUSES
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model import settings
from plumbob.trainer.doctor.scope import Scope, missed
from plumbob.trainer.training.sampling_warnings import checkpoint_warnings


def test_steps_with_too_few_groups_are_named_before_anything_loads():
    (finding, _) = settings.checks(TrainConfig(batch_size=8, gradient_accumulation_steps=1))
    assert finding.cause == "too-little-signal"
    for size in (2, 8, 64):
        assert causes(settings.checks(TrainConfig(num_generations=size))) == []


@pytest.mark.parametrize(
    ("cause", "given"),
    [
        ("kl-backwards", {"kl_beta": 0.1, "kl_estimator": "k1"}),
        (None, {"kl_beta": 0.1, "kl_estimator": "k3"}),
        (None, {"kl_beta": 0.1, "kl_estimator": "k1", "kl_placement": "reward"}),
        (None, {"kl_estimator": "k1"}),  # it is measured, and in no loss
        ("warmup-too-long", {"warmup_steps": 1000}),
        ("warmup-too-long", {"warmup_steps": 70, "lr_scheduler_type": "constant"}),
        (None, {"warmup_steps": 30}),
        (None, {"warmup_steps": 1000, "max_steps": 2000}),
        (None, {"warmup_steps": 1000, "max_steps": -1}),  # the number of steps is not known yet
        ("saved-model-differs", {"keep_best": "policy/entropy"}),
        ("saved-model-differs", {"keep_best": "loss"}),
        ("saved-model-differs", {"keep_best": "reward/std"}),
        (None, {"keep_best": "eval/greedy", "eval_steps": 5}),
        (None, {"keep_best": "env/correct"}),
    ],
)
def test_what_the_settings_alone_show_is_named_before_anything_loads(cause, given):
    config = TrainConfig(**given)
    assert causes(settings.checks(config)) == ([cause] if cause else [])
    assert bool(checkpoint_warnings(config)) == (cause == "saved-model-differs")


def test_penalties_of_a_generation_config_are_told_and_are_no_fault_here(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.1, "top_k": 20}))
    *_, finding = settings.checks(TrainConfig(model=str(tmp_path)))
    assert finding.verdict == "pass" and "repetition_penalty 1.1, top_k 20" in finding.evidence


def test_penalties_in_the_requests_to_a_server_are_a_fault(monkeypatch):
    from plumbob.trainer.inference import generate_api

    monkeypatch.setitem(generate_api.STATED, "presence_penalty", 0.5)
    config = TrainConfig(engine="vllm", vllm_url=("http://localhost:1",))
    assert causes(settings.checks(config)) == ["sampling-penalised"]


def test_limits_name_what_is_uncertain_and_how_much_can_be_missed():
    assert missed(48) == pytest.approx(0.0605, abs=1e-3) and (1 - missed(10)) ** 10 == pytest.approx(0.05)
    told = Scope(tasks=48, rollouts=64, groups=8).limits([Finding("a", "unsure", "b"), Finding("c", "error", "d")])
    assert told[:2] == ["Not certain: a (b)", "Not completed: c (d)"]
    assert "48 training tasks" in told[2] and "4.6% of rollouts" in told[3] and len(told) == 5


def test_every_cause_named_here_is_in_the_catalogue():
    named = {"reward-exploitable", "grader-swallows-errors", "answer-in-prompt", "few-distinct-tasks", "duplicate-tasks",
             "evaluation-prompted-differently", "tools-return-nothing", "tool-results-cut", "sampling-penalised"}  # fmt: skip
    assert named <= CAUSES.keys()
