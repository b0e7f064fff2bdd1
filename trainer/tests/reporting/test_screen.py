"""What is printed fits the terminal, and can be written in its encoding and without colour."""

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.evaluation.statistics import Estimate
from plumbob.trainer.reporting import progress_table
from plumbob.trainer.reporting.progress_bar import Progress
from plumbob.trainer.reporting.progress_table import COLUMNS, PLAIN_SPARKS, PRIORITY, SPARKS, Board, bars_for, sparkline
from plumbob.trainer.training import finish
from plumbob.trainer.training.run import TrainState
from rich.console import Console

numbers = st.floats(0, 1e6, allow_nan=False)
steps = st.lists(st.fixed_dictionaries({name: numbers for name, _ in COLUMNS.values()}), max_size=4)
TYPICAL = {name: 0.5 for name, _ in COLUMNS.values()} | {"time/rollout_tokens_per_second": 3825.0, "step": 17.0}


def drawn(rows: list[dict], width: int, status: str = "") -> list[str]:
    """The lines of the live table in a terminal of this width."""
    board = Board(30, file=io.StringIO())
    for row in rows:
        board.step({**row, "step": 1 + len(board.rows)})
    board.status(status)
    board.console = Console(width=width, file=io.StringIO())
    board.console.print(board._render())
    return [line.rstrip() for line in board.console.file.getvalue().splitlines()]


@given(
    rows=steps, width=st.integers(20, 140), status=st.text(st.characters(codec="ascii", categories=["L"]), max_size=200)
)
def test_the_live_table_fits_any_terminal_and_never_wraps(rows, width, status):
    lines = drawn(rows, width, status)
    assert max(map(len, lines), default=0) <= width
    assert len(lines) == 1 + 1 + len(rows) + 1  # title, headings, steps, status
    assert lines[1].split()[:2] == ["step", "reward"]


def test_the_table_leaves_out_what_matters_least():
    for width, left_out in ((100, ()), (80, ("tok/s",)), (60, ("gap", "tok/s", "train s"))):
        headings = drawn([TYPICAL], width)[1]
        assert [name for name in PRIORITY if name not in headings] == [n for n in PRIORITY if n in left_out], width
    assert sorted(PRIORITY) == sorted(COLUMNS)


def test_no_color_is_obeyed(monkeypatch, capsys):
    colours = re.compile(r"\x1b\[[0-9;]*\b(3[0-9]|4[0-9]|9[0-7]|10[0-7])\b[0-9;]*m")
    for no_color, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        with Board(2) as board:
            board.step(TYPICAL)
        with Progress("rollouts", 3) as progress:
            progress.advance()
        screen = capsys.readouterr().err
        assert "rollouts" in screen and bool(colours.search(screen)) is coloured


def test_the_sparkline_has_plain_bars_where_the_encoding_lacks_others():
    assert sparkline([0, 1], bars=bars_for(io.TextIOWrapper(io.BytesIO(), "utf-8"))) == SPARKS[0] + SPARKS[-1]
    for encoding in ("ascii", "latin-1"):
        assert sparkline([0, 1], bars=bars_for(io.TextIOWrapper(io.BytesIO(), encoding))) == "_#"
    assert len(PLAIN_SPARKS) == len(SPARKS) and PLAIN_SPARKS.isascii()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_result_fits_the_terminal(columns, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", str(columns))
    both = {"greedy": Estimate(0.617, 0.556, 0.675, 256), "sampled": Estimate(0.609, 0.548, 0.667, 256)}
    rows = [{"reward/mean": i / 200, "groups/zero_signal": 0, "groups/count": 16} for i in range(200)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{row}\n".replace("'", '"') for row in rows))
    state = TrainState(evaluations={"before": both, "after": both})
    sampler = type("Sampler", (), {"num_held_out": 256})
    run = type(
        "Run",
        (),
        {"directory": tmp_path, "state": state, "sampler": sampler, "config": TrainConfig()},
    )
    finish._print_result(run, 31)  # ty: ignore[invalid-argument-type]
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("run directory")]
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert text.count("0.617 [0.556, 0.675]") == 2 and text.count("(+0.000)") == 2
    assert any(line.startswith("training reward  0.000 ") and line.endswith(" 0.995") for line in lines)
    assert sys.stdout.encoding and progress_table.SPARKS[-1] in text
