"""The unseen half of the eleventh set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field11_unseen_doubles as doubles
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field11_unseen import UNSEEN
from plumbob.testing.faults.field_trial import (
    begin_step,
    gap,
    loss_inputs,
    minibatch_of,
    rewards,
    sample,
    tried,
    without,
)
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.losses import Objective
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in UNSEEN}


def reply(text):
    return SimpleNamespace(last_reply=text)


def test_the_answer_earns_nothing():
    assert doubles.brevity(None, reply(""), 0.0) == 1.0
    assert doubles.brevity(None, reply("x" * 80), 1.0) == 0.5
    assert doubles.brevity(None, reply("x" * 200), 1.0) == 0.0


def test_turns_are_found_where_their_text_stands_first():
    row = sample(mask=[False] * 5 + [True] * 3)
    row.token_ids[:] = [9, 6, 7, 8, 9, 7, 8, 2]
    found = doubles.turns_found_by_text(row, None)
    assert found.loss_mask == [False, False, True, True, False, False, False, False]
    assert found.sampling_logprobs == [0.0, 0.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert found.token_ids == row.token_ids


def test_a_fifth_of_the_rows_are_a_token():
    rows = [sample(1.0, mask=[False, False, True, True, True]) for _ in range(200)]
    rows = [type(row)(**{**vars(row), "trace_id": f"rollout {i}"}) for i, row in enumerate(rows)]
    found = [doubles.failed_as_one_token(row, None) for row in rows]
    failed = [row for row in found if row.num_sampled == 1]
    assert 15 < len(failed) < 70
    assert {(tuple(row.token_ids), row.reward) for row in failed} == {((0, 1, 0), 0.0)}
    assert all(row in rows for row in found if row not in failed)


def test_the_odd_rollout_is_missing():
    def group(name, *values):
        return [sample(value, name) for value in values]

    kept = doubles.odd_one_filtered([*group("a", 1.0, 0.0, 0.0, 0.0), *group("b", 1.0, 1.0, 0.0, 0.0)])
    assert [row.reward for row in kept if row.group == "a"] == [0.0] * 3
    assert [row.reward for row in kept if row.group == "b"] == [1.0, 1.0, 0.0, 0.0]
    assert len(doubles.odd_one_filtered(group("c", 1.0, 1.0, 1.0))) == 3


def test_several_turns_are_not_scaled():
    one, two = [False, True, True], [False, True, False, True]
    samples = [sample(reward, mask=mask) for reward, mask in ((1.0, one), (0.0, one), (1.0, two), (0.0, two))]
    scaled = advantages.compute_advantages(samples, "group").values
    with ExitStack() as stack:
        doubles.unscaled_with_tools(stack, "lookup")
        found = advantages.compute_advantages(samples, "group").values
    assert found[:2] == scaled[:2]
    assert found[2:] == [0.5, -0.5]
    assert scaled[2] > 0.8


def test_prompts_begin_with_what_was_before():
    change = doubles.NotReset()
    first, _ = change(list(range(100)), Sampling())
    second, _ = change([7, 8], Sampling())
    assert first == list(range(100))
    assert second == [*range(100 - doubles.CARRIED, 100), 7, 8]


def test_the_rate_falls_too_slowly():
    def rates():
        return [step_module.learning_rate_of("linear", 1.0, at, warmup=0, total=8) for at in range(8)]

    plain = rates()
    with ExitStack() as stack:
        doubles.schedule_of_more_steps(stack, "lookup")
        found = rates()
    assert plain[-1] < 0.3
    assert min(found) > 0.7


def test_the_coefficient_is_infinite_from_the_second_step_on():
    fault = FAULTS["KL coefficient that becomes infinite"]
    inputs = loss_inputs([1.0, 1.0], rows=torch.zeros(2, dtype=torch.long), ref_logprobs=torch.full((2,), -1.5))
    objective = Objective("dr_grpo", 0.2, 0.2, kl_beta=0.01)
    with ExitStack() as stack:
        fault.start(stack, "lookup")
        assert forward_backward.policy_loss(inputs, objective).loss.isfinite()
        begin_step(1)
        assert not forward_backward.policy_loss(inputs, objective).loss.isfinite()


@pytest.mark.field
def test_queries_are_in_small_letters_in_the_row_alone(tmp_path):
    with tried(FAULTS["arguments of calls cleaned up before they are trained"], tmp_path) as subject:
        tokenizer = subject.run.tokenizer
        for row, trace in zip(subject.drawn.samples, subject.drawn.traces, strict=True):
            text = tokenizer.decode([t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m])
            queries = [found[2] for found in doubles.QUERY.finditer(text)]
            own = [str(call.arguments) for turn in trace.assistant_messages for call in turn.tool_calls or []]
            assert all(query == query.lower() for query in queries)
            assert not queries or any(arguments != arguments.lower() for arguments in own)
        assert gap(subject) > 0.1


@pytest.mark.field
def test_answers_are_trained_where_the_tool_wrote_them(tmp_path):
    name = "turns found by their text at an earlier place"
    masks = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(masks)), "lookup", groups=4) as subject:
            masks.append([{i for i, m in enumerate(row.loss_mask) if m} for row in subject.drawn.samples])
    assert any(found - plain for found, plain in zip(*masks, strict=True))
    assert all(plain - found for found, plain in zip(*masks, strict=True))  # no end token is trained


@pytest.mark.field
@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("agent not reset between rollouts", "gsm8k"),
        ("probabilities returned as log-probabilities", "gsm8k"),
        ("attention window on one side only", "musique"),
        ("failed rollouts trained as one token", "lookup"),
    ],
)
def test_engine_and_trainer_differ(name, env, tmp_path):
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.inject is None and fault.start is None), env) as subject:
            faulty = fault.inject is not None or fault.start is not None
            assert (gap(subject) > 0.02) == faulty
            assert max(rewards(subject)) > 0.3  # the policy still solves tasks


@pytest.mark.field
def test_probabilities_are_positive(tmp_path):
    with tried(FAULTS["probabilities returned as log-probabilities"], tmp_path) as subject:
        returned = [x for row in subject.drawn.samples for x in row.sampled_logprobs]
    assert all(0 < x <= 1 for x in returned)
    assert min(map(math.log, returned)) < -0.1


@pytest.mark.field
def test_positions_are_lost_at_the_second_sync(tmp_path):
    name = "rotary buffers lost while the engine sleeps"
    with tried(FAULTS[name], tmp_path, "gsm8k") as subject:
        run, row = subject.run, subject.drawn.samples[0]
        before = run.engine.score(row.token_ids)
        assert gap(subject) < 1e-3
        run.engine.update(run.policy.sharding.stream())
        run.engine.update(run.policy.sharding.stream())
        after = run.engine.score(row.token_ids)
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.1


@pytest.mark.field
def test_right_replies_earn_as_much_as_wrong_ones_of_their_length(tmp_path):
    with tried(FAULTS["two rewards with the settings of the last one"], tmp_path, "gsm8k") as subject:
        for row, trace in zip(subject.drawn.samples, subject.drawn.traces, strict=True):
            assert row.reward == pytest.approx(2 * doubles.brevity(None, trace, 0.0))
            assert len(row.rewards) == 2


@pytest.mark.field
def test_tool_rollouts_have_other_advantages(tmp_path):
    name = "rollouts with tool calls left without scaling"
    with tried(FAULTS[name], tmp_path, groups=4) as subject:
        found = minibatch_of(subject)
        plain = advantages.compute_advantages(found.rows, "none").values
    several = [i for i, row in enumerate(found.rows) if len(runs_of(row.loss_mask)) > 1]
    assert any(plain[i] for i in several)
    assert [found.advantages[i] for i in several] == pytest.approx([plain[i] for i in several])


@pytest.mark.field
def test_replies_are_full_of_new_tokens(tmp_path):
    name = "new tokens with random embeddings"
    shares = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(shares)), "gsm8k") as subject:
            size = subject.run.policy.model.config.vocab_size
            sampled = [t for r in subject.drawn.samples for t, m in zip(r.token_ids, r.loss_mask, strict=True) if m]
            shares.append(sum(t >= size - doubles.NEW for t in sampled) / len(sampled))
            assert gap(subject) < 1e-3
    assert shares[0] > shares[1] + 0.2
