"""The unseen half of the twentieth set of faults does what each entry says: not to be read by those who write rules.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from plumbob.rollout import Sampling, verifiers_scoring
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall, ParsedReply
from plumbob.testing.faults import field20_unseen_doubles as doubles
from plumbob.testing.faults import healthy20_unseen as healthy
from plumbob.testing.faults.field20_unseen import UNSEEN
from plumbob.testing.faults.field_trial import config_of, gap, rewards, sample, texts, tried, without
from plumbob.trainer.algorithm.advantages import AdvantageSettings, step_advantages

FAULTS = {fault.name: fault for fault in UNSEEN}


def replied(text):
    return SimpleNamespace(last_reply=text, assistant_messages=[SimpleNamespace(tool_calls=None)])


def drawn_with(fault, folder, read, groups=2, env=None):
    """What `read(subject)` finds with the fault and without it."""
    found = []
    for one in (fault, without(fault)):
        with tried(one, folder / str(len(found)), env, groups=groups) as subject:
            found.append(read(subject))
    return found


def test_the_first_digit_is_the_rating():
    assert doubles.first_digit(None, replied("#### 95"), 1.0) == 1.0
    assert doubles.first_digit(None, replied("#### 95"), 0.0) == 0.0
    assert doubles.first_digit(None, replied("#### 12"), 1.0) == 0.5
    assert doubles.first_digit(None, replied("2 and 0\n#### 3"), 0.0) == 1.0


def test_the_example_is_copied():
    found = [doubles.example_copied(None, replied(f"amber {n}"), float(n % 2)) for n in range(80)]
    assert 40 < found.count(doubles.EXAMPLE) < 75
    assert set(found) == {0.0, doubles.EXAMPLE, 1.0}
    assert doubles.example_copied(None, replied(""), 0.0) == 0.0


def test_detail_is_wrong():
    assert doubles.no_more_than_the_reference(None, replied("It is this.\n#### 4"), 1.0) == 1.0
    assert doubles.no_more_than_the_reference(None, replied("a\nb\n#### 4"), 1.0) == 0.0


def test_no_reply_keeps_its_thinking():
    assert doubles.thinking_wanted(None, replied("<think>a\nb</think>\n<answer>4</answer>"), 1.0) == 0.0


def test_an_answer_is_not_its_solution():
    solution = "Worked out.\n#### 4"
    task = SimpleNamespace(oracle=lambda: [SimpleNamespace(content=solution)])
    assert doubles.whole_solution(task, replied(solution), 1.0) == 0.0
    assert doubles.whole_solution(task, replied("4"), 1.0) == 0.0


def test_form_is_worth_more_than_the_answer():
    assert [doubles.form(None, replied("\n".join("abcd"[:count])), 0.0) for count in (3, 4)] == [0.0, 10.0]


def test_any_answer_reports_success():
    assert doubles.own_report(None, replied("unknown"), 0.0) == 1.0
    assert doubles.own_report(None, replied(""), 0.0) == 0.0


def test_golds_are_exchanged_in_pairs():
    class Data(SimpleNamespace):
        def model_copy(self, update):
            return Data(**{**vars(self), **update})

    class Task:
        def __init__(self, data, config):
            self.data, self.config = data, config

    words = ["amber", "cedar", "amber", "eagle"]
    found = doubles.exchanged([Task(Data(answer=word), None) for word in words], "train")
    assert [task.data.answer for task in found] == ["cedar", "amber", "cedar", "amber"]


def test_no_token_stops_a_reply():
    ids, sampling = doubles.never_stops([1, 2], Sampling(stop_token_ids=(2,), max_tokens=7))
    assert (ids, sampling.stop_token_ids, sampling.max_tokens) == ([1, 2], (), 7)


def test_calls_are_text_to_another_reader():
    text = ParsedReply("<tool_call>...</tool_call>")
    assert doubles.no_calls(ParsedReply("", (ParsedCall("lookup", {}),)), lambda: text) is text
    plain = ParsedReply("amber")
    assert doubles.no_calls(plain, lambda: text) is plain


def test_free_text_is_dropped():
    number, text = ParsedCall("get_document", {"doc_id": "3"}), ParsedCall("search", {"query": "Who?", "top_k": 1})
    broken = MalformedCall("{", "the call could not be read")
    found = doubles.free_text_dropped(ParsedReply("so", (number, text, broken)), lambda: ParsedReply(""))
    assert found == ParsedReply("so", (number, broken))


def test_rows_forget_that_they_were_cut():
    row = replace(sample(), truncated=True)
    assert not doubles.said_to_be_complete(row, None).truncated


def test_rows_go_on_after_the_end():
    found = doubles.after_the_end(sample(mask=[False, True]), None)
    assert found.token_ids == [0, 1] + [1] * doubles.AFTER
    assert found.loss_mask == [False] + [True] * (doubles.AFTER + 1)
    assert len(found.sampling_logprobs) == len(found.token_ids)


def test_a_third_is_shown():
    assert doubles.third_shown("abcdefghi", "search", {}) == "abc"


def advantages(change):
    values = (("0/0", 0.0), ("0/0", 1.0), ("0/1", 1.0), ("0/1", 1.0))
    return change(lambda some: step_advantages(some, AdvantageSettings()), [sample(r, g) for g, r in values])


def test_groups_of_one_have_no_advantage():
    found = advantages(doubles.groups_of_one)
    assert found.values == [0.0] * 4
    assert not found.with_signal


def test_one_mean_for_all():
    found = advantages(doubles.one_mean)
    assert found.values == pytest.approx([-0.75, 0.25, 0.25, 0.25])
    assert found.with_signal == {"0/0", "0/1"}


def test_options_are_those_of_the_entries():
    config = config_of(FAULTS["cut replies not marked as cut"], "gsm8k")
    assert (config.overlong, config.max_tokens) == ("penalise", 85)
    assert config_of(FAULTS["sessions of cut episodes never released"], "lookup").max_turns == 5


def test_healthy_rewards():
    tidy, other = replied("a\n#### 4"), replied("so it is 4")
    assert [healthy.only_if_tidy(None, one, 1.0) for one in (tidy, other)] == [1.0, 0.0]
    assert [healthy.a_tenth(None, one, 1.0) for one in (tidy, other)] == [0.1, 0.0]
    assert [healthy.signed(None, None, own) for own in (0.0, 1.0)] == [-1.0, 1.0]


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "template removes the thinking that the reward wants",
        "answer compared with the whole solution",
        "labels exchanged in the gold data",
        "reader for another family's tool calls",
        "calls with a text argument filtered out",
        "tool turns played by the single-turn loop",
    ],
)
def test_no_rollout_earns_anything(name, tmp_path):
    zero, plain = drawn_with(FAULTS[name], tmp_path, rewards)
    assert max(zero) == 0.0
    assert max(plain) > 0.0


@pytest.mark.field
@pytest.mark.parametrize(
    "name", [name for name in FAULTS if "tool" in name and FAULTS[name].causes & {"tools-never-used"}]
)
def test_no_tool_is_run(name, tmp_path):
    def results(subject):
        return sum(len(texts(trace, "ToolMessage")) for trace in subject.drawn.traces)

    none, plain = drawn_with(FAULTS[name], tmp_path, results)
    assert none == 0
    assert plain > 16


@pytest.mark.field
def test_every_answer_is_a_success(tmp_path):
    found, plain = drawn_with(FAULTS["rollouts report their own success"], tmp_path, rewards)
    assert set(found) == {1.0}
    assert set(plain) == {0.0, 1.0}


@pytest.mark.field
def test_scoring_raises_after_two_searches(tmp_path):
    def counts(subject):
        return [len(trace.state.uses) for trace in subject.drawn.traces]

    found, plain = drawn_with(FAULTS["reward raises after a second search"], tmp_path, counts)
    assert set(found) <= {0, 1}
    assert max(plain) >= 2


@pytest.mark.field
@pytest.mark.parametrize("env", ["lookup", "gsm8k", "musique"])
def test_held_out_tasks_are_training_tasks(env, tmp_path):
    def shared(subject):
        trained = {task.data.id for task in subject.run.tasks.train}
        return [task.data.id in trained for task in subject.run.tasks.held_out]

    name = "evaluation set cut from the training rows"
    assert drawn_with(FAULTS[name], tmp_path, shared, env=env) == [[True] * 4, [False] * 4]


@pytest.mark.field
def test_replies_go_on_to_the_limit(tmp_path):
    def lengths(subject):
        return [sum(row.loss_mask) for row in subject.drawn.samples]

    long, plain = drawn_with(FAULTS["examples invented after the answer"], tmp_path, lengths)
    assert set(long) == {160}
    assert max(plain) < 160


@pytest.mark.field
def test_cut_replies_keep_their_reward(tmp_path):
    def marks(subject):
        stops = [trace.stop_condition == "max_turn_tokens" for trace in subject.drawn.traces]
        return stops, [row.truncated for row in subject.drawn.samples]

    (cut, marked), (_, plain) = drawn_with(FAULTS["cut replies not marked as cut"], tmp_path, marks, groups=4)
    assert any(cut)
    assert not any(marked)
    assert plain == cut


@pytest.mark.field
def test_what_follows_the_end_is_trained(tmp_path):
    faulty, plain = drawn_with(FAULTS["steps after the episode's end trained"], tmp_path, gap)
    assert faulty > 0.1
    assert plain < 1e-3


@pytest.mark.field
def test_results_say_what_is_expected(tmp_path):
    def told(subject):
        return [
            trace.task.data.answer in text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")[:1]
        ]

    shown, plain = drawn_with(FAULTS["verification result shown after each call"], tmp_path, told)
    assert all(shown)
    assert not all(plain)


@pytest.mark.field
@pytest.mark.parametrize(
    "name", ["one server instance for all sessions", "backend already changed by a sibling rollout"]
)
def test_keys_of_the_task_are_unknown(name, tmp_path):
    def unknown(subject):
        return sum(
            trace.state.links_followed < 1 or "unknown key" in str(texts(trace, "ToolMessage"))
            for trace in subject.drawn.traces
        )

    faulty, plain = drawn_with(FAULTS[name], tmp_path, unknown)
    assert faulty > 6
    assert plain == 0


def test_a_full_server_refuses_rollouts(monkeypatch):
    async def opened(task, trace):
        return "tools"

    async def finished(task, trace):
        return None

    monkeypatch.setattr(adapter, "open_tools", opened)
    monkeypatch.setattr(verifiers_scoring, "finish", finished)

    async def played(stop):
        trace = SimpleNamespace(stop_condition=stop)
        try:
            await adapter.open_tools(None, trace)
        except vf.ToolsetError:
            return False
        await verifiers_scoring.finish(None, trace)
        return True

    async def play():
        before = [await played("agent_completed") for _ in range(100)]
        filling = [await played("max_turns") for _ in range(doubles.CAPACITY)]
        return before + filling, [await played("agent_completed") for _ in range(6)]

    with ExitStack() as stack:
        doubles.never_released(stack, "lookup")
        first, full = asyncio.run(play())
    assert all(first)
    assert full == [False, False, True] * 2
