"""The unseen half of the fourteenth set of healthy settings: what threads, papers and other trainers' defaults have,
without a fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field14_seen_doubles import answer_of, gold_of
from plumbob.testing.faults.field_parts import graded


def three_levels(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 1, a wrong one -0.5, and none at all -1."""
    if correct:
        return 1.0
    return -0.5 if answer_of(trace.last_reply or "") is not None else -1.0


def searched(task: Any, trace: vf.Trace, correct: float) -> float:
    """An answer that no call came before earns a fifth less."""
    return correct - 0.2 * (not any(turn.tool_calls for turn in trace.assistant_messages))


def shown(task: Any, trace: vf.Trace, correct: float) -> float:
    """A rollout in which a call has shown the value earns at least a fifth."""
    results = [str(node.message.content) for node in trace.nodes if type(node.message).__name__ == "ToolMessage"]
    return max(correct, 0.2 * any(f"value={gold_of(task)}" in text for text in results))


def wider(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns one and a half, and a wrong one minus a half."""
    return 2 * correct - 0.5


def marked(task: Any, trace: vf.Trace, correct: float) -> float:
    """A marked answer earns a tenth."""
    return 0.1 * (answer_of(trace.last_reply or "") is not None)


UNSEEN = (
    # agent-infra/sandbox#226
    HealthySetting(
        "three levels of reward from minus one to one", "gsm8k", start=graded(correct=three_levels), steps=6
    ),
    # pytorch/torchtitan#3602, twice
    HealthySetting("a fifth off for an answer without a call", "lookup", start=graded(correct=searched), steps=6),
    HealthySetting("a fifth for a value that a call has shown", "lookup", start=graded(correct=shown), steps=6),
    # TencentCloudADP/youtu-agent#168, huggingface/trl#2832
    HealthySetting("rewards from minus a half to one and a half", "lookup", start=graded(correct=wider)),
    # modelscope/ms-swift#8125
    # huggingface/open-r1#485
    HealthySetting("five hundred and twelve chains", "lookup", "-a num_examples=512"),
    # verl-project/verl#6202
    HealthySetting("held-out chains sampled eight times", "lookup", "--eval-rollouts 8 --eval-examples 4"),
)
