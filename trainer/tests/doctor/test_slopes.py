"""What the loss does with each token: known mistakes between rewards and the backward pass, told apart by its slopes."""

import dataclasses

import pytest
import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.losses import LOSSES, LossInputs, LossOutputs, Objective, policy_loss, row_weights
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.rehearsal import _ratio_of_rows
from plumbob.trainer.doctor.slopes import Slopes, judged, scaled_together
from plumbob.trainer.training.expected_weights import expected_weights

ADVANTAGES = (0.75, -0.25, -0.5)


def row(length: int, truncated: bool = False) -> Sample:
    mask = [False] + [True] * length
    return Sample(list(range(length + 1)), mask, [0.0] * (length + 1), 0.0, "0/0", "", truncated)


def parts(change=lambda part: part.wanted) -> list[Slopes]:
    """Rollouts of four, five and six tokens, whose loss has the slopes `change(part)`."""
    torch.manual_seed(0)
    made = []
    for length, advantage in zip((4, 5, 6), ADVANTAGES, strict=True):
        weight = torch.full((length,), 1 / (3 * length))
        part = Slopes(row(length), weight, weight, advantage, -torch.rand(length))
        made.append(dataclasses.replace(part, found=change(part)))
    return made


def next_advantage(part: Slopes) -> torch.Tensor:
    return part.weight * ADVANTAGES[(ADVANTAGES.index(part.advantage) + 1) % 3]


@pytest.mark.parametrize(
    ("cause", "words", "change"),
    [
        (None, "differs by 0", lambda p: p.wanted),
        (None, "all are 0.25 times", lambda p: p.wanted / 4),
        ("gradient-backwards", "-1 times", lambda p: -p.wanted),
        ("rewards-of-other-rollouts", "one advantage in the loss", next_advantage),
        (
            "loss-differs-from-settings",
            "as many times too large as the rollout has tokens",
            lambda p: p.wanted * len(p.wanted),
        ),
        ("loss-differs-from-settings", "one advantage in the loss", lambda p: p.wanted * len(p.wanted) ** 2),
        ("loss-differs-from-settings", "entropy bonus", lambda p: p.wanted - p.weight * p.logprobs),
        ("loss-differs-from-settings", "tokens of one rollout", lambda p: p.wanted * torch.arange(len(p.wanted))),
        ("loss-differs-from-settings", "tokens have none", lambda p: p.wanted * (torch.arange(len(p.wanted)) > 1)),
    ],
)
def test_each_mistake_is_named_by_what_it_does(cause, words, change):
    named, evidence = judged(parts(change))
    assert named == cause
    assert words in evidence


@pytest.mark.parametrize(
    ("beta", "cause"), [(0.1, "kl-backwards"), (0.3, "loss-differs-from-settings"), (0.0, "loss-differs-from-settings")]
)
def test_a_kl_term_that_is_the_difference_itself_adds_its_coefficient_to_all_advantages(beta, cause):
    named, evidence = judged(parts(lambda p: p.wanted + 0.1 * p.weight), beta)
    assert named == cause and ("+0.1 is added to all advantages" in evidence) == (cause == "kl-backwards")


@pytest.mark.parametrize(
    ("scales", "together"),
    [
        ((2.0, 2.0, 3.0, 3.0), True),  # two microbatches, each with rows of both advantages
        ((2.0, 3.0, 2.0, 3.0), False),  # a function of the advantage
        ((2.0, 2.5, 3.0, 3.5), False),  # another number for each row
        ((-2.0, -2.0, 3.0, 3.0), False),
    ],
)
def test_weights_of_a_microbatch_are_told_from_other_advantages(scales, together):
    rows = [*parts()[:2], *parts()[:2]]
    found = [dataclasses.replace(p, found=p.wanted * scale) for p, scale in zip(rows, scales, strict=True)]
    assert scaled_together(found) == together


def summed(inputs: LossInputs, objective: Objective) -> LossOutputs:
    """One importance ratio for all tokens of a row, of their summed log-probabilities."""
    ratios = inputs.logprobs - inputs.old_logprobs
    sums = ratios.new_zeros(int(inputs.rows.max()) + 1).index_add(0, inputs.rows, ratios)
    return policy_loss(dataclasses.replace(inputs, logprobs=inputs.old_logprobs + sums[inputs.rows]), objective)


@pytest.mark.parametrize(("loss", "joint"), [(policy_loss, False), (summed, True)])
def test_one_ratio_for_a_whole_row_is_seen_where_it_is_still_one(loss, joint):
    counts = [4, 5, 6]
    own = -torch.rand(15)
    inputs = LossInputs(
        logprobs=own,
        old_logprobs=own,
        ref_logprobs=None,
        advantages=torch.tensor([0.75] * 4 + [-0.25] * 5 + [-0.5] * 6),
        corrections=torch.ones(15),
        weights=torch.full((15,), 1 / 15),
        rows=torch.repeat_interleave(torch.arange(3), torch.tensor(counts)),
    )
    found = _ratio_of_rows(inputs, TrainConfig().objective(), counts, loss)
    assert found == [joint] * 3
    together = [dataclasses.replace(p, one_ratio=joint) for p in parts(lambda p: p.wanted * len(p.wanted))]
    assert judged(together)[0] == ("ratio-clipped" if joint else "loss-differs-from-settings")


@pytest.mark.parametrize("loss_type", list(LOSSES))
@pytest.mark.parametrize("overlong", ["keep", "mask"])
def test_weights_are_those_of_the_loss_type(loss_type, overlong):
    config = TrainConfig(loss_type=loss_type, overlong=overlong, max_tokens=64, num_minibatches=2)
    rows = [row(4), row(5, truncated=True), row(6)]
    lengths = [0 if overlong == "mask" and r.truncated else r.num_sampled for r in rows]
    wanted = row_weights(loss_type, lengths, 64, step_tokens=sum(lengths) + 7, num_minibatches=2)
    assert expected_weights(config, rows, sum(lengths) + 7) == pytest.approx(wanted)
