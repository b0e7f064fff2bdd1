"""The unseen half of the twenty-third set of healthy settings: what threads, papers and other trainers have, without a
fault."""

from __future__ import annotations

from plumbob.testing.faults.field import HealthySetting

UNSEEN = (
    # areal-project/AReaL#453: groups without a signal are replaced, so that batches keep their size.
    HealthySetting("refilled groups with three rounds at most", "lookup", "--zero-signal refill", steps=6),
)
