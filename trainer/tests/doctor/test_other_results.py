"""Tool results that are others than the tool returns, told apart by what they say."""

from types import SimpleNamespace

import pytest
from plumbob.trainer.doctor.before_model.other_results import Result, explained, is_part, many, others


def results(show, count: int = 20) -> list[Result]:
    """Calls with the keys 4710, 4711 and so on, each of which returns "next=" and the next key."""
    table = {str(4710 + i): f"next={4711 + i}" for i in range(count)}
    task = SimpleNamespace(key="t", data=SimpleNamespace(model_dump=lambda exclude: {"table": table}))
    return [Result(task, "lookup", {"key": key}, show(key, own), own) for key, own in table.items()]


@pytest.mark.parametrize(
    ("cause", "show"),
    [
        ("tools-fail", lambda key, own: f"Error: wrong arguments for {key}"),
        ("tools-return-nothing", lambda key, own: "[]"),
        ("tools-return-nothing", lambda key, own: "the same for all"),
        ("tool-arguments-changed", lambda key, own: f"unknown key: {key}.0"),
        ("tool-results-mixed", lambda key, own: f"next={4711 + (int(key) - 4709) % 20}"),
        (None, lambda key, own: f"as of now, {int(key) * 7}"),
    ],
)
def test_what_is_shown_in_place_of_a_result_names_the_cause(cause, show):
    shown = results(show)
    assert many(others(shown), shown) and explained(others(shown), shown)[0] == cause


@pytest.mark.parametrize(
    "show",
    [
        lambda key, own: own,
        lambda key, own: f'{{"result": "{own}"}}',
        lambda key, own: f"{own}\n<html>the page</html>",
        lambda key, own: own[:6],
        lambda key, own: "Error: busy" if int(key) % 10 == 0 else own,
    ],
)
def test_results_that_hold_the_tool_s_own_or_fail_seldom_are_no_fault(show):
    assert not many(others(results(show)), results(show))


@pytest.mark.parametrize(
    ("shown", "own", "part"),
    [
        ("next=47", "next=4711", True),
        ("next=4711", "next=4711", False),
        ("value=lily", "value=needle", False),
        ("a long text th...(truncated)... its end", "a long text that has a middle and its end", True),
        ("a long te [12 more characters]", "a long text with twelve more letters in it", True),
        ("", "anything", True),
        ("other", "something else", False),
        ("Document 1\n\nDocument 2", "Document 1\nIts text.\n\nDocument 2\nIts other text.", True),
        ("Document 2\n\nDocument 1", "Document 1\nIts text.\n\nDocument 2\nIts other text.", False),
        ("Document 1\nAnother text", "Document 1\nIts text.\n\nDocument 2\nIts other text.", False),
    ],
)
def test_a_cut_leaves_a_beginning_or_an_end_with_a_mark_or_lines(shown, own, part):
    assert is_part(shown, own) is part
