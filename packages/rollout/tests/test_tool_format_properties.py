"""What holds for every tool format: it reads what it writes, never raises, and takes time linear in the text."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from plumbob.rollout import MalformedCall, ParsedCall, ParsedReply
from plumbob.rollout.tool_formats import MAX_CALLS, NAMES, named

PROPERTY = settings(max_examples=60, deadline=None)

TOOLS = {
    "find": {
        "type": "object",
        "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["q"],
    }
}
DEEP = "[" * 50_000 + "]" * 50_000


def hermes(body):
    return f"<tool_call>{body}</tool_call>"


# Text that looks like calls, cut and mixed at random.
PIECES = st.sampled_from(
    [
        *"{}[]()\"':;,=\\ \n`",
        *[
            "<tool_call>",
            "</tool_call>",
            "<tools>",
            "</tools>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "```json\n",
        ],
        *["<function=find>", "</function>", "<parameter=q>", "</parameter>", "find(", "[find(", "q=", '{"find": '],
        *['{"name": "find", ', '"arguments": ', '"parameters": ', '"name": ', '"function": {', '"q": "x"', "**{"],
        *['"\\ud800"', "NaN", "-Infinity", "1e999", "null", "true", "[" * 200, '{"a":' * 200, "\x00", "\ufffd"],
    ]
)
TEXTS = st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=12).map("".join))
FORMATS = st.sampled_from(NAMES)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TAG_LIKE = st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=5).map("".join).filter(lambda t: "ud800" not in t)
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,20}", fullmatch=True)
TEXT_VALUE = st.one_of(st.text(), TAG_LIKE)
CONTENT = st.text(max_size=30).map(str.strip)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quoted", ["<function=find>", hermes('{"name": "find", "arguments": {}}')])
def test_a_call_beside_text_may_quote_the_tags_of_another_family(name, quoted):
    call = ParsedCall("find", {"q": quoted})
    form = named(name)
    assert form.read(form.write("I look it up.", [call]), TOOLS) == ParsedReply("I look it up.", (call,))


@PROPERTY
@given(TEXTS, FORMATS)
@example(hermes(DEEP), "hermes")
@example(f'{{"name": {DEEP}}}', "llama3")
@example("<|python_tag|>" + DEEP, "llama3")
@example(f"[find(q={DEEP})]", "pythonic")
@example(f"[TOOL_CALLS]{DEEP}", "mistral")
def test_no_text_makes_a_format_raise_and_every_part_can_be_sent_on(text, name):
    reply = named(name).read(text, TOOLS)
    assert isinstance(reply, ParsedReply) and len(reply.calls) <= MAX_CALLS
    assert not (reply.calls and reply.unread)
    for call in reply.calls:
        spoken = call.reason if isinstance(call, MalformedCall) else call.name + json.dumps(call.arguments)
        spoken.encode()


@PROPERTY
@given(TEXTS)
def test_every_opening_tag_becomes_a_call_or_a_complaint(text):
    assert named("hermes").read(text, {}).calls or "<tool_call>" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@PROPERTY
@given(data=st.data())
def test_what_is_written_is_read_back(name, data):
    arguments = st.dictionaries(st.text(min_size=1), st.one_of(JSON, TEXT_VALUE), max_size=4)
    if name == "qwen-xml":  # its values have types in the schema alone, and its names stand in tags
        # A tag's name has at most 200 characters, so that reading takes time linear in the text.
        keys = st.text(min_size=1, max_size=200).filter(
            lambda k: k == k.strip("\"' \n\t").strip() and ">" not in k and "\n" not in k
        )
        arguments = st.dictionaries(keys, st.one_of(JSON, TEXT_VALUE).map(_expressible), max_size=4)
    calls = data.draw(st.lists(st.builds(ParsedCall, NAME, arguments), min_size=1, max_size=3))
    content = data.draw(CONTENT)
    tools = {call.name: _schema_of(call) for call in calls}
    form = named(name)
    if name == "qwen-xml":
        assume(len(tools) == len(calls))
    assume(form.read(content, tools) == ParsedReply(content))
    assert form.read(form.write(content, calls), tools) == ParsedReply(content, tuple(calls))


def _expressible(value):
    """Without what qwen-xml cannot express: tags of its own form in certain places."""
    if not isinstance(value, str):
        return json.loads(json.dumps(value).replace("</p", "").replace("<p", ""))
    return value.replace("parameter", "").replace("</function>", "")


PLAIN = st.dictionaries(
    st.sampled_from(["q", "n", "note", "path"]),
    st.integers(0, 99) | st.text("ab 1", min_size=1, max_size=4),
    min_size=1,
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(arguments=PLAIN, other=st.sampled_from([*"x1 \"'(){}[]<>/=:,;.\\\n", ""]))
def test_one_wrong_character_never_makes_a_call_with_fewer_arguments(name, arguments, other):
    """Wherever it stands: the call is read with as many arguments, or is malformed, unread or no call."""
    form, call = named(name), ParsedCall("run", arguments)
    tools = {"run": _schema_of(call)}  # no parameter is required, so a call without any would be run
    text = form.write("", [call])
    for at in range(len(text)):
        for found in form.read(text[:at] + other + text[at + 1 :], tools).calls:
            assert isinstance(found, MalformedCall) or len(found.arguments) >= len(arguments), (
                text[:at] + other + text[at + 1 :]
            )


@pytest.mark.parametrize("name", NAMES)
@PROPERTY
@given(arguments=PLAIN, data=st.data())
def test_a_call_that_is_cut_off_is_never_read_with_fewer_arguments(name, arguments, data):
    form, call = named(name), ParsedCall("run", arguments)
    text = form.write("", [call])
    ends = st.sampled_from([m.end() for m in re.finditer(r"\s|\W(?=\w)", text)] or [0])
    cut = text[: data.draw(ends | st.integers(0, len(text)))]
    for found in form.read(cut, {"run": _schema_of(call)}).calls:
        assert isinstance(found, MalformedCall) or len(found.arguments) >= len(arguments), cut


def test_a_call_without_its_closing_tag_needs_what_its_tool_requires():
    types = {"type": "object", "properties": {"q": {"type": "integer"}, "n": {"type": "integer"}}}
    tags, whole = "<function=run>\n<parameter=q>\n1\n</parameter>\n", '<function=run>{"q": 1}'
    (cut,), (optional,), (complete,) = (
        named("qwen-xml").read(text, {"run": schema}).calls
        for text, schema in ((tags, types), (tags, {**types, "required": ["q"]}), (whole, types))
    )
    assert isinstance(cut, MalformedCall)
    assert optional == complete == ParsedCall("run", {"q": 1})


class Letters:
    """A tokenizer for upstream's parsers: one token for each character, and for the tags of a tool call."""

    unk_token_id = None
    tags = ("<tool_call>", "</tool_call>")

    def convert_tokens_to_ids(self, token):
        return -1 - self.tags.index(token) if token in self.tags else None

    def encode(self, text):
        parts = re.split(f"({'|'.join(self.tags)})", text)
        return [i for p in parts for i in ([self.convert_tokens_to_ids(p)] if p in self.tags else map(ord, p))]

    def decode(self, ids, **kwargs):
        return "".join(self.tags[-1 - i] if i < 0 else chr(i) for i in ids)


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "llama3"])
@PROPERTY
@given(calls=st.lists(st.builds(ParsedCall, NAME, PLAIN), min_size=1, max_size=3), content=st.sampled_from(["", "Hm."]))
def test_the_readers_of_renderers_read_the_same(name, calls, content):
    """What verifiers' own readers make of calls; Llama's takes one call alone."""
    parsers, parsing = pytest.importorskip("renderers.parsers"), pytest.importorskip("renderers.parsing")
    if name == "llama3":
        calls, content = calls[:1], ""
    text = named(name).write(content, calls)
    ids = Letters().encode(text)
    found = {
        "hermes": lambda: parsers.Qwen3ToolParser(Letters()).extract(ids)[1],
        "qwen-xml": lambda: parsers.Qwen35ToolParser(Letters()).extract(ids)[1],
        "llama3": lambda: parsing.parse_llama_3(Letters(), ids, stop_ids=set()).tool_calls,
    }[name]()
    tools = {call.name: {"properties": {key: {} for key in call.arguments}} for call in calls}
    ours = named(name).read(text, tools)
    assert [(one.name, _stripped(one.arguments)) for one in found] == [
        (c.name, _stripped(c.arguments)) for c in ours.calls
    ]
    assert ours.content == content


