import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.algorithm.kl import estimate_kl
from plumbob.trainer.algorithm.losses import LOSSES, LossInputs, Objective, policy_loss, row_weights
from plumbob.trainer.config.train import TrainConfig

LOSS_TYPES = tuple(LOSSES)
ESTIMATORS = ["k2", "k3"]


def objective(loss_type, **settings) -> Objective:
    return Objective(loss_type, **{"epsilon": 0.2, "epsilon_high": 0.2, **settings})


def inputs(logprobs, old_logprobs, advantages, **others) -> LossInputs:
    """Of one row and weights 1, unless told."""
    count = len(logprobs)
    defaults = {"weights": torch.ones(count), "rows": torch.zeros(count, dtype=torch.int64)}
    return LossInputs(logprobs, old_logprobs, advantages, **{**defaults, "corrections": torch.ones(count), **others})


# --- the reduction, as weights --------------------------------------------------------------------------------------


def test_weights_are_the_papers_reductions():
    lengths = [1, 3, 0, 4]
    for loss_type in ("grpo", "gspo"):
        assert row_weights(loss_type, lengths, 10) == pytest.approx([1 / 4, 1 / 12, 0, 1 / 16])
    assert row_weights("dr_grpo", lengths, 10) == pytest.approx([1 / 40, 1 / 40, 0, 1 / 40])
    for loss_type in ("bnpo", "dapo", "cispo"):
        assert row_weights(loss_type, lengths, 10) == pytest.approx([1 / 8, 1 / 8, 0, 1 / 8])


def test_minibatches_of_a_step_share_its_tokens_in_dapo_only():
    whole = {"step_tokens": 20, "num_minibatches": 2}
    for loss_type in ("dapo", "cispo"):
        assert row_weights(loss_type, [1, 4], 10, **whole) == pytest.approx([1 / 10] * 2)
    assert row_weights("bnpo", [1, 4], 10, **whole) == pytest.approx([1 / 5] * 2)
    for loss_type in ("grpo", "gspo", "dr_grpo"):
        assert row_weights(loss_type, [1, 4], 10, **whole) == row_weights(loss_type, [1, 4], 10)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.sampled_from(LOSS_TYPES))
def test_masking_a_row_leaves_the_others_alone_where_rows_are_counted(lengths, loss_type):
    weights = row_weights(loss_type, lengths, 50)
    assert [w == 0 for w in weights] == [length == 0 for length in lengths]
    total = sum(w * length for w, length in zip(weights, lengths, strict=True))
    if loss_type in ("grpo", "gspo"):
        assert total == pytest.approx(sum(length > 0 for length in lengths) / len(lengths))
    if loss_type in ("bnpo", "dapo", "cispo"):
        assert total == pytest.approx(1.0 if any(lengths) else 0.0)
    if loss_type in ("grpo", "gspo", "dr_grpo"):
        assert row_weights(loss_type, [0, *lengths[1:]], 50)[1:] == weights[1:]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_rows_have_no_weights(loss_type):
    assert row_weights(loss_type, [], 10) == []


# --- the objective, token by token ----------------------------------------------------------------------------------

# Ratios 1.5, 0.5, 1.5, 0.5 with advantages 1, -1, -1, 1: beyond the bounds where there is nothing more to gain, and on
# the side where there is.
RATIOS = torch.tensor([1.5, 0.5, 1.5, 0.5])
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0])


def ratio_case(**others) -> LossInputs:
    logprobs = torch.log(RATIOS * 0.1).requires_grad_()
    return inputs(logprobs, torch.full((4,), math.log(0.1)), SIGNS, **others)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo", "bnpo", "dapo"])
def test_golden_clipping_acts_on_the_far_side_only(loss_type):
    case = ratio_case()
    outputs = policy_loss(case, objective(loss_type))
    assert outputs.loss.item() == pytest.approx(-(1.2 - 0.8 - 1.5 + 0.5))
    outputs.loss.backward()
    assert case.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 1.5, -0.5])
    assert (outputs.clipped_low.item(), outputs.clipped_high.item()) == (1, 1)


def test_clip_higher_moves_the_upper_bound_alone():
    case = ratio_case()
    outputs = policy_loss(case, objective("dapo", epsilon_high=0.6))
    outputs.loss.backward()
    assert case.logprobs.grad.tolist() == pytest.approx([-1.5, 0.0, 1.5, -0.5])
    assert (outputs.clipped_low.item(), outputs.clipped_high.item()) == (1, 0)


