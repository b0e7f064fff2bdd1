"""The unseen half of the twenty-third set of healthy settings: what threads, papers and other trainers have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    # NVIDIA-NeMo/RL#1899: whole sequences are masked by the geometric mean of their weights.
    HealthySetting(
        "sequences masked beyond a tenth",
        "gsm8k",
        "--importance-correction sequence_mask --importance-cap 1.1",
        steps=6,
    ),
    # areal-project/AReaL#453: groups without a signal are replaced, so that batches keep their size.
    HealthySetting(
        "refilled groups with two rounds at most", "lookup", "--zero-signal refill --max-refills 2", steps=6
    ),
    # THUDM/slime#657: tokens outside of the bounds have no weight.
    HealthySetting(
        "token weights masked beyond two",
        "musique",
        "--importance-correction token_mask --importance-cap 2",
        steps=6,
    ),
)
