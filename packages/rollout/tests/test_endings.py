"""Every rollout ends with a reason of its own, and a failure is data: recorded on the trace, never raised."""

import asyncio
import time

import pytest
import verifiers.v1 as vf
from plumbob.rollout import Completion, EngineError, Limits, Sampling, engine_failed, run_group, run_rollout, to_sample
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.rollout.types import UnsupportedTaskset

# --- how a rollout ends ---------------------------------------------------------------------------------------------


def test_an_answer_completes_the_rollout(play):
    trace, _ = play([("kit_fetch", {}), "a"])
    assert (trace.stop_condition, trace.is_truncated, trace.is_completed) == ("agent_completed", False, True)
    sample = to_sample(trace, "g")
    assert (sample.stop, sample.truncated, sample.group, sample.reward) == ("agent_completed", False, "g", trace.reward)


def test_a_sample_has_the_weighted_components_of_its_reward(play, kit):
    class Polite(kit.Task):
        @vf.reward(weight=-2.0)
        async def shouting(self, trace: vf.Trace) -> float:
            return float(trace.last_reply.isupper())

    trace, _ = play(["NO"], task=Polite(kit.Data(prompt="Go.")))
    sample = to_sample(trace, "g")
    assert sample.rewards == {"brevity": 0.5 / 3, "shouting": -2.0}
    assert sample.reward_weights == {"brevity": 0.5, "shouting": -2.0}
    assert sum(sample.rewards.values()) == sample.reward == trace.reward


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_max_turns(play, turns):
    trace, engine = play([("kit_note", {"word": "x"})] * 5, max_turns=turns)
    assert (trace.stop_condition, trace.is_truncated, trace.ok) == ("max_turns", True, True)
    assert trace.num_turns == len(engine.prompts) == turns
    assert trace.nodes[-1].sampled  # nothing trails the last turn in the row
    assert to_sample(trace, "g").truncated


@pytest.mark.parametrize("reply", ["words " * 50, ("kit_fetch", {}), "<tool_call>" + "x " * 50])
def test_max_turn_tokens(play, reply):
    trace, engine = play([reply], sampling=Sampling(max_tokens=10))
    assert (trace.stop_condition, trace.is_truncated, trace.ok) == ("max_turn_tokens", True, True)
    assert trace.calls[-1].finish_reason == "length"
    assert len(engine.drawn[0].token_ids) == 10 == to_sample(trace, "g").num_sampled
    assert trace.tool_messages == [] and to_sample(trace, "g").truncated


def test_a_cut_turn_is_truncated_even_when_it_holds_a_whole_call(play, qwen):
    said = qwen.call_text("kit_fetch", {})
    room = len(qwen.ids(said)) + 3
    trace, _ = play([said + "and so on and on"], sampling=Sampling(max_tokens=room))
    assert trace.assistant_messages[0].tool_calls
    assert (trace.stop_condition, trace.is_truncated) == ("max_turn_tokens", True)


def test_a_stop_token_as_the_last_one_allowed_is_no_cut(play, qwen):
    trace, _ = play(["a"], sampling=Sampling(max_tokens=len(qwen.ids("a")) + 1))
    assert trace.stop_condition == "agent_completed"


def test_a_first_prompt_that_leaves_no_room(play):
    _, engine = play(["x"])
    length = len(engine.prompts[0])
    trace, engine = play(["x"], max_context=length)
    assert (trace.stop_condition, trace.is_truncated, trace.ok) == ("max_total_tokens", True, True)
    assert engine.prompts == [] and trace.num_turns == 0
    sample = to_sample(trace, "g")  # the prompt is kept, so that the reason can be seen
    assert sample.num_sampled == 0 and 0 < len(sample.token_ids) <= length
    trace, engine = play(["x"], max_context=length + 1)
    assert trace.num_turns == 1 and engine.samplings[0].max_tokens == 1


def test_a_context_that_fills_up_between_turns(play):
    _, engine = play([("kit_fetch", {}), "a"])
    second = len(engine.prompts[1])
    for room in (second, second - 1, len(engine.prompts[0]) + len(engine.drawn[0].token_ids)):
        trace, again = play([("kit_fetch", {}), "a"], max_context=room)
        assert (trace.stop_condition, trace.is_truncated, trace.ok) == ("max_total_tokens", True, True)
        assert len(again.prompts) == trace.num_turns == 1
        assert len(trace.branches[0].token_ids) <= room and trace.nodes[-1].sampled