def test_golden_cispo_caps_the_weight_of_a_gradient_and_drops_none():
    # 1 + epsilon_high is the cap (arXiv:2506.13585, eq. 5), and there is no lower bound.
    case = ratio_case()
    outputs = policy_loss(case, objective("cispo"))
    outputs.loss.backward()
    assert case.logprobs.grad.tolist() == pytest.approx([-1.2, 0.5, 1.2, -0.5])
    assert outputs.loss.item() == pytest.approx((case.logprobs.grad * case.logprobs.detach()).sum().item())
    assert (outputs.clipped_low.item(), outputs.clipped_high.item()) == (0, 2)


def test_gspo_clips_rows_and_not_tokens():
    # Row 0's ratios 1.5 and 1 / 1.5 cancel: no token of it is clipped. Row 1's geometric mean is 1.5: all of it is.
    up = math.log(1.5)
    logprobs = torch.tensor([up, up, -up, up]).requires_grad_()
    case = inputs(logprobs, torch.zeros(4), torch.ones(4), rows=torch.tensor([0, 1, 0, 1]))
    outputs = policy_loss(case, objective("gspo"))
    outputs.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.0, 0.0, -1.0, 0.0])
    assert outputs.clipped_high.item() == 2
    assert outputs.loss.item() == pytest.approx(-(1 + 1 + 1.2 + 1.2))


def random_tokens(seed: int, count: int = 24, rows: int = 5) -> LossInputs:
    """Tokens of several rows in no order, with one advantage per row; the policy has moved by about 0.2 a token."""
    g = torch.Generator().manual_seed(seed)
    of = torch.cat([torch.arange(rows), torch.randint(rows, (count - rows,), generator=g)])
    old = -torch.rand(count, generator=g) * 3
    return LossInputs(
        logprobs=(old + 0.2 * torch.randn(count, generator=g)).requires_grad_(),
        old_logprobs=old,
        advantages=torch.randn(rows, generator=g)[of],
        weights=torch.tensor(row_weights("gspo", torch.bincount(of).tolist(), 10))[of],
        rows=of,
        corrections=torch.ones(count),
        ref_logprobs=old + 0.2 * torch.randn(count, generator=g),
    )


@pytest.mark.parametrize("seed", range(5))
def test_gspo_is_the_papers_sequence_objective(seed):
    # arXiv:2507.18071, eq. 5-7, written down row by row.
    case = random_tokens(seed)
    outputs = policy_loss(case, objective("gspo"))
    (ours,) = torch.autograd.grad(outputs.loss, case.logprobs)
    terms = []
    for row in case.rows.unique():
        mine = case.rows == row
        s = ((case.logprobs - case.old_logprobs)[mine].sum() / mine.sum()).exp()
        a = case.advantages[mine][0]
        terms.append(torch.minimum(s * a, s.clamp(0.8, 1.2) * a))
    reference = -torch.stack(terms).mean()
    (theirs,) = torch.autograd.grad(reference, case.logprobs)
    assert outputs.loss.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-5)


@given(st.integers(0, 1000), st.sampled_from(LOSS_TYPES), st.sampled_from(ESTIMATORS))
def test_on_policy_every_loss_is_reinforce_with_its_weights(seed, loss_type, estimator):
    case = random_tokens(seed)
    corrections = torch.rand(24, generator=torch.Generator().manual_seed(seed))
    case = dataclasses.replace(case, old_logprobs=case.logprobs.detach(), corrections=corrections)
    settings = {"kl_beta": 0.0, "kl_estimator": estimator}
    (gradient,) = torch.autograd.grad(policy_loss(case, objective(loss_type, **settings)).loss, case.logprobs)
    torch.testing.assert_close(gradient, -case.weights * case.advantages * corrections)


