"""Tools that get other arguments or answer by chance, and answers that their own tasks contradict: before a model is loaded."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import verifiers.v1 as vf
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.examinations import causes, changed, lookup_tasks
from plumbob.trainer.doctor.before_model import changed_arguments, contradicted_answers, tool_results
from plumbob.trainer.doctor.before_model.other_results import Result
from plumbob.trainer.rollouts.tasks import Tasks

MUSIQUE = {"env": "musique", "env_args": ("datasets=synthetic", "num_examples=60", "hops=2")}


def called_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rollouts, and not the doctor, call tools with changed arguments."""
    call = adapter.BoundTool.call
    monkeypatch.setattr(
        adapter.BoundTool, "call", lambda self, given, caller=None: call(self, change(dict(given)), caller)
    )


def answered_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    call = adapter.BoundTool.call

    async def other(self, given, caller=None):
        return change(await call(self, given, caller))

    monkeypatch.setattr(adapter.BoundTool, "call", other)


CHANGED = {
    "the first two words": lambda query: " ".join(query.split()[:2]),
    "the last three words": lambda query: " ".join(query.split()[-3:]),
    "about four tokens": lambda query: query[: 16 + len(query) % 5],
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_search_that_reads_a_part_of_its_query_is_named(examined, monkeypatch, change):
    called_with(monkeypatch, lambda given: {**given, "query": change(given["query"])})
    named = [f for f in tool_results.checks(examined(**MUSIQUE)) if f.cause]
    assert causes(named) == ["tool-arguments-changed"] and "of 'query'" in named[0].evidence


def test_tools_that_are_declared_without_their_parameters_are_named():
    called = [Result(vf.Task.__new__(vf.Task), "search", {"query": "birds"}, "a") for _ in range(8)]
    known = {"search": {"properties": {"query": {"type": "string"}}}}
    assert (found := tool_results.declared(known, called)) and found.verdict == "pass"
    assert (found := tool_results.declared({"search": {}}, called)) and found.cause == "tools-not-in-prompt"
    assert tool_results.declared(known, []) is None


def test_results_of_which_nothing_is_shown_are_not_called_cut(examined, monkeypatch):
    answered_with(monkeypatch, lambda text: "")
    named = [f.cause for f in tool_results.checks(examined()) if f.cause]
    assert named == ["tools-return-nothing"]


ASKED = {"query": "red birds of the north", "top_k": 3, "exact": True}


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ({**ASKED, "top_k": 2}, "another number than 'top_k'"),
        ({**ASKED, "exact": False}, "the opposite of 'exact'"),
        ({**ASKED, "query": "RED BIRDS OF THE NORTH"}, "another case of 'query'"),
        ({"query": ASKED["query"], "exact": True}, "no 'top_k'"),
        ({**ASKED, "query": ""}, "nothing as 'query'"),
        ({**ASKED, "query": "blue fish"}, ""),
    ],
)
def test_the_arguments_that_give_what_was_shown_are_found(monkeypatch, given, change):
    """A tool that returns its arguments, called in rollouts with others than those that were written."""
    monkeypatch.setattr(changed_arguments, "direct", lambda environment, task, calls: [str(calls[0][1])])
    other = [Result(None, "search", ASKED, str(given), str(ASKED)) for _ in range(6)]
    found = changed_arguments.change_of(None, other)
    assert change in found if change else found == ""
    assert changed_arguments.change_of(None, other[:3]) == ""


@pytest.mark.slow
def test_results_in_another_order_are_no_changed_arguments(examined, monkeypatch):
    answered_with(monkeypatch, lambda text: "\n\n".join(reversed(text.split("\n\n"))))
    assert causes(tool_results.checks(examined(**MUSIQUE))) == []


def sometimes(made: Callable[[int], str], every: int) -> Callable[[str], str]:
    count = itertools.count()
    return lambda result: made(number) if (number := next(count)) % every == 0 else result


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda: sometimes(lambda number: f"next={1000 + number * 7919 % 9000}", 5), "tool-results-wrong"),
        (lambda: sometimes(lambda number: f"value=amber{number}", 10), "tool-results-wrong"),
        (lambda: sometimes(lambda number: "Try again later.", 7), "tools-return-nothing"),
        (lambda: sometimes(lambda number: "Error: the server is busy", 12), None),
        (lambda: lambda result: result, None),
    ],
)
def test_results_that_are_made_up_at_times_are_named(examined, monkeypatch, change, cause):
    answered_with(monkeypatch, change())
    assert causes(tool_results.checks(examined(tasks=lookup_tasks()))) == ([cause] if cause else [])


