"""What the adapter takes for granted about verifiers, held against the installed version.

If one of these fails after an upgrade, the modules to look at are verifiers_adapter, _messages and _scoring.
"""

import asyncio
import json
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp.server.mcpserver import MCPServer
from plumbob.rollout import run_rollout, tasksets, to_sample, verifiers_messages, verifiers_scoring
from plumbob.rollout import verifiers_adapter as adapter
from verifiers.v1.errors import HarnessError, InterceptionError
from verifiers.v1.graph import prepare_turn
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.runtimes import provision_runtime
from verifiers.v1.session import RolloutLimits
from verifiers.v1.trace import WireTrace
from verifiers.v1.types import Response, TurnTokens
from vf_lookup.taskset import LookupConfig, LookupTaskset
from vf_lookup.tools import LookupToolset

PROPERTY = settings(max_examples=30, deadline=None)


@pytest.fixture
def trace(play, qwen, kit):
    """A finished rollout with two calls in a turn, a failed one, and an answer."""
    two = qwen.call_text("kit_fetch", {"index": 0}) + qwen.call_text("kit_note", {"word": "x"})
    task = kit.Task(kit.Data(id="t1", prompt="Go.", system_prompt="Be brief.", results=["naïve 雪"]))
    played, _ = play([f"Yes. {two}", ("kit_break", {}), "The end."], task=task)
    assert played.ok
    return played


def advertised(toolset):
    """The tools as verifiers' own server would list them, by the names its harness gives them."""
    server = MCPServer("test")
    toolset.register(server)
    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    return server, {prefix + tool.name: tool for tool in asyncio.run(server.list_tools())}


def boxed(task, shared=()):
    async def main():
        return await adapter.open_tools(task, verifiers_messages.new_trace(task), shared)

    return asyncio.run(asyncio.wait_for(main(), 5))


def assert_described_alike(task, toolset):
    _, theirs = advertised(toolset)
    ours = boxed(task).schemas
    assert [schema["function"]["name"] for schema in ours] == list(theirs)
    for schema in ours:
        tool = theirs[schema["function"]["name"]]
        assert schema["type"] == "function"
        assert schema["function"]["parameters"] == tool.input_schema
        assert schema["function"]["description"] == (tool.description or "")


def test_tools_are_described_as_the_mcp_server_would(kit):
    assert_described_alike(kit.Task(kit.Data()), kit.Toolset(vf.ToolsetConfig()))


def test_lookup_is_described_as_the_mcp_server_would():
    task = next(iter(LookupTaskset(LookupConfig(id="lookup", num_examples=1))))
    assert_described_alike(task, LookupToolset(vf.ToolsetConfig()))


