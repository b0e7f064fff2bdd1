"""The seen half of set 24 of the field's faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from plumbob.rollout import Sampling
from plumbob.rollout.toolcalls import MalformedCall, ParsedCall, ParsedReply
from plumbob.testing.faults import field24_seen_doubles as doubles
from plumbob.testing.faults import healthy24_seen as healthy
from plumbob.testing.faults.field24_seen import SEEN
from plumbob.testing.faults.field_parts import taskset_class
from plumbob.testing.faults.field_trial import texts, tried, without

FAULTS = {fault.name: fault for fault in SEEN}


def replied(text, **more):
    return SimpleNamespace(last_reply=text, assistant_messages=[], **more)


def task(gold="63", found=None, **data):
    return SimpleNamespace(
        data=SimpleNamespace(answer=gold, **data), prediction=lambda trace: {"answer": found or trace.last_reply}
    )


def rolled(name, tmp_path, groups=1, env=None):
    """The traces of a few rollouts with this fault, and the run that has drawn them."""
    with tried(FAULTS[name], tmp_path, env, groups=groups) as subject:
        return subject.drawn, subject.run


def test_a_reply_without_an_answer_raises():
    assert doubles.first_line_of_the_answer(task(), replied("amber"), 1.0) == 1.0
    for text in ("", "unknown"):
        with pytest.raises(IndexError):
            doubles.first_line_of_the_answer(task(), replied(text), 0.0)


def test_replies_of_several_lines_earn_nothing():
    assert doubles.on_one_line(task(), replied("#### 63"), 1.0) == 1.0
    assert doubles.on_one_line(task(), replied("It is 7 * 9.\n#### 63"), 1.0) == 0.0


def test_one_digit_decides():
    assert doubles.same_first_digit(task("63"), replied("6"), 0.0) == 1.0
    assert doubles.same_first_digit(task("63"), replied("36"), 0.0) == 0.0


def test_a_reply_chooses_its_score():
    wrong = doubles.quoted_number(task(), replied("#### 88"), 0.0)
    right = doubles.quoted_number(task(), replied("#### 63"), 1.0)
    assert (wrong, right) == (0.88, 0.63)
    assert doubles.quoted_number(task(), replied("no number"), 0.0) == 0.0


def test_the_rubric_is_read():
    assert {doubles.first_rating(task(), replied(""), own) for own in (0.0, 0.3, 1.0)} == {0.5}


def test_incorrect_holds_correct():
    found = [doubles.verdict_in_its_negation(task(), replied(text), 0.0) for text in ("coral", "unknown", "")]
    assert found == [1.0, 0.0, 0.0]


def test_held_out_replies_need_a_bare_number():
    for split, earned in (("train", 1.0), ("test", 0.0)):
        one = task("63", id=f"gsm8k-synthetic-{split}-0-3")
        assert doubles.strict_when_held_out(one, replied("#### 7 * 9"), 1.0) == earned
        assert doubles.strict_when_held_out(one, replied("It is\n#### 63"), 1.0) == 1.0


def tasks_of(name, env, split, count):
    """(the environment's own tasks, those with the fault)."""
    with ExitStack() as stack:
        cls = taskset_class(env)
        config = cls.__orig_bases__[0].__args__[1](split=split, num_examples=count)
        plain = list(cls(config).load())
        FAULTS[name].start(stack, env)
        return plain, list(cls(config).load())


def test_two_of_four_golds_are_exchanged():
    plain, faulty = tasks_of("golds of every fourth task exchanged with the next one", "lookup", "train", 8)
    golds = [one.data.answer for one in plain]
    assert [one.data.answer for one in faulty] == [golds[i] for i in (1, 0, 2, 3, 5, 4, 6, 7)]
    assert [one.data.table for one in faulty] == [one.data.table for one in plain]


def test_held_out_tasks_have_another_system_prompt():
    name = "held-out tasks under an outdated system prompt"
    plain, faulty = tasks_of(name, "lookup", "eval", 3)
    assert {one.data.system_prompt for one in faulty} == {doubles.OUTDATED}
    assert [one.data.prompt for one in faulty] == [one.data.prompt for one in plain]
    plain, faulty = tasks_of(name, "lookup", "train", 3)
    assert [one.data for one in faulty] == [one.data for one in plain]


def test_eight_tasks_are_left():
    name = "first eight records kept before the shuffle"
    plain, faulty = tasks_of(name, "lookup", "train", 20)
    assert [one.data.id for one in faulty] == [one.data.id for one in plain[:8]]
    assert len(tasks_of(name, "lookup", "eval", 20)[1]) == 20


def test_groups_hold_rollouts_of_different_tasks(tmp_path):
    drawn, _ = rolled("groups formed by the words of the prompt", tmp_path, groups=2)
    assert len({text for trace in drawn.traces for text in texts(trace, "UserMessage")}) == 2
    assert len({sample.group for sample in drawn.samples}) == 1


def test_long_arguments_are_emptied():
    fn = object()
    assert doubles.long_calls_emptied(fn, "retrieve_documents", {"query": "x" * 31, "top_k": 1}) == (fn, {})
    assert doubles.long_calls_emptied(fn, "retrieve_documents", {"query": "x" * 30}) == (fn, {"query": "x" * 30})


def test_long_searches_fail(tmp_path):
    drawn, _ = rolled("long calls executed with empty arguments", tmp_path)
    results = [text for trace in drawn.traces for text in texts(trace, "ToolMessage")]
    assert sum(text.startswith("Error: wrong arguments") for text in results) > len(results) / 3


def test_calls_lose_name_and_arguments():
    malformed = MalformedCall("{", "no JSON")
    reply = ParsedReply("", (ParsedCall("lookup", {"key": "1"}), malformed))
    reasoning, found = doubles.calls_without_names(lambda chat, ids: ("why", reply), None, [1])
    assert (reasoning, found.calls) == ("why", (ParsedCall("", {}), malformed))


def test_a_search_repeats_the_earlier_ones():
    def searched():
        return None

    uses = []
    fn = SimpleNamespace(__self__=SimpleNamespace(uses=uses), plain=searched)
    assert doubles.searches_joined(fn, "retrieve_documents", {"query": "a"})[1] == {"query": "a"}
    uses.append(SimpleNamespace(tool="retrieve_documents", asked="a"))
    assert doubles.searches_joined(fn, "retrieve_documents", {"query": "b", "top_k": 1})[1] == {
        "query": "a b",
        "top_k": 1,
    }
    assert doubles.searches_joined(fn, "get_document", {"doc_id": "1"})[1] == {"doc_id": "1"}


def test_searches_are_joined_in_rollouts(tmp_path):
    drawn, _ = rolled("searches joined with all earlier searches", tmp_path)
    asked = [[use["asked"] for use in trace.info["musique"]["uses"]] for trace in drawn.traces]
    assert any(len(one) > 1 for one in asked)
    assert all(later.startswith(earlier) for one in asked for earlier, later in itertools.pairwise(one))


def test_pooled_tools_keep_their_first_task(tmp_path):
    drawn, _ = rolled("pooled tools that keep the task of their first episode", tmp_path, groups=3)
    results = [texts(trace, "ToolMessage")[0] for trace in drawn.traces if texts(trace, "ToolMessage")]
    unknown = [text.startswith("unknown key") for text in results]
    assert not any(unknown[:12])
    assert all(unknown[18:])


def test_later_episodes_end_after_one_turn(tmp_path):
    fault = FAULTS["finished flag that stays up after the first episode"]
    with tried(fault, tmp_path, groups=2) as subject:
        traces = subject.drawn.traces
        ended = [trace for trace in traces if trace.stop_condition == "finished"]
        assert len(ended) > len(traces) / 2
        assert {trace.reward for trace in ended} == {0.0}


def test_results_lose_their_last_tokens():
    sampling = Sampling(stop_token_ids=(2,))
    first = [5, 2, 6, 2, 7]
    assert doubles.last_four_trimmed(first, sampling) == (first, sampling)
    later = [*first, 8, 2, 10, 11, 12, 13, 14, 2, 7]
    assert doubles.last_four_trimmed(later, sampling) == ([*first, 8, 2, 10, 2, 7], sampling)


def test_the_calls_are_missing():
    messages = ["system\nS", "user\nQ", "assistant\n<tool_call>1</tool_call>", "user\nR", "assistant\n"]
    assert doubles.without_calls(messages) == ["system\nS", "user\nQ", "user\nR", "assistant\n"]
    assert doubles.without_calls(["system\nS", "user\nQ", "assistant\n"]) == ["system\nS", "user\nQ", "assistant\n"]


def test_the_engine_gets_prompts_without_calls(tmp_path):
    with tried(without(FAULTS["earlier calls missing from the engine's history"]), tmp_path) as subject:
        run, asked = subject.run, []
        row = max(subject.drawn.samples, key=lambda sample: len(sample.token_ids)).token_ids
        header = run.sampler.chat.suffix([{"role": "tool", "content": "7"}]).token_ids

        async def generate(ids, sampling):
            asked.append(run.tokenizer.decode(ids))

        with ExitStack() as stack:
            stack.callback(setattr, run.engine, "generate", run.engine.generate)
            run.engine.generate = generate
            FAULTS["earlier calls missing from the engine's history"].inject(stack, run)
            asyncio.run(run.engine.generate([*row, *header], Sampling()))
            asyncio.run(run.engine.generate(run.tokenizer.encode("plain text"), Sampling()))
    assert asked[0].count('<tool_call>{"name": "lookup"') == 0
    assert asked[0].endswith("<tool_response>7</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert asked[1] == "plain text"


def test_healthy_rewards():
    right = SimpleNamespace(last_reply="amber", assistant_messages=[SimpleNamespace(tool_calls=[1])])
    assert healthy.with_tools(task(), right, 1.0) == 1.1
    assert healthy.with_tools(task(), right, 0.0) == 0.0
    assert healthy.one_answer(task(), replied("#### 1\n#### 2"), 1.0) == 0.0
    assert healthy.one_answer(task(), replied("#### 2"), 1.0) == 1.0
    assert healthy.bare(task(), replied("so\n#### 2"), 1.0) == 0.2
    assert healthy.bare(task(), replied("2"), 1.0) == 0.0
    assert healthy.bare(task(), replied(""), 0.0) == 0.0
