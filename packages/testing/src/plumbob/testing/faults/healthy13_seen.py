"""The seen half of the thirteenth set of healthy settings: what threads, papers and other trainers' defaults have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

SEEN = (
    # TRL's first defaults.
    HealthySetting(
        "GRPO as in TRL with a beta of four hundredths",
        "lookup",
        "--loss-type grpo --scale-rewards group --kl-beta 0.04 --kl-estimator k3",
        steps=6,
    ),
    # arXiv:2503.14476
    HealthySetting(
        "DAPO with its higher upper bound and refilled groups",
        "gsm8k",
        "--loss-type dapo --epsilon 0.2 --epsilon-high 0.28 --zero-signal refill",
        steps=6,
    ),
    HealthySetting("GSPO over four minibatches", "lookup", "--loss-type gspo --num-minibatches 4", steps=6),
    # areal-project/AReaL#303, arXiv:2508.08221
    HealthySetting("deviation of the batch under means of groups", "gsm8k", "--scale-rewards batch", steps=6),
    HealthySetting(
        "adapter of rank sixty-four at half its alpha", "lookup", "--peft --lora-r 64 --lora-alpha 32", steps=6
    ),
    HealthySetting(
        "cosine schedule after one step of warm-up", "gsm8k", "--lr-scheduler-type cosine --warmup-steps 1", steps=6
    ),
    # pytorch/rl#3580
    HealthySetting("weight decay of one hundredth", "lookup", "--weight-decay 0.01"),
    HealthySetting("cut rollouts masked over documents", "musique", "--overlong mask"),
)