CALLS = [
    ("fetch", {"index": 1}),
    ("fetch", {"index": "1"}),
    ("fetch", {}),
    ("note", {"word": "x", "ignored": 1}),
    ("note", {"word": '"x"'}),
    ("count", {"colour": "red", "sizes": "[1, 2]"}),
    ("count", {"colour": "red", "sizes": [1, 2], "scale": 0.5}),
    ("nothing", {}),
    ("several", {}),
    ("nested", {}),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_a_result_reads_as_upstream_s_harness_would_show_it(kit, name, arguments):
    class Kit(kit.Toolset):
        results = ("a", "b")

        @vf.tool
        def nothing(self) -> None: ...

        @vf.tool
        def several(self) -> list[str]:
            return ["a", "b"]

        @vf.tool
        def nested(self) -> list[dict]:
            return [{"é": [1.5, None]}, {}]

    server, _ = advertised(Kit(vf.ToolsetConfig()))
    result = asyncio.run(server.call_tool(name, arguments))
    box = boxed(kit.BareTask(kit.Data()), [Kit(vf.ToolsetConfig())])
    assert asyncio.run(box.tools[f"kit_{name}"].call(arguments)) == mcp_content_to_chat_content(result.content)


@pytest.mark.parametrize(("name", "arguments"), [("fetch", {"index": "x"}), ("note", {}), ("count", {"colour": "x"})])
def test_what_upstream_refuses_is_refused(kit, name, arguments):
    server, _ = advertised(kit.Toolset(vf.ToolsetConfig()))
    with pytest.raises(Exception, match="validation error"):
        asyncio.run(server.call_tool(name, arguments))
    box = boxed(kit.Task(kit.Data()))
    with pytest.raises(ValueError, match=f"wrong arguments for kit_{name}"):
        asyncio.run(box.tools[f"kit_{name}"].call(arguments))


def test_outside_a_rollout_a_toolset_has_a_state_of_its_own(qwen, scripted, kit):
    """The state is found through a context variable, which must not leak into the caller's context."""
    shared = kit.Toolset(vf.ToolsetConfig())

    async def main():
        engine = scripted(qwen, [qwen.call_text("kit_note", {"word": "x"}), "The end."])
        trace = await run_rollout(kit.BareTask(kit.Data(prompt="Go.")), engine, qwen.chat, shared_toolsets=[shared])
        return trace, shared.state

    trace, outside = asyncio.run(main())
    assert trace.state.log == ["x"] and type(trace.state) is kit.State
    assert outside is not trace.state and outside.log == []


def test_the_record_is_read_back_by_verifiers(trace, kit):
    record = trace.to_record()
    wire = WireTrace.model_validate(json.loads(json.dumps(record)))
    assert wire.to_record() == record
    ours, theirs = trace.branches[0], wire.branches[0]
    assert (theirs.token_ids, theirs.sampled_mask) == (ours.token_ids, ours.sampled_mask)
    assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
    assert theirs.messages == ours.messages and theirs.tools == ours.tools
    assert (wire.id, wire.ok, wire.reward, wire.metrics) == (trace.id, True, trace.reward, trace.metrics)
    assert (wire.stop_condition, wire.num_turns, wire.is_truncated) == ("agent_completed", 3, False)
    assert (wire.task.type, wire.task.data.id, wire.task.key) == ("KitTask", "t1", trace.task.key)
    assert wire.task.data.model_extra == {"results": ["naïve 雪"]}
    assert kit.Data.model_validate(wire.task.data.model_dump()) == trace.task.data
    assert to_sample(wire, "g").token_ids == to_sample(trace, "g").token_ids


@pytest.mark.parametrize("replies", [[RuntimeError("boom")], ["words " * 50], [("kit_fetch", {})] * 3])
def test_the_record_of_a_rollout_that_ended_otherwise_is_read_back_too(play, replies):
    trace, _ = play(replies, max_turns=2)
    wire = WireTrace.model_validate(json.loads(json.dumps(trace.to_record())))
    assert (wire.ok, wire.stop_condition, wire.errors) == (trace.ok, trace.stop_condition, trace.errors)
    assert wire.is_truncated == trace.is_truncated


def test_the_full_precision_form_is_read_back_exactly(trace):
    again = WireTrace.model_validate(trace.model_dump(mode="python"))
    assert again.branches[0].logprobs == trace.branches[0].logprobs


def test_the_reward_is_what_scoring_the_record_alone_gives(trace, kit):
    task = kit.Task(trace.task.data)
    again = WireTrace.model_validate(trace.to_record())
    again.rewards, again.metrics, again.state = {}, {}, trace.state
    asyncio.run(task.score(again))
    assert again.reward == trace.reward == 0.5 / (1 + len("The end."))
    assert again.rewards == trace.rewards
    assert {k: v for k, v in trace.metrics.items() if "/" not in k} == again.metrics == {"words_noted": 1.0}


class Scored(vf.Task):
    @vf.metric
    async def length(self, trace):
        await asyncio.sleep(0)
        return len(trace.last_reply)

    @vf.metric(priority=1)
    async def parts(self, task, trace):
        return {"words": 2, "own": task.idx, "length": 7}

    @vf.reward(weight=0.25, priority=-1)
    async def several(self, trace, runtime=None):
        return {"first": 1, "second": trace.metrics["words"] + (runtime is None)}


class ScoredOnce(vf.Task):
    @vf.reward(weight=3)
    async def only(self):
        return True


class Unscored(vf.Task):
    @vf.metric
    async def fails(self, trace):
        raise KeyError("gone")

    @vf.reward
    async def never(self, trace):
        return 1.0


class Judged(ScoredOnce):
    def plugged_judges(self):
        async def score(task, trace):
            return {"style": trace.num_turns + task.idx}

        return [SimpleNamespace(score=score, reward_name="judged", config=SimpleNamespace(weight=0.5))]


WEIGHTED = {"rewards": {"only": {"weight": 0.5}}}


@pytest.mark.parametrize(
    ("cls", "config"),
    [(Scored, {}), (ScoredOnce, {}), (ScoredOnce, WEIGHTED), (Unscored, {}), (Judged, {}), (vf.Task, {})],
)
def test_metrics_and_rewards_are_those_that_upstream_records(cls, config):
    """Metrics and rewards are called without upstream's `score`, whose asyncio tasks take as long as a fast reward."""
    task = cls(vf.TaskData(idx=4, prompt="Go."), vf.TaskConfig(**config))
    ours, theirs = (verifiers_messages.new_trace(task) for _ in range(2))
    plan = verifiers_scoring.Plan(task)
    asyncio.run(verifiers_scoring.finish(plan, ours, 5))
    try:
        asyncio.run(task.score(theirs))
    except Exception as error:
        theirs.record_error(error)
    assert list(ours.rewards.items()) == list(theirs.rewards.items())
    assert list(ours.metrics.items()) == list(theirs.metrics.items())
    assert [(e.type, e.message) for e in ours.errors] == [(e.type, e.message) for e in theirs.errors]


def test_a_task_that_scores_by_itself_is_left_to_its_own_code():
    class Own(ScoredOnce):
        async def score(self, trace, runtime=None):
            await super().score(trace, runtime)
            trace.record_reward("more", 1)

    plan = verifiers_scoring.Plan(Own(vf.TaskData(prompt="Go."), vf.TaskConfig()))
    asyncio.run(verifiers_scoring.finish(plan, trace := verifiers_messages.new_trace(plan.task), 5))
    assert trace.ok and trace.reward == 4


def test_the_nodes_are_those_that_upstream_builds_of_the_same_tokens(play, kit, family):
    """Committed turn by turn through verifiers' own graph, the same prompts and completions give the same trace."""
    one = [family.call_text("kit_fetch", {"index": i}) for i in range(2)]
    replies = [(";" if family.name.startswith("llama") else "\n").join(one), one[0], "The end."]
    task = kit.Task(kit.Data(prompt="Go.", system_prompt="Be brief.", results=["a", "b"]))
    ours, engine = play(replies, task=task, family=family)
    theirs = verifiers_messages.new_trace(task)
    path, ends, offset = [], [], 0
    turns = zip(engine.prompts, engine.drawn, strict=True)
    for node in ours.nodes:
        if not node.sampled:
            path.append(node.message)
            ends.append((offset, offset := offset + len(node.token_ids)))
            continue
        prompt, completion = next(turns)
        tokens = TurnTokens(
            prompt_ids=prompt,
            completion_ids=list(completion.token_ids),
            completion_logprobs=list(completion.logprobs),
            message_spans=list(ends),
            is_content=[flag for n in ours.nodes for flag in n.is_content][: len(prompt)],
            bridged=theirs.nodes != [],
        )
        response = Response(id="", created=0, model="", message=node.message, finish_reason="stop", tokens=tokens)
        prepare_turn(theirs, list(path), ours.tools).commit(response)
        path.append(node.message)
        ends.append((offset, offset := offset + len(node.token_ids)))

    def parts(trace):
        fields = ("parent", "message", "sampled", "token_ids", "mask", "logprobs", "is_content", "tools")
        return [{field: getattr(node, field) for field in fields} for node in trace.nodes]

    assert parts(theirs) == parts(ours)
    assert len(theirs.branches) == 1


def test_stop_reasons_are_named_and_counted_as_upstream_s(play):
    trace, _ = play([("kit_fetch", {})] * 2, max_turns=2)
    assert RolloutLimits(max_turns=2).reached(trace) == trace.stop_condition
    whole = trace.num_total_tokens
    assert RolloutLimits(max_total_tokens=whole).reached(trace) == "max_total_tokens"
    assert RolloutLimits(max_total_tokens=whole + 1).reached(trace) is None
    assert whole == len(trace.branches[0].token_ids)


def test_every_field_of_a_node_is_the_one_that_validation_would_set(trace):
    """Nodes are built without validation, which is slow: they must hold all that validation would give them."""
    for node in trace.nodes:
        assert type(node).model_validate(node.model_dump()).model_dump() == node.model_dump()
    for call in trace.calls:
        assert type(call).model_validate(call.model_dump()).model_dump() == call.model_dump()


@PROPERTY
@given(text=st.text())
def test_any_text_of_a_conversation_survives_the_record(kit, text):
    task = kit.Task(kit.Data(prompt=text, results=[text]))
    trace = verifiers_messages.new_trace(task)
    for message in verifiers_messages.initial_messages(task):
        verifiers_messages.add_context(trace, message, [1, 2], [False, True])
    record = json.loads(json.dumps(trace.to_record()))
    assert WireTrace.model_validate(record).messages == [vf.UserMessage(content=text)]


# --- what the harness takes for granted -------------------------------------------------------------------------------


def test_a_task_without_servers_is_the_same_task_with_the_same_tools(kit):
    task = kit.Task(kit.Data(results=["a"]))
    clone = adapter.without_servers(task)
    assert (type(clone), clone.data, clone.config, clone.key) == (kit.Task, task.data, task.config, task.key)
    # Upstream asks the instance; what it would start a server for is what it gets here.
    assert clone.toolsets(clone.config) == [] and len(task.toolsets(task.config)) == 1

    async def main():
        return await adapter.bind_tools(clone, verifiers_messages.new_trace(clone))

    assert list(asyncio.run(main()).tools) == list(boxed(task).tools)


@pytest.mark.parametrize(("status", "error"), [(0, InterceptionError), (400, HarnessError)])
def test_a_failed_program_is_attributed_to_its_boundary(kit, status, error):
    class Harness(vf.Harness[vf.HarnessConfig]):
        async def launch(self, *args):
            raise NotImplementedError

    async def main():
        async with provision_runtime(vf.SubprocessConfig()) as runtime:
            trace = verifiers_messages.new_trace(kit.BareTask(kit.Data()))
            await Harness(vf.HarnessConfig())._check_result(trace, runtime, adapter.failed_program(status, "boom"))

    with pytest.raises(error, match="boom"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "body", "full"),
    [
        (400, "This model's Maximum Context Length is 8 tokens", True),
        (413, "Request Entity Too Large", True),
        (400, "rollout stopped: max_turns", False),
        (500, "maximum context length", False),
    ],
)
def test_a_full_context_is_told_from_other_refusals(status, body, full):
    assert adapter.is_context_overflow(status, body) is full


