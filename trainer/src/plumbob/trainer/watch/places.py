"""Where in a run's stored rollouts one can look at what a rule says, and a command that shows it."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from plumbob.trainer.diagnosis.findings import Finding, Place
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.watch.environment_rules import STOPS
from plumbob.trainer.watch.stored_rollouts import Rollout, groups_of

MOST = 3
"""Most rollouts that a finding names."""

Rollouts = Sequence[Rollout]


def with_places(finding: Finding, rollouts: Rollouts, run_dir: Path) -> Finding:
    """The finding with rollouts that show it and a command, as far as it failed and has none yet."""
    if finding.cause is None:
        return finding
    places = finding.places
    if not places and finding.cause in SHOWN:
        places = tuple(SHOWN[finding.cause](rollouts))[:MOST]
    return dataclasses.replace(finding, places=places, command=finding.command or _command(places, rollouts, run_dir))


def _command(places: Sequence[Place], rollouts: Rollouts, run_dir: Path) -> str:
    """Prints the first of the places, or else examines a new run with the same settings."""
    if not places:
        return f"doctor --config {shlex.quote(str(run_dir / 'config.toml'))}"
    first = places[0]
    line = next((r.line for r in rollouts if (r.step, r.task, r.number) == (first.step, first.task, first.rollout)), 0)
    path = trace_files.stored_steps(run_dir).get(first.step)
    if not line or path is None:
        return ""
    read = "zcat" if path.suffix == ".gz" else "cat"
    return f"{read} {shlex.quote(str(path))} | sed -n {line}p | python -m json.tool"


def _cut(stop: str) -> Callable[[Rollouts], list[Place]]:
    return lambda rollouts: [r.place(r.turns[-1] if r.turns else None) for r in rollouts if r.stop == stop]


def _counted(name: str) -> Callable[[Rollouts], list[Place]]:
    return lambda rollouts: [r.place() for r in rollouts if r.metrics.get(name)]


def _failed(rollouts: Rollouts) -> list[Place]:
    return [r.place() for r in rollouts if not r.ok]


def _unread(rollouts: Rollouts) -> list[Place]:
    return [r.place(r.turns[turn]) for r in rollouts for turn, _ in r.unread if turn < len(r.turns)]


def _last_step(rollouts: Rollouts) -> list[Rollout]:
    last = max((r.step for r in rollouts), default=0)
    return [r for r in rollouts if r.step == last]


def _without_calls(rollouts: Rollouts) -> list[Place]:
    return [r.place() for r in _last_step(rollouts) if not r.results]


def _by_length(longest: bool) -> Callable[[Rollouts], list[Place]]:
    def shown(rollouts: Rollouts) -> list[Place]:
        return [r.place() for r in sorted(_last_step(rollouts), key=lambda r: len(r.token_ids), reverse=longest)]

    return shown


def _loops(rollouts: Rollouts) -> list[Place]:
    """Rollouts whose last turn has the fewest different words in its last ones, and the tokens of that end."""
    ends = [(r, r.turns[-1]) for r in rollouts if r.turns and r.turns[-1].size >= END]
    found = []
    for r, turn in ends:
        last = turn.start + turn.size
        end = r.token_ids[last - END : last]
        different = len({end[i : i + NGRAM] for i in range(END - NGRAM + 1)})
        if different < (END - NGRAM + 1) / 2:
            found.append((different, Place(r.step, r.task, r.number, (last - END, last - 1))))
    return [place for _, place in sorted(found, key=lambda pair: pair[0])]


END, NGRAM = 64, 4
"""As in plumbob.trainer.training.rollout_metrics, whose metric leads here."""


def _equal(rollouts: Rollouts) -> list[Place]:
    """The first rollout of groups whose rewards are all equal."""
    return [g[0].place() for g in groups_of(rollouts) if len(g) > 1 and len({r.reward for r in g}) == 1]


def _extreme(rollouts: Rollouts) -> list[Place]:
    """Rollouts whose reward differs most from the mean of their group."""
    apart = []
    for group in groups_of([r for r in rollouts if r.ok and math.isfinite(r.reward)]):
        usual = sum(r.reward for r in group) / len(group)
        apart += [(abs(r.reward - usual), i, r) for i, r in enumerate(group)]
    return [r.place() for _, _, r in sorted(apart, key=lambda pair: -pair[0])]


def _both_ends(rollouts: Rollouts) -> list[Place]:
    return [rollouts[0].place(), rollouts[-1].place()] if rollouts else []


SHOWN: dict[str, Callable[[Rollouts], list[Place]]] = {
    "truncated-turns": _cut("max_turn_tokens"),
    "truncated-context": _cut("max_total_tokens"),
    "truncated-rollouts": lambda rollouts: [
        place for stop, (cause, _) in STOPS.items() if cause == "truncated-rollouts" for place in _cut(stop)(rollouts)
    ],
    "calls-malformed": _counted("rollout/malformed_calls"),
    "calls-in-unread-form": _unread,
    "tools-fail": _counted("rollout/tool_errors"),
    "tools-never-used": lambda rollouts: [r.place() for r in rollouts if not r.results],
    "tools-abandoned": _without_calls,
    "length-collapse": _by_length(longest=False),
    "length-runaway": _by_length(longest=True),
    "degenerate-repetition": _loops,
    "environment-fails": _failed,
    "engine-fails": _failed,
    "environment-hangs": _failed,
    "drops-are-biased": _failed,
    "reward-not-finite": _failed,
    "never-succeeds": _equal,
    "task-solved": _equal,
    "groups-without-variety": _equal,
    "reward-wrong": _equal,
    "few-groups-differ": _equal,
    "gradient-explodes": _extreme,
    "task-order-drifts": _both_ends,
    "reward-hacked": lambda rollouts: [r.place() for r in sorted(_last_step(rollouts), key=lambda r: -r.reward)],
}
"""Cause -> the stored rollouts that show it, the clearest first. Causes about numbers alone are left out."""
