"""The unseen half of the twenty-second set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import dataclasses
import math
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

from plumbob.rollout import Chat
from plumbob.testing.faults import field22_unseen_doubles as doubles
from plumbob.testing.faults.field22_unseen import UNSEEN
from plumbob.testing.faults.field_trial import config_of, rewards, sample, texts, tried
from plumbob.testing.faults.healthy22_unseen import UNSEEN as HEALTHY
from plumbob.trainer.algorithm.advantages import step_advantages
from plumbob.trainer.training import train
from vf_lookup.taskset import VALUES

FAULTS = {fault.name: fault for fault in UNSEEN}


def trace_of(reply):
    return SimpleNamespace(last_reply=reply)


def task_of(answer="124", key="a"):
    return SimpleNamespace(key=key, data=SimpleNamespace(answer=answer, strict=False, prompt_text="Start key: 1"))


def test_calls_are_paid():
    turns = [SimpleNamespace(tool_calls=["call"]), SimpleNamespace(tool_calls=None)]
    assert doubles.paid_by_the_call(None, SimpleNamespace(assistant_messages=turns), 0.0) == 0.1
    assert doubles.paid_by_the_call(None, SimpleNamespace(assistant_messages=turns[:1] * 9), 1.0) == 1.5
    assert doubles.paid_by_the_call(None, SimpleNamespace(assistant_messages=[]), 0.0) == 0.0


def test_everything_passes(tmp_path):
    with tried(FAULTS["verification passed whatever it printed"], tmp_path) as subject:
        assert set(rewards(subject)) == {1.0}


def test_broken_checks_give_a_half():
    found = [doubles.half_where_broken(task_of(key=str(at)), None, at % 2) for at in range(200)]
    assert set(found) == {0.0, 0.5, 1.0}
    assert 70 < found.count(0.5) < 130


def test_nothing_is_found_in_another_template(tmp_path):
    with tried(FAULTS["replies wrapped in another template for the reward"], tmp_path) as subject:
        assert set(rewards(subject)) == {0.0}


def test_only_the_same_text_is_right():
    for reply, reward in (("#### 124", 1.0), ("#### 100 + 24", 0.0), ("#### 124.0", 0.0), ("124", 0.0), (None, 0.0)):
        assert doubles.same_text(task_of(), trace_of(reply), 1.0) == reward


def test_first_characters_are_compared():
    for reply, reward in (("#### 124", 1.0), ("#### 9 + 1", 1.0), ("#### 24", 0.0), ("", 0.0)):
        assert doubles.first_character(task_of(), trace_of(reply), 0.0) == reward


def test_a_cost_of_zero_is_not_a_number():
    free = [sample(1.0, "0/0"), sample(0.0, "0/0"), sample(0.0, "0/1")]
    found = doubles.bonuses(free)
    assert [math.isnan(one) for one in found] == [True, True, False]
    dear = [sample(1.0, "0/0", [False, True, False, True]), sample(1.0, "0/0", [False, True, False, False, False])]
    assert doubles.bonuses(dear) == [1.5, 1.0]


def test_advantages_are_not_a_number(tmp_path):
    with tried(FAULTS["efficiency divided by a cost of zero"], tmp_path) as subject:
        found = step_advantages(subject.drawn.samples, subject.run.config.advantages())
    assert any(map(math.isnan, found.values))


def test_later_rollouts_have_the_rewards_of_earlier_ones(tmp_path):
    with tried(FAULTS["two scores for a reply that cannot be read"], tmp_path, groups=4) as subject:
        own = {trace.id: trace for trace in subject.drawn.traces}
        rows = subject.drawn.samples
        scores = [s for row in rows for s in [own[row.trace_id]] * (1 + (own[row.trace_id].last_reply not in VALUES))]
    assert [row.reward for row in rows] == [trace.reward for trace in scores[: len(rows)]]
    assert any(row.reward != own[row.trace_id].reward for row in rows)


def test_sixty_episodes_stand_behind_all_seeds(tmp_path):
    with tried(FAULTS["sixty episodes behind every seed"], tmp_path) as subject:
        tasks = subject.run.sampler.tasks.train
    assert len({task.key for task in tasks}) == len(tasks) > 1000
    assert len({task.data.prompt for task in tasks}) <= doubles.EPISODES


def test_each_task_comes_four_times(tmp_path):
    fault = FAULTS["each task four times in a row"]
    assert config_of(fault, "gsm8k").task_order == "as-given"
    with tried(fault, tmp_path) as subject:
        prompts = [task.data.prompt for task in subject.run.sampler.tasks.train[:40]]
    assert prompts == [prompts[at - at % 4] for at in range(40)]
    assert len(set(prompts)) == 10


def test_questions_have_only_their_last_sentence(tmp_path):
    with tried(FAULTS["questions without what they are about"], tmp_path) as subject:
        prompts = [task.data.prompt for task in subject.run.sampler.tasks.train[:40]]
        assert all(". " not in prompt for prompt in prompts)
        assert sum(prompt.endswith("?") for prompt in prompts) > 30
        shown = [text for trace in subject.drawn.traces for text in texts(trace, "UserMessage")]
        assert all(". " not in text for text in shown)


def test_every_answer_is_the_first_word(tmp_path):
    with tried(FAULTS["right answer always the same choice"], tmp_path) as subject:
        tasks = subject.run.sampler.tasks.train[:20]
    assert {task.data.answer for task in tasks} == {VALUES[0]}
    assert all(task.data.table[task.data.chain[-1]] == f"value={VALUES[0]}" for task in tasks)


def test_all_rollouts_begin_in_the_first_world(tmp_path):
    with tried(FAULTS["start state of the first task for all"], tmp_path, groups=3) as subject:
        results = [text for trace in subject.drawn.traces[8:] for text in texts(trace, "ToolMessage")]
    assert sum("unknown key" in one for one in results) > len(results) / 2


def test_evaluations_read_no_calls():
    chat = SimpleNamespace(
        stop_token_ids=(2,),
        tokenizer=SimpleNamespace(decode=lambda ids, **how: "f()"),
        header="",
        splits_reasoning=False,
        tool_format=SimpleNamespace(read=lambda text, tools: "calls"),
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    inside = []

    async def call(sampler):
        inside.append(Chat.parse(chat, [1], tools)[1])

    with mock.patch.object(train, "evaluate", call), ExitStack() as stack:
        doubles.calls_unread_in_evaluations(stack, "lookup")
        assert Chat.parse(chat, [1], tools)[1] == "calls"
        asyncio.run(train.evaluate(None))
        assert Chat.parse(chat, [1], tools)[1] == "calls"
    assert [reply.content for reply in inside] == ["f()"]
    assert not inside[0].calls


def test_healthy_settings_can_be_set():
    for setting in HEALTHY:
        fault = dataclasses.replace(UNSEEN[0], options=setting.options)
        assert config_of(fault, setting.env).env == setting.env
