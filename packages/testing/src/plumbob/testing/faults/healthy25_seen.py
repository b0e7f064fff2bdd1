"""The seen half of the twenty-fifth set of healthy settings: what threads about trainers recommend, without a fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

SEEN = (
    # huggingface/trl#3867
    # Human-Agent-Society/reef#536
    HealthySetting(
        "adapter without dropout at four times its rank",
        "lookup",
        "--peft --lora-r 8 --lora-alpha 32 --lora-dropout 0",
        steps=6,
    ),
    # natolambert/rlhf-book#489, huggingface/trl#3556
    HealthySetting("a k3 penalty of a thousandth", "gsm8k", "--kl-beta 0.001 --kl-estimator k3", steps=6),
)
