"""What is trained on and what is held out, and which environments are refused before a model is loaded."""

import sys

import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.testing.upstream_style import FOLDER
from plumbob.trainer.cli import train as train_cli
from plumbob.trainer.config.environment import describe
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.rollouts.identity import marks, marks_of
from plumbob.trainer.rollouts.stream import TaskStream
from plumbob.trainer.rollouts.tasks import load_evaluation_tasks, load_tasks
from plumbob.trainer.training import setup


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """Write a module without an entry point, as upstream's tasksets are; returns its name."""
    monkeypatch.syspath_prepend(FOLDER)
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    written = []

    def write(name: str, body: str) -> str:
        (folder / f"{name}.py").write_text(body)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


ROWS = """
import verifiers.v1 as vf
READ = []
class Data(vf.TaskData):
    answer: str = "a"
    note: str = ""
class Task(vf.Task[Data]):
    {task}
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)
class Taskset(vf.Taskset[Task, vf.TasksetConfig]):
    INFINITE = {endless}
    def load(self):
        import itertools
        for i in {range}:
            READ.append(i)
            yield Task(Data({data}), self.config.task)
{more}
__all__ = ["Taskset"{exported}]
"""


def rows(data, number=5, endless=False, task="pass", more="", exported=""):
    counted = "itertools.count()" if endless else f"range({number})"
    given = {"data": data, "range": counted, "endless": endless, "task": task, "more": more}
    return ROWS.format(exported=f', "{exported}"' if exported else "", **given)


class Data(vf.TaskData):
    answer: str = ""
    context: list[str] = []  # noqa: RUF012 - pydantic copies it


def task(**given):
    return vf.Task(Data(**given))


def same(a, b):
    return not marks(a).isdisjoint(marks(b))


TEXT = st.sampled_from(["", "q", "r"])
LABELS = st.fixed_dictionaries({}, optional={"idx": st.integers(0, 3), "name": TEXT, "description": TEXT})


@given(TEXT, TEXT, st.lists(TEXT, max_size=2), LABELS, LABELS)
def test_a_row_is_the_same_task_under_any_label(prompt, answer, context, first, second):
    content = {"prompt": prompt, "answer": answer, "context": context}
    assert same(task(**content, **first), task(**content, id="1", **second))


@given(st.tuples(TEXT, TEXT), st.tuples(TEXT, TEXT))
def test_the_same_question_with_another_answer_or_context_is_another_task(first, second):
    a, b = (task(prompt="q", answer=answer, context=[context]) for answer, context in (first, second))
    assert same(a, b) is (first == second)


def test_a_question_with_the_same_id_is_the_same_task_whatever_documents_were_drawn():
    a, b = (task(prompt="q", id="2hop-7", context=[context]) for context in ("x", "y"))
    assert same(a, b) and not same(a, task(prompt="q", id="2hop-8", context=["z"]))
    # An id that only counts the rows of a split says nothing about prompts that differ, or that are not there.
    assert not same(task(prompt="q", id="0"), task(prompt="r", id="0"))
    assert not same(task(id="0", answer="x"), task(id="0", answer="y"))


def test_tasks_with_one_question_and_other_answers_are_all_kept(importable):
    env = importable("one_question", rows('prompt="What?", answer=str(i)', 40))
    tasks = load_tasks(TrainConfig(env=env, eval_examples=8))
    assert (len(tasks.train), len(tasks.held_out)) == (32, 8)
    assert marks_of(tasks.train).isdisjoint(marks_of(tasks.held_out))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "wanted", "held_out"), [(5, 4, 2), (5, 256, 2), (5, 2, 2), (6, 3, 3), (2, 4, 1)])
def test_at_most_half_of_the_tasks_are_held_out_and_that_is_said(importable, number, wanted, held_out):
    env = importable("few_rows", rows('prompt=f"What is {i}?"', number))
    tasks = load_tasks(TrainConfig(env=env, eval_examples=wanted))
    assert (len(tasks.train), len(tasks.held_out)) == (number - held_out, held_out)
    said = f"only {held_out} of the {min(wanted, number)} wanted tasks are held out"
    assert [said in note for note in tasks.notes] == ([] if held_out == min(wanted, number) else [True])


@pytest.mark.slow
def test_copies_of_held_out_tasks_count_towards_the_half(importable):
    env = importable("copied_rows", rows('prompt=f"What is {i % 3}?"', 9))
    tasks = load_tasks(TrainConfig(env=env, eval_examples=9))
    assert len({t.data.prompt for t in tasks.train}) == 2 and len(tasks.train) == 6
    env = importable("one_row", rows('prompt="What?"', 9))
    with pytest.raises(UserError, match="one_row|one-row.* too few different tasks"):
        load_tasks(TrainConfig(env=env, eval_examples=1))
    assert len(load_tasks(TrainConfig(env=env, eval_examples=0)).train) == 9


@pytest.mark.slow
def test_tasks_without_end_are_read_once_and_only_as_needed(importable):
    env = importable("endless_rows", rows('prompt=f"What is {i}?"', endless=True))
    tasks = load_tasks(TrainConfig(env=env, eval_examples=8))
    read = sys.modules[env].READ
    assert isinstance(tasks.train, TaskStream) and len(tasks.held_out) == 8 and len(read) == 9
    assert [t.data.prompt for t in tasks.take(4, 3)] == [f"What is {i}?" for i in (12, 13, 14)]
    assert len(read) == 15 and "begins again after 100,000" in tasks.notes[0]
    assert tasks.take(100_002, 1) == tasks.take(2, 1) and len(read) == 15
    assert len(load_evaluation_tasks(env, {}, 3).tasks) == 3
    for message, call in (
        ("give --max-steps instead", lambda: load_tasks(TrainConfig(env=env, max_steps=-1))),
        ("give --num-examples", lambda: load_evaluation_tasks(env, {}, -1)),
    ):
        with pytest.raises(UserError, match=message):
            call()


