"""The seen half of the fourteenth set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field14_seen_doubles import answer_of
from plumbob.testing.faults.field_parts import graded


def plus_or_minus(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 1 and a wrong one -1."""
    return 2 * correct - 1


def a_tenth_for_the_form(task: Any, trace: vf.Trace, correct: float) -> float:
    """A marked answer earns a tenth besides what it earns if it is right."""
    return correct + 0.1 * (answer_of(trace.last_reply or "") is not None)


def form_if_right(task: Any, trace: vf.Trace, correct: float) -> float:
    """A fifth of a right answer's reward is for its mark."""
    return correct * (0.8 + 0.2 * ("####" in (trace.last_reply or "")))


def fourth_power(task: Any, trace: vf.Trace, correct: float) -> float:
    """The fourth power of the environment's reward."""
    return correct**4


SEEN = (
    # modelscope/ms-swift#3925: the rule of DAPO's paper.
    HealthySetting(
        "minus one for a wrong answer and one for a right one", "gsm8k", start=graded(correct=plus_or_minus), steps=6
    ),
    # asuzukosi/post-training-experiments#5
    HealthySetting(
        "a tenth for a marked answer besides the one for a right answer",
        "gsm8k",
        start=graded(correct=a_tenth_for_the_form),
        steps=6,
    ),
    # huggingface/trl#4855
    HealthySetting("format paid with right answers alone", "gsm8k", start=graded(correct=form_if_right)),
    # AkihikoWatanabe/paper_notes#1783, twice
    HealthySetting("fourth power of the reward", "musique", start=graded(correct=fourth_power), steps=6),
    HealthySetting(
        "gradient norm of a fifth at a constant rate",
        "lookup",
        "--max-grad-norm 0.2 --lr-scheduler-type constant_with_warmup --warmup-steps 1",
        steps=6,
    ),
    # PRIME-RL/PRIME#36
    HealthySetting("rollouts that a limit cut off masked", "gsm8k", "--overlong mask", steps=6),
    # jsboige/CoursIA#10603
    HealthySetting("groups of sixteen rollouts of a task", "lookup", "--num-generations 16", steps=6),
    # THU-KEG/AdaptThink#8
    HealthySetting("sampled at a temperature of six tenths", "gsm8k", "--temperature 0.6", steps=6),
    # modelscope/ms-swift#3130
    HealthySetting(
        "LoRA of rank eight with an alpha of thirty-two over lookups",
        "lookup",
        "--peft --lora-r 8 --lora-alpha 32",
        steps=6,
    ),
)
