"""The unseen half of the sixteenth set of healthy settings: what threads and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded, tools_answer


def bonus(task: Any, trace: vf.Trace, correct: float) -> float:
    """A reply in the asked form earns a tenth more."""
    return 0.1 * ("####" in (trace.last_reply or ""))


def price(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns up to a tenth less, by its number of turns."""
    return correct * (1 - 0.1 * min(1.0, trace.num_turns / 16))


def minus_one(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 0 and any other -1."""
    return correct - 1


UNSEEN = (
    # asuzukosi/post-training-experiments#5
    HealthySetting("a tenth for a reply in the asked form", "gsm8k", start=graded(form=bonus), steps=6),
    # PrimeIntellect-ai/prime-rl#2829
    HealthySetting("length price on right answers alone", "lookup", start=graded(correct=price), steps=6),
    # verl-project/verl#5228, teilomillet/textpolicy#9
    # NVIDIA-NeMo/RL#3401
    HealthySetting(
        "held-out tasks sampled four times for pass at four",
        "lookup",
        "--eval-rollouts 4 --eval-examples 8 --eval-steps 3",
        steps=6,
    ),
    # OpenHands/OpenHands#2540
    HealthySetting(
        "tool results of at most ten thousand letters",
        "musique",
        start=tools_answer(lambda result, name, arguments: result[:10_000]),
    ),
    # unslothai/unsloth#2766
    HealthySetting(
        "notebook's decay, warm-up and small clipping norm",
        "lookup",
        "--weight-decay 0.1 --warmup-steps 1 --lr-scheduler-type cosine --max-grad-norm 0.1",
        steps=6,
    ),
    # modelscope/ms-swift#3130
    HealthySetting(
        "four rollouts a group at nine tenths of the temperature",
        "lookup",
        "--num-generations 4 --temperature 0.9 --peft --lora-r 8 --lora-alpha 32",
    ),
    # Princeton-Robot-Planning-and-Learning/prbench#131
    HealthySetting("minus one until the task is done", "lookup", start=graded(correct=minus_one), steps=6),
)
