"""The unseen half of the twenty-first set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import dataclasses
import json
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plumbob.rollout import Completion, Sampling, runner
from plumbob.testing.faults import field21_unseen_doubles as doubles
from plumbob.testing.faults.field21_unseen import UNSEEN
from plumbob.testing.faults.field_trial import (
    config_of,
    gap,
    loss_inputs,
    sample,
    saved_and_trained,
    tried,
    without,
)
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm.losses import Objective, policy_loss
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.transformers.kv_cache import SlotCache
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.run import Best

FAULTS = {fault.name: fault for fault in UNSEEN}
PLAIN = Objective("dr_grpo", 0.2, 0.2)


@contextmanager
def injected(start):
    with ExitStack() as stack:
        start(stack, "lookup")
        yield


def slopes(inputs, objective=PLAIN, loss=policy_loss):
    loss(inputs, objective).loss.backward()
    return inputs.logprobs.grad.tolist()


def test_options_of_those_that_are_nothing_else():
    assert config_of(FAULTS["warm-up of four hundred steps"], "lookup").warmup_steps == 400
    config = config_of(FAULTS["first-order KL estimate in the loss"], "lookup")
    assert config.kl_in_loss
    assert config.objective().kl_estimator == "k1"


def test_the_kl_term_has_weights_of_its_own():
    objective = dataclasses.replace(PLAIN, kl_beta=0.1)

    def inputs():
        return loss_inputs([0.0, 0.0], weights=torch.full((2,), 0.001), ref_logprobs=torch.full((2,), -2.0))

    assert slopes(inputs(), objective) == pytest.approx([0.0001] * 2)
    with injected(doubles.kl_by_itself):
        assert slopes(inputs(), objective, forward_backward.policy_loss) == pytest.approx([0.05] * 2)


def test_slopes_have_a_part_from_the_weights():
    objective = Objective("cispo", 0.2, 4.0)
    assert slopes(loss_inputs([1.0, -1.0]), objective) == pytest.approx([-1.0, 1.0])
    # The log-probability of -1 takes away all of it.
    assert slopes(doubles.weights_with_gradient(loss_inputs([1.0, -1.0])), objective) == pytest.approx([0.0, 0.0])


def test_short_rows_weigh_less():
    inputs = loss_inputs([1.0] * 5, rows=torch.tensor([0, 0, 0, 0, 1]))
    assert doubles.over_padded_length(inputs).weights.tolist() == [1.0, 1.0, 1.0, 1.0, 0.25]
    nothing = loss_inputs([])
    assert doubles.over_padded_length(nothing) is nothing


def test_negative_advantages_are_clipped_on_the_other_side():
    def inputs():
        found = loss_inputs([-1.0, -1.0, 1.0])
        old = found.old_logprobs + torch.tensor([0.5, -0.5, -0.5])
        return dataclasses.replace(found, old_logprobs=old)

    plain = slopes(inputs())
    assert plain[0] == 0.0
    assert plain[1] > 0.0
    with injected(doubles.clipped_before):
        found = slopes(inputs())
    assert found[0] > 0.0
    assert found[1] == 0.0
    assert found[2] == plain[2] == 0.0


def test_weights_of_sequences_are_products():
    trainer, sampling, rows = torch.full((4,), -1.0), torch.full((4,), -1.1), torch.tensor([0, 0, 0, 1])
    with injected(doubles.product_weights):
        found = forward_backward.importance_corrections(trainer, sampling, rows, "sequence_mask", 10.0).weights
        same = forward_backward.importance_corrections(trainer, sampling, rows, "token_truncate", 10.0).weights
    assert found.log().tolist() == pytest.approx([0.3, 0.3, 0.3, 0.1], abs=1e-5)
    assert same.log().tolist() == pytest.approx([0.1] * 4, abs=1e-5)


def test_baselines_are_those_of_a_half():
    samples = [sample(reward, "0/0") for reward in (1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)]
    with injected(doubles.baseline_of_a_part):
        found = advantages_module.compute_advantages(samples)
    assert found.values == pytest.approx([0.25, 0.25, 0.25, -0.75, -0.25, -0.25, -0.25, 0.75])
    assert found.with_signal == {"0/0"}
    assert found.num_groups == 1


def scores_of(rows, temperature):
    count = sum(row.num_sampled for row in rows)
    return TokenScores(torch.zeros(count, requires_grad=True), torch.zeros(count))


def test_scores_have_no_gradient():
    found = doubles.frozen(scores_of, [sample()], 1.0)
    assert not found.logprobs.requires_grad
    assert len(found.logprobs) == 2


def sharding_of():
    scorer = torch.nn.Module()
    scorer.model = torch.nn.Linear(2, 1)
    sharding = Replicated(scorer, World(0, 1, torch.device("cpu")))
    sharding.make_optimizer(lambda tensors: torch.optim.AdamW(tensors, lr=0.1, weight_decay=0.0), 0.0)
    return sharding


def backward(sharding):
    sharding.backward(sum(p.sum() for p in sharding.trainable.values()), last=True)


def gradients(sharding):
    return [p.grad.flatten().tolist() for p in sharding.trainable.values()]


def test_gradients_are_zeros():
    sharding = sharding_of()
    doubles.gradients_lost(sharding)
    backward(sharding)
    doubles.gradients_lost(sharding)
    assert gradients(sharding) == [[0.0, 0.0], [0.0]]


def test_gradients_add_up():
    with injected(doubles.never_cleared):
        sharding = sharding_of()
        for _ in range(3):
            sharding.zero_grad()
            backward(sharding)
            sharding.update()
    assert gradients(sharding) == [[3.0, 3.0], [3.0]]


def test_rows_are_padded_to_the_longest():
    seen = []

    def score(rows, temperature):
        seen.extend(rows)
        return scores_of(rows, temperature)

    short, long = sample(mask=[False, True]), sample(mask=[False, True, False, True])
    found = doubles.padded_in_front(score, [short, long], 1.0)
    assert seen[0].token_ids == [0, 0, 0, 1]
    assert seen[0].loss_mask == [False, False, False, True]
    assert seen[1] == long
    assert len(found.logprobs) == 3


def test_padding_changes_the_trainers_scores(tmp_path):
    fault = FAULTS["shorter rows padded in front without a mask"]
    with tried(fault, tmp_path / "one", groups=1) as subject:
        assert gap(subject) > 1e-3
    with tried(without(fault), tmp_path / "other", groups=1) as subject:
        assert gap(subject) < 1e-4


def test_ends_of_turns_are_masked():
    found = doubles.without_end_tokens(sample(mask=[False, True, True, False, True]), None)
    assert found.loss_mask == [False, True, False, False, False]


def test_reported_log_probabilities_have_no_temperature(tmp_path):
    fault = FAULTS["log-probabilities reported before the temperature"]
    with tried(fault, tmp_path, groups=1) as subject:
        samples = subject.drawn.samples
        with torch.no_grad():
            own = subject.run.policy.score(samples, 1.0).logprobs
        assert gap(subject) > 1e-3
        assert own.tolist() == pytest.approx([x for s in samples for x in s.sampled_logprobs], abs=1e-4)


def test_beginnings_stay_in_the_cache():
    cache = SimpleNamespace(ids=np.arange(400).reshape(2, 200), counts=np.array([200, 50]))
    with injected(doubles.beginnings_kept):
        SlotCache.forget_all(cache)
    assert cache.counts.tolist() == [128, 50]
    assert cache.ids[0, 127] == 127
    assert (cache.ids[:, 128:] == -1).all()


def test_logits_of_seen_tokens_are_divided():
    requests = [
        SimpleNamespace(prompt=np.array([0, 1]), token_ids=[2]),
        SimpleNamespace(prompt=np.array([3]), token_ids=[]),
    ]
    logits = torch.tensor([[1.3, -1.3, 2.6, 5.0], [1.0, 1.0, 1.0, -2.6]])
    found = doubles.penalised(None, requests, logits)
    assert found.flatten().tolist() == pytest.approx([1.0, -1.0, 2.0, 5.0, 1.0, 1.0, 1.0, -2.0])


def test_cut_turns_get_an_end_token():
    sampling = Sampling(stop_token_ids=(9,))
    cut, whole = Completion((1, 2), (-1.0, -2.0), "length"), Completion((1, 9), (-1.0, -2.0), "stop")
    assert doubles.end_appended(cut, [], sampling) == Completion((1, 2, 9), (-1.0, -2.0, 0.0), "stop")
    assert doubles.end_appended(whole, [], sampling) is whole
    assert doubles.end_appended(cut, [], Sampling()) is cut


def test_some_turns_are_cut(tmp_path):
    with tried(FAULTS["end token appended to cut turns"], tmp_path) as subject:
        samples = subject.drawn.samples
    assert any(s.num_sampled == 49 for s in samples)
    assert not any(s.truncated for s in samples)


def test_a_group_has_two_seeds(tmp_path):
    with injected(doubles.two_seeds):
        assert len({runner.derive_seed(7, i) for i in range(8)}) == 2
    with tried(FAULTS["one seed for several rollouts of a group"], tmp_path, groups=1) as subject:
        assert len({tuple(s.token_ids) for s in subject.drawn.samples}) <= 2


def test_layers_change_places():
    weights = {
        f"model.layers.{i}.{part}": torch.full((i + 1,) if part == "b" else (2,), i) for i in range(2) for part in "ab"
    }
    found = doubles.layers_exchanged(None, {**weights, "model.norm": torch.full((2,), 7)})
    assert found["model.layers.0.a"].tolist() == [1, 1]
    assert found["model.layers.1.a"].tolist() == [0, 0]
    assert found["model.layers.0.b"] is weights["model.layers.0.b"]
    assert found["model.norm"].tolist() == [7, 7]


def test_the_second_reward_is_larger():
    assert doubles.ten_for_length(None, SimpleNamespace(last_reply="x" * 100), 1.0) == 5.0
    assert doubles.ten_for_length(None, SimpleNamespace(last_reply=None), 1.0) == 0.0
    assert doubles.ten_for_length(None, SimpleNamespace(last_reply="x" * 300), 0.0) == 10.0


def test_the_saved_model_is_the_base_model(tmp_path):
    with tried(FAULTS["adapter left out of the merged model"], tmp_path / "run", groups=1) as subject:
        saved, trained = saved_and_trained(subject, tmp_path)
    assert any(not torch.equal(saved[name], trained[name]) for name in saved)


def test_the_saved_adapter_has_no_alpha(tmp_path):
    with tried(FAULTS["adapter file whose alpha is zero"], tmp_path / "run", groups=1) as subject:
        subject.run.policy.save(tmp_path / "checkpoint")
        subject.run.policy.save_final(tmp_path / "model")
    files = [tmp_path / "checkpoint/adapter_config.json", tmp_path / "model/adapter/adapter_config.json"]
    assert [json.loads(file.read_text())["lora_alpha"] for file in files] == [0, 0]


def test_the_first_checkpoint_stays_the_best():
    def kept():
        best = Best("reward/mean")
        for step, value in enumerate((0.1, 0.2, 0.5)):
            best = best.after(step, value)
        return best.kept.step, best.highest.step

    assert kept() == (2, 2)
    with injected(doubles.first_stays_best):
        assert kept() == (1, 2)
