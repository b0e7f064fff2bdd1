"""Whatever an environment's code does, its rollout ends with an error that names it, and the others go on."""

import asyncio
import contextlib
import signal
import sqlite3
import sys
import threading
import time

import pytest
import verifiers.v1 as vf
from plumbob.rollout import (
    ChatReply,
    Limits,
    ParsedCall,
    ScriptedChat,
    blocking,
    environment_code,
    run_rollout,
)
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.threads import tools as tool_threads
from plumbob.testing import hanging

CALLS = [ChatReply("", (ParsedCall("act", {}),)), ChatReply("", (ParsedCall("act_later", {}),)), ChatReply("done")]
SHORT = Limits(max_seconds=2.0, max_tool_seconds=0.3)


@pytest.fixture(autouse=True)
def forget_tools(monkeypatch):
    """What is known about a tool's calls is kept for the whole process. Short time limits need a quick watchdog."""
    adapter._specs.clear()
    monkeypatch.setattr(blocking, "TICK", 0.05)
    monkeypatch.setattr(environment_code, "GRACE_SECONDS", 0.5)


def play(case, limits=SHORT):
    """A rollout with the fault between two without, which have time enough on any machine."""

    async def main():
        tasks = [hanging.Case("", "").task(), case.task(), hanging.Case("", "").task()]
        each = (Limits(), limits, Limits())
        rollouts = (run_rollout(t, ScriptedChat(CALLS), None, limits=of) for t, of in zip(tasks, each, strict=True))
        return await asyncio.gather(*rollouts)

    before, trace, after = asyncio.run(main())
    for healthy in (before, after):
        assert healthy.ok and healthy.reward == 1.0, healthy.errors
    return trace


