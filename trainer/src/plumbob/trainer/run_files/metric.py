"""One metric of metrics.jsonl: its name, unit and meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One metric. Example: `Metric("rollout/turns", "turns", "Assistant turns per rollout, mean.")`."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric's name, with any placeholder replaced."""
        return re.fullmatch(re.sub(r"[A-Z]+", ".+", self.name), name) is not None
