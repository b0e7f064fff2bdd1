"""The unseen half of the third set of healthy settings: run only to measure. Rule writers must not read this file."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    HealthySetting(
        "importance weights truncated per token", "gsm8k", "--importance-correction token_truncate", steps=6
    ),
    HealthySetting(
        "constant rate after a warm-up", "lookup", "--lr-scheduler-type constant_with_warmup --warmup-steps 2", steps=6
    ),
    HealthySetting(
        "momentum of 0.95 and a clipping norm of ten", "lookup", "--adam-beta1 0.95 --max-grad-norm 10", steps=6
    ),
    HealthySetting("LoRA with gradient checkpointing", "musique", "--peft --gradient-checkpointing"),
    HealthySetting("a limit of eight turns", "lookup", "--max-turns 8", steps=6),
)
