"""Checks of an environment that need no model: faults made here are named, and healthy environments pass."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from plumbob.rollout import tasksets
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.driven import driver_of
from plumbob.testing import upstream_style
from plumbob.testing.examinations import all_findings, causes, changed, lookup_tasks, loud
from plumbob.testing.faults.field_parts import graded
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.before_model import task_sets, tool_results, transcripts
from plumbob.trainer.rollouts.tasks import Tasks, load_tasks

SYNTHETIC = ("datasets=synthetic", "num_examples=200")


HEALTHY = [
    ("lookup", ("num_examples=400",)),
    ("lookup", ("difficulty=trivial", "num_examples=400")),
    ("lookup", ("difficulty=extreme", "num_examples=100")),
    ("gsm8k", SYNTHETIC),
    ("gsm8k", (*SYNTHETIC, "answer_style=boxed")),
    ("musique", SYNTHETIC),
    ("musique", (*SYNTHETIC, "answer_style=complete", "weights=f1=0.5,format=0")),
    ("musique", (*SYNTHETIC, "noise=0")),
]


@pytest.mark.parametrize(
    ("env", "args"),
    # The first of each environment in every run of the tests.
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case[0] in dict(HEALTHY[:k]) else [])
        for k, case in enumerate(HEALTHY)
    ],
    ids=lambda part: part if isinstance(part, str) else part[0],
)
def test_healthy_environments_pass_every_check(examined, env, args):
    findings = all_findings(examined(env, env_args=args))
    assert loud(findings) == []
    assert sum(f.verdict == "pass" for f in findings) >= len(findings) - 1


# Tasks


def test_few_tasks_are_named_if_the_run_takes_them_often(examined):
    tasks = dataclasses.replace(lookup_tasks(), train=lookup_tasks().train[:8])
    findings = list(task_sets.checks(examined(tasks=tasks)))
    assert causes(findings) == ["few-distinct-tasks"] and "8 different tasks" in findings[0].evidence
    assert causes(task_sets.checks(examined(tasks=tasks, max_steps=1))) == []


def test_held_out_tasks_that_are_all_the_same_are_named(examined):
    tasks = lookup_tasks()
    same = dataclasses.replace(tasks, held_out=[tasks.held_out[0]] * len(tasks.held_out))
    (finding,) = (f for f in task_sets.checks(examined(tasks=same)) if f.cause)
    assert finding.cause == "few-distinct-tasks" and "held-out prompts are the same one" in finding.evidence


def test_copies_are_named_whatever_they_are_called(examined):
    def copied(i: int, data: Any) -> Any:
        same = tasks.train[i // 2].data
        return same.model_copy(update={"id": f"copy-{i}", "prompt": same.prompt + "  " * (i % 2)})

    tasks = lookup_tasks()
    assert causes(task_sets.checks(examined(tasks=changed(tasks, copied)))) == ["duplicate-tasks"]
    # And eight tasks that are repeated are eight tasks.
    few = changed(tasks, lambda i, data: tasks.train[i % 8].data.model_copy(update={"id": f"copy-{i}"}))
    assert causes(task_sets.checks(examined(tasks=few))) == ["few-distinct-tasks"]


def test_an_overlap_is_found_if_spelling_and_labels_differ(examined):
    tasks = lookup_tasks()

    def trained(i: int, data: Any) -> Any:
        same = tasks.train[i].data
        return same.model_copy(update={"id": f"new-{i}", "prompt": same.prompt.upper() + "."}) if i < 3 else data

    finding = next(f for f in task_sets.checks(examined(tasks=changed(tasks, held_out=trained))) if f.cause)
    assert finding.cause == "held-out-in-training" and finding.evidence.startswith("3 of 16")


GIVEN_AWAY = {
    "at the end": lambda i, data: data.model_copy(update={"prompt": f"{data.prompt} {data.answer}"}),
    "after a word": lambda i, data: data.model_copy(update={"prompt": f"Answer: {data.answer}\n{data.prompt}"}),
    "in the system prompt": lambda i, data: data.model_copy(
        update={"system_prompt": f"{data.system_prompt} (expected: {data.answer.upper()})"}
    ),
    "in a third of the tasks": lambda i, data: data.model_copy(
        update={"prompt": data.prompt + f" [gold={data.answer}]" * (i % 3 == 0)}
    ),
}


@pytest.mark.parametrize("change", GIVEN_AWAY.values(), ids=GIVEN_AWAY)
def test_an_answer_in_the_prompt_is_found(examined, change):
    finding = [f for f in task_sets.checks(examined(tasks=changed(lookup_tasks(), change, change))) if f.cause]
    assert causes(finding) == ["answer-in-prompt"]


def options(i: int, data: Any, count: int = 4) -> Any:
    """Multiple choice: the right answer among others of its own, at any place."""
    others = [f"{data.answer}{k}" for k in range(1, count)]
    others.insert(i * 7 % 3 % count, data.answer)
    listed = "\n".join(f"{letter}) {option}" for letter, option in zip("ABCD", others, strict=False))
    return data.model_copy(update={"prompt": f"{data.prompt}\n{listed}"})


def letters(i: int, data: Any) -> Any:
    given = options(i, data)
    return given.model_copy(update={"answer": "ABCD"[i * 7 % 3]})


READ = {
    "options in words": options,
    "two options": lambda i, data: options(i, data, 2),
    "options by letter": letters,
    "yes or no": lambda i, data: data.model_copy(
        update={"prompt": f"{data.prompt}. Answer yes or no.", "answer": ("yes", "no")[i * 5 % 7 % 2]}
    ),
    "the table in the prompt": lambda i, data: data.model_copy(
        update={"prompt": f"{data.prompt}\n" + "\n".join(f"{k}: {v}" for k, v in data.table.items())}
    ),
    "reading comprehension": lambda i, data: data.model_copy(
        update={"prompt": f"{data.prompt} {'one two three four five six seven eight'[: i % 37]} {data.answer} so it is"}
    ),
    "a digit": lambda i, data: data.model_copy(
        update={"prompt": f"{data.prompt} of 3 and {i % 10}", "answer": str(i % 7)}
    ),
}


@pytest.mark.parametrize("change", READ.values(), ids=READ)
def test_answers_that_a_task_must_hold_are_no_fault(examined, change):
    findings = list(task_sets.checks(examined(tasks=changed(lookup_tasks(), change, change))))
    assert loud(findings) == []


PROMPTED = {
    "another system prompt": lambda i, data: data.model_copy(update={"system_prompt": "You are a helpful assistant."}),
    "no system prompt": lambda i, data: data.model_copy(update={"system_prompt": None}),
    "words around it": lambda i, data: data.model_copy(update={"prompt": f"Answer in one word only. {data.prompt}"}),
    "words behind it": lambda i, data: data.model_copy(update={"prompt": f"{data.prompt} Think step by step first."}),
}


@pytest.mark.parametrize("change", PROMPTED.values(), ids=PROMPTED)
@pytest.mark.parametrize("side", ["train", "held_out"])
def test_another_prompt_in_evaluation_is_named(examined, change, side):
    tasks = changed(lookup_tasks(), **{side: change})
    assert causes(task_sets.checks(examined(tasks=tasks))) == ["evaluation-prompted-differently"]


def test_other_content_in_evaluation_is_no_fault(examined):
    tasks = lookup_tasks()
    texts = ["Who wrote the book?", "Where is the river?", "When did the war end?", "Which is the larger planet?"]
    given = changed(
        tasks,
        lambda i, data: data.model_copy(update={"prompt": f"{texts[i % 4]} {data.prompt}"}),
        lambda i, data: data.model_copy(update={"prompt": f"{texts[i % 3 + 1]} {data.prompt}"}),
    )
    assert loud(task_sets.checks(examined(tasks=given))) == []


# Tools


def tool_returning(monkeypatch, change: Callable[[str], str]) -> None:
    """Lookup's tool itself returns something else."""
    from vf_lookup.tools import LookupToolset

    own = LookupToolset.__dict__["lookup"]

    def lookup(self, key: str) -> str:
        return change(own(self, key))

    lookup.__doc__ = own.__doc__
    monkeypatch.setattr(LookupToolset, "lookup", vf.tool(lookup))
    monkeypatch.setattr(adapter, "_specs", {})


