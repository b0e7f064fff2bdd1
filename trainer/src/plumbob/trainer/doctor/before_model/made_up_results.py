"""Do the same calls get the same results, played twice, where the tool itself returns the same both times?

Tools may be random, such as dice. But if a tool that is called directly returns the same each time, and rollouts show now
one thing and now another, then what lies between the two mixes results up, or makes some up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import verifiers.v1 as vf
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.before_model.direct_calls import results_of
from plumbob.trainer.doctor.before_model.other_results import NOTHING, Result, is_other
from plumbob.trainer.doctor.environment import Environment
from plumbob.trainer.watch.trace_contents import says_failed

FEWEST_MADE_UP = 3
"""Fewest results that must differ: one or two may be those of a server that was busy and said so in words of its own."""


def made_up(environment: Environment, played: Sequence[tuple[vf.Task, vf.Trace]]) -> tuple[str | None, str]:
    """(cause, evidence) of transcripts that are played again: do too many results change although the tool's own do not?

    The cause is None if few change.
    """
    compared, changed = 0, list[tuple[Result, Result]]()
    for task, trace in played:
        again = environment.play(task, ScriptedChat.of_record(trace.to_record()))
        pairs = list(zip(*(results_of(environment, task, one) for one in (trace, again.trace)), strict=False))
        alike = [(a, b) for a, b in pairs if a.own is not None and _same_call(a, b)]
        compared += len(alike)
        changed += [pair for pair in alike if _changed(*pair)]
    evidence = (
        f"{compared} tool calls were made twice, and the tool returned the same to each of them: rollouts show something else "
        f"the second time for {len(changed)}"
    )
    if changed:
        first, second = changed[0]
        evidence += f", such as {first.shown[:60]!r} and {second.shown[:60]!r} for {first.arguments}"
    if len(changed) < FEWEST_MADE_UP or len(changed) <= thresholds.MADE_UP_RESULTS * compared:
        return None, evidence
    odd = [r.shown.strip() for pair in changed for r in pair if is_other(r)]
    nothing = sum(text.lower() in NOTHING for text in odd) > len(odd) / 2 or len(set(odd)) == 1
    return "tools-return-nothing" if nothing else "tool-results-wrong", evidence


def _same_call(a: Result, b: Result) -> bool:
    """Whether two results are of the same call, to which the tool itself returns the same."""
    return dataclasses.replace(a, shown="") == dataclasses.replace(b, shown="")


def _changed(a: Result, b: Result) -> bool:
    """Whether one of the results is another than the tool's, and they have other words, not only in another order."""
    if says_failed(a.shown) or says_failed(b.shown) or not (is_other(a) or is_other(b)):
        return False
    return sorted(a.shown.split()) != sorted(b.shown.split())
