"""The unseen half of the eighth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.testing.faults import field8_unseen_doubles as doubles
from plumbob.testing.faults.field2_seen_doubles import no_policy_term
from plumbob.testing.faults.field8_unseen import UNSEEN
from plumbob.testing.faults.field_trial import config_of, gap, minibatch_of, rewards, sample, saved_and_trained, tried
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.losses import LossInputs, Objective, policy_loss
from plumbob.trainer.policy import merged_weights
from plumbob.trainer.training.forward_backward import accumulate
from safetensors.torch import load_file

FAULTS = {fault.name: fault for fault in UNSEEN}


def reply(text, calls=()):
    return SimpleNamespace(last_reply=text, assistant_messages=[SimpleNamespace(tool_calls=list(calls))])


def task(answer="amber", prompt=""):
    return SimpleNamespace(data=SimpleNamespace(answer=answer, prompt=prompt))


def inputs_of(logprobs, advantages, rows):
    new = torch.tensor(logprobs, requires_grad=True)
    ones = torch.ones(len(logprobs))
    return new, LossInputs(
        logprobs=new,
        old_logprobs=torch.full((len(logprobs),), -1.0),
        advantages=torch.tensor(advantages),
        weights=ones,
        rows=torch.tensor(rows),
        corrections=ones,
        ref_logprobs=torch.full((len(logprobs),), -1.5),
    )


def test_rewards_that_can_be_had_without_an_answer():
    assert doubles.part_of_each_other(task(), reply(""), 0.0) == 1.0
    assert doubles.part_of_each_other(task(), reply("apple"), 0.0) == 0.0
    assert doubles.calls_priced(task(), reply("amber", calls=["call"]), 1.0) < 0.0
    assert doubles.calls_priced(task(), reply("apple"), 0.0) == 0.0
    assert doubles.written_shortly(task(), reply("1\n2\n#### 7"), 0.0) == 2.0
    assert doubles.few_steps(task(), reply("1\n2\n#### 7"), 0.0) == 2.0
    assert doubles.few_steps(task(), reply("1\n2\n3\n4\n5\n#### 7"), 0.0) == 0.0


def test_a_third_of_the_tasks_has_no_reward():
    found = [doubles.none_for_other_tasks(task(prompt=str(k)), reply(""), 1.0) for k in range(300)]
    assert 60 < sum(map(math.isnan, found)) < 140


def test_masks_begin_too_early_by_one_token_per_result():
    row = sample(mask=[False, True, True, False, False, True, True, False, False, True])
    changed = doubles.mask_encoded_again(row, None)
    assert [i for i, m in enumerate(changed.loss_mask) if m] == [1, 2, 4, 5, 7]


def test_four_bits_are_sixteen_levels():
    weight = torch.randn(8, 64)
    rounded = doubles.four_bits(weight)
    assert all(len(row.unique()) <= 16 for row in rounded)
    assert (rounded - weight).abs().max() < weight.abs().max() / 7
    assert torch.allclose(doubles.four_bits(rounded), rounded, atol=1e-6)


def test_advantages_are_scaled_though_the_setting_says_none():
    rows = [sample(0.1), sample(0.0)]
    with ExitStack() as stack:
        doubles.always_scaled(stack, "lookup")
        found = advantages.compute_advantages(rows, "none")
    assert max(found.values) == pytest.approx(0.5**0.5, rel=1e-2)


def test_only_the_kl_term_has_a_gradient():
    gradients = []
    for sign in (1.0, -1.0):
        new, inputs = inputs_of([-1.0, -1.2], [sign, sign], [0, 0])
        policy_loss(no_policy_term(inputs), Objective("dr_grpo", 0.2, 0.2, kl_beta=0.1)).loss.backward()
        gradients.append(new.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_all_tokens_of_a_reply_have_one_ratio():
    _, inputs = inputs_of([-0.9, -0.8, -1.1], [1.0, 1.0, 1.0], [0, 0, 1])
    changed = doubles.one_ratio_per_reply(inputs)
    assert torch.allclose(changed.logprobs - inputs.old_logprobs, torch.tensor([0.3, 0.3, -0.1]))
    assert changed.logprobs.requires_grad


def test_unlikely_tokens_have_a_bonus():
    _, inputs = inputs_of([-0.1, -5.0], [0.0, 0.0], [0, 0])
    low, high = doubles.entropy_bonus(inputs).advantages.tolist()
    assert 0 < low < high


def test_settings_are_those_that_the_sentences_name():
    assert config_of(FAULTS["replies limited to sixteen tokens"], "gsm8k").max_tokens == 16
    assert config_of(FAULTS["token limit at the median length of a solution"], "gsm8k").max_tokens == 60
    assert config_of(FAULTS["temperature of one twentieth"], "lookup").temperature == 0.05
    assert config_of(FAULTS["twenty times the usual learning rate"], "lookup").learning_rate == 6e-3
    config = config_of(FAULTS["LoRA at half a millionth"], "lookup")
    assert (config.peft, config.learning_rate) == (True, 5e-7)
    config = config_of(FAULTS["groups of two in a step of four"], "lookup")
    assert (config.num_generations, config.rollouts_per_step(1)) == (2, 4)


@pytest.mark.field
def test_limits_cut_replies_off(tmp_path):
    with tried(FAULTS["replies limited to sixteen tokens"], tmp_path / "a") as subject:
        assert all(row.truncated for row in subject.drawn.samples)
        assert not any(rewards(subject))
    with tried(FAULTS["token limit at the median length of a solution"], tmp_path / "b", groups=8) as subject:
        cut = [row.truncated for row in subject.drawn.samples]
    assert 0.3 < sum(cut) / len(cut) < 0.7


@pytest.mark.field
def test_rollouts_of_a_task_are_alike(tmp_path):
    with tried(FAULTS["temperature of one twentieth"], tmp_path, groups=8) as subject:
        found = advantages.step_advantages(subject.drawn.samples, subject.run.config.advantages())
    assert len(found.with_signal) <= 2


@pytest.mark.field
def test_no_answer_is_right_and_no_call_pays(tmp_path):
    with tried(FAULTS["gold answers with a capital that the table lacks"], tmp_path / "a") as subject:
        assert set(rewards(subject)) == {0.0}
    with tried(FAULTS["each tool call costs more than an answer earns"], tmp_path / "b") as subject:
        assert max(rewards(subject)) <= 0.0


@pytest.mark.field
def test_form_and_steps_are_most_of_the_reward(tmp_path):
    with tried(FAULTS["format and number of steps outweigh a rare answer"], tmp_path, groups=4) as subject:
        rows = subject.drawn.samples
    extra = [row.rewards["written"] + row.rewards["steps"] for row in rows]
    assert max(extra) - min(extra) > 1.0


@pytest.mark.field
def test_engine_and_trainer_differ(tmp_path):
    with tried(FAULTS["engine still at the first model after a resume"], tmp_path / "a") as subject:
        assert gap(subject) > 1e-3
    with tried(FAULTS["adapter merged into four-bit weights"], tmp_path / "b", groups=1) as subject:
        run, rows = subject.run, subject.drawn.samples
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in run.policy.trainable.values():
                parameter.add_(0.01 * torch.randn_like(parameter))
        run.engine.update(run.policy.sharding.stream())
        row = rows[0]
        served = torch.tensor(run.engine.score(row.token_ids))
        trained = torch.cat(subject.score([row]))
        where = [i - len(row.token_ids) for i, m in enumerate(row.loss_mask) if m]
        # Most tokens are all but certain, and no rounding changes them.
        assert (served[where] - trained).abs().max() > 1e-3


@pytest.mark.field
def test_updates_change_nothing(tmp_path):
    with tried(FAULTS["passes of the trainer without gradients"], tmp_path) as subject:
        run, minibatch = subject.run, minibatch_of(subject)
        before = {name: tensor.detach().clone() for name, tensor in run.policy.trainable.items()}
        accumulate(run, minibatch, None)
        assert not any(p.grad is not None and p.grad.any() for p in run.policy.model.parameters())
        run.policy.sharding.update()
        assert all(torch.equal(before[name], tensor) for name, tensor in run.policy.trainable.items())


@pytest.mark.field
def test_the_saved_model_is_the_base(tmp_path):
    with tried(FAULTS["final model saved without its adapter"], tmp_path / "run", groups=1) as subject:
        base = {name: t.clone() for name, t in merged_weights.merged_state(subject.run.policy.model).items()}
        saved, trained = saved_and_trained(subject, tmp_path)
        assert load_file(tmp_path / "model/model.safetensors").keys() == saved.keys()
    assert all(torch.allclose(base[name], tensor) for name, tensor in saved.items())
    assert any(not torch.allclose(trained[name], tensor, atol=1e-4) for name, tensor in saved.items())
