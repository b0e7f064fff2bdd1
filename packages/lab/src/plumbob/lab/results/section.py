"""The results section of a hypothesis file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from plumbob.lab.criteria.evaluate import Outcome, Runs
from plumbob.lab.criteria.statistics import Effect, one_sample
from plumbob.lab.files.hypothesis import Hypothesis
from plumbob.lab.files.tables import arrow, markdown, number
from plumbob.lab.results.plot import sparkline
from plumbob.lab.run_files import mean
from plumbob.lab.runs.plan import COMMANDS, Planned
from plumbob.lab.verdict import Verdict


def results_markdown(
    hypothesis: Hypothesis,
    verdict: Verdict,
    runs: Runs,
    planned: Sequence[Planned],
    cautions: Sequence[str],
    plots: Sequence[str],
    folder: Path,
    link: str,
) -> str:
    """What lab writes between the markers: verdict, criteria, arms, runs, plots.

    `plots` and `link`: links from the file to the plots, and to `folder`, which holds the experiment's files.
    """
    parts = [
        f"**Verdict: {verdict.status}** (confidence {verdict.confidence}, {verdict.seeds} seeds): {verdict.evidence}.",
        *(f"**Caution:** {caution}." for caution in cautions),
        _criteria(verdict),
        _arms(hypothesis, runs),
        *(
            f"![{Path(plot).stem.replace('_', ' ')} by step, each arm's mean and range over seeds]({plot})"
            for plot in plots
        ),
        _runs(planned),
        _commands(planned),
        *_taken(planned, folder.name),
        f"Files: run directories, logs, plots and `verdict.json` in [{link.removeprefix('../')}]({link}/).",
    ]
    if (probed := folder / "doctor.md").is_file():
        parts.append(probed.read_text(encoding="utf-8").strip())
    return "\n\n".join(parts)


def _criteria(verdict: Verdict) -> str:
    rows = [
        (
            title,
            f"`{o.text}`",
            number(o.left),
            number(o.right),
            _effect(o),
            _p(o),
            o.word + (f" ({o.note})" if o.note else ""),
        )
        for title, outcomes in (("validated if", verdict.for_it), ("invalidated if", verdict.against_it))
        for o in outcomes
    ]
    columns = ("", "criterion", "left", "right", "difference [95% interval]", "p", "outcome")
    return markdown(columns, rows) if rows else "The hypothesis has no criteria."


def _effect(outcome: Outcome) -> str:
    return "-" if outcome.effect is None else f"{outcome.effect.mean:+.4g}" if outcome.every else str(outcome.effect)


def _p(outcome: Outcome) -> str:
    return "-" if outcome.p is None else f"{outcome.p:.2g}"


MEASURES = {
    "reward, first 5 steps": lambda run: run.evaluated("before", "reward/mean"),
    "reward, last 5 steps": lambda run: run.evaluated("after", "reward/mean"),
    "held out before (greedy)": lambda run: run.evaluated("before", "eval/greedy"),
    "held out after (greedy)": lambda run: run.evaluated("after", "eval/greedy"),
    "largest advantage": lambda run: max((v for _, v in run.series("advantage/largest")), default=None),
    "largest gradient norm": lambda run: max((v for _, v in run.series("optimizer/grad_norm")), default=None),
    "groups without a signal": lambda run: mean([v for _, v in run.series("groups/zero_signal_share")]),
}
"""Row of the table of arms -> the number of one run."""


def _arms(hypothesis: Hypothesis, runs: Runs) -> str:
    columns = ("mean over seeds [95% interval]", *hypothesis.arms)
    rows = []
    for title, measure in MEASURES.items():
        by_arm = [[v for run in runs[arm].values() if (v := measure(run)) is not None] for arm in hypothesis.arms]
        if any(by_arm):
            rows.append((title, *(_interval(values) for values in by_arm)))
    return markdown(columns, rows)


def _interval(values: Sequence[float]) -> str:
    if not values:
        return "-"
    effect: Effect = one_sample(values)
    if not math.isfinite(effect.low) or effect.low == effect.high:
        return number(effect.mean)
    return f"{effect.mean:.4g} [{effect.low:.4g}, {effect.high:.4g}]"


def _runs(planned: Sequence[Planned]) -> str:
    arms = [run.arm for run in planned]
    rows = [
        (
            run.arm,
            run.seed,
            len(run.files.rows),
            arrow(run.files.evaluated("before", "reward/mean"), run.files.evaluated("after", "reward/mean")),
            arrow(run.files.evaluated("before", "eval/greedy"), run.files.evaluated("after", "eval/greedy")),
            f"`{sparkline([v for _, v in run.files.series('reward/mean')])}`",
            ", ".join(run.files.warnings) or "-",
        )
        for run in sorted(planned, key=lambda run: (arms.index(run.arm), run.seed))
    ]
    columns = (
        "arm",
        "seed",
        "steps",
        "reward, first 5 -> last 5",
        "held out (greedy)",
        "reward by step",
        "warnings of the watch",
    )
    return markdown(columns, rows)


def _commands(planned: Sequence[Planned]) -> str:
    seed = min((run.seed for run in planned), default=0)
    shown = "\n".join(run.shown for run in planned if run.seed == seed)
    return (
        f"Commands of seed {seed}, each also with `--output-dir` and `--run-name`; `{COMMANDS}` has those of all seeds:"
        f"\n\n```\n{shown}\n```"
    )


def _taken(planned: Sequence[Planned], own: str) -> list[str]:
    """A sentence about runs whose records are those of a run of the same command in another folder than `own`."""
    places = {run.files.name: Path(run.files.options.get("output_dir", own)).name for run in planned}
    taken = [f"{name} ({place})" for name, place in places.items() if place != own]
    return [f"Run once for another hypothesis with the same command: {', '.join(taken)}."] if taken else []
