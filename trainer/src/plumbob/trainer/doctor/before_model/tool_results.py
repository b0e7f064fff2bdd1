"""Do tools return what the tasks need, and does all of it reach the model?"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.changed_arguments import change_of
from plumbob.trainer.doctor.before_model.direct_calls import direct, results_of
from plumbob.trainer.doctor.before_model.first_results import given_away
from plumbob.trainer.doctor.before_model.made_up_results import made_up
from plumbob.trainer.doctor.before_model.other_results import (
    NOTHING,
    Result,
    explained,
    is_part,
    many,
    others,
    says_the_same,
    squeezed,
    texts_of,
)
from plumbob.trainer.doctor.before_model.transcripts import perfect
from plumbob.trainer.doctor.environment import Environment, Played, arguments_of, spread, strings, text_of
from plumbob.trainer.watch.trace_contents import says_failed

TWICE = 12
"""Number of oracles whose calls are made again."""
FEW_CUT = 3
"""Fewest results that must be shorter than what their tools return."""


def checks(environment: Environment) -> Iterator[Finding]:
    first = environment.silent[0].trace if environment.silent else None
    if first is None or not first.tools:
        return
    if not environment.has_oracle:
        yield Finding(
            "tools return what tasks need", "unsure", "the environment has no oracle that shows how tools are used"
        )
        return
    played = [p for p in environment.oracles if p.trace.ok]
    results = [result for p in played for result in results_of(environment, p.task, p.trace)]
    if (undeclared := declared({tool.name: tool.parameters or {} for tool in first.tools}, results)) is not None:
        yield undeclared
    yield (found := whole(environment, results))
    if found.verdict != "fail" and (repeated := _prompt_in(played, results) or _earlier_in(results)) is not None:
        found = repeated
        yield found
    if found.verdict != "fail":  # otherwise what the oracle needs may be in the part that is missing
        yield _steady(environment, played)
        yield _useful(environment, played, results)
        if (finding := given_away(environment, played)) is not None:
            yield finding
    if (finding := perfect(environment)) is not None:
        yield finding


def declared(tools: Mapping[str, Mapping[str, Any]], results: Sequence[Result]) -> Finding | None:
    """Do declarations name the arguments with which oracles call the tools? None without such a call.

    `tools`: name -> JSON schema of its parameters, as the model is told it.
    """
    called: list[tuple[str, set[str]]] = []
    for result in results:
        if isinstance(result.arguments, dict) and result.arguments and result.name in tools:
            called.append((result.name, {str(name) for name in result.arguments}))
    if not called:
        return None
    named = {name: set(schema.get("properties") or {}) for name, schema in tools.items()}
    unknown = [(name, more) for name, names in called if (more := names - named[name])]
    evidence = (
        f"{len(unknown)} of {len(called)} calls of the oracles have arguments that the tools' declarations do not name"
    )
    bad = len(unknown) > len(called) / 2
    if bad:
        evidence += f", such as {', '.join(sorted(unknown[0][1]))} of {unknown[0][0]}"
    return Finding.of("tools are declared with their parameters", ("tools-not-in-prompt" if bad else None, evidence))


def whole(environment: Environment, results: Sequence[Result]) -> Finding:
    """Does the model see what tools return? Each result is compared with that of a call outside the rollout."""
    check = "tool results reach the model whole"
    compared = [r for r in results if r.own is not None]
    if not compared:
        return Finding(check, "unsure", f"none of {len(results)} tool results could be compared with a direct call")
    other = others(compared)
    if other:
        cause, evidence = explained(other, compared) if many(other, compared) else (None, "")
        # What a tool is called with is known for certain, so few results are enough.
        if cause is None and (change := change_of(environment, other)):
            cause, evidence = "tool-arguments-changed", f"{explained(other, compared)[1]}; {change}"
        if evidence and cause is None and _replaced(environment, other, compared):
            cause, evidence = "tool-results-wrong", f"{evidence}; called twice, the tools return the same"
        if evidence:
            return Finding(check, "fail" if cause else "unsure", evidence, cause)
    cut = [r for r in compared if is_part(r.shown, r.own or "")]
    evidence = f"{len(cut)} of {len(compared)} tool results are shorter than what the tool returns"
    if cut:
        lost = max(cut, key=lambda r: len(r.own or "") - len(r.shown))
        evidence += f", such as {len(lost.shown)} of {len(lost.own or '')} characters, ending in {lost.shown[-30:]!r}"
        # Where all of each is gone, nothing is cut: no result is shown at all.
        gone = len(cut) == len(compared) and not any(r.shown.strip() for r in cut)
        cause = "tools-return-nothing" if gone else "tool-results-cut"
        evidence += f", in task {lost.task.key}"
        few = len(cut) < min(FEW_CUT, len(compared))  # one or two may have another reason
        return Finding(check, "unsure" if few else "fail", evidence, None if few else cause)
    return Finding(check, "pass", evidence)


SHORTEST = 4
"""Fewest characters of a result by which it is known again in a later one."""
PROMPT_SHOWN = 60
"""Number of characters of a first prompt by which it is known again."""


def _prompt_in(played: Sequence[Played], results: Sequence[Result]) -> Finding | None:
    """Does a message of the first prompt stand in nearly every result, although the tool did not ask for it? None if not.

    A tool may quote the question that it was asked, and a game may repeat its rules: these come from the tool itself.
    """
    openings = {id(p.task): p.opening for p in played}
    found = [r for r in results if r.own is not None and id(r.task) in openings]
    again: list[tuple[Result, str]] = []
    for result in found:
        shown, own = squeezed(result.shown), squeezed(result.own or "")
        texts = [squeezed(text) for _, text in openings[id(result.task)]]
        for text in (text for text in texts if len(text) >= PROMPT_SHOWN):
            parts = (text[:PROMPT_SHOWN], text[-PROMPT_SHOWN:])
            if any(part in shown and part not in own for part in parts):
                again.append((result, text))
                break
    if len(found) < thresholds.JUDGED_RESULTS or len(again) <= thresholds.PROMPT_IN_RESULTS * len(found):
        return None
    first, text = again[0]
    evidence = (
        f"{len(again)} of {len(found)} tool results hold a message of the first prompt that the tool did not return, such as "
        f"{text[:40]!r} in task {first.task.key}"
    )
    return Finding("tool results are what tools return", "fail", evidence, "tool-results-mixed")


def _earlier_in(results: Sequence[Result]) -> Finding | None:
    """Does the result before stand in nearly every later one of a conversation, which the tool did not return? None if not."""
    pairs: list[tuple[Result, Result]] = []
    for before, result in itertools.pairwise(results):
        told, own = squeezed(before.shown), squeezed(result.own or "")
        if before.task is result.task and result.own is not None and len(told) >= SHORTEST and told not in own:
            pairs.append((before, result))
    again = [pair for pair in pairs if squeezed(pair[0].shown) in squeezed(pair[1].shown)]
    if len(pairs) < thresholds.JUDGED_RESULTS or len(again) <= thresholds.PROMPT_IN_RESULTS * len(pairs):
        return None
    first = again[0][1]
    evidence = (
        f"{len(again)} of {len(pairs)} later tool results hold the result before them, which the tool did not return, such as "
        f"{first.shown[:60]!r} in task {first.task.key}"
    )
    return Finding("tool results are what tools return", "fail", evidence, "tool-results-mixed")


def _replaced(environment: Environment, other: Sequence[Result], compared: Sequence[Result]) -> bool:
    """Whether most of these results say something else than the tools, which return the same when they are called once more."""
    if sum(not says_the_same(r) for r in other) <= len(other) / 2:
        return False
    tasks = list({id(r.task): r.task for r in other}.values())
    for task in (tasks[i] for i in spread(len(tasks), TWICE)):
        own = [r for r in compared if r.task is task]
        if direct(environment, task, [(r.name, r.arguments) for r in own]) != [r.own for r in own]:
            return False
    return True


def _steady(environment: Environment, played: Sequence[Played]) -> Finding:
    """Do the same calls get the same results the second time?"""
    called = [p for p in played if any(node.message.role == "tool" for node in p.trace.nodes)]
    outcome = made_up(environment, [(called[i].task, called[i].trace) for i in spread(len(called), TWICE)])
    return Finding.of("the same calls get the same results", outcome)


def _useful(environment: Environment, played: Sequence[Played], results: Sequence[Result]) -> Finding:
    """Do results hold what the oracle's later calls and answer need? Not asked of the last call, whose result is unused."""
    check = "tools return what tasks need"
    if not results:
        return Finding(check, "pass", "the oracles call no tool")
    down = [r for r in results if says_failed(r.shown)]
    if len(down) > thresholds.DOWN_RESULTS * len(results):
        evidence = f"{len(down)} of {len(results)} results of the oracles' calls are errors"
        evidence += f", such as {down[0].shown[:60]!r} in task {down[0].task.key}"
        return Finding(check, "fail", evidence, "tools-fail")
    empty = [r for r in results if r.shown.strip().lower() in NOTHING]
    needs = [need for p in played for need in _needs(environment, p)]
    held = sum(need.held for need in needs)
    texts = {r.shown for r in results}
    asked = {repr((r.name, r.arguments)) for r in results}
    evidence = (
        f"{len(results)} results of the oracles' calls: {len(empty)} empty, {len(texts)} different for {len(asked)} "
        f"different calls; {held} of {len(needs)} later arguments and answers stand in what was read before"
    )
    if len(results) < thresholds.JUDGED_RESULTS:
        return Finding(check, "unsure", evidence)
    if len(empty) > thresholds.EMPTY_RESULTS * len(results) and held <= thresholds.NEEDS_HELD * len(needs):
        return Finding(check, "fail", evidence, "tools-return-nothing")
    lost = [need for need in needs if need.cut]
    if held < thresholds.NEEDS_HELD_WHOLE * len(needs) and len(lost) > (len(needs) - held) / 2:
        example = lost[0]
        return Finding(
            check,
            "fail",
            f"{evidence}; results end where the task's data go on, such as {example.cut!r} before {example.text!r}",
            "tool-results-cut",
        )
    if len(texts) == 1 and len(asked) > 1 and held <= thresholds.NEEDS_HELD * len(needs):
        only = next(iter(texts))
        cause = "tools-fail" if says_failed(only) else "tools-return-nothing"
        return Finding(check, "fail", f"{evidence}; all are {only[:40]!r}", cause)
    if held < thresholds.NEEDS_HELD_WHOLE * len(needs):
        if elsewhere := _of_other_tasks(environment, results):
            return Finding(check, "fail", f"{evidence}; {elsewhere}", "tool-results-mixed")
        if same := _same_for_all(results):
            return Finding(check, "fail", f"{evidence}; {same}", "tools-return-nothing")
    if len(needs) >= thresholds.JUDGED_RESULTS and held <= thresholds.HARDLY_HELD * len(needs):
        few = len(texts) <= max(1, 0.1 * len(asked)) or len(needs) >= thresholds.NEVER_HELD
        return Finding(check, "fail" if few else "unsure", evidence, "tool-results-wrong" if few else None)
    return Finding(check, "pass", evidence)


