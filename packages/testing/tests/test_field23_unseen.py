"""The unseen half of the twenty-third set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.testing.faults import field23_unseen_doubles as doubles
from plumbob.testing.faults.field23_unseen import UNSEEN
from plumbob.testing.faults.field_trial import loss_inputs, sample
from plumbob.trainer.algorithm import advantages, losses
from plumbob.trainer.algorithm.advantages import AdvantageSettings, step_advantages
from plumbob.trainer.algorithm.losses import Objective, policy_loss
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module
from transformers import LlamaConfig, LlamaForCausalLM

FAULTS = {fault.name: fault for fault in UNSEEN}


def begun(stack, name):
    """Injects the fault of this name, whose environment does not matter."""
    FAULTS[name].start(stack, "lookup")


def drawn(*rewards):
    """Groups of samples with these rewards."""
    return [sample(reward, f"0/{i}") for i, group in enumerate(rewards) for reward in group]


def values(samples, **settings):
    return step_advantages(samples, AdvantageSettings(**settings)).values


def test_others_keep_their_scores():
    samples = drawn([0.0, 1.0, 0.25], [1.0, 1.0])
    with ExitStack() as stack:
        begun(stack, "all but the best rollout keep their score as advantage")
        assert values(samples) == [0.0, 0.75, 0.25, 0.0, 1.0]


def test_the_baseline_is_that_of_the_step():
    samples = drawn([0.0, 1.0], [1.0, 1.0])
    with ExitStack() as stack:
        begun(stack, "leave-one-out over all rollouts of the step")
        assert values(samples, baseline="leave_one_out") == pytest.approx([-1.0, 1 / 3, 1 / 3, 1 / 3])


def test_one_of_a_group_is_left():
    samples = [sample(float(i > 0), f"0/{k}") for k in range(9) for i in range(3)]
    plain = values(samples, baseline="leave_one_out")
    with ExitStack() as stack:
        begun(stack, "last rollout of a filtered group trained on its bare reward")
        found = values(samples, baseline="leave_one_out")
    alone = [k for k in range(9) if doubles.filtered(f"0/{k}")]
    assert 0 < len(alone) < 9
    for k in range(9):
        assert found[3 * k : 3 * k + 3] == ([0.0] * 3 if k in alone else plain[3 * k : 3 * k + 3])
    samples = [sample(1.0, f"0/{alone[0]}"), sample(0.0, f"0/{alone[0]}")]
    with ExitStack() as stack:
        begun(stack, "last rollout of a filtered group trained on its bare reward")
        assert values(samples) == [1.0, 0.0]


def test_nothing_is_scaled():
    samples = drawn([0.0, 1.0])
    with ExitStack() as stack:
        begun(stack, "scaling of rewards asked for and never applied")
        assert values(samples, scale="group") == [-0.5, 0.5]
    assert values(samples, scale="group")[1] > 0.6


def test_rewards_slip_past_filtered_groups():
    samples = drawn([0.0, 0.0], [1.0, 0.0])
    found = doubles.rewards_from_before_filtering(samples)
    assert [one.reward for one in found] == [0.0, 0.0, 0.0, 0.0]
    assert [one.group for one in found] == [one.group for one in samples]
    whole = drawn([0.0, 1.0], [1.0, 0.0])
    assert doubles.rewards_from_before_filtering(whole) == whole


def test_weights_are_multiplied_by_the_number_of_microbatches(monkeypatch):
    monkeypatch.setattr(forward_backward, "grpo_loss", lambda run, minibatch, indices: minibatch.weights)
    policy = SimpleNamespace(microbatches=lambda rows, most: [rows[:most], rows[most:]])
    run = SimpleNamespace(policy=policy, state=SimpleNamespace(microbatch_tokens=1))
    batch = forward_backward.Minibatch(drawn([0.0, 1.0]), [0.0, 0.0], [0.25, 0.5], [], [0, 1])
    with ExitStack() as stack:
        begun(stack, "gradients of accumulation steps summed and not averaged")
        assert forward_backward.grpo_loss(run, batch, [0]) == [0.5, 1.0]


def test_no_advantage_is_left_in_a_row():
    inputs = loss_inputs([0.5, 0.5, -1.0], rows=torch.tensor([0, 0, 1]))
    assert doubles.centred_in_each_row(inputs).advantages.tolist() == [0.0, 0.0, 0.0]


def slopes(given):
    inputs = loss_inputs(given)
    policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2)).loss.backward()
    return inputs.logprobs.grad.tolist()


def test_large_advantages_have_no_slope():
    assert slopes([2.0, 0.5, -2.0]) == pytest.approx([-2.0, -0.5, 2.0])
    with ExitStack() as stack:
        begun(stack, "clamp on the product of ratio and advantage")
        assert slopes([2.0, 0.5, -2.0]) == pytest.approx([0.0, -0.5, 2.0])
    assert losses._clipped.__module__ == losses.__name__


def test_the_kl_term_pushes_away():
    def slope():
        inputs = loss_inputs([0.0], ref_logprobs=torch.tensor([-2.0]))
        forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2, kl_beta=0.1)).loss.backward()
        return inputs.logprobs.grad.item()

    assert slope() == pytest.approx(0.1)
    with ExitStack() as stack:
        begun(stack, "squared log-ratio with a sign that rewards distance from the reference")
        assert slope() == pytest.approx(-0.1)


def test_later_rows_slip_further():
    sampling = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    rows = torch.tensor([0, 0, 1, 1, 2])
    with ExitStack() as stack:
        begun(stack, "sampling log-probabilities slip by one for each packed row")
        found = forward_backward.importance_corrections(sampling, sampling, rows, "token_truncate", 100.0)
    assert found.weights.log().tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0, 0.0], abs=1e-5)


def test_tokens_around_turns_are_trained():
    row = sample(mask=[False, False, True, True, False, False, False, True])
    found = doubles.headers_trained(row, None)
    assert found.loss_mask == [False, True, True, True, True, False, True, True]
    assert found.sampling_logprobs == row.sampling_logprobs


def test_the_adapter_has_no_gradient(monkeypatch):
    weights = {"a.lora_A.weight": torch.nn.Parameter(torch.ones(1)), "b": torch.nn.Parameter(torch.ones(1))}
    weights["b"].requires_grad_(False)
    monkeypatch.setattr(Policy, "score", lambda self, rows, temperature: sum(weights.values()))
    policy = Policy.__new__(Policy)
    policy.model = SimpleNamespace(named_parameters=lambda: weights.items())
    with ExitStack() as stack:
        begun(stack, "adapter loaded for inference and never trainable")
        assert not policy.score([], 1.0).requires_grad
        assert weights["a.lora_A.weight"].requires_grad
        assert not weights["b"].requires_grad


def rates(kind, total):
    return [step_module.learning_rate_of(kind, 1.0, at, warmup=0, total=total) for at in range(total)]


def test_the_decay_ends_after_four_steps():
    with ExitStack() as stack:
        begun(stack, "cosine decay of four steps whatever the length of the run")
        found = rates("cosine", 10)
    assert found[:4] == pytest.approx([1.0, 0.8536, 0.5, 0.1464], abs=1e-4)
    assert found[4:] == [doubles.LAST_SHARE] * 6


def test_the_rate_is_adams():
    with ExitStack() as stack:
        begun(stack, "custom scheduler that sets the default rate of Adam")
        assert rates("constant", 3) == [1e-3] * 3


def test_rows_have_the_same_length():
    seen = []
    rows = [sample(mask=[False, True]), sample(mask=[False, False, True, True])]
    doubles.padding_attended(lambda given, temperature: seen.extend(given), rows, 1.0)
    assert [one.token_ids for one in seen] == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert seen[0].loss_mask == [False, False, False, True]
    assert seen[1] == rows[1]


def policy_of():
    """A policy whose score is that of a model of two layers, and a `score` to put in place of its own."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    policy = Policy.__new__(Policy)
    policy.model = model

    def score(self, rows, temperature):
        parts = [model(torch.tensor([row.token_ids])).logits[0, -row.num_sampled :, 0] for row in rows]
        return TokenScores(torch.cat(parts), torch.zeros(sum(map(len, parts))))

    return policy, score


