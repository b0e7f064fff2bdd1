"""What a terminal shows while a command works, and that nothing in it is wider than the terminal."""

import io
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import app, counted, typed, working
from plumbob.console.text import table
from plumbob.console.working import Working, note
from plumbob.trainer.evaluation.results import aligned


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch) -> Terminal:
    """A terminal of 40 columns in the place of stderr. Not a fixture: pytest's own stderr would take its place."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(working, "EVERY_SECONDS", 0.01)
    monkeypatch.setenv("COLUMNS", "40")
    return terminal


def test_a_terminal_is_not_silent_while_the_body_works(monkeypatch):
    terminal = terminal_of(monkeypatch)
    ends = time.monotonic() + 60
    with Working("loading the largest of all models that there are") as line:
        while terminal.getvalue().count("loading") < 5 and time.monotonic() < ends:
            time.sleep(0.001)
        line.say("checking: load")
        note("a line that stays")
        line.say("checking: oracle", keep=True)
    shown = terminal.getvalue()
    assert shown.count("loading") >= 5 and "a line that stays\n" in shown and shown.endswith(" s\n")
    assert all(len(line.removeprefix("\x1b[K")) <= 40 for part in shown.split("\n") for line in part.split("\r"))
    with Working("again"):  # the one before is over
        pass
    assert terminal.getvalue().count("again") >= 1


def test_an_inner_line_goes_on_in_the_outer_one(capsys):
    with Working("examining") as outer:
        with Working("loading torch") as inner:
            assert inner is outer
        outer.say("a part of many, which gets no line of its own without a terminal")
        outer.say("taking steps", keep=True)
        note("found")
    assert capsys.readouterr().err == "  examining\n  loading torch\n  taking steps\n  found\n"


def test_a_body_that_fails_ends_the_line(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with pytest.raises(KeyError), Working("loading"):
        raise KeyError
    assert terminal.getvalue().endswith("\n") and Working._outer is None


def test_a_sentence_is_not_broken_inside_of_a_word(monkeypatch):
    terminal = terminal_of(monkeypatch)
    said = "there is no environment of the name that was given, and none that resembles it"
    with pytest.raises(SystemExit):
        app.fail("train", said)
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()) == f"train: {said}"


CELLS = st.lists(st.text("abc", min_size=1, max_size=24), min_size=4, max_size=4)


@given(st.lists(CELLS, min_size=1, max_size=4), st.sampled_from([60, 80]))
def test_a_table_fits_and_keeps_every_cell(lines, columns):
    shown = aligned(lines, columns)
    assert max(map(len, shown.splitlines())) <= columns
    for cells in lines:
        assert all(cell in shown for cell in cells)


def test_a_table_that_fits_is_one_table():
    assert aligned([["", "all (2)"], ["reward", "1.000"]], 20) == "        all (2)\nreward    1.000"
    wide = [["", "all (2)", "1 hop (1)"], ["reward", "1.000", "1.000"]]
    assert aligned(wide, 20) == "        all (2)\nreward    1.000\n\n        1 hop (1)\nreward      1.000"


@pytest.mark.parametrize("columns", ["60", "80"])
def test_the_labs_and_the_hubs_tables_fit(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    row = ("H07 Rewards that saturate before the policy moves", "high", "not tested", "-", "what was seen so far " * 6)
    assert max(map(len, table([row, row]).splitlines())) <= int(columns)


def test_numbers_have_their_nouns():
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_commands_are_shown_as_they_have_to_be_typed(monkeypatch):
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    assert typed("train x") == "train x"
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert typed("train x") == "uv run train x"