def test_a_context_that_fills_up_within_a_turn(play):
    _, engine = play([("kit_fetch", {}), "a"])
    room = len(engine.prompts[1]) + 5
    trace, engine = play([("kit_fetch", {}), "words " * 50], max_context=room)
    assert (trace.stop_condition, trace.is_truncated) == ("max_total_tokens", True)
    assert engine.samplings[1].max_tokens == 5 and len(trace.branches[0].token_ids) == room


class Waiting:
    """An engine that thinks for a while before each turn."""

    def __init__(self, engine, *seconds):
        self.engine, self.seconds = engine, list(seconds)

    async def generate(self, prompt_ids, sampling):
        await asyncio.sleep(self.seconds.pop(0))
        return await self.engine.generate(prompt_ids, sampling)


@pytest.mark.parametrize("waits", [(600,), (0, 600)])
def test_wall_time_in_the_engine(qwen, scripted, kit, waits):
    engine = Waiting(scripted(qwen, [qwen.call_text("kit_fetch", {}), "x"]), *waits)
    task = kit.Task(kit.Data(prompt="Go.", results=["a"]))
    start = time.perf_counter()
    trace = asyncio.run(run_rollout(task, engine, qwen.chat, limits=Limits(max_seconds=0.5)))
    assert time.perf_counter() - start < 300
    assert (trace.stop_condition, trace.is_timeout, trace.ok) == ("agent_timeout", True, True)
    assert trace.num_turns == len(waits) - 1
    sample = to_sample(trace, "g")  # also when nothing was drawn yet
    assert sample.truncated and sample.stop == "agent_timeout"
    assert sample.num_sampled == sum(len(c.token_ids) for c in engine.engine.drawn)


def test_wall_time_in_a_tool(play):
    trace, _ = play([("kit_note", {"word": "x", "pause": 5}), "x"], max_seconds=0.5)
    assert (trace.stop_condition, trace.ok, trace.num_turns) == ("agent_timeout", True, 1)
    assert to_sample(trace, "g").truncated and trace.metrics["words_noted"] == 0


def test_wall_time_before_the_first_prompt_is_an_error(play, kit):
    class Sleepy(kit.Task):
        async def setup(self, trace: vf.Trace) -> None:
            await asyncio.sleep(5)

    trace, engine = play(["x"], task=Sleepy(kit.Data(prompt="Go.")), max_seconds=0.1)
    assert not trace.ok and trace.errors[0].type == "Stuck"
    assert trace.errors[0].message == "stuck in the task's setup for 0.1 s"
    assert engine.prompts == []


def test_a_stop_hook_ends_the_rollout_under_its_own_name(play, kit):
    class Once(kit.Task):
        @vf.stop
        async def called_once(self, trace: vf.Trace) -> bool:
            return len(trace.tool_messages) >= 1

        @vf.stop
        def never(self, trace: vf.Trace) -> bool:
            return False

    trace, engine = play([("kit_fetch", {})] * 5, task=Once(kit.Data(prompt="Go.", results=["a"])))
    assert (trace.stop_condition, trace.is_truncated, trace.ok) == ("called_once", False, True)
    assert len(engine.prompts) == 2
    trace, _ = play([("kit_fetch", {})] * 5, task=Once(kit.Data(prompt="Go.", results=["a"])), max_turns=2)
    assert trace.stop_condition == "called_once"  # the taskset's own reason goes before the limit's


def test_a_stop_hook_that_fires_at_once_leaves_the_prompt(play, kit):
    class Never(kit.Task):
        @vf.stop
        def at_once(self, trace: vf.Trace) -> bool:
            return True

    trace, engine = play(["x"], task=Never(kit.Data(prompt="Go.")))
    assert trace.ok and trace.stop_condition == "at_once" and engine.prompts == []
    assert to_sample(trace, "g").num_sampled == 0


# --- failures are data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [EngineError("out of memory"), RuntimeError("boom"), TimeoutError("read timed out")])
@pytest.mark.parametrize("turn", [0, 1])
def test_an_engine_that_fails(play, error, turn):
    trace, _ = play([("kit_fetch", {})] * turn + [error])
    assert not trace.ok and trace.is_completed and not trace.is_timeout
    assert (trace.errors[0].type, trace.errors[0].message) == (type(error).__name__, str(error))
    assert trace.stop_condition == "error" and trace.rewards == {} and trace.num_turns == turn
    assert engine_failed(trace) and engine_failed(type(trace).model_validate(trace.to_record()))


