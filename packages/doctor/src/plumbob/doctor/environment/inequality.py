"""The type of a row of the table: a plain statement that is true in a healthy environment, and the function that refutes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from plumbob.doctor.environment.matrix import TOLERANCE, Matrix
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.texts import short

Where = Literal["reward", "tool", "oracle", "tasks", ""]


@dataclass(frozen=True)
class Evidence:
    """What refutes a statement."""

    text: str
    """The numbers."""
    example: Played | None = None
    """One rollout that shows it."""
    part: str = ""
    """The reward function or the tool, if one of several shows it."""


@dataclass(frozen=True)
class Inequality:
    """One row of the table."""

    id: str
    statement: str
    cause: str
    """Id of the cause, if the statement is false."""
    check: Callable[[Matrix], Evidence | None]
    """Evidence that the statement is false; None if it is not."""
    where: Where = "reward"
    """What of the environment's code is to blame."""
    needs: tuple[str, ...] = ()
    """Kinds of transcripts without which the statement cannot be examined. See `HELD_OUT`."""

    def lacks(self, matrix: Matrix) -> str:
        """The first kind of transcript that was not played; "" if the statement can be examined."""
        for need in self.needs:
            of = matrix.held_out if need.startswith(HELD_OUT) else matrix
            if of is None or not of.kind(need.removeprefix(HELD_OUT)):
                return need
        return ""


def refuted(
    bad: Sequence[object],
    every: Sequence[object],
    text: str,
    example: Played | Sequence[Played] | None = None,
    part: str = "",
    *,
    least: int = 1,
    share: float = 0.0,
) -> Evidence | None:
    """Evidence, if `bad` are at least `least` and more than this share of `every`.

    Example: refuted(bad, every, "{} results are empty") -> "3 of 48 results are empty". Of several examples the first is kept.
    """
    if len(bad) < least or len(bad) <= share * len(every):
        return None
    kept = next(iter(example), None) if isinstance(example, Sequence) else example
    return Evidence(text.replace("{}", f"{len(bad)} of {len(every)}", 1), kept, part)


HELD_OUT = "held-out: "
"""Begins the name of a kind of transcript of held-out tasks."""
Row = tuple[str, str, str, Callable[[Matrix], Evidence | None]]
"""(id, statement, cause, check)."""


def rows(where: Where, *needs: str) -> Callable[..., tuple[Inequality, ...]]:
    """Makes rows that blame the same part of an environment and need the same transcripts."""
    return lambda *given: tuple(Inequality(*row, where, needs) for row in given)


def spread_of(rewards: Iterable[float]) -> str:
    """The range of rewards, in words."""
    known = list(rewards)
    if not known:
        return "nothing"
    low, high = min(known), max(known)
    return f"{low:.3g}" if high - low <= TOLERANCE else f"{low:.3g} to {high:.3g} (mean {fmean(known):.3g})"


def equal(rewards: Sequence[float]) -> bool:
    return bool(rewards) and max(rewards) - min(rewards) <= TOLERANCE


def about(played: Played) -> str:
    """A rollout in a few words, for evidence."""
    return f"{played.reward:.3g} for {short(played.last)} in task {played.task.key}"