@pytest.mark.parametrize("change", [lambda text: "", lambda text: "[]", lambda text: "Found 1 result."])
def test_tools_that_say_nothing_are_named(examined, monkeypatch, change):
    tool_returning(monkeypatch, change)
    assert causes(tool_results.checks(examined(env_args=("num_examples=64",)))) == ["tools-return-nothing"]


def test_results_that_a_tool_itself_shortens_are_named(examined, monkeypatch):
    tool_returning(monkeypatch, lambda text: text[:8])
    findings = list(tool_results.checks(examined(env_args=("num_examples=64",))))
    assert causes(findings) == ["tool-results-cut"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "args", "change"),
    [
        ("lookup", ("num_examples=64",), lambda text: text[:8]),
        ("lookup", ("num_examples=64",), lambda text: text[-5:]),
        ("musique", SYNTHETIC, lambda text: text[:60]),
        ("musique", SYNTHETIC, lambda text: f"{text[:80]}... [truncated]"),
        ("musique", SYNTHETIC, lambda text: f"{text[:40]} ... {text[-40:]}"),
    ],
)
def test_results_that_reach_the_model_shortened_are_named(examined, monkeypatch, env, args, change):
    """The oracle of musique earns the full reward all the same: its reward counts documents, not what was read."""
    call = adapter.BoundTool.call

    async def cut(self, arguments, caller=None):
        return change(await call(self, arguments, caller))

    monkeypatch.setattr(adapter.BoundTool, "call", cut)
    environment = examined(env, env_args=args)
    assert loud(transcripts.checks(environment)) == []
    assert causes(tool_results.checks(environment)) == ["tool-results-cut"]


