"""What perfect transcripts read: tool results are what the tools return, reach the model whole, and hold what answers need."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from plumbob.doctor.environment.matrix import BESIDE, Evidence, Matrix, Result, refuted
from plumbob.doctor.environment.player import Task
from plumbob.doctor.environment.texts import says_failed, says_nothing, short, squeezed, strings, words
from plumbob.doctor.environment.transcripts import PERFECT

JUDGED = 8
"""Fewest tool results that are judged."""
FEW, OTHER = 3, 0.3
"""Fewest tool results, and largest share, that may be errors, or others than the tool returns when it is called directly. A
search may say now and then that it found nothing, and a server that it is busy."""
HARDLY = 0.05
"""Share of the later arguments and answers of perfect transcripts that must stand in what was read before."""
NEVER = 50
"""Number of later arguments and answers from which on it is a fault that hardly one of them was read before."""


def unlike_alone(m: Matrix) -> Evidence | None:
    """Results that are errors, or have other words, than when they were played alone."""
    every = [(b, x, y) for a, b in m.beside for x, y in zip(a.results, b.results, strict=False) if not says_failed(x)]
    fails = [one for one in every if says_failed(one[2])]
    other = [one for one in every if one not in fails and sorted(one[1].split()) != sorted(one[2].split())]
    for bad, share, cause in ((fails, OTHER, "tools-fail"), (other, 0.0, "tool-results-wrong")):
        text = f"{{}} tool results are others {BESIDE}: "
        if found := refuted(bad, every, text, lambda one: _instead(one[0].task, *one[1:]), least=FEW, share=share):
            return replace(found, cause=cause)
    return None


def _instead(task: Task, due: str, seen: str) -> str:
    return f"{short(seen)} in place of {short(due)} in task {task.key}"


# What is shown, beside what the tools return


def _is_part(r: Result) -> bool:
    """Whether what is shown is the tool's result with something left out; its last word may be cut."""
    shown, own, rest = words(r.shown), words(r.own), iter(words(r.own))
    parts = all(word in rest for word in shown[:-1]) and any(word.startswith(shown[-1]) for word in rest if shown)
    return len(r.shown) < len(r.own) and shown != own and (parts or not shown)


def own_result(m: Matrix) -> Evidence | None:
    """Results that tools do not return; None if there are few, or tools are random."""
    results = [r for r in m.results if r.compared]
    parts = [r for r in results if _is_part(r)]
    # A call that fails directly, too, is its own result.
    other = [r for r in results if squeezed(r.own) not in squeezed(r.shown) and r not in parts]
    failed = [r for r in other if says_failed(r.shown) and not says_failed(r.own)]
    kinds = {
        "errors, and not": (failed, OTHER),
        "others than": ([r for r in other if r not in failed], OTHER),
        "only parts of": (parts, 0.0),
    }
    for what, (bad, share) in kinds.items():
        first = max(bad, key=lambda r: len(r.own) - len(r.shown), default=None)
        if first is None or len(bad) < min(FEW, len(results)) or len(bad) <= share * len(results):
            continue
        text = f"{len(bad)} of {len(results)} tool results are {what} what the tool returns for the same arguments, such as "
        text += _instead(m.hand.tasks[first.task], first.own, first.shown)
        if bad is failed:
            return Evidence(text, first.call.name, "tools-fail")
        lost = sum(not Counter(words(r.own)) <= Counter(words(r.shown)) for r in bad)
        tasks = {r.task for r in bad[:JUDGED]} if 2 * lost > len(bad) else ()
        # Tools that return something else when they are called once more are random.
        if tasks and all(m.called(i) == [r for r in results if r.task == i] for i in tasks):
            return Evidence(text, first.call.name)
    return None


# What results hold


def fail(m: Matrix) -> Evidence | None:
    down = [r for r in m.results if says_failed(r.shown)]
    return refuted(down, m.results, "{} results are errors, such as ", lambda r: short(r.shown), share=OTHER)


def _needs(m: Matrix) -> list[bool]:
    """Of the words that perfect transcripts must have read, new ones of each call after the first result and of the answer:
    whether something that a policy could read before has it.
    """
    found = []
    for i, played in m.kind(PERFECT).items():
        read = played.prompt.casefold()
        given, used, shown = _long_words(read), set[str](), False
        for message in played.messages[len(played.opening) :]:
            if message.role == "tool":
                shown, read = True, f"{read}\n{message.text.casefold()}"
            elif message.role == "assistant":
                texts = [text for call in message.calls for text in strings(call.arguments)] or [m.hand.golds[i]]
                new = {word for text in texts for word in _long_words(text)} - used
                used |= new
                words_ = sorted(new - given) if shown else ()
                found += [bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", read)) for word in words_]
    return found


def _long_words(text: str) -> set[str]:
    return {word for word in words(text) if len(word) > 3 or word.isdigit()}


def needed(m: Matrix) -> Evidence | None:
    results, needs = m.results, _needs(m)
    empty, held = sum(says_nothing(r.shown) for r in results), sum(needs)
    told, asked = {r.shown for r in results}, {repr(r.call) for r in results}
    if len(results) < JUDGED or len(needs) < JUDGED:
        return None
    nothing = held <= 0.1 * len(needs) and (2 * empty > len(results) or len(told) <= 0.1 * len(asked))
    none = held <= HARDLY * len(needs) and len(needs) >= NEVER
    text = (
        f"{len(results)} results of perfect transcripts: {empty} empty, {len(told)} different for {len(asked)} different "
        f"calls; {held} of {len(needs)} later arguments and answers stand in what was read before"
    )
    return Evidence(text, results[0].call.name) if nothing or none else None
