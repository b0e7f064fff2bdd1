"""What perfect transcripts read: tool results are what the tools return, reach the model whole, and hold what answers need."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from plumbob.doctor.environment.inequality import Evidence, Inequality
from plumbob.doctor.environment.matrix import Matrix, Result
from plumbob.doctor.environment.player import Call
from plumbob.doctor.environment.texts import (
    chosen,
    others_stand,
    places,
    says_failed,
    says_nothing,
    short,
    squeezed,
    strings,
)
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

JUDGED = 8
"""Fewest tool results that are judged."""
OTHER = 0.3
"""Largest share of tool results that may be others than the tool returns when it is called directly."""
FEW_CUT = 3
"""Fewest results that must be shorter than what their tools return."""
FAILED = 0.2
"""Largest share of the results of perfect transcripts that may be errors."""
NOTHING = 0.5
"""Largest share of them that may be empty."""
NEEDED, HARDLY = 0.5, 0.05
"""Share of the later arguments and answers of perfect transcripts that must stand in what was read before: if results end
inside of texts, are the same for all calls or those of another task; and in any case."""
NEVER = 50
"""Number of later arguments and answers from which on it is a fault that hardly one of them was read before."""
SAME_FOR_ALL, HELD_AGAIN, GIVEN = 0.9, 0.9, 0.9
"""Smallest share of tasks whose calls all get one result; of results that hold an earlier message; of tasks whose first
result holds the answer."""
LONG = 25
"""Number of characters from which on a text is known again, and a result is more than a word of acknowledgement."""
GIVEN_TASKS = 6
"""Fewest tasks by which it is judged whether a first result gives answers away."""
_MARK = re.compile(r"(?:\W|truncated|omitted|cut|more|characters|chars|tokens|bytes|lines|\d)*", re.IGNORECASE)
"""What may stand where something was left out."""


def _compared(m: Matrix) -> list[Result]:
    return [r for r in m.results if r.own is not None]


def _is_part(r: Result) -> bool:
    """Whether what is shown is the tool's result with something left out: an end, the middle, or whole lines."""
    shown, own = r.shown, r.own or ""
    if len(shown) >= len(own) or squeezed(shown) == squeezed(own):
        return False
    lines, rest = [squeezed(x) for x in shown.splitlines() if x.strip()], iter(map(squeezed, own.splitlines()))
    if len(lines) > 1 and all(line in rest for line in lines):
        return True
    start = next((i for i, (a, b) in enumerate(zip(shown, own, strict=False)) if a != b), len(shown))
    left = shown[start:]
    if _MARK.fullmatch(left) and (start or not shown):
        return True
    end = next((i for i in range(len(left) + 1) if own.endswith(left[i:])), len(left))
    # What follows the mark must be more than a few letters that texts have in common.
    return len(left) - end >= min(4, len(left)) and _MARK.fullmatch(left[:end]) is not None


def _other(m: Matrix) -> list[Result]:
    """Results that neither hold what the tool returns nor are a part of it. A call that fails directly, too, is its own."""
    return [r for r in _compared(m) if squeezed(r.own or "") not in squeezed(r.shown) and not _is_part(r)]


def _blame(m: Matrix) -> tuple[str, str]:
    """(what results are that the tools do not return, evidence); ("", "") if there are few."""
    other, compared = _other(m), _compared(m)
    if not other:
        return "", ""
    half = len(other) / 2
    first = other[0]
    text = (
        f"{len(other)} of {len(compared)} tool results are others than the tool returns for the same arguments, such as "
        f"{short(first.shown)} in place of {short(first.own or '')} in task {m.hand.tasks[first.task].key}"
    )
    change = _change(m, other)
    if len(other) < JUDGED or len(other) <= OTHER * len(compared):
        # What a tool is called with is known for certain, so few results are enough.
        return ("arguments", f"{text}; {change}") if change else ("", "")
    if sum(says_failed(r.shown) and not says_failed(r.own or "") for r in other) > half:
        return "errors", text
    if sum(says_nothing(r.shown) for r in other) > half or len({r.shown for r in other}) == 1:
        return "nothing", text
    if change or sum(_quotes_other_arguments(r) for r in other) > half:
        return "arguments", f"{text}; {change or 'the results quote other arguments'}"
    returned = {squeezed(r.own or "") for r in compared}
    if sum(squeezed(r.shown) in returned | _texts(m, r.task) for r in other) > half:
        return "mixed", f"{text}; they are results of other calls"
    words = sum(not Counter(_words(r.own or "")) <= Counter(_words(r.shown)) for r in other)
    return ("replaced", text) if words > half and _steady(m, other) else ("", "")


