import itertools

import pytest
import torch
from plumbob.hub import UserError
from plumbob.rollout import Sample
from plumbob.trainer.models import check_supported
from plumbob.trainer.policy import Policy


def reference(policy: Policy, row: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the sampled tokens in float64, by the definition."""
    model = policy.model.double()
    try:
        with torch.no_grad():
            logits = model(torch.tensor([row.token_ids])).logits[0].double() / temperature
    finally:
        model.float()
    logprobs = torch.log_softmax(logits, dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    where = [t for t, m in enumerate(row.loss_mask) if m]
    return (
        torch.stack([logprobs[t - 1, row.token_ids[t]] for t in where]),
        torch.stack([entropies[t - 1] for t in where]),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_equal_a_float64_reference(model, make_policy, random_rows, temperature):
    policy = make_policy(model)
    rows = random_rows(5)
    scores = policy.score(rows, temperature)
    expected = [reference(policy, row, temperature) for row in rows]
    assert torch.allclose(scores.logprobs.double(), torch.cat([e[0] for e in expected]), atol=1e-5)
    assert torch.allclose(scores.entropies.double(), torch.cat([e[1] for e in expected]), atol=1e-5)


def spans(row: Sample) -> list[range]:
    """The unsampled stretches of a row."""
    edges = [t for t in range(1, len(row.token_ids)) if row.loss_mask[t] != row.loss_mask[t - 1]]
    bounds = [0, *edges, len(row.token_ids)]
    return [range(a, b) for a, b in itertools.pairwise(bounds) if not row.loss_mask[a]]


def test_prompt_and_tool_results_matter_to_what_follows(model, make_policy):
    """The predecessor passed its loss mask as the attention mask: both differences were exactly 0.0 there."""
    policy = make_policy(model)
    ids = torch.randint(640, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    mask = [False] * 10 + [True] * 8 + [False] * 10 + [True] * 12
    row = Sample(ids, mask, [0.0] * 40, 1.0, "g", "agent_completed", False)
    before = policy.score([row], 1.0).logprobs
    prompt, tool = spans(row)
    for span, first_affected in ((prompt, 0), (tool, 8)):
        other = list(ids)
        for t in span:
            other[t] = (other[t] + 17) % 640
        after = policy.score([Sample(other, mask, [0.0] * 40, 1.0, "g", "agent_completed", False)], 1.0).logprobs
        assert (after[first_affected:] - before[first_affected:]).abs().min() > 1e-6
        assert torch.equal(after[:first_affected], before[:first_affected])


def test_scores_do_not_depend_on_neighbours_or_padding(model, make_policy, random_rows):
    policy = make_policy(model)
    rows = random_rows(6)
    together = policy.score(rows, 1.0).logprobs
    alone = torch.cat([policy.score([row], 1.0).logprobs for row in rows])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sliding_window": 64, "use_sliding_window": True}, "attends over a sliding window of 64 tokens"),
        ({"final_logit_softcapping": 30.0}, "rescales its logits (final_logit_softcapping)"),
        ({"logits_scaling": 8.0}, "rescales its logits (logits_scaling)"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "has layers of another kind"),
    ],
)
def test_models_that_would_be_got_wrong_are_refused_by_name(qwen2, settings, message):
    """Each of these passed unnoticed or blamed the weight sync: the engine ignores windows, both ignore scales."""
    check_supported(qwen2, 4096)
    for name, value in settings.items():
        setattr(qwen2.config, name, value)
    with pytest.raises(UserError) as error:
        check_supported(qwen2, 4096)
    assert f"qwen2 {message}" in str(error.value)
    if "sliding_window" in settings:
        check_supported(qwen2, 64)


def test_a_row_without_sampled_tokens_scores_nothing(qwen2, make_policy):
    row = Sample([1, 2, 3], [False] * 3, [0.0] * 3, 0.0, "g", "max_total_tokens", True)
    assert make_policy(qwen2).score([row], 1.0).logprobs.shape == (0,)


def test_lora_trains_the_adapter_only_and_shares_the_frozen_weights_with_the_engine(qwen2, make_policy):
    policy = make_policy(qwen2, peft=True, lora_r=4)
    assert policy.trainable and all("lora_" in name for name in policy.trainable)
    twin = dict(policy.engine_model().named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert (twin[name].data_ptr() == parameter.data_ptr()) == ("lora_" not in name)


def test_full_training_shares_nothing_with_the_engine(qwen2, make_policy):
    policy = make_policy(qwen2)
    twin = dict(policy.engine_model().named_parameters())
    assert not {p.data_ptr() for p in twin.values()} & {p.data_ptr() for p in policy.model.parameters()}


@pytest.mark.parametrize("peft", [False, True])
def test_restore_loads_what_save_wrote(qwen2, make_policy, random_rows, tmp_path, peft):
    policy = make_policy(qwen2, peft=peft)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    rows = random_rows(3)
    trained = policy.score(rows, 1.0).logprobs.detach()
    policy.save(tmp_path / "model")
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.zero_()
    assert not torch.allclose(policy.score(rows, 1.0).logprobs, trained, atol=1e-3)
    policy.restore(tmp_path / "model")
    assert torch.equal(policy.score(rows, 1.0).logprobs, trained)
