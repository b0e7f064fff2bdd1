"""Does the model use the tools, are its calls read, and do their results reach it whole?"""

from __future__ import annotations

import dataclasses
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
from plumbob.trainer.doctor.environment import Environment, arguments_of, oracle_of, spread, strings, text_of
from plumbob.trainer.doctor.subject import Drawn, Subject
from plumbob.trainer.policy.call_tokens import unwritable
from plumbob.trainer.watch.trace_contents import answered

ORDER = 25

REPLAYED = 16
"""Number of rollouts whose tool calls are repeated outside them."""
BEGINNING = 5
"""Number of characters, without spaces, by which the beginning of a tool result is known again."""
QUOTED = 160
"""Most characters of a reply that evidence quotes."""


def probe(subject: Subject) -> Iterator[Finding]:
    drawn = subject.drawn
    if not any(trace.tools for trace in drawn.traces):
        return
    yield _writable(subject)
    if (twice := answered(drawn.rollouts)) is not None:
        yield dataclasses.replace(twice, step=None, places=())
    yield _whole(subject, drawn)  # first, because a policy that sees half of a result writes anything
    yield _read(drawn)
    yield _parsed(drawn)
    yield _named(drawn)
    if (written := _as_written(subject, drawn)) is not None:
        yield written
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


def _parsed(drawn: Drawn) -> Finding:
    """Can most calls be parsed?"""
    calls, bad = (sum(_metric(trace, f"{name}_calls") for trace in drawn.traces) for name in ("tool", "malformed"))
    evidence = f"{bad:g} of {calls + bad:g} tool calls could not be parsed"
    many = bad > thresholds.MALFORMED_CALLS * (calls + bad) and bad >= len(drawn.traces) / 2
    return Finding.of("tool calls can be parsed", ("calls-malformed" if many else None, evidence))


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


def _as_written(subject: Subject, drawn: Drawn) -> Finding | None:
    """Do calls have the names and the texts that the policy wrote? Each must stand in its turn's tokens. None without calls.

    A call whose turn names no tool is none of these: the policy may have written anything.
    """
    changed: list[tuple[vf.Trace, str, str]] = []
    count = renamed = 0
    for trace in drawn.traces:
        names = [tool.name for tool in trace.tools or ()]
        for node in trace.nodes:
            calls = getattr(node.message, "tool_calls", None) or ()
            if not node.sampled or not calls:
                continue
            text = _plain(subject.run.tokenizer.decode(node.token_ids, skip_special_tokens=False))
            if not any(name in text for name in names):
                continue
            for call in calls:
                arguments = arguments_of(call)
                if not isinstance(arguments, dict):
                    continue  # it could not be parsed, and is kept as it was written
                count += 1
                said = strings(arguments)
                known = bool(said) and all(_plain(one) in text or _plain(json.dumps(one)[1:-1]) in text for one in said)
                if not call.name or call.name not in text or (said and not known):
                    changed.append((trace, f"{call.name} {call.arguments}", text))
                    renamed += known
    if not count:
        return None
    evidence = f"{len(changed)} of {count} calls have a name or an argument that their turn's tokens do not have"
    bad = len(changed) > thresholds.MALFORMED_CALLS * count and count >= len(drawn.traces) / 4
    if changed:
        trace, call, text = changed[0]
        evidence += f", such as {call[:60]!r} in task {trace.task.key}, of {text[:QUOTED]!r}"
    # With a name that no tool has, a call is malformed, whoever has changed it.
    cause = "calls-malformed" if 2 * renamed > len(changed) else "tool-arguments-changed"
    return Finding.of("calls are what the policy wrote", (cause if bad else None, evidence))


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
    lost = [pair for i in chosen for pair in _lost_in_prompts(subject, drawn, i)]
    evidence = f"{found.evidence}; {len(lost)} of {len(results)} are not whole in the text of the prompt that follows"
    if not lost:
        return Finding(found.check, found.verdict, evidence)
    begun = sum(begins for _, begins in lost)
    cause = "tool-results-cut" if 2 * begun > len(lost) else "tool-results-wrong"
    evidence += f", such as {lost[0][0].shown[:60]!r}; the beginning of {begun} is there"
    return Finding(found.check, "fail", evidence, cause)


def _lost_in_prompts(subject: Subject, drawn: Drawn, number: int) -> Iterator[tuple[Result, bool]]:
    """The tool results of a rollout that the next prompt's text does not have whole, and whether it has their beginning."""
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
                yield Result(drawn.tasks[number], "", None, text), plain[:BEGINNING] in prompt


def _plain(text: str) -> str:
    """A text without spaces, because tokenizers change them."""
    return "".join(text.split())
