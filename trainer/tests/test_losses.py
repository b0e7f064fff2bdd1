import pytest
import torch
from plumbob.trainer.advantages import compute_advantages
from plumbob.trainer.losses import LossInputs, clipped_loss, row_weights
from plumbob.trainer.policy import microbatches

LOSS_TYPES = ["dr_grpo", "grpo", "dapo"]


def test_weights_are_the_papers_reductions():
    lengths = [1, 3, 0, 4]
    assert row_weights("grpo", lengths, 10) == pytest.approx([1 / 4, 1 / 12, 0, 1 / 16])
    assert row_weights("dr_grpo", lengths, 10) == pytest.approx([1 / 40] * 4)
    assert row_weights("dapo", lengths, 10) == pytest.approx([1 / 8] * 4)


def test_the_clip_takes_tokens_out_of_the_gradient_on_the_far_side_only():
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5]).requires_grad_()
    inputs = LossInputs(logprobs, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4))
    outputs = clipped_loss(inputs, epsilon=0.2)
    outputs.loss.backward()
    # Up and wanted up, or down and wanted down, by more than epsilon: nothing more to gain.
    assert [g == 0 for g in logprobs.grad.tolist()] == [True, False, False, True]
    assert outputs.clipped.item() == 2


def gradient(policy, rows, loss_type, batch_size):
    """The gradient of one step, as the loop accumulates it."""
    advantages = compute_advantages(rows).values
    weights = row_weights(loss_type, [r.num_sampled for r in rows], 64)
    policy.model.zero_grad()
    for batch in microbatches(rows, batch_size):
        scores = policy.score([rows[i] for i in batch], temperature=1.0)
        lengths = torch.tensor([rows[i].num_sampled for i in batch])
        inputs = LossInputs(
            scores.logprobs,
            scores.logprobs.detach(),
            torch.tensor([advantages[i] for i in batch]).repeat_interleave(lengths),
            torch.tensor([weights[i] for i in batch]).repeat_interleave(lengths),
        )
        clipped_loss(inputs, 0.2).loss.backward()
    return torch.cat([p.grad.flatten().clone() for p in policy.trainable.values()])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("peft", [False, True])
def test_gradient_does_not_depend_on_microbatches_padding_or_order(qwen2, make_policy, random_rows, loss_type, peft):
    policy = make_policy(qwen2, peft=peft)
    rows = random_rows(12)
    whole = gradient(policy, rows, loss_type, 12)
    assert whole.norm() > 0
    for batch_size in (1, 5):
        assert (gradient(policy, rows, loss_type, batch_size) - whole).norm() / whole.norm() < 1e-4
    assert (gradient(policy, rows[::-1], loss_type, 4) - whole).norm() / whole.norm() < 1e-4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_leaving_out_zero_signal_rows_changes_nothing(qwen2, make_policy, random_rows, loss_type):
    policy = make_policy(qwen2)
    rows = random_rows(8)
    rows = [r if r.group == "g0" else type(r)(**{**vars(r), "reward": 1.0}) for r in rows]
    whole = gradient(policy, rows, loss_type, 8)
    advantages = compute_advantages(rows).values
    weights = row_weights(loss_type, [r.num_sampled for r in rows], 64)
    kept = [i for i, a in enumerate(advantages) if a]
    assert len(kept) == 4
    policy.model.zero_grad()
    lengths = torch.tensor([rows[i].num_sampled for i in kept])
    logprobs = policy.score([rows[i] for i in kept], 1.0).logprobs
    clipped_loss(
        LossInputs(
            logprobs,
            logprobs.detach(),
            torch.tensor([advantages[i] for i in kept]).repeat_interleave(lengths),
            torch.tensor([weights[i] for i in kept]).repeat_interleave(lengths),
        ),
        0.2,
    ).loss.backward()
    part = torch.cat([p.grad.flatten() for p in policy.trainable.values()])
    assert (part - whole).norm() / whole.norm() < 1e-5


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_an_advantage_moves_its_tokens_log_probability_its_way(qwen2, make_policy, random_rows, direction):
    policy = make_policy(qwen2)
    row = random_rows(1)[0]
    optimizer = torch.optim.AdamW(policy.trainable.values(), lr=1e-4)
    before = policy.score([row], 1.0).logprobs
    token = 2
    advantages = torch.zeros(len(before))
    advantages[token] = direction
    clipped_loss(LossInputs(before, before.detach(), advantages, torch.ones(len(before))), 0.2).loss.backward()
    optimizer.step()
    after = policy.score([row], 1.0).logprobs
    assert (after[token] - before[token]).item() * direction > 0
