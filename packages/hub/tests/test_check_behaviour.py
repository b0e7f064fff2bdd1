"""Each check of behaviour that plays rollouts, on a scaffold with one thing broken; here in this process, for speed."""

import itertools
import sys

import pytest
from plumbob.hub.check.sandbox.guard import Guard
from plumbob.hub.check.sandbox.job import ROLLOUT_CHECKS, Job
from plumbob.hub.publish.scaffold import create

_numbers = itertools.count()


class Recorder:
    """What the process of a check would have told."""

    def __init__(self) -> None:
        self.results = {}
        self.skipped = {}

    def tell(self, **message) -> None:
        pass

    def result(self, check, found) -> None:
        self.results[check] = found
        if found.skipped is not None:
            self.skipped[check] = found.skipped

    @property
    def failures(self) -> dict[str, list[str]]:
        return {check: found.problems for check, found in self.results.items() if found.problems}


@pytest.fixture
def examined(tmp_path, monkeypatch):
    """Make a scaffold, replace texts in its files, and make the checks of it."""

    def run(*edits: tuple[str, str, str], tools: bool = False, checks=ROLLOUT_CHECKS, **settings) -> Recorder:
        from plumbob.hub.check.sandbox.__main__ import examine

        name = f"broken{next(_numbers)}"  # a module is imported once in a process
        directory = create(name, tmp_path, tools=tools) / "src" / f"vf_{name}"
        for file, old, new in edits:
            text = (directory / file).read_text()
            assert old in text
            (directory / file).write_text(text.replace(old, new))
        monkeypatch.syspath_prepend(directory.parent)
        recorder = Recorder()
        job = Job(f"vf_{name}", f"{name.capitalize()}Taskset", settings, tuple(checks), max_seconds=4)
        examine(job, Guard(), recorder)  # ty: ignore[invalid-argument-type]
        sys.modules.pop(f"vf_{name}", None)
        return recorder

    return run


CORRECT = "return float(read_answer(trace.last_reply) == self.data.answer)"
ORACLE = 'return [vf.AssistantMessage(content=f"{_MARK}'


@pytest.mark.slow
@pytest.mark.parametrize("tools", [False, True])
def test_a_scaffold_passes(examined, tools):
    recorder = examined(tools=tools)
    assert recorder.failures == {} and recorder.skipped == {}
    assert {"import", "exports", "load", *ROLLOUT_CHECKS} <= set(recorder.results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (("taskset.py", "{_MARK}{self.data.answer}", "{_MARK}{self.data.answer}."), {"oracle": "on 64 of 64 tasks: task 0"}),
        (("taskset.py", CORRECT, CORRECT.replace("float(", "0.999 * float(")), {"oracle": "scores 0.999"}),
        (("taskset.py", ORACLE, "return []\n        " + ORACLE), {"oracle": "the stored transcript has only 0 turns"}),
        (("taskset.py", ORACLE, "raise KeyError('gone')\n        " + ORACLE), {"oracle": "KeyError: 'gone' (taskset.py, line"}),
        (("taskset.py", CORRECT, "return float(read_answer(trace.last_reply) in (None, self.data.answer))"),
         {"garbage": "an empty reply scores 1 on task 0"}),
        (("taskset.py", CORRECT, "return float(self.data.answer in trace.last_reply or not trace.last_reply.isascii())"),
         {"garbage": "unicode junk scores 1"}),
        (("taskset.py", CORRECT, "if 'sorry' in trace.last_reply:\n            raise ValueError('no number')\n        " + CORRECT),
         {"garbage": "a refusal makes task 0"}),
        (("taskset.py", CORRECT, "return 2.0 * (read_answer(trace.last_reply) == self.data.answer)"),
         {"oracle": "scores 2", "bounds": "scores 2; rewards must be from 0 to 1"}),
        (("taskset.py", CORRECT, "return float('nan') if trace.num_turns == 0 else " + CORRECT.removeprefix("return ")),
         {"bounds": "scores nan", "limits": "a rollout that reaches agent_timeout fails: NotFinite: reward `correct` is nan"}),
        (("taskset.py", '{"id": self.key, "answer"', 'trace, {"id": self.key, "answer"'), {"prediction": "TypeError"}),
        (("taskset.py", "return trace.num_turns >= 1", "return trace.last_reply == '...' and 1 / 0 > 0"),
         {"limits": "ZeroDivisionError"}),
        (("taskset.py", '-{index}"', '"'), {"load": "tasks 0 and 1 have the same key"}),
        (("taskset.py", 'SYSTEM_PROMPT = "', 'SYSTEM_PROMPT = "Answer: <number>\\n'), {}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_own_check(examined, edit, expected):
    failures = examined(edit).failures
    for check, told in expected.items():
        assert told in " ".join(failures.pop(check, ["it did not fail"]))
    # What raises in the oracle or in a hook is in the way of other checks too.
    assert all("KeyError" in p for problems in failures.values() for p in problems)


NUMBER = 'Annotated[int, Field(description="How many balls to draw.", ge=1)]'


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"""Draw balls from the bag. Returns their colours."""', "", "draw has no description"),
        (NUMBER, "Any", "'count' of draw has neither a type nor"),
        (NUMBER, 'Annotated[int, Field(json_schema_extra={"type": "numeral"})]', "schema of draw is not valid"),
        ("TOOL_PREFIX = None", "TOOL_PREFIX = 'my tools'", "'my tools_draw' is not valid"),
        ("task.balls", "task.no_such", "setting up the task and its tools fails: ToolsetError"),
        ('if __name__ == "__main__":', "def main():", "cannot be run as a server"),
    ],
)
def test_tools_that_a_model_or_upstream_cannot_use(examined, old, new, told):
    failures = examined(("tools.py", old, new), tools=True, checks=["tools"]).failures
    assert list(failures) == ["tools"] and told in failures["tools"][0]