@pytest.mark.parametrize("prompt", ["Go.", [vf.UserMessage(content="Go.")]])
def test_the_first_messages_in_openai_s_format(prompt):
    user = {"role": "user", "content": "Go."}
    assert verifiers_messages.opening(None, prompt) == [user]
    assert verifiers_messages.opening("Be brief.", prompt) == [{"role": "system", "content": "Be brief."}, user]


# --- settings of a taskset ------------------------------------------------------------------------------------------


def test_settings_are_read_as_their_fields_types():
    taskset = tasksets.make_taskset(LookupTaskset, "vf_lookup", {"num_examples": "3", "split": "eval"})
    assert (taskset.config.num_examples, taskset.config.split) == (3, "eval")
    assert len(list(taskset)) == 3


def test_a_setting_with_settings_of_its_own_is_a_json_object():
    halved = {"task": '{"rewards": {"correct": {"weight": 0.5}}}', "num_examples": "1"}
    taskset = tasksets.make_taskset(LookupTaskset, "vf_lookup", halved)
    assert taskset.config.task.rewards["correct"].weight == 0.5
    assert next(iter(taskset)).config == taskset.config.task


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"task": "{half"}, "task: Input should be a valid dictionary"),
        ({"num_example": 3}, "there is no setting 'num_example'; did you mean 'num_examples'?"),
        ({"qqq": 3}, "there is no setting 'qqq'$"),
        ({"split": "dev"}, "split: Input should be 'train' or 'eval'"),
        ({"min_hops": 6}, r"max_hops \(5\) is less than min_hops \(6\)"),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings, why):
    with pytest.raises(ValueError, match=why) as caught:
        tasksets.make_taskset(LookupTaskset, "vf_lookup", settings)
    assert "\n" not in str(caught.value)


