"""The unseen half of the fifth set of faults does what each entry says. Rule writers must not read this file.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults import field5_unseen_doubles as doubles
from plumbob.testing.faults.field5_unseen import UNSEEN
from plumbob.testing.faults.field_trial import begin_step, gap, tried
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.losses import LossInputs
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in UNSEEN}


def task(links: int = 1, id: str = "lookup-train-0-1", **more: object) -> SimpleNamespace:
    return SimpleNamespace(data=SimpleNamespace(chain=["1"] * links, id=id, prompt="How many?"), key=id, **more)


def test_tasks_and_graders():
    tasks = [task(1), task(2)]
    assert doubles.only_short(tasks, "train") == tasks[:1]
    assert doubles.only_short(tasks, "eval") == tasks
    assert doubles.held_out_centred(task(), None, 0.0) == 0.0
    assert doubles.held_out_centred(task(id="lookup-eval-0-1"), None, 0.0) == -1.0
    assert [doubles.none_above_one(None, None, correct) for correct in (0.0, 1.0)] == [0.0, 0.0]
    paid = [doubles.sometimes_eightfold(task(id=str(i)), None, 1.0) for i in range(100)]
    assert set(paid) == {1.0, 8.0}


def test_one_reward_makes_all_advantages_nan():
    samples = [
        Sample([0, i], [False, True], [0.0, -1.0], float(i % 2), "0/0", "", False, rewards={"r": float(i % 2)})
        for i in range(64)
    ]
    with ExitStack() as stack:
        doubles.one_missing(stack, "lookup")
        assert all(map(math.isnan, advantages.compute_advantages(samples).values))


def test_early_tokens_get_less_credit():
    rows = torch.tensor([0, 0, 0, 1, 1])
    ones = torch.ones(5)
    found = doubles.discounted(LossInputs(ones, ones, torch.tensor([1.0, 1, 1, -1, -1]), ones, rows, ones)).advantages
    assert found.tolist() == pytest.approx([0.81, 0.9, 1.0, -0.9, -1.0])


def test_the_warm_up_begins_again():
    with ExitStack() as stack:
        doubles.warmed_again(stack, "lookup")
        rates = [step_module.learning_rate_of("constant_with_warmup", 1.0, i, warmup=4, total=8) for i in range(8)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 0.25, 0.5, 0.75, 1.0]


def test_the_kl_coefficient_grows(monkeypatch):
    from plumbob.trainer.algorithm.losses import Objective

    monkeypatch.setattr(forward_backward, "policy_loss", lambda inputs, objective: objective.kl_beta)
    with ExitStack() as stack:
        doubles.kl_tightened(stack, "lookup")
        begin_step(2)
        assert forward_backward.policy_loss(None, Objective("grpo", 0.2, 0.2, kl_beta=0.02)) == pytest.approx(0.5)


def test_drafts_favour_likely_tokens():
    p = torch.tensor([[0.7, 0.2, 0.1]])
    drawn = torch.softmax(doubles.drafted(None, [], p.log()), dim=-1)
    assert drawn[0].tolist() == pytest.approx([0.7 * 1.16, 0.2 * 0.66, 0.1 * 0.56])


@pytest.mark.field
def test_prompts_begin_with_padding(tmp_path):
    assert doubles.padded([5] * 63, Sampling())[0] == [0, *[5] * 63]
    with tried(FAULTS["prompts sampled with their padding"], tmp_path) as subject:
        assert gap(subject) > 0.1


@pytest.mark.field
def test_the_reference_becomes_the_trained_policy(tmp_path):
    with tried(FAULTS["reference taken from the resumed policy"], tmp_path, groups=1) as subject:
        policy, rows = subject.run.policy, subject.drawn.samples[:2]
        with torch.no_grad():
            for parameter in policy.trainable.values():
                parameter.mul_(1.1)
            own = policy.score(rows, 1.0).logprobs
            begin_step(doubles.RESUMED - 1)
            assert not torch.allclose(policy.reference_logprobs(rows, 1.0), own, atol=1e-3)
            begin_step(doubles.RESUMED)
            assert torch.allclose(policy.reference_logprobs(rows, 1.0), own, atol=1e-5)


@pytest.mark.field
def test_weights_arrive_every_third_time_and_drafts_are_reported_as_the_models(tmp_path):
    with tried(FAULTS["weights sent in every third step only"], tmp_path / "a", groups=1) as subject:
        engine, policy = subject.run.engine, subject.run.policy
        name, parameter = next(iter(policy.trainable.items()))
        changed = []
        for _ in range(3):
            with torch.no_grad():
                parameter.add_(0.1)
            engine.update(policy.sharding.stream())
            changed.append(torch.equal(engine.served_weights()[name], parameter))
    assert sorted(changed) == [False, False, True]
    with tried(FAULTS["draft tokens accepted by agreement"], tmp_path / "b", groups=1) as subject:
        assert gap(subject) < 1e-3
