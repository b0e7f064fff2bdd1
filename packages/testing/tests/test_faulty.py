"""Every row of a fault or of a healthy setting can be read, injected and undone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.findings import STAGES
from plumbob.rollout import Sample
from plumbob.testing.faulty import sites
from plumbob.testing.faulty.catalogue import FAULTS, HEALTHY, TABLES
from plumbob.testing.faulty.fault import BASE
from plumbob.trainer.rollouts import groups

NONE = object()


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Any, str], Any]:
    """(owner, name) -> what stood there before a site put something else into its place."""
    before: dict[tuple[Any, str], Any] = {}
    put = sites.put

    def noted(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
        before.setdefault((owner, name), vars(owner).get(name, NONE))
        put(stack, owner, name, value)
        assert getattr(owner, name) is not before[owner, name]

    monkeypatch.setattr(sites, "put", noted)
    return before


def undone(replaced: dict[tuple[Any, str], Any]) -> bool:
    return all(vars(owner).get(name, NONE) is value for (owner, name), value in replaced.items())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_injected_and_undone(name: str, replaced: dict[tuple[Any, str], Any]) -> None:
    fault = FAULTS[name]
    for env in fault.envs:
        with fault.injected(env):
            assert bool(replaced) == (fault.at is not sites.options)
            assert not replaced or not undone(replaced)
        assert undone(replaced)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_says_what_names_it_and_where_it_was_reported(name: str) -> None:
    fault = FAULTS[name]
    assert fault.causes and fault.accepts("doctor") | fault.accepts("run") <= CAUSES.keys()
    assert fault.source and fault.stage in STAGES and fault.sentence.endswith(".")
    assert fault.envs and set(fault.envs) <= BASE.keys()
    assert fault.at is not sites.options or fault.options


def test_two_faults_of_a_row_are_both_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Sample([1, 2, 3, 4, 5], [False, True, True, True, False], [0.0, -1.0, -1.0, -1.0, 0.0], 0.0, "0/0", "", False)
    monkeypatch.setattr(groups, "to_sample", lambda trace, group: row)
    first, last = (
        FAULTS["first token of each turn left out of the loss"],
        FAULTS["end of each turn left out of the loss"],
    )
    with first.injected("lookup"), last.injected("lookup"):
        assert groups.to_sample(None, "0/0").loss_mask == [False, False, True, False, False]


def test_names_of_faults_are_unique() -> None:
    assert len(FAULTS) == sum(map(len, TABLES))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_setting_is_made_and_undone(name: str, replaced: dict[tuple[Any, str], Any]) -> None:
    setting = HEALTHY[name]
    with ExitStack() as stack:
        setting.start(stack, setting.env)
        assert bool(replaced) == bool(setting.at)
    assert undone(replaced)
