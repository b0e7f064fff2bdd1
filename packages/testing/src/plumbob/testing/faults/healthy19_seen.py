"""The seen half of the nineteenth set of healthy settings: what threads have or recommend, without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

SEEN = (
    HealthySetting(
        "adapter of rank sixty-four with as much alpha", "lookup", "--peft --lora-r 64 --lora-alpha 64", steps=6
    ),
    HealthySetting(
        "constant rate for an adapter of all linear layers",
        "gsm8k",
        "--peft --lora-targets all-linear --lr-scheduler-type constant",
        steps=6,
    ),
    HealthySetting(
        "groups of sixteen on a few tasks",
        "lookup",
        "--num-generations 16 --batch-size 32 --gradient-accumulation-steps 3",
        steps=6,
    ),
    HealthySetting(
        "leave-one-out with a KL penalty in the reward",
        "lookup",
        "--baseline leave_one_out --kl-placement reward --kl-beta 0.01",
        steps=6,
    ),
    HealthySetting("overlong rollouts masked where few are cut", "gsm8k", "--overlong mask", steps=6),
    HealthySetting("tasks in the order in which they were written", "gsm8k", "--task-order as-given", steps=6),
    HealthySetting(
        "upper clip of twenty-eight hundredths at seven tenths",
        "lookup",
        "--epsilon 0.2 --epsilon-high 0.28 --temperature 0.7 --lr-scheduler-type constant",
        steps=6,
    ),
)
"""The seen healthy settings."""
