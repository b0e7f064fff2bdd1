"""Does the model use the tools, are its calls read, and do their results reach it whole?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import verifiers.v1 as vf
from plumbob.trainer.config.chat_template import marks_left_out
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.diagnosis.unread_calls import call_like, is_malformed
from plumbob.trainer.doctor.before_model.direct_calls import results_of
from plumbob.trainer.doctor.before_model.other_results import Result
from plumbob.trainer.doctor.before_model.tool_results import whole
from plumbob.trainer.doctor.environment import Environment, oracle_of, spread, text_of
from plumbob.trainer.doctor.subject import Drawn, Subject
from plumbob.trainer.policy.call_tokens import unwritable

ORDER = 25

REPLAYED = 16
"""Number of rollouts whose tool calls are repeated outside them."""
QUOTED = 160
"""Most characters of a reply that evidence quotes."""


def probe(subject: Subject) -> Iterator[Finding]:
    drawn = subject.drawn
    if not any(trace.tools for trace in drawn.traces):
        return
    yield _writable(subject)
    yield _whole(subject, drawn)  # first, because a policy that sees half of a result writes anything
    yield _read(drawn)
    yield _named(drawn)
    yield _used(subject, drawn)


def _writable(subject: Subject) -> Finding:
    """Can the model write the tokens of its template's calls?"""
    check = "the model can write its template's tool calls"
    run = subject.run
    if left_out := marks_left_out(run.tokenizer.chat_template):
        return Finding(check, "pass", f"it cannot write {left_out}, so calls are asked for and read as ordinary text")
    marks = unwritable(run.tokenizer, run.sampler.chat, run.policy.model)
    if not marks:
        return Finding(check, "pass", "no token of a call is one of many that were never trained")
    counts = ", ".join(f"{name} ({count} other tokens have nearly the same embedding)" for name, count in marks.items())
    return Finding(check, "fail", f"a call needs {counts}", "call-tokens-untrained")


def _read(drawn: Drawn) -> Finding:
    """Do replies hold a call's name and arguments outside the forms that are read?"""
    check = "the model's tool calls are read"
    seen = [(trace, text) for trace in drawn.traces if (text := unread_reply(trace))]
    calls = sum(_metric(trace, "tool_calls") for trace in drawn.traces)
    evidence = (
        f"{len(seen)} of {len(drawn.traces)} rollouts have a reply that names a tool and its arguments and was not read; "
        f"{calls:g} calls were read"
    )
    if not seen:
        return Finding(check, "pass", evidence)
    trace, text = seen[0]
    evidence += f"; in task {trace.task.key}: {text[:QUOTED]!r}"
    bad = len(seen) > thresholds.UNREAD_REPLIES * len(drawn.traces)
    return Finding(check, "fail" if bad else "unsure", evidence, "calls-in-unread-form" if bad else None)


def _named(drawn: Drawn) -> Finding:
    """Do the calls that were read name tools that there are?"""
    check = "calls that are read name the task's tools"
    # A call that could not be parsed has no name.
    calls = [(t, c) for t in drawn.traces for m in t.assistant_messages for c in m.tool_calls or () if c.name]
    unknown = [(trace, call) for trace, call in calls if call.name not in {tool.name for tool in trace.tools or ()}]
    evidence = f"{len(unknown)} of {len(calls)} calls name no tool of their task"
    if not unknown:
        return Finding(check, "pass", evidence)
    trace, call = unknown[0]
    evidence += (
        f", such as {call.name!r} in task {trace.task.key}, whose tools are {[t.name for t in trace.tools or ()]}"
    )
    bad = len(unknown) > thresholds.MALFORMED_CALLS * len(calls) and len(calls) >= len(drawn.traces) / 2
    return Finding(check, "fail" if bad else "unsure", evidence, "calls-malformed" if bad else None)