LONG = 25
"""Number of characters from which on a text is known again, and a result is more than a word of acknowledgement."""
MOST_OWNERS = 3
"""Most tasks whose data may hold texts of the results of one: tasks may have some texts in common."""


def _same_for_all(results: Sequence[Result]) -> str:
    """Evidence that a tool gives one result to all calls of a task, in nearly every task that makes several; "" if not.

    A tool may acknowledge everything alike. What it should have read is another text in each task.
    """
    told: dict[tuple[int, str], list[Result]] = defaultdict(list)
    for result in results:
        told[id(result.task), result.name].append(result)
    several = [own for own in told.values() if len({repr(r.arguments) for r in own}) > 1]
    same = [own for own in several if len({r.shown for r in own}) == 1 and len(own[0].shown) >= LONG]
    if len(several) < thresholds.JUDGED_RESULTS or len(same) < thresholds.SAME_RESULTS * len(several):
        return ""
    if len({own[0].shown for own in same}) <= len(same) / 2:
        return ""
    first = same[0][0]
    return (
        f"in {len(same)} of {len(several)} tasks a tool gives the same result to different calls, such as {first.shown[:40]!r} to "
        f"all calls of {first.name} in task {first.task.key}"
    )


def _of_other_tasks(environment: Environment, results: Sequence[Result]) -> str:
    """Evidence that most tasks get results of one other task, and none of their own; "" if they do not.

    A retriever that misses returns texts of many tasks; what was left over from another task is of that one.
    """
    known = [(task, {text for text in texts_of(task) if len(text) >= LONG}) for task in environment.sample]
    mine = {id(task): texts for task, texts in known}
    by_task: dict[int, list[Result]] = defaultdict(list)
    for result in results:
        by_task[id(result.task)].append(result)
    theirs = []
    for key, own in by_task.items():
        shown = [squeezed(r.shown) for r in own]
        if len(own) < 2 or any(text in one for one in shown for text in mine.get(key, ())):
            continue
        owners = [{id(task) for task, texts in known if any(text in one for text in texts)} for one in shown]
        if set.intersection(*owners) and len(set.union(*owners)) <= MOST_OWNERS:
            theirs.append(own[0])
    if len(theirs) < thresholds.JUDGED_RESULTS or 2 * len(theirs) <= len(by_task):
        return ""
    first = theirs[0]
    return (
        f"in {len(theirs)} of {len(by_task)} tasks all results are texts of one other task, such as {first.shown[:60]!r} in task "
        f"{first.task.key}"
    )


