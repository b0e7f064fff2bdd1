"""The progress of a run on the screen: a live table on a terminal, one plain line per step elsewhere.

Progress goes to stderr. The summary at the end goes to stdout, because it is the result.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

SPARKS, PLAIN_SPARKS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
"""Bars of a sparkline from low to high, and those for a screen whose encoding lacks them."""

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
"""Heading of a column -> (name of its metric, format of its numbers)."""

SFT_COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", "{:.0f}"),
    "loss": ("sft/loss", "{:.4f}"),
    "epoch": ("sft/epoch", "{:.2f}"),
    "tokens": ("train/tokens", "{:,.0f}"),
    "entropy": ("policy/entropy", "{:.3f}"),
    "grad": ("optimizer/grad_norm", "{:.2g}"),
    "rate": ("optimizer/learning_rate", "{:.1e}"),
    "train s": ("time/train", "{:.1f}"),
    "tok/s": ("time/train_tokens_per_second", "{:,.0f}"),
}
"""The same for a run of `sft`."""

PRIORITY = ("step", "reward", "no signal", "grad", "turns", "entropy", "cut", "roll s", "train s", "gap", "tok/s")
"""Headings by importance: a live table that is wider than the terminal leaves out the last ones."""

SFT_PRIORITY = ("step", "loss", "epoch", "grad", "tokens", "rate", "train s", "entropy", "tok/s")
"""The same for a run of `sft`."""

GAP = 2
"""Blanks between two columns of the live table."""

MAX_ROWS = 20
"""Most rows of the live table; older steps are not shown."""

MAX_REPLY = 240
"""Most characters that are shown of each turn of a rollout."""

MAX_PROMPT = 120
"""Most characters that are shown of a rollout's prompt, from its end."""


class Board:
    """The progress table, a context manager: `status` shows what the run is doing, `step` adds a finished step's row.

    `completions`: number of rollouts that are printed with each row. `imitates`: the run is one of `sft`.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        completions: int = 0,
        imitates: bool = False,
        file: IO[str] | None = None,
    ) -> None:
        self.total_steps = total_steps
        self.finished = first_step
        self.completions = completions
        self.columns, self.priority = (SFT_COLUMNS, SFT_PRIORITY) if imitates else (COLUMNS, PRIORITY)
        self.console = Console(stderr=file is None, file=file)
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
        """Print a line that stays on the screen."""
        if self.console.is_terminal:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            self._print(text)

    def status(self, text: str) -> None:
        """Show what the run is doing; without a terminal, print at most one line every ten seconds."""
        self._status = text
        if not self.console.is_terminal and time.monotonic() - self._last_plain > 10:
            self._last_plain = time.monotonic()
            self._print(f"  {text}")

    def step(self, metrics: Mapping[str, float], traces: Sequence[Any] = ()) -> None:
        """Add a finished step's row. A missing metric is shown as "-". `traces`: verifiers' traces of its rollouts."""
        self.finished = int(metrics.get("step", self.finished + 1))
        self.rows.append(
            [form.format(metrics[name]) if name in metrics else "-" for name, form in self.columns.values()]
        )
        self._last_plain = time.monotonic()
        if not self.console.is_terminal:
            widths = [max(len(heading), 6) for heading in self.columns]
            if not self._header_printed:
                self._header_printed = True
                self._print("  ".join(h.rjust(w) for h, w in zip(self.columns, widths, strict=True)))
            self._print("  ".join(c.rjust(w) for c, w in zip(self.rows[-1], widths, strict=True)))
        shown = min(self.completions, len(traces))
        for i in range(shown):  # evenly spaced, so that they come from different groups
            self.note(completion(traces[i * len(traces) // shown]))

    def _print(self, line: str) -> None:
        print(line, file=self.console.file, flush=True)

    def _render(self) -> Group:
        rows = self.rows[-MAX_ROWS:]
        shown = columns_that_fit(list(self.columns), self.priority, rows, self.console.width)
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        for i in shown:
            table.add_column(list(self.columns)[i], justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[i] for i in shown))
        heading = Text(f"step {self.finished}/{self.total_steps}", "italic", no_wrap=True, overflow="crop")
        return Group(heading, table, Text(self._status, "dim", no_wrap=True, overflow="crop"))


def columns_that_fit(
    headings: Sequence[str], priority: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[int]:
    """Indices of the most important columns that fit side by side into `width` characters, in the table's order."""
    shown: list[int] = []
    used = 0
    for heading in priority:
        i = headings.index(heading)
        used += max(len(heading), *(len(row[i]) for row in rows), 0) + (GAP if shown else 0)
        if used > width:
            break
        shown.append(i)
    return sorted(shown)


def completion(trace: Any) -> str:
    """A rollout in a few lines: reward, why it ended, the end of its prompt, and each sampled turn with tool calls."""
    lines = [f"    reward {trace.reward:.3f}, {trace.stop_condition or 'ended'}: {_tail(_prompt(trace), MAX_PROMPT)}"]
    for message in trace.assistant_messages:
        calls = [f"{call.name}({call.arguments})" for call in message.tool_calls or []]
        lines.append("      > " + _head(" ".join([message.content or "", *calls]), MAX_REPLY))
    return "\n".join(lines)


def _prompt(trace: Any) -> str:
    """The last text message before the policy's first turn."""
    given = itertools.takewhile(lambda node: not node.sampled, trace.nodes)
    texts = [node.message.content for node in given]
    return next((text for text in reversed(texts) if isinstance(text, str)), "")


def _head(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def _tail(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else "..." + line[3 - length :]


def bars_for(stream: IO[str]) -> str:
    """The bars of a sparkline that this stream can write."""
    try:
        SPARKS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_SPARKS
    return SPARKS


def sparkline(values: Sequence[float], width: int = 60, bars: str = SPARKS) -> str:
    """Values as bars, scaled from the lowest to the highest. More than `width` values are averaged to `width` bars."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((value - low) * scale)] for value in values)
