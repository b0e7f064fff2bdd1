"""Chat templates by the suffix method: the first prompt is the template's own, and so is everything between turns."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import Chat, ChatTemplateError, MalformedCall, ParsedCall
from plumbob.rollout.tool_formats import named

PROPERTY = settings(max_examples=30, deadline=None)

QUESTION = {"role": "user", "content": "What is under key 1234?"}
FETCH = {
    "type": "function",
    "function": {"name": "kit_fetch", "description": "Fetch a result.", "parameters": {"type": "object"}},
}


def result(content, name="kit_fetch"):
    return {"role": "tool", "content": content, "name": name, "tool_call_id": "call_0_0"}


def call(name="kit_fetch", **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def rendered(family, messages, **kwargs):
    return family.tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


# --- the templates behave like those they are named after -----------------------------------------------------------


def test_qwen25_has_a_default_system_prompt_and_qwen3_has_none(families):
    assert rendered(families("qwen2.5"), [QUESTION]).startswith("<|im_start|>system\nYou are Testwen")
    assert rendered(families("qwen3"), [QUESTION]).startswith("<|im_start|>user\n")


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_chatml_merges_results_into_one_user_turn(families, name):
    text = rendered(families(name), [QUESTION, {"role": "assistant", "content": "hm"}, result("a"), result("b")])
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
    )


def test_qwen3_drops_the_thoughts_before_the_last_question(families):
    thinker = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nParis"}
    assert "<think>\nhm\n</think>\n\nParis" in rendered(families("qwen3"), [QUESTION, thinker])
    assert "hm" not in rendered(families("qwen3"), [QUESTION, thinker, QUESTION])


def test_llama_describes_tools_to_the_user_quotes_results_and_allows_one_call(families):
    for name in ("llama3.1", "llama3.2"):
        family = families(name)
        text = rendered(family, [{"role": "system", "content": "Be brief."}, QUESTION], tools=[FETCH])
        system, user = text.split("<|eot_id|>")[:2]
        assert "Environment: ipython" in system and "kit_fetch" not in system
        assert "kit_fetch" in user and user.endswith(QUESTION["content"])
        text = rendered(family, [QUESTION, {"role": "assistant", "tool_calls": [call()]}, result('"a"\n')])
        assert '{"name": "kit_fetch", "parameters": {}}<|eot_id|>' in text
        assert text.endswith('<|start_header_id|>ipython<|end_header_id|>\n\n"\\"a\\"\\n"<|eot_id|>')
        with pytest.raises(Exception, match="single tool-calls at once"):
            rendered(family, [QUESTION, {"role": "assistant", "tool_calls": [call(), call()]}])
    assert "26 Jul 2024" in rendered(families("llama3.2"), [QUESTION])


# --- what is read from a template -----------------------------------------------------------------------------------


def test_what_each_template_teaches(family):
    chat = family.chat
    assert chat.tool_format.name == ("llama3" if family.name.startswith("llama") else "hermes")
    assert chat.closer == family.closer
    assert set(chat.stop_token_ids) == {family.id_of(token) for token in (family.closer, *family.other_stops)}
    assert chat.splits_reasoning == family.name.startswith("qwen3")
    assert Chat.of(family.tokenizer, tool_format=named("llama3")).tool_format.name == "llama3"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "no chat template"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", "drops an assistant"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no special token"),
    ],
)
def test_a_template_that_cannot_carry_a_conversation_is_refused_with_the_reason(families, template, why):
    tokenizer = families("qwen2.5").tokenizer
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = template
        with pytest.raises(ChatTemplateError, match=why):
            Chat.of(tokenizer)
    finally:
        tokenizer.chat_template = before


def test_a_space_before_the_end_token_is_not_part_of_the_suffix(families):
    tokenizer = families("qwen2.5").tokenizer
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }} <|im_end|>{% endfor %}"
        chat = Chat.of(tokenizer)
        assert families("qwen2.5").text(chat.suffix([result("7")]).token_ids) == "tool: 7 <|im_end|>"
    finally:
        tokenizer.chat_template = before


# --- prompt and suffix ----------------------------------------------------------------------------------------------

# Texts as users, files and web pages hold them, and the texts that templates could stumble over.
AWKWARD = [
    "e",
    "tool",
    "user",
    "1",
    "You",
    "assistant",
    '"',
    "\n",
    " ",
    "",
    " a ",
    "\n\nb\n\n",
    '{"a": "b"}',
    "{{ 7 * 7 }}",
    "{% endif %}",
    "<tool_call>",
    "</tool_response>",
    "</think>",
    "PLUMBOB-SENTINEL-0f6c1d",
    "naïve café – 雪 👩‍🚀",
    "\u2028x\u00a0",
    "a\tb\r\nc",
    "\x00",
]
PLAIN = st.one_of(st.text(max_size=20), st.sampled_from(AWKWARD), st.lists(st.sampled_from(AWKWARD)).map("".join))


@PROPERTY
@given(system=st.none() | PLAIN, question=PLAIN, tools=st.booleans())
def test_the_first_prompt_is_the_template_tokenised_once(family, system, question, tools):
    messages = [{"role": "user", "content": question}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    tools = [FETCH] if tools else []
    ours = family.chat.prompt(messages, tools)
    theirs = family.tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True)
    assert ours.token_ids == theirs["input_ids"]
    assert family.text(ours.token_ids).endswith(family.header)
    assert family.text(ours.header_ids).endswith(family.header)


@PROPERTY
@given(contents=st.lists(PLAIN, min_size=1, max_size=4), reply=st.sampled_from(["hm", "Paris, so", "a b"]))
def test_a_suffix_is_what_the_template_puts_between_two_turns(family, contents, reply):
    messages = [result(content) for content in contents]
    conversation = [QUESTION, {"role": "assistant", "content": reply}]
    whole = rendered(family, [*conversation, *messages], add_generation_prompt=True)
    suffix = family.chat.suffix(messages)
    _, _, behind = whole.partition(reply + family.closer)
    assert family.text(suffix.token_ids) == family.text(family.ids(behind))
    if not any(name in content for content in contents for name in family.chat.control.in_results):
        assert suffix.token_ids == family.ids(behind)  # test_control_tokens.py has the others
    assert family.text(suffix.token_ids).endswith(family.header)


@PROPERTY
@given(
    kind=st.sampled_from(["prompt", "suffix"]),
    contents=st.lists(PLAIN, min_size=1, max_size=4),
    tools=st.booleans(),
)
def test_every_id_belongs_to_its_message_or_to_the_template(family, kind, contents, tools):
    """Even where a content's text stands in the template too ("e", "tool"), or is trimmed, or is put in quotes."""
    if kind == "prompt":
        messages = [{"role": role, "content": c} for role, c in zip(("system", "user"), contents, strict=False)]
        if len(messages) == 1:
            messages[0]["role"] = "user"
        ours = family.chat.prompt(messages, [FETCH] if tools else [])
    else:
        messages = [result(content) for content in contents]
        ours = family.chat.suffix(messages)
    assert len(ours.is_content) == len(ours.token_ids)
    assert ours.ends == sorted(ours.ends) and len(ours.ends) == len(messages)
    parts = [*(ours.token_ids[span] for span in ours.spans()), ours.header_ids]
    assert [i for part in parts for i in part] == ours.token_ids
    assert not any(ours.is_content[ours.ends[-1] :])
    for message, span in zip(messages, ours.spans(), strict=True):
        ids, flags = ours.token_ids[span], ours.is_content[span]
        text = family.text([i for i, flag in zip(ids, flags, strict=True) if flag])
        expected = message["content"]
        if family.name.startswith("llama"):
            expected = rendered_by_llama(family, message)
        # A token may straddle the border between the template and a content, a few characters at most.
        assert expected in text and len(text) <= len(expected) + 8


