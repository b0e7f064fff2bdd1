"""A script in token ids: each turn is what the family's own chat template writes, and is read back as it was meant."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plumbob.rollout import ChatReply, EngineError, MalformedCall, ParsedCall, Sampling, ScriptedEngine
from plumbob.rollout.scripted import turn_ids
from plumbob.rollout.tool_formats import tools_of

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "kit_fetch",
            "description": "Fetch a result.",
            "parameters": {"type": "object", "properties": {"index": {"type": "integer"}, "key": {"type": "string"}}},
        },
    }
]
QUESTION = [{"role": "user", "content": "Which one?"}]
arguments = st.fixed_dictionaries({"index": st.integers(-9, 999), "key": st.text("ab é\"'\\{}<>/\n", max_size=8)})


def written(family, reply: ChatReply) -> str:
    """The text of the turn after a question, without its end token."""
    chat = family.chat
    ids = turn_ids(chat, reply, chat.prompt(QUESTION, SCHEMAS).token_ids)
    assert ids[-1] == family.id_of(family.closer) and family.id_of(family.closer) not in ids[:-1]
    return family.text(ids[:-1])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=arguments)
def test_a_call_is_read_back_and_is_the_template_s_own_text(family, arguments):
    chat, call = family.chat, ParsedCall("kit_fetch", arguments)
    text = written(family, ChatReply("", (call,)))
    read = chat.tool_format.read(text.removeprefix("<think>\n\n</think>\n\n"), tools_of(SCHEMAS))
    assert (read.content, read.calls) == ("", (call,))
    wire = {"type": "function", "id": "0", "function": {"name": call.name, "arguments": arguments}}
    try:
        rendered = family.tokenizer.apply_chat_template(
            [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [wire]}], tokenize=False
        )
    except Exception:  # a template may refuse calls
        return
    if "kit_fetch" in rendered:  # some templates leave calls out
        assert f"{family.header}{text}{family.closer}" in rendered


def test_an_answer_is_written_as_it_is(family):
    text = written(family, ChatReply("It is 7.\nSo 7."))
    assert text.removeprefix("<think>\n\n</think>\n\n") == "It is 7.\nSo 7."
    rendered = family.tokenizer.apply_chat_template(
        [*QUESTION, {"role": "assistant", "content": "It is 7.\nSo 7."}], tokenize=False
    )
    assert f"{family.header}{text}" in rendered


def test_reasoning_is_written_where_the_template_has_a_place_for_it(family):
    text = written(family, ChatReply("7", reasoning="Because of that."))
    place = family.chat.splits_reasoning and not family.header.rstrip().endswith("</think>")
    thought = "<think>\nBecause of that.\n</think>\n\n" if place else ""
    assert text == f"{thought}7"


def test_a_header_that_opens_a_thought_is_not_opened_twice(family):
    ids = [*family.chat.prompt(QUESTION, []).token_ids, *family.ids("<think>\n")]
    text = family.text(turn_ids(family.chat, ChatReply("7", reasoning="Because."), ids)[:-1])
    assert text == "Because.\n</think>\n\n7"


def test_what_cannot_be_written_is_refused(family):
    broken = MalformedCall("{", "the call is not valid JSON")
    with pytest.raises(EngineError, match="could not be read: the call is not valid JSON"):
        written(family, ChatReply("", (broken,)))
    with pytest.raises(EngineError, match="spells a token that ends the model's turn"):
        written(family, ChatReply(f"7{family.closer}8"))


def test_the_engine_plays_the_turns_in_order_and_cuts_one_that_is_too_long(family):
    chat = family.chat
    engine = ScriptedEngine(chat, [ChatReply("one two three four"), ChatReply("7")])
    prompt = chat.prompt(QUESTION, []).token_ids

    async def play():
        cut = await engine.generate(prompt, Sampling(max_tokens=3))
        whole = await engine.generate(prompt, Sampling(max_tokens=100))
        with pytest.raises(EngineError, match="has only 2 turns"):
            await engine.generate(prompt, Sampling())
        return cut, whole

    cut, whole = asyncio.run(play())
    assert (len(cut.token_ids), cut.finish_reason, set(cut.logprobs)) == (3, "length", {0.0})
    assert whole.finish_reason == "stop" and whole.token_ids[-1] == family.id_of(family.closer)
    assert json.dumps(family.text(whole.token_ids[:-1])).endswith('7"')
