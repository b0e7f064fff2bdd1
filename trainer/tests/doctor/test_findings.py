"""The types of a diagnosis."""

from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.trainer.diagnosis.causes import CAUSES, is_symptom, named, stands_for
from plumbob.trainer.diagnosis.findings import Finding, Place
from plumbob.trainer.doctor import run_probes


def test_a_place_is_a_link_whatever_the_task_is_called():
    place = Place(12, "a & b=c#ä", 3, (118, 120))
    assert parse_qs(place.fragment) == {"step": ["12"], "task": ["a & b=c#ä"], "rollout": ["3"], "token": ["118"]}
    assert "token" not in Place(1, "a", 0).fragment


@given(st.lists(st.sampled_from(sorted(CAUSES)), max_size=8))
def test_what_is_named_is_each_cause_once_in_order_and_symptoms_last(ids):
    found = named(Finding(f"check {i}", "fail", "", cause) for i, cause in enumerate(ids))
    in_order = list(dict.fromkeys(ids))
    assert found == [c for c in in_order if not is_symptom(c)] + [c for c in in_order if is_symptom(c)]


def test_causes_that_stand_for_others_name_those_of_the_catalogue():
    for cause in CAUSES.values():
        assert set(cause.includes) <= set(CAUSES) - {cause.id}
        assert stands_for(cause.id) == {cause.id, *cause.includes}
        # What only symptoms are known of is no reason.
        assert not any(CAUSES[name].symptom for name in cause.includes)


@pytest.mark.parametrize(("cause", "asked"), [("never-succeeds", ["one", "two"]), ("engine-stale", ["one"])])
def test_probes_go_on_after_a_symptom_and_end_at_a_cause(monkeypatch, cause, asked):
    went = []

    def probe(name):
        def run(subject):
            went.append(name)
            yield Finding(name, "fail", "", cause)

        return run

    monkeypatch.setattr(run_probes, "_in_order", lambda subject: {name: probe(name) for name in ("one", "two")})
    list(run_probes.examine(None))
    assert went == asked