def test_an_engine_that_draws_nothing(qwen, kit):
    class Mute:
        async def generate(self, prompt_ids, sampling):
            return Completion((), (), "stop")

    trace = asyncio.run(run_rollout(kit.Task(kit.Data(prompt="Go.")), Mute(), qwen.chat))
    assert not trace.ok and "no token" in trace.errors[0].message


@pytest.mark.parametrize("where", ["setup", "finalize", "reward", "metric", "stop", "`broken_reward` gave None"])
def test_an_environment_that_fails(play, kit, where):
    def fail():
        raise KeyError(where)

    class Broken(kit.Task):
        async def setup(self, trace: vf.Trace) -> None:
            where == "setup" and fail()

        async def finalize(self, trace: vf.Trace) -> None:
            where == "finalize" and fail()

        @vf.reward
        async def broken_reward(self, trace: vf.Trace) -> float:
            return fail() if where == "reward" else 0.0 if "None" not in where else None

        @vf.metric
        async def broken_metric(self, trace: vf.Trace) -> float:
            return fail() if where == "metric" else 0.0

        @vf.stop
        async def broken_stop(self, trace: vf.Trace) -> bool:
            return fail() if where == "stop" else False

    trace, _ = play(["x"], task=Broken(kit.Data(prompt="Go.")))
    assert not trace.ok and trace.is_completed
    assert not engine_failed(trace)
    assert trace.errors[0].type == "TaskError" and where in trace.errors[0].message
    assert trace.num_turns == (0 if where in ("setup", "stop") else 1)


@pytest.mark.parametrize("where", ["setup", "setup_task"])
def test_a_toolset_that_fails(play, kit, where):
    async def fail(self, *args):
        raise OSError("no index")

    broken = type("Broken", (kit.Toolset,), {where: fail})

    class Task(kit.Task):
        @classmethod
        def toolsets(cls, config):
            return [broken(vf.ToolsetConfig())]

    trace, _ = play(["x"], task=Task(kit.Data(prompt="Go.")))
    assert not trace.ok and trace.errors[0].type == "ToolsetError" and trace.stop_condition == "toolset_error"


def test_a_template_that_refuses_the_prompt(play, families, kit):
    calls = [vf.ToolCall(id=str(i), name="kit_fetch", arguments="{}") for i in range(2)]
    prompt = [vf.UserMessage(content="Go."), vf.AssistantMessage(tool_calls=calls)]
    trace, _ = play(["x"], task=kit.Task(kit.Data(prompt=prompt)), family=families("llama3.1"))
    assert not trace.ok and "single tool-calls at once" in trace.errors[0].message


def test_cancellation_is_not_swallowed(qwen, scripted, kit):
    async def main():
        engine = Waiting(scripted(qwen, ["x"]), 30)
        rollout = asyncio.create_task(run_rollout(kit.Task(kit.Data(prompt="Go.")), engine, qwen.chat))
        await asyncio.sleep(0.05)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(main())


# --- what cannot run here -------------------------------------------------------------------------------------------


