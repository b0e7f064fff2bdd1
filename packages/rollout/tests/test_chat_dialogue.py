"""Rollouts through a chat endpoint and from a script: the same environment, the same scores, no tokens."""

import asyncio
import json
import random

import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import (
    ChatReply,
    EngineError,
    Limits,
    MalformedCall,
    ParsedCall,
    Sampling,
    ScriptedChat,
    run_rollout,
    verifiers_messages,
)


class Endpoint:
    """Remembers what it was asked; `replies` in order."""

    def __init__(self, replies):
        self.replies, self.asked = list(replies), []

    async def reply(self, messages, tools, sampling):
        self.asked.append((json.loads(json.dumps(messages)), list(tools), sampling))
        reply = self.replies[len(self.asked) - 1]
        if isinstance(reply, BaseException):
            raise reply
        return reply


def call(name="kit_note", **arguments):
    return ChatReply("", (ParsedCall(name, arguments),))


@pytest.fixture
def talk(kit):
    def run(engine, task=None, sampling=None, **limits):
        task = task or kit.Task(kit.Data(prompt="Go.", system_prompt="Be brief.", results=["a", "b"]))
        return asyncio.run(run_rollout(task, engine, None, sampling or Sampling(), Limits(**limits)))

    return run


def test_the_endpoint_sees_the_conversation_in_openai_form(talk):
    engine = Endpoint([call(word="x"), ChatReply("done")])
    trace = talk(engine)
    assert trace.ok and trace.stop_condition == "agent_completed" and trace.num_turns == 2
    first, tools, _ = engine.asked[0]
    assert first == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]
    assert {t["function"]["name"] for t in tools} >= {"kit_fetch", "kit_note"}
    assistant, result = engine.asked[1][0][2:]
    assert assistant["tool_calls"][0]["function"] == {"name": "kit_note", "arguments": '{"word": "x"}'}
    assert result == {"role": "tool", "content": "x", "tool_call_id": assistant["tool_calls"][0]["id"]}
    assert trace.metrics["words_noted"] == 1 and trace.reward == 0.5 / (1 + len("done"))


def test_each_turn_has_a_seed_of_its_own_and_the_rest_of_the_sampling(talk):
    engine = Endpoint([call(word="x"), call(word="x"), ChatReply("done")])
    talk(engine, sampling=Sampling(max_tokens=7, temperature=0.3, seed=5))
    samplings = [sampling for _, _, sampling in engine.asked]
    assert len({s.seed for s in samplings}) == 3 and {(s.max_tokens, s.temperature) for s in samplings} == {(7, 0.3)}


@pytest.mark.parametrize("arguments", ["{", "[1]", '"x"', "[" * 100_000])
def test_unreadable_arguments_are_told_to_the_model_and_sent_back_as_an_object(talk, arguments):
    engine = Endpoint([ChatReply("", (MalformedCall(arguments, "it is not JSON", "kit_note"),)), ChatReply("sorry")])
    trace = talk(engine)
    assert trace.ok and trace.metrics["rollout/malformed_calls"] == 1
    assistant, result = engine.asked[1][0][-2:]
    sent = json.loads(assistant["tool_calls"][0]["function"]["arguments"])
    assert sent == {"unreadable": arguments} and "could not be read" in result["content"]


def test_a_cut_turn_and_a_full_context_end_the_rollout(talk):
    trace = talk(Endpoint([ChatReply("so", finish_reason="length")]))
    assert trace.is_truncated and trace.stop_condition == "max_turn_tokens"
    first = ChatReply("", (ParsedCall("kit_note", {"word": "x"}),), prompt_tokens=90, completion_tokens=10)
    trace = talk(Endpoint([first, ChatReply("never asked")]), max_context=100)
    assert trace.is_truncated and trace.stop_condition == "max_total_tokens" and trace.num_turns == 1


def test_a_failing_endpoint_is_recorded(talk):
    trace = talk(Endpoint([call(word="x"), EngineError("the server is gone")]))
    assert not trace.ok and "the server is gone" in trace.errors[-1].message


def test_a_script_that_is_too_short_says_so(talk):
    trace = talk(ScriptedChat([call(word="x")]))
    assert not trace.ok and "only 1 turns" in trace.errors[-1].message


def test_a_script_of_messages(talk):
    messages = [
        vf.AssistantMessage(tool_calls=[vf.ToolCall(id="1", name="kit_note", arguments='{"word": "y"}')]),
        vf.AssistantMessage(content="fin"),
    ]
    trace = talk(ScriptedChat.of_messages(messages))
    assert trace.ok and trace.last_reply == "fin" and trace.metrics["words_noted"] == 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), max_turns=st.integers(1, 5))
def test_a_stored_token_rollout_replays_to_the_same_score(families, scripted, kit, random_ids, seed, max_turns):
    """Training and evaluation score one transcript alike: whatever was sampled, through JSON and back."""
    family, rng = families("qwen2.5"), random.Random(seed)
    task = kit.Task(kit.Data(prompt="Go.", results=["a", "b"]))
    engine = scripted(family, random_ids(family, rng))
    limits = Limits(max_turns=max_turns, max_context=100_000)
    told = asyncio.run(run_rollout(task, engine, family.chat, Sampling(max_tokens=400), limits))
    record = json.loads(json.dumps(told.to_record()))
    again = asyncio.run(run_rollout(task, ScriptedChat.of_record(record), None, Sampling(), limits))
    assert again.ok and again.reward == told.reward and again.metrics == told.metrics
    assert (again.stop_condition, again.is_truncated) == (told.stop_condition, told.is_truncated)
    assert [m.content for m in again.assistant_messages] == [m.content for m in told.assistant_messages]


def test_a_chat_trace_has_no_row_to_train_on(talk):
    trace = talk(Endpoint([ChatReply("done")]))
    assert all(not node.token_ids for node in trace.nodes)
    assert [m.content for m in trace.assistant_messages] == ["done"]


def test_openai_form_keeps_what_is_readable():
    message = vf.AssistantMessage(tool_calls=[vf.ToolCall(id="1", name="f", arguments='{"a": 1.50}')])
    assert verifiers_messages.to_openai(message)["tool_calls"][0]["function"]["arguments"] == '{"a": 1.50}'
