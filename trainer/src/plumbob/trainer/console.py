"""What a person sees while a run goes on: a live table on a terminal, one plain line per step elsewhere.

Progress goes to stderr; the summary, which is the result, to stdout.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

SPARKS = "▁▂▃▄▅▆▇█"

COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", "{:.0f}"),
    "reward": ("reward/mean", "{:.3f}"),
    "no signal": ("groups/zero_signal_share", "{:.0%}"),
    "turns": ("rollout/turns", "{:.1f}"),
    "cut": ("rollout/truncated_share", "{:.0%}"),
    "entropy": ("policy/entropy", "{:.3f}"),
    "grad": ("optimizer/grad_norm", "{:.2g}"),
    "gap": ("sync/sampling_gap", "{:.1e}"),
    "tok/s": ("time/rollout_tokens_per_second", "{:,.0f}"),
    "roll s": ("time/rollout", "{:.1f}"),
    "train s": ("time/train", "{:.1f}"),
}
"""Heading -> (metric, format)."""

MAX_ROWS = 20


class Board:
    """Use as a context manager; `status` says what is going on now, `step` adds a finished step's row."""

    def __init__(self, total_steps: int, first_step: int = 0) -> None:
        self.total_steps = total_steps
        self.first_step = first_step
        self.console = Console(stderr=True)
        self.rows: list[list[str]] = []
        self._status = ""
        self._live = Live(console=self.console, refresh_per_second=4, get_renderable=self._render)
        self._last_plain = 0.0
        self._header_printed = False

    def __enter__(self) -> Board:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._status = ""
        self._live.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        if self.console.is_terminal:
            self._live.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """What is going on; without a terminal at most one line each ten seconds."""
        self._status = text
        if not self.console.is_terminal and time.monotonic() - self._last_plain > 10:
            self._last_plain = time.monotonic()
            print(f"  {text}", file=sys.stderr, flush=True)

    def step(self, metrics: Mapping[str, float]) -> None:
        self.rows.append([form.format(metrics[name]) for name, form in COLUMNS.values()])
        self._last_plain = time.monotonic()
        if self.console.is_terminal:
            return
        widths = [max(len(heading), 6) for heading in COLUMNS]
        if not self._header_printed:
            self._header_printed = True
            print("  ".join(h.rjust(w) for h, w in zip(COLUMNS, widths, strict=True)), file=sys.stderr)
        print("  ".join(c.rjust(w) for c, w in zip(self.rows[-1], widths, strict=True)), file=sys.stderr, flush=True)

    def _render(self) -> Table:
        table = Table(
            title=f"step {self.first_step + len(self.rows)}/{self.total_steps}",
            caption=self._status,
            box=None,
            title_justify="left",
        )
        for heading in COLUMNS:
            table.add_column(heading, justify="right")
        for row in self.rows[-MAX_ROWS:]:
            table.add_row(*row)
        return table


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as bars between their own lowest and highest; longer series are averaged down to `width` bars."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