def _steady(m: Matrix, other: Sequence[Result]) -> bool:
    """Whether the tools return the same when they are called once more: they are not random."""
    for i in list(dict.fromkeys(r.task for r in other))[:JUDGED]:
        own = [r for r in _compared(m) if r.task == i]
        if m.player.direct(m.hand.tasks[i], [r.call for r in own]) != [r.own for r in own]:
            return False
    return True


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _texts(m: Matrix, i: int) -> set[str]:
    return {squeezed(text) for text in strings(dict(m.hand.tasks[i].fields))}


def _quotes_other_arguments(r: Result) -> bool:
    """Whether a result quotes an argument of the call with something added to it or taken from it, or in another case."""
    words = re.findall(r"\w[\w.]*\w|\w", r.shown)
    for text in (text for text in strings(r.call.arguments) if len(text) > 1):
        known = [word for word in words if len(word) >= max(2, len(text) / 2)]
        if text not in words and any(w in text or text in w or w.lower() == text.lower() for w in known):
            return True
    return False


def _change(m: Matrix, other: Sequence[Result]) -> str:
    """The change of arguments after which tools return what most of these results show, in words; "" if there is none."""
    found: Counter[str] = Counter()
    tried = [other[k] for k in chosen(len(other), JUDGED)]
    for r in tried:
        for how, arguments in _changed(r.call.arguments):
            (own,) = m.player.direct(m.hand.tasks[r.task], [Call(r.call.name, arguments)])
            if own is not None and squeezed(own) == squeezed(r.shown):
                found[how] += 1
                break
    how, count = found.most_common(1)[0] if found else ("", 0)
    return (
        f"{count} of {len(tried)} are what the tool returns if it is called with {how}"
        if count >= max(4, 0.8 * len(tried))
        else ""
    )


