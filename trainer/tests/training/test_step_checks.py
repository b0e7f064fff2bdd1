"""What a training step computes a second time: slopes of the loss, advantages of rows, and weights between steps."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from plumbob.trainer.algorithm.losses import LOSSES, LossInputs, Objective, policy_loss
from plumbob.trainer.training.row_checks import end_tokens, run_on
from plumbob.trainer.training.step_checks import advantages_in_minibatches, misweighted
from plumbob.trainer.training.tally import Tally
from plumbob.trainer.training.weight_sample import WeightSample


def inputs_of(seed: int = 0) -> LossInputs:
    """Nine tokens of three rows, of which one has no advantage and one token has an importance weight of 0."""
    torch.manual_seed(seed)
    logprobs = (-torch.rand(9)).requires_grad_()
    rows = torch.arange(3).repeat_interleave(3)
    advantages, weights = torch.tensor([0.5, -0.25, 0.0])[rows], torch.tensor([0.1, 0.2, 0.3])[rows]
    corrections = torch.ones(9)
    corrections[4] = 0.0
    return LossInputs(logprobs, logprobs.detach(), advantages, weights, rows, corrections)


def objective(loss_type: str) -> Objective:
    loss = LOSSES[loss_type]
    return Objective(loss_type, loss.epsilon, loss.epsilon_high or loss.epsilon)


@pytest.mark.parametrize("loss_type", list(LOSSES))
def test_every_loss_type_weighs_tokens_by_their_advantages(loss_type):
    inputs = inputs_of()
    counts = misweighted(inputs, objective(loss_type))
    policy_loss(inputs, objective(loss_type)).loss.backward()
    assert counts["misweighted"].item() == 0


@pytest.mark.parametrize("loss_type", list(LOSSES))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("moved", [3e-4, 0.3], ids=["near the old policy", "far from it"])
def test_two_computations_of_the_slopes_agree_in_later_updates_and_with_a_kl_term(loss_type, estimator, moved):
    for seed in range(5):
        inputs = inputs_of(seed)
        old, reference = (inputs.logprobs.detach() + moved * torch.randn(9) for _ in range(2))
        inputs = dataclasses.replace(inputs, old_logprobs=old, ref_logprobs=reference)
        full = dataclasses.replace(objective(loss_type), kl_beta=0.1, kl_estimator=estimator)
        counts = misweighted(inputs, full)
        policy_loss(inputs, full).loss.backward()
        assert counts["misweighted"].item() == 0


def test_a_loss_without_its_policy_term_is_told_from_another_mistake():
    inputs = dataclasses.replace(inputs_of(), ref_logprobs=inputs_of(1).logprobs.detach())
    full = dataclasses.replace(objective("grpo"), kl_beta=0.1)
    for advantages, wrong, alone in ((torch.zeros(9), 5, 5), (-inputs.advantages, 5, 0)):
        counts = misweighted(inputs, full)
        policy_loss(dataclasses.replace(inputs, advantages=advantages), full).loss.backward()
        assert (counts["misweighted"].item(), counts["unpulled"].item()) == (wrong, alone)
        assert counts["unpulled_parts"].item() == 0  # the whole of a row, or nothing of it


@pytest.mark.parametrize(("beta", "explained"), [(0.0, True), (-0.1, True), (0.01, True), (0.1, False)])
def test_a_kl_term_with_another_coefficient_is_told_from_another_mistake(beta, explained):
    inputs = dataclasses.replace(inputs_of(), ref_logprobs=inputs_of(1).logprobs.detach())
    full = dataclasses.replace(objective("grpo"), kl_beta=0.1)
    counts = misweighted(inputs, full)
    given = inputs if explained else dataclasses.replace(inputs, advantages=inputs.advantages * 3 + 0.5)
    policy_loss(given, dataclasses.replace(full, kl_beta=beta)).loss.backward()
    assert counts["misweighted"].item() > 3 and (counts["other_kl"] == counts["misweighted"]).item() == explained


def test_a_kl_term_that_is_the_difference_itself_is_one_of_another_coefficient():
    inputs = dataclasses.replace(inputs_of(), ref_logprobs=inputs_of(1).logprobs.detach())
    for sign, beta in ((1, 0.1), (-1, 0.1), (1, 0.3)):
        counts = misweighted(inputs, dataclasses.replace(objective("grpo"), kl_beta=0.1))
        plain = policy_loss(inputs, objective("grpo")).loss
        apart = (inputs.weights * inputs.logprobs).sum()
        (plain + sign * beta * apart).backward()
        explained = counts["other_kl"] == counts["misweighted"]
        assert counts["misweighted"].item() >= 5 and explained.item() == (beta == 0.1)


@pytest.mark.parametrize("factor", [0.5, 3.0, -2.0])
def test_a_number_that_a_microbatch_has_in_common_is_measured(factor):
    inputs = inputs_of()
    counts = misweighted(inputs, objective("grpo"))
    (policy_loss(inputs, objective("grpo")).loss * factor).backward()
    assert counts["misweighted"].item() == 5
    assert (counts["scaled"] == counts["misweighted"]).item() == (factor > 0)
    assert counts["scale"].exp().item() == pytest.approx(factor if factor > 0 else 1.0)
    several = [Tally(scales=1, scale=math.log(x), scale_squares=math.log(x) ** 2) for x in (0.5, 2.0)]
    assert Tally.total(several).metrics()["loss/scale_spread"] == pytest.approx(math.log(2))


def test_a_ratio_of_one_in_later_updates_is_told_from_other_mistakes():
    """The old log-probabilities are those of the present weights, and not those before the update."""
    inputs = inputs_of()
    moved = dataclasses.replace(inputs, old_logprobs=inputs.logprobs.detach() - 0.1)
    for given, explained in (
        (dataclasses.replace(moved, old_logprobs=moved.logprobs.detach()), True),
        (dataclasses.replace(moved, old_logprobs=moved.old_logprobs - 0.05), False),
    ):
        counts = misweighted(moved, objective("grpo"))
        policy_loss(given, objective("grpo")).loss.backward()
        assert counts["misweighted"].item() == 5
        assert (counts["unratioed"] == counts["misweighted"]).item() == explained


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_tokens_without_a_gradient_in_rows_that_have_one_are_told_from_other_mistakes(beta):
    inputs = dataclasses.replace(inputs_of(), ref_logprobs=inputs_of(1).logprobs.detach())
    full = dataclasses.replace(objective("grpo"), kl_beta=beta)
    counts = misweighted(inputs, full)
    kept = torch.arange(9) % 3 != 2  # of each of three rows the last token has no gradient, nor one of the KL term
    given = dataclasses.replace(inputs, logprobs=torch.where(kept, inputs.logprobs, inputs.logprobs.detach()))
    policy_loss(given, full).loss.backward()
    assert counts["misweighted"].item() >= 2
    assert (counts["unpulled_parts"] == counts["misweighted"]).item() == (beta == 0)


@pytest.mark.parametrize(("sign", "explained"), [(1, True), (-1, True), (0, False)])
def test_rows_without_a_gradient_are_told_from_advantages_of_one_sign(sign, explained):
    """Half of the rows have no gradient: one of each sign, or all with a negative advantage."""
    values, rows = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.arange(4).repeat_interleave(2)
    logprobs = (-torch.rand(8)).requires_grad_()
    inputs = LossInputs(logprobs, logprobs.detach(), values[rows], torch.full((8,), 0.1), rows, torch.ones(8))
    counts = misweighted(inputs, objective("grpo"))
    lost = (rows % 2 == (sign > 0)) if sign else inputs.advantages < 0
    given = dataclasses.replace(inputs, logprobs=torch.where(lost, logprobs.detach(), logprobs))
    policy_loss(given, objective("grpo")).loss.backward()
    assert counts["misweighted"].item() == 4
    assert (counts["unpulled_parts"] == counts["misweighted"]).item() == explained


def test_a_loss_that_was_negated_is_told_from_other_mistakes():
    for sign in (-1.0, -2.0):
        inputs = inputs_of()
        counts = misweighted(inputs, objective("grpo"))
        (policy_loss(inputs, objective("grpo")).loss * sign).backward()
        assert counts["misweighted"].item() == 5
        assert (counts["negated"] == counts["misweighted"]).item() == (sign == -1.0)


def test_a_clip_that_is_never_applied_is_counted_in_later_updates():
    inputs = inputs_of()
    inputs = dataclasses.replace(inputs, old_logprobs=inputs.logprobs.detach() - 0.5)
    counts = misweighted(inputs, objective("grpo"))
    policy_loss(inputs, dataclasses.replace(objective("grpo"), epsilon_high=9.0)).loss.backward()
    assert counts["misweighted"].item() == 3  # the tokens with a positive advantage


@pytest.mark.parametrize(
    ("wrong", "change"),
    [
        (9, lambda i: dataclasses.replace(i, advantages=i.advantages - i.logprobs.detach())),  # an entropy bonus
        (6, lambda i: dataclasses.replace(i, advantages=-i.advantages)),
        (3, lambda i: dataclasses.replace(i, advantages=i.advantages.clamp(min=0))),
        (6, lambda i: dataclasses.replace(i, weights=i.weights * 2)),
    ],
)
def test_a_loss_of_other_values_is_counted_token_by_token(wrong, change):
    inputs = inputs_of()
    counts = misweighted(inputs, objective("grpo"))
    policy_loss(change(inputs), objective("grpo")).loss.backward()
    # The token with an importance weight of 0 has no slope in either loss.
    assert counts["misweighted"].item() == wrong - (wrong != 0)


def test_each_sample_has_the_advantage_of_its_row():
    rows = [SimpleNamespace(name=name) for name in "abc"]
    halves = [SimpleNamespace(rows=rows[:2], advantages=[1.0, 2.0]), SimpleNamespace(rows=rows[2:], advantages=[3.0])]
    assert advantages_in_minibatches(rows, halves) == [1.0, 2.0, 3.0]
    assert advantages_in_minibatches(rows, halves[1:])[0] != 1.0


def weights(*tensors: list[float]) -> WeightSample:
    return WeightSample(torch.tensor([x for t in tensors for x in t]), tuple(map(len, tensors)))


def test_tensors_that_stand_still_and_weights_that_come_back():
    first, second = weights([1.0, 2.0], [3.0], []), weights([1.0, 2.5], [3.0], [])
    moved = Tally.of_movement(first, second)
    assert (moved.still, moved.tensors, moved.strayed) == (1, 2, 0)
    assert moved.metrics()["optimizer/still_tensors"] == 0.5
    back = Tally.of_movement(first, second, last=second)
    assert back.metrics()["optimizer/strayed_share"] == pytest.approx(1 / 3)
    assert Tally.of_movement(second, first, last=second).strayed == 0


def test_weights_that_move_along_their_gradient_go_uphill():
    before, gradients = weights([0.0, 0.0, 0.0, 0.0]), weights([4.0, -4.0, 4.0, 0.001])
    assert weights([-1.0, 1.0, -1.0, 1.0]).uphill(gradients, before) == (0, 3)  # the smallest gradient tells nothing
    assert weights([-1.0, 1.0, 1.0, 0.0]).uphill(gradients, before) == (1, 3)
    assert weights([0.0, -1.0, 1.0, 0.0]).uphill(gradients, before) == (2, 2)
    assert before.uphill(weights([0.0] * 4), before) == (0, 0)
    assert Tally(uphill=1, directed=4).metrics()["optimizer/uphill_share"] == 0.25
    assert "optimizer/uphill_share" not in Tally().metrics()


def test_turns_that_go_on_after_an_end_token_and_that_others_have_ended():
    ends = end_tokens(SimpleNamespace(eos_token_id=9), (7,))
    nodes = [
        SimpleNamespace(
            sampled=True, token_ids=[1, 2, 7, 5], mask=[True, True, True, False], logprobs=[-1.0, -1.0, -14.0]
        ),
        SimpleNamespace(sampled=True, token_ids=[1, 9, 2], mask=[True] * 3, logprobs=[-1.0, -1.0, -30.0]),
        SimpleNamespace(sampled=True, token_ids=[1, 7], mask=[True] * 2, logprobs=[-20.0, -11.0]),
        SimpleNamespace(sampled=True, token_ids=[1, 7], mask=[True] * 2, logprobs=[]),  # a chat endpoint gives none
        SimpleNamespace(sampled=False, token_ids=[9, 9, 9], mask=[False] * 3, logprobs=[]),
    ]
    assert run_on([SimpleNamespace(nodes=nodes)], ends) == {"rollout/run_on": 0.25, "rollout/unlikely_ends": 0.25}
    assert run_on([SimpleNamespace(nodes=nodes[4:])], ends) == {}
