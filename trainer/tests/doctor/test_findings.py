"""The types of a diagnosis."""

from urllib.parse import parse_qs

from plumbob.trainer.diagnosis.findings import Place


def test_a_place_is_a_link_whatever_the_task_is_called():
    place = Place(12, "a & b=c#ä", 3, (118, 120))
    assert parse_qs(place.fragment) == {"step": ["12"], "task": ["a & b=c#ä"], "rollout": ["3"], "token": ["118"]}
    assert "token" not in Place(1, "a", 0).fragment
