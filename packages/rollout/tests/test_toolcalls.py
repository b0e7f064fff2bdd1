"""What a model wrote, read as calls. A parser may be wrong about intent; it may never raise or lose a call."""

import json
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plumbob.rollout import MalformedCall, ParsedCall, ParsedReply, parse_reply
from plumbob.rollout.toolcalls import detect_format

PROPERTY = settings(max_examples=30, deadline=None)

HALF_A_PAIR = '"\\ud800"'  # valid JSON, but no text: nothing can tokenise it
DEEP = "[" * 50_000 + "]" * 50_000


def hermes(body):
    return f"<tool_call>{body}</tool_call>"


def read(text, tool_format):
    """The reply in a form that tables can hold: a malformed call as a word of its reason."""
    reply = parse_reply(text, tool_format)
    return reply.content, [(c.name, c.arguments) if isinstance(c, ParsedCall) else c.reason for c in reply.calls]


def agrees(calls, expected):
    return len(calls) == len(expected) and all(
        want in got if isinstance(want, str) and isinstance(got, str) else want == got
        for got, want in zip(calls, expected, strict=True)
    )


FIND = ("find", {"q": "x"})
ONE = '{"name": "find", "arguments": {"q": "x"}}'
NEITHER = "must be a JSON object"

HERMES = {
    "one call": (hermes(ONE), "", [FIND]),
    "with newlines": (hermes(f"\n{ONE}\n"), "", [FIND]),
    "several, in order": (hermes(ONE) + "\n" + hermes('{"name": "b", "arguments": {}}'), "", [FIND, ("b", {})]),
    "with text around": (f"Let me see.\n{hermes(ONE)}\nThere.", "Let me see.\n\nThere.", [FIND]),
    "no call": ("  It is 42. ", "It is 42.", []),
    "nothing": ("", "", []),
    "untagged JSON": (ONE, ONE, []),
    "never closed": (f"Hm. <tool_call>{ONE}", "Hm.", ["never closed"]),
    "never closed, then another": (f"<tool_call>{ONE}{hermes(ONE)}", "", ["never closed", FIND]),
    "only a closing tag": ("</tool_call>", "</tool_call>", []),
    "bad JSON": (hermes('{"name": "find", "arguments": {"q": x}}'), "", ["not valid JSON"]),
    "single quotes": (hermes("{'name': 'find'}"), "", ["not valid JSON"]),
    "empty": (hermes(""), "", ["not valid JSON"]),
    "good and bad": (hermes("{") + hermes(ONE), "", ["not valid JSON", FIND]),
    "a list": (hermes(f"[{ONE}]"), "", ["the call " + NEITHER]),
    "null": (hermes("null"), "", ["the call " + NEITHER]),
    "no name": (hermes('{"arguments": {}}'), "", ['needs a "name"']),
    "empty name": (hermes('{"name": "", "arguments": {}}'), "", ['needs a "name"']),
    "name is a number": (hermes('{"name": 1, "arguments": {}}'), "", ['needs a "name"']),
    "no arguments": (hermes('{"name": "find"}'), "", [("find", {})]),
    "arguments as a JSON string": (hermes('{"name": "find", "arguments": "{\\"q\\": \\"x\\"}"}'), "", [FIND]),
    "arguments as another string": (hermes('{"name": "find", "arguments": "x"}'), "", ["the arguments " + NEITHER]),
    "arguments as a string of a list": (hermes('{"name": "f", "arguments": "[1]"}'), "", ["the arguments " + NEITHER]),
    "arguments a list": (hermes('{"name": "find", "arguments": ["x"]}'), "", ["the arguments " + NEITHER]),
    "arguments null": (hermes('{"name": "find", "arguments": null}'), "", ["the arguments " + NEITHER]),
    "deep": (
        hermes('{"name": "f", "arguments": {"a": [[{"b": [1, {"c": null}]}]]}}'),
        "",
        [("f", {"a": [[{"b": [1, {"c": None}]}]]})],
    ),
    "too deep": (hermes(f'{{"name": "f", "arguments": {{"a": {DEEP}}}}}'), "", ["not valid JSON"]),
    "too deep in a string": (hermes(json.dumps({"name": "f", "arguments": DEEP})), "", [NEITHER]),
    "a number without end": (hermes('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}"), "", ["not valid JSON"]),
    "half a surrogate pair as name": (hermes(f'{{"name": {HALF_A_PAIR}}}'), "", ["not valid JSON"]),
    "half a surrogate pair in a string of arguments": (
        hermes(json.dumps({"name": "f", "arguments": f'{{"q": {HALF_A_PAIR}}}'})),
        "",
        [NEITHER],
    ),
    "half a surrogate pair inside": (
        hermes(f'{{"name": "f", "arguments": {{"q": {HALF_A_PAIR}}}}}'),
        "",
        ["not valid JSON"],
    ),
    "the closing tag in an argument": (
        hermes('{"name": "f", "arguments": {"q": "</tool_call>"}}'),
        '"}}</tool_call>',
        ["not valid JSON"],
    ),
}

LLAMA = '{"name": "find", "parameters": {"q": "x"}}'
LLAMA3 = {
    "one call": (LLAMA, "", [FIND]),
    "with white space": (f"\n\n {LLAMA}\n", "", [FIND]),
    "hermes' key": (ONE, "", [FIND]),
    "type first": ('{"type": "function", "name": "find", "parameters": {"q": "x"}}', "", [FIND]),
    "parameters first": ('{"parameters": {"q": "x"}, "name": "find"}', "", [FIND]),
    "python tag": (f"<|python_tag|>{LLAMA}", "", [FIND]),
    "several": (f"{LLAMA}; {LLAMA};{LLAMA}", "", [FIND, FIND, FIND]),
    "a last semicolon": (f"{LLAMA};", "", [FIND]),
    "several without semicolon": (f"{LLAMA}\n{LLAMA}", "", [FIND, "separate calls with ';'"]),
    "text behind": (f"{LLAMA} There.", "", [FIND, "text after a call"]),
    "text before": (f"Sure. {LLAMA}", f"Sure. {LLAMA}", []),
    "no call": (" It is 42. ", "It is 42.", []),
    "nothing": ("", "", []),
    "JSON answer": ('{"answer": 42}', '{"answer": 42}', []),
    "JSON list": ("[1, 2]", "[1, 2]", []),
    "brace": ("{x | x > 0}", "{x | x > 0}", []),
    "cut off": ('{"name": "find", "parameters": {"q"', "", ["not valid JSON"]),
    "bad JSON": ('{"name": "find", "parameters": {q: 1}}', "", ["not valid JSON"]),
    "good and bad": (f'{LLAMA}; {{"name"', "", [FIND, "not valid JSON"]),
    "code behind the tag": ("<|python_tag|>print(1)", "", ["not valid JSON"]),
    "only the tag": ("<|python_tag|>", "", ["not valid JSON"]),
    "a list behind the tag": ("<|python_tag|>[1]", "", ["the call " + NEITHER]),
    "no name": ('{"parameters": {"q": "x"}}', "", ['needs a "name"']),
    "function instead of name": ('{"function": "find", "parameters": {}}', "", ['needs a "name"']),
    "parameters as a JSON string": ('{"name": "find", "parameters": "{\\"q\\": \\"x\\"}"}', "", [FIND]),
    "parameters a list": ('{"name": "find", "parameters": [1]}', "", ["the arguments " + NEITHER]),
    "no parameters": ('{"name": "find"}', "", [("find", {})]),
    "hermes tags": (hermes(ONE), hermes(ONE), []),
    "too deep": (f'{{"name": "f", "parameters": {{"a": {DEEP}}}}}', "", ["not valid JSON"]),
    "half a surrogate pair": (f'{{"name": "f", "parameters": {{"q": {HALF_A_PAIR}}}}}', "", ["not valid JSON"]),
}


@pytest.mark.parametrize(("text", "content", "expected"), HERMES.values(), ids=HERMES)
def test_hermes(text, content, expected):
    found, calls = read(text, "hermes")
    assert found == content
    assert agrees(calls, expected), calls


@pytest.mark.parametrize(("text", "content", "expected"), LLAMA3.values(), ids=LLAMA3)
def test_llama3(text, content, expected):
    found, calls = read(text, "llama3")
    assert found == content
    assert agrees(calls, expected), calls


def test_a_reason_is_a_clause_that_fits_the_observation():
    for text, _, _ in HERMES.values():
        for call in parse_reply(text, "hermes").calls:
            if isinstance(call, MalformedCall):
                assert call.reason and "\n" not in call.reason and not call.reason.endswith(".")
                assert len(call.reason) < 200


# Text that looks like calls, cut and mixed at random.
PIECES = st.sampled_from(
    [
        *"{}[]\"':;,\\ \n",
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        '{"name": "f", ',
        '"arguments": ',
        '"parameters": ',
        '"name": ',
        '"\\ud800"',
        "NaN",
        "-Infinity",
        "1e999",
        "null",
        "true",
        "[" * 200,
        '{"a":' * 200,
        "\x00",
        "\ufffd",
    ]
)
TEXTS = st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=12).map("".join))


