"""The seen half of the healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

SEEN = (
    HealthySetting("rewards of minus one and one", "lookup", start=graded(correct=lambda t, r, c: 2 * c - 1), steps=6),
    HealthySetting("rewards from 0 to 100", "lookup", start=graded(correct=lambda t, r, c: 100 * c), steps=6),
    HealthySetting("rewards of at most 0.4", "gsm8k", start=graded(correct=lambda t, r, c: 0.4 * c)),
    HealthySetting("rewards from 1000 to 1001", "lookup", start=graded(correct=lambda t, r, c: 1000 + c)),
    HealthySetting(
        "a small price for each turn", "lookup", start=graded(correct=lambda t, r, c: c - 0.01 * r.num_turns)
    ),
    HealthySetting("chains of three to six links", "lookup", "-a min_hops=3 -a max_hops=6", steps=6),
    HealthySetting("chains of one to nine links", "lookup", "-a max_hops=9"),
    HealthySetting("groups of four", "gsm8k", "--num-generations 4"),
    HealthySetting("groups of sixteen", "lookup", "--num-generations 16", steps=6),
    HealthySetting("groups of thirty-two", "lookup", "--num-generations 32"),
    HealthySetting("groups of sixty-four", "lookup", "--num-generations 64 --batch-size 64"),
    HealthySetting("gspo with four iterations", "lookup", "--loss-type gspo --num-iterations 4", steps=6),
    HealthySetting("bnpo scaled by the batch", "gsm8k", "--loss-type bnpo --scale-rewards batch"),
    HealthySetting("KL of 0.04 in the loss", "gsm8k", "--kl-beta 0.04", steps=6),
    HealthySetting("LoRA of rank 1", "lookup", "--peft --lora-r 1"),
    HealthySetting("LoRA on MuSiQue", "musique", "--peft"),
    HealthySetting("bfloat16", "lookup", "--bf16", steps=6),
    HealthySetting("bfloat16 with LoRA", "gsm8k", "--bf16 --peft"),
    HealthySetting("temperature of 0.7", "lookup", "--temperature 0.7", steps=6),
    HealthySetting("temperature of 1.3", "lookup", "--temperature 1.3"),
    HealthySetting("temperature of 1.5", "gsm8k", "--temperature 1.5"),
    HealthySetting("a cosine schedule with warm-up", "gsm8k", "--lr-scheduler-type cosine --warmup-steps 2"),
    HealthySetting("a constant schedule", "lookup", "--lr-scheduler-type constant"),
    HealthySetting("tasks from easy to hard over one long epoch", "lookup", "--task-order curriculum"),
    HealthySetting("tasks in the environment's order", "musique", "--task-order as-given", steps=6),
    HealthySetting("weight decay and clipping at a tenth", "lookup", "--weight-decay 0.1 --max-grad-norm 0.1"),
    HealthySetting("importance correction per sequence", "lookup", "--importance-correction sequence_mask"),
    HealthySetting("gradient checkpointing", "lookup", "--gradient-checkpointing"),
    HealthySetting("another seed of tasks", "gsm8k", "-a seed=7", steps=6),
    HealthySetting(
        "SmolLM2-135M on generated word problems with LoRA",
        "gsm8k",
        "--peft --batch-size 8 --gradient-accumulation-steps 2 --max-tokens 128",
        pretrained=True,
    ),
)
