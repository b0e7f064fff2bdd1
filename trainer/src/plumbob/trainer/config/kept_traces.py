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

    Examples: `parse("auto")`, `parse("all")`, `parse("none")`, `parse("64")`, `parse("5%")`.
    """

    rollouts: int | None = None
    """Largest number of rollouts of a step, rounded up to whole groups."""
    share: float | None = None
    """Share of the groups of a step, above 0 and at most 1; at least one group is kept."""
    automatic: bool = False
    """Of these groups, keep as many as fit into an equal part of AUTO_BYTES for each step, at least one."""

    def num_groups(self, of: int, group_size: int) -> int:
        """Largest number of groups to keep of a step with `of` groups."""
        if self.rollouts is not None:
            return min(of, math.ceil(self.rollouts / group_size))
        return of if self.share is None else min(of, max(1, round(self.share * of)))


def parse(text: str) -> KeptTraces:
    """Read the value of --keep-traces. Raises UserError."""
    if text in ("auto", "all", "none"):
        return {"auto": KeptTraces(automatic=True), "all": KeptTraces(), "none": KeptTraces(rollouts=0)}[text]
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 < share <= 1:
                return KeptTraces(share=share)
        elif int(text) > 0:
            return KeptTraces(rollouts=int(text))
    except ValueError:
        pass
    raise UserError(
        "--keep-traces must be auto, all, none, a number of rollouts per step such as 64, or a share of each step "
        f"such as 5%, not {text!r}"
    )
