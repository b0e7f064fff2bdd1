"""Each row of the environment's table is refuted by a tiny environment with one fault, and by none without."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.environment.matrix import play
from plumbob.doctor.environment.player import Call, Message, Played, RunSettings, Script, Task, Turn
from plumbob.doctor.environment.table import TABLE, judge
from plumbob.doctor.environment.transcripts import OTHER_WORDS
from plumbob.doctor.findings import Finding, Verdict

WORDS = (
    *["amber", "apple", "arrow", "basin", "beach", "berry", "bread", "brick", "bridge", "brush"],
    *["cabin", "candle", "canyon", "castle", "cedar", "chair", "cherry", "cloud"],
)
RULES = (
    "Look up the start key with the tool, then each next key that it names. End with the value alone, on the last line."
)


RUN = RunSettings(at_once=16, taken=200)


class Hang(Exception):
    """Stands for code that does not return."""


def make_tasks(split: str, count: int) -> list[Task]:
    """Tasks with a chain of one to three keys, of which the last has the value."""
    draw, made = random.Random(split), []
    for number in range(count):
        keys = [str(draw.randint(1000, 9999)) for _ in range(number % 3 + 1)]
        word = draw.choice(WORDS)
        story = f"The door of room {keys[0]} is made of {draw.choice(WORDS)} and of {draw.choice(WORDS)}, as all know."
        table = {key: f"next={after}" for key, after in itertools.pairwise(keys)} | {keys[-1]: f"value={word}"}
        fields = {"answer": word, "table": table, "story": story}
        made.append(Task(f"{split}-{number}", split, fields, f"Start key: {keys[0]}"))  # type: ignore[arg-type]
    return made


def changed(task: Task, **fields: Any) -> Task:
    """The task with other data."""
    return dataclasses.replace(task, fields=dict(task.fields) | fields)


def last(messages: Sequence[Message]) -> str:
    return next((m.text for m in reversed(messages) if m.sampled), "")


def right(task: Task, messages: Sequence[Message]) -> float:
    """1 if the last line is the answer."""
    return float(last(messages).split("\n")[-1] == task.fields["answer"])


def own_oracle(toy: Toy, task: Task) -> tuple[Turn, ...] | str | None:
    return (*(Turn("", (Call("find", {"key": key}),)) for key in task.fields["table"]), Turn(task.fields["answer"]))


def own_opening(toy: Toy, task: Task) -> list[tuple[str, str]]:
    return [("system", RULES), ("user", task.prompt)]


@dataclass
class Toy:
    """An environment whose parts can be replaced, as a player."""

    grade: Callable[[Toy, Task, list[Message]], float | dict[str, float]] = lambda toy, task, said: right(task, said)
    find: Callable[[Toy, Task, str], str] = lambda toy, task, key: task.fields["table"].get(key, "unknown key")
    shown: Callable[[Toy, Task, str], str] = lambda toy, task, result: result
    opening: Callable[[Toy, Task], list[tuple[str, str]]] = own_opening
    oracle_of: Callable[[Toy, Task], tuple[Turn, ...] | str | None] = own_oracle
    train: list[Task] = field(default_factory=lambda: make_tasks("train", 90))
    held_out: list[Task] = field(default_factory=lambda: make_tasks("held-out", 16))
    settings: RunSettings = RUN
    state: dict[str, Any] = field(default_factory=dict)

    def oracle(self, task: Task) -> tuple[Turn, ...] | str | None:
        return self.oracle_of(self, task)

    def _turns(self, script: Script) -> Iterator[Played]:
        """Yields after each turn, and at last what the rollout is."""
        task = script.task
        self.state["now"], self.state["open"] = task, self.state.get("open", 0) + 1
        messages = [Message(role, text) for role, text in self.opening(self, task)]
        try:
            for turn in script.turns:
                messages.append(Message("assistant", turn.text, turn.calls, sampled=True))
                yield Played(task, math.nan)
                for call in turn.calls:
                    result = self.shown(self, task, self.find(self, task, call.arguments["key"]))
                    messages.append(Message("tool", result, answers=call))
                if not turn.calls:
                    break
            parts = self.grade(self, task, messages)
            parts = parts if isinstance(parts, dict) else {"correct": parts}
            reward, failure = sum(parts.values()), None if math.isfinite(sum(parts.values())) else "not-finite"
            yield Played(task, reward, parts, tuple(messages), failure)  # type: ignore[arg-type]
        except (Hang, ValueError) as error:
            failure = "hangs" if isinstance(error, Hang) else "fails"
            yield Played(task, math.nan, {}, tuple(messages), failure, str(error))  # type: ignore[arg-type]
        finally:
            self.state["open"] -= 1

    def play(self, scripts: Sequence[Script]) -> list[Played]:
        running = {number: self._turns(script) for number, script in enumerate(scripts)}
        found: dict[int, Played] = {}
        while running:
            for number, turns in list(running.items()):
                if (played := next(turns, None)) is None:
                    del running[number]
                else:
                    found[number] = played
        return [found[number] for number in range(len(scripts))]

    def direct(self, task: Task, calls: Sequence[Call]) -> list[str | None]:
        return [self.find(self, task, call.arguments["key"]) for call in calls]

    def place(self, kind: str, name: str = "") -> str:
        return f"toy.py:1 {kind}"


def pays(when: Callable[[Task, list[Message]], bool], reward: float = 1.0) -> Callable[..., float]:
    """Right answers are paid, and so is what fits `when`."""
    return lambda toy, task, said: reward if when(task, said) else right(task, said)


def counted(toy: Toy, name: str = "count") -> int:
    toy.state[name] = toy.state.get(name, 0) + 1
    return toy.state[name]


def raises(error: Exception) -> Any:
    raise error


def busy(toy: Toy, task: Task, key: str) -> str:
    return raises(ValueError("too many sessions")) if toy.state["open"] > 8 else task.fields["table"][key]


def another_key(toy: Toy, task: Task, result: str) -> str:
    table = task.fields["table"]
    return next((text for text in table.values() if text != result), result)


def repeats(tasks: list[Task]) -> list[Task]:
    return [*tasks[:60], *(dataclasses.replace(task, key=f"again-{task.key}") for task in tasks[:30])]


def wrong_answers(tasks: list[Task], share: int) -> list[Task]:
    return [changed(task, answer="zebra") if i % share == 0 else task for i, task in enumerate(tasks)]


def in_numbers(task: Task, number: int) -> Task:
    """The task with a number as its answer."""
    table = {
        key: text.replace(f"value={task.fields['answer']}", f"value={number}")
        for key, text in task.fields["table"].items()
    }
    return changed(task, answer=str(number), table=table)


def about(said: str, answer: str) -> float:
    found = said.split("\n")[-1]
    return float(found.isdigit() and abs(int(found) / int(answer) - 1) < 0.1)


def held(task: Task) -> bool:
    return task.key.startswith("held")


TRAIN, HELD = make_tasks("train", 90), make_tasks("held-out", 16)
ORDERED = RunSettings(as_given=True, taken=200)
FAULTY: dict[str, tuple[str, dict[str, Any]]] = {
    "a reward that raises for silence": (
        "ends",
        {"grade": lambda t, task, m: right(task, m) if last(m) else raises(ValueError("none"))},
    ),
    "a reward that waits for ever": ("ends", {"grade": lambda t, task, m: raises(Hang("no end"))}),
    "a reward that is no number": ("finite", {"grade": pays(lambda task, m: last(m) == OTHER_WORDS, math.nan)}),
    "a judge that changes its mind": ("twice", {"grade": lambda t, task, m: right(task, m) + 0.1 * (counted(t) % 2)}),
    "a reward of whoever began last": ("other-rewards", {"grade": lambda t, task, m: right(t.state["now"], m)}),
    "one table for all": (
        "other-results",
        {"find": lambda t, task, key: t.state["now"].fields["table"].get(key, "none")},
    ),
    "too few sessions": ("other-rewards", {"find": busy}),
    "callers turned away": (
        "other-results",
        {"find": lambda t, task, key: "Error: 429" if t.state["open"] > 8 else task.fields["table"].get(key, "none")},
    ),
    "a whole reply compared": (
        "paid",
        {
            "grade": lambda t, task, m: float(last(m) == task.fields["answer"]),
            "oracle_of": lambda t, task: (*own_oracle(t, task)[:-1], Turn(f"It is {task.fields['answer']}")),
        },
    ),
    "silence is right in some tasks": (
        "not-overpaid",
        {"grade": lambda t, task, m: float(not last(m)) if task.fields["answer"] < "b" else right(task, m)},
    ),
    "some answers with a capital": (
        "paid",
        {"grade": lambda t, task, m: right(task, m) * (task.fields["answer"] not in WORDS[:6])},
    ),
    "an oracle that fails": (
        "paid",
        {"oracle_of": lambda t, task: "KeyError: 'chain'" if task.fields["answer"] == "amber" else own_oracle(t, task)},
    ),
    "held-out answers unpaid": ("same-range", {"grade": lambda t, task, m: right(task, m) * (not held(task))}),
    "ten tasks": ("distinct", {"train": TRAIN[:10]}),
    "copies": ("distinct", {"train": repeats(TRAIN)}),
    "sorted tasks": (
        "order",
        {"train": sorted(TRAIN, key=lambda task: len(task.fields["table"])), "settings": ORDERED},
    ),
    "answers in prompts": (
        "hidden",
        {"opening": lambda t, task: [("system", RULES), ("user", f"{task.prompt} Value: {task.fields['answer']}.")]},
    ),
    "held-out tasks trained on": ("apart", {"train": [*TRAIN, *HELD[:8]]}),
    "held-out tasks with another rule": (
        "prompted",
        {
            "opening": lambda t, task: [
                ("system", RULES),
                *([("system", "Think before you call a tool.")] if held(task) else []),
                ("user", task.prompt),
            ]
        },
    ),
    "a proxy that fails": ("own-result", {"shown": lambda t, task, text: "Error: no route"}),
    "results of other calls": ("own-result", {"shown": another_key}),
    "results cut": ("own-result", {"shown": lambda t, task, text: text[:5]}),
    "results emptied": ("own-result", {"shown": lambda t, task, text: ""}),
    "a tool that fails": ("no-errors", {"find": lambda t, task, key: "Error: there is no index"}),
    "an index that is empty": ("needed", {"find": lambda t, task, key: "nothing found"}),
    "golds of other tasks": ("own-data", {"train": wrong_answers(TRAIN, 5)}),
    "a parser that stumbles over numbers": (
        "read",
        {"grade": lambda t, task, m: right(task, m) * (not any(map(str.isdigit, last(m))))},
    ),
    "tools in small letters": (
        "as-read",
        {"train": [changed(task, answer=task.fields["answer"].upper()) for task in TRAIN]},
    ),
    "silence earns nine tenths": ("empty", {"grade": pays(lambda task, m: not last(m), 0.9)}),
    "answers found anywhere": ("cheap", {"grade": pays(lambda task, m: task.fields["answer"] in last(m))}),
    "form outweighs the answer": (
        "cheap",
        {"grade": lambda t, task, m: {"form": 4.0 * (last(m).count("\n") > 5), "correct": right(task, m)}},
    ),
    "answers within a tenth": (
        "near",
        {
            "train": [in_numbers(task, 100 * (i % 9 + 1)) for i, task in enumerate(TRAIN)],
            "held_out": [],
            "grade": lambda t, task, m: about(last(m), task.fields["answer"]),
        },
    ),
}
"""Fault -> (the row that names it, what of the toy is replaced)."""


IDS = {row.statement: row.id for row in TABLE}


def examined(toy: Toy) -> dict[str, dict[str, Finding]]:
    """Verdict -> id of a row -> what it says of an environment."""
    found: dict[str, dict[str, Finding]] = {verdict: {} for verdict in get_args(Verdict)}
    for finding in judge(play(toy)):
        found[finding.verdict][IDS[finding.check]] = finding
    return found


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_named_by_its_row(name):
    row, parts = FAULTY[name]

    found = examined(Toy(**parts))

    assert [*found["fail"]][:1] == [row], found["fail"]
    assert not found["error"]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("a proxy that fails", "tools-fail"),
        ("results of other calls", "tool-results-wrong"),
        ("results cut", "tool-results-wrong"),
    ],
)
def test_results_that_tools_do_not_return_are_told_apart(name, cause):
    assert examined(Toy(**FAULTY[name][1]))["fail"]["own-result"].cause == cause


def test_every_row_has_a_fault_and_a_cause_of_the_catalogue():
    assert {row.id for row in TABLE} == {row for row, _ in FAULTY.values()}
    assert {row.cause for row in TABLE} <= CAUSES.keys()
    assert len({row.id for row in TABLE}) == len(TABLE)


HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "without an oracle": {"oracle_of": lambda t, task: None},
    "without held-out tasks": {"held_out": []},
    "one rollout at a time": {"settings": RunSettings(at_once=1, taken=200)},
    "minus one for wrong answers": {"grade": lambda t, task, m: right(task, m) or -float(bool(last(m)))},
    "a bonus for the form": {"grade": lambda t, task, m: {"form": 0.2 * bool(last(m)), "correct": right(task, m)}},
    "a small price for each turn": {"grade": lambda t, task, m: right(task, m) - 0.02 * sum(one.sampled for one in m)},
    "dice": {"find": lambda t, task, key: f"{task.fields['table'].get(key)} {random.random()}"},
    "a tool that fails at times": {
        "shown": lambda t, task, text: text if counted(t) % 10 else "Error: busy, call again"
    },
    "numbers graded by how far off they are": {
        "train": [in_numbers(task, i % 9 + 1) for i, task in enumerate(TRAIN)],
        "held_out": [],
        "grade": lambda t, task, m: (
            10.0 - abs(int(said) - int(task.fields["answer"])) if (said := last(m).split("\n")[-1]).isdigit() else 0.0
        ),
    },
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_environment_gives_no_alarm(name):
    assert not examined(Toy(**HEALTHY[name]))["fail"]


def test_without_held_out_tasks_their_rows_say_so():
    assert examined(Toy(held_out=[]))["unsure"]["apart"].evidence == "there are no held-out tasks"


def test_evidence_has_numbers_and_a_place():
    (finding,) = examined(Toy(**FAULTY["answers found anywhere"][1]))["fail"].values()

    assert finding.evidence.startswith("several answers joined by or earns 100%")
    assert finding.place == "toy.py:1 reward"


def test_what_hangs_is_not_played_again_and_again():
    matrix = play(Toy(grade=lambda t, task, m: raises(Hang("no end"))))

    assert sum(map(len, matrix.cells.values())) == 2
    found = {IDS[finding.check]: finding for finding in judge(matrix)}
    assert [name for name, finding in found.items() if finding.verdict == "fail"] == ["ends"]
    assert found["cheap"].evidence == "2 rollouts hung"
