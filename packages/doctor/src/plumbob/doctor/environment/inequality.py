"""The type of a row of the table: a plain statement that is true in a healthy environment, and the function that refutes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeVar

from plumbob.doctor.environment.matrix import TOLERANCE, Matrix, alike
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.texts import short
from plumbob.doctor.environment.transcripts import EMPTY, PERFECT

T = TypeVar("T")
HELD_OUT = "held-out: "
"""Begins the name of a kind of transcript of held-out tasks."""


@dataclass(frozen=True)
class Evidence:
    """What refutes a statement."""

    text: str
    """The numbers."""
    part: str = ""
    """The reward function or the tool, if one of several shows it."""
    cause: str = ""
    """Id of the cause, if it is a more specific one than the row's."""


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    id: str
    statement: str
    cause: str
    """Id of the cause, if the statement is false."""
    check: Callable[[Matrix], Evidence | None]
    """Evidence that the statement is false; None if it is not."""
    where: Literal["reward", "tool", "tasks"] = "reward"
    """What of the environment's code is to blame."""
    needs: tuple[str, ...] = (PERFECT, EMPTY)
    """Kinds of transcripts without which the statement cannot be examined. See `HELD_OUT`."""

    def lacks(self, matrix: Matrix) -> str:
        """The first kind of transcript that was not played; "" if the statement can be examined."""
        for need in self.needs:
            of = matrix.held_out if need.startswith(HELD_OUT) else matrix
            if of is None or not of.kind(need.removeprefix(HELD_OUT)):
                return need
        return ""


def refuted(
    bad: Sequence[T], every: Sequence[object], text: Callable[[T], str], *, least: int = 1, share: float = 0.0
) -> Evidence | None:
    """Evidence, if `bad` are at least `least` and more than this share of `every`.

    Example: refuted(bad, every, lambda first: f"{{}} results are empty, as in {first}") -> "3 of 48 results are empty, as in 7".
    """
    if len(bad) < least or len(bad) <= share * len(every):
        return None
    return Evidence(text(bad[0]).replace("{}", f"{len(bad)} of {len(every)}", 1))


def otherwise(pairs: Sequence[tuple[Played, Played]], text: str, least: int = 1) -> Evidence | None:
    """Evidence, if the two rollouts of at least so many pairs earned something else."""
    bad = [(a, b) for a, b in pairs if a.ok and b.ok and not alike(a.reward, b.reward)]
    gap = max((abs(a.reward - b.reward) for a, b in bad), default=0.0)

    def said(first: tuple[Played, Played]) -> str:
        a, b = first
        return f"{text}, by up to {gap:.3g}: {b.reward:.3g} in place of {a.reward:.3g} in task {b.task.key}"

    return refuted(bad, pairs, said, least=least)


def spread_of(rewards: Iterable[float]) -> str:
    """The range of rewards, in words."""
    known = list(rewards)
    if not known:
        return "nothing"
    low, high = min(known), max(known)
    return f"{low:.3g}" if high - low <= TOLERANCE else f"{low:.3g} to {high:.3g} (mean {fmean(known):.3g})"


def about(played: Played) -> str:
    """A rollout in a few words, for evidence."""
    return f"{played.reward:.3g} for {short(played.last)} in task {played.task.key}"
