"""The verdict of tools/hanging_run.py on what it has measured."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import hanging_run

WARM_UP = [600.0, 900.0, 1400.0, 1800.0] * 5


@pytest.mark.parametrize(
    ("later", "flat"),
    [
        ([1800.0] * 40, True),
        ([1700.0, 1850.0] * 20, True),
        ([1750.0] * 39 + [2000.0], True),  # one high value at the end is no growth
        ([1800.0 + 10 * i for i in range(40)], False),
        ([1700.0 + 10 * i + 150 * (i % 2) for i in range(40)], False),
    ],
)
def test_growth_is_the_slope_after_the_first_third(later, flat):
    assert hanging_run.is_flat([*WARM_UP, *later], 0.1) == flat


def test_a_thread_more_every_few_minutes_is_growth():
    assert hanging_run.is_flat([6] * 60, 0.1) and not hanging_run.is_flat([6 + i // 10 for i in range(60)], 0.1)


def test_a_run_that_is_too_short_to_tell_is_flat():
    assert hanging_run.is_flat([], 0.1) and hanging_run.is_flat([1800.0], 0.1)


def test_memory_in_use_is_a_part_of_the_resident_memory():
    found = hanging_run.usage()
    assert 0 < found.in_use <= found.resident and found.threads > 0 and found.files > 0
