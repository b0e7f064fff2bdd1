"""Each fault of the field lies in the half that its name decides."""

import importlib

import pytest
from plumbob.testing.faults.field import BASE, half_of, pairs


@pytest.mark.parametrize("half", ["seen", "unseen"])
def test_every_name_lies_in_its_half(half):
    faults = getattr(importlib.import_module(f"plumbob.testing.faults.field_{half}"), half.upper())
    settings = getattr(importlib.import_module(f"plumbob.testing.faults.healthy_{half}"), half.upper())
    names = [one.name for one in (*faults, *settings)]
    assert {half_of(name) for name in names} == {half}
    assert len(names) == len(set(names))
    assert len(faults) >= 20
    assert len(settings) >= 20


@pytest.mark.parametrize("half", ["seen", "unseen"])
def test_entries_can_be_run(half):
    faults = getattr(importlib.import_module(f"plumbob.testing.faults.field_{half}"), half.upper())
    for fault in faults:
        assert set(fault.envs) <= set(BASE)
        assert fault.probes or fault.watch
        assert fault.start or fault.inject or fault.options
        assert fault.sentence.endswith(".")
        assert fault.source


@pytest.mark.parametrize("half", ["seen", "unseen"])
def test_pairs_are_of_two_causes_in_an_environment_of_both(half):
    faults = getattr(importlib.import_module(f"plumbob.testing.faults.field_{half}"), half.upper())
    chosen = pairs(faults)
    assert len(chosen) == 6
    assert len({f.name for _, *both in chosen for f in both}) == 12
    for env, a, b in chosen:
        assert env in a.envs
        assert env in b.envs
        assert a.causes.isdisjoint(b.causes)