def _changed(arguments: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is changed, arguments after it)."""
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        changes: list[tuple[str, Any]] = [("nothing as", "")]
        if isinstance(value, str):
            pieces, joint = (value.split(), " ") if len(value.split()) > 1 else (list(value), "")
            cuts = chosen(len(pieces), 24)[1:]
            changes += [("only the beginning of", joint.join(pieces[:k])) for k in [*cuts, len(pieces) - 1]]
            changes += [("only the end of", joint.join(pieces[k:])) for k in [*cuts, 1]]
            changes += [("another case of", text) for text in (value.lower(), value.upper(), value.title())]
            changes += [("no punctuation in", re.sub(r"[^\w\s]", "", value)), ("quotes around", json.dumps(value))]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            changes += [
                ("another number than", value - 1),
                ("another number than", value + 1),
                ("as a text,", str(value)),
            ]
        elif isinstance(value, list):
            changes += [("only a part of", part) for part in (value[:1], value[-1:], value[:-1])]
        yield from ((f"{how} {name!r}", {**arguments, name: new}) for how, new in changes if new != value)
        yield f"no {name!r}", {other: kept for other, kept in arguments.items() if other != name}


def _blamed(what: str) -> Callable[[Matrix], Evidence | None]:
    def check(m: Matrix) -> Evidence | None:
        blame, text = _blame(m)
        return Evidence(text, m.kind(PERFECT)[_other(m)[0].task], _other(m)[0].call.name) if blame == what else None

    return check


def _whole(m: Matrix, *, gone: bool) -> Evidence | None:
    compared = _compared(m)
    cut = [r for r in compared if _is_part(r)]
    # Where all of each is gone, nothing is cut: no result is shown at all.
    nothing = len(cut) == len(compared) and not any(r.shown.strip() for r in cut)
    if not cut or len(cut) < min(FEW_CUT, len(compared)) or nothing != gone:
        return None
    lost = max(cut, key=lambda r: len(r.own or "") - len(r.shown))
    text = f"{len(cut)} of {len(compared)} tool results are shorter than what the tool returns, such as {len(lost.shown)} of"
    return Evidence(
        f"{text} {len(lost.own or '')} characters, ending in {short(lost.shown[-30:])}",
        m.kind(PERFECT)[lost.task],
        lost.call.name,
    )


def _declared(m: Matrix) -> Evidence | None:
    played = next(iter(m.kind(EMPTY).values()))
    called = [
        r.call
        for r in m.results
        if isinstance(r.call.arguments, dict) and r.call.arguments and r.call.name in played.tools
    ]
    unknown = [call for call in called if set(call.arguments) - played.tools[call.name]]
    if not called or 2 * len(unknown) <= len(called):
        return None
    more = ", ".join(sorted(set(unknown[0].arguments) - played.tools[unknown[0].name]))
    return Evidence(
        f"{len(unknown)} of {len(called)} calls have arguments that no declaration names, such as {more} of {unknown[0].name}",
        None,
        unknown[0].name,
    )


def _repeated(m: Matrix) -> Evidence | None:
    """A message of the first prompt, or the result before, stands in nearly every result, and the tool did not return it.

    A tool may quote the question that it was asked, and a game may repeat its rules: these come from the tool itself.
    """
    known = _compared(m)
    prompts: list[bool] = []
    for r in known:
        texts = [squeezed(message.text) for message in m.kind(PERFECT)[r.task].opening]
        parts = {part for text in texts if len(text) >= 60 for part in (text[:60], text[-60:])}
        prompts.append(any(part in squeezed(r.shown) and part not in squeezed(r.own or "") for part in parts))
    pairs = [(a, b) for a, b in itertools.pairwise(known) if a.task == b.task and len(squeezed(a.shown)) >= 4]
    pairs = [(a, b) for a, b in pairs if squeezed(a.shown) not in squeezed(b.own or "")]
    earlier = [squeezed(a.shown) in squeezed(b.shown) for a, b in pairs]
    for name, held in (("a message of the first prompt", prompts), ("the result before them", earlier)):
        if len(held) >= JUDGED and sum(held) > HELD_AGAIN * len(held):
            return Evidence(f"{sum(held)} of {len(held)} tool results hold {name}, which the tool did not return")
    return None


def _fail(m: Matrix) -> Evidence | None:
    down = [r for r in m.results if says_failed(r.shown)]
    if not m.results or len(down) <= FAILED * len(m.results):
        return None
    return Evidence(
        f"{len(down)} of {len(m.results)} results are errors, such as {short(down[0].shown)}",
        m.kind(PERFECT)[down[0].task],
        down[0].call.name,
    )


@dataclass(frozen=True)
class _Need:
    """A word that a perfect transcript uses and that its prompt does not have."""

    word: str
    held: bool
    """Whether something that a policy could read before has it."""
    cut: str
    """The end of a result that the task's data continue with this word; "" if there is none."""


def _needs(m: Matrix) -> list[_Need]:
    """What perfect transcripts must have read: new words of each call after the first result, and of the answer."""
    found = []
    for i, played in m.kind(PERFECT).items():
        read = played.prompt.casefold()
        given, used, shown = _long_words(read), set[str](), list[str]()
        data = strings(dict(m.hand.tasks[i].fields))
        for message in played.messages[len(played.opening) :]:
            if message.role == "tool":
                shown.append(message.text)
                read += "\n" + message.text.casefold()
            elif message.role == "assistant":
                texts = [text for call in message.calls for text in strings(call.arguments)]
                texts += [] if message.calls else [m.hand.golds[i]]
                new = {word for text in texts for word in _long_words(text)} - used
                used |= new
                for word in sorted(new - given) if shown else ():
                    held = bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", read))
                    found.append(_Need(word, held, "" if held else _cut_before(word, shown, data)))
    return found