def test_a_note_beside_the_result_that_changes_each_time_is_no_fault(examined, monkeypatch):
    count = itertools.count()
    answered_with(monkeypatch, lambda result: f"{result}\n[request {next(count)}]")
    assert causes(tool_results.checks(examined(tasks=lookup_tasks()))) == []


def test_a_tool_that_is_random_itself_is_no_fault_of_what_lies_around_it(examined, monkeypatch):
    count, own = itertools.count(), adapter.BoundTool.own_result

    async def other(self, given):
        return f"{await own(self, given)} {next(count)}"

    monkeypatch.setattr(adapter.BoundTool, "own_result", other)
    answered_with(monkeypatch, lambda result: f"{result} {next(count)}")
    assert "tool-results-mixed" not in causes(tool_results.checks(examined(tasks=lookup_tasks())))


# Answers


@pytest.mark.parametrize(("every", "cause"), [(4, ["oracle-fails"]), (10, ["oracle-fails"]), (0, [])])
def test_answers_that_the_tools_contradict_are_named(examined, every, cause):
    def wrong(i: int, data: Any) -> Any:
        return data.model_copy(update={"answer": "rust"}) if every and i % every == 0 else data

    assert causes(contradicted_answers.checks(examined(tasks=changed(lookup_tasks(), wrong)))) == cause


def test_answers_of_other_tasks_are_told_from_answers_that_must_be_worked_out(examined):
    tasks = lookup_tasks()

    def of_the_next(i: int, data: Any) -> Any:
        return data.model_copy(update={"answer": tasks.train[(i + 1) % len(tasks.train)].data.answer})

    def worked_out(i: int, data: Any) -> Any:
        return data.model_copy(update={"answer": following[data.answer]})

    values = sorted({task.data.answer for task in tasks.train})
    following = dict(zip(values, [*values[1:], values[0]], strict=True))
    assert causes(contradicted_answers.checks(examined(tasks=changed(tasks, of_the_next)))) == ["oracle-fails"]
    assert causes(contradicted_answers.checks(examined(tasks=changed(tasks, worked_out)))) == []


class SolvedData(vf.TaskData):
    answer: str
    solution: str


class SolvedTask(vf.Task[SolvedData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


def solved(answer: Callable[[int], int], solution: Callable[[int], str]) -> Tasks:
    data = [SolvedData(prompt=f"What is {i} + 40?", answer=str(answer(i)), solution=solution(i)) for i in range(100)]
    tasks = [SolvedTask(one, vf.TaskConfig()) for one in data]
    return Tasks(tasks[:80], tasks[80:], (), 0, name="solved")


@pytest.mark.parametrize(
    ("answer", "solution", "cause"),
    [
        (lambda i: i + 40, lambda i: f"It is {i + 40}.\n#### {i + 40}", []),
        (lambda i: i + 40 + (i % 5 == 0) * 1000, lambda i: f"It is {i + 40}.\n#### {i + 40}", ["oracle-fails"]),
        # A solution that names no answer, or names it in many ways, says nothing.
        (lambda i: i + 40 + (i % 5 == 0) * 1000, lambda i: "Add the two numbers.", []),
        (lambda i: i + 40 + (i % 5 == 0) * 1000, lambda i: f"#### {i + 40}" if i % 3 == 0 else "Add.", []),
    ],
)
def test_answers_that_the_tasks_own_solutions_contradict_are_named(examined, answer, solution, cause):
    assert causes(contradicted_answers.checks(examined(tasks=solved(answer, solution)))) == cause


@pytest.mark.slow
def test_answers_that_a_retriever_misses_are_no_contradiction(examined):
    assert causes(contradicted_answers.checks(examined(**MUSIQUE))) == []
    worse = {**MUSIQUE, "env_args": (*MUSIQUE["env_args"], "max_top_k=1")}
    environment = examined(**worse)
    assert (
        contradicted_answers.contradicted(environment, contradicted_answers.standing(environment, environment.oracles))
        is None
    )
