"""The seen half of the eighth set of healthy settings: values of published recipes and documentation, without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

SEEN = (
    # TRL's and verl's examples have 2 to 64 rollouts in a group; GRPO's paper has 64, and most recipes 4 to 16.
    HealthySetting("group size of sixteen", "lookup", "--num-generations 16", steps=6),
    HealthySetting(
        "groups of four in steps of sixteen tasks",
        "gsm8k",
        "--num-generations 4 --batch-size 64 --gradient-accumulation-steps 1",
        steps=6,
    ),
    # Unsloth's notebooks: ranks of 32 and 64 with alpha of the same size.
    HealthySetting(
        "LoRA of rank 64 on every linear layer",
        "gsm8k",
        "--peft --lora-r 64 --lora-alpha 64 --lora-targets all-linear",
        steps=6,
    ),
    # The shaping of verl-project/verl#4998.
    HealthySetting(
        "a tenth more for a rollout with a tool call",
        "lookup",
        start=graded(called=lambda t, r, c: 0.1 * any(turn.tool_calls for turn in r.assistant_messages)),
        steps=6,
    ),
    HealthySetting(
        "beta2 of 0.95 and weight decay of a tenth", "gsm8k", "--adam-beta2 0.95 --weight-decay 0.1", steps=6
    ),
    HealthySetting("gradient checkpointing of full training", "lookup", "--gradient-checkpointing"),
    # TRL's sync_ref_model with its default of 0.6.
    # DAPO's reward: 1 for a right answer, and -1 for a wrong one.
    HealthySetting("rewards of plus and minus one", "lookup", start=graded(correct=lambda t, r, c: 2 * c - 1), steps=6),
    HealthySetting("GSM8K at a temperature of 0.7", "gsm8k", "--temperature 0.7", steps=6),
    HealthySetting("temperature of 1.2 in MuSiQue", "musique", "--temperature 1.2"),
    HealthySetting("three epochs over 128 problems", "gsm8k", "-a num_examples=128 --max-steps -1 --num-epochs 3"),
    # GDPO: each reward is normalised before they are added.
    # INTELLECT-2's two-sided clip.
)
