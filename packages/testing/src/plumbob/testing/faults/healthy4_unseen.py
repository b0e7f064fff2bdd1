"""The unseen half of the fourth set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

UNSEEN = (
    HealthySetting(
        "leave-one-out baseline with groups of four", "lookup", "--baseline leave_one_out --num-generations 4", steps=6
    ),
    HealthySetting("rewards from 0 to 10", "lookup", start=graded(correct=lambda t, r, c: 10 * c), steps=6),
    HealthySetting("temperature of 0.9", "gsm8k", "--temperature 0.9", steps=6),
    HealthySetting(
        "a soft penalty on long replies",
        "gsm8k",
        start=graded(correct=lambda t, r, c: c - 0.05 * min(len(r.last_reply or "") / 400, 1)),
        steps=6,
    ),
    HealthySetting("LoRA of rank 4 with alpha 16", "lookup", "--peft --lora-r 4 --lora-alpha 16", steps=6),
    HealthySetting(
        "batch scaling with a leave-one-out baseline", "lookup", "--scale-rewards batch --baseline leave_one_out"
    ),
    HealthySetting(
        "two steps of gradient accumulation", "lookup", "--gradient-accumulation-steps 2 --batch-size 16", steps=6
    ),
    HealthySetting("a KL term of one thousandth", "musique", "--kl-beta 0.001"),
    HealthySetting("three minibatches of dapo", "lookup", "--loss-type dapo --num-minibatches 3", steps=6),
)
