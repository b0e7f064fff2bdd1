"""A number that a verdict depends on, with its meaning."""

from __future__ import annotations

THRESHOLDS: list[Threshold | ByPrecision] = []
"""All thresholds, in the order of their files."""


class Threshold(float):
    """A number with its meaning. `causes`: ids of the causes whose verdict depends on it.

    Example: `Threshold(0.3, "largest share of rollouts that a limit may cut off", "truncated-turns") < 0.5`.
    """

    meaning: str
    causes: tuple[str, ...]

    def __new__(cls, value: float, meaning: str, *causes: str) -> Threshold:
        self = super().__new__(cls, value)
        self.meaning, self.causes = meaning, causes
        THRESHOLDS.append(self)
        return self

    def __str__(self) -> str:
        return f"{float(self):g}"


class ByPrecision:
    """A threshold for float32 and one for bfloat16. Example: `SYNC_PARITY[True]` is the threshold for bfloat16."""

    def __init__(self, float32: float, bfloat16: float, meaning: str, *causes: str) -> None:
        self.float32, self.bfloat16, self.meaning, self.causes = float32, bfloat16, meaning, causes
        THRESHOLDS.append(self)

    def __getitem__(self, bf16: bool) -> float:
        return self.bfloat16 if bf16 else self.float32

    def __str__(self) -> str:
        return f"{self.float32:g} in float32, {self.bfloat16:g} in bfloat16"
