"""How an examination of a fault is counted: tools/bench/field.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "bench"))
from field import Item, verdict

PROMPT, GATE = frozenset({"prompt-replaced"}), frozenset({"tools-fail", "answers-not-parsed"})


def item(kind, *parts):
    return Item(kind, "a fault", "lookup", "probes", None, frozenset().union(*parts), parts if kind == "pairs" else ())


@pytest.mark.parametrize(
    ("named", "counted"),
    [
        ([], "missed"),
        (["prompt-replaced", "tools-fail"], "right"),
        (["tools-fail", "prompt-replaced"], "wrong"),
        # A general cause is right if it stands for the right one.
        (["engine-trainer-mismatch"], "right"),
        (["tool-results-wrong"], "wrong"),
        # A symptom says that the cause was not found.
        (["tools-never-used"], "missed"),
    ],
)
def test_a_fault_is_named_rightly_by_the_first_cause(named, counted):
    assert verdict(item("probes", PROMPT), {"named": named, "code": 0}) == counted


def test_a_symptom_is_right_if_the_fault_is_found_under_it():
    assert (
        verdict(item("probes", frozenset({"tools-never-used"})), {"named": ["tools-never-used"], "code": 0}) == "right"
    )
    assert (
        verdict(item("probes", frozenset({"too-little-signal"})), {"named": ["few-groups-differ"], "code": 0})
        == "right"
    )


@pytest.mark.parametrize(
    ("named", "counted"),
    [
        (["tools-fail", "prompt-replaced"], "right"),
        (["engine-trainer-mismatch", "reward-wrong"], "right"),
        (["tools-fail"], "right, one missing"),
        (["weights-in-bf16", "tools-fail", "prompt-replaced"], "wrong"),
    ],
)
def test_of_a_pair_the_first_cause_is_one_of_either_and_both_appear(named, counted):
    assert verdict(item("pairs", PROMPT, GATE), {"named": named, "code": 0}) == counted


def test_any_name_is_an_alarm_in_a_healthy_run():
    healthy = item("healthy")
    assert verdict(healthy, {"named": ["few-groups-differ"], "code": 1}) == "false alarm"
    assert verdict(healthy, {"named": [], "code": 0}) == "healthy"
    assert verdict(healthy, {"named": [], "code": 2}) == "not examined"
