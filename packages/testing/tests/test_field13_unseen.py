"""The unseen half of the thirteenth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field13_unseen_doubles as doubles
from plumbob.testing.faults import healthy13_unseen as healthy
from plumbob.testing.faults.field13_unseen import UNSEEN
from plumbob.testing.faults.field_trial import config_of, gap, loss_inputs, sample, tried, without
from plumbob.trainer.algorithm.losses import Objective, policy_loss
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in UNSEEN}
ENVS = ["lookup", "gsm8k", "musique"]


def test_end_tokens_are_masked():
    row = sample(mask=[False, True, True, True])
    found = doubles.ends_masked(row, None)
    assert found.loss_mask == [False, True, False, True]
    assert found.token_ids == row.token_ids


def test_groups_are_cut_by_a_stride():
    rows = [sample(float(i), f"0/{i // 8}") for i in range(48)]
    found = doubles.cut_by_stride(rows)
    assert len(found) == 46
    groups = {}
    for row in found:
        groups.setdefault(row.group, set()).add(int(row.reward) // 8)
    assert groups["0/0"] == {0, 1}
    assert groups["0/5"] == {5}
    assert [len([r for r in found if r.group == f"0/{i}"]) for i in range(6)] == [8, 8, 8, 8, 8, 6]


def test_only_likely_tokens_are_drawn():
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.2, 0.06, 0.04], [0.04, 0.06, 0.05, 0.05, 0.8]]))
    found = logits - doubles.settings_of_the_model(None, [], logits)
    assert (found > 1).tolist() == [[False, False, False, True, True], [True, True, True, True, False]]
    many = torch.zeros(1, 100)
    assert int((many - doubles.settings_of_the_model(None, [], many) > 1).sum()) == 100 - doubles.TOP_K


def test_tokens_of_the_text_are_penalised():
    request = SimpleNamespace(prompt=np.array([0, 1]), token_ids=[2])
    found = doubles.repetitions_penalised(None, [request], torch.tensor([[2.2, -1.0, 1.1, 3.0]]))
    assert found[0].tolist() == pytest.approx([2.0, -1.1, 1.0, 3.0])


def test_prompts_and_settings():
    sampling = Sampling(stop_token_ids=(2,))
    assert doubles.first_token_twice([1, 5, 2], sampling) == ([1, 1, 5, 2], sampling)
    ids, found = doubles.end_unknown([1, 5, 2], sampling)
    assert ids == [1, 5, 2]
    assert found == dataclasses.replace(sampling, stop_token_ids=())


def test_rows_are_padded_on_the_left():
    seen = []
    rows = [sample(mask=[False, True]), sample(mask=[False, True, True, True])]
    doubles.padded_on_the_left(lambda found, _: seen.extend(found), rows, 1.0)
    assert [row.token_ids for row in seen] == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert [row.loss_mask for row in seen] == [[False, False, False, True], [False, True, True, True]]


def test_log_probabilities_are_one_ahead():
    rows = [sample(mask=[False, True, True]), sample(mask=[False, True, True, True])]
    scores = TokenScores(torch.arange(5.0), torch.ones(5))
    assert doubles.one_ahead(lambda *_: scores, rows, 1.0).logprobs.tolist() == [1.0, 1.0, 3.0, 4.0, 4.0]


def test_the_ratio_is_one():
    inputs = loss_inputs([1.0, -1.0])
    moved = dataclasses.replace(inputs, old_logprobs=inputs.old_logprobs - 0.7)
    plain = policy_loss(moved, Objective("dr_grpo", 0.2, 0.2))
    assert plain.ratio_sum.item() > 3
    assert plain.clipped_high.item() == 1
    found = policy_loss(doubles.ratio_of_one(moved), Objective("dr_grpo", 0.2, 0.2))
    assert found.ratio_sum.item() == 2
    assert found.clipped_high.item() == 0


def test_the_kl_term_has_another_sign():
    slopes = []
    for faulty in (True, False):
        with ExitStack() as stack:
            if faulty:
                doubles.kl_turned(stack, "lookup")
            inputs = loss_inputs([0.0, 0.0], ref_logprobs=torch.tensor([-2.0, -0.5]))
            policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2, kl_beta=0.1)).loss.backward()
            slopes.append(inputs.logprobs.grad.tolist())
    assert slopes[0] == pytest.approx([-0.1, -0.1])
    assert slopes[1] == pytest.approx([0.1, -0.05])
    assert config_of(FAULTS["KL term as reference minus policy"], "lookup").kl_beta == 0.1


def test_advantages_are_relative_to_the_batch():
    assert doubles.relative_to_batch([0.0, 0.0, 1.0, 1.0])[0] == pytest.approx(-0.866, abs=1e-3)
    rows = [sample(0.0, "0/0"), sample(0.0, "0/0"), sample(1.0, "0/1"), sample(1.0, "0/1")]
    config = config_of(FAULTS["advantages relative to the whole batch"], "lookup").advantages()
    assert not any(step_module.step_advantages(rows, config).values)
    with ExitStack() as stack:
        doubles.one_group(stack, "lookup")
        assert all(step_module.step_advantages(rows, config).values)


def test_the_schedule_begins_anew():
    def rates():
        return [step_module.learning_rate_of("cosine", 1.0, at, warmup=2, total=6) for at in range(6)]

    plain = rates()
    with ExitStack() as stack:
        doubles.schedule_begun_anew(stack, "lookup")
        found = rates()
    assert found == [*plain[:3], *plain[:3]]
    assert found != plain
    config = config_of(FAULTS["warm-up and decay begun anew after a resume"], "lookup")
    assert (config.lr_scheduler_type, config.warmup_steps) == ("cosine", 2)


def test_healthy_rewards():
    assert [healthy.minus_eight_or_two(None, None, value) for value in (0.0, 1.0)] == [-8.0, 2.0]
    assert healthy.ten(None, None, 1.0) == 10.0


@pytest.mark.field
@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("top-k and top-p taken from the model's generation config", 0.0),
        ("repetition penalty taken from the model's generation config", 0.0),
        ("first token of the prompt twice in the engine", 1e-4),
        ("left padding attended to in the trainer", 1e-4),
        ("trainer's log-probabilities one token ahead", 1e-3),
    ],
)
def test_engine_and_trainer_differ(name, least, env, tmp_path):
    drawn = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.start is None), env, groups=4 if least else 16) as subject:
            drawn.append([row.token_ids for row in subject.drawn.samples])
            assert gap(subject) >= least if fault.start else gap(subject) < 1e-5
    if not least:
        assert drawn[0] != drawn[1]


@pytest.mark.field
@pytest.mark.parametrize("env", ENVS)
def test_turns_go_on_after_their_end(env, tmp_path):
    with tried(FAULTS["stop token that the engine does not know"], tmp_path, env) as subject:
        for row in subject.drawn.samples:
            ends = [i for i, t in enumerate(row.token_ids) if t == doubles.END and row.loss_mask[i]]
            assert any(i + 1 < len(row.token_ids) and row.loss_mask[i + 1] for i in ends) or row.num_sampled >= 96


@pytest.mark.field
@pytest.mark.parametrize("env", ENVS)
def test_no_end_token_is_trained(env, tmp_path):
    with tried(FAULTS["end tokens left out of the loss as padding"], tmp_path, env) as subject:
        for row in subject.drawn.samples:
            assert doubles.END in row.token_ids
            assert not any(m for t, m in zip(row.token_ids, row.loss_mask, strict=True) if t == doubles.END)
            assert row.num_sampled


@pytest.mark.field
def test_groups_hold_rollouts_of_two_tasks(tmp_path):
    name = "groups cut by a fixed stride after some rollouts failed"
    with tried(FAULTS[name], tmp_path, groups=6) as subject:
        firsts = {}
        for row in subject.drawn.samples:
            firsts.setdefault(row.group, set()).add(tuple(row.token_ids[: row.loss_mask.index(True)]))
        assert max(map(len, firsts.values())) == 2


@pytest.mark.field
def test_the_engine_has_rounded_sums(tmp_path):
    name = "adapter merged onto a bfloat16 grid for the engine"
    with tried(FAULTS[name], tmp_path) as subject:
        run = subject.run
        with torch.no_grad():
            for tensor in run.policy.trainable.values():
                tensor.add_(0.01 * torch.randn_like(tensor))
        run.engine.update(run.policy.sharding.stream())
        row = subject.drawn.samples[0]
        scored = torch.tensor(run.engine.score(row.token_ids))
        own = [lp for lp, sampled in zip(scored.tolist(), row.loss_mask[1:], strict=True) if sampled]
        assert (subject.score([row])[0] - torch.tensor(own)).abs().mean() > 1e-6
        weights = [m.base_layer.weight for m in run.engine.model.modules() if hasattr(m, "base_layer")]
        assert all(torch.equal(w, w.bfloat16().float()) for w in weights)


@pytest.mark.field
def test_most_updates_round_to_nothing(tmp_path):
    with tried(FAULTS["weights stored in bfloat16 without a master copy"], tmp_path) as subject:
        run = subject.run
        before = [tensor.clone() for tensor in run.policy.trainable.values()]
        for tensor in run.policy.trainable.values():
            tensor.grad = torch.randn_like(tensor)
        step_module.set_learning_rate(run)
        run.optimizer.step()
        after = list(run.policy.trainable.values())
        assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in after)
        same = sum(int((a == b).sum()) for a, b in zip(before, after, strict=True))
        assert 0.4 < same / sum(tensor.numel() for tensor in after) < 1
