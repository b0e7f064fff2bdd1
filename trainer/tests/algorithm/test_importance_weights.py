import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.trainer.algorithm.importance_weights import importance_corrections
from plumbob.trainer.config.doubtful_settings import sampling_warnings
from plumbob.trainer.config.train import TrainConfig

MODES = ["none", "token_truncate", "sequence_mask"]

# Two rows, interleaved: row 0 has ratios 4, 1 / 4 and 1, row 1 has 3 and 3.
RATIOS = torch.tensor([4.0, 3.0, 0.25, 3.0, 1.0])
ROWS = torch.tensor([0, 1, 0, 1, 0])


def mean_of(result):
    """The mean importance weight before any is truncated or masked, as `correction/mean_weight` has it."""
    return result.ratio_sum.item() / len(result.weights)


def corrected(mode, ratios=RATIOS, rows=ROWS, cap=2.0):
    sampled = -torch.rand(len(ratios), generator=torch.Generator().manual_seed(0)) - 2
    return importance_corrections(sampled + ratios.log(), sampled, rows, mode, cap)


@pytest.mark.parametrize(
    ("mode", "weights", "mean", "truncated", "masked"),
    [
        ("none", [1, 1, 1, 1, 1], 11.25 / 5, 0, 0),
        ("token_truncate", [2, 2, 0.25, 2, 1], 11.25 / 5, 3, 0),
        # Geometric means: 1 in row 0, 3 in row 1.
        ("sequence_mask", [1, 0, 1, 0, 1], 9 / 5, 0, 2),
    ],
)
def test_golden_weights(mode, weights, mean, truncated, masked):
    result = corrected(mode)
    assert result.weights.tolist() == pytest.approx(weights)
    assert mean_of(result) == pytest.approx(mean)
    assert (result.truncated.item(), result.masked.item()) == (truncated, masked)


@pytest.mark.parametrize("mode", MODES)
def test_equal_distributions_need_no_correction(mode):
    result = corrected(mode, torch.ones(5))
    assert result.weights.tolist() == pytest.approx([1] * 5) and mean_of(result) == pytest.approx(1)
    assert result.masked.item() == 0


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens(mode):
    result = corrected(mode, torch.ones(0), torch.zeros(0, dtype=torch.int64))
    assert len(result.weights) == 0 and (result.ratio_sum.item(), result.masked.item()) == (0, 0)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.sampled_from(MODES), st.floats(1, 5), st.data())
def test_weights_are_bounded_and_do_not_depend_on_microbatches_of_whole_rows(logs, mode, cap, data):
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(logs), max_size=len(logs))))
    ratios = torch.tensor(logs).exp()
    whole = importance_corrections(ratios.log(), torch.zeros(len(logs)), rows, mode, cap)
    assert whole.weights.max() <= cap * (1 + 1e-6)
    if mode.endswith("mask"):
        kept = whole.weights[whole.weights > 0]
        assert len(kept) == len(logs) - whole.masked.item()
        assert bool((kept >= 1 / cap * (1 - 1e-6)).all())
    for half in (rows < 2, rows >= 2):
        part = importance_corrections(ratios[half].log(), torch.zeros(int(half.sum())), rows[half], mode, cap)
        assert part.weights.tolist() == whole.weights[half].tolist()
        assert part.masked.item() == (part.weights == 0).sum().item()


def test_weights_have_no_gradient():
    logprobs = torch.zeros(5, requires_grad=True)
    assert not importance_corrections(logprobs, torch.zeros(5), ROWS, "token_truncate", 2.0).weights.requires_grad


@pytest.mark.parametrize("tokens", [100, 1000, 8000])
def test_a_rows_length_does_not_decide_whether_it_is_masked(tokens):
    # Noise of 0.02 a token, about what bfloat16 makes. The product of 8,000 such ratios leaves [1/2, 2] in seven rows of
    # ten; a trainer that masks by it drops its longest rollouts (huggingface/trl#5815).
    g = torch.Generator().manual_seed(0)
    noise = 0.02 * torch.randn(200, tokens, generator=g)
    rows = torch.arange(200).repeat_interleave(tokens)
    result = importance_corrections(noise.flatten(), torch.zeros(200 * tokens), rows, "sequence_mask", 1.05)
    assert result.masked.item() == 0 and mean_of(result) == pytest.approx(1, abs=1e-3)
    by_product = (noise.sum(1).abs() > math.log(2)).float().mean().item()
    assert by_product == 0 if tokens == 100 else by_product > (0.15 if tokens == 1000 else 0.6)


def test_a_sampling_setting_that_the_trainer_cannot_follow_is_named_with_its_bias():
    assert sampling_warnings(TrainConfig(temperature=0.7)) == []
    (longer,) = sampling_warnings(TrainConfig(max_tokens=100_000_000))
    assert "no turn can be that long; --loss-type dr_grpo divides by it" in longer
    assert sampling_warnings(TrainConfig(max_tokens=4096, loss_type="grpo")) == []
    warnings = sampling_warnings(TrainConfig(top_p=0.8, top_k=20, min_p=0.1))
    assert [w.split(" samples")[0] for w in warnings] == ["--top-p 0.8", "--top-k 20", "--min-p 0.1"]
    assert all("whole vocabulary" in w and "gradient" in w for w in warnings)


@pytest.mark.parametrize("kept", [0.8, 0.95])
def test_the_mean_weight_shows_a_truncated_sampler(kept):
    # Whatever was cut off, each token's ratio is the share of probability that was kept.
    g = torch.Generator().manual_seed(0)
    logprobs = torch.randn(50, generator=g).log_softmax(0).sort(descending=True).values
    top = logprobs[: int((logprobs.exp().cumsum(0) < kept).sum()) + 1]
    result = importance_corrections(top, top.log_softmax(0), torch.zeros(len(top), dtype=torch.int64), "none", 2.0)
    assert mean_of(result) == pytest.approx(top.exp().sum().item(), rel=1e-5) and mean_of(result) < 1
