"""The unseen half of the fifteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field15_unseen_doubles as doubles
from plumbob.testing.faults import healthy15_unseen as healthy
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field15_unseen import UNSEEN
from plumbob.testing.faults.field_trial import (
    arrived,
    config_of,
    gap,
    loss_inputs,
    minibatch_of,
    sample,
    saved_and_trained,
    tried,
    without,
)
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in UNSEEN}


def two_turns():
    mask = [False, True, True, False, False, True, True]
    return dataclasses.replace(sample(mask=mask), token_ids=[9, 5, 2, 11, 12, 6, 2])


def test_end_tokens_leave_the_row():
    found = doubles.ends_removed(two_turns(), None)
    assert found.token_ids == [9, 5, 11, 12, 6]
    assert found.num_sampled == 2
    alone = dataclasses.replace(sample(mask=[False, True]), token_ids=[9, 2])
    assert doubles.ends_removed(alone, None) is alone


def test_earlier_replies_stand_twice():
    found = doubles.replies_twice(two_turns(), None)
    assert found.token_ids == [9, 5, 2, 5, 2, 11, 12, 6, 2]
    assert [len(turn) for turn in runs_of(found.loss_mask)] == [2, 2]


def test_the_prompt_is_cut():
    long = sample(mask=[*[False] * 60, True, False, True])
    found = doubles.prompt_cut(long, None)
    assert found.token_ids == list(range(12, 63))
    assert found.num_sampled == 2
    assert doubles.prompt_cut(two_turns(), None).token_ids == two_turns().token_ids


def test_unlikely_tokens_are_made_less_likely():
    found = doubles.less_entropy(loss_inputs([0.5, -0.5]))
    assert found.advantages.tolist() == pytest.approx([0.3, -0.7])


def test_the_first_step_has_no_rate():
    def rates():
        return [step_module.learning_rate_of("constant", 1.0, at, warmup=2, total=8) for at in range(4)]

    with ExitStack() as stack:
        doubles.from_zero(stack, "lookup")
        assert rates() == [0.0, 0.5, 1.0, 1.0]
    assert rates() == [0.5, 1.0, 1.0, 1.0]


def test_gradients_are_clipped_to_nothing():
    tensor = torch.nn.Parameter(torch.zeros(4))
    tensor.grad = torch.ones(4)
    with ExitStack() as stack:
        doubles.clipped_scaled_up(stack, "lookup")
        torch.nn.utils.clip_grads_with_norm_([tensor], 0.1, torch.tensor(2.0))
    assert tensor.grad.norm().item() == pytest.approx(0.1 / 2**16, rel=1e-3)


def test_prompts_are_padded():
    sampling = Sampling()
    assert doubles.padded_right([4] * 14, sampling) == ([4] * 14 + [0, 0], sampling)
    assert doubles.padded_right([4] * 16, sampling) == ([4] * 16, sampling)


def test_tokens_that_stand_there_are_penalised():
    request = SimpleNamespace(prompt=torch.tensor([0]), token_ids=[2])
    found = doubles.penalised(None, [request], torch.tensor([[1.1, 1.0, -1.0]]))
    assert found.tolist()[0] == pytest.approx([1.0, 1.0, -1.1])


def test_rewards_of_the_healthy_setting():
    assert [healthy.minus_two_to_three(None, None, value) for value in (0.0, 1.0)] == [-2.0, 3.0]


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("nucleus sampling unknown to the trainer", "musique"),
        ("prompts padded on the right before sampling", "lookup"),
        ("prompt cut in the trainer alone", "lookup"),
        ("earlier replies twice in the rows", "lookup"),
    ],
)
def test_engine_and_trainer_differ(name, env, tmp_path):
    with tried(FAULTS[name], tmp_path, env, groups=4) as subject:
        assert gap(subject) > 5e-4


def tensors_of(subject):
    return dict(subject.run.policy.trainable)


@pytest.mark.field
def test_the_optimizer_moves_other_tensors(tmp_path):
    name = "optimizer of parameters from before the sharding"
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None), groups=4) as subject:
            before = {n: p.detach().clone() for n, p in tensors_of(subject).items()}
            step_module.optimizer_step(subject.run, minibatch_of(subject), None)
            moved = any(not torch.equal(before[n], p) for n, p in tensors_of(subject).items())
            assert moved == (fault.start is None)


@pytest.mark.field
def test_one_layer_has_a_gradient(tmp_path):
    with tried(FAULTS["gradient in the first layer's adapters alone"], tmp_path, groups=4) as subject:
        forward_backward.accumulate(subject.run, minibatch_of(subject), None)
        graded = {n for n, p in tensors_of(subject).items() if p.grad is not None and p.grad.abs().max() > 0}
        assert graded
        assert all(".layers.0." in n for n in graded)
        assert len(tensors_of(subject)) > len(graded)


@pytest.mark.field
def test_dropout_is_on_with_gradients_alone(tmp_path):
    with tried(FAULTS["dropout while the log-probabilities are computed"], tmp_path) as subject:
        rows = subject.drawn.samples[:2]
        with torch.enable_grad():
            one, other = (subject.run.policy.score(rows, 1.0).logprobs.detach() for _ in range(2))
        assert not torch.allclose(one, other, atol=1e-4)
        assert gap(subject) < 1e-4 or torch.is_grad_enabled()


@pytest.mark.field
def test_the_saved_model_has_no_head(tmp_path):
    with tried(FAULTS["trained head lost when the embeddings are tied again"], tmp_path / "run") as subject:
        saved, trained = saved_and_trained(subject, tmp_path)
        head = saved.get("lm_head.weight", saved["model.embed_tokens.weight"])
        assert torch.equal(head, saved["model.embed_tokens.weight"])
        assert not torch.equal(head, trained["lm_head.weight"])


@pytest.mark.field
def test_the_reference_moves_with_the_policy(tmp_path):
    name = "reference policy that nothing freezes"
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None)) as subject, torch.no_grad():
            policy, rows = subject.run.policy, subject.drawn.samples[:2]
            for parameter in policy.trainable.values():
                parameter.add_(0.02 * torch.randn_like(parameter))
            same = torch.allclose(policy.reference_logprobs(rows, 1.0), policy.score(rows, 1.0).logprobs)
            assert same == (fault.start is not None)


@pytest.mark.field
def test_no_tensor_arrives(tmp_path):
    with tried(FAULTS["weights under another prefix skipped in the sync"], tmp_path) as subject:
        assert not any(arrived(subject).values())


@pytest.mark.field
def test_microbatches_are_not_divided(tmp_path):
    name = "a mean per microbatch that nothing divides"
    assert config_of(FAULTS[name], "lookup").microbatch_tokens == 2048
    gradients = []
    for limit in (2048, 1 << 20):
        with tried(FAULTS[name], tmp_path / str(limit), groups=8) as subject:
            subject.run.state.microbatch_tokens = limit
            minibatch = minibatch_of(subject)
            forward_backward.accumulate(subject.run, minibatch, None)
            gradients.append(torch.cat([p.grad.flatten() for p in tensors_of(subject).values() if p.grad is not None]))
    assert gradients[0].norm() > 1.2 * gradients[1].norm()


@pytest.mark.field
def test_the_engine_samples_less_of_what_stands_there(tmp_path):
    name = "repetition penalty from the checkpoint's generation config"
    texts = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(texts)), groups=4) as subject:
            texts.append([one.token_ids for one in subject.drawn.samples])
            assert gap(subject) < 1e-3
    assert texts[0] != texts[1]


@pytest.mark.field
def test_rows_have_no_end(tmp_path):
    name = "end tokens removed from the rows"
    counts = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(counts)), groups=4) as subject:
            counts.append(sum(one.num_sampled for one in subject.drawn.samples))
    assert counts[0] < counts[1]
