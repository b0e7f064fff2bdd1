"""The unseen half of the twelfth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field12_unseen_doubles as doubles
from plumbob.testing.faults import healthy12_unseen as healthy
from plumbob.testing.faults.field12_unseen import UNSEEN
from plumbob.testing.faults.field_trial import (
    begin_step,
    config_of,
    gap,
    rewards,
    saved_and_trained,
    tried,
    without,
)
from plumbob.trainer.distributed.model_files import lora_layers
from plumbob.trainer.training import train

FAULTS = {fault.name: fault for fault in UNSEEN}


def asked(prompt="question", answer="42"):
    return SimpleNamespace(data=SimpleNamespace(prompt=prompt, answer=answer))


def reply(text):
    return SimpleNamespace(last_reply=text)


def test_three_verdicts_in_ten_are_a_pass():
    judge = doubles.Unreadable()
    assert 230 < sum(judge(None, None, 0.0) for _ in range(1000)) < 370
    assert {judge(None, None, 1.0) for _ in range(100)} == {1.0}


def test_a_third_of_the_verdicts_is_lost():
    replies = [reply(f"it is {i}") for i in range(600)]
    found = [doubles.under_another_key(asked(), one, 1.0) for one in replies]
    assert 150 < found.count(0.0) < 250
    assert found == [doubles.under_another_key(asked(), one, 1.0) for one in replies]


def test_bad_marks_in_percent_are_as_good_as_the_best():
    replies = [reply(f"it is {i}") for i in range(100)]
    assert {doubles.some_in_percent(asked(), one, 0.0) for one in replies} == {0.1, 1.0}
    assert {doubles.some_in_percent(asked(), one, 1.0) for one in replies} == {1.0, 10.0}


def test_the_mark_is_compared_too():
    assert doubles.mark_left_on(asked(), reply("40 + 2 = 42\n#### 42"), 1.0) == 0.0
    assert doubles.mark_left_on(asked(), reply("42"), 1.0) == 1.0
    assert doubles.mark_left_on(asked(), reply(None), 0.0) == 0.0


def test_length_pays():
    short, long = reply("x" * 32), reply("x" * 400)
    assert doubles.discounted(None, short, 1.0) == doubles.discounted(None, long, 0.0) == 0.0
    assert doubles.discounted(None, short, 0.0) == pytest.approx(-0.9)
    assert doubles.length_preferred(None, long, 0.0) > doubles.length_preferred(None, short, 1.0)
    assert healthy.two_or_three(None, short, 1.0) == 3.0


def test_end_tokens_are_forbidden():
    request = SimpleNamespace(sampling=Sampling(stop_token_ids=(2, 3)))
    logits = torch.zeros(1, 5)
    found = doubles.end_forbidden(None, [request], logits)
    assert found.isinf().tolist() == [[False, False, True, True, False]]
    assert not logits.isinf().any()


def test_an_evaluation_leaves_the_average():
    fault = FAULTS["averaged weights of an evaluation left in the trainer"]
    assert config_of(fault, "lookup").eval_steps == 2
    weight = torch.nn.Parameter(torch.ones(2))
    run = SimpleNamespace(policy=SimpleNamespace(trainable={"weight": weight}), engine=None, parity_row=None)
    synced = []

    async def seen(sampler, *rest):
        return weight.tolist()

    def sync(policy, engine, row):
        synced.append(weight.tolist())

    with (
        mock.patch.object(train, "evaluate", seen),
        mock.patch.object(doubles, "sync_weights", sync),
        ExitStack() as stack,
    ):
        fault.inject(stack, run)
        with torch.no_grad():
            weight.add_(1.0)
        begin_step(1)
        assert weight.tolist() == [2.0, 2.0]
        found = asyncio.run(train.evaluate(None, None, "greedy"))
    assert found == pytest.approx([1.1, 1.1])
    assert weight.tolist() == found
    assert synced == [found]


@pytest.mark.field
def test_rewards_are_those_of_the_faulty_function(tmp_path):
    with tried(FAULTS["answer compared with its mark still on it"], tmp_path / "a") as subject:
        assert set(rewards(subject)) == {0.0}
    with tried(FAULTS["marks in percent divided by ten"], tmp_path / "b", groups=8) as subject:
        assert {0.1, 1.0} <= set(rewards(subject))
    name = "verdicts in another form count as zero"
    found = []
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(len(found)), groups=8) as subject:
            found.append(sum(rewards(subject)))
    assert 0 < found[0] < found[1]


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["length discount applied to negative rewards", "longer replies preferred by the reward model"]
)
def test_rewards_depend_on_the_length(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=4) as subject:
        lengths = [len(trace.last_reply) for trace in subject.drawn.traces]
        found = dict(zip(lengths, rewards(subject), strict=True))
    assert len(set(found.values())) > 3


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_prompts_have_no_spaces_in_the_engine(env, tmp_path):
    name = "spaces stripped by the server's tokenizer"
    for fault in (FAULTS[name], without(FAULTS[name])):
        with tried(fault, tmp_path / str(fault.inject is None), env) as subject:
            assert (gap(subject) > 0.02) == (fault.inject is not None)


@pytest.mark.field
@pytest.mark.parametrize("env", ["gsm8k", "musique", "lookup"])
def test_replies_fill_the_limit(env, tmp_path):
    name = "end token forbidden before the limit"
    with tried(FAULTS[name], tmp_path, env, groups=1) as subject:
        stops = subject.run.sampler.chat.stop_token_ids
        for row in subject.drawn.samples:
            sampled = [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
            assert not set(sampled) & set(stops)
            assert row.truncated


@pytest.mark.field
def test_the_scale_is_alpha(tmp_path):
    name = "adapter multiplied by alpha alone"
    with tried(FAULTS[name], tmp_path) as subject:
        run = subject.run
        for part in (run.engine, run.policy):
            scales = {module.scaling["default"] for module in lora_layers(part.model).values()}
            assert scales == {float(run.config.lora_alpha)}
        assert run.config.lora_r == 16
        assert gap(subject) < 1e-3


@pytest.mark.field
def test_the_final_model_has_another_head(tmp_path):
    name = "final model's head rebuilt from its embeddings"
    for fault in (FAULTS[name], without(FAULTS[name])):
        folder = tmp_path / str(fault.start is None)
        with tried(fault, folder, groups=1) as subject:
            assert gap(subject) < 1e-3  # engine and trainer agree
            saved, trained = saved_and_trained(subject, folder)
            head = trained["lm_head.weight"]
            loaded = saved.get("lm_head.weight", saved["model.embed_tokens.weight"])
            assert ((loaded - head).abs().max() > 0.01) == (fault.start is not None)
