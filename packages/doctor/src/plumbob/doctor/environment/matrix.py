"""The matrix: which transcript earns what in which task. Everything is played once, here; what it means is said elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from plumbob.doctor.environment.hands import Hand, deal
from plumbob.doctor.environment.player import Call, Played, Player, Script, Task, Turn
from plumbob.doctor.environment.texts import chosen, squeezed
from plumbob.doctor.environment.transcripts import CHEAP, EMPTY, NEAR, ODD, OTHERS, PERFECT, Known, Turns

MOST_TASKS = 48
"""Number of training tasks with a perfect transcript and an empty reply. If none fails, at most 6% of all do (95%)."""
FEWER_TASKS = 24
"""Number of them in which all other transcripts are played, and of held-out tasks."""
REPEATED = 12
"""Number of them whose transcripts are played in another order, twice each."""
FRESH = 8
"""Number of them whose transcripts are played in a fresh process."""
ODD_TASKS = 3
"""Number of them in which odd texts are played."""
MOST_AT_ONCE = 64
"""Most rollouts that are played at the same time."""
MOST_HANGING = 2
"""Number of rollouts that may hang before no more are played, because each takes a limit of seconds."""
MOST_SECONDS = 240.0
"""Seconds after which no further kind of transcript is begun; what was not played is not judged."""
TOLERANCE = 1e-6
"""Largest difference of two rewards that count as equal."""
REVERSED, TWICE, BESIDE, FRESHLY, HELD, IDEAL = (
    "in another order",
    "at once again",
    "at the same time",
    "in a fresh process",
    "as a held-out task",
    "with the settings for which it is made",
)


@dataclass(frozen=True)
class Result:
    """A tool call of a perfect transcript."""

    task: int
    """Number of the task."""
    call: Call
    shown: str
    """What the conversation shows the model."""
    own: str | None
    """What the tool itself returns; None if it cannot be called alone."""


@dataclass
class Matrix:
    """Rollouts by kind of transcript and number of task."""

    player: Player
    hand: Hand
    cells: dict[str, dict[int, Played]] = field(default_factory=dict)
    beside: list[tuple[str, int, Played]] = field(default_factory=list)
    """(kind, number of the task, rollout) of those that were played at the same time."""
    held_out: Matrix | None = None
    """The same of held-out tasks, with fewer kinds."""
    stopped: str = ""
    """Why not everything was played; "" if it was."""

    def kind(self, name: str) -> dict[int, Played]:
        """The rollouts of a kind that ended without an error."""
        return {i: played for i, played in self.cells.get(name, {}).items() if played.ok}

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

    @cached_property
    def unpaid(self) -> list[int]:
        return [i for i, lift in self.lifts.items() if not lift > TOLERANCE]

    def shares(self, name: str) -> dict[int, float]:
        """What a kind earns in each paid task above an empty reply, as a share of what the perfect transcript does."""
        return {
            i: (p.reward - self.floor(i)) / self.lifts[i]
            for i, p in self.kind(name).items()
            if self.lifts.get(i, 0.0) > TOLERANCE
        }

    @cached_property
    def results(self) -> list[Result]:
        """The tool calls of perfect transcripts, each beside what its tool returns when it is called directly."""
        found = []
        for i, played in self.kind(PERFECT).items():
            told = [m for m in played.messages if m.answers is not None and m.role == "tool"]
            calls = [m.answers for m in told if m.answers is not None]
            own = self.player.direct(self.hand.tasks[i], calls) if calls else []
            found += [Result(i, call, m.text, o) for call, m, o in zip(calls, told, own, strict=True)]
        return found


class _Stop(Exception):
    """Nothing more is played."""


@dataclass
class _Table:
    """Plays kinds of transcripts and keeps what they earn."""

    player: Player
    matrix: Matrix
    began: float
    hanging: int = 0

    def play(self, kind: str, numbers: Sequence[int], make: Callable[[int], Turns | None]) -> None:
        if time.monotonic() - self.began > MOST_SECONDS:
            raise _Stop(f"after {MOST_SECONDS:g} s, before {kind!r}")
        cells = self.matrix.cells.setdefault(kind, {})
        for i in numbers:
            if (turns := make(i)) is not None:
                self.one(cells, i, Script(self.matrix.hand.tasks[i], turns))

    def one(self, cells: dict[int, Played], i: int, script: Script) -> None:
        cells[i] = played = self.player.play(script)
        self.hanging += played.failure == "hangs"
        if self.hanging >= MOST_HANGING:
            raise _Stop(f"{self.hanging} rollouts hung")


def play(player: Player, seed: int = 0) -> Matrix:
    """Play every kind of transcript. `seed`: of the choice of tasks."""
    train = [player.train[i] for i in chosen(len(player.train), MOST_TASKS, seed)]
    matrix = Matrix(player, deal(player, train))
    table = _Table(player, matrix, time.monotonic())
    try:
        _play_all(table)
    except _Stop as reason:
        matrix.stopped = str(reason)
    return matrix


def _play_all(table: _Table) -> None:
    matrix, player = table.matrix, table.player
    hand, every = matrix.hand, range(len(matrix.hand.tasks))
    fewer = chosen(len(every), FEWER_TASKS)
    some = fewer[:REPEATED]
    own = lambda i: hand.turns[i] or None  # noqa: E731 - the shortest name for it
    empty = lambda i: (Turn(),)  # noqa: E731
    both = {PERFECT: own, EMPTY: empty}
    scripts = [(kind, i, turns) for i in some[:FRESH] for kind, make in both.items() if (turns := make(i))]
    fresh = player.play_fresh([Script(hand.tasks[i], turns) for _, i, turns in scripts])
    for kind, make in both.items():
        table.play(kind, every, make)
    for kind, make in both.items():
        for i in reversed(some):
            for how in (REVERSED, TWICE):
                table.play(f"{kind}, {how}", [i], make)
    known = Known(hand, matrix.cells, player.settings.turn_characters)
    for kind, of in {**OTHERS, **CHEAP, **NEAR}.items():
        table.play(kind, fewer, lambda i, of=of: of(known, i))
    for kind, text in ODD.items():
        table.play(kind, fewer[:ODD_TASKS], lambda i, text=text: (Turn(text),))
    _play_as_held_out(table, both, some)
    _play_held_out(table)
    if player.settings.at_once > 1:
        _play_beside(table, fewer)
    for (kind, i, _), played in zip(scripts, fresh() or (), strict=False):
        matrix.cells.setdefault(f"{kind}, {FRESHLY}", {})[i] = played
    if (
        hand.has_oracle
        and len(matrix.paid) < len(matrix.lifts)
        or any(p.reward < 1 for p in matrix.kind(PERFECT).values())
    ):
        ideal = {i: player.play_ideal(hand.tasks[i]) for i in every if hand.turns[i]}
        matrix.cells[f"{PERFECT}, {IDEAL}"] = {i: played for i, played in ideal.items() if played is not None}


def _play_as_held_out(table: _Table, both: dict[str, Callable[[int], Turns | None]], some: Sequence[int]) -> None:
    """Training tasks' data, put and scored as held-out tasks."""
    for kind, make in both.items():
        cells = table.matrix.cells.setdefault(f"{kind}, {HELD}", {})
        for i in some:
            task = table.player.as_held_out(table.matrix.hand.tasks[i]) if table.player.held_out else None
            if task is not None and (turns := make(i)) is not None:
                table.one(cells, i, Script(task, turns))


