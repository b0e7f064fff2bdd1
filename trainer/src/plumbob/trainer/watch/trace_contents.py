"""Checks of what stands in stored rollouts: messages that were rendered twice, and tools that answer one call in two ways."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.watch.stored_rollouts import Part, Rollout

MOST_PLACES = 3
"""Most rollouts that a finding names."""
FEWEST_REPEATED = 10
"""Fewest calls that several rollouts make at the same place, by which tools are judged."""

MARKS = re.compile(
    r"<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|user|assistant|system)\|>|<(?:start|end)_of_turn>|\[/?INST\]"
)
"""Tokens with which the chat templates of well-known models mark messages."""
DOWN = re.compile(
    r"bad gateway|gateway time-?out|service unavailable|internal server error|connection (?:refused|reset|aborted|error)"
    r"|too many requests|rate limit|(?:http|error|status)\W{0,3}(?:code\W{0,3})?(?:429|50[0234])\b",
    re.IGNORECASE,
)
"""How a server that is down or refuses says so: never the policy's mistake."""
ERROR = re.compile(
    r"\s*(?:error|exception|traceback)\b|\s*\{\s*\"(?:error|is_?error)\"\s*:\s*(?!\s*(?:null|false))", re.IGNORECASE
)
"""How the result of a call that failed begins: with the word, or as an object with that field, as in MCP's `isError`."""


def says_failed(result: str) -> bool:
    """Whether a tool result says that the call failed."""
    return bool(ERROR.match(result) or DOWN.search(result[:200]))


def once(rollouts: Sequence[Rollout]) -> Finding:
    """Do the messages before the first turn hold marks of a chat template, as texts that were rendered already?"""
    check = "the chat template is applied once"
    openings = [(r, list(itertools.takewhile(lambda p: not p.sampled, r.parts))) for r in rollouts]
    twice = [(r, part) for r, parts in openings if (part := _marked(parts)) is not None]
    evidence = f"{len(twice)} of {len(rollouts)} first prompts have a token of a chat template inside a message's text"
    if len(twice) <= thresholds.DOUBLE_TEMPLATE * len(rollouts):
        return Finding(check, "pass", evidence)
    places = tuple(r.place(part) for r, part in twice[:MOST_PLACES])
    return Finding(check, "fail", evidence, "template-applied-twice", twice[0][0].step, places)


def _marked(parts: Sequence[Part]) -> Part | None:
    return next((part for part in parts if MARKS.search(part.text)), None)


def answered(rollouts: Sequence[Rollout]) -> Finding | None:
    """Does each call have one result in the conversation? None with few results that say which call they answer."""
    told = [(r, part) for r in rollouts for part in r.parts if part.role == "tool" and part.answers]
    if len(told) < FEWEST_REPEATED:
        return None
    seen: set[tuple[int, str]] = set()
    again = []
    for rollout, part in told:
        key = id(rollout), part.answers
        if key in seen:
            again.append((rollout, part))
        seen.add(key)
    check = "each call has one result"
    evidence = f"{len(again)} of {len(told)} tool results answer a call that has one already"
    if len(again) <= thresholds.UNLIKE_RESULTS * len(told):
        return Finding(check, "pass", evidence)
    places = tuple(r.place(part) for r, part in again[:MOST_PLACES])
    return Finding(check, "fail", evidence, "tool-results-wrong", again[0][0].step, places)


def alike(rollouts: Sequence[Rollout]) -> Finding | None:
    """Do tools answer a call alike in all rollouts of a task that made the same calls before? None if few did.

    Results that say that a call failed do not count: a server may be busy at times.
    """
    told: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[str, Rollout, Part]]] = defaultdict(list)
    for rollout in rollouts:
        before: tuple[tuple[str, str], ...] = ()
        for name, arguments, part in rollout.results:
            before = (*before, (name, arguments))
            told[rollout.task, before].append((part.text, rollout, part))
    kept = {key: [one for one in several if not says_failed(one[0])] for key, several in told.items()}
    repeated = [several for several in kept.values() if len({id(r) for _, r, _ in several}) > 1]
    if len(repeated) < FEWEST_REPEATED:
        return None
    unlike = [several for several in repeated if len({text for text, _, _ in several}) > 1]
    check = "the same calls of the same task get the same results"
    evidence = f"{len(unlike)} of {len(repeated)} calls that several rollouts of a task made got different results"
    if len(unlike) <= thresholds.UNLIKE_RESULTS * len(repeated):
        return Finding(check, "pass", evidence)
    first = unlike[0]
    other = next(one for one in first if one[0] != first[0][0])
    evidence += f", such as {first[0][0][:40]!r} and {other[0][:40]!r}"
    places = (first[0][1].place(first[0][2]), other[1].place(other[2]))
    return Finding(check, "fail", evidence, "tool-results-wrong", first[0][1].step, places)
