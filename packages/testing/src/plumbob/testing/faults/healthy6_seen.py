"""The seen half of the sixth set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults import field6_seen_doubles as doubles
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import graded

SEEN = (
    HealthySetting("rewards of minus three and two", "gsm8k", start=graded(correct=lambda t, r, c: 5 * c - 3), steps=6),
    HealthySetting("LoRA on the output matrices alone", "lookup", "--peft --lora-targets o_proj,down_proj", steps=6),
    HealthySetting("LoRA of rank 128", "lookup", "--peft --lora-r 128 --lora-alpha 128"),
    HealthySetting(
        "bfloat16 with LoRA on every linear layer and checkpointing",
        "musique",
        "--peft --bf16 --lora-targets all-linear --gradient-checkpointing",
    ),
    HealthySetting("KL of 0.005 in the reward", "gsm8k", "--kl-beta 0.005 --kl-placement reward"),
    HealthySetting("MuSiQue without grounding", "musique", "-a grounding=0"),
    HealthySetting(
        "a fine for repeated calls", "lookup", start=graded(correct=lambda t, r, c: c, fine=doubles.fine_for_repeating)
    ),
    HealthySetting(
        "a bonus for looking something up",
        "lookup",
        start=graded(correct=lambda t, r, c: c + 0.1 * (r.num_turns > 1)),
        steps=6,
    ),
    HealthySetting("rewards rounded to tenths", "musique", start=graded(correct=lambda t, r, c: round(c, 1))),
    HealthySetting(
        "the best checkpoint by held-out reward",
        "lookup",
        "--keep-best eval/greedy --eval-steps 2 --eval-examples 8",
        steps=6,
    ),
    HealthySetting("a tool that takes its time", "lookup", start=tools_called(doubles.slowly), steps=6),
)
