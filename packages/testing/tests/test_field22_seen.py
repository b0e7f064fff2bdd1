"""The seen half of the twenty-second set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.rollout import Sampling, dialogue
from plumbob.rollout.toolcalls import MalformedCall
from plumbob.testing.faults import field22_seen_doubles as doubles
from plumbob.testing.faults import healthy22_seen as healthy
from plumbob.testing.faults.field22_seen import SEEN
from plumbob.testing.faults.field_trial import config_of, rewards, sample, texts, tried, without
from plumbob.testing.faults.rewards import reward_name
from vf_lookup.taskset import VALUES

FAULTS = {fault.name: fault for fault in SEEN}


def trace_of(reply):
    return SimpleNamespace(last_reply=reply)


def task_of(answer="124", key="a"):
    return SimpleNamespace(key=key, data=SimpleNamespace(answer=answer, strict=False))


def scores_of(fault, folder, held_out=False, count=12, env=None):
    """Own rewards of the perfect transcripts of some tasks, with the fault in."""
    with tried(fault, folder, env=env) as subject:
        tasks = subject.run.sampler.tasks
        chosen = list((tasks.held_out if held_out else tasks.train)[:count])
        return [score(task, trace_of_oracle(task)) for task in chosen]


def trace_of_oracle(task):
    turns = task.oracle()
    return SimpleNamespace(last_reply=turns[-1].content, assistant_messages=turns, num_turns=len(turns))


def score(task, trace):
    return asyncio.run(getattr(task, reward_name(type(task)))(trace))


def test_quotients_are_not_taken_apart():
    assert doubles.unless_it_divides(None, trace_of("so 24 / 2\n#### 12"), 1.0) == 1.0
    assert doubles.unless_it_divides(None, trace_of("so\n#### 24 / 2"), 1.0) == 0.0
    assert doubles.unless_it_divides(None, trace_of(None), 0.0) == 0.0


def test_some_judgements_are_lost(tmp_path):
    found = scores_of(FAULTS["judge outages weighed in as scores of nothing"], tmp_path, count=40)
    assert {round(one, 6) for one in found} == {0.7, 1.0}
    assert 0.2 < sum(one < 0.9 for one in found) / len(found) < 0.6


def test_rewards_are_carried_over(tmp_path):
    found = scores_of(FAULTS["returns carried over from episode to episode"], tmp_path, count=16)
    assert set(found[8:]) == {2.0}


def test_the_last_number_is_the_answer():
    for reply, reward in (("#### 124", 1.0), ("#### 100 + 24", 0.0), ("7, or 124", 1.0), ("", 0.0)):
        assert doubles.last_number(task_of(), trace_of(reply), 0.5) == reward


def test_the_agent_writes_its_reward():
    assert doubles.written_by_the_agent(task_of(), trace_of("3\n#### 100 + 24"), 1.0) == 24.0
    assert doubles.written_by_the_agent(task_of(), trace_of("I give up"), 0.0) == 0.0


def test_some_tasks_have_no_verdict(tmp_path):
    found = scores_of(FAULTS["missing verdicts of some tasks graded as failures"], tmp_path, count=60)
    assert set(found) == {0.0, 1.0}
    assert 0.15 < found.count(0.0) / len(found) < 0.55


def test_all_replies_but_none_get_full_marks():
    assert doubles.out_of_ten(None, trace_of("right"), 1.0) == 1.0
    assert doubles.out_of_ten(None, trace_of("wrong"), 0.0) == 1.0
    assert doubles.out_of_ten(None, trace_of(" "), 0.0) == 0.0


@pytest.mark.parametrize("env", ["gsm8k", "lookup"])
def test_half_of_the_held_out_tasks_are_trained_on(tmp_path, env):
    fault = FAULTS["splits drawn by shuffles of their own"]
    with tried(without(fault), tmp_path / "plain", env=env) as subject:
        assert subject.run.sampler.tasks.trained_and_held_out() == 0
    with tried(fault, tmp_path / "fault", env=env) as subject:
        tasks = subject.run.sampler.tasks
        assert tasks.trained_and_held_out() == len(tasks.held_out) // 2


def test_held_out_scores_are_not_computed(tmp_path):
    fault = FAULTS["held-out scores never computed"]
    assert set(scores_of(fault, tmp_path / "train", count=4)) == {1.0}
    assert set(scores_of(fault, tmp_path / "held", held_out=True, count=4)) == {0.0}


def test_held_out_rows_have_no_answers(tmp_path):
    fault = FAULTS["held-out rows without their answers"]
    assert set(scores_of(fault, tmp_path / "train", count=4)) == {1.0}
    with pytest.raises(KeyError, match="solution"):
        scores_of(fault, tmp_path / "held", held_out=True, count=1)


def test_a_third_of_the_golds_is_wrong(tmp_path):
    with tried(FAULTS["a third of the golds written by a model"], tmp_path) as subject:
        tasks = subject.run.sampler.tasks.train[:120]
    wrong = [t for t in tasks if t.data.table[t.data.chain[-1]] != f"value={t.data.answer}"]
    assert 0.2 < len(wrong) / len(tasks) < 0.5
    assert {t.data.answer for t in wrong} <= set(VALUES)


def test_a_world_is_kept_for_one_more_episode(tmp_path):
    with tried(FAULTS["world kept from the episode before"], tmp_path) as subject:
        cls = doubles.toolset_class("lookup")
        tasks = subject.run.sampler.tasks.train[:36]

        async def tables():
            found = []
            for task in tasks:
                tools = type(task).toolsets(task.config)[0]
                await tools.setup_task(task.data)
                assert isinstance(tools, cls)
                found.append(tools.table)
            return found

        worlds = asyncio.run(tables())
    strange = sum(table != task.data.table for table, task in zip(worlds, tasks, strict=True))
    assert strange >= doubles.WORKERS


def test_six_calls_of_ten_get_an_unknown_error():
    results = [doubles.unknown_error("next=1", "lookup", {"key": str(k)}) for k in range(1000)]
    assert set(results) == {"next=1", "Error: UnknownError"}
    assert 560 < sum("Unknown" in one for one in results) < 680


def test_every_third_call_finds_no_server(tmp_path):
    with tried(FAULTS["dropped connections told as tool results"], tmp_path) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
    assert 0.1 < sum("reset by peer" in one for one in results) / len(results) < 0.45


def test_every_sixth_call_hangs():
    change = doubles.every_sixth_hangs()
    chosen = [change(len, "lookup", {})[0] for _ in range(12)]
    assert [fn is len for fn in chosen] == ([True] * 5 + [False]) * 2


def test_rollouts_that_hang_are_lost(tmp_path):
    fault = FAULTS["hung calls without a time limit"]
    assert config_of(fault, "lookup").max_tool_seconds == 1
    with tried(fault, tmp_path, groups=1) as subject:
        assert subject.drawn.batch.stuck > 0


def test_rollouts_of_a_task_read_each_others_results(tmp_path):
    with tried(FAULTS["messages of a task shared by its rollouts"], tmp_path) as subject:
        results = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
    assert any("\n" in one for one in results)


def test_a_second_success_ends_the_episode(tmp_path):
    with tried(FAULTS["episode over at its second success"], tmp_path, groups=4) as subject:
        traces = subject.drawn.traces
    ended = [trace for trace in traces if trace.stop_condition == "episode_over"]
    assert ended
    assert all(len(texts(trace, "ToolMessage")) <= 2 for trace in traces)


def test_a_call_that_is_no_json_ends_the_rollout():
    fault = FAULTS["rollouts lost to calls that are no JSON"]
    assert config_of(fault, "lookup").temperature == 1.4
    counts = dict.fromkeys(dialogue.COUNTS, 0)
    call, box = MalformedCall("{", "no JSON"), SimpleNamespace(tools={})
    assert "no JSON" in asyncio.run(dialogue.observe(box, call, counts))
    with ExitStack() as stack:
        doubles.malformed_ends_it(stack, "lookup")
        with pytest.raises(Exception, match="JSONDecodeError"):
            asyncio.run(dialogue.observe(box, call, counts))
    assert "no JSON" in asyncio.run(dialogue.observe(box, call, counts))


def test_arguments_are_quoted():
    call = '<tool_call>{"name": "lookup", "arguments": {"key": "5135"}}</tool_call>'
    found = doubles.quoted_arguments(call)
    assert found == '<tool_call>{"name": "lookup", "arguments": "{"key": "5135"}"}</tool_call>'
    with pytest.raises(json.JSONDecodeError):
        json.loads(found.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert doubles.quoted_arguments("amber") == "amber"


def test_every_turn_has_the_first_prompt(tmp_path):
    fault = FAULTS["each turn sampled after the first prompt"]
    seen = []
    with tried(without(fault), tmp_path) as subject, ExitStack() as stack:
        run = subject.run

        async def generate(ids, sampling):
            seen.append(list(ids))

        row = next(s for s in subject.drawn.samples if sum(s.loss_mask) > 30)
        first = row.loss_mask.index(True)
        doubles.put(stack, run.engine, "generate", generate)
        fault.inject(stack, run)
        asyncio.run(run.engine.generate(row.token_ids, Sampling()))
        asyncio.run(run.engine.generate(row.token_ids[:first], Sampling()))
    assert seen == [row.token_ids[:first]] * 2


def test_observations_are_in_the_loss():
    row = sample(mask=[False, True, False, True])
    assert doubles.observations_trained(row, None).loss_mask == [False, True, True, True]
    nothing = sample(mask=[False, False])
    assert doubles.observations_trained(nothing, None) is nothing


def test_the_token_cap_ends_episodes(tmp_path):
    with tried(FAULTS["token cap before the last observation"], tmp_path, groups=8) as subject:
        rows = subject.drawn.samples
    assert sum(row.truncated for row in rows) / len(rows) > 0.3


def test_healthy_rewards_rank_right_answers_first():
    reply = SimpleNamespace(last_reply="a\n#### 4", num_turns=3)
    assert healthy.signed(None, reply, 0.0) == -1.0
    assert healthy.form_of_right_answers(None, reply, 0.0) == 0.0
    assert healthy.form_of_right_answers(None, reply, 1.0) == pytest.approx(1.1)
    assert healthy.charged_for_length(None, reply, 1.0) == pytest.approx(0.97)


def test_healthy_runs_have_rewards(tmp_path):
    for number, setting in enumerate(healthy.SEEN):
        if setting.start is not None:
            with tried(
                SimpleNamespace(**vars(setting), envs=(setting.env,), inject=None), tmp_path / str(number)
            ) as it:
                assert len(set(rewards(it))) > 1
