"""What `--keep-traces` means: how many rollouts of each step are stored, always as whole groups."""

from __future__ import annotations

import math

from plumbob.console import UserError

AUTO_BYTES = 10_000_000_000
"""With `--keep-traces auto`, the traces of a whole run take at most about this much space on disk."""


def groups_to_keep(keep: str, of: int, group_size: int) -> int:
    """Largest number of groups to store of a step with `of` groups. `keep`: the option's value. Raises UserError.

    With `auto` a step keeps as many of these as fit into an equal part of AUTO_BYTES, and at least one.
    """
    if keep in ("auto", "all", "none"):
        return 0 if keep == "none" else of
    if keep.isdecimal() and int(keep) > 0:
        return min(of, math.ceil(int(keep) / group_size))
    raise UserError(f"--keep-traces must be auto, all, none, or a number of rollouts per step such as 64, not {keep!r}")
