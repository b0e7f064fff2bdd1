"""Graders that take wrong answers for right, tools that show the answer, held-out answers of other tasks: without a model."""

import dataclasses
import re
from contextlib import ExitStack

import pytest
import verifiers.v1 as vf
from plumbob.testing.examinations import causes, lookup_tasks
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field6_unseen_doubles import held_out_golds_moved, value_shown
from plumbob.testing.faults.field7_unseen_doubles import mentioned_is_enough
from plumbob.testing.faults.field_parts import graded as graded_as
from plumbob.testing.faults.field_parts import tools_answer
from plumbob.trainer.doctor.before_model import contradicted_answers, near_answers, tool_results, transcripts
from plumbob.trainer.rollouts.tasks import Tasks


class GradedData(vf.TaskData):
    answer: str


class Graded(vf.Task[GradedData]):
    """A question whose answer is the last line of a reply."""

    def oracle(self) -> list[vf.AssistantMessage]:
        return [vf.AssistantMessage(content=f"So it is this.\n{self.data.answer}")]

    def credit(self, said: str, gold: str) -> float:
        return float(said == gold)

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return self.credit((trace.last_reply or "").strip().split("\n")[-1], self.data.answer)


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class Lenient(Graded):
    def credit(self, said: str, gold: str) -> float:
        value = number(said)
        return float(value is not None and abs(value - float(gold)) <= abs(float(gold)) / 10)


class Closeness(Graded):
    """Falls with the distance: no fault."""

    def credit(self, said: str, gold: str) -> float:
        value = number(said)
        return 0.0 if value is None else max(0.0, 1 - abs(value - float(gold)) / abs(float(gold)))


class AtOnePercent(Graded):
    """Accepts what differs by rounding: no fault."""

    def credit(self, said: str, gold: str) -> float:
        value = number(said)
        return float(value is not None and abs(value - float(gold)) <= abs(float(gold)) / 100)


class Containing(Graded):
    def credit(self, said: str, gold: str) -> float:
        return float(gold in said)


class Contained(Graded):
    def credit(self, said: str, gold: str) -> float:
        return float(bool(said) and said in gold)


NUMBERS = [str(7 * i + 21) for i in range(60)]
WORDS = [f"{a}{b}on" for a in ("quar", "neutr", "prot", "glu", "phot", "bos") for b in "abcdefghij"]


def graded(kind: type[Graded], golds: list[str]) -> Tasks:
    tasks = [kind(GradedData(prompt=f"Question {i}?", answer=gold), vf.TaskConfig()) for i, gold in enumerate(golds)]
    return Tasks(tasks[:48], tasks[48:], (), 0, name="graded")


@pytest.mark.parametrize(
    ("kind", "golds", "cause", "kept"),
    [
        (Graded, NUMBERS, [], "6% too large earns as much as the right answer in 0 of 24"),
        (Graded, WORDS, [], "first letter earns as much as the right answer in 0 of 24"),
        (Lenient, NUMBERS, ["reward-exploitable"], "6% too large earns as much as the right answer in 24 of 24"),
        (Closeness, NUMBERS, [], "in 0 of 24"),
        (AtOnePercent, NUMBERS, [], "in 0 of 24"),
        (Containing, NUMBERS, ["reward-exploitable"], "one more digit earns as much as the right answer in 24 of 24"),
        (Contained, WORDS, ["reward-exploitable"], "first letter earns as much as the right answer in 24 of 24"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_answers_near_to_the_right_one_must_not_earn_as_much(examined, kind, golds, cause, kept):
    (finding,) = near_answers.checks(examined(tasks=graded(kind, golds)))
    assert causes([finding]) == cause and kept in finding.evidence


@pytest.mark.slow
def test_tools_that_show_the_answer_at_once_are_named(examined):
    assert causes(tool_results.checks(examined(tasks=lookup_tasks()))) == []
    with ExitStack() as stack:
        tools_called(value_shown)(stack, "lookup")
        named = [f for f in tool_results.checks(examined(tasks=lookup_tasks())) if f.cause]
    assert causes(named) == ["answer-in-prompt"] and "answers of other tasks are in 0%" in named[0].evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            lambda text, name, arguments: re.sub(r"\d", lambda d: str((int(d[0]) + 1) % 10), text),
            ["tool-results-wrong"],
        ),
        (lambda text, name, arguments: text.upper(), []),
        (lambda text, name, arguments: text.replace("=", " is "), []),
    ],
)
def test_tool_results_that_say_something_else_are_told_from_another_form(examined, change, cause):
    with ExitStack() as stack:
        tools_answer(change)(stack, "lookup")
        assert causes(tool_results.checks(examined(tasks=lookup_tasks()))) == cause


def test_held_out_answers_that_the_tools_contradict_are_named(examined):
    tasks = lookup_tasks()
    moved = dataclasses.replace(tasks, held_out=held_out_golds_moved(list(tasks.held_out), "validation"))
    assert causes(contradicted_answers.checks(examined(tasks=tasks))) == []
    (finding,) = (f for f in contradicted_answers.checks(examined(tasks=moved)) if f.cause)
    assert finding.cause == "evaluation-differs" and finding.check.startswith("held-out answers")


class Worked(Graded):
    """Its data hold a worked solution, and its replies end with the number alone."""

    def oracle(self) -> list[vf.AssistantMessage]:
        return [vf.AssistantMessage(content=f"In the end: {self.data.answer.split()[-1]}")]


class StyledData(GradedData):
    answer_style: str = "end"


def test_the_answer_is_told_from_a_setting_that_all_tasks_share_and_from_its_working(examined):
    tasks = [
        Worked(StyledData(prompt=f"Question {i}?", answer=f"3 <<*>> {n}\n#### {n}"), vf.TaskConfig())
        for i, n in enumerate(NUMBERS)
    ]
    environment = examined(tasks=Tasks(tasks[:48], tasks[48:], (), 0, name="worked"))
    assert environment.gold_field == "answer" and [environment.gold(t) for t in tasks[:2]] == NUMBERS[:2]


@pytest.mark.slow
def test_a_lenient_judge_of_held_out_answers_is_named(examined):
    assert causes(transcripts.checks(examined(tasks=lookup_tasks()))) == []
    with ExitStack() as stack:
        graded_as(correct=mentioned_is_enough)(stack, "lookup")
        (finding,) = (f for f in transcripts.checks(examined(tasks=lookup_tasks())) if f.cause)
    assert finding.cause == "evaluation-parses-differently" and "100% in held-out tasks" in finding.evidence
