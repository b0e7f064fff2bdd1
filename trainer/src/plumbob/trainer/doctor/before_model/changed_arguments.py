"""Does a tool return what was shown if its arguments are cut, left out, or written in another way?

What a change of arguments does to a result is known to the tool alone, so the tool is asked: with a shorter query, for
example. If what it returns is, text by text, what rollouts were shown, then it was called so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.before_model.direct_calls import direct
from plumbob.trainer.doctor.before_model.other_results import Result, squeezed
from plumbob.trainer.doctor.environment import Environment, spread

TRIED = 12
"""Number of results whose arguments are looked for."""
FEWEST = 4
"""Fewest results that one change must explain."""
PARTS = 24
"""Most beginnings of a text that are tried, and most ends."""


def change_of(environment: Environment, other: Sequence[Result]) -> str:
    """The change of arguments with which tools return what these results show, in words; "" if no change explains most.

    `other`: results that are others than the tools return to the calls as they were written.
    """
    tried = [other[i] for i in spread(len(other), TRIED)]
    found = [_change(environment, result) for result in tried]
    known = Counter(change[0] for change in found if change is not None)
    if not known:
        return ""
    how, count = known.most_common(1)[0]
    if count < FEWEST or count < thresholds.SAME_CHANGE * len(tried):
        return ""
    example = next(change[1] for change in found if change is not None and change[0] == how)
    return f"{count} of {len(tried)} are what the tool returns when it is called with {how}, such as {example}"


def _change(environment: Environment, result: Result) -> tuple[str, str] | None:
    """(the change, the arguments after it) with which the tool returns what was shown; None if none is found."""
    wanted, tried = squeezed(result.shown), set[str]()
    if not isinstance(result.arguments, dict):
        return None
    for how, arguments in _changes(result.arguments):
        written = json.dumps(arguments, ensure_ascii=False, default=str)
        if arguments == result.arguments or written in tried:
            continue
        tried.add(written)
        (own,) = direct(environment, result.task, [(result.name, arguments)])
        if own is not None and squeezed(own) == wanted:
            return how, f"{written} in place of {json.dumps(result.arguments, ensure_ascii=False, default=str)}"
    return None


def _changes(arguments: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """(what is changed, the arguments after it): the likelier ones first."""
    for name, value in arguments.items():
        for how, other in _values(value):
            yield f"{how} {name!r}", {**arguments, name: other}
    for name in arguments:
        yield f"no {name!r}", {other: value for other, value in arguments.items() if other != name}
    names = list(arguments)
    if len(names) > 1:
        yield "arguments in another order", dict(zip(names, [arguments[n] for n in names[1:] + names[:1]], strict=True))


def _values(value: object) -> Iterator[tuple[str, object]]:
    """(what is changed, the value after it)."""
    if isinstance(value, bool):
        yield "the opposite of", not value
    elif isinstance(value, int | float):
        yield from (("another number than", value + step) for step in (-1, 1))
        yield "as a text,", str(value)
    elif isinstance(value, list):
        yield from (("only a part of", part) for part in (value[:1], value[-1:], value[:-1], value[1:]))
    elif isinstance(value, str):
        words = value.split()
        # A limit on words, tokens or characters leaves whole words in most texts; a single word is cut inside.
        size, joint = (len(words), " ") if len(words) > 1 else (len(value), "")
        yield "only the beginning of", value[:-1]
        yield "only the end of", value[1:]
        pieces = words if joint else list(value)
        for k in spread(size, PARTS):
            if k:
                yield "only the beginning of", joint.join(pieces[:k])
        for k in spread(size, PARTS):
            if k:
                yield "only the end of", joint.join(pieces[k:])
        yield from (("another case of", text) for text in (value.lower(), value.upper(), value.title()))
        yield "no punctuation in", re.sub(r"[^\w\s]", "", value)
        yield "quotes around", json.dumps(value)
        yield "a list of", [value]
        yield "nothing as", ""
