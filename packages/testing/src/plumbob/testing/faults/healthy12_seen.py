"""The seen half of the twelfth set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded


def quarter(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns a quarter."""
    return correct / 4


def empty_reply_costs(task: Any, trace: vf.Trace, correct: float) -> float:
    """A last message without text earns a tenth less than a wrong answer."""
    return correct - 0.1 * (not trace.last_reply)


SEEN = (
    HealthySetting("rewards of zero and a quarter", "gsm8k", start=graded(correct=quarter), steps=6),
    # sliamh11/Deus#1199: a missing reply must not look like one.
    HealthySetting("a tenth off for an empty reply", "lookup", start=graded(correct=empty_reply_costs), steps=6),
    HealthySetting("chains of two to four links", "lookup", "-a min_hops=2 -a max_hops=4", steps=6),
    HealthySetting("another seed of chains", "lookup", "-a seed=11", steps=6),
    HealthySetting("a table of sixty-four entries", "lookup", "-a table_size=64"),
    HealthySetting("MuSiQue with twelve paragraphs", "musique", "-a synthetic_paragraphs=12"),
    HealthySetting("group scaling over documents", "musique", "--scale-rewards group"),
    HealthySetting("constant rate over documents", "musique", "--lr-scheduler-type constant", steps=6),
    HealthySetting("LoRA of rank four with an alpha of sixteen", "gsm8k", "--peft --lora-r 4 --lora-alpha 16", steps=6),
    HealthySetting(
        "k3 KL of two hundredths with an adapter", "lookup", "--peft --kl-beta 0.02 --kl-estimator k3", steps=6
    ),
    HealthySetting(
        "wide clip bounds in three passes", "lookup", "--epsilon 0.25 --epsilon-high 0.25 --num-iterations 3", steps=6
    ),
    HealthySetting(
        "grpo in two passes over two minibatches",
        "gsm8k",
        "--loss-type grpo --scale-rewards group --num-iterations 2 --num-minibatches 2",
        steps=6,
    ),
    HealthySetting(
        "held-out problems sampled three times",
        "gsm8k",
        "--eval-rollouts 3 --eval-examples 6 --eval-steps 3",
        steps=6,
    ),
    HealthySetting("eight rollouts at a time", "gsm8k", "--max-concurrent 8", steps=6),
)