def test_choices_of_a_setting():
    assert tasksets.setting_choices("vf_lookup", "split") == ("train", "eval")
    assert tasksets.setting_choices("vf_lookup", "seed") == ()
    assert tasksets.setting_choices("vf_lookup", "nope") is None


def test_the_toolsets_of_a_taskset_serve_all_its_rollouts(kit):
    class Taskset(vf.Taskset[kit.BareTask, vf.TasksetConfig]):
        def load(self):
            return []

        @classmethod
        def toolsets(cls, config):
            return [kit.Toolset(vf.ToolsetConfig())]

    (toolset,) = tasksets.shared_toolsets(Taskset(vf.TasksetConfig(id="x")))
    assert type(toolset) is kit.Toolset


# --- the environment that ships with us, through all of it ----------------------------------------------------------


def test_lookup_played_to_the_end_is_rewarded(play, family):
    task = next(iter(LookupTaskset(LookupConfig(id="lookup", num_examples=1, min_hops=3, max_hops=3))))
    replies = [("lookup", {"key": key}) for key in task.data.chain]
    replies.insert(1, ("lookup", {"key": 12}))
    trace, _ = play([*replies, task.data.answer], task=task, family=family)
    assert trace.ok and trace.reward == 1.0
    assert trace.metrics["links_followed"] == 3 and trace.metrics["unknown_keys"] == 1
    assert trace.metrics["rollout/tool_calls"] == 4 and trace.metrics["rollout/tool_errors"] == 0
    assert [m.content for m in trace.tool_messages][-1] == f"value={task.data.answer}"
