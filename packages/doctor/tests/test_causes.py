"""The catalogue of causes, and what a finding says."""

from __future__ import annotations

import pytest
from plumbob.doctor.causes import CAUSES, is_symptom
from plumbob.doctor.findings import STAGES, Finding


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_a_cause_says_what_is_wrong_and_what_to_do(cause) -> None:
    assert cause.sentence.endswith(".") and cause.fix.endswith((".", ")"))
    assert cause.stage in STAGES
    assert cause.id not in cause.includes and set(cause.includes) <= CAUSES.keys()


def test_causes_are_listed_in_the_order_of_their_stages() -> None:
    places = [STAGES.index(cause.stage) for cause in CAUSES.values()]
    assert places == sorted(places)


def test_no_two_causes_have_the_same_remedy() -> None:
    assert len({cause.fix for cause in CAUSES.values()}) == len(CAUSES)


def test_a_cause_of_another_catalogue_is_no_symptom() -> None:
    assert not is_symptom("made-up")


@pytest.mark.parametrize(("verdict", "cause"), [("pass", "oracle-fails"), ("fail", None)])
def test_a_finding_has_a_cause_exactly_if_it_failed(verdict, cause) -> None:
    with pytest.raises(ValueError, match="if and only if it failed"):
        Finding("answers earn", verdict, "0 of 8", cause)


def test_a_finding_of_an_outcome() -> None:
    assert Finding.of("a check", "oracle-fails", [], "fine", "rows") == Finding("a check", "pass", "fine", stage="rows")
    assert Finding.of("a check", "oracle-fails", True, "0 of 8").verdict == "fail"


def test_advice_names_the_environment_and_the_model_of_the_run() -> None:
    advice = CAUSES["never-succeeds"].advice("lookup", "tiny")
    assert "sft lookup --model tiny" in advice and "ENV" not in advice and "MODEL" not in advice
