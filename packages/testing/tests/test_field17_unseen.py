"""The unseen half of the seventeenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack

import pytest
import torch
from plumbob.testing.faults import field17_unseen_doubles as doubles
from plumbob.testing.faults.doubles import one_row
from plumbob.testing.faults.field17_unseen import UNSEEN
from plumbob.testing.faults.field_trial import config_of, sample
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.minibatches import Minibatch


@pytest.mark.parametrize("fault", UNSEEN, ids=lambda fault: fault.name)
def test_options_are_accepted(fault):
    for env in fault.envs:
        config_of(fault, env)


def test_rows_are_scored_as_one_sequence():
    seen = []
    one_row(lambda rows, temperature: seen.extend(rows), [sample(), sample()], 1.0)
    assert [row.token_ids for row in seen] == [[0, 1, 2, 0, 1, 2]]


def test_rows_are_scored_at_temperature_one():
    assert doubles.at_temperature_one(lambda rows, temperature: temperature, [], 0.7) == 1.0


def test_the_rate_falls_twice_as_fast():
    with ExitStack() as stack:
        doubles.twice_as_fast(stack, "lookup")
        found = [step_module.learning_rate_of("linear", 1.0, at, warmup=0, total=4) for at in range(4)]
    assert found == [1.0, 0.5, 0.0, 0.0]


def test_unlikely_tokens_cannot_be_drawn():
    logits = torch.tensor([[0.1, 0.5, 0.4], [0.9, 0.05, 0.05]]).log()
    assert (doubles.nucleus(None, [], logits) > -50).tolist() == [[False, True, True], [True, False, False]]
    assert (doubles.nucleus(None, [], torch.zeros(1, 100)) > -50).sum() == 20


def test_saved_matrices_are_rounded(monkeypatch):
    state = {"q_proj.weight": torch.tensor([[0.7, 0.12, -0.33]]), "norm.weight": torch.tensor([0.123])}
    monkeypatch.setattr(policy_module, "merged_state", lambda model: state)
    with ExitStack() as stack:
        doubles.four_bits_saved(stack, "lookup")
        found = policy_module.merged_state(None)
    assert found["q_proj.weight"].tolist() == [pytest.approx([0.7, 0.1, -0.3])]
    assert found["norm.weight"] is state["norm.weight"]


def test_groups_begin_a_row_too_late():
    rows = [sample(group=group) for group in "aabb"]
    assert [row.group for row in doubles.bounds_moved(rows)] == ["a", "b", "b", "a"]
    assert doubles.bounds_moved([]) == []


def test_rows_get_the_advantages_of_others(monkeypatch):
    monkeypatch.setattr(forward_backward, "grpo_loss", lambda run, minibatch, indices: minibatch.advantages)
    minibatch = Minibatch([], [1.0, 2.0, 3.0, 4.0], [], [], mine=[0, 1, 2, 3])
    with ExitStack() as stack:
        doubles.advantages_by_device(stack, "lookup")
        assert forward_backward.grpo_loss(None, minibatch, [0]) == [1.0, 3.0, 2.0, 4.0]


def test_the_prefix_is_in_the_loss():
    row = sample(mask=[False, False, False, False, False, True])
    assert doubles.prefix_trained(row, None).loss_mask == [False, False, True, True, True, True]
    assert doubles.prefix_trained(sample(mask=[False, False, True]), None).loss_mask == [False, True, True]


def test_late_syncs_send_nothing():
    weights = {"w": torch.ones(1)}
    assert doubles.unless(lambda: False)(None, weights) is weights
    assert doubles.unless(lambda: True)(None, weights) == {}