OFTEN = ("sleep",)
"""Faults that are tested in every run of the tests; the others bear the marker `slow`."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c.fault in OFTEN else [pytest.mark.slow], id=c.name) for c in hanging.CASES],
)
def test_a_rollout_whose_code_hangs_or_exits_is_an_error_that_names_it(case):
    trace = play(case)
    assert not trace.ok and trace.is_completed
    (error,) = trace.errors
    assert case.says in error.message and case.where in error.message
    assert error.type == ("Stuck" if case.says == "stuck" else "Escaped")


def test_a_signal_that_comes_when_the_code_has_been_interrupted_already_ends_nothing(monkeypatch):
    """The timer and the watchdog may send it at the same time."""

    class Stuck(environment_code.Stuck):
        def __init__(self, *args):
            signal.raise_signal(blocking.SIGNAL)
            super().__init__(*args)

    monkeypatch.setattr(environment_code, "Stuck", Stuck)
    with contextlib.suppress(Stuck):
        asyncio.run(environment_code.Caller(0.1).call("it", lambda: time.sleep(60)))
    assert not blocking._running


def test_a_second_signal_leaves_the_code_time_to_clean_up():
    cleaned = []

    def code():
        try:
            time.sleep(60)
        finally:
            signal.raise_signal(blocking.SIGNAL)
            cleaned.append("up")

    with pytest.raises(environment_code.Stuck):
        asyncio.run(environment_code.Caller(0.1).call("it", code))
    assert cleaned == ["up"] and not blocking._running


# --- in which thread a synchronous tool runs ---------------------------------------------------------------------------


class Bench(vf.Toolset[vf.ToolsetConfig]):
    """Tools that say in which thread they ran, and one that all rollouts must enter before it lets any of them go on."""

    TOOL_PREFIX = None
    meeting: threading.Barrier

    async def setup(self) -> None:
        self.database = sqlite3.connect(":memory:")  # refuses to work in another thread

    @vf.tool
    def where(self) -> str:
        return "here" if threading.current_thread() is threading.main_thread() else "elsewhere"

    @vf.tool
    def count(self) -> str:
        return str(self.database.execute("select 41 + 1").fetchone()[0])

    @vf.tool
    def meet(self) -> str:
        self.meeting.wait()
        return "met"

    @vf.tool
    def hang(self, how: str) -> str:
        if how in hanging.SYNC:
            hanging.SYNC[how][0]()
        return "fine"


class BenchTask(vf.Task[vf.TaskData, vf.State]):
    @classmethod
    def toolsets(cls, config):
        return [Bench(vf.ToolsetConfig())]

    @vf.reward
    async def fine(self, trace: vf.Trace) -> float:
        return 1.0


def calls(*names, limits=None, copies=1, **arguments):
    """Play rollouts that make these calls one after another; returns what each rollout saw, and the traces."""
    script = [*(ChatReply("", (ParsedCall(name, arguments),)) for name in names), ChatReply("done")]
    task = BenchTask(vf.TaskData(prompt="Go."))

    async def main():
        rollouts = (run_rollout(task, ScriptedChat(script), None, limits=limits or Limits()) for _ in range(copies))
        return await asyncio.gather(*rollouts)

    traces = asyncio.run(main())
    return [[message.content for message in trace.tool_messages] for trace in traces], traces


@pytest.fixture
def clock(monkeypatch):
    """A clock that each look advances by `clock.step` seconds: a synchronous call seems to take one step."""

    class Clock:
        now, step = 0.0, 0.0

        def __call__(self):
            self.now += self.step
            return self.now

    monkeypatch.setattr(tool_threads, "clock", made := Clock())
    return made


def test_a_fast_synchronous_tool_runs_in_the_loops_thread(clock):
    assert calls(*["where"] * 9)[0] == [["here"] * 9]


def test_a_tool_that_was_slow_three_times_in_a_row_runs_in_a_thread_from_then_on(clock):
    seen = []
    for step in (0.01, 0.01, 0.001, 0.01, 0.01, 0.01, 0.001, 0.001):
        clock.step = step
        seen += calls("where")[0][0]
    assert seen == ["here"] * 6 + ["elsewhere"] * 2


def test_slow_tools_of_several_rollouts_run_side_by_side(clock):
    """Every call waits until all eight have begun, which one after another they never would."""
    clock.step = 0.01
    Bench.meeting = threading.Barrier(1)
    calls(*["meet"] * 3)
    Bench.meeting = threading.Barrier(8)
    assert calls("meet", copies=8)[0] == [["met"]] * 8


def test_what_belongs_to_one_thread_goes_on_working_in_a_slow_tool(clock):
    clock.step = 0.01
    assert calls(*["count"] * 6, copies=3)[0] == [["42"] * 6] * 3


def test_a_slow_tool_that_hangs_in_its_thread_fails_its_rollout_and_then_runs_in_the_loops_thread(clock):
    """There a regular expression, too, can be ended; in a thread it would stop everything for good."""
    clock.step = 0.01
    calls(*["hang"] * 3, how="not at all")
    before = threads_in("_sleep")
    _, traces = calls("hang", limits=SHORT, copies=3, how="sleep")
    assert [trace.errors[0].message for trace in traces] == ["stuck in `hang` for 0.3 s"] * 3
    assert threads_in("_sleep") == before + 3  # a call into C cannot be ended in a thread
    for fault in ("regular expression", "sleep"):
        clock.now += 1000.0
        _, (trace,) = calls("hang", limits=SHORT, how=fault)
        assert trace.errors[0].message == "stuck in `hang` for 0.3 s"
    assert threads_in("_sleep") == before + 3


def threads_in(function):
    """Number of threads that are in a function of this name."""
    return sum(frame.f_code.co_name == function for frame in sys._current_frames().values())


def test_python_code_that_hangs_in_a_thread_is_ended_there(clock):
    clock.step = 0.01
    calls(*["hang"] * 3, how="not at all")
    _, (trace,) = calls("hang", limits=SHORT, how="busy loop")
    assert trace.errors[0].message == "stuck in `hang` for 0.3 s"
    while threads_in("_busy"):
        time.sleep(0.01)


def test_a_tool_that_always_hangs_is_called_only_now_and_then(clock):
    for _ in range(tool_threads.GIVEN_UP_AFTER):
        calls("hang", limits=SHORT, how="busy loop")
    _, (trace,) = calls("hang", limits=SHORT, how="busy loop")
    assert trace.errors[0].message == "`hang` was not called, because its last 3 calls hung"
    clock.now += 10.0
    _, (trace,) = calls("hang", limits=SHORT, how="busy loop")
    assert trace.errors[0].message == "stuck in `hang` for 0.3 s"


# --- time limits -------------------------------------------------------------------------------------------------------


def test_a_call_that_blocks_beyond_the_rollouts_own_limit_is_a_timeout(clock):
    trace = play(hanging.Case("sync tool", "sleep"), Limits(max_seconds=0.5, max_tool_seconds=60))
    assert trace.ok and trace.stop_condition == "agent_timeout"


@pytest.mark.slow
def test_blocking_does_not_count_against_other_rollouts():
    """The first rollout blocks the event loop for longer than the second may take in all."""
    assert play(hanging.Case("reward", "sleep"), Limits(max_seconds=60, max_tool_seconds=1.5)).errors

    class Slow:
        async def reply(self, messages, tools, sampling):
            await asyncio.sleep(0.3)
            return ChatReply("done")

    async def main():
        blocking_one = run_rollout(
            hanging.Case("stop", "sleep").task(), ScriptedChat(CALLS), None, limits=Limits(max_tool_seconds=1.5)
        )
        other = run_rollout(hanging.Case("", "").task(), Slow(), None, limits=Limits(max_seconds=1.0))
        return await asyncio.gather(other, blocking_one)

    other, blocked = asyncio.run(main())
    assert blocked.errors[0].message == "stuck in `over` for 1.5 s"
    assert other.ok and other.stop_condition == "agent_completed"


def test_code_that_cleans_up_when_it_is_cancelled_may_do_so():
    closed = []

    class Closing(hanging.FaultyTask):
        @vf.stop
        async def slow(self, trace: vf.Trace) -> bool:
            try:
                await asyncio.sleep(hanging.FOREVER)
            finally:
                await asyncio.sleep(0.01)
                closed.append(True)
            return False

    task = Closing(hanging.FaultyData(prompt="Go."))
    trace = asyncio.run(run_rollout(task, ScriptedChat(CALLS), None, limits=SHORT))
    assert trace.errors[0].message == "stuck in `slow` for 0.3 s" and closed == [True]


def test_a_time_limit_of_the_environments_own_works_as_ever():
    class Careful(hanging.FaultyTask):
        @vf.reward
        async def judged(self, trace: vf.Trace) -> float:
            try:
                async with asyncio.timeout(0.05):
                    await asyncio.sleep(hanging.FOREVER)
            except TimeoutError:
                pass
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.sleep(hanging.FOREVER), 0.05)
            await asyncio.sleep(0.01)
            return 1.0

    task = Careful(hanging.FaultyData(prompt="Go."))
    trace = asyncio.run(run_rollout(task, ScriptedChat(CALLS), None, limits=Limits()))
    assert trace.ok and trace.rewards["judged"].value == 1.0


def test_cancelling_a_rollout_is_no_fault_of_its_environment():
    async def main():
        rollout = asyncio.create_task(run_rollout(hanging.Case("reward", "awaits").task(), ScriptedChat(CALLS), None))
        await asyncio.sleep(0.2)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(main())
