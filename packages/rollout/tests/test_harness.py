"""The in-process harness under upstream's own Env, over real HTTP: a scripted model server, verifiers' interception."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import aiohttp
import pytest
import verifiers.v1 as vf
from aiohttp import web
from plumbob.rollout import ScriptedChat, run_rollout
from plumbob.rollout import harness as harness_module
from plumbob.rollout.harness import InProcessHarness, LocalEnv, LocalEnvConfig

KIT = "kit_environment"


def calls(*pairs, content=""):
    """An assistant message with these calls: (name, arguments as an object, or as the text that the model wrote)."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"id_{i}_{name}",
                "type": "function",
                "function": {"name": name, "arguments": a if isinstance(a, str) else json.dumps(a)},
            }
            for i, (name, a) in enumerate(pairs)
        ],
    }


def says(text):
    return {"role": "assistant", "content": text}


@dataclass
class ScriptedModel:
    """Answers turn k of a conversation with `replies[k]`: a message, a (message, finish reason), or an HTTP status."""

    replies: list[Any] | Callable[[list[dict]], Any]
    requests: list[dict] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    """Statuses to answer first, one for each request."""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        if self.failures:
            return web.json_response({"error": {"message": "not now"}}, status=self.failures.pop(0))
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        reply = self.replies(body["messages"]) if callable(self.replies) else self.replies[turn]
        if isinstance(reply, str):
            return web.json_response({"error": {"message": reply}}, status=400)
        message, finish = (
            reply if isinstance(reply, tuple) else (reply, "tool_calls" if "tool_calls" in reply else "stop")
        )
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "usage": usage}
        return web.json_response({**answer, "choices": [choice]})


@pytest.fixture
def upstream(kit, monkeypatch):
    """Play tasks of a taskset through verifiers' Env, as vf-eval does; returns their traces and the model."""

    def run(replies, tasks=None, shared=(), failures=(), **settings):
        tasks = tasks or [kit.Task(kit.Data(prompt="Go.", system_prompt="Be brief.", results=["a", "b"]))]

        class Taskset(vf.Taskset[type(tasks[0]), vf.TasksetConfig]):
            def load(self):
                return tasks

            @classmethod
            def toolsets(cls, config):
                return list(shared)

        module = ModuleType(KIT)
        module.__all__ = ["InProcessHarness", "LocalEnv", "Taskset"]
        module.InProcessHarness, module.LocalEnv, module.Taskset = InProcessHarness, LocalEnv, Taskset
        monkeypatch.setitem(sys.modules, KIT, module)
        model = ScriptedModel(replies, failures=list(failures))
        traces = asyncio.run(evaluate({"taskset": {"id": KIT}, **settings}, model))
        return (traces[0] if len(tasks) == 1 else traces), model

    return run


