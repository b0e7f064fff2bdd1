"""The seen half of the ninth set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting
from plumbob.testing.faults.field_parts import graded

SEEN = (
    # Magistral's upper bound is between 0.26 and 0.28, and others go to 0.3.
    HealthySetting(
        "upper clip bound of 0.3 in two minibatches", "gsm8k", "--epsilon-high 0.3 --num-minibatches 2", steps=6
    ),
    HealthySetting(
        "room for overlong replies before a penalty",
        "gsm8k",
        "--overlong penalise --max-tokens 320",
        steps=6,
    ),
    HealthySetting(
        "best of plus two and worst of minus two", "lookup", start=graded(correct=lambda t, r, c: 4 * c - 2), steps=6
    ),
    # Lite PPO: the mean of the group, and the deviation of the batch.
    HealthySetting("group mean and deviation of the step", "lookup", "--scale-rewards batch", steps=6),
    # RLOO.
    HealthySetting(
        "leave-one-out baseline without scaling", "gsm8k", "--baseline leave_one_out --scale-rewards none", steps=6
    ),
    HealthySetting("tables with more decoys", "lookup", "-a table_size=40", steps=6),
    # PEFT's default of many models.
    HealthySetting(
        "adapter on queries and values alone", "gsm8k", "--peft --lora-targets q_proj,v_proj --lora-alpha 32", steps=6
    ),
    HealthySetting(
        "learning rate halved with a constant schedule",
        "lookup",
        "--learning-rate 1.5e-4 --lr-scheduler-type constant",
        steps=8,
    ),
    HealthySetting("k2 estimator of the KL term", "lookup", "--kl-beta 0.005 --kl-estimator k2", steps=6),
    HealthySetting(
        "dapo with groups of four chains",
        "lookup",
        "--loss-type dapo --num-generations 4 --batch-size 64 --gradient-accumulation-steps 1",
        steps=6,
    ),
    HealthySetting(
        "KL of one thousandth in the reward of word problems",
        "gsm8k",
        "--kl-placement reward --kl-beta 0.001",
        steps=6,
    ),
)
