"""Do rollouts call what every perfect transcript calls, such as the tool that hands in the answer?

Runs after the probes of tokens, conditioning and parity: a policy that is not shown a tool does not call it either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import verifiers.v1 as vf
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.earned import earned
from plumbob.trainer.doctor.environment import oracle_of, text_of
from plumbob.trainer.doctor.subject import Subject

ORDER = 55

QUOTED = 120
"""Most characters of a reply that evidence quotes."""


def probe(subject: Subject) -> Iterator[Finding]:
    drawn = subject.drawn
    tasks = [task for task in drawn.different_tasks if hasattr(task, "oracle")]
    if tasks and any(trace.tools for trace in drawn.traces):
        yield _needed(subject, tasks)


def _needed(subject: Subject, tasks: Sequence[vf.Task]) -> Finding:
    """A tool that all perfect transcripts call and hardly any rollout does must be one that rollouts can do without."""
    check, drawn = "rollouts call the tools that every perfect transcript calls", subject.drawn
    always = set.intersection(*({name for turn in oracle_of(task) for name in _called(turn)} for task in tasks))
    counts = {
        name: sum(name in {n for m in t.assistant_messages for n in _called(m)} for t in drawn.traces)
        for name in always
    }
    never = [name for name, count in counts.items() if count <= thresholds.NEVER_CALLED * len(drawn.traces)]
    called = ", ".join(f"{name} in {count}" for name, count in sorted(counts.items())) or "none"
    evidence = f"of {len(drawn.traces)} rollouts, tools that all perfect transcripts call are called: {called}"
    if not never:
        return Finding(check, "pass", evidence)
    most = max(earned(subject))
    evidence += f"; the best rollout earns {most:.0%} of what its task's perfect transcript earns above an empty reply"
    if most >= thresholds.REACHED:
        return Finding(check, "pass", evidence)
    reply = next((text_of(m) for trace in drawn.traces for m in reversed(trace.assistant_messages)), "")
    evidence += f"; a last reply: {' '.join(reply.split())[:QUOTED]!r}"
    if sum(trace.is_truncated for trace in drawn.traces) > thresholds.CUT_SHARE * len(drawn.traces):
        # A rollout that was cut off may have been about to call it; the probe of signals names the limit.
        return Finding(check, "unsure", f"{evidence}; many rollouts were cut off by a limit")
    expected = subject.expected_successes
    if expected is not None and expected >= thresholds.SUCCESSES_EXPECTED:
        evidence += f"; by the policy's probability of perfect transcripts, with their calls, {expected:.1f} should have succeeded"
        return Finding(check, "unsure", evidence)
    return Finding(check, "fail", evidence, "tools-never-used")


def _called(message: vf.AssistantMessage) -> list[str]:
    return [call.name for call in message.tool_calls or ()]
