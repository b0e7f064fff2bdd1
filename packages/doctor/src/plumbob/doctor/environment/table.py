"""The table of what is true in a healthy environment, in the order in which its rows explain each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from plumbob.doctor.environment.grading import ANSWERS, ENDING, PAID
from plumbob.doctor.environment.inequality import HELD_OUT, Evidence, Inequality
from plumbob.doctor.environment.matrix import Matrix, play
from plumbob.doctor.environment.own_data import OWN_DATA
from plumbob.doctor.environment.player import Player
from plumbob.doctor.environment.state import STATE
from plumbob.doctor.environment.tasks import EVALUATION, TASKS
from plumbob.doctor.environment.tools import TOOLS

TABLE: tuple[Inequality, ...] = (*ENDING, *STATE, *PAID, *EVALUATION, *TASKS, *TOOLS, *OWN_DATA, *ANSWERS)
"""The first row that is refuted names the cause: what depends on others is asked after them, and what is certain first."""


@dataclass(frozen=True)
class Violation:
    """A row that is refuted."""

    row: Inequality
    evidence: Evidence
    place: str
    """Where the environment's code is that is to blame, as "file.py:12 Class.function"; "" if it is unknown."""


@dataclass
class Examination:
    """What was found of an environment."""

    violations: list[Violation] = field(default_factory=list)
    """In the order of the table: the first one names the cause."""
    held: list[Inequality] = field(default_factory=list)
    """The rows that are not refuted."""
    not_examined: dict[str, str] = field(default_factory=dict)
    """Id of a row -> why it could not be examined."""
    rollouts: int = 0


def examine(player: Player, seed: int = 0, meanwhile: Callable[[], object] = lambda: None) -> Examination:
    """Play an environment and examine it. `seed`: of the choice of tasks. `meanwhile`: what to do while others play."""
    return judge(play(player, seed, meanwhile))


def judge(matrix: Matrix) -> Examination:
    """Examine what was played."""
    found = Examination()
    found.rollouts = sum(map(len, matrix.cells.values())) + len(matrix.beside)
    for row in TABLE:
        if missing := row.lacks(matrix):
            none = missing.startswith(HELD_OUT) and not matrix.player.held_out
            why = "there are no held-out tasks" if none else f"{missing} could not be played"
            found.not_examined[row.id] = matrix.stopped or why
            continue
        try:
            evidence = row.check(matrix)
        except Exception as error:  # one check that fails must not take the others with it
            found.not_examined[row.id] = f"the check failed: {type(error).__name__}: {error}"
            continue
        if evidence is None:
            found.held.append(row)
        else:
            where = matrix.player.place(row.where, evidence.part) if row.where else ""
            found.violations.append(Violation(row, evidence, where))
    return found


def lines(found: Examination) -> Iterator[str]:
    """What was found, a line for each violation."""
    for violation in found.violations:
        yield f"{violation.row.cause}: not true: {violation.row.statement}. {violation.evidence.text}" + (
            f" [{violation.place}]" if violation.place else ""
        )
