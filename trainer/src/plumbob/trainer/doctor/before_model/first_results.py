"""Do tools show the answer before the task's work is done?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import verifiers.v1 as vf
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.answer_places import others_stand, places
from plumbob.trainer.doctor.environment import Environment, Played, arguments_of, strings, text_of


def given_away(environment: Environment, played: Sequence[Played]) -> Finding | None:
    """Does the first tool result hold the answer in nearly all tasks whose perfect transcript goes on to look it up?

    None with few such tasks. A call that names the answer looks nothing up, as one that submits it.
    """
    check, told, whole = "tool results do not give the answer away before it is found", list[tuple[str, str]](), 0
    for p in played:
        gold = environment.gold(p.task)
        results = _results(p.trace, gold)
        if len(results) > 1 and gold and not any(places(gold, text) for _, text in p.opening):
            told.append((results[0], gold))
            whole += all(_adds_nothing(later, results[0]) for later in results[1:])
    if len(told) < thresholds.GIVEN_AWAY_TASKS:
        return None
    own = sum(bool(places(gold, text)) for text, gold in told)
    others = others_stand(told)
    chance = fmean(others) if others else 1.0  # with one answer to all tasks, any result may hold it
    evidence = (
        f"the first tool result of the perfect transcript holds the answer in {own} of {len(told)} tasks in which that "
        f"transcript has to call tools in later turns, too; answers of other tasks are in {chance:.0%} of these results"
    )
    bad = own >= thresholds.GIVEN_AWAY * len(told) and chance < own / len(told) / 2
    if bad and 2 * whole > len(told):  # a tool that returns all that a task needs at once, as it may be meant to
        return Finding(
            check, "unsure", f"{evidence}; in {whole}, later results say nothing that the first one does not"
        )
    return Finding(check, "fail" if bad else "pass", evidence, "answer-in-prompt" if bad else None)


def _adds_nothing(later: str, first: str) -> bool:
    """Whether every line of a result stands in the first one, too."""
    known = {line.strip() for line in first.splitlines()}
    return all(line.strip() in known for line in later.splitlines())


def _results(trace: vf.Trace, gold: str) -> list[str]:
    """The tool results of each turn that has calls, joined; turns whose calls name the answer are left out."""
    found: list[str] = []
    looked_up = False
    for node in trace.nodes:
        message = node.message
        if message.role == "assistant":
            calls = message.tool_calls or ()
            texts = [text for call in calls for text in strings(arguments_of(call))]
            looked_up = bool(calls) and not any(places(gold, text) for text in texts if gold)
            if looked_up:
                found.append("")
        elif message.role == "tool" and looked_up:
            found[-1] += "\n" + text_of(message)
    return found
