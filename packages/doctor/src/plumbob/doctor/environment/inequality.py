"""What refutes a statement of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

from plumbob.doctor.environment.matrix import alike
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.texts import short

T = TypeVar("T")


@dataclass(frozen=True)
class Evidence:
    """What refutes a statement."""

    text: str
    """The numbers."""
    part: str = ""
    """The reward function or the tool, if one of several shows it."""
    cause: str = ""
    """Id of the cause, if it is a more specific one than the row's."""


def refuted(
    bad: Sequence[T],
    every: Sized,
    text: str,
    first: Callable[[T], str] = lambda _: "",
    *,
    least: int = 1,
    share: float = 0.0,
) -> Evidence | None:
    """Evidence, if `bad` are at least `least` and more than this share of `every`. `first`: ends it, from the first of them.

    Example: refuted(bad, every, "{} results are empty, as in ", str) -> "3 of 48 results are empty, as in 7".
    """
    if len(bad) < least or len(bad) <= share * len(every):
        return None
    return Evidence(text.replace("{}", f"{len(bad)} of {len(every)}", 1) + first(bad[0]))


def otherwise(pairs: Sequence[tuple[Played, Played]], text: str, least: int = 1) -> Evidence | None:
    """Evidence, if the two rollouts of at least so many pairs earned something else."""
    bad = [(a, b) for a, b in pairs if a.ok and b.ok and not alike(a.reward, b.reward)]
    text += f", by up to {max((abs(a.reward - b.reward) for a, b in bad), default=0.0):.3g}: "
    return refuted(bad, pairs, text, lambda one: f"{one[1].reward:.3g} in place of {about(one[0])}", least=least)


def about(played: Played) -> str:
    """A rollout in a few words, for evidence."""
    return f"{played.reward:.3g} for {short(played.last)} in task {played.task.key}"
