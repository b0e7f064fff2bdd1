"""What the doctor measures with --bf16 is the run's, not the rounding's."""

import pytest
import torch
from plumbob.trainer.doctor.probes import gradient, movement


@pytest.mark.slow
def test_scores_in_float32_are_those_of_a_run_without_bf16(subject_of):
    half, whole = subject_of(peft=True, bf16=True), subject_of(peft=True)
    rows = half.drawn.samples[:4]
    exact = torch.cat(whole.score(rows))
    before = torch.cat(half.score(rows))
    with half.run.policy.in_float32():
        same = torch.cat(half.score(rows))
    assert (same - exact).abs().max() < 1e-4 < (before - exact).abs().max()
    assert torch.equal(torch.cat(half.score(rows)), before)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("rate", "cause"), [(1e-6, "learning-rate-too-low"), (3e-3, None)])
def test_rounding_hides_no_rate_that_is_too_low(subject_of, rate, cause):
    """Seen with Qwen2.5-Coder-0.5B at 1e-6: rounding alone seemed to change the policy by 9e-5 nats per token."""
    subject = subject_of(peft=True, bf16=True, learning_rate=rate)
    (found,) = [f for f in movement.probe(subject) if f.check == movement.RATE]
    assert found.cause == cause


@pytest.mark.slow
def test_a_short_step_along_the_gradient_shows_the_gradients_own_slope(subject_of):
    """Seen with the bundled model on lookup: rounding turned the direction of a short step round."""
    subject = subject_of(peft=True, bf16=True)
    rows = [row for row in subject.drawn.samples if row.num_sampled][:4]
    found = gradient.gradient_of(subject, rows, [1.0] * len(rows))
    slope = gradient._slope(subject, rows, found, gradient.SMALL_STEPS[1])
    assert slope == pytest.approx(gradient._expected_slope(subject, rows, gradient.norm_of(found)), rel=0.3)
