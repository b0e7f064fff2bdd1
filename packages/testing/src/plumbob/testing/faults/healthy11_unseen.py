"""The unseen half of the eleventh set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

import zlib
from typing import Any

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded, tools_answer


def seldom_down(result: str, name: str, arguments: dict[str, Any]) -> str:
    """One search in twenty, always the same ones, ends in an error that a second search with other words avoids."""
    return "Error: try again." if zlib.crc32(repr(arguments).encode()) % 20 == 0 else result


UNSEEN = (
    # aburkov/theLMbook#8: GRPO's paper has an outer loop in which the reference becomes the policy.
    HealthySetting(
        "marks of a judge from one to ten", "gsm8k", start=graded(correct=lambda t, r, c: 1 + 9 * c), steps=6
    ),
    HealthySetting("six chains in a step", "lookup", "--batch-size 48 --gradient-accumulation-steps 1", steps=6),
    # verl-project/verl#1352, NVIDIA-NeMo/RL#3401: evaluations that sample as training does.
    HealthySetting(
        "held-out problems sampled four times", "gsm8k", "--eval-rollouts 4 --eval-examples 8 --eval-steps 3", steps=6
    ),
    HealthySetting("a search that fails once in twenty calls", "musique", start=tools_answer(seldom_down), steps=6),
    HealthySetting("rewards of five and ten", "gsm8k", start=graded(correct=lambda t, r, c: 5 + 5 * c), steps=6),
    HealthySetting(
        "rewards of minus ten and zero", "lookup", start=graded(correct=lambda t, r, c: 10 * c - 10), steps=6
    ),
    HealthySetting(
        "a twentieth for a citation",
        "musique",
        start=graded(correct=lambda t, r, c: c + 0.05 * ("<cite>" in (r.last_reply or ""))),
        steps=6,
    ),
    HealthySetting(
        "group scaling with a tiny epsilon", "lookup", "--scale-rewards group --scale-epsilon 1e-6", steps=6
    ),
    HealthySetting("cispo with a KL term", "lookup", "--loss-type cispo --kl-beta 0.01", steps=6),
    HealthySetting("gspo scaled by the group", "gsm8k", "--loss-type gspo --scale-rewards group", steps=6),
    HealthySetting("bfloat16 in two minibatches", "lookup", "--bf16 --num-minibatches 2", steps=6),
    HealthySetting("leave-one-out baseline over documents", "musique", "--baseline leave_one_out"),
    HealthySetting(
        "groups of seven chains",
        "lookup",
        "--num-generations 7 --batch-size 56 --gradient-accumulation-steps 1",
        steps=6,
    ),
    HealthySetting(
        "weight decay of a tenth under a cosine", "lookup", "--weight-decay 0.1 --lr-scheduler-type cosine", steps=6
    ),
)