def _stripped(arguments):
    """Upstream's reader takes blanks from around a value."""
    return {key: value.strip() if isinstance(value, str) else value for key, value in arguments.items()}


def _schema_of(call):
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    types = {key: {"type": kinds.get(type(value), "null")} for key, value in call.arguments.items()}
    return {"type": "object", "properties": types}


@PROPERTY
@given(st.integers(1, sys.getrecursionlimit() + 50))
def test_nesting_at_the_recursion_limit_is_read_or_refused_whole(depth):
    text = '{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
    for tool_format, reply in (("hermes", hermes(text)), ("llama3", text)):
        (call,) = named(tool_format).read(reply, {}).calls
        if isinstance(call, ParsedCall):
            json.dumps(call.arguments)


PATHOLOGICAL = [
    "{",
    '{"name": ',
    '{"name": "find", "arguments": {"q": "',
    '{"name": "find", "arguments": {"q": x}}',
    "\n{ ",
    '\n{"name": "find", "parameters": ',
    "<tool_call>",
    '<tool_call>{"name": "find"',
    "<tools>",
    "<tools>{'name': ",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]a",
    "<function=f>",
    "<function=f><parameter=q>",
    "<function=f><parameter=q></parameter>",
    "</parameter> ",
    "find(",
    "\nfind(",
    "\nfind(q=[",
    "\nfind('",
    "[find(q='x'), ",
    "```",
    "``` ",
    " ",
    "\n",
    "a = ",
    "\\",
    '"',
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_time_is_linear_in_the_length_of_the_text(name):
    """Ten times the text takes about ten times as long; a square would take a hundred times."""
    form = named(name)

    def seconds(piece, length):
        text = piece * (length // len(piece))
        taken = []
        for _ in range(3):
            start = time.process_time()
            form.read(text, TOOLS)
            taken.append(time.process_time() - start)
        return min(taken)

    for piece in PATHOLOGICAL:
        form.read(piece, TOOLS)
        assert seconds(piece, 40_000) < 40 * seconds(piece, 4_000) + 0.02, piece


REPLIES = Path(__file__).resolve().parents[4] / "shared/data/musique/qwen_coder_tool_replies.jsonl"


@pytest.mark.skipif(not REPLIES.is_file(), reason="needs the replies of Qwen2.5-Coder in ../shared/data/musique")
@pytest.mark.parametrize("name", ["hermes", "auto", "qwen-coder"])
def test_real_replies_that_make_a_call_are_read(name):
    """Of 60 replies of Qwen2.5-Coder, 52 have a call that is read; six repeat the tools' description, two write code in prose."""
    tools = {
        "get_document": {"properties": {"doc_id": {"type": "string"}}, "required": ["doc_id"]},
        "retrieve_documents": {
            "properties": {"query": {"type": "string"}, "top_k": {"type": "integer"}},
            "required": ["query"],
        },
    }
    replies = [json.loads(line)["reply"] for line in REPLIES.read_text().splitlines()]
    read = [named(name).read(reply, tools).calls for reply in replies]
    assert len(replies) == 60
    called = sum(any(isinstance(call, ParsedCall) and call.name in tools for call in calls) for calls in read)
    assert called == 52
