"""A reply that looks like a call and could not be read: counted, answered with the form of a call, token by token."""

import asyncio

import pytest
from plumbob.rollout import Limits, Sampling, ScriptedChat, StopReason, run_rollout
from plumbob.rollout.tool_formats import NAMES, named
from plumbob.rollout.toolcalls import ParsedReply
from plumbob.rollout.unread_calls import explanation

UNREAD = "I look.\nkit_fetch(number)"
CALL = ("kit_fetch", {"index": 1})


def counts(trace):
    return {name.removeprefix("rollout/"): v for name, v in trace.metrics.items() if name.startswith("rollout/")}


def user_messages(trace):
    return [node.message.content for node in trace.nodes if node.message.role == "user"]


def test_the_model_is_told_the_form_and_goes_on(play, any_family):
    family = any_family
    trace, engine = play([UNREAD, CALL, "The end."], family=family)
    assert trace.ok, trace.errors
    assert trace.stop_condition == "agent_completed"
    expected = {"turns": 3, "tools": 5, "tool_calls": 1, "tool_errors": 0, "malformed_calls": 0, "unread_calls": 1}
    assert counts(trace) == {**expected, "cut_texts": 0}
    _, told = user_messages(trace)
    assert "could not be read: kit_fetch(number)" in told and family.chat.tool_format.example() in told
    assert "The tools are: kit_break, kit_count, kit_fetch" in told
    assert trace.info["unread_calls"] == [{"turn": 0, "text": "kit_fetch(number)", "explained": True}]
    sampled = [node.message.content for node in trace.nodes if node.sampled]
    assert sampled[0] == UNREAD and sampled[-1] == "The end."
    assert told.splitlines()[-1] in family.text(engine.prompts[1])
    # Token by token: each prompt begins with the last prompt and its completion, and the row is the last of them.
    before = []
    for prompt, completion in zip(engine.prompts, engine.drawn, strict=True):
        assert prompt[: len(before)] == before
        before = [*prompt, *completion.token_ids]
    (branch,) = trace.branches
    assert list(branch.token_ids) == before
    assert sum(branch.sampled_mask) == sum(len(completion.token_ids) for completion in engine.drawn)


@pytest.mark.parametrize(
    "reply",
    [
        f"{UNREAD}\n<answer>7</answer>",
        f"{UNREAD}\nThe final answer is 7.",
        f"{UNREAD}\n#### 7",
        f"So \\boxed{{7}}.\n{UNREAD}",
        f"{UNREAD}\n**Answer:** 7",
    ],
)
def test_a_reply_with_an_answer_is_left_alone_and_counted(play, reply):
    trace, engine = play([reply, "more"])
    assert trace.ok and trace.stop_condition == "agent_completed"
    assert len(engine.prompts) == 1 and trace.last_reply == reply
    assert counts(trace)["unread_calls"] == 1
    assert trace.info["unread_calls"][0]["explained"] is False


@pytest.mark.parametrize(("most", "turns"), [(0, 1), (1, 2), (2, 3)])
def test_the_model_is_told_at_most_so_often(play, most, turns):
    trace, _ = play([UNREAD] * 5, max_explanations=most)
    assert trace.ok and trace.stop_condition == "agent_completed"
    assert counts(trace)["turns"] == counts(trace)["unread_calls"] == turns
    assert len(user_messages(trace)) == turns


def test_the_last_turn_of_a_rollout_is_not_answered(play):
    trace, _ = play([UNREAD] * 3, max_turns=1)
    assert trace.stop_condition == "agent_completed" and len(user_messages(trace)) == 1


def test_a_rollout_without_tools_has_no_unread_calls(play, kit):
    trace, _ = play([UNREAD, "more"], task=kit.BareTask(kit.Data(prompt="Go.")))
    assert counts(trace)["unread_calls"] == 0 and counts(trace)["turns"] == 1


@pytest.mark.parametrize(
    ("replies", "limits"),
    [
        ([UNREAD, CALL, "The end."], {}),
        ([UNREAD, UNREAD, UNREAD], {}),
        ([UNREAD, CALL, UNREAD], {"max_turns": 3}),
        ([UNREAD, "The end."], {"max_explanations": 0}),
        ([f"{UNREAD}\n<answer>7</answer>"], {}),
    ],
)
def test_a_replayed_transcript_is_the_same_and_scores_the_same(play, kit, replies, limits):
    task = kit.Task(kit.Data(prompt="Go.", results=["a", "b"]))
    trace, _ = play(replies, task=task, **limits)
    script = ScriptedChat.of_record(trace.to_record())
    again = asyncio.run(run_rollout(task, script, None, Sampling(), Limits(max_context=1 << 30, max_turns=1 << 20)))
    assert again.ok, again.errors
    assert [(n.message.role, n.message.content) for n in again.nodes] == [
        (n.message.role, n.message.content) for n in trace.nodes
    ]
    assert again.reward == trace.reward and counts(again) == counts(trace)
    assert again.stop_condition == trace.stop_condition
    assert again.info.get("unread_calls") == trace.info.get("unread_calls")


def test_a_rollout_cut_off_after_it_was_told_is_replayed_as_cut_off(play, kit):
    task = kit.Task(kit.Data(prompt="Go.", results=["a", "b"]))
    _, engine = play([UNREAD, "The end."], task=task)
    room = len(engine.prompts[0]) + len(engine.drawn[0].token_ids) + 2
    trace, _ = play([UNREAD, "The end."], task=task, max_context=room)
    assert trace.stop_condition == StopReason.MAX_CONTEXT and counts(trace)["turns"] == 1
    script = ScriptedChat.of_record(trace.to_record())
    again = asyncio.run(run_rollout(task, script, None, Sampling(), Limits(max_context=1 << 30, max_turns=1 << 20)))
    assert again.stop_condition == StopReason.MAX_CONTEXT and again.reward == trace.reward


@pytest.mark.parametrize("name", NAMES)
def test_the_explanation_quotes_little_and_shows_the_form(name):
    form = named(name)
    text = explanation(ParsedReply("x", (), "find(\n" + "a" * 500), form, ["find", "now"])
    assert form.example() in text and "find, now" in text and "find( aaa" in text
    assert len(text) < 500
    assert explanation(ParsedReply("x"), form, ["find"]) == ""