@given(st.integers(0, 1000), st.sampled_from(LOSS_TYPES), st.randoms())
def test_tokens_may_come_in_any_order(seed, loss_type, random):
    case = random_tokens(seed)
    order = list(range(24))
    random.shuffle(order)
    shuffled = LossInputs(**{f.name: getattr(case, f.name)[order] for f in dataclasses.fields(case)})
    what = objective(loss_type, kl_beta=0.1)
    before, after = policy_loss(case, what), policy_loss(shuffled, what)
    for field in dataclasses.fields(before):
        torch.testing.assert_close(getattr(after, field.name), getattr(before, field.name), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("distance", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_distance_between_policies_makes_the_gradient_infinite(loss_type, distance, advantage):
    # In float32 the ratio would be inf, and inf times the gradient 0 of a clipped term is NaN.
    old = torch.tensor([-1.0, -1.0])
    logprobs = torch.tensor([-1.0 + distance, -1.0]).requires_grad_()
    case = inputs(logprobs, old, torch.full((2,), advantage), rows=torch.arange(2), ref_logprobs=old)
    outputs = policy_loss(case, objective(loss_type, kl_beta=0.1, kl_estimator="k3"))
    outputs.loss.backward()
    assert torch.isfinite(outputs.loss) and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_microbatch_without_sampled_tokens(loss_type):
    empty = torch.zeros(0)
    case = inputs(empty.requires_grad_(), empty, empty, ref_logprobs=empty)
    outputs = policy_loss(case, objective(loss_type, kl_beta=0.1))
    assert (outputs.loss.item(), outputs.kl.item()) == (0.0, 0.0)


def test_an_objective_has_its_loss_types_bounds_and_no_kl_where_the_reward_has_it():
    def of(**settings):
        return TrainConfig(**settings).objective()

    assert of() == Objective("dr_grpo", 0.2, 0.2)
    assert of(loss_type="gspo") == Objective("gspo", 3e-4, 4e-4)  # arXiv:2507.18071, sec. 5.1
    assert of(loss_type="cispo") == Objective("cispo", 0.2, 4.0)
    assert of(loss_type="dapo", epsilon_high=0.28) == Objective("dapo", 0.2, 0.28)
    assert of(kl_beta=0.1) == Objective("dr_grpo", 0.2, 0.2, 0.1, "k2")
    assert of(kl_beta=0.1, kl_estimator="k3").kl_estimator == "k3"


# --- KL to the reference --------------------------------------------------------------------------------------------


def expectations(seed: int, estimator: str):
    """By enumeration, in float64: KL(p || q), KL(q || p), E_p[estimate], and the gradients of all with respect to p's
    logits; the estimate's is E_p[grad estimate], as a loss over samples from p has it."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    log_q = torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)
    log_p = logits.log_softmax(0)
    p = log_p.exp()
    estimates = estimate_kl(log_p, log_q, estimator)
    scalars = {
        "forward": (p * (log_p - log_q)).sum(),
        "backward": (log_q.exp() * (log_q - log_p)).sum(),
        "in_loss": (p.detach() * estimates).sum(),
        "in_reward": (p * estimates.detach()).sum(),  # the score function: E_p[estimate * grad log p]
    }
    gradients = {name: torch.autograd.grad(v, logits, retain_graph=True)[0] for name, v in scalars.items()}
    return scalars, gradients


@pytest.mark.parametrize("seed", range(3))
def test_k2_has_the_right_gradient_in_the_loss_and_not_in_the_reward(seed):
    scalars, gradients = expectations(seed, "k2")
    torch.testing.assert_close(gradients["in_loss"], gradients["forward"])
    assert (gradients["in_reward"] - gradients["forward"]).norm() > 0.1 * gradients["forward"].norm()
    assert abs(scalars["in_loss"] - scalars["forward"]) > 0.01 * scalars["forward"]


@pytest.mark.parametrize("seed", range(3))
def test_k3_is_right_in_value_and_pulls_towards_the_other_divergence(seed):
    scalars, gradients = expectations(seed, "k3")
    torch.testing.assert_close(scalars["in_loss"], scalars["forward"])
    torch.testing.assert_close(gradients["in_loss"], gradients["backward"])
    assert (gradients["in_loss"] - gradients["forward"]).norm() > 0.1 * gradients["forward"].norm()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("drawn_from", ["the policy", "an older one"])
def test_k2_in_the_loss_has_the_right_gradient_wherever_tokens_were_drawn(loss_type, drawn_from):
    # A step over six tokens, each as often as it is drawn: E_old[gradient of the loss], by enumeration.
    g = torch.Generator().manual_seed(0)
    logits, reference, older = torch.randn(3, 6, generator=g, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), reference.log_softmax(0)
    old = log_p.detach() if drawn_from == "the policy" else older.log_softmax(0)
    none = torch.zeros(6, dtype=torch.float64)
    case = inputs(log_p, old, none, weights=old.exp(), rows=torch.arange(6), ref_logprobs=log_q)
    outputs = policy_loss(case, objective(loss_type, kl_beta=1.0, kl_estimator="k2"))
    (gradient,) = torch.autograd.grad(outputs.loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_divergence_of_a_policy_from_itself_is_zero(estimator):
    logprobs = -torch.rand(20).requires_grad_()
    estimate = estimate_kl(logprobs, logprobs.detach(), estimator)
    assert estimate.abs().max() == 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_in_the_loss_has_the_token_weights_and_no_correction(loss_type, estimator):
    case = random_tokens(0)
    case = dataclasses.replace(case, corrections=torch.rand(24))
    without = policy_loss(case, objective(loss_type, kl_estimator=estimator))
    with_kl = policy_loss(case, objective(loss_type, kl_beta=0.3, kl_estimator=estimator))
    estimates = estimate_kl(case.logprobs, case.ref_logprobs, estimator)
    ratios = (case.logprobs - case.old_logprobs).exp()
    added = 0.3 * (case.weights * ratios * estimates).sum()
    assert (with_kl.loss - without.loss).item() == pytest.approx(added.item(), abs=1e-6)
    assert with_kl.kl.item() == without.kl.item() == pytest.approx(estimates.sum().item(), abs=1e-6)


# --- with a real model ----------------------------------------------------------------------------------------------


def gradient(policy, rows, what: Objective, batches, advantages=None):
    """The gradient of one optimizer step on rows cut into `batches` (lists of indices), off-policy, with KL."""
    advantages = advantages or compute_advantages(rows).values
    weights = row_weights(what.loss_type, [r.num_sampled for r in rows], 64)
    policy.model.zero_grad()
    for batch in batches:
        logprobs = policy.score([rows[i] for i in batch], temperature=1.0).logprobs
        of = torch.arange(len(batch)).repeat_interleave(torch.tensor([rows[i].num_sampled for i in batch]))
        noise = torch.cat([drift(rows[i]) for i in batch])
        policy_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() + noise[:, 0],
                advantages=torch.tensor([advantages[i] for i in batch])[of],
                weights=torch.tensor([weights[i] for i in batch])[of],
                rows=of,
                corrections=noise[:, 1].exp(),
                ref_logprobs=logprobs.detach() + noise[:, 2],
            ),
            what,
        ).loss.backward()
    return torch.cat([p.grad.flatten().clone() for p in policy.trainable.values() if p.grad is not None])


def drift(row):
    """What policies and engine differ by in a row's tokens: a property of the row, wherever it is computed. [n, 3]."""
    return 0.2 * torch.randn(row.num_sampled, 3, generator=torch.Generator().manual_seed(sum(row.token_ids)))


def difference(one, other) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("peft", [False, True])
def test_gradient_does_not_depend_on_microbatches_padding_or_order(qwen2, make_policy, random_rows, loss_type, peft):
    policy = make_policy(qwen2, peft=peft)
    rows = random_rows(12)  # multi-turn: context and sampled spans in turn
    what = objective(loss_type, kl_beta=0.05)
    whole = gradient(policy, rows, what, [range(12)])
    assert whole.norm() > 0
    for splits in ([[i] for i in range(12)], [[7, 3, 0, 11, 5], [2, 1, 10], [4, 6, 8, 9]]):
        assert difference(gradient(policy, rows, what, splits), whole) < 1e-4
    assert difference(gradient(policy, rows[::-1], what, [range(0, 12, 2), range(1, 12, 2)]), whole) < 1e-4


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_leaving_out_zero_signal_rows_changes_nothing(qwen2, make_policy, random_rows, loss_type):
    policy = make_policy(qwen2)
    rows = [r if r.group == "g0" else dataclasses.replace(r, reward=1.0) for r in random_rows(8)]
    advantages = compute_advantages(rows)
    assert advantages.with_signal == {"g0"}
    kept = [i for i, row in enumerate(rows) if row.group in advantages.with_signal]
    whole = gradient(policy, rows, objective(loss_type), [range(8)])
    assert difference(gradient(policy, rows, objective(loss_type), [kept]), whole) < 1e-5


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("direction", [1.0, -1.0])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_an_advantage_moves_its_tokens_log_probability_its_way(
    qwen2, make_policy, random_rows, loss_type, direction, optimizer
):
    policy = make_policy(qwen2)
    row = random_rows(1)[0]
    steps = optimizer(policy.trainable.values(), lr=1e-4)
    before = policy.score([row], 1.0).logprobs
    token = 2
    advantages = torch.zeros(len(before))
    advantages[token] = direction
    policy_loss(inputs(before, before.detach(), advantages), objective(loss_type)).loss.backward()
    steps.step()
    after = policy.score([row], 1.0).logprobs
    assert (after[token] - before[token]).item() * direction > 0
