"""The unseen half of the twenty-second set of healthy settings: what threads mention, without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    # cszn/KAIR#106, huggingface/trl#6351: no shuffle, or the same in every epoch.
    HealthySetting("tasks as given in each epoch", "lookup", "--task-order as-given", steps=6),
    # PrimeIntellect-ai/prime-rl#1211
    HealthySetting(
        "held-out questions between steps", "musique", "--eval-examples 8 --eval-steps 2 --eval-rollouts 2", steps=6
    ),
)