@PROPERTY
@given(TEXTS, st.sampled_from(["hermes", "llama3"]))
@example(hermes(DEEP), "hermes")
@example(f'{{"name": {DEEP}}}', "llama3")
@example("<|python_tag|>" + DEEP, "llama3")
def test_no_text_makes_the_parser_raise_and_every_part_can_be_sent_on(text, tool_format):
    reply = parse_reply(text, tool_format)
    assert isinstance(reply, ParsedReply)
    for call in reply.calls:
        spoken = call.reason if isinstance(call, MalformedCall) else call.name + json.dumps(call.arguments)
        spoken.encode()


@PROPERTY
@given(TEXTS)
def test_every_opening_tag_becomes_a_call_or_a_complaint(text):
    assert bool(parse_reply(text, "hermes").calls) == ("<tool_call>" in text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@PROPERTY
@given(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_what_is_written_as_json_is_read_back(name, arguments, ascii_only):
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
    if "<tool_call>" not in call and "</tool_call>" not in call:
        assert parse_reply(hermes(call), "hermes").calls == (ParsedCall(name, arguments),)
    assert parse_reply(f"{call};{call}", "llama3").calls == (ParsedCall(name, arguments),) * 2


@PROPERTY
@given(st.integers(1, sys.getrecursionlimit() + 50))
def test_nesting_at_the_recursion_limit_is_read_or_refused_whole(depth):
    text = '{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}"
    for tool_format, reply in (("hermes", hermes(text)), ("llama3", text)):
        (call,) = parse_reply(reply, tool_format).calls
        if isinstance(call, ParsedCall):
            json.dumps(call.arguments)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("... <tool_call> ...", "hermes"),
        ("<|start_header_id|>", "llama3"),
        ("<|start_header_id|> <tool_call>", "hermes"),
        ("<|im_start|>", "hermes"),
    ],
)
def test_detect_format(template, expected):
    assert detect_format(template) == expected