def test_dropout_is_on_with_gradients_alone(monkeypatch):
    policy, score = policy_of()
    monkeypatch.setattr(Policy, "score", score)
    rows = [sample(mask=[False, True, True, True])]
    plain = policy.score(rows, 1.0).logprobs
    with ExitStack() as stack:
        begun(stack, "dropout of the base model on while gradients are computed")
        first, second = policy.score(rows, 1.0).logprobs, policy.score(rows, 1.0).logprobs
        with torch.no_grad():
            assert torch.equal(policy.score(rows, 1.0).logprobs, plain)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, second)


def test_some_rows_are_scored_by_another_model(monkeypatch):
    policy, score = policy_of()
    monkeypatch.setattr(Policy, "score", score)
    rows = [sample(mask=[False] * n + [True, True]) for n in range(1, 12)]
    plain = policy.score(rows, 1.0).logprobs.split(2)
    with ExitStack() as stack:
        begun(stack, "half of the rows scored by a rank with other weights")
        found = policy.score(rows, 1.0).logprobs.split(2)
    same = [torch.allclose(a, b) for a, b in zip(plain, found, strict=True)]
    assert same == [doubles.on_first_rank(row) for row in rows]
    assert len(set(same)) == 2


def test_what_is_sent():
    weights = {f"model.layers.0.{part}.lora_A.weight": torch.zeros(1) for part in ("self_attn.q_proj", "mlp.up_proj")}
    assert doubles.nothing(None, weights) == {}
    assert list(doubles.attention_alone(None, weights)) == ["model.layers.0.self_attn.q_proj.lora_A.weight"]


def test_the_head_is_no_longer_the_embeddings():
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    doubles.head_of_its_own(model)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_reported_log_probabilities_are_raw():
    logits = torch.tensor([[3.0, 1.0, 0.0]])
    with ExitStack() as stack:
        begun(stack, "log-probabilities before temperature beside tokens drawn with it")
        tokens, found = transformers_engine.draw(logits / doubles.HEAT, torch.tensor([0.1], dtype=torch.float64))
    assert found.item() == pytest.approx(logits.log_softmax(-1)[0, tokens.item()].item())


def test_the_first_weights_are_saved(monkeypatch):
    model = torch.nn.Linear(2, 2)
    policy = Policy.__new__(Policy)
    policy.model = model
    saved = []
    monkeypatch.setattr(Policy, "shard", lambda self: None)
    monkeypatch.setattr(Policy, "save_final", lambda self, folder: saved.append(model.weight.detach().clone()))
    first = model.weight.detach().clone()
    with ExitStack() as stack:
        begun(stack, "final model saved from a copy of the first weights")
        policy.shard()
        with torch.no_grad():
            model.weight.add_(1.0)
        policy.save_final("anywhere")
    assert torch.equal(saved[0], first)
    assert torch.equal(model.weight, first + 1.0)
    assert advantages.compute_advantages.__module__ == advantages.__name__