def _play_held_out(table: _Table) -> None:
    """The held-out tasks themselves: empty replies, perfect transcripts, and these with the answers of other tasks."""
    player, held = table.player, table.player.held_out
    if not held:
        return
    tasks: list[Task] = [held[i] for i in chosen(len(held), FEWER_TASKS)]
    hand = deal(player, tasks, table.matrix.hand)
    table.matrix.held_out = matrix = Matrix(player, hand)
    inner = _Table(player, matrix, table.began, table.hanging)
    every = range(len(tasks))
    inner.play(EMPTY, every, lambda i: (Turn(),))
    inner.play(PERFECT, every, lambda i: hand.turns[i] or None)
    known = Known(hand, matrix.cells, player.settings.turn_characters)
    wrong = (
        "the own calls with another task's answer" if any(len(t) > 1 for t in hand.turns) else "another task's answer"
    )
    inner.play(wrong, every, lambda i: CHEAP[wrong](known, i))


def _play_beside(table: _Table, numbers: Sequence[int]) -> None:
    """As many rollouts as the run has at the same time: several of each task, as in a group, some right and some empty.

    Only transcripts that got the same twice alone: what is random by itself changes here, too. Tools that are slow alone are
    played less often.
    """
    matrix = table.matrix
    steady = [
        (kind, i)
        for i in numbers
        for kind in (PERFECT, EMPTY, "another task's answer")
        if i in matrix.cells.get(kind, {}) and steady_alone(matrix, kind, i)
    ]
    if not steady:
        return
    count = min(table.player.settings.at_once, MOST_AT_ONCE)
    seconds = sum(matrix.cells[kind][i].seconds for kind, i in steady) / len(steady)
    count = min(count, int(60 / max(seconds, 1e-6)))
    picked = (steady * (count // len(steady) + 1))[:count]
    turns = {PERFECT: lambda i: matrix.hand.turns[i], EMPTY: lambda i: (Turn(),)}
    known = Known(matrix.hand, matrix.cells, table.player.settings.turn_characters)
    scripts = []
    for kind, i in picked:
        made = turns[kind](i) if kind in turns else CHEAP[kind](known, i)
        scripts.append(Script(matrix.hand.tasks[i], made or ()))
    for (kind, i), played in zip(picked, table.player.play_at_once(scripts), strict=True):
        matrix.beside.append((kind, i, played))


def steady_alone(matrix: Matrix, kind: str, i: int) -> bool:
    """Whether all rollouts of this transcript that were played alone are the same; true if there is one alone."""
    first = matrix.cells[kind][i]
    again = [matrix.cells.get(f"{kind}, {how}", {}).get(i) for how in (REVERSED, TWICE)]
    return first.ok and all(same(first, other) for other in again if other is not None)


def same(a: Played, b: Played) -> bool:
    """Whether two rollouts of one transcript earned and read the same."""
    return (
        a.ok and b.ok and alike(a.reward, b.reward) and list(map(squeezed, a.results)) == list(map(squeezed, b.results))
    )


def alike(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE
