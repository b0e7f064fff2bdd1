"""Curves of arms over steps, as SVG files that GitHub shows, and as lines of bars."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from plumbob.lab.criteria.evaluate import Runs
from plumbob.lab.files import sections

METRICS = {"reward": "reward/mean", "gradient_norm": "optimizer/grad_norm", "largest_advantage": "advantage/largest"}
"""Name of a plot's file -> the metric it shows."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that people with colour blindness tell apart (Okabe and Ito, 2008)."""
DASHES = ("", "6 3", "2 2", "8 3 2 3", "1 3", "10 4")
BARS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 56, 16, 40, 36


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A line of bars, the lowest value the lowest bar; "" without values."""
    if not values:
        return ""
    size = max(1, math.ceil(len(values) / width))
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    means = [fmean(part) for part in parts]
    low, high = min(means), max(means)
    return "".join(BARS[round((m - low) / (high - low) * 7)] if high > low else BARS[3] for m in means)


def write_plots(folder: Path, runs: Runs) -> list[Path]:
    """Write one SVG file for each of `METRICS` that the runs have; returns their paths."""
    written = []
    for name, metric in METRICS.items():
        curves = {arm: band([run.series(metric) for run in by_seed.values()]) for arm, by_seed in runs.items()}
        curves = {arm: points for arm, points in curves.items() if points}
        if curves:
            sections.write(path := folder / f"{name}.svg", svg(f"{metric} by step", curves))
            written.append(path)
    return written


def band(series: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float, float, float]]:
    """(step, mean, smallest, largest) over runs, for every step that at least one of them has."""
    at: dict[int, list[float]] = defaultdict(list)
    for points in series:
        for step, value in points:
            at[step].append(value)
    return [(step, fmean(v), min(v), max(v)) for step, v in sorted(at.items())]


def svg(title: str, curves: Mapping[str, Sequence[tuple[int, float, float, float]]]) -> str:
    """A picture of `band`s: each a line, with the range over runs as an area. It has its own light background."""
    steps = [point[0] for points in curves.values() for point in points]
    low = min(point[2] for points in curves.values() for point in points)
    high = max(point[3] for points in curves.values() for point in points)
    if low == high:
        low, high = low - 0.5, high + 0.5
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> str:
        return f"{LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT):.1f}"

    def y(value: float) -> str:
        return f"{HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for i in range(5):
        value = low + (high - low) * i / 4
        parts.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value)}" dy="4" text-anchor="end" fill="#333333">{value:.3g}</text>')
    for step in sorted({first, round((first + last) / 2), last}):
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - 14}" text-anchor="middle" fill="#333333">{step}</text>')
    legend = LEFT
    for i, (arm, points) in enumerate(curves.items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
        area = [f"{x(s)} {y(top)}" for s, _, _, top in points] + [f"{x(s)} {y(b)}" for s, _, b, _ in reversed(points)]
        line = "L".join(f"{x(step)} {y(mean)}" for step, mean, _, _ in points)
        parts.append(f'<path d="M{"L".join(area)}Z" fill="{colour}" fill-opacity="0.15"/>')
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        parts.append(f'<path d="M{legend} 18h24" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        parts.append(f'<text x="{legend + 30}" y="22" fill="#111111">{escape(arm)}</text>')
        legend += 48 + 8 * len(arm)
    parts.append(f'<text x="{WIDTH - RIGHT}" y="22" text-anchor="end" fill="#111111">{escape(title)}</text></svg>')
    return "\n".join(parts) + "\n"