@pytest.mark.parametrize(
    ("exported", "told"),
    [
        ("[*__all__, 'Second']", "exports 2 tasksets"),
        ("['LocalEnv']", "exports 0 tasksets (none); export exactly one"),
        ("['Second']", "and __all__ exports Second; they must be one class"),
    ],
)
def test_not_one_taskset_is_exported(examined, exported, told):
    code = f"]\nSecond = type('Second', (globals()[__all__[0]],), {{}})\n__all__ = {exported}\n"
    recorder = examined(("__init__.py", "]\n", code), checks=[])
    assert told in recorder.failures["exports"][0]
    # Without exactly one, verifiers would not find it either.
    assert ("load" in recorder.results) == (exported == "['Second']")


def test_an_export_that_is_not_there_stops_nothing(examined):
    recorder = examined(("__init__.py", "__all__ = [", '__all__ = ["Ghost", '), checks=["oracle"])
    assert list(recorder.failures) == ["exports"] and "'Ghost'" in recorder.failures["exports"][0]
    assert "oracle" in recorder.results


def test_a_missing_dependency_says_what_to_install(examined):
    recorder = examined(("taskset.py", "import random", "import random\nimport no_such_library_at_all"))
    assert "No module named 'no_such_library_at_all'; install what it depends on" in recorder.failures["import"][0]


@pytest.mark.slow
def test_settings_of_the_check_of_the_oracle_and_of_the_user_in_that_order(examined):
    edit = (
        "taskset.py",
        "    def load(self)",
        '    check_settings = {"count": 4, "num_examples": 3}\n    oracle_settings = {"count": 6}\n\n    def load(self)',
    )
    assert "3 tasks in" in examined(edit).results["load"].measured
    found = examined(edit, num_examples="7").results
    assert "7 tasks in" in found["load"].measured and "with count=4, num_examples=7, seed=0" in found["load"].measured
    wrong = examined(edit, cuont="7").failures
    assert "there is no setting 'cuont'; did you mean 'count'?" in wrong["load"][0]


def test_an_environment_without_an_oracle_passes_and_is_told(examined):
    recorder = examined(("taskset.py", "def oracle", "def perfect"))
    assert recorder.failures == {} and set(recorder.skipped) == {"oracle"}
    assert "have no oracle" in recorder.skipped["oracle"] and "`oracle(self)" in recorder.skipped["oracle"]


PICTURE = '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]'


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (("taskset.py", "    @vf.stop", "    NEEDS_CONTAINER = True\n\n    @vf.stop"), "needs a container"),
        (("taskset.py", " prompt=f", " prompt=None if index == 9 else f"), "has no prompt"),
        (("taskset.py", " prompt=f", f" prompt={PICTURE} if index == 9 else f"), "images in a prompt"),
    ],
)
def test_what_train_cannot_train_fails_one_check_and_skips_the_others(examined, edit, why):
    recorder = examined(edit)
    assert set(recorder.failures) == {"trainable"} and "`train` cannot train it: " in recorder.failures["trainable"][0]
    others = set(ROLLOUT_CHECKS) - {"trainable"}
    assert set(recorder.skipped) == others and all(why in text for text in recorder.skipped.values())
    assert why in recorder.failures["trainable"][0]


ENV = """

class {name}(vf.SingleAgentEnv):
    async def run(self, task, agents):
        {body}
"""
TALKS = """async with agents.agent.interaction(task) as interaction:
            if not (await interaction.turn()).terminated:
                await interaction.turn("Are you sure?")"""


@pytest.mark.parametrize(
    ("body", "failed"),
    [(TALKS, None), ("await agents.agent.run(task)\n        await agents.agent.run(task)", "more than once")],
)
def test_an_env_that_drives_the_conversation_is_played_or_named(examined, body, failed):
    name = f"Env{next(_numbers)}"
    recorder = examined(
        ("__init__.py", '"LocalEnv"', f'"{name}"'),
        ("__init__.py", "__all__ =", f"from .taskset import {name}\n\n__all__ ="),
        ("taskset.py", "import verifiers.v1 as vf", "import verifiers.v1 as vf" + ENV.format(name=name, body=body)),
        checks=["trainable", "limits"],
    )
    if failed is None:
        assert recorder.failures == {}
        assert f"{name} drives the conversation" in recorder.results["trainable"].measured
    else:
        assert failed in recorder.failures["trainable"][0]
