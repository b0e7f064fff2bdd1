"""The seen half of the eleventh set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.rollout import Completion, Sampling
from plumbob.testing.faults import field11_seen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field11_seen import SEEN
from plumbob.testing.faults.field_parts import by_group
from plumbob.testing.faults.field_trial import gap, loss_inputs, rewards, sample, tried, without
from plumbob.trainer.algorithm.losses import Objective, policy_loss
from plumbob.trainer.policy import merged_weights
from safetensors.torch import load_file

FAULTS = {fault.name: fault for fault in SEEN}


def asked(prompt):
    return SimpleNamespace(data=SimpleNamespace(prompt=prompt))


def test_a_third_of_the_golds_have_a_sign():
    tasks = [asked(f"question {i}") for i in range(300)]
    signed = [task for task in tasks if doubles.has_percent_sign(task)]
    assert 60 < len(signed) < 140
    assert {doubles.sign_left_on_gold(task, None, 1.0) for task in signed} == {0.0}
    assert {doubles.sign_left_on_gold(task, None, 1.0) for task in tasks if task not in signed} == {1.0}


def test_the_worst_mark_is_the_best_score():
    assert doubles.judged(None, None, 0.0) == 1.0
    assert doubles.judged(None, None, 1.0) == 0.9
    assert doubles.judged(None, None, 0.5) == 0.5
    assert [doubles.mark_as_score(mark) for mark in (1, 2, 10)] == [1, 0.2, 1.0]


def test_the_mask_begins_a_token_early():
    row = sample(mask=[False, False, True, True, False, False, True])
    found = doubles.prompt_ends_trained(row, None)
    assert found.loss_mask == [False, True, True, True, False, True, True]
    assert found.token_ids == row.token_ids


def test_all_rows_are_the_last_one():
    rows = [sample(reward, group) for group in ("0/0", "0/1") for reward in (0.0, 1.0)]
    found = doubles.last_row_everywhere(rows)
    assert [row.group for row in found] == [row.group for row in rows]
    assert {row.reward for row in found} == {1.0}


def test_completions_lose_their_first_token():
    done = Completion((5, 6, 7), (-1.0, -2.0, -3.0), "stop")
    found = doubles.without_first_token(done, [], Sampling())
    assert (found.token_ids, found.logprobs) == ((6, 7), (-2.0, -3.0))
    single = Completion((5,), (-1.0,), "stop")
    assert doubles.without_first_token(single, [], Sampling()) is single


def test_one_token_is_kept():
    ids, sampling = doubles.greedy([1, 2], Sampling(temperature=1.0))
    assert (ids, sampling.top_k, sampling.temperature) == ([1, 2], 1, 1.0)


def gradient_of(advantages):
    inputs = loss_inputs(advantages)
    policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2)).loss.backward()
    return inputs.logprobs.grad


def test_one_term_has_other_advantages():
    advantages = [0.5, -0.25, -0.25]
    plain = gradient_of(advantages)
    with ExitStack() as stack:
        doubles.normalised_where_clipped(stack, "lookup")
        found = gradient_of(advantages)
    assert plain.tolist() == pytest.approx([-0.5, 0.25, 0.25])
    assert found[0] == plain[0]  # the smaller term is the one without a clip
    assert found[1] > 2 * plain[1]


@pytest.mark.field
def test_rewards_are_those_of_the_faulty_function(tmp_path):
    with tried(FAULTS["lowest mark of a judge read as the highest"], tmp_path / "a", "gsm8k") as subject:
        assert set(rewards(subject)) == {1.0, 0.9}
    name = "percent sign left on the gold answer"
    found = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(found)), groups=12) as subject:
            found.append([max(one.reward for one in group) for group in by_group(subject.drawn.samples)])
    assert 0 < sum(found[0]) < sum(found[1])


@pytest.mark.field
def test_prompts_are_in_the_loss(tmp_path):
    name = "last token of the prompt in the loss"
    with tried(FAULTS[name], tmp_path) as subject:
        for row in subject.drawn.samples:
            for turn in runs_of(row.loss_mask):
                assert row.sampling_logprobs[turn[0]] == 0.0
                assert any(row.sampling_logprobs[i] for i in turn[1:])


@pytest.mark.field
def test_a_step_has_one_row(tmp_path):
    with tried(FAULTS["one row in every place of the batch"], tmp_path) as subject:
        samples = subject.drawn.samples
        assert len(samples) == 16
        assert len({tuple(row.token_ids) for row in samples}) == 1
        assert len({row.group for row in samples}) == 2


@pytest.mark.field
def test_replies_lack_their_first_token(tmp_path):
    name = "first token of each completion dropped"
    replies = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(replies)), "gsm8k", groups=1) as subject:
            replies.append({trace.last_reply for trace in subject.drawn.traces})
            gaps = gap(subject)
        assert (gaps > 0.05) == (fault.start is not None)
    assert any(full.endswith(cut) and full != cut for cut in replies[0] for full in replies[1])


@pytest.mark.field
def test_rollouts_of_a_task_are_equal(tmp_path):
    with tried(FAULTS["top-k of one by default"], tmp_path) as subject:
        for group in by_group(subject.drawn.samples):
            assert len({tuple(row.token_ids) for row in group}) == 1
            assert set(group[0].sampled_logprobs) == {0.0}


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "adapter trained on rounded weights and saved over exact ones",
        "one shard of each matrix in the final model",
    ],
)
def test_the_saved_model_is_another_one(name, tmp_path):
    for fault in (FAULTS[name], without(FAULTS[name])):
        folder = tmp_path / str(fault.start is None)
        with tried(fault, folder, "gsm8k", groups=1) as subject:
            assert max(rewards(subject)) > 0  # the policy still solves tasks
            assert gap(subject) < 1e-3  # engine and trainer agree
            policy = subject.run.policy
            trained = merged_weights.merged_state(policy.model)
            policy.save_final(folder / "model")
        saved = load_file(folder / "model/model.safetensors")
        distances = [(tensor - trained[name]).abs().max() for name, tensor in saved.items()]
        assert (max(distances) > 0.01) == (fault.start is not None)
