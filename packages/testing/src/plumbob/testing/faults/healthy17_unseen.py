"""The unseen half of the seventeenth set of healthy settings, which are unusual and without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    HealthySetting(
        "LoRA of rank one with an alpha of thirty-two", "gsm8k", "--peft --lora-r 1 --lora-alpha 32", steps=6
    ),
    HealthySetting(
        "KL of a hundredth taken from the reward", "lookup", "--kl-beta 0.01 --kl-placement reward", steps=6
    ),
    HealthySetting("problems sampled at nine tenths", "gsm8k", "--temperature 0.9", steps=6),
)