def rendered_by_llama(family, message):
    if message["role"] != "tool":
        return message["content"].strip()
    quoted = rendered(family, [QUESTION, message]).rpartition("<|end_header_id|>\n\n")[2]
    return quoted.removesuffix("<|eot_id|>")[1:-1]


@pytest.mark.parametrize(
    "turn",
    [
        "{{ m.role }}: {{ m.content if m.role == 'user' }}",
        "{{ m.role }}: {{ m.content }} ({{ m.content }})",
        "{{ '!' if m.content | length > 9 }}{{ m.role }}: {{ m.content }}",
        "{{ m.role }}: {{ m.content }}{{ '!' if m.role == 'user' and m.content | length > 9 }}",
    ],
    ids=["leaves one out", "repeats", "looks at it before", "looks at it behind"],
)
def test_a_template_that_does_more_with_a_content_than_show_it(families, turn):
    """Then no id is attributed to a message, but all are there, each once."""
    family = families("qwen2.5")
    messages = [{"role": "system", "content": "e"}, {"role": "user", "content": "user"}]
    before = family.tokenizer.chat_template
    try:
        family.tokenizer.chat_template = "{% for m in messages %}" + turn + "<|im_end|>{% endfor %}"
        ours = Chat(family.tokenizer, named("hermes"), "<|im_end|>", (), False).prompt(messages, [])
        whole = rendered(family, messages)
    finally:
        family.tokenizer.chat_template = before
    assert family.text(ours.token_ids) == whole
    assert ours.ends == [0, 0] and not any(ours.is_content)


