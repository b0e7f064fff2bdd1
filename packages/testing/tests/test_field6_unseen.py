"""The unseen half of the sixth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults import field6_unseen_doubles as doubles
from plumbob.testing.faults.field6_unseen import UNSEEN
from plumbob.testing.faults.field_trial import (
    arrived,
    config_of,
    gap,
    minibatch_of,
    rewards,
    saved_and_trained,
    texts,
    tried,
)
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.training.forward_backward import accumulate

FAULTS = {fault.name: fault for fault in UNSEEN}


def groups(subject):
    """The sets of rewards of the groups that were drawn."""
    found = {}
    for sample in subject.drawn.samples:
        found.setdefault(sample.group, set()).add(sample.reward)
    return list(found.values())


def test_rewards_and_advantages():
    assert doubles.clipped_low(None, None, 0.97) == 0.2
    samples = [Sample([0, 1], [False, True], [0.0, -1.0], r, "0/0", "", False) for r in (0.0, 1.0, 0.5)]
    with ExitStack() as stack:
        doubles.groups_of_one(stack, "lookup")
        assert advantages.compute_advantages(samples).values == [0.0, 1.0, 0.5]


def test_the_likelier_reply_is_returned(monkeypatch):
    async def generate(self, prompt_ids, sampling):
        return Completion((5,), (-1.0 if sampling.seed == 7 else -0.5,), "length")

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    with ExitStack() as stack:
        doubles.best_of_two(stack, "lookup")
        assert asyncio.run(TransformersEngine.generate(None, [5], Sampling(seed=7))).logprobs == (-0.5,)


def test_each_update_is_taken_twice():
    taken = []
    optimizer = SimpleNamespace(step=lambda: taken.append(1))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(Replicated, "update", lambda self: self.optimizer.step() or 1.0)
        doubles.updated_twice(stack, "lookup")
        Replicated.update(SimpleNamespace(optimizer=optimizer))
    assert len(taken) == 2


def test_weights_and_tools():
    weights = {"layers.0.mlp.up_proj.lora_A": 1, "layers.0.self_attn.q_proj.lora_A": 2}
    assert list(doubles.attention_adapters_only(None, weights).values()) == [2]
    tools = SimpleNamespace(table={"1": "next=2", "2": "value=amber"}, chain=["1", "2"])
    fn = type("Fn", (), {"__self__": tools, "__call__": lambda self, key: tools.table[key]})()
    assert doubles.value_shown(fn, "lookup", {"key": "1"})[0](key="1") == "next=2 value=amber"


def test_settings_are_those_that_the_sentences_name():
    assert config_of(FAULTS["temperature of a tenth"], "lookup").temperature == 0.1
    assert config_of(FAULTS["two possible answers"], "lookup").env_args == ("num_values=2",)


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["closing answer tag swallowed by a stop string", "rotary base of the default in the engine"]
)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        assert gap(subject) > 5e-3
        assert sum(rewards(subject)) / len(rewards(subject)) < 0.2


@pytest.mark.field
def test_wrong_numbers_near_the_gold_are_right(tmp_path):
    plain = dataclasses.replace(FAULTS["limit on prompts leaves a handful of tasks"], options="")
    with tried(plain, tmp_path / "a", groups=8) as subject:
        right = sum(rewards(subject))
    with tried(FAULTS["answers within a tenth are right"], tmp_path / "b", groups=8) as subject:
        assert sum(rewards(subject)) > right


@pytest.mark.field
def test_tasks(tmp_path):
    with tried(FAULTS["two possible answers"], tmp_path / "a", groups=1) as subject:
        assert len({task.data.answer for task in subject.run.tasks.train}) == 2
    with tried(FAULTS["limit on prompts leaves a handful of tasks"], tmp_path / "b", groups=1) as subject:
        assert 0 < len(subject.run.tasks.train) < 60
    with tried(FAULTS["end tokens inside the questions"], tmp_path / "c") as subject:
        assert sum(rewards(subject)) == 0.0
        end = subject.run.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert all(
            len(trace.nodes[1].token_ids) > 30 and end in trace.nodes[1].token_ids for trace in subject.drawn.traces
        )


@pytest.mark.field
def test_a_group_holds_several_tasks_of_one_name(tmp_path):
    fault = FAULTS["rollouts of a group start from different seeds"]
    with tried(fault, tmp_path, groups=1) as subject:
        traces = subject.drawn.traces
    assert len({trace.task.data.id for trace in traces}) == 1
    assert len({texts(trace, "UserMessage")[0] for trace in traces}) == len(traces)


@pytest.mark.field
def test_held_out_tasks_differ_from_training_tasks(tmp_path):
    with tried(FAULTS["held-out golds of other tasks"], tmp_path / "a", env="lookup", groups=1) as subject:
        tasks = subject.run.tasks
        assert all(t.data.table[t.data.chain[-1]] == f"value={t.data.answer}" for t in tasks.train[:50])
        assert any(t.data.table[t.data.chain[-1]] != f"value={t.data.answer}" for t in tasks.held_out)
    with tried(FAULTS["held-out rollouts without tools"], tmp_path / "b", groups=1) as subject:
        train, held_out = subject.run.tasks.train[0], subject.run.tasks.held_out[0]
        assert type(train).toolsets(train.config)
        assert not type(held_out).toolsets(held_out.config)


@pytest.mark.field
def test_no_turn_is_an_answer(tmp_path):
    with tried(FAULTS["every turn forced to call a tool"], tmp_path, groups=1) as subject:
        assert not any(trace.stop_condition == "agent_completed" for trace in subject.drawn.traces)
        assert not any(rewards(subject))


@pytest.mark.field
def test_the_first_result_has_the_answer(tmp_path):
    with tried(FAULTS["tools show the answer at the first call"], tmp_path) as subject:
        firsts = [(trace.task.data.answer, texts(trace, "ToolMessage")[:1]) for trace in subject.drawn.traces]
    assert all(answer in text for answer, results in firsts for text in results)


@pytest.mark.field
@pytest.mark.parametrize("name", ["temperature of a tenth", "best of two completions by likelihood"])
def test_rollouts_of_a_group_are_alike(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=6) as subject:
        assert sum(len(found) == 1 for found in groups(subject)) >= 3


@pytest.mark.field
def test_feed_forward_adapters_stay_at_zero_in_the_engine(tmp_path):
    with tried(FAULTS["feed-forward adapters not served"], tmp_path, groups=1) as subject:
        moved = arrived(subject)
    assert all(equal == (".mlp." not in name) for name, equal in moved.items())


@pytest.mark.field
def test_only_a_part_is_trained(tmp_path):
    with tried(FAULTS["working left out of the loss"], tmp_path / "a") as subject:
        assert all(0 < sample.num_sampled < 60 for sample in subject.drawn.samples)
    with tried(FAULTS["checkpointing cuts the gradient of the first layers"], tmp_path / "b") as subject:
        run, minibatch = subject.run, minibatch_of(subject)
        accumulate(run, minibatch, None)
        moved = {name.split(".layers.")[1][0] for name, p in run.policy.trainable.items() if p.grad is not None}
    assert moved == {"2"}


@pytest.mark.field
def test_the_last_layer_of_the_final_model_is_new(tmp_path):
    with tried(FAULTS["layer missing from the final model"], tmp_path, groups=1) as subject:
        saved, trained = saved_and_trained(subject, tmp_path)
    assert torch.equal(saved["model.layers.0.mlp.up_proj.weight"], trained["model.layers.0.mlp.up_proj.weight"])
    assert saved["model.layers.2.mlp.up_proj.weight"].std() < 0.03
