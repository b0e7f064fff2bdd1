"""The seen half of the fifteenth set of healthy settings: what threads and other trainers' defaults have, without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

SEEN = (
    # verl's recipe of DAPO.
    HealthySetting(
        "clip bound of twenty-eight hundredths with means over the step",
        "lookup",
        "--loss-type dapo --epsilon-high 0.28",
        steps=6,
    ),
    HealthySetting("cispo in groups of sixteen", "gsm8k", "--loss-type cispo --num-generations 16", steps=6),
    HealthySetting(
        "one step of warm-up before a cosine", "lookup", "--lr-scheduler-type cosine --warmup-steps 1", steps=6
    ),
    HealthySetting("microbatches of four thousand tokens", "musique", "--microbatch-tokens 4096"),
    # NVIDIA-NeMo/RL#3900
    HealthySetting(
        "gspo over four minibatches of each step", "lookup", "--loss-type gspo --num-minibatches 4", steps=6
    ),
)
