"""All faults and all healthy settings, by name."""

from __future__ import annotations

from plumbob.testing.faulty import (
    advantages,
    gradient,
    grading,
    healthy,
    logprobs,
    loss,
    optimizer,
    rows,
    sampling,
    signal,
    sync,
    tasks,
    tools,
)
from plumbob.testing.faulty.fault import Fault, Healthy

TABLES = tuple(
    stage.FAULTS
    for stage in (tasks, grading, tools, rows, logprobs, sampling, advantages, loss, gradient, optimizer, sync, signal)
)
"""The faults of each module, in the order of the data."""
FAULTS: dict[str, Fault] = {fault.name: fault for table in TABLES for fault in table}
"""Name -> fault."""
HEALTHY: dict[str, Healthy] = {setting.name: setting for setting in healthy.HEALTHY}
"""Name -> healthy setting."""