# Other environments


class QuizData(vf.TaskData):
    answer: str


class QuizTask(vf.Task[QuizData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


def test_an_environment_without_an_oracle_is_not_certain_and_not_alarmed(examined):
    tasks = [QuizTask(QuizData(prompt=f"What is {i} + {i}?", answer=str(2 * i)), vf.TaskConfig()) for i in range(100)]
    given = Tasks(tasks[:80], tasks[80:], (), 0, name="quiz")
    findings = all_findings(examined(tasks=given))
    assert loud(findings) == [] and {f.verdict for f in findings} == {"pass", "unsure"}


class FragileTask(QuizTask):
    @vf.reward(weight=0.0)
    async def fails_in_evaluation(self, trace: vf.Trace) -> float:
        if self.data.answer.startswith("held-out"):
            raise RuntimeError("the episode has no result")
        return 0.0


def test_held_out_tasks_that_cannot_be_scored_are_named(examined):
    tasks = [
        FragileTask(QuizData(prompt=f"What is {i} + {i}?", answer=f"{'held-out ' * (i >= 80)}{2 * i}"), vf.TaskConfig())
        for i in range(100)
    ]
    named = causes(all_findings(examined(tasks=Tasks(tasks[:80], tasks[80:], (), 0, name="quiz"))))
    assert "environment-fails" in named


@pytest.mark.slow
def test_perfect_transcripts_without_what_they_need_are_named(examined):
    """The environment says that its oracles earn 1 with the golden retriever; here their documents are missing."""

    def unsupported(i: int, data: Any) -> Any:
        return data.model_copy(update={"documents": [d for d in data.documents if not d.supporting]})

    tasks = load_tasks(TrainConfig(env="musique", env_args=("datasets=synthetic", "num_examples=60"), eval_examples=4))
    given = {"env": "musique", "env_args": SYNTHETIC}
    assert causes(transcripts.checks(examined(**given, tasks=tasks))) == []
    named = causes(tool_results.checks(examined(**given, tasks=changed(tasks, train=unsupported))))
    assert named == ["reward-wrong"]


@pytest.mark.slow
def test_oracles_of_other_settings_that_earn_nothing_are_named(examined, monkeypatch):
    """Their tasks are played with the golden retriever, and are other objects than those of the run."""
    examination = examined(env="musique", env_args=SYNTHETIC)
    with ExitStack() as stack:
        graded(correct=lambda task, trace, own: 1.0 - own)(stack, "musique")
        findings = all_findings(examination)
    assert not [f for f in findings if f.verdict == "error"]
    assert next(f.cause for f in findings if f.cause) in ("reward-wrong", "reward-exploitable")


def test_an_environment_that_drives_the_conversation_raises_no_alarm(examined, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(upstream_style.__file__).parent))
    taskset = tasksets.make_taskset(
        vf.import_taskset("number_game").GameTaskset, "number_game", {"many": 80, "largest": 10**9}
    )
    tasks = list(taskset)
    driver = driver_of("number_game", {"many": 80, "largest": 10**9})
    findings = all_findings(examined(tasks=Tasks(tasks[:64], tasks[64:], (), 0, driver=driver, name="game")))
    # The tasks differ in their secret alone.
    assert loud(findings) == []


def test_tasks_that_are_sorted_by_length_are_named_only_if_they_are_taken_in_that_order(examined):
    def of(order: str, env_args: tuple[str, ...] = ()) -> list[str]:
        config = TrainConfig(env="lookup", eval_examples=0, task_order=order, env_args=("num_examples=96", *env_args))
        tasks = load_tasks(config)
        ordered = dataclasses.replace(tasks, train=sorted(tasks.train, key=lambda task: len(task.data.chain)))
        environment = examined(tasks=ordered, task_order=order, env_args=config.env_args)
        return causes(found for found in [task_sets._order(environment)] if found)

    assert of("as-given") == ["task-order-drifts"]
    assert of("shuffle") == []


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 2, 3], 1.0), ([3, 2, 1], -1.0), ([2, 2, 2], 0.0), ([1, 1, 2, 2], 0.894)]
)
def test_rank_correlation_with_ties(values, expected):
    assert task_sets.rank_correlation(values) == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_a_server_that_is_down_behind_a_tool_is_named(examined, monkeypatch):
    environment = examined()
    monkeypatch.setattr(
        tool_results,
        "results_of",
        lambda environment, task, trace: [
            tool_results.Result(task, "lookup", {"key": str(i)}, "Error: 502 Bad Gateway" if i % 2 else f"next={i}")
            for i in range(4)
        ],
    )
    assert causes(tool_results.checks(environment)) == ["tools-fail"]


def test_held_out_prompts_in_capitals_are_named(examined):
    def louder(i: int, data: Any) -> Any:
        return data.model_copy(update={"prompt": str(data.prompt).upper()})

    tasks = changed(lookup_tasks(), held_out=louder)
    assert "evaluation-prompted-differently" in causes(task_sets.checks(examined(tasks=tasks)))
