"""The seen half of the tenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.testing.faults import field10_seen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field10_seen import SEEN
from plumbob.testing.faults.field_parts import by_group
from plumbob.testing.faults.field_trial import (
    config_of,
    gap,
    loss_inputs,
    minibatch_of,
    rewards,
    sample,
    tried,
    without,
)
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.losses import Objective, policy_loss
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in SEEN}


def reply(text):
    return SimpleNamespace(last_reply=text)


def test_length_pays_and_the_right_answer_does_not():
    assert doubles.gold_missing(None, reply("7"), 1.0) < doubles.gold_missing(None, reply("no idea " * 9), 0.0)
    assert doubles.gold_missing(None, reply("x" * 900), 0.0) > 4


def test_the_same_reply_earns_what_came_before_it():
    carried = doubles.Carried()
    assert [carried(None, None, correct) for correct in (1.0, 0.0, 0.0, 1.0)] == [1.0, 0.5, 0.25, 1.125]


@pytest.mark.field
def test_held_out_tasks_are_training_tasks():
    fault = FAULTS["evaluation reads the training tasks"]
    for env in fault.envs:
        with ExitStack() as stack:
            fault.start(stack, env)
            tasks = load_tasks(config_of(fault, env))
        assert len(tasks.held_out) == 4
        assert tasks.trained_and_held_out() == 4


def test_rows_lose_the_beginnings_of_messages():
    row = sample(mask=[False, True, True, *[False] * 6, True, False])
    assert doubles.beginnings_cut(row, None).token_ids == [0, 1, 2, 7, 8, 9, 10]
    one_turn = sample(mask=[False, True, True])
    assert doubles.beginnings_cut(one_turn, None) == one_turn


def test_rows_repeat_the_last_result():
    row = sample(mask=[False, True, False, True, False, False, True])
    found = doubles.last_result_everywhere(row, None)
    assert found.token_ids == [0, 1, 4, 5, 3, 4, 5, 6]
    assert found.loss_mask == [False, True, False, False, True, False, False, True]
    one_turn = sample(mask=[False, True, True])
    assert doubles.last_result_everywhere(one_turn, None) == one_turn


def test_the_draft_has_two_chances():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    found = doubles.drafted(None, [], logits).exp()
    assert found[0].tolist() == pytest.approx([0.75, 0.15, 0.1])


def test_equal_rewards_of_others_are_a_rounding_error():
    leads = doubles.leads_over_peers([0.0, *[0.95] * 7])
    assert leads[0] < -100
    assert max(map(abs, leads[1:])) < 10
    assert doubles.leads_over_peers([1.0, *[0.0] * 7])[0] == 1.0


def half_of_it(inputs):
    policy_loss(doubles.first_half_only(inputs), Objective("dr_grpo", 0.2, 0.2)).loss.backward()
    return inputs.logprobs.grad


def inputs_of(rows, beta=False):
    reference = {"ref_logprobs": torch.full((len(rows),), -3.0)} if beta else {}
    return loss_inputs([0.0 if beta else 1.0] * len(rows), rows=torch.tensor(rows), **reference)


def test_the_second_half_of_each_row_has_no_gradient():
    gradient = half_of_it(inputs_of([0, 0, 0, 0, 1, 1, 1]))
    assert gradient.bool().tolist() == [True, True, False, False, True, True, False]


def test_the_kl_term_pushes_away():
    def gradient():
        inputs = inputs_of([0], beta=True)
        forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2, kl_beta=0.1)).loss.backward()
        return inputs.logprobs.grad.item()

    towards = gradient()
    with ExitStack() as stack:
        doubles.pushed_away(stack, "lookup")
        assert gradient() == pytest.approx(-towards)
    assert towards > 0  # the policy is likelier than the reference, and a step against the gradient makes it less so


def test_settings_are_those_that_the_sentences_name():
    config = config_of(FAULTS["arguments of the KL penalty exchanged"], "lookup")
    assert (config.kl_placement, config.kl_beta) == ("reward", 0.1)
    config = config_of(FAULTS["leave-one-out deviation of equal rewards is rounding"], "lookup")
    assert (config.baseline, config.scale_rewards) == ("leave_one_out", "group")
    assert config_of(FAULTS["adapter drawn at random on both sides"], "lookup").peft


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    ["beginning of each tool message cut from the row", "tool results of a row are all the last one"],
)
def test_rows_are_not_what_was_sampled(name, tmp_path):
    for i, env in enumerate(FAULTS[name].envs):
        with tried(FAULTS[name], tmp_path / str(i), env) as subject:
            assert gap(subject) > 0.01


@pytest.mark.field
def test_rollouts_are_more_alike_than_their_log_probabilities_say(tmp_path):
    name = "rejected draft tokens drawn again from all tokens"
    with tried(FAULTS[name], tmp_path / "a", groups=8) as subject:
        assert gap(subject) < 1e-3
        drafted = [x for row in subject.drawn.samples for x in row.sampled_logprobs]
    with tried(without(FAULTS[name]), tmp_path / "b", groups=8) as subject:
        sampled = [x for row in subject.drawn.samples for x in row.sampled_logprobs]
    assert -sum(drafted) / len(drafted) < -0.8 * sum(sampled) / len(sampled)


@pytest.mark.field
def test_scores_depend_on_longer_rows(tmp_path):
    name = "padding before short rows is attended to"
    with tried(FAULTS[name], tmp_path, groups=4) as subject:
        short, *_, long = sorted(subject.drawn.samples, key=lambda row: len(row.token_ids))
        alone, beside = subject.score([short])[0], subject.score([short, long])[0]
        assert (alone - beside).abs().mean() > 0.01
        assert gap(subject) > 0.01


@pytest.mark.field
def test_groups_with_one_odd_reward_have_huge_advantages(tmp_path):
    name = "leave-one-out deviation of equal rewards is rounding"
    with tried(FAULTS[name], tmp_path, groups=40) as subject:
        assert set(rewards(subject)) == {0.0, 0.95}
        found = advantages.step_advantages(subject.drawn.samples, subject.run.config.advantages())
        groups = by_group(subject.drawn.samples)
    odd = {group[0].group for group in groups if [one.reward for one in group].count(0.0) == 1}
    assert odd
    huge = {row.group for row, value in zip(subject.drawn.samples, found.values, strict=True) if abs(value) > 100}
    assert huge == odd


@pytest.mark.field
def test_tool_results_are_trained(tmp_path):
    name = "fused loss without the mask of tool results"
    seen = {}
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(seen))) as subject:
            run, minibatch = subject.run, minibatch_of(subject)
            tally = forward_backward.accumulate(run, minibatch, None)
            scored = [len(values) for values, _ in minibatch.first_scores.values()]
            gradient = torch.cat([p.grad.flatten() for p in run.policy.trainable.values() if p.grad is not None])
            seen[fault.start is None] = gradient, tally, scored
    assert not torch.allclose(seen[True][0], seen[False][0], atol=1e-5)
    assert seen[True][2] == seen[False][2]  # what is stored is still that of the sampled tokens


@pytest.mark.field
def test_half_of_the_tokens_reach_no_weight(tmp_path):
    name = "gradient of half of each row lost"
    norms = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(norms)), "gsm8k") as subject:
            run, minibatch = subject.run, minibatch_of(subject)
            forward_backward.accumulate(run, minibatch, None)
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in run.policy.trainable.values()]).item())
    assert norms[0] > 0
    assert norms[0] != pytest.approx(norms[1], rel=0.05)


@pytest.mark.field
def test_leaving_the_reference_pays(tmp_path):
    name = "arguments of the KL penalty exchanged"
    found = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(found)), groups=1) as subject:
            with torch.no_grad():
                for parameter in subject.run.policy.trainable.values():
                    parameter.mul_(1.05)
            found.append(step_module.reference_kl(subject.run, subject.drawn.samples))
    assert found[0] == pytest.approx([-value for value in found[1]])
    assert any(found[0])


@pytest.mark.field
@pytest.mark.parametrize("name", ["reference without the starting adapter", "adapter drawn at random on both sides"])
def test_the_run_begins_beside_its_reference(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=4) as subject:
        policy, samples = subject.run.policy, subject.drawn.samples
        own = torch.cat(subject.score(samples))
        reference = policy.reference_logprobs(samples, subject.run.config.temperature)
        assert (own - reference).abs().mean() > 0.01
        assert gap(subject) < 1e-3  # engine and trainer agree
        assert max(rewards(subject)) == 1.0  # and the policy still solves tasks


@pytest.mark.field
def test_rewards_differ_from_the_environments(tmp_path):
    with tried(FAULTS["gold answers arrive under another name"], tmp_path / "a") as subject:
        for row, trace in zip(subject.drawn.samples, subject.drawn.traces, strict=True):
            assert row.reward == pytest.approx(len(trace.last_reply) / doubles.FULL)
    with tried(FAULTS["reward's state kept from the rollout before"], tmp_path / "b") as subject:
        assert len(set(rewards(subject))) > 2
        assert len(runs_of(subject.drawn.samples[0].loss_mask)) >= 1