@dataclass(frozen=True)
class Need:
    """A word that an oracle uses and that the prompt does not have."""

    text: str
    held: bool
    """Whether something that a policy could read before has it."""
    cut: str
    """The end of a result that the task's data continue with this word; "" if there is none."""


def _needs(environment: Environment, played: Played) -> Iterator[Need]:
    """What the oracle must have read: new words of each call after the first result, and of the answer."""
    read = "\n".join(text for _, text in played.opening).casefold()
    given, said = _words(read), set[str]()
    data = strings(played.task.data.model_dump(exclude={"prompt", "system_prompt"}))
    shown: list[str] = []
    for node in played.trace.nodes[len(played.opening) :]:
        message = node.message
        if message.role == "tool":
            shown.append(text_of(message))
            read += "\n" + shown[-1].casefold()
        elif message.role == "assistant":
            texts = [text for call in message.tool_calls or () for text in strings(arguments_of(call))]
            texts += [] if message.tool_calls else [environment.gold(played.task)]
            new = {word for text in texts for word in _words(text)} - said
            said |= new
            if shown:
                for word in sorted(new - given):
                    held = bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", read))
                    yield Need(word, held, "" if held else _cut_before(word, shown, data))


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.casefold()) if len(word) > 3 or word.isdigit()}


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