def test_a_thought_survives_the_next_question_although_the_template_would_drop_it(families):
    """Rendering anew would change ids that were sampled. The suffix method cannot."""
    family = families("qwen3")
    chat = family.chat
    sampled = "<think>\nhm\n</think>\n\nParis"
    prompt = chat.prompt([QUESTION], []).token_ids
    row = prompt + family.ids(sampled + family.closer)
    extended = row + chat.suffix([QUESTION]).token_ids
    assert extended[: len(row)] == row
    anew = rendered(family, [QUESTION, {"role": "assistant", "content": sampled}, QUESTION], add_generation_prompt=True)
    assert sampled not in anew
    assert family.text(extended) == anew.replace("Paris", sampled)


def test_earlier_turns_in_the_first_prompt_keep_their_calls(family):
    turns = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call(index=3)]}, result("Paris"), QUESTION]
    text = family.text(family.chat.prompt(turns, [FETCH]).token_ids)
    assert '"index": 3' in text and "Paris" in text


# --- parse ----------------------------------------------------------------------------------------------------------


def test_a_reply_without_its_stop_token(family):
    for stop in (family.closer, *family.other_stops, ""):
        reasoning, reply = family.chat.parse(family.ids(f" It is 42. {stop}"), [FETCH])
        assert (reasoning, reply.content, reply.calls) == (None, "It is 42.", ())


def test_calls_are_read_only_where_there_are_tools(family):
    ids = family.ids(family.call_text("kit_fetch", {"index": 1}) + family.closer)
    assert family.chat.parse(ids, [FETCH])[1].calls == (ParsedCall("kit_fetch", {"index": 1}),)
    assert family.chat.parse(ids, [])[1].calls == ()


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nParis", "hm", "Paris"),
        ("hm</think>Paris", "hm", "Paris"),
        ("<think>\n\n</think>\n\nParis", "", "Paris"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("<think>a <tool_call>{}</tool_call></think>b", "a <tool_call>{}</tool_call>", "b"),
        ("Paris", None, "Paris"),
        ("<think>never ended", None, "<think>never ended"),
    ],
)
def test_reasoning_is_kept_apart_where_the_template_does(families, text, reasoning, content):
    family = families("qwen3")
    found, reply = family.chat.parse(family.ids(text + family.closer), [FETCH])
    assert (found, reply.content, reply.calls) == (reasoning, content, ())
    family = families("qwen2.5")
    found, reply = family.chat.parse(family.ids(text.replace("tool_call", "x") + family.closer), [FETCH])
    assert (found, reply.content) == (None, text.replace("tool_call", "x"))


@PROPERTY
@given(st.data())
def test_any_ids_can_be_parsed(family, data):
    ids = data.draw(st.lists(st.integers(0, len(family.tokenizer) + 2), max_size=20))
    reasoning, reply = family.chat.parse(ids, [FETCH])
    assert all(isinstance(call, ParsedCall | MalformedCall) for call in reply.calls)
    text = family.text(ids[:-1] if ids and ids[-1] in family.chat.stop_token_ids else ids)
    if reasoning is not None:
        text = text.split("</think>", 1)[1]
    assert reply.calls or reply.content == text.strip()
