"""The seen half of the twenty-first set of healthy settings: what threads and other trainers' settings have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

SEEN = (
    # RLHFlow/Online-RLHF#18: the reference may be the policy of the last iteration.
    # huggingface/trl#4026
    HealthySetting(
        "truncated weights per token without a mismatch",
        "lookup",
        "--importance-correction token_truncate",
        steps=6,
    ),
)
