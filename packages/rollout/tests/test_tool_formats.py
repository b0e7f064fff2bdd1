"""What models write, read as calls: golden behaviours per family, each with the source that it follows.

Sources: vLLM's tool parsers (vllm/tool_parsers, by their `--tool-call-parser` names), the models' chat templates, and
the forms in replies of Qwen2.5-Coder 0.5B and 1.5B. All texts are our own. Properties: test_tool_format_properties.py.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import MalformedCall, ParsedCall, read_arguments
from plumbob.rollout.tool_formats import MAX_CALLS, NAMES, detect, named, tools_of

TOOLS = tools_of(
    [
        {
            "type": "function",
            "function": {
                "name": "find",
                "description": "Find pages.",
                "parameters": {
                    "type": "object",
                    "properties": {"q": {"type": "string"}, "n": {"type": "integer", "default": 3}},
                    "required": ["q"],
                },
            },
        },
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
        {
            "type": "function",
            "function": {
                "name": "store",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "flag": {"type": "boolean"},
                        "items": {"type": "array"},
                        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                        "ratio": {"type": "number"},
                    },
                },
            },
        },
    ]
)

HALF_A_PAIR = '"\\ud800"'  # valid JSON, but no text: nothing can tokenise it
DEEP = "[" * 50_000 + "]" * 50_000


def hermes(body):
    return f"<tool_call>{body}</tool_call>"


def read(text, tool_format, tools=TOOLS):
    """The reply in a form that tables can hold: a malformed call as its reason, an unread one as "?" and its text."""
    reply = named(tool_format).read(text, tools)
    calls = [(c.name, c.arguments) if isinstance(c, ParsedCall) else c.reason for c in reply.calls]
    return reply.content, [*calls, *([f"?{reply.unread}"] if reply.unread else [])]


def agrees(calls, expected):
    return len(calls) == len(expected) and all(
        want in got if isinstance(want, str) and isinstance(got, str) else want == got
        for got, want in zip(calls, expected, strict=True)
    )


FIND = ("find", {"q": "x"})
NOW = ("now", {})
ONE = '{"name": "find", "arguments": {"q": "x"}}'
NEITHER = "must be a JSON object"

HERMES = {
    # vLLM's hermes, and the templates of Qwen2.5 and Qwen3.
    "one call": (hermes(ONE), "", [FIND]),
    "with newlines": (hermes(f"\n{ONE}\n"), "", [FIND]),
    "several, in order": (hermes(ONE) + "\n" + hermes('{"name": "b", "arguments": {}}'), "", [FIND, ("b", {})]),
    "with text around": (f"Let me see.\n{hermes(ONE)}\nThere.", "Let me see.\n\nThere.", [FIND]),
    "no call": ("  It is 42. ", "It is 42.", []),
    "nothing": ("", "", []),
    "never closed, as vLLM": (f"Hm. <tool_call>{ONE}", "Hm.", [FIND]),
    "never closed, then another": (f"<tool_call>{ONE}{hermes(ONE)}", "", [FIND, FIND]),
    "never closed and cut": ('Hm. <tool_call>{"name": "find", "arguments": {"q": 1x', "Hm.", ["never closed"]),
    "only a closing tag": ("</tool_call>", "</tool_call>", []),
    "no arguments": (hermes('{"name": "find"}'), "", [("find", {})]),
    # Our own.
    "two objects in one tag": (hermes(f"{ONE}\n{ONE}"), "", [FIND, FIND]),
    "a list in one tag": (hermes(f"[{ONE}, {ONE}]"), "", [FIND, FIND]),
    "a code block in the tag": (hermes(f"\n```json\n{ONE}\n```\n"), "", [FIND]),
    "one brace too many": (hermes(ONE + "}"), "", [FIND]),
    "only a name, cut off": ('<tool_call>{"name": "find"', "", ["never closed"]),
    "one brace too few": (hermes(ONE[:-1]), "", [FIND]),
    "text in the tag": (hermes(f"{ONE} Done."), "Done.", [FIND]),
    "text after a tag that is open": (f"<tool_call>{ONE}\nDone.", "Done.", [FIND]),
    "Llama's key": (hermes('{"name": "find", "parameters": {"q": "x"}}'), "", [FIND]),
    "bad JSON": (hermes('{"name": "find", "arguments": {"q": x}}'), "", ["not valid JSON"]),
    "single quotes": (hermes("{'name': 'find', 'arguments': {'q': 'x'}}"), "", [FIND]),
    "a comma too many": (hermes('{"name": "find", "arguments": {"q": "x",},}'), "", [FIND]),
    "Python's words": (
        hermes('{"name": "a", "arguments": {"b": True, "c": None}}'),
        "",
        [("a", {"b": True, "c": None})],
    ),
    "a line break in a string": (hermes('{"name": "find", "arguments": {"q": "a\nb"}}'), "", [("find", {"q": "a\nb"})]),
    "an unknown escape": (
        hermes(r'{"name": "find", "arguments": {"q": "\d+ \"y\""}}'),
        "",
        [("find", {"q": '\\d+ "y"'})],
    ),
    "empty": (hermes(""), "", ["not valid JSON"]),
    "good and bad": (hermes("{") + hermes(ONE), "", ["not valid JSON", FIND]),
    "null": (hermes("null"), "", ["the call " + NEITHER]),
    "no name": (hermes('{"arguments": {}}'), "", ['needs a "name"']),
    "empty name": (hermes('{"name": "", "arguments": {}}'), "", ['needs a "name"']),
    "name is a number": (hermes('{"name": 1, "arguments": {}}'), "", ['needs a "name"']),
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
    "too deep in a string": (hermes('{"name": "f", "arguments": "' + DEEP + '"}'), "", [NEITHER]),
    "a number without end": (hermes('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}"), "", ["not valid JSON"]),
    "half a surrogate pair as name": (hermes(f'{{"name": {HALF_A_PAIR}}}'), "", ["not valid JSON"]),
    "half a surrogate pair inside": (
        hermes(f'{{"name": "f", "arguments": {{"q": {HALF_A_PAIR}}}}}'),
        "",
        ["not valid JSON"],
    ),
    # Never a call with fewer arguments than were written.
    "an argument beside": (hermes('{"name": "find", "arguments": {"q": "x"}, "n": 2}'), "", ["'n' stands beside"]),
    "arguments beside another tool's name": (hermes('{"name": "other", "q": "x"}'), "", ["'q' stands beside"]),
    "two objects of arguments": (
        hermes('{"name": "f", "arguments": {}, "parameters": {"q": 1}}'),
        "",
        ["'parameters' st"],
    ),
    "arguments outside of the function": (
        hermes('{"function": {"name": "find"}, "arguments": {"q": "x"}}'),
        "",
        [FIND],
    ),
    "a key twice": (hermes('{"name": "find", "arguments": {"q": "x", "q": "y"}}'), "", ["'q' is given twice"]),
    "a key's spelling": (hermes('{"name": "store", "argument": {"note": "x"}}'), "", ["'argument' stands beside"]),
    "arguments in the next object": (hermes('{"name": "store"}\n{"note": "x"}'), "", ["could not be read", "needs a"]),
    "arguments as text behind": (hermes('{"name": "store"} note=x'), "note=x", ["could not be read"]),
    "a broken object behind": (hermes(f'{ONE}\n{{"name": x}}'), "", [FIND, "not valid JSON"]),
    "cut off after a comma": (hermes('{"name": "find", "arguments": {"q": "x",'), "", ["not valid JSON"]),
    "what is no argument": (hermes(f'{ONE[:-1]}, "id": "1", "thought": "Hm."}}'), "", [FIND]),
    "the closing tag in an argument": (
        hermes('{"name": "f", "arguments": {"q": "</tool_call>"}}'),
        "",
        [("f", {"q": "</tool_call>"})],
    ),
}

LLAMA = '{"name": "find", "parameters": {"q": "x"}}'
LLAMA3 = {
    # vLLM's llama3_json, and the template of Llama 3.1.
    "one call": (LLAMA, "", [FIND]),
    "with white space": (f"\n\n {LLAMA}\n", "", [FIND]),
    "hermes' key": (ONE, "", [FIND]),
    "type first": ('{"type": "function", "name": "find", "parameters": {"q": "x"}}', "", [FIND]),
    "parameters first": ('{"parameters": {"q": "x"}, "name": "find"}', "", [FIND]),
    "another tool": ('{"name": "other", "parameters": {}}', "", [("other", {})]),
    "python tag": (f"<|python_tag|>{LLAMA}", "", [FIND]),
    "several": (f"{LLAMA}; {LLAMA};{LLAMA}", "", [FIND, FIND, FIND]),
    "a last semicolon": (f"{LLAMA};", "", [FIND]),
    "several without semicolon": (f"{LLAMA}\n{LLAMA}", "", [FIND, "separate calls with ';'"]),
    "text behind": (f"{LLAMA} There.", "", [FIND, "text after a call"]),
    "text before, as vLLM": (f"Sure. {LLAMA}", "Sure.", [FIND]),
    "code behind the tag": ("<|python_tag|>print(1)", "", ["not valid JSON"]),
    "only the tag": ("<|python_tag|>", "", ["not valid JSON"]),
    "a list behind the tag": ("<|python_tag|>[1]", "", ["the call " + NEITHER]),
    "parameters as a JSON string": ('{"name": "find", "parameters": "{\\"q\\": \\"x\\"}"}', "", [FIND]),
    # Our own.
    "no call": (" It is 42. ", "It is 42.", []),
    "nothing": ("", "", []),
    "JSON answer": ('{"answer": 42}', '{"answer": 42}', []),
    "JSON answer with a name": ('{"name": "Seine"}', '{"name": "Seine"}', []),
    "JSON answer with a type": ('{"type": "river", "name": "Seine"}', '{"type": "river", "name": "Seine"}', []),
    "JSON list": ("[1, 2]", "[1, 2]", []),
    "brace": ("{x | x > 0}", "{x | x > 0}", []),
    "cut off": ('{"name": "find", "parameters": {"q"', "", ["not valid JSON"]),
    "bad JSON": ('{"name": "find", "parameters": {q: 1}}', "", ["not valid JSON"]),
    "good and bad": (f'{LLAMA}; {{"name"', "", [FIND, "not valid JSON"]),
    "no name": ('{"parameters": {"q": "x"}}', "", ['needs a "name"']),
    "an argument beside": ('{"name": "find", "parameters": {"q": "x"}, "n": 2}', "", ["'n' stands beside"]),
    "a key twice": ('{"name": "find", "parameters": {"q": "x", "q": "y"}}', "", ["'q' is given twice"]),
    "arguments as text behind": ('{"name": "store"} {"note": "x"}', "", ["could not be read", "text after a call"]),
    "function instead of name": ('{"function": "find", "parameters": {"q": "x"}}', "", [FIND]),
    "parameters a list": ('{"name": "find", "parameters": [1]}', "", ["the arguments " + NEITHER]),
    "no parameters": ('{"name": "now"}', "", [NOW]),
    "hermes tags": (hermes(ONE), "", [FIND]),
    "too deep": (f'{{"name": "f", "parameters": {{"a": {DEEP}}}}}', "", ["not valid JSON"]),
    "half a surrogate pair": (f'{{"name": "f", "parameters": {{"q": {HALF_A_PAIR}}}}}', "", ["not valid JSON"]),
}

PYTHONIC = {
    # vLLM's pythonic and llama4_pythonic.
    "one call": ('[find(q="x")]', "", [FIND]),
    "several": ("[find(q='x', n=2), now()]", "", [("find", {"q": "x", "n": 2}), NOW]),
    "another tool": ("[other(a=1)]", "", [("other", {"a": 1})]),
    "Llama 4's tags": ('<|python_start|>[find(q="x")]<|python_end|>', "", [FIND]),
    "literals": (
        "[store(flag=True, items=[1, -2.5, None, {'a': (1,)}], note='it\\'s')]",
        "",
        [("store", {"flag": True, "items": [1, -2.5, None, {"a": [1]}], "note": "it's"})],
    ),
    "JSON's words": ("[store(flag=true, note=null)]", "", [("store", {"flag": True, "note": None})]),
    "no call": ("[1, 2]", "[1, 2]", []),
    # Our own.
    "by position": ('[find("x", 2)]', "", [("find", {"q": "x", "n": 2})]),
    "a dictionary for all": ('[find({"q": "x"})]', "", [FIND]),
    "odd names": ('[find(q="x", **{"a b": 1})]', "", [("find", {"q": "x", "a b": 1})]),
    "text before": ('Let me look.\n[find(q="x")]', "Let me look.", [FIND]),
    "alone on a line": ('Let me look.\nfind("x")\nThen I answer.', "Let me look.\n\nThen I answer.", [FIND]),
    "in a code block": ('```python\nr = find(q="x")\nprint(now())\n```', "", [FIND, NOW]),
    "a variable": ("[find(q=word)]", "", ["literal"]),
    "an argument twice": ("[find(q='x', q='y')]", "", ["'q' is given twice"]),
    "by position and by name": ("[find('x', q='y')]", "", ["'q' is given twice"]),
    "never closed": ('[find(q="x"', "", ["literal"]),
}

MISTRAL = {
    # vLLM's mistral: the form before the tokenizer's version 11, and the one since.
    "a list": (f"[TOOL_CALLS][{ONE}, {ONE}]", "", [FIND, FIND]),
    "with a space and an id": (f'[TOOL_CALLS] [{ONE[:-1]}, "id": "abcdefghi"}}]', "", [FIND]),
    "named": ('[TOOL_CALLS]find{"q": "x"}', "", [FIND]),
    "named twice": ('[TOOL_CALLS]find{"q": "x"}[TOOL_CALLS]now{}', "", [FIND, NOW]),
    "with [ARGS]": ('[TOOL_CALLS]find[ARGS]{"q": "x"}', "", [FIND]),
    "with an id and [ARGS]": ('[TOOL_CALLS]find[CALL_ID]abcdefghi[ARGS]{"q": "x"}', "", [FIND]),
    "text before": (f"Let me look.[TOOL_CALLS][{ONE}]", "Let me look.", [FIND]),
    # Our own.
    "one object": (f"[TOOL_CALLS]{ONE}", "", [FIND]),
    "text behind": (f"[TOOL_CALLS][{ONE}]\nThere.", "There.", [FIND]),
    "bad JSON": ('[TOOL_CALLS][{"name": find}]', "", ["not valid JSON"]),
    "nothing behind": ("[TOOL_CALLS]", "", ["not valid JSON"]),
    "arguments in another form": ("[TOOL_CALLS]find[ARGS]q=x", "", ["not valid JSON"]),
    "arguments behind the object": (
        '[TOOL_CALLS]store{"note": "x"} "flag": true}',
        "",
        ['""flag": true}" stands behind'],
    ),
    "another name without an object": ("[TOOL_CALLS]now{}store[ARGS]note=x", "", ["stands behind the arguments"]),
}


def xml(body, name="find"):
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def parameter(name, value):
    return f"<parameter={name}>\n{value}\n</parameter>\n"


QWEN_XML = {
    # vLLM's qwen3_coder and the templates of Qwen3-Coder and Qwen3.5.
    "one call": (xml(parameter("q", "x")), "", [FIND]),
    "several": (xml(parameter("q", "x")) + "\n" + xml("", "now"), "", [FIND, NOW]),
    "text before": (f"Let me look.\n{xml(parameter('q', 'x'))}", "Let me look.", [FIND]),
    "several lines": (xml(parameter("q", "a\n\n b")), "", [("find", {"q": "a\n\n b"})]),
    "a number for a text": (xml(parameter("q", "7")), "", [("find", {"q": "7"})]),
    "a number": (xml(parameter("q", "x") + parameter("n", "7")), "", [("find", {"q": "x", "n": 7})]),
    "no number": (xml(parameter("q", "x") + parameter("n", "many")), "", [("find", {"q": "x", "n": "many"})]),
    "true": (xml(parameter("flag", "true"), "store"), "", [("store", {"flag": True})]),
    "Python's True": (xml(parameter("flag", "True"), "store"), "", [("store", {"flag": True})]),
    "a list": (xml(parameter("items", '["a", {"b": 1}]'), "store"), "", [("store", {"items": ["a", {"b": 1}]})]),
    "text or null: null": (xml(parameter("note", "null"), "store"), "", [("store", {"note": None})]),
    "text or null: text": (xml(parameter("note", "7"), "store"), "", [("store", {"note": "7"})]),
    "no outer tag": (f"<function=find>\n{parameter('q', 'x')}</function>", "", [FIND]),
    "not closed": (f"<tool_call>\n<function=find>\n{parameter('q', 'x')}", "", [FIND]),
    # Our own.
    "a tag in a text": (
        xml(parameter("q", "<b>x</b> </parameter> y")),
        "",
        [("find", {"q": "<b>x</b> </parameter> y"})],
    ),
    "a parameter not closed": (xml("<parameter=q>\nx\n"), "", ["<parameter=q> was never closed"]),
    "Llama 3.1's custom form": ('<function=find>{"q": "x"}</function>', "", [FIND]),
    "JSON in the tags": (hermes(ONE), "", [FIND]),
    # Never a call with fewer arguments than were written.
    "bare text": (xml("ls -la\n", "store"), "", ['"ls -la" is not read as an argument']),
    "attributes": (xml('<parameter name="q">x</parameter>\n'), "", ["is not read as an argument"]),
    "tags of the parameters' names": ("<function=store><note>x</note></function>", "", ["is not read as an argument"]),
    "an opening tag that is not closed": (xml("<parameter=q\nx\n</parameter>\n"), "", ["is not read as an argument"]),
    "one of two": (xml(parameter("q", "x") + '<parameter name="n">2</parameter>\n'), "", ["<parameter=q> was never"]),
    "one of two in a line": (
        xml("<parameter=q>x</parametr><parameter=n>2</parameter>"),
        "",
        ["<parameter=q> was never"],
    ),
    "behind the end": (xml("</function>\n<parameter=q>x</parameter>", "store"), "", ["is not read as an argument"]),
    "behind the end, in the tag": ("<tool_call><function=now></function> x=1</tool_call>", "", ["is not read"]),
    "text behind the end": ("<function=now></function>\nI wait.", "I wait.", [NOW]),
    "a parameter twice": (xml(parameter("q", "x") + parameter("q", "y")), "", ["'q' is given twice"]),
    "JSON and more": ('<function=find>{"q": "x"} n=2</function>', "", ["is not read as an argument"]),
    "a call that is not closed before another": (
        xml("<parameter=q>\nx\n") + xml(parameter("q", "y")),
        "",
        ["<parameter=q> was never closed", ("find", {"q": "y"})],
    ),
    "another spelling of the name": (
        '<invoke name="find">x</invoke>',
        '<invoke name="find">x</invoke>',
        ['?<invoke name="f'],
    ),
}

SCHEMA = (
    '{"type": "function", "function": {"name": "find", "description": "Find pages.", "parameters": {"type": "object",'
    ' "properties": {"q": {"type": "string"}}, "required": ["q"]}}}'
)
FILLED_IN = SCHEMA.replace('{"type": "string"}', '"x"')
QWEN_CODER = {
    # Forms in replies of Qwen2.5-Coder.
    "tools tags": (f"<tools>\n{ONE}\n</tools>", "", [FIND]),
    "several in the tags": (f"<tools>\n{ONE}\n{ONE}\n</tools>\n<answer>x</answer>", "<answer>x</answer>", [FIND, FIND]),
    "tags not closed": (f"<tools>\n{ONE}", "", [FIND]),
    "empty tags before": (f"<tools></tools>\n{ONE}", "<tools></tools>", [FIND]),
    "another tool in the tags": ('<tools>{"name": "other", "arguments": {}}</tools>', "", [("other", {})]),
    "bad JSON in the tags": ('<tools>{"name": "find", "arguments": {"q": x}}</tools>', "", ["not valid"]),
    "fenced": (f"I look it up.\n```json\n{ONE}\n```\nThen I answer.", "I look it up.\n\nThen I answer.", [FIND]),
    "bare": (ONE, "", [FIND]),
    "bare, several": (f"{ONE}\n{ONE}", "", [FIND, FIND]),
    "bare, in a list": (f"[{ONE}, {ONE}]", "", [FIND, FIND]),
    "bare, in text": (f"Step 1: <{ONE}>\nStep 2: I answer.", "Step 1: \nStep 2: I answer.", [FIND]),
    "OpenAI's form": (
        '{"type": "function", "function": {"name": "find", "arguments": "{\\"q\\": \\"x\\"}"}}',
        "",
        [FIND],
    ),
    "single quotes inside": (
        """<tools>{"name": "find", "arguments": {"q": '"x"'}}</tools>""",
        "",
        [("find", {"q": '"x"'})],
    ),
    "the tool as key": ('{"find": {"q": "x"}}', "", [FIND]),
    "arguments beside the name": ('{"name": "find", "q": "x"}', "", [FIND]),
    "another key": ('{"tool": "find", "input": {"q": "x"}}', "", [FIND]),
    "a code call": ('<code>\nfind("x")\n</code>', "", [FIND]),
    "the description": (f"# Tools\n<tools>\n{SCHEMA}\n</tools>", f"# Tools\n<tools>\n{SCHEMA}\n</tools>", []),
    "the description and a call": (f"<tools>{SCHEMA}</tools>\n{ONE}", f"<tools>{SCHEMA}</tools>", [FIND]),
    # Unread, which `explain_unread_calls` answers.
    "the description, filled in": (FILLED_IN, FILLED_IN, [f"?{FILLED_IN}"]),
    "bad JSON": (
        '{"name": "find", "arguments": {"q": x}}',
        '{"name": "find", "arguments": {"q": x}}',
        ['?{"name": "fi'],
    ),
    "no arguments": ('{"name": "find"}', '{"name": "find"}', ['?{"name": "find"}']),
    "an argument beside": (f'{ONE[:-1]}, "n": 2}}', f'{ONE[:-1]}, "n": 2}}', ["?{"]),
    "arguments behind the object": (
        '{"name": "store"} "note": 1',
        '{"name": "store"} "note": 1',
        ['?{"name": "store"} "n'],
    ),
    "a made-up result's key among the arguments": (
        '{"name": "save", "arguments": {"to": "x", "output": "y',
        '{"name": "save", "arguments": {"to": "x", "output": "y',
        [],
    ),
    "a variable in code": ("find(word)", "find(word)", ["?find(word)"]),
    # What the model makes up after its call.
    "a made-up result": (
        f'{ONE}\n{{"response": "x"}}\n{ONE}',
        f'{{"response": "x"}}\n{ONE}',
        [FIND],
    ),
    "a made-up result in the call": (
        f'{ONE[:-1]}, "response": [{{"title": "x',
        ', "response": [{"title": "x',
        [FIND],
    ),
    "playing the user": (f"{ONE}\n<|endoftext|>Human: and y?\n{ONE}", f"<|endoftext|>Human: and y?\n{ONE}", [FIND]),
}

FAMILIES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "qwen-xml": QWEN_XML,
    "qwen-coder": QWEN_CODER,
}
CASES = [(family, case) for family, table in FAMILIES.items() for case in table]


@pytest.mark.parametrize(("family", "case"), CASES, ids=[f"{family}: {case}" for family, case in CASES])
def test_a_family(family, case):
    text, content, expected = FAMILIES[family][case]
    found, calls = read(text, family)
    assert agrees(calls, expected), calls
    assert found == content


UNMISTAKABLE = [(f, c) for f, c in CASES if any(isinstance(x, tuple) and x[0] in TOOLS for x in FAMILIES[f][c][2])]


@pytest.mark.parametrize("other", NAMES)
def test_every_format_reads_what_is_unmistakable_in_the_others(other):
    for family, case in UNMISTAKABLE:
        text, _, expected = FAMILIES[family][case]
        wanted = [call for call in expected if isinstance(call, tuple)]
        found = [call for call in read(text, other)[1] if isinstance(call, tuple)]
        assert [c for c in found if c in wanted][:1] == wanted[:1], (family, case, found)


def test_arguments_of_a_chat_endpoint_with_a_key_twice_are_malformed():
    assert read_arguments("find", '{"q": "x", "n": 2}') == ParsedCall("find", {"q": "x", "n": 2})
    call = read_arguments("find", '{"q": "x", "q": "y"}')
    assert isinstance(call, MalformedCall) and call.name == "find" and "'q' is given twice" in call.reason


def test_a_call_that_its_own_form_cannot_read_is_not_lost_to_a_call_in_another_form():
    text = hermes("{") + '\n```python\nfind("x")\n```'
    assert read(text, "hermes")[1] == [
        "the call is not valid JSON (Expecting property name enclosed in double quotes: char 1)"
    ]


def test_a_reason_is_a_clause_that_fits_the_observation():
    for family, table in FAMILIES.items():
        for text, _, _ in table.values():
            for call in named(family).read(text, TOOLS).calls:
                if isinstance(call, MalformedCall):
                    assert call.reason and "\n" not in call.reason and not call.reason.endswith(".")
                    assert len(call.reason) < 200


ANSWERS = [
    "The capital of France is Paris.",
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether she sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
    "So x = \\frac{1}{2}, and the answer is \\boxed{\\{1, 2\\}}.",
    "<think>I need find. Let me find(out).</think>\n<cite>3</cite>\n<answer>Sussex</answer>",
    '{"name": "Paris", "arguments": {"population": 2100000}}',
    '{"name": "Seine", "type": "river", "length": 777}',
    '```json\n{"name": "Paris", "country": "France"}\n```',
    "```python\ndef search(q):\n    return q\n\nprint(search('x'))\n```",
    "```python\ndef find(q, n=3):\n    return q\n\nfind('x')\n```",
    "[1, 2, 3]",
    "[Paris(France), London(England)]",
    "I would use find(q) to look it up, or call `find` with a query.",
    "Use find(q='x') if you need it, then answer.",
    'A call looks like {"name": <function-name>, "arguments": <args-json-object>}.',
    f"The tools are:\n{SCHEMA}",
    f"<tools>\n{SCHEMA}\n</tools>",
    "<tools></tools>\nI know the answer: 7.",
    "now (in 2024) it is 7.\nfind: the act of finding.",
    '"find" and "now" are tools.',
    "<b>bold</b> <answer>find</answer> [TOOLS] {braces} (brackets)",
]


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("tool_format", [name for name in NAMES if name not in ("llama3", "pythonic")])
def test_an_answer_is_not_read_as_a_call(text, tool_format):
    assert read(text, tool_format) == (text, [])


@pytest.mark.parametrize("text", [t for t in ANSWERS if not t.startswith(('{"name": "Paris", "arguments"', "[Paris("))])
@pytest.mark.parametrize("tool_format", ["llama3", "pythonic"])
def test_an_answer_is_not_read_as_a_call_where_the_whole_message_may_be_one(text, tool_format):
    assert read(text, tool_format) == (text, [])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([t for t in ANSWERS if not t.startswith(("{", "["))]), max_size=4), st.sampled_from(NAMES)
)
def test_answers_in_any_order_are_not_read_as_calls(answers, name):
    text = "\n".join(answers)
    reply = named(name).read(text, TOOLS)
    assert (reply.content, reply.calls) == (text, ())


def test_at_most_so_many_calls_of_a_reply_are_run():
    for name in NAMES:
        text = named(name).write("", [ParsedCall("find", {"q": str(i)}) for i in range(MAX_CALLS + 5)])
        calls = named(name).read(text, TOOLS).calls
        assert [call.arguments["q"] for call in calls] == [str(i) for i in range(MAX_CALLS)], name
    apart = "\nand\n".join(ONE for _ in range(MAX_CALLS + 5))
    assert len(named("auto").read(apart, TOOLS).calls) == MAX_CALLS


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("... <tool_call> ...", "hermes"),
        ("<|start_header_id|>", "llama3"),
        ("<|start_header_id|> <tool_call>", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p>", "qwen-xml"),
        ("[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS]", "mistral"),
        ("<|header_start|>user<|header_end|>", "pythonic"),
        ("<|im_start|>", "auto"),
    ],
)
def test_detect(template, expected):
    assert detect(template).name == expected


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="no tool format 'xml'; the formats are: auto, hermes"):
        named("xml")


@pytest.mark.parametrize("name", NAMES)
def test_the_instructions_name_the_tools_and_show_a_call_that_is_read(name):
    tool = {"type": "function", "function": {"name": "find", "description": "Find pages.", "parameters": {}}}
    form = named(name)
    text = form.instructions([tool])
    assert "Find pages." in text and form.example() in text
    (call,) = form.read(form.example(), {"tool_name": {}}).calls
    assert call == ParsedCall("tool_name", {"parameter": "value"})
    (call,) = form.read(form.example().replace("tool_name", "find").replace('"parameter"', '"q"'), TOOLS).calls
    assert isinstance(call, ParsedCall) and call.name == "find"
