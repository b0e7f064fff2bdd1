"""The matrix: which transcript earns what in which task. Everything is played once, here; what it means is said elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from plumbob.doctor.environment.player import Call, Played, Player, Script, Turn
from plumbob.doctor.environment.texts import chosen, short, squeezed
from plumbob.doctor.environment.transcripts import EMPTY, LATER, ODD, PERFECT, WRONG, Hand, Known, Turns, deal

T = TypeVar("T")
Make = Callable[[int], Turns | None]
MOST_TASKS = 48
"""Number of training tasks with a perfect transcript and an empty reply. If none fails, at most 6% of all do (95%)."""
FEWER_TASKS = 24
"""Number of them in which all other transcripts are played, and of held-out tasks."""
REPEATED = 12
"""Number of them whose transcripts are played again, in the opposite order."""
ODD_TASKS = 3
"""Number of them in which odd texts are played."""
MOST_AT_ONCE = 256
"""Most rollouts that are played at the same time."""
MOST_HANGING = 2
"""Number of rollouts that may hang before no more are played, because each takes a limit of seconds."""
MOST_SECONDS = 240.0
"""Seconds after which no further kind of transcript is begun; what was not played is not judged."""
TOLERANCE = 1e-6
"""Largest difference of two rewards that count as equal."""
AGAIN, BESIDE = "again", "when they are played at the same time"


@dataclass(frozen=True)
class Result:
    """A tool call of a perfect transcript."""

    task: int
    """Number of the task."""
    call: Call
    shown: str
    """What the conversation shows the model."""
    own: str
    """What the tool itself returns; the same as `shown` if it cannot be called alone."""
    compared: bool
    """Whether it can."""


class _Stop(Exception):
    """Nothing more is played."""


@dataclass
class Matrix:
    """Rollouts by kind of transcript and number of task."""

    player: Player
    hand: Hand
    cells: dict[str, dict[int, Played]] = field(default_factory=dict)
    scripts: dict[tuple[str, int], Turns] = field(default_factory=dict)
    """(kind, number of the task) -> what was said."""
    beside: list[tuple[Played, Played]] = field(default_factory=list)
    """Pairs of rollouts of one transcript, the first of which was played alone, and the second at the same time as others."""
    held_out: Matrix | None = None
    """The same of held-out tasks, with fewer kinds."""
    stopped: str = ""
    """Why not everything was played; "" if it was."""
    ends: float = field(default_factory=lambda: time.monotonic() + MOST_SECONDS)
    """Time after which no further kind is begun."""
    hanging: int = 0
    seconds: float = 0.0
    """That the rollouts took which were played one after another."""

    def play(self, kind: str, numbers: Iterable[int], make: Make) -> None:
        """Play a kind in these tasks. `make`: the turns, by number of the task; None where the kind cannot be played."""
        if time.monotonic() > self.ends:
            raise _Stop(f"{MOST_SECONDS:g} s were over before {kind!r}")
        cells = self.cells.setdefault(kind, {})
        for i in numbers:
            if (turns := make(i)) is None:
                continue
            self.scripts[kind, i] = turns
            began = time.monotonic()
            (cells[i],) = self.player.play([Script(self.hand.tasks[i], turns)])
            self.seconds += time.monotonic() - began
            self.hanging += cells[i].failure == "hangs"
            if self.hanging >= MOST_HANGING:
                raise _Stop(f"{self.hanging} rollouts hung")

    def kind(self, name: str) -> dict[int, Played]:
        """The rollouts of a kind that ended without an error."""
        return {i: played for i, played in self.cells.get(name, {}).items() if played.ok}

    @property
    def rollouts(self) -> int:
        """Number of rollouts that were played, but for those of held-out tasks."""
        return sum(map(len, self.cells.values())) + len(self.beside)

    def floor(self, i: int) -> float:
        """What an empty reply earns in a task; NaN if it failed."""
        return self.cells[EMPTY][i].reward if i in self.cells[EMPTY] else float("nan")

    @cached_property
    def lifts(self) -> dict[int, float]:
        """What the perfect transcript of each task earns above an empty reply."""
        empty = self.kind(EMPTY)
        return {i: p.reward - empty[i].reward for i, p in self.kind(PERFECT).items() if i in empty}

    @cached_property
    def paid(self) -> list[int]:
        """The tasks whose perfect transcript earns more than an empty reply."""
        return [i for i, lift in self.lifts.items() if lift > TOLERANCE]

    def shares(self, name: str) -> dict[int, float]:
        """What a kind earns in each paid task above an empty reply, as a share of what the perfect transcript does."""
        paid = {i: p for i, p in self.kind(name).items() if i in self.paid}
        return {i: (p.reward - self.floor(i)) / self.lifts[i] for i, p in paid.items()}

    @cached_property
    def again(self) -> dict[tuple[str, int], tuple[Played, Played]]:
        """(kind, number of the task) -> two rollouts of one transcript, the second of which was played later, after other ones."""
        kinds = (PERFECT, EMPTY)
        return {(k, i): (self.cells[k][i], again) for k in kinds for i, again in self.kind(f"{k}, {AGAIN}").items()}

    @cached_property
    def results(self) -> list[Result]:
        """The tool calls of perfect transcripts, each beside what its tool returns when it is called directly."""
        return [result for i in self.kind(PERFECT) for result in self.called(i)]

    def called(self, i: int) -> list[Result]:
        """Call the tools of a perfect transcript directly."""
        messages = self.cells[PERFECT][i].messages
        told = [(m.answers, m.text) for m in messages if m.answers is not None and m.role == "tool"]
        own = self.player.direct(self.hand.tasks[i], [call for call, _ in told]) if told else []
        return [Result(i, *one, one[1] if o is None else o, o is not None) for one, o in zip(told, own, strict=True)]


def play(player: Player, seed: int = 0) -> Matrix:
    """Play every kind of transcript. `seed`: of the choice of tasks."""
    tasks = [player.train[i] for i in chosen(len(player.train), MOST_TASKS, seed)]
    matrix = Matrix(player, deal(player, tasks))
    try:
        _play_all(matrix)
    except _Stop as reason:
        matrix.stopped = str(reason)
    return matrix


def _first(hand: Hand) -> dict[str, Make]:
    return {PERFECT: lambda i: hand.turns[i] or None, EMPTY: lambda i: (Turn(),)}


def _play_all(matrix: Matrix) -> None:
    player, hand = matrix.player, matrix.hand
    fewer = chosen(len(hand.tasks), FEWER_TASKS)
    for kind, make in _first(hand).items():
        matrix.play(kind, range(len(hand.tasks)), make)
    for kind, make in reversed(_first(hand).items()):
        matrix.play(f"{kind}, {AGAIN}", reversed(fewer[:REPEATED]), make)
    known = Known(hand, matrix.cells)
    for kind, make in LATER.items():
        matrix.play(kind, fewer, lambda i, make=make: make(known, i))
    for kind, text in ODD.items():
        matrix.play(kind, fewer[:ODD_TASKS], lambda i, text=text: (Turn(text),))
    if player.held_out:
        _play_held_out(matrix)
    if player.settings.at_once > 1:
        _play_beside(matrix)


def _play_held_out(train: Matrix) -> None:
    """The held-out tasks themselves: empty replies and perfect transcripts."""
    player = train.player
    tasks = [player.held_out[i] for i in chosen(len(player.held_out), FEWER_TASKS)]
    train.held_out = matrix = Matrix(player, deal(player, tasks, train.hand), ends=train.ends)
    for kind, make in _first(matrix.hand).items():
        matrix.play(kind, range(len(tasks)), make)


def _play_beside(matrix: Matrix) -> None:
    """As many rollouts as the run has at the same time: several of each task, as in a group, some right, wrong and empty.

    Only transcripts that got the same twice alone: what is random by itself changes here, too. What takes long is played less
    often.
    """
    kinds = (PERFECT, PERFECT, EMPTY, WRONG)
    numbers = sorted(matrix.cells[WRONG] or matrix.cells[EMPTY])[: MOST_AT_ONCE // len(kinds)]
    random = {at for at, (a, b) in matrix.again.items() if not same(a, b)}
    steady = [(k, i) for i in numbers for k in kinds if i in matrix.kind(k) and (k, i) not in random]
    quick = int(MOST_SECONDS / 4 * matrix.rollouts / max(matrix.seconds, 1e-6))
    count = min(matrix.player.settings.at_once, MOST_AT_ONCE, quick)
    picked = (steady * count)[:count]
    scripts = [Script(matrix.hand.tasks[i], matrix.scripts[kind, i]) for kind, i in picked]
    played = matrix.player.play(scripts) if scripts else []
    matrix.beside = [(matrix.cells[kind][i], one) for (kind, i), one in zip(picked, played, strict=True)]


def same(a: Played, b: Played) -> bool:
    """Whether two rollouts of one transcript earned and read the same."""
    return a.ok and b.ok and alike(a.reward, b.reward) and [*map(squeezed, a.results)] == [*map(squeezed, b.results)]


def alike(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE


# What refutes a statement


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