def unread_reply(trace: vf.Trace) -> str:
    """The part of a turn without calls that names a tool beside arguments of it; "" if no turn has one.

    Besides what the reader itself marks as unread (`trace.info`), any turn that holds a tool's name and, within a few
    words, JSON or a call in brackets with at least one of the tool's own parameters.
    """
    noted = [str(one["text"]) for one in trace.info.get("unread_calls") or []]
    if formed := [text for text in noted if not is_malformed(text)]:
        return formed[0]
    for message in trace.assistant_messages:
        if not message.tool_calls:
            for tool in trace.tools or ():
                if found := call_like(text_of(message), tool.name, list((tool.parameters or {}).get("properties", {}))):
                    return found
    return ""


def _used(subject: Subject, drawn: Drawn) -> Finding:
    """Do rollouts call tools at all, where the tasks' own oracles do?"""
    check = "the model uses the tools"
    calls = fmean(_metric(trace, "tool_calls") + _metric(trace, "malformed_calls") for trace in drawn.traces)
    tasks = [task for task in drawn.different_tasks if hasattr(task, "oracle")]
    needed = [sum(len(turn.tool_calls or ()) for turn in oracle_of(task)) for task in tasks]
    evidence = f"{calls:.2g} tool calls per rollout"
    if not needed:
        return Finding(check, "unsure" if calls <= thresholds.NEVER_CALLED else "pass", evidence)
    evidence += f", where the tasks' own perfect transcripts have {fmean(needed):.2g}"
    if calls <= thresholds.NEVER_CALLED and fmean(needed) >= 1:
        reply = next((text_of(m) for trace in drawn.traces for m in trace.assistant_messages[:1]), "")
        evidence += f"; a first reply: {' '.join(reply.split())[:QUOTED]!r}"
        cut = sum(trace.is_truncated for trace in drawn.traces)
        if cut > thresholds.CUT_SHARE * len(drawn.traces):  # a call that was cut off is none; `signal` names the limit
            return Finding(
                check, "unsure", f"{evidence}; {cut} of {len(drawn.traces)} rollouts were cut off by a limit"
            )
        return Finding(check, "fail", evidence, "tools-never-used")
    return Finding(check, "pass", evidence)


def _metric(trace: vf.Trace, name: str) -> float:
    value: Any = trace.metrics.get(f"rollout/{name}", 0.0)
    return float(getattr(value, "value", value))


def _whole(subject: Subject, drawn: Drawn) -> Finding:
    """Are tool results the same in the tools, in the messages and in the prompt's token ids?"""
    environment = Environment(subject.run.config, subject.run.tasks, subject.runner)
    using = [i for i, trace in enumerate(drawn.traces) if any(n.message.role == "tool" for n in trace.nodes)]
    chosen = [using[i] for i in spread(len(using), REPLAYED)] if using else []
    results = [result for i in chosen for result in results_of(environment, drawn.tasks[i], drawn.traces[i])]
    if not results:
        return Finding("tool results reach the model whole", "pass", "no rollout has a tool result")
    found = whole(environment, results)
    if found.verdict == "fail":
        return found
    cut = [result for i in chosen for result in _lost_in_prompts(subject, drawn, i)]
    evidence = f"{found.evidence}; {len(cut)} of {len(results)} are not whole in the text of the prompt that follows"
    if not cut:
        return Finding(found.check, found.verdict, evidence)
    return Finding(found.check, "fail", f"{evidence}, such as {cut[0].shown[:60]!r}", "tool-results-cut")


def _lost_in_prompts(subject: Subject, drawn: Drawn, number: int) -> Iterator[Result]:
    """The tool results of a rollout of which the next prompt's text has the beginning only, or nothing."""
    calls, trace = drawn.calls[number], drawn.traces[number]
    if len(calls) < 2:
        return
    prompt = _plain(subject.run.tokenizer.decode(calls[-1].prompt_ids, skip_special_tokens=False))
    last = max(i for i, node in enumerate(trace.nodes) if node.message.role == "assistant")
    for node in trace.nodes[:last]:
        if node.message.role == "tool":
            text = text_of(node.message)
            plain = _plain(text)
            # A template may write a result as JSON.
            if plain and plain not in prompt and _plain(json.dumps(text)[1:-1]) not in prompt:
                yield Result(drawn.tasks[number], "", None, text)


def _plain(text: str) -> str:
    """A text without spaces, because tokenizers change them."""
    return "".join(text.split())
