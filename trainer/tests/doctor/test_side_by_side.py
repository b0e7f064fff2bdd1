"""Rollouts that are played at the same time, results that are of other tasks, and questions that stand in a prompt twice."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.examinations import causes, lookup_tasks
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.before_model import side_by_side, task_sets, tool_results
from plumbob.trainer.doctor.before_model.other_results import Result
from plumbob.trainer.doctor.environment import Played
from plumbob.trainer.doctor.expected_successes import expected_successes
from plumbob.trainer.doctor.probes import signal
from vf_lookup.taskset import LookupTask, LookupToolset
from vf_musique.tools import MusiqueToolset

MUSIQUE = {"env": "musique", "env_args": ("datasets=synthetic", "num_examples=60", "hops=2")}


def shared_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tools answer from the table that was set up last."""
    held: dict[str, Any] = {}
    one = property(lambda self: held["table"], lambda self, value: held.__setitem__("table", value))
    monkeypatch.setattr(LookupToolset, "table", one, raising=False)


def test_tools_that_share_their_state_are_seen_at_the_same_time_and_not_alone(examined, monkeypatch):
    (healthy,) = side_by_side.checks(examined(tasks=lookup_tasks()))
    assert healthy.verdict == "pass" and "0 of " in healthy.evidence
    shared_by_all(monkeypatch)
    environment = examined(tasks=lookup_tasks())
    assert causes(tool_results.checks(environment)) == []
    assert causes(side_by_side.checks(environment)) == ["tool-results-mixed"]
    one_by_one = examined(tasks=lookup_tasks(), max_concurrent=1)
    assert list(side_by_side.checks(one_by_one)) == []


def test_rewards_that_are_those_of_whichever_rollout_comes_last_are_seen(examined, monkeypatch):
    newest: list[vf.TaskData] = []
    setup, correct = LookupToolset.setup_task, LookupTask.correct

    async def setup_task(self, data):
        newest[:] = [data]
        await setup(self, data)

    @functools.wraps(correct)  # which is what makes it a reward
    async def of_the_newest(self, trace):
        return float(trace.last_reply == newest[0].answer)

    monkeypatch.setattr(LookupToolset, "setup_task", setup_task)
    monkeypatch.setattr(LookupTask, "correct", of_the_newest)
    assert causes(side_by_side.checks(examined(tasks=lookup_tasks()))) == ["rewards-of-other-rollouts"]


def test_rollouts_that_fail_beside_others_alone_are_seen(examined, monkeypatch):
    call, busy = adapter.BoundTool.call, [0]

    async def alone(self, given, caller=None):
        busy[0] += 1
        try:
            if busy[0] > 1:
                raise adapter.ToolsetError("the server has one session")
            await asyncio.sleep(0)
            return await call(self, given, caller)
        finally:
            busy[0] -= 1

    monkeypatch.setattr(adapter.BoundTool, "call", alone)
    assert causes(side_by_side.checks(examined(tasks=lookup_tasks()))) == ["environment-fails"]


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_tools_that_are_random_by_themselves_are_no_fault(examined, monkeypatch, share):
    call = adapter.BoundTool.call
    for seed in range(4):
        chance = random.Random(seed)

        async def sometimes(self, given, caller=None, chance=chance):
            result = await call(self, given, caller)
            return "The page did not load, try again." if chance.random() < share else result

        monkeypatch.setattr(adapter.BoundTool, "call", sometimes)
        assert causes(side_by_side.checks(examined(tasks=lookup_tasks()))) == []


def test_a_server_of_few_sessions_is_asked_for_as_many_as_the_run_asks_for(examined, monkeypatch):
    call, busy = adapter.BoundTool.call, [0]

    async def limited(self, given, caller=None):
        busy[0] += 1
        try:
            if busy[0] > 4:
                raise adapter.ToolsetError("four sessions are open")
            await asyncio.sleep(0)
            return await call(self, given, caller)
        finally:
            busy[0] -= 1

    monkeypatch.setattr(adapter.BoundTool, "call", limited)
    assert causes(side_by_side.checks(examined(tasks=lookup_tasks(), max_concurrent=4))) == []
    assert causes(side_by_side.checks(examined(tasks=lookup_tasks(), max_concurrent=64))) == ["environment-fails"]


def test_results_that_hold_the_system_message_are_named(examined, monkeypatch):
    system = lookup_tasks().train[0].data.system_prompt
    call = adapter.BoundTool.call

    async def with_it(self, given, caller=None):
        return f"{await call(self, given, caller)}\n\n{system}"

    monkeypatch.setattr(adapter.BoundTool, "call", with_it)
    assert causes(tool_results.checks(examined(tasks=lookup_tasks()))) == ["tool-results-mixed"]
    own = adapter.BoundTool.own_result

    async def rules_again(self, given):
        return f"{await own(self, given)}\n\n{system}"

    monkeypatch.setattr(adapter.BoundTool, "own_result", rules_again)  # as a game's tool may do
    assert causes(tool_results.checks(examined(tasks=lookup_tasks()))) == []


