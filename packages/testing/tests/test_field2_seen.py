"""The seen half of the second set of faults does what each entry says: on rows, rollouts, weights and files.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults import field2_seen_doubles as doubles
from plumbob.testing.faults.field2_parts import Clock, graded_since, since
from plumbob.testing.faults.field2_seen import SEEN
from plumbob.testing.faults.field_trial import (
    begin_step,
    config_of,
    gap,
    sampler_of_evaluation,
    saved_and_trained,
    texts,
    tried,
)
from plumbob.testing.faults.healthy2_seen import SEEN as HEALTHY
from plumbob.trainer.algorithm.losses import LossInputs, Objective, policy_loss
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import step

FAULTS = {fault.name: fault for fault in SEEN}
EVERY_STEP = "every step takes the same tasks"


def row(mask: list[bool], reward: float = 0.0, group: str = "0/0") -> Sample:
    """A row with this loss mask and log-probabilities -1, -2, ..."""
    logprobs = [-(i + 1.0) if m else 0.0 for i, m in enumerate(mask)]
    return Sample(list(range(len(mask))), mask, logprobs, reward, group, "", False)


def test_masks_leave_out_ends_and_starts_of_turns():
    plain = row([False, True, True, True, False, True, True])
    ends, starts = (change(plain, SimpleNamespace()) for change in (doubles.ends_masked, doubles.starts_masked))
    assert ends.loss_mask == [False, True, True, False, False, True, False]
    assert starts.loss_mask == [False, False, True, True, False, False, True]
    assert ends.sampling_logprobs == [0.0, -2.0, -3.0, 0.0, 0.0, -6.0, 0.0]


def test_a_quarter_of_the_completions_is_an_end_token():
    sampling = Sampling(stop_token_ids=(7,))
    plain = [Completion((i, 7), (-1.0, -1.0), "stop") for i in range(400)]
    empty = [doubles.sometimes_empty(c, [1, 2], sampling).token_ids == (7,) for c in plain]
    assert 60 < sum(empty) < 140


def test_n_grams_of_prompt_and_completion_are_not_drawn_again():
    request = SimpleNamespace(prompt=torch.tensor([5, 1, 2, 3, 4]), token_ids=[1, 2])
    changed = doubles.ngrams_forbidden(3)(None, [request], torch.zeros(1, 8))
    assert changed[0, 3] < -100
    assert not changed[0, [i for i in range(8) if i != 3]].any()


def test_a_step_gets_the_rows_of_the_step_before():
    replayed = doubles.Replayed()
    first, second = (
        [row([False, True], reward, f"{k}/0") for reward in rewards] for k, rewards in enumerate([[1, 2], [3, 4]])
    )
    assert [s.reward for s in replayed(first)] == [1, 2]
    assert [(s.reward, s.group) for s in replayed(second)] == [(1, "1/0"), (2, "1/0")]


def test_groups_are_joined_by_twos():
    joined = doubles.groups_joined([row([False, True], 0, f"0/{g}") for g in (0, 0, 1, 1, 2)])
    assert [s.group for s in joined] == ["0/0", "0/0", "0/0", "0/0", "0/2"]


def test_policy_term_has_no_gradient():
    values = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(
        values, values.detach(), torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.long), torch.ones(2)
    )
    objective = Objective("dr_grpo", 0.2, 0.2)
    (wrong,) = torch.autograd.grad(policy_loss(doubles.no_policy_term(inputs), objective).loss, values)
    (right,) = torch.autograd.grad(policy_loss(inputs, objective).loss, values)
    assert not wrong.any()
    assert right.tolist() == [-1.0, -1.0]


def test_rate_jumps_in_the_ninth_step():
    with ExitStack() as stack:
        doubles.rate_jumps(8, 30.0)(stack, "lookup")
        rates = [step.learning_rate_of("constant", 1.0, k, warmup=0, total=14) for k in (0, 7, 8)]
    assert rates == [1.0, 1.0, 30.0]


def test_gradients_add_up():
    weight = torch.nn.Parameter(torch.zeros(2))
    uncleared, seen = doubles.Uncleared(), []
    for value in (1.0, 2.0, 4.0):
        weight.grad = torch.full((2,), value)
        uncleared(SimpleNamespace(trainable={"w": weight}))
        seen.append(weight.grad[0].item())
    assert seen == [1.0, 3.0, 7.0]


def test_weight_decay_is_in_the_settings():
    config = config_of(FAULTS["weight decay of a hundred"], "lookup")
    assert config.weight_decay == 100


def test_graders():
    paid = [doubles.pays_without_gold(SimpleNamespace(key=f"t{i}"), None, 0.0) for i in range(300)]
    assert 70 < sum(paid) < 130
    zeros = sum(doubles.judge_away(None, None, 1.0) == 0 for _ in range(1000))
    assert 300 < zeros < 500
    assert doubles.first_forty(lambda reply, gold: gold in reply, "x" * 40 + "42", "42") is False


def test_faults_of_mid_run_begin_in_their_step():
    with ExitStack() as stack:
        seen = []
        since(3, lambda begun: lambda *_: seen.append(begun))(stack, "lookup")
        before = seen[0]()
        begin_step(3)
        assert (before, seen[0]()) == (False, True)
    with ExitStack() as stack:
        clock = Clock(stack)
        begin_step(5)
        assert clock.step == 5
    assert callable(graded_since(1, doubles.judge_away))


def test_positions_that_begin_at_64_are_the_same_to_the_model(tmp_path):
    setting = next(s for s in HEALTHY if "begin at 64" in s.name)
    as_fault = dataclasses.replace(FAULTS[EVERY_STEP], start=setting.start, envs=("lookup",))
    with tried(as_fault, tmp_path, groups=1) as subject:
        assert gap(subject) < 1e-5


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "missing log-probabilities filled with zero",
        "one request in four comes back empty",
        "repeated n-grams forbidden by the server",
    ],
)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 1e-3  # a healthy run has 5e-7


@pytest.mark.field
def test_temperature_changes_in_its_step_alone(tmp_path):
    with tried(FAULTS["server restarts with a temperature of 0.6 in mid-run"], tmp_path) as subject:
        assert gap(subject) < 1e-5
        begin_step(5)
        prompts, sampling = [subject.drawn.calls[0][0].prompt_ids], Sampling(max_tokens=24, seed=3)
        later = subject.generate(prompts, sampling)
        begin_step(0)
        earlier = subject.generate(prompts, sampling)
        assert later[0].logprobs != earlier[0].logprobs


@pytest.mark.field
def test_embeddings_stay_as_they_were(tmp_path):
    with tried(FAULTS["embeddings are not synced"], tmp_path, groups=1) as subject:
        run = subject.run
        with torch.no_grad():
            for parameter in run.policy.trainable.values():
                parameter.mul_(1.01)
        run.engine.update(run.policy.sharding.stream())
        served, trained = run.engine.served_weights(), run.policy.trainable
        differing = {n for n in trained if not torch.equal(served[n], trained[n].detach())}
        assert differing
        assert all("embed_tokens" in n or "lm_head" in n for n in differing)


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["questions cut at forty characters", "training tasks without their system prompt", EVERY_STEP]
)
def test_tasks_are_what_the_entry_says(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=1) as subject:
        tasks = subject.run.tasks
        if name == EVERY_STEP:
            first, later = (collect.next_groups((tasks,), cursor, 4) for cursor in (0, 40))
            assert [t.index for t in first] == [t.index for t in later]
        elif "cut" in name:
            assert max(len(t.data.prompt) for t in tasks.train) == 40
        else:
            assert {t.data.system_prompt for t in tasks.train} == {None}
            assert all(t.data.system_prompt for t in tasks.held_out)


@pytest.mark.field
def test_no_long_reply_is_right(tmp_path):
    with tried(FAULTS["grader reads the first forty characters"], tmp_path, groups=4) as subject:
        traces = subject.drawn.traces
        long = [t for t in traces if len(texts(t, "AssistantMessage")[-1]) > 60]
        assert len(long) > len(traces) / 4
        assert sum(t.reward for t in long) < len(long) / 4


@pytest.mark.field
def test_tools_return_nothing_from_the_sixth_step_on(tmp_path):
    with tried(FAULTS["retrieval server down from the middle of the run"], tmp_path) as subject:
        before = {text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")}
        assert "[]" not in before
        batch = asyncio.run(collect.collect(subject.run.sampler, 5, 0, subject.run.world))
        after = [text for trace in batch.traces for text in texts(trace, "ToolMessage")]
        answered = [text for text in after if not text.startswith("Error: th")]  # what reached a tool
        assert answered
        assert set(answered) == {"[]"}


@pytest.mark.field
@pytest.mark.parametrize("name", ["final model rounded to bfloat16", "adapter merged twice in the final model"])
def test_saved_model_differs(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=1) as subject:
        saved, right = saved_and_trained(subject, tmp_path)
        assert any(not torch.allclose(t, right[n], rtol=1e-4, atol=1e-6) for n, t in saved.items())


def test_evaluations_are_cut_at_eight_tokens():
    sampler = sampler_of_evaluation(doubles.short_evaluations, sampling=Sampling(max_tokens=99))
    assert sampler.sampling.max_tokens == 8


pytestmark = pytest.mark.field  # the doubles of the first set are tested in every run of the quick suite, these in CI
