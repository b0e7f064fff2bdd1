"""The unseen half of the seventh set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults import field7_unseen_doubles as doubles
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded, tasks_changed

UNSEEN = (
    HealthySetting("LoRA of rank 256", "lookup", "--peft --lora-r 256 --lora-alpha 256", steps=6),
    HealthySetting("a polite sentence before each question", "gsm8k", start=tasks_changed(doubles.politely), steps=6),
    HealthySetting("a table of a hundred entries", "lookup", "-a table_size=100"),
    HealthySetting("MuSiQue in bfloat16", "musique", "--bf16"),
    HealthySetting(
        "curriculum over chains of one to eight links", "lookup", "-a max_hops=8 --task-order curriculum", steps=4
    ),
    HealthySetting("groups of ten", "gsm8k", "--num-generations 10 --batch-size 40", steps=6),
    HealthySetting(
        "keeping the best by sampled held-out reward",
        "lookup",
        "--keep-best eval/sampled --eval-steps 2 --eval-examples 8",
        steps=6,
    ),
    HealthySetting(
        "leave-one-out baseline with groups of twenty-four",
        "lookup",
        "--baseline leave_one_out --num-generations 24 --batch-size 48",
    ),
    HealthySetting("refilled groups on word problems", "gsm8k", "--zero-signal refill", steps=6),
    HealthySetting(
        "rewards of zero and one thousand", "gsm8k", start=graded(correct=lambda t, r, c: 1000 * c), steps=6
    ),
    HealthySetting(
        "six rollouts of each of six tasks",
        "lookup",
        "--num-generations 6 --batch-size 36 --gradient-accumulation-steps 1",
    ),
    HealthySetting(
        "temperature of 0.8 with group scaling", "gsm8k", "--temperature 0.8 --scale-rewards group", steps=6
    ),
)