async def evaluate(settings, model):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    env = vf.load_environment(vf.resolve_env_config(settings))
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    context = vf.ModelContext("scripted", vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
    gate = asyncio.Semaphore(16)
    async with env.serving():
        episodes = await asyncio.gather(
            *(env.run_slot(slot, context, gate) for t in env.taskset for slot in env.slots(t))
        )
    await runner.cleanup()
    assert not any(episode.errors for episode in episodes), episodes[0].errors
    return [trace for episode in episodes for trace in episode.traces]


def contents(trace):
    return [(message.role, message.content) for message in trace.branches[0].messages]


# --- what verifiers takes from an environment that exports both -------------------------------------------------------


def test_they_are_the_defaults_of_an_environment_that_exports_them():
    config = vf.resolve_env_config({"taskset": {"id": "vf_lookup", "split": "eval"}})
    assert type(config) is LocalEnvConfig and config.taskset.split == "eval"
    assert isinstance(config.agent.runtime, vf.SubprocessConfig) and config.agent.max_turns == 16
    env = vf.load_environment(config)
    assert type(env) is LocalEnv
    assert type(vf.load_harness(config.agent_harnesses()["agent"])) is InProcessHarness
    overridden = vf.resolve_env_config({"taskset": {"id": "vf_lookup"}, "agent": {"max_turns": 3}})
    assert isinstance(overridden.agent.runtime, vf.SubprocessConfig) and overridden.agent.max_turns == 3


# --- rollouts -------------------------------------------------------------------------------------------------------

PLAY = [calls(("kit_note", {"word": "x"}), ("kit_fetch", {"index": 1}), content="Well."), says("The end.")]


def test_tools_run_on_the_trace_s_own_state_and_no_process_is_started(upstream, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a process was started: {args}")

    upstream(PLAY)  # verifiers asks git for its own version, once in a process
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    trace, model = upstream(PLAY)
    assert trace.ok and trace.stop_condition == "agent_completed"
    assert trace.state.log == ["x"] and trace.metrics["words_noted"] == 1
    assert trace.reward == 0.5 / (1 + len("The end."))
    assert contents(trace) == [
        ("system", "Be brief."),
        ("user", "Go."),
        ("assistant", "Well."),
        ("tool", "x"),
        ("tool", "b"),
        ("assistant", "The end."),
    ]
    assert [tool["function"]["name"] for tool in model.requests[0]["tools"]][:2] == ["kit_break", "kit_count"]
    assert (trace.task.type, trace.agent.config.harness.id, trace.agent.runtime.type) == ("KitTask", KIT, "subprocess")


@pytest.mark.parametrize(
    "replies",
    [
        PLAY,
        [calls(("", "<tool_call>{oops}")), calls(("kit_note", "[1]")), calls(("kit_note", "{")), says("Sorry.")],
        [
            calls(("nothing", {})),
            calls(("kit_break", {"how": "error"})),
            calls(("kit_fetch", {"index": "x"})),
            says("!"),
        ],
        [calls(("kit_note", {"word": f"{i}"})) for i in range(16)],
    ],
    ids=["plain", "unreadable", "failing", "long"],
)
def test_a_transcript_scores_as_in_plumbob_s_own_rollouts(upstream, replies, kit):
    theirs, _ = upstream(replies)
    task = kit.Task(theirs.task.data)
    ours = asyncio.run(run_rollout(task, ScriptedChat.of_record(theirs.to_record()), None))
    assert ours.ok and theirs.ok
    assert contents(ours) == [(role, content or "") for role, content in contents(theirs)]
    assert (ours.rewards, ours.metrics) == (theirs.rewards, theirs.metrics)
    assert (ours.state, ours.num_turns) == (theirs.state, theirs.num_turns)
    assert (ours.stop_condition, ours.is_truncated) == (theirs.stop_condition, theirs.is_truncated)


def test_rollouts_at_once_have_states_of_their_own(upstream, kit):
    def reply(messages):
        word = messages[1]["content"]
        return says(word) if messages[-1]["role"] == "tool" else calls(("kit_note", {"word": word, "pause": 0.05}))

    tasks = [kit.Task(kit.Data(prompt=f"w{i}", system_prompt="s")) for i in range(12)]
    traces, _ = upstream(reply, tasks)
    assert [trace.state.log for trace in traces] == [[f"w{i}"] for i in range(12)]


def test_what_a_taskset_shares_is_set_up_once_and_sees_each_rollout_s_state(upstream, kit):
    class Shared(kit.Toolset):
        TOOL_PREFIX = "kit"
        setups = 0

        async def setup(self):
            self.setups += 1

    toolset = Shared(vf.ToolsetConfig())

    def reply(messages):
        return says(".") if messages[-1]["role"] == "tool" else calls(("kit_note", {"word": messages[0]["content"]}))

    traces, _ = upstream(reply, [kit.BareTask(kit.Data(prompt=f"w{i}")) for i in range(3)], shared=[toolset])
    assert toolset.setups == 1
    assert [trace.state.log for trace in traces] == [["w0"], ["w1"], ["w2"]]


def test_a_conversation_may_open_with_messages(upstream, kit):
    prompt = [vf.UserMessage(content="Hello"), vf.AssistantMessage(content="Yes?"), vf.UserMessage(content="Go.")]
    trace, model = upstream(lambda messages: says("Gone."), [kit.Task(kit.Data(prompt=prompt))])
    assert trace.ok and trace.num_turns == 1
    assert [message["content"] for message in model.requests[0]["messages"]] == ["Hello", "Yes?", "Go."]


# --- endings --------------------------------------------------------------------------------------------------------


def test_the_last_turn_allowed_ends_it_with_a_score(upstream):
    trace, model = upstream([calls(("kit_note", {"word": "x"}))] * 9, agent={"max_turns": 2})
    assert (trace.ok, trace.stop_condition, trace.is_truncated, trace.num_turns) == (True, "max_turns", True, 2)
    assert len(model.requests) == 2 and trace.state.log == ["x", "x"] and trace.reward == 0.5


def test_a_stop_of_the_task_ends_it(upstream, kit):
    class Task(kit.Task):
        @vf.stop
        async def enough(self, trace: vf.Trace) -> bool:
            return trace.num_turns >= 1

    trace, _ = upstream(PLAY, [Task(kit.Data(prompt="Go.", results=["a", "b"]))])
    assert (trace.ok, trace.stop_condition, trace.num_turns) == (True, "enough", 1)


def test_a_reply_that_was_cut_short_ends_it_whatever_it_calls(upstream):
    trace, _ = upstream([(calls(("kit_note", {"word": "x"})), "length")])
    assert (trace.ok, trace.stop_condition, trace.is_truncated) == (True, "max_turn_tokens", True)
    assert trace.state.log == []


def test_a_context_that_is_full_ends_it_with_a_score(upstream):
    trace, _ = upstream([PLAY[0], "This model's maximum context length is 12 tokens, of which ..."])
    assert (trace.ok, trace.stop_condition, trace.is_truncated) == (True, "max_total_tokens", True)
    assert trace.num_turns == 1 and trace.reward == pytest.approx(0.5 / (1 + len("Well.")))


def test_a_server_that_is_busy_is_asked_again_and_the_turn_is_recorded_once(upstream):
    trace, model = upstream(PLAY, failures=[503, 429])
    assert trace.ok and trace.num_turns == 2 and len(model.requests) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("status", "asked"), [(401, 1), (500, harness_module.ATTEMPTS)])
def test_a_server_that_fails_is_an_error_of_the_rollout(upstream, status, asked):
    trace, model = upstream(PLAY, failures=[status] * 9)
    assert not trace.ok and trace.rewards == {}
    assert trace.errors[-1].type == "ProviderError" and trace.errors[-1].status_code == status
    assert len(model.requests) == asked


def test_a_toolset_that_does_not_set_up_is_an_error_of_the_rollout(upstream, kit):
    class Broken(kit.Toolset):
        async def setup_task(self, task):
            raise OSError("no index")

    class Task(kit.Task):
        @classmethod
        def toolsets(cls, config):
            return [Broken(vf.ToolsetConfig())]

    trace, _ = upstream(PLAY, [Task(kit.Data(prompt="Go."))])
    assert not trace.ok and trace.errors[-1].type == "ToolsetError" and "no index" in trace.errors[-1].message


@pytest.mark.slow
def test_a_connection_that_breaks_is_the_same_call_again():
    keys = []

    async def flaky(request):
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            request.transport.close()
        return web.json_response({})

    async def main():
        runner = web.AppRunner(app := web.Application())
        app.router.add_post("/", flaky)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            model = harness_module._Model(http, url, "secret", "m")
            answer = await model.reply([], [])
            await runner.cleanup()
            return answer, await model.reply([], [])

    answer, gone = asyncio.run(main())
    assert answer.status == 200 and len(keys) == 3 and len(set(keys)) == 1
    assert gone.status == 0 and "Cannot connect" in gone.body


def test_without_its_env_tasks_with_tools_are_refused_before_any_work(upstream, kit):
    upstream(PLAY)  # registers the environment
    config = vf.AgentConfig(harness={"id": KIT}, runtime=vf.SubprocessConfig(), model="m", client=vf.EvalClientConfig())
    with pytest.raises(ValueError, match="does not support MCP tools"):
        asyncio.run(vf.make_agent(config).run(kit.Task(kit.Data(prompt="Go."))))


def test_another_harness_gets_the_task_with_its_servers(upstream, kit, monkeypatch):
    """`null` would start processes; a harness that only looks at what it is given shows the same."""
    given = []

    class Looking(vf.Harness[vf.HarnessConfig]):
        SUPPORTS_MCP, NEEDS_CONTAINER = True, False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
            given.append(mcp_urls)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    module = ModuleType("looking_harness")
    module.__all__, module.Looking = ["Looking"], Looking
    monkeypatch.setitem(sys.modules, "looking_harness", module)

    class Task(kit.Task):
        @classmethod
        def toolsets(cls, config):
            # A server that runs already: verifiers hands its address on and starts nothing.
            return [kit.Toolset(vf.ToolsetConfig(url="http://127.0.0.1:9/mcp"))]

    upstream([], [Task(kit.Data(prompt="Go."))], agent={"harness": {"id": "looking_harness"}})
    assert given == [{"kit": "http://127.0.0.1:9/mcp"}]