@pytest.mark.slow
def test_a_tool_that_shows_one_document_for_all_numbers_of_a_task_is_named(examined, monkeypatch):
    render = MusiqueToolset.render
    monkeypatch.setattr(MusiqueToolset, "render", lambda self, number: render(self, next(iter(self.documents))))
    assert causes(tool_results.checks(examined(**MUSIQUE)))[0] == "tools-return-nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("toolset", "settings"), [(LookupToolset, {}), (MusiqueToolset, MUSIQUE)])
def test_tools_that_stay_set_up_for_the_first_task_are_named(examined, monkeypatch, toolset, settings):
    setup, first = toolset.setup_task, []

    async def setup_once(self, task):
        first.append(task)
        await setup(self, first[0])

    monkeypatch.setattr(toolset, "setup_task", setup_once)
    named = causes(tool_results.checks(examined(**settings)))
    assert named and named[0] in ("tool-results-mixed", "tools-return-nothing", "tool-results-wrong")


def test_the_same_result_for_every_call_of_a_task_needs_several_calls_in_enough_tasks():
    tasks: list[Any] = [SimpleNamespace(key=str(i)) for i in range(20)]
    same = [
        Result(task, "read", {"id": i}, f"a text about the task number {task.key}") for task in tasks for i in (1, 2)
    ]
    assert "in 20 of 20 tasks" in tool_results._same_for_all(same)
    assert tool_results._same_for_all(same[:4]) == ""
    assert tool_results._same_for_all([Result(t, "read", {"id": 1}, "a") for t in tasks for _ in (1, 2)]) == ""
    saved = [Result(task, "write", {"id": i}, "ok") for task in tasks for i in (1, 2)]
    told = [Result(task, "write", {"id": i}, "the file has been written to the disk") for task in tasks for i in (1, 2)]
    assert tool_results._same_for_all(saved) == tool_results._same_for_all(told) == ""
    apart = [
        Result(task, "read", {"id": i}, f"text {i} of the task number {task.key}") for task in tasks for i in (1, 2)
    ]
    assert tool_results._same_for_all(apart) == ""


QUESTION = "How many jars of honey does Kaya sell in the summer of that year?"


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        (f"{QUESTION}\nAnswer: 388\n\nNow answer this.\n{QUESTION}", True),
        (f"{QUESTION}\nAnswer: 17\n\nNow answer this.\n{QUESTION}", False),  # the worked example has another answer
        (f"{QUESTION}\n\n{QUESTION}", False),  # asked twice
        (f"388 jars. {QUESTION}", False),
        (f"{QUESTION}\nA) 17\nB) 388\n\nThe question again: {QUESTION}", False),  # options
        (f"{QUESTION}\nPassage: in that year there were 388 jars.\n\n{QUESTION}", False),
        ("0 " * 10_000, False),  # a drawing of one kind of square
        (QUESTION[-20:], False),
    ],
)
def test_a_worked_example_that_is_the_question_itself_gives_the_answer_away(prompt, given):
    assert task_sets._answered_before(prompt, "388", ["How many eggs do they sell?"]) == given
    # What all prompts end with is no question.
    assert not task_sets._answered_before(prompt, "388", [f"Another one. {prompt}"])


def test_worked_turns_of_an_assistant_belong_to_the_first_prompt():
    roles = [("system", False), ("user", False), ("assistant", False), ("user", False), ("assistant", True)]
    nodes = [
        SimpleNamespace(sampled=sampled, message=SimpleNamespace(role=role, content=str(i)))
        for i, (role, sampled) in enumerate(roles)
    ]
    played = Played(SimpleNamespace(), SimpleNamespace(nodes=nodes))  # type: ignore[arg-type]
    assert [text for _, text in played.opening] == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_tasks_are_not_out_of_reach_if_the_policy_finds_perfect_transcripts_likely(subject_of, monkeypatch):
    subject = subject_of(groups=4)
    expected = expected_successes(subject)
    earned = sum(trace.reward for trace in subject.drawn.traces)
    # The bundled policy was taught these transcripts, so that hardly any other one earns the reward.
    assert expected_successes(subject_of(groups=4, top_p=0.9)) is None
    assert expected is not None and 0.5 * earned - 2 < expected <= len(subject.drawn.traces)
    with monkeypatch.context() as patch:
        patch.setattr(LookupTask, "oracle", lambda self: [][0])  # an environment's code may raise anything
        assert expected_successes(subject) == 0
    for likely, evidence in (
        (thresholds.SUCCESSES_EXPECTED, "so the tasks are not out of its reach"),
        (thresholds.SUCCESSES_EXPECTED - 1, "it succeeds seldom"),
        (thresholds.SUCCESSES_RARE / 2, "further rollouts one earns more"),  # this policy does
    ):
        monkeypatch.setattr(subject, "expected_successes", float(likely), raising=False)
        found = signal._out_of_reach(subject, "c", "e")
        assert found.verdict == "unsure" and evidence in found.evidence
    samples = [dataclasses.replace(s, reward=0.0) for s in subject.drawn.samples]
    monkeypatch.setattr(subject, "drawn", dataclasses.replace(subject.drawn, samples=samples), raising=False)
    monkeypatch.setattr(signal, "draw", lambda *args: subject.drawn)
    found = signal._out_of_reach(subject, "c", "e")
    assert found.cause == "never-succeeds" and "240 further rollouts none earns more" in found.evidence
