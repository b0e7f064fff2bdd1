"""What `--keep-traces` means: how many rollouts of each step are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plumbob.console import UserError

AUTO_BYTES = 10_000_000_000
"""With `--keep-traces auto`, the traces of a whole run take at most about this much space on disk."""


@dataclass(frozen=True)
class KeptTraces:
    """How many rollouts of each step are stored, always as whole groups.

    Examples: `parse("auto")`, `parse("all")`, `parse("none")`, `parse("64")`.
    """

    rollouts: int | None = None
    """Largest number of rollouts of a step, rounded up to whole groups."""
    automatic: bool = False
    """Of these groups, keep as many as fit into an equal part of AUTO_BYTES for each step, at least one."""

    def num_groups(self, of: int, group_size: int) -> int:
        """Largest number of groups to keep of a step with `of` groups."""
        return of if self.rollouts is None else min(of, math.ceil(self.rollouts / group_size))


def parse(text: str) -> KeptTraces:
    """Read the value of --keep-traces. Raises UserError."""
    if text in ("auto", "all", "none"):
        return {"auto": KeptTraces(automatic=True), "all": KeptTraces(), "none": KeptTraces(rollouts=0)}[text]
    if text.isdecimal() and int(text) > 0:
        return KeptTraces(rollouts=int(text))
    raise UserError(f"--keep-traces must be auto, all, none, or a number of rollouts per step such as 64, not {text!r}")
