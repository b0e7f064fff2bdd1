"""How tasks are prompted, apart from the task itself: compares the rollouts of held-out tasks with those of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import verifiers.v1 as vf

FEWEST = 4
"""Fewest rollouts of different tasks from which the form of prompts is read."""


@dataclass(frozen=True, order=True)
class PromptForm:
    """What the prompts of many tasks have in common."""

    system: str
    """Text of the system message; empty without one."""
    tools: tuple[str, ...]
    """Names of the tools that the model may call."""


def prompt_form(trace: vf.Trace) -> PromptForm:
    """The form of a rollout's prompt."""
    first = trace.nodes[0].message if trace.nodes else None
    text = first.content if first is not None and first.role == "system" else ""
    return PromptForm(text if isinstance(text, str) else "", tuple(sorted(tool.name for tool in trace.tools or ())))


def difference(held_out: Sequence[PromptForm], training: Sequence[PromptForm]) -> str | None:
    """How held-out tasks are prompted otherwise than training tasks, in words; "" if they are not; None if it cannot be
    told, because there are few rollouts or the forms differ from task to task.
    """
    if min(len(held_out), len(training)) < FEWEST:
        return None
    (ours, count), (theirs, other) = (Counter(forms).most_common(1)[0] for forms in (held_out, training))
    if count < 0.9 * len(held_out) or other < 0.9 * len(training):
        return None
    if ours.system != theirs.system:
        return (
            f"held-out tasks have the system prompt {_short(ours.system)}, and training tasks {_short(theirs.system)}"
        )
    if ours.tools != theirs.tools:
        return f"held-out tasks have the tools {ours.tools}, and training tasks {theirs.tools}"
    return ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
