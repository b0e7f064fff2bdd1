"""The seen half of the fifth set of healthy settings: unusual, and without a fault."""

from __future__ import annotations

from plumbob.testing.faults import field5_seen_doubles as doubles
from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded, tools_answer

SEEN = (
    HealthySetting("groups of three", "lookup", "--num-generations 3 --batch-size 33", steps=6),
    HealthySetting(
        "LoRA on the feed-forward layers alone", "lookup", "--peft --lora-targets gate_proj,up_proj,down_proj", steps=6
    ),
    HealthySetting("tools that often find nothing", "musique", start=tools_answer(doubles.seldom_found), steps=6),
    HealthySetting("partial credit in quarters", "lookup", start=graded(correct=doubles.quarters), steps=6),
    HealthySetting("a policy that solves most tasks from the start", "lookup", "-a max_hops=3", steps=6),
    HealthySetting("replies of up to 1024 tokens", "gsm8k", "--max-tokens 1024"),
    HealthySetting(
        "gspo with LoRA in two minibatches", "lookup", "--loss-type gspo --peft --num-minibatches 2", steps=6
    ),
)