@pytest.mark.slow
def test_a_stream_that_ends_or_only_repeats_is_named(importable):
    ends = importable("stream_that_ends", rows('prompt=f"What is {i}?"').replace("INFINITE = False", "INFINITE = True"))
    tasks = load_tasks(TrainConfig(env=ends, eval_examples=2))
    with pytest.raises(UserError, match=r"never end .* ended after 3"):
        tasks.take(0, 4)
    repeats = importable("stream_that_repeats", rows('prompt=f"What is {i % 4}?"', endless=True))
    with pytest.raises(UserError, match="repeats its held-out tasks"):
        load_tasks(TrainConfig(env=repeats, eval_examples=8))


OWN_DATA = rows("prompt=self.config.dataset_name").replace(
    "class Taskset(vf.Taskset[Task, vf.TasksetConfig])",
    """class Config(vf.TasksetConfig):
    dataset_name: str = "elsewhere"
class Taskset(vf.Taskset[Task, Config])""",
)


@pytest.mark.slow
def test_data_options_are_refused_by_name_if_the_environment_has_another_setting_for_data(importable):
    name = importable("x_own_data", OWN_DATA)
    for option in ("datasets", "eval_datasets"):
        with pytest.raises(UserError, match=r"--datasets \(or --dataset-name\).*such as -a dataset_name="):
            load_tasks(TrainConfig(env=name, **{option: "mine"}))
    tasks = load_tasks(TrainConfig(env=name, env_args=("dataset_name=mine",), eval_examples=0))
    assert {task.data.prompt for task in tasks.train} == {"mine"}
    braced = load_tasks(TrainConfig(env=name, env_args=("dataset_name={}",), eval_examples=0))  # a text, not an object
    assert {task.data.prompt for task in braced.train} == {"{}"}


@pytest.mark.slow
def test_the_help_shows_how_to_give_a_setting_whose_name_the_trainer_has_too(importable):
    rows_ = dict(describe(importable("x_own_data", OWN_DATA), ["dataset_name", "seed"]))
    assert rows_["-a dataset_name=<str>"] == "[default: elsewhere]"
    written = [option for option, _ in describe("lookup", ["seed", "datasets"])]
    assert "-a seed=<int>" in written and "--seed <int>" not in written


@pytest.fixture
def refused(tmp_path, ended, monkeypatch):
    """Run `train` in an empty folder; return its one line of complaint. No weights may be loaded before it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setup, "load_model", lambda name: pytest.fail("the model was loaded"))

    def run(*args: str) -> str:
        code, _, err = ended("train", train_cli.app, *args)
        lines = [line for line in err.splitlines() if not line.startswith("  loading ")]
        assert code == 2 and len(lines) == 1 and lines[0].startswith("train: "), lines
        assert not (tmp_path / "runs").exists()
        return lines[0]

    return run


PICTURE = '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]'
TWO = """
class Config(vf.EnvConfig):
    user: vf.AgentConfig = vf.AgentConfig()
    assistant: vf.AgentConfig = vf.AgentConfig()
class TheEnv(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.user.interaction(task), agents.assistant.interaction(task): pass
"""
TWICE = """
class TheEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        await agents.agent.run(task)
        await agents.agent.run(task)
"""
LATE_PICTURE = f"""
class TheEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn({PICTURE})
"""
PAGE = """
class Page(LookupError):
    def __str__(self): return chr(10).join(["", "***", "a page", "of advice"] + ["more"] * 500)
"""
PROMPT = 'prompt=f"What is {i}?"'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "body", "why"),
    [
        ("x_images", rows(f'prompt={PICTURE} if i == 3 else "?", answer=str(i)'), "images in a prompt"),
        ("x_no_prompt", rows("answer=str(i)"), "has no prompt"),
        ("x_container", rows(PROMPT, task="NEEDS_CONTAINER = True"), "needs a container"),
        ("x_image", rows(PROMPT + ', image="python:3.12"'), "needs a container"),
        ("x_two_agents", rows(PROMPT, more=TWO, exported="TheEnv"), "has 2 agents (user, assistant)"),
        ("x_twice", rows(PROMPT, more=TWICE, exported="TheEnv"), "runs its agent more than once"),
        ("x_late_image", rows(PROMPT, more=LATE_PICTURE, exported="TheEnv"), "images in a prompt"),
        ("x_raises", rows("prompt=READ[99]"), "cannot be loaded: IndexError: list index out of range (x_raises.py, line"),
        ("x_page", rows("prompt=open(__file__)", more=PAGE).replace("READ.append(i)", "raise Page"), "a page of"),
        ("x_dicts", rows(PROMPT).replace("yield ", "yield {} and "), "load() must yield tasks, of type"),
        ("x_empty", rows(PROMPT, number=0), "has no tasks"),
        ("x_no_taskset", "import verifiers.v1 as vf\n", 'add the line `__all__ = ["YourTaskset"]`'),
        ("x_broken", "import verifiers.v1, no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_sentence_before_the_model_is_loaded(
    importable, refused, name, body, why
):
    assert why in refused(importable(name, body), "--eval-examples", "1")
