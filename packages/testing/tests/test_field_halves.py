"""Each fault of the field lies in the half that its name decides, in every set."""

import importlib

import pytest
from plumbob.testing.faults.field import BASE, entries, half_of, pairs

HALVES = [(number, half) for number in ("", *map(str, range(2, 28))) for half in ("seen", "unseen")]
FEWEST = {
    "": (20, 20, 6),
    "2": (18, 8, 6),
    "3": (10, 5, 3),
    "4": (11, 8, 4),
    "5": (10, 7, 3),
    "6": (19, 10, 4),
    "7": (16, 12, 5),
    "8": (20, 10, 5),
    "9": (15, 11, 6),
    "10": (14, 10, 6),
    "11": (9, 14, 4),
    "12": (8, 11, 4),
    "13": (14, 8, 5),
    "14": (16, 6, 6),
    "15": (16, 5, 6),
    "16": (12, 3, 6),
    "17": (9, 3, 4),
    "18": (11, 2, 5),
    "19": (17, 3, 5),
    "20": (23, 3, 6),
    "21": (17, 1, 6),
    "22": (14, 2, 6),
    "23": (17, 1, 6),
    "24": (18, 4, 6),
    "25": (18, 2, 6),
    "26": (16, 3, 6),
    "27": (0, 16, 0),
}
"""Set -> fewest faults of a half, fewest healthy settings, and number of pairs of faults."""
each_half = pytest.mark.parametrize(("number", "half"), HALVES)


def faults_of(number, half):
    return entries("field", number, half)


def settings_of(number, half):
    return entries("healthy", number, half)


@each_half
def test_every_name_lies_in_its_half(number, half):
    faults, settings = faults_of(number, half), settings_of(number, half)
    names = [one.name for one in (*faults, *settings)]
    assert {half_of(name) for name in names} == {half}
    assert len(names) == len(set(names))
    assert len(faults) >= FEWEST[number][0]
    assert len(settings) >= FEWEST[number][1]


def test_no_name_is_in_two_sets():
    names = [one.name for number, half in HALVES for one in (*faults_of(number, half), *settings_of(number, half))]
    assert len(names) == len(set(names))


@each_half
def test_entries_can_be_run(number, half):
    for fault in faults_of(number, half):
        assert set(fault.envs) <= set(BASE)
        assert fault.probes or fault.watch
        assert fault.start or fault.inject or fault.options
        assert fault.sentence.endswith(".")
        assert fault.source


@pytest.mark.parametrize(("number", "half"), [place for place in HALVES if place[0]])
def test_faults_of_later_sets_cite_their_threads(number, half):
    for fault in faults_of(number, half):
        assert "#" in fault.source


@each_half
def test_pairs_are_of_two_causes_in_an_environment_of_both(number, half):
    chosen = pairs(faults_of(number, half))
    assert FEWEST[number][2] <= len(chosen) <= 6
    assert len({f.name for _, *both in chosen for f in both}) == 2 * len(chosen)
    for env, a, b in chosen:
        assert env in a.envs
        assert env in b.envs
        assert a.causes.isdisjoint(b.causes)


@each_half
def test_files_of_an_unseen_half_say_so(number, half):
    if half == "unseen" and faults_of(number, half):
        for name in (f"field{number}_unseen", f"field{number}_unseen_doubles"):
            first = importlib.import_module(f"plumbob.testing.faults.{name}").__doc__.splitlines()[0]
            assert "unseen" in first
