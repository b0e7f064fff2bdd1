"""The value of --reward-weights: weights of reward components, as in correct=1,format=0."""

from __future__ import annotations

import math

from plumbob.trainer.config.options import require


def read_weights(text: str | None) -> dict[str, float]:
    """Component -> weight. Example: `read_weights("correct=1,format=0")`. Raises UserError."""
    weights: dict[str, float] = {}
    for pair in (text or "").split(",") if text is not None else ():
        name, equals, value = (part.strip() for part in pair.partition("="))
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        right = bool(name and equals) and math.isfinite(weight)
        require(right, f"--reward-weights needs NAME=WEIGHT, separated by commas, not {pair!r}")
        require(name not in weights, f"--reward-weights names {name} twice")
        weights[name] = weight
    return weights
