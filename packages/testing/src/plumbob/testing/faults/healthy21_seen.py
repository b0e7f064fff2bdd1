"""The seen half of the twenty-first set of healthy settings: what threads and other trainers' settings have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

SEEN = (
    # RLHFlow/Online-RLHF#18: the reference may be the policy of the last iteration.
    HealthySetting(
        "reference replaced by the policy every second step",
        "lookup",
        "--kl-beta 0.01 --ref-model-sync-steps 2",
        steps=6,
    ),
    HealthySetting("two-sided clipping at three", "gsm8k", "--delta 3", steps=6),  # verl-project/verl#784
    # huggingface/trl#4026
    HealthySetting(
        "truncated weights per token without a mismatch",
        "lookup",
        "--importance-correction token_truncate --importance-cap 2",
        steps=6,
    ),
)
