"""What the policy computes: rows packed, alone and padded; its gradient; its reference; its files."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from plumbob.rollout import Sample
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.policy.loading import cast_weights, load_model
from plumbob.trainer.policy.packing import pack
from plumbob.trainer.policy.policy import Policy
from transformers import AutoModelForCausalLM


def plain_twin(policy: Policy):
    """The same weights in transformers' own model, with its own attention."""
    twin = AutoModelForCausalLM.from_config(policy.model.config, dtype=torch.float32, attn_implementation="sdpa")
    twin.load_state_dict(policy.model.state_dict())
    return twin


def reference(twin, row: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the sampled tokens in float64, by the definition."""
    with torch.no_grad():
        logits = twin.double()(torch.tensor([row.token_ids])).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    where = [t for t, m in enumerate(row.loss_mask) if m]
    return (
        torch.stack([logprobs[t - 1, row.token_ids[t]] for t in where]),
        torch.stack([entropies[t - 1] for t in where]),
    )


def gradient(policy: Policy) -> torch.Tensor:
    grads = torch.cat([p.grad.flatten() for p in policy.trainable.values()])
    policy.model.zero_grad()
    return grads


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def row_of(ids: list[int], mask: list[bool]) -> Sample:
    return Sample(ids, mask, [0.0] * len(ids), 1.0, "g", "agent_completed", False)


def move(policy: Policy, size: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_scores_equal_a_float64_reference(model, make_policy, random_rows, temperature):
    policy = make_policy(model)
    rows = random_rows(5)
    scores = policy.score(rows, temperature)
    twin = plain_twin(policy)
    expected = [reference(twin, row, temperature) for row in rows]
    assert torch.allclose(scores.logprobs.double(), torch.cat([e[0] for e in expected]), atol=1e-5)
    assert torch.allclose(scores.entropies.double(), torch.cat([e[1] for e in expected]), atol=1e-5)


def test_packed_rows_score_as_padded_ones_with_an_attention_mask(model, make_policy, random_rows):
    """Against transformers' own forward pass, padded on the left as others train; the gradient too."""
    policy = make_policy(model)
    rows = random_rows(5)
    packed = policy.score(rows, 1.0).logprobs
    packed.sum().backward()
    ours = {name: p.grad.clone() for name, p in policy.trainable.items()}

    twin = plain_twin(policy)
    width = max(len(r.token_ids) for r in rows)
    gaps = [width - len(r.token_ids) for r in rows]
    ids = torch.tensor([[0] * gap + r.token_ids for gap, r in zip(gaps, rows, strict=True)])
    attention_mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = twin(ids, attention_mask=attention_mask, position_ids=positions).logits
    loss_mask = torch.tensor([[False] * gap + r.loss_mask for gap, r in zip(gaps, rows, strict=True)])
    logprobs = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0][loss_mask[:, 1:]]
    logprobs.sum().backward()
    assert torch.allclose(packed, logprobs, atol=1e-5)
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    assert relative(*(torch.cat([g[n].flatten() for n in theirs]) for g in (ours, theirs))) < 1e-4


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=8),
    max_tokens=st.integers(5, 120),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=15, deadline=None)