def _long_words(text: str) -> set[str]:
    return {word for word in _words(text) if len(word) > 3 or word.isdigit()}


def _cut_before(word: str, shown: Sequence[str], data: Sequence[str]) -> str:
    """The end of a result that stops inside a text of the task's data which goes on to this word; "" if none does."""
    for result in shown:
        tail = result.strip()[-24:]
        while len(tail) >= 4:
            for text in data:
                at = text.find(tail)
                if at >= 0 and word in text[at:].casefold() and len(text) > at + len(tail):
                    return tail
            tail = tail[len(tail) // 4 + 1 :]
    return ""


def _useful(m: Matrix) -> tuple[str, str]:
    """(what is wrong with results that do not hold what is needed, evidence); ("", "") if they do."""
    results, needs = m.results, _needs(m)
    if len(results) < JUDGED:
        return "", ""
    empty, held = sum(says_nothing(r.shown) for r in results), sum(need.held for need in needs)
    told, asked = {r.shown for r in results}, {repr(r.call) for r in results}
    text = (
        f"{len(results)} results of perfect transcripts: {empty} empty, {len(told)} different for {len(asked)} different calls; "
        f"{held} of {len(needs)} later arguments and answers stand in what was read before"
    )
    cut = [need for need in needs if need.cut]
    if held <= 0.1 * len(needs) and (empty > NOTHING * len(results) or len(told) == 1 < len(asked)):
        return "nothing", text
    if held < NEEDED * len(needs):
        if len(cut) > (len(needs) - held) / 2:
            return (
                "cut",
                f"{text}; results end where the task's data go on, such as {short(cut[0].cut)} before {cut[0].word!r}",
            )
        if elsewhere := _of_other_tasks(m):
            return "mixed", f"{text}; {elsewhere}"
        if same := _same_for_all(results):
            return "nothing", f"{text}; {same}"
    few = len(told) <= max(1, 0.1 * len(asked)) or len(needs) >= NEVER
    return ("wrong", text) if few and len(needs) >= JUDGED and held <= HARDLY * len(needs) else ("", "")


def _same_for_all(results: Sequence[Result]) -> str:
    """Evidence that a tool gives one long result to all calls of a task, another one in each task; "" if it does not."""
    by_tool: dict[tuple[int, str], list[Result]] = defaultdict(list)
    for r in results:
        by_tool[r.task, r.call.name].append(r)
    several = [own for own in by_tool.values() if len({repr(r.call) for r in own}) > 1]
    same = [own for own in several if len({r.shown for r in own}) == 1 and len(own[0].shown) >= LONG]
    if (
        len(several) < JUDGED
        or len(same) < SAME_FOR_ALL * len(several)
        or 2 * len({own[0].shown for own in same}) <= len(same)
    ):
        return ""
    return f"in {len(same)} of {len(several)} tasks a tool gives the same result to different calls"


def _of_other_tasks(m: Matrix) -> str:
    """Evidence that most tasks get results of one other task, and none of their own; "" if they do not.

    A retriever that misses returns texts of many tasks; what was left over from another task is of that one.
    """
    known = [{text for text in _texts(m, i) if len(text) >= LONG} for i in range(len(m.hand.tasks))]
    by_task: dict[int, list[str]] = defaultdict(list)
    for r in m.results:
        by_task[r.task].append(squeezed(r.shown))
    theirs = []
    for i, shown in by_task.items():
        if len(shown) < 2 or any(text in one for one in shown for text in known[i]):
            continue
        owners = [{j for j, texts in enumerate(known) if any(text in one for text in texts)} for one in shown]
        if set.intersection(*owners) and len(set.union(*owners)) <= 3:  # tasks may have some texts in common
            theirs.append(i)
    enough = len(theirs) >= JUDGED and 2 * len(theirs) > len(by_task)
    return f"in {len(theirs)} of {len(by_task)} tasks all results are texts of one other task" if enough else ""


def _lacking(what: str) -> Callable[[Matrix], Evidence | None]:
    def check(m: Matrix) -> Evidence | None:
        blame, text = _useful(m)
        return Evidence(text, m.kind(PERFECT)[m.results[0].task], m.results[0].call.name) if blame == what else None

    return check


def _given_away(m: Matrix) -> Evidence | None:
    """The first result holds the answer in nearly all tasks whose perfect transcript goes on to look it up.

    A call that names the answer looks nothing up, as one that submits it. A tool may be meant to return all that a task needs
    at once: then later results say nothing new.
    """
    told: list[tuple[str, str]] = []
    whole = 0
    for i, played in m.kind(PERFECT).items():
        gold, turns = m.hand.golds[i], list[str]()
        for message in played.messages[len(played.opening) :]:
            if message.role == "assistant" and message.calls:
                named = any(places(gold, text) for call in message.calls for text in strings(call.arguments) if gold)
                turns += [] if named else [""]
            elif message.role == "tool" and turns and message.answers:
                if not (gold and any(places(gold, text) for text in strings(message.answers.arguments))):
                    turns[-1] += "\n" + message.text
        if len(turns) > 1 and gold and not places(gold, played.prompt):
            told.append((turns[0], gold))
            first = {line.strip() for line in turns[0].splitlines()}
            whole += all(line.strip() in first for later in turns[1:] for line in later.splitlines())
    own = sum(bool(places(gold, text)) for text, gold in told)
    if (
        len(told) < GIVEN_TASKS
        or own < GIVEN * len(told)
        or others_stand(told) >= own / len(told) / 2
        or 2 * whole > len(told)
    ):
        return None
    return Evidence(
        f"the first tool result holds the answer in {own} of {len(told)} tasks in which perfect transcripts go on to look it up"
    )


def _call_form(m: Matrix) -> Evidence | None:
    """The template's own call must be read as what it is."""
    offered = any(played.tools for played in m.kind(EMPTY).values())
    form = m.player.call_form() if offered else None
    return (
        Evidence(f"the chat template writes a call as {short(form[0], 120)}, which is not read as that call")
        if form and not form[1]
        else None
    )


def _row(
    id: str, statement: str, cause: str, check: Callable[[Matrix], Evidence | None], needs: str = PERFECT
) -> Inequality:
    return Inequality(id, statement, cause, check, "tool", (needs,))


TOOLS = (
    Inequality("call-form", "A tool call in the form that the chat template asks for is read", "calls-in-unread-form", _call_form, "", (EMPTY,)),
    _row("declared", "Tools are declared with the parameters with which perfect transcripts call them", "tools-not-in-prompt", _declared),
    _row("own-errors", "Results that are no errors in the tools are none in rollouts", "tools-fail", _blamed("errors")),
    _row("own-nothing", "Results that tools return do not become empty, or one and the same", "tools-return-nothing", _blamed("nothing")),
    _row("own-arguments", "Tools get the arguments that were written", "tool-arguments-changed", _blamed("arguments")),
    _row("own-call", "A call gets its own result, and not that of another call", "tool-results-mixed", _blamed("mixed")),
    _row("own-result", "What rollouts show as a tool's result is what it returns", "tool-results-wrong", _blamed("replaced")),
    _row("shown", "Tool results are shown", "tools-return-nothing", lambda m: _whole(m, gone=True)),
    _row("whole", "Tool results are shown whole", "tool-results-cut", lambda m: _whole(m, gone=False)),
    _row("alone", "Tool results hold nothing of earlier messages that the tool did not return", "tool-results-mixed", _repeated),
    _row("no-errors", "The calls of perfect transcripts do not end in errors", "tools-fail", _fail),
    _row("say-something", "Tool results say something, and other things to other calls", "tools-return-nothing", _lacking("nothing")),
    _row("uncut", "Tool results do not end before what answers need", "tool-results-cut", _lacking("cut")),
    _row("own-task", "Tool results are those of the task", "tool-results-mixed", _lacking("mixed")),
    _row("needed", "Tool results hold what later calls and answers need", "tool-results-wrong", _lacking("wrong")),
    _row("not-given-away", "First results do not hold answers that have to be looked up", "answer-in-prompt", _given_away),
)  # fmt: skip
