"""Each fault of a training step changes the stage that its row names, and no earlier one."""

from __future__ import annotations

import pytest
from plumbob.doctor.findings import STAGES
from plumbob.testing.faulty import sites
from plumbob.testing.faulty.catalogue import FAULTS
from plumbob.testing.faulty.fault import BASE
from plumbob.testing.faulty.first_stage import RECORDED, config_of, first_stage

CASES = [
    name
    for name, fault in FAULTS.items()
    if fault.stage in RECORDED and fault.seen_by("doctor") and fault.at is not sites.options
]
"""Faults of a training step that its first two steps can show. Options alone change no stage: the reference follows them."""
MISSED = (
    "one row in every place of the batch",
    "top-p of 0.8 in the server with raw log-probabilities",
    "all rollouts of a group share one seed",
    "sixteen tokens by the server's default",
    "long requests refused by the server",
    "long rollouts time out and leave their groups",
    "first rollouts to finish are kept",
    "every reply taken for a cut one",
    "None of a reward becomes NaN",
    "adapter of zeros on both sides",
)
"""Faults of which two steps of so few rollouts give no stage that differs, or only a later one."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in MISSED])
def test_a_fault_changes_the_stage_that_its_row_names_and_no_earlier_one(name: str) -> None:
    fault = FAULTS[name]
    with fault.injected(fault.env):
        found = first_stage(config_of(fault.env, fault.options))
    assert found is not None and found.stage == fault.stage, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSED)
def test_a_fault_that_is_missed_changes_no_earlier_stage(name: str) -> None:
    fault = FAULTS[name]
    with fault.injected(fault.env):
        found = first_stage(config_of(fault.env, fault.options))
    assert found is None or STAGES.index(found.stage) >= STAGES.index(fault.stage), str(found)


@pytest.mark.slow
@pytest.mark.parametrize("env", BASE)
def test_no_stage_differs_in_a_run_without_a_fault(env: str) -> None:
    assert first_stage(config_of(env, "")) is None