def test_any_packing_gives_the_scores_and_the_gradient_of_rows_alone(shared_policy, lengths, max_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = [row_of(torch.randint(500, (n,), generator=generator).tolist(), [False] + [True] * (n - 1)) for n in lengths]
    alone = [shared_policy.score([row], 1.0).logprobs for row in rows]
    torch.cat(alone).sum().backward()
    expected = gradient(shared_policy)
    for indices in pack(lengths, max_tokens):
        scores = shared_policy.score([rows[i] for i in indices], 1.0).logprobs
        scores.sum().backward()
        assert torch.allclose(scores, torch.cat([alone[i] for i in indices]), atol=1e-5)
    assert relative(gradient(shared_policy), expected) < 1e-4


@pytest.fixture(scope="module")
def shared_policy():
    return Policy(load_model("tiny"), TrainConfig(), torch.device("cpu"))


def spans(row: Sample) -> list[range]:
    """The unsampled stretches of a row."""
    edges = [t for t in range(1, len(row.token_ids)) if row.loss_mask[t] != row.loss_mask[t - 1]]
    bounds = [0, *edges, len(row.token_ids)]
    return [range(a, b) for a, b in itertools.pairwise(bounds) if not row.loss_mask[a]]


def test_prompt_and_tool_results_matter_to_what_follows(model, make_policy):
    """The predecessor passed its loss mask as the attention mask: both differences were exactly 0.0 there."""
    policy = make_policy(model)
    ids = torch.randint(640, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    row = row_of(ids, [False] * 10 + [True] * 8 + [False] * 10 + [True] * 12)
    before = policy.score([row], 1.0).logprobs
    prompt, tool = spans(row)
    for span, first_affected in ((prompt, 0), (tool, 8)):
        other = list(ids)
        for t in span:
            other[t] = (other[t] + 17) % 640
        after = policy.score([row_of(other, row.loss_mask)], 1.0).logprobs
        assert (after[first_affected:] - before[first_affected:]).abs().min() > 1e-6
        assert torch.equal(after[:first_affected], before[:first_affected])


def test_what_stands_in_other_rows_never_matters(model, make_policy, random_rows):
    """Neighbours of the same lengths but of other ids leave not a bit changed, in scores and gradient of the row."""
    policy = make_policy(model)
    rows = random_rows(6)
    n = rows[0].num_sampled
    before = policy.score(rows, 1.0).logprobs[:n]
    before.sum().backward()
    expected = gradient(policy)
    others = [row_of([(t + 31) % 640 for t in r.token_ids], r.loss_mask) for r in rows[1:]]
    after = policy.score([rows[0], *others], 1.0).logprobs[:n]
    after.sum().backward()
    assert torch.equal(before, after)
    assert relative(gradient(policy), expected) < 1e-6


@pytest.mark.parametrize("peft", [False, True])
def test_checkpointing_does_not_change_the_gradient(qwen2, make_policy, random_rows, peft):
    rows = random_rows(4)
    grads = []
    for checkpointing in (False, True):
        policy = make_policy(copy_of(qwen2), peft=peft, gradient_checkpointing=checkpointing)
        calls = []
        policy.model.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        policy.score(rows, 1.0).logprobs.sum().backward()
        assert len(calls) == 1 + checkpointing
        grads.append(gradient(policy))
    assert torch.allclose(grads[0], grads[1], rtol=1e-5, atol=1e-6) and grads[0].any()


def copy_of(model):
    twin = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    return twin


def test_dropout_is_the_adapters_alone_and_on_only_with_gradients(qwen2, make_policy, random_rows):
    qwen2.config.attention_dropout = 0.5
    rows = random_rows(3)
    for dropout in (0.0, 0.5):
        policy = make_policy(copy_of(qwen2), peft=True, lora_dropout=dropout)
        move(policy)
        policy.model.train()  # as a caller may leave it
        with torch.no_grad():
            assert torch.equal(policy.score(rows, 1.0).logprobs, policy.score(rows, 1.0).logprobs)
        same = torch.equal(policy.score(rows, 1.0).logprobs, policy.score(rows, 1.0).logprobs)
        assert same == (dropout == 0.0)


@pytest.mark.parametrize("peft", [False, True])
def test_the_reference_is_the_initial_policy(model, make_policy, random_rows, peft):
    policy = make_policy(model, peft=peft, kl_beta=0.1)
    rows = random_rows(4)
    with torch.no_grad():
        initial = policy.score(rows, 1.0).logprobs
        assert torch.equal(policy.reference_logprobs(rows, 1.0), initial)
        move(policy)
        moved = policy.score(rows, 1.0).logprobs
        assert (moved - initial).abs().max() > 1e-2
        assert torch.equal(policy.reference_logprobs(rows, 1.0), initial)
        assert torch.equal(policy.score(rows, 1.0).logprobs, moved)


def test_full_weights_keep_no_reference_that_nobody_asked_for(qwen2, make_policy, random_rows):
    with pytest.raises(RuntimeError, match="kl_beta"):
        make_policy(qwen2).reference_logprobs(random_rows(1), 1.0)


def test_a_row_without_sampled_tokens_scores_nothing(qwen2, make_policy):
    row = Sample([1, 2, 3], [False] * 3, [0.0] * 3, 0.0, "g", "max_total_tokens", True)
    assert make_policy(qwen2).score([row], 1.0).logprobs.shape == (0,)


def test_an_output_embedding_with_a_bias_is_scored_with_it(qwen2, make_policy, random_rows):
    qwen2.lm_head.bias = torch.nn.Parameter(torch.randn(640))
    policy = make_policy(qwen2)
    row = random_rows(1)[0]
    logprobs = policy.model(torch.tensor([row.token_ids])).logits.log_softmax(-1)[0]
    expected = [logprobs[t - 1, row.token_ids[t]].item() for t, m in enumerate(row.loss_mask) if m]
    scores = policy.score([row], 1.0).logprobs
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    scores.sum().backward()
    assert qwen2.lm_head.bias.grad.any()


def test_lora_trains_the_adapter_only_and_shares_the_frozen_weights_with_the_engine(qwen2, make_policy):
    policy = make_policy(qwen2, peft=True, lora_r=4)
    assert policy.trainable and all("lora_" in name for name in policy.trainable)
    twin = dict(policy.engine_model().named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert (twin[name].data_ptr() == parameter.data_ptr()) == ("lora_" not in name)


def test_frozen_matrices_are_bfloat16_only_where_that_is_exact(qwen2, make_policy):
    with torch.no_grad():
        for name, parameter in qwen2.named_parameters():
            if "mlp" in name or "embed" in name:
                parameter.copy_(parameter.bfloat16())
    policy = make_policy(qwen2, peft=True, bf16=True)
    twin = dict(policy.engine_model().named_parameters())
    for name, parameter in policy.model.named_parameters():
        exact = (
            "mlp" in name or name.endswith("bias") or "embed" in name
        ) and "lora_" not in name  # fresh biases are 0
        assert parameter.dtype == (torch.bfloat16 if exact else torch.float32)
        assert twin[name].dtype == torch.bfloat16
        assert (twin[name].data_ptr() == parameter.data_ptr()) == exact


def test_full_training_shares_nothing_with_the_engine(qwen2, make_policy):
    policy = make_policy(qwen2)
    twin = dict(policy.engine_model().named_parameters())
    assert not {p.data_ptr() for p in twin.values()} & {p.data_ptr() for p in policy.model.parameters()}


@pytest.mark.parametrize("peft", [False, True])
def test_restore_loads_what_save_wrote(qwen2, make_policy, random_rows, tmp_path, peft):
    policy = make_policy(qwen2, peft=peft, kl_beta=0.1)
    rows = random_rows(3)
    policy.reference_logprobs(rows, 1.0)
    move(policy)
    trained, anchor = policy.score(rows, 1.0).logprobs.detach(), policy.reference_logprobs(rows, 1.0)
    policy.save(tmp_path / "model")
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.zero_()
    assert not torch.allclose(policy.score(rows, 1.0).logprobs, trained, atol=1e-3)
    policy.restore(tmp_path / "model")
    assert torch.equal(policy.score(rows, 1.0).logprobs, trained)
    assert torch.equal(policy.reference_logprobs(rows, 1.0), anchor)


@pytest.mark.parametrize("peft", [False, True])
def test_the_final_folder_loads_as_a_plain_model_and_as_an_adapter(model, make_policy, random_rows, tmp_path, peft):
    base = copy_of(model)
    policy = make_policy(model, peft=peft)
    move(policy)
    rows = random_rows(3)
    expected = policy.score(rows, 1.0).logprobs.detach()
    policy.save_final(tmp_path / "final")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert loaded.dtype == torch.float32 and not hasattr(loaded, "peft_config")
    assert loaded.config._attn_implementation != policy.model.config._attn_implementation
    models = [loaded]
    assert (tmp_path / "final" / "adapter").is_dir() == peft
    if peft:
        models.append(PeftModel.from_pretrained(base, tmp_path / "final" / "adapter"))
    for other in models:
        with torch.no_grad():
            logprobs = [other(torch.tensor([r.token_ids])).logits.log_softmax(-1)[0] for r in rows]
        values = [
            lp[t - 1, r.token_ids[t]].item()
            for lp, r in zip(logprobs, rows, strict=True)
            for t, m in enumerate(r.loss_mask)
            if m
        ]
        assert values == pytest.approx(expected.tolist(), abs=1e-4)


def test_one_step_up_the_gradient_of_a_token_makes_it_likelier_and_down_less_likely(model, make_policy, random_rows):
    policy = make_policy(model)
    row = random_rows(1)[0]
    for sign in (1.0, -1.0):
        optimizer = torch.optim.AdamW(policy.trainable.values(), lr=1e-3, weight_decay=0.0)
        before = policy.score([row], 1.0).logprobs[3]
        (-sign * before).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert sign * (policy.score([row], 1.0).logprobs[3] - before).item() > 0


def test_rotary_frequencies_stay_float32_in_a_bfloat16_engine(make_policy):
    """Cast with the weights they are off by up to 0.4%: at position 2,000 that turned queries and keys by radians."""
    policy = make_policy(load_model("tiny"), bf16=True)
    for model in (policy.engine_model(), cast_weights(load_model("tiny"), torch.bfloat16)):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        buffers = dict(model.named_buffers())
        frequencies = {name: b for name, b in buffers.items() if "inv_freq" in name}
        assert frequencies
        for name, buffer in frequencies.items():
            assert torch.equal(buffer, dict(load_model("tiny").named_buffers())[name])