def unsupported(kit):
    class Container(kit.Task):
        NEEDS_CONTAINER = True

    class Interceptor(kit.Task):
        @vf.intercept
        def censor(self, request: vf.Request) -> vf.Request | None:
            return None

    class Watcher(kit.Task):
        @vf.stop
        def too_long(self, request: vf.Request) -> bool:
            return False

    class Runner(kit.Task):
        @vf.reward
        async def tests_pass(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
            return 1.0

    class Measurer(kit.Task):
        @vf.metric
        async def disk(self, runtime) -> float:
            return 1.0

    go = kit.Data(prompt="Go.")
    return [
        (Container(go), "needs a container"),
        (kit.Task(kit.Data(prompt="Go.", image="python:3.12")), "needs a container"),
        (kit.Task(kit.Data(id="t7", prompt="Go \ud83d")), r"the prompt of KitTask t7 holds half of a surrogate pair"),
        (Interceptor(go), "@vf.intercept"),
        (Watcher(go), "Watcher.too_long stops on a Request or Response"),
        (Runner(go), "Runner.tests_pass"),
        (Measurer(go), "Measurer.disk"),
    ]


@pytest.mark.parametrize("case", range(7))
def test_a_task_that_needs_more_than_this_process_is_refused_by_name(kit, case):
    task, why = unsupported(kit)[case]
    with pytest.raises(UnsupportedTaskset, match=why):
        adapter.check_supported(task)


def test_a_task_that_needs_no_more_is_accepted(play, kit):
    class Careful(kit.Task):
        @vf.reward
        async def either(self, trace: vf.Trace, runtime: vf.Runtime | None = None) -> float:
            return 1.0

    trace, _ = play(["x"], task=Careful(kit.Data(prompt="Go.")))
    assert trace.ok and trace.rewards["either"].value == 1.0


def test_a_rollout_without_a_question_is_refused(play, kit):
    with pytest.raises(UnsupportedTaskset, match="has no prompt"):
        play(["x"], task=kit.Task(kit.Data()))


def test_images_are_refused(play, kit):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    prompt = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
    with pytest.raises(UnsupportedTaskset, match="images"):
        play(["x"], task=kit.Task(kit.Data(prompt=prompt)))


def test_text_parts_are_joined(play, qwen, kit):
    prompt = [{"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "now?"}]}]
    _, engine = play(["x"], task=kit.Task(kit.Data(prompt=prompt)))
    assert "user\nWhat\nnow?<|im_end|>" in qwen.text(engine.prompts[0])


def test_an_engine_that_stops_without_a_stop_token(qwen, kit):
    class Careless:
        async def generate(self, prompt_ids, sampling):
            return Completion((5,), (0.0,), "stop")

    trace = asyncio.run(run_rollout(kit.Task(kit.Data(prompt="Go.")), Careless(), qwen.chat))
    assert not trace.ok and "does not end with a stop token" in trace.errors[0].message


def test_a_reward_that_hangs(play, kit):
    class Hanging(kit.Task):
        @vf.reward
        async def patience(self, trace: vf.Trace) -> float:
            await asyncio.sleep(30)
            return 1.0

    trace, _ = play(["x"], task=Hanging(kit.Data(prompt="Go.")), max_seconds=0.5)
    assert not trace.ok and trace.errors[0].message == "stuck in `patience` for 0.5 s"


def test_a_rollout_refuses_what_it_cannot_honour(play, kit):
    with pytest.raises(UnsupportedTaskset, match="needs a container"):
        play(["x"], task=unsupported(kit)[0][0])


def test_a_tool_whose_ground_is_gone_fails_the_rollout(play, kit):
    """What no model can mend is no observation: vf.ToolsetError leaves the group, any other failure is told."""

    class Toolset(kit.Toolset):
        TOOL_PREFIX = "kit"

        @vf.tool
        def ask(self, server_is_down: bool) -> str:
            """Ask the server."""
            raise vf.ToolsetError("the index is gone") if server_is_down else RuntimeError("no such thing")

    class Task(kit.Task):
        @classmethod
        def toolsets(cls, config):
            return [Toolset(vf.ToolsetConfig())]

    task = Task(kit.Data(prompt="Go.", results=[]))
    trace, _ = play([("kit_ask", {"server_is_down": True}), "never drawn"], task=task)
    assert not trace.ok and "the index is gone" in trace.errors[-1].message and trace.num_turns == 1
    trace, _ = play([("kit_ask", {"server_is_down": False}), "well"], task=task)
    assert trace.ok and "no such thing" in trace.tool_messages[0].content


def test_waiting_for_a_slot_is_not_the_policys_time(qwen, kit):
    """The clock jumps far beyond the limit whenever a rollout gives its slot to the next one."""

    class OneSlot(asyncio.Semaphore):
        def release(self):
            skipped[0] += 100.0
            super().release()

    class Engine:
        async def generate(self, prompt_ids, sampling):
            await asyncio.sleep(0)
            return Completion((closer,), (0.0,), "stop")

    async def main():
        loop = asyncio.get_running_loop()
        own = loop.time
        loop.time = lambda: own() + skipped[0]
        limits, task = Limits(max_seconds=50.0), kit.Task(kit.Data(prompt="Go."))
        return await run_group(task, Engine(), qwen.chat, Sampling(), limits, 8, slots=OneSlot(1))

    skipped, closer = [0.0], qwen.id_of(qwen.closer)
    traces = asyncio.run(main())
    assert skipped[0] == 800.0 and all(trace.ok and trace.stop_condition == "agent_completed" for trace in traces)


def test_a_row_knows_how_long_its_tools_took(play):
    trace, _ = play([("kit_note_slowly", {"word": "x", "seconds": 0.1}), ("kit_note_slowly", {"word": "y"}), "x"])
    row = to_sample(trace, "g")
    assert 0.12 <= row.tool_seconds < row.seconds
    trace, _ = play(["x"])
    assert to_sample(trace, "g").tool_seconds == 0
