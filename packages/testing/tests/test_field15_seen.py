"""The seen half of the fifteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import dataclasses
import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field15_seen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field15_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, gap, loss_inputs, sample, tried, without
from plumbob.trainer.algorithm.losses import Objective
from plumbob.trainer.distributed.model_files import lora_layers
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in SEEN}


def row(ids, mask, **others):
    logprobs = [-1.0 * m for m in mask]
    return dataclasses.replace(sample(mask=mask), token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs, **others)


def two_turns(**others):
    mask = [False, True, True, *[False] * 8, True, True]
    return row([9, 5, 2, 11, 12, 13, 14, 15, 16, 17, 18, 6, 2], mask, **others)


def test_end_tokens_leave_the_loss():
    assert doubles.end_tokens(two_turns()) == {2, 12}
    assert [i for i, m in enumerate(doubles.without_end_tokens(two_turns(), None).loss_mask) if m] == [1, 11]
    cut = two_turns(truncated=True)
    assert doubles.without_end_tokens(cut, None).loss_mask == cut.loss_mask


def test_rows_are_padded_with_sampled_end_tokens():
    short, long = row([9, 5, 2], [False, True, True]), two_turns()
    found = doubles.padded_with_ends([short, long])
    assert found[0].token_ids == [9, 5, *[2] * 11]
    assert found[0].num_sampled == 12
    assert found[1] is long


def test_the_head_of_a_result_is_missing():
    found = doubles.results_without_head(two_turns(), None)
    assert found.token_ids == [9, 5, 2, 17, 18, 6, 2]
    assert found.num_sampled == two_turns().num_sampled
    single = row([9, 5, 2], [False, True, True])
    assert doubles.results_without_head(single, None).token_ids == single.token_ids


def test_groups_of_long_rows_are_left_out():
    rows = [sample(group=f"0/{i}", mask=[False, *[True] * (i + 1)]) for i in range(8) for _ in range(2)]
    assert {one.group for one in doubles.without_slow_groups(rows)} == {f"0/{i}" for i in range(6)}
    assert doubles.without_slow_groups(rows[:2]) == rows[:2]


def test_one_bad_reward_makes_its_group_no_numbers():
    bad = row([1, 7], [False, True], group="0/0")
    assert doubles.lost_reward(bad)
    rows = [sample(1.0, "0/0"), bad, sample(1.0, "0/1"), sample(0.0, "0/1")]
    settings = config_of(FAULTS["rewards that are no numbers in each group's mean"], "lookup").advantages()
    with ExitStack() as stack:
        doubles.no_number_counts(stack, "lookup")
        found = step_module.step_advantages(rows, settings).values
    assert all(map(math.isnan, found[:2]))
    assert found[2:] == [0.5, -0.5]


def test_a_lone_failure_is_divided_by_a_rounding_error():
    assert doubles.ninety_five(None, None, 1.0) == 0.95
    rows = [sample(reward) for reward in (0.0, *[0.95] * 7)]
    settings = config_of(FAULTS["lone failures divided by a rounding error"], "lookup").advantages()
    plain = step_module.step_advantages(rows, settings).values
    with ExitStack() as stack:
        doubles.divided_by_rounding(stack, "lookup")
        found = step_module.step_advantages(rows, settings).values
    assert abs(plain[0]) < 3
    assert found[0] < -500
    assert max(map(abs, found[1:])) < 3
    assert step_module.step_advantages(rows, settings).values == plain


def test_good_rollouts_have_no_gradient():
    inputs = loss_inputs([0.75, -0.25])
    with ExitStack() as stack:
        doubles.dual_clip_everywhere(stack, "lookup")
        forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2)).loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([0.0, 0.25])


def test_the_schedule_is_four_times_as_fast():
    def rates():
        return [step_module.learning_rate_of("linear", 1.0, at, warmup=0, total=8) for at in range(4)]

    with ExitStack() as stack:
        doubles.stepped_by_each_process(stack, "lookup")
        assert rates() == [1.0, 0.5, 0.0, 0.0]
    assert rates() == [1.0, 0.875, 0.75, 0.625]


def test_tasks_begin_again(monkeypatch):
    monkeypatch.setattr(RolloutSource, "take", lambda self, step, cursor, *rest: cursor)
    source = SimpleNamespace(sampler=SimpleNamespace(groups_per_step=16))
    with ExitStack() as stack:
        doubles.restarted(stack, "lookup")
        assert [RolloutSource.take(source, step, 16 * step) for step in range(4)] == [0, 16, 0, 16]


def test_padding_is_counted():
    ids = torch.tensor([[4, 5, 6, 7], [4, 5, 0, 0]])
    assert doubles.padding(ids).tolist() == [[0], [2]]
    assert doubles.never_ended([3], Sampling(stop_token_ids=(2,)))[1].stop_token_ids == (0,)


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("trainer at temperature one whatever the setting", "lookup"),
        ("raw log-probabilities from an engine below temperature one", "lookup"),
        ("log-probabilities of the engine divided by the temperature", "lookup"),
        ("positions of shorter prompts counted with their padding", "musique"),
        ("norms in half precision in the engine", "musique"),
        ("rotary angles rounded in the engine", "lookup"),
        ("head of each tool result missing from the rows", "lookup"),
    ],
)
def test_engine_and_trainer_differ(name, env, tmp_path):
    gaps = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(gaps)), env, groups=4) as subject:
            gaps.append(gap(subject))
    assert gaps[0] > 2e-4
    assert gaps[1] < 5e-5


@pytest.mark.field
def test_turns_go_on_to_the_limit(tmp_path):
    name = "another end token than that of the template"
    ended = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(ended))) as subject:
            ended.append(sum(not one.truncated for one in subject.drawn.samples))
    assert ended[0] == 0
    assert ended[1] > 4


@pytest.mark.field
def test_the_adapter_has_another_scale_in_the_engine(tmp_path):
    with tried(FAULTS["rank-stabilised adapter scaled by its rank in the engine"], tmp_path) as subject:
        served, trained = (lora_layers(part.model) for part in (subject.run.engine, subject.run.policy))
        assert {module.scaling["default"] for module in trained.values()} == {2.0}
        assert {module.scaling["default"] for module in served.values()} == {0.5}


@pytest.mark.field
def test_the_engine_is_one_update_behind(tmp_path):
    with tried(FAULTS["rollouts one update behind the trainer without a correction"], tmp_path) as subject:
        run = subject.run
        name, tensor = next(iter(run.policy.trainable.items()))
        before = tensor.detach().clone()
        for _ in range(2):
            kept = tensor.detach().clone()
            with torch.no_grad():
                tensor.add_(0.01)
            run.engine.update(run.policy.sharding.stream())
            assert torch.equal(run.engine.served_weights()[name], kept)
        assert not torch.equal(tensor, before)


@pytest.mark.field
def test_the_adapter_gets_no_gradient(tmp_path):
    name = "no gradient through a reentrant checkpoint"
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None)) as subject:
            scores = subject.run.policy.score(subject.drawn.samples[:2], 1.0)
            assert scores.logprobs.requires_grad == (fault.start is None)


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k"])
def test_rows_of_a_run_change(env, tmp_path):
    names = (
        "end tokens as padding in the loss",
        "end token left out of the loss because it pads",
        "long rollouts discarded as too old",
    )
    found = {}
    for name in names:
        with tried(FAULTS[name], tmp_path / str(len(found)), env, groups=4) as subject:
            found[name] = subject.drawn.samples
    with tried(without(FAULTS[names[0]]), tmp_path / "plain", env, groups=4) as subject:
        plain = subject.drawn.samples
    count = sum(one.num_sampled for one in plain)
    assert sum(one.num_sampled for one in found[names[0]]) > count
    assert sum(one.num_sampled for one in found[names[1]]) < count
    assert any(runs_of(one.loss_mask) for one in found[names[1]])
    assert len(found[names[2]]) < len(plain)
