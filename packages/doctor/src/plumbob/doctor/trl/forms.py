"""Forms in which reward functions look for an answer: usual ones, and those that their own code and the prompts name.

A form is a text in which `{}` stands for the answer.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

USUAL = (
    "{}",
    "The answer is {}.",
    "\\boxed{{}}",
    "<answer>{}</answer>",
    "#### {}",
    "<think>\nThat takes a few steps.\n</think>\n<answer>\n{}\n</answer>",
    "<reasoning>\nThat takes a few steps.\n</reasoning>\n<answer>\n{}\n</answer>\n",
    "<think>\nThat takes a few steps.\n</think>\n\\boxed{{}}",
    '{"answer": "{}"}',
    '{"answer": {}}',
)
WORKING, LINES = "That takes a few steps.", "First this is done,\nthen that.\nThat takes a few steps."
NUMBERED = "That is 17 times 29, in two steps."
"""What stands before an answer: one line, several ones, and other numbers."""
MOST = 24
"""Most forms that are tried."""
DEPTH = 3
"""Calls of functions of the user's own, one in another, in whose code forms are looked for."""
_TAGS = re.compile(r"<(\w+)>(?=.*</\1>)", re.DOTALL)
_CLOSED = {"{": "}", "(": ")", "[": "]", "<": ">"}
_OF_PYTHON = frozenset({"utf-8", "assistant", "user", "system"})


def constants(function: Any, depth: int = DEPTH) -> Iterator[Any]:
    """Texts and compiled patterns in the code of a reward function, and of functions of its module that it calls."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        return
    yield from _of_code(function.__code__)
    named = inspect.getclosurevars(function)
    for value in [*named.globals.values(), *named.nonlocals.values()]:
        if isinstance(value, str | re.Pattern):
            yield value
        elif inspect.isfunction(value) and value.__module__ == function.__module__ and depth:
            yield from constants(value, depth - 1)


def _of_code(code: Any) -> Iterator[Any]:
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif inspect.iscode(value):
            yield from _of_code(value)


def forms(functions: Iterable[Any], prompts: Sequence[str]) -> list[str]:
    """The forms to try, usual ones first: `MOST` different ones. `prompts`: texts of a few prompts."""
    found = list(USUAL)
    for function in functions:
        known = [one.pattern if isinstance(one, re.Pattern) else one for one in constants(function)]
        # The text of a function's own documentation names no more forms than its code.
        known = [text for text in known if isinstance(text, str) and len(text) <= 400]
        tags = re.findall(r"<(\w+)>", " ".join(known))
        found += [form for text in known for form in (_of_pattern(text) or _of_literal(text))]
        found += [f"<{tag}>{{}}</{tag}>" for tag in dict.fromkeys(tags)]
    found += [f"<{tag}>{{}}</{tag}>" for tag in _in_all(prompts)]
    return list(dict.fromkeys(form for form in found if "{}" in form))[:MOST]


def _in_all(prompts: Sequence[str]) -> list[str]:
    tags = [_TAGS.findall(text) for text in prompts]
    return [tag for tag in dict.fromkeys(tags[0] if tags else ()) if all(tag in own for own in tags)]


def asked(form: str, prompts: Sequence[str]) -> bool:
    """Whether all prompts name the mark that stands before the answer in a form, as in "put it in \\boxed{}"."""
    mark = form.partition("{}")[0].split()[-1:]
    return bool(prompts) and bool(mark) and not mark[0].isalpha() and all(mark[0] in text for text in prompts)


def marked(form: str) -> bool:
    """Whether a form marks the answer, so that other text may stand before it; a JSON document has nothing before it."""
    return form.strip() != "{}" and not form.startswith(('{"', "["))


def with_lines(form: str) -> str:
    """The form with several lines before the answer, in its own place for what is thought if it has one."""
    return form.replace(WORKING, LINES, 1) if WORKING in form else f"{LINES}\n{form}"


def _of_literal(text: str) -> list[str]:
    """A form for a text that may stand before an answer, such as "Answer:"."""
    mark = text.strip()
    if not 2 <= len(mark) <= 30 or mark.isidentifier() or mark in _OF_PYTHON or "\n" in mark or mark.endswith(">"):
        return []
    return [f"{mark}{{}}{_CLOSED[mark[-1]]}"] if mark[-1] in _CLOSED else [f"{mark} {{}}"]


def _of_pattern(text: str) -> list[str]:
    """Texts that a regular expression matches, with the answer in place of one of its groups, or of its last `.*`."""
    if not re.search(r"\\[dswSDWb]|\(.*\)|[.\])][*+]", text):
        return []
    try:
        parsed = _parser().parse(text)
        groups = list(range(1, parsed.state.groups))
        made = [_example(parsed, {number}) for number in groups[-1:] + groups[:-1][::-1]] if groups else []
        made = made or [_last_filled(_example(parsed, set()))]
    except (re.error, RecursionError, NotImplementedError):
        return []
    return [form for form in dict.fromkeys(made) if "{}" in form][:3]


def _parser() -> Any:
    import importlib

    return importlib.import_module("re._parser")  # of Python itself, without documentation


def _last_filled(text: str) -> str:
    before_it, found, after = text.rpartition(WORKING)
    return f"{before_it}{{}}{after}" if found else ""


def _example(parsed: Any, gold: set[int]) -> str:
    """A text that a parsed expression matches. `gold`: the number of the group that holds the answer."""
    said = []
    for kind, value in parsed:
        match str(kind):
            case "LITERAL":
                said.append(chr(value))
            case "SUBPATTERN":
                said.append("{}" if value[0] in gold else _example(value[3], gold))
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, _, inner = value
                if (each := str(inner[0][0])) in ("ANY", "NOT_LITERAL") or (
                    each == "IN" and "NEGATE" in str(inner[0][1])
                ):
                    said.append(WORKING)
                else:
                    said.append(_example(inner, gold) * max(least, 1 if _wanted(inner, gold) else 0))
            case "BRANCH":
                said.append(_example(value[1][0], gold))
            case "IN":
                said.append(_of_set(value))
            case "ANY" | "NOT_LITERAL":
                said.append("a")
            case "ATOMIC_GROUP":
                said.append(_example(value, gold))
            case "AT" | "ASSERT_NOT":
                pass
            case "ASSERT":
                said.append(_example(value[1], gold))
            case other:
                raise NotImplementedError(other)
    return "".join(said)


def _wanted(inner: Any, gold: set[int]) -> bool:
    """Whether an optional part is taken: it holds the answer, or is white space, which models write."""
    holds = any(str(kind) == "SUBPATTERN" and (value[0] in gold or _wanted(value[3], gold)) for kind, value in inner)
    return holds or str(inner[0]).endswith("CATEGORY_SPACE)])")


def _of_set(value: Any) -> str:
    for kind, one in value:
        match str(kind):
            case "LITERAL":
                return chr(one)
            case "RANGE":
                return chr(one[0])
            case "CATEGORY":
                return {"CATEGORY_DIGIT": "7", "CATEGORY_SPACE": " "}.get(str(one), "a")
    return "a"
