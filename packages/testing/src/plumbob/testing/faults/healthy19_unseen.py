"""The unseen half of the nineteenth set of healthy settings: they are run only to measure."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    HealthySetting(
        "KL term of a twenty-fifth with the third estimator", "gsm8k", "--kl-beta 0.04 --kl-estimator k3", steps=6
    ),
    HealthySetting("deviation of the whole step over tables", "lookup", "--scale-rewards batch", steps=6),
    HealthySetting("tokens of a step weighed alike over documents", "musique", "--loss-type dapo", steps=6),
)
"""The unseen healthy settings."""
