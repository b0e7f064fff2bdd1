"""What perfect transcripts read: tool results are what the tools return, reach the model whole, and hold what answers need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from plumbob.doctor.environment.inequality import Evidence, refuted
from plumbob.doctor.environment.matrix import Matrix, Result
from plumbob.doctor.environment.player import Played
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
_MARK = re.compile(r"(?:\W|truncated|omitted|cut|more|characters|chars|tokens|bytes|lines|\d)*", re.IGNORECASE)
"""What may stand where something was left out."""


def unlike_alone(m: Matrix) -> Evidence | None:
    """Results that are errors, or have other words, than when they were played in the order of the tasks."""
    for how, pairs in m.again.items():
        every = [(b, x, y) for a, b in pairs for x, y in zip(a.results, b.results, strict=False)]
        fine = [one for one in every if not says_failed(one[1])]
        fails = [one for one in fine if says_failed(one[2])]
        read = [one for one in fine if not says_failed(one[2])]
        other = [one for one in read if sorted(squeezed(one[1]).split()) != sorted(squeezed(one[2]).split())]
        for bad, share, cause in ((fails, OTHER, "tools-fail"), (other, 0.0, "tool-results-wrong")):

            def said(first: tuple[Played, str, str], how: str = how) -> str:
                played, x, y = first
                told = f"{{}} tool results are others {how}: {short(y)} in place of {short(x)}"
                return f"{told} in task {played.task.key}"

            if found := refuted(bad, every, said, least=FEW, share=share):
                return Evidence(found.text, cause=cause)
    return None


# What is shown, beside what the tools return


def _compared(m: Matrix) -> list[Result]:
    return [r for r in m.results if r.own is not None]


def _is_part(r: Result) -> bool:
    """Whether what is shown is the tool's result with something left out: an end, the middle, or whole lines."""
    shown, own = r.shown, r.own or ""
    if len(shown) >= len(own) or squeezed(shown) == squeezed(own):
        return False
    start = next((i for i, (a, b) in enumerate(zip(shown, own, strict=False)) if a != b), len(shown))
    left, rest = shown[start:], iter(words(own))
    return (bool(_MARK.fullmatch(left)) and (start > 0 or not shown)) or all(word in rest for word in words(shown))


def _other(m: Matrix) -> list[Result]:
    """Results that neither hold what the tool returns nor are a part of it. A call that fails directly, too, is its own."""
    return [r for r in _compared(m) if squeezed(r.own or "") not in squeezed(r.shown) and not _is_part(r)]


def own_result(m: Matrix) -> Evidence | None:
    """Results that tools do not return; None if there are few, or tools are random."""
    compared = _compared(m)
    failed = [r for r in _other(m) if says_failed(r.shown) and not says_failed(r.own or "")]
    kinds = {
        "errors, and not": (failed, OTHER),
        "others than": ([r for r in _other(m) if r not in failed], OTHER),
        "only parts of": ([r for r in compared if _is_part(r)], 0.0),
    }
    for what, (bad, share) in kinds.items():
        if len(bad) < min(FEW, len(compared)) or len(bad) <= share * len(compared):
            continue
        first = max(bad, key=lambda r: len(r.own or "") - len(r.shown))
        text = (
            f"{len(bad)} of {len(compared)} tool results are {what} what the tool returns for the same arguments, such as "
            f"{short(first.shown)} in place of {short(first.own or '')} in task {m.hand.tasks[first.task].key}"
        )
        if bad is failed:
            return Evidence(text, first.call.name, "tools-fail")
        lost = sum(not Counter(words(r.own or "")) <= Counter(words(r.shown)) for r in bad)
        if 2 * lost > len(bad) and _steady(m, bad):
            return Evidence(text, first.call.name)
    return None


def _steady(m: Matrix, other: Sequence[Result]) -> bool:
    """Whether the tools return the same when they are called once more: they are not random."""
    by_task = {r.task: [one for one in _compared(m) if one.task == r.task] for r in other[:JUDGED]}
    again = {i: m.player.direct(m.hand.tasks[i], [r.call for r in of]) for i, of in by_task.items()}
    return all(again[i] == [r.own for r in of] for i, of in by_task.items())


# What results hold


def fail(m: Matrix) -> Evidence | None:
    down = [r for r in m.results if says_failed(r.shown)]
    return refuted(down, m.results, lambda r: f"{{}} results are errors, such as {short(r.shown)}", share=OTHER)


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
