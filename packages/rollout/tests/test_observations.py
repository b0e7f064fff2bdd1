"""Whatever a model or a tool does becomes an observation; rollouts that run at once share nothing."""

import asyncio
import dataclasses
import json

import pytest
import verifiers.v1 as vf
from plumbob.rollout import Limits, Sampling, chat, derive_seed, run_group, run_rollout, to_sample


def observations(trace):
    return [message.content for message in trace.tool_messages]


def counts(trace):
    return {name.removeprefix("rollout/"): v for name, v in trace.metrics.items() if name.startswith("rollout/")}


# --- observations ---------------------------------------------------------------------------------------------------

OBSERVED = {
    "a result": (("kit_fetch", {"index": 1}), "b", "tool_calls"),
    "a default argument": (("kit_fetch", {}), "a", "tool_calls"),
    "an async tool": (("kit_note", {"word": "x"}), "x", "tool_calls"),
    "a typed result": (
        ("kit_count", {"colour": "red", "sizes": [1, 2]}),
        '{\n  "colour": "red",\n  "total": 3\n}',
        "tool_calls",
    ),
    "a list written as a string": (("kit_count", {"colour": "red", "sizes": "[1, 2]"}), '"total": 3', "tool_calls"),
    "an unknown tool": (
        ("fetch", {}),
        "Error: there is no tool 'fetch'; the tools are: kit_break, kit_count, kit_fetch, kit_note, kit_note_slowly.",
        "tool_errors",
    ),
    "a missing argument": (
        ("kit_note", {}),
        "Error: wrong arguments for kit_note: word: Field required",
        "tool_errors",
    ),
    "a wrong type": (
        ("kit_fetch", {"index": "first"}),
        "Error: wrong arguments for kit_fetch: index: Input should be a valid integer",
        "tool_errors",
    ),
    "wrong choices": (
        ("kit_count", {"colour": "green", "sizes": ["x"]}),
        "colour: Input should be 'red' or 'blue'; sizes.0: Input should be a valid integer",
        "tool_errors",
    ),
    "a tool that raises": (("kit_break", {}), "Error: RuntimeError: the pipe burst", "tool_errors"),
    "a tool that says why": (("kit_break", {"how": "value"}), "Error: no such pipe", "tool_errors"),
    "a tool that runs out of time": (("kit_break", {"how": "timeout"}), "Error: TimeoutError: too slow", "tool_errors"),
    "an index error": (("kit_fetch", {"index": 9}), "Error: IndexError: list index out of range", "tool_errors"),
    "bad JSON": (
        "<tool_call>{'name'}</tool_call>",
        "Error: this tool call could not be read: the call is not valid JSON",
        "malformed_calls",
    ),
    "an open tag": (
        "<tool_call>{",
        "Error: this tool call could not be read: <tool_call> was never closed with </tool_call>.",
        "malformed_calls",
    ),
    "no object": (
        "<tool_call>[]</tool_call>",
        "Error: this tool call could not be read: the call must be a JSON object.",
        "malformed_calls",
    ),
    "a name that is no text": (
        '<tool_call>{"name": "\\ud800"}</tool_call>',
        "Error: this tool call could not be read: the call is not valid JSON",
        "malformed_calls",
    ),
    "an argument that is no text": (
        '<tool_call>{"name": "kit_note", "arguments": {"word": "\\ud800"}}</tool_call>',
        "could not be read",
        "malformed_calls",
    ),
}


@pytest.mark.parametrize(("said", "seen", "counted"), OBSERVED.values(), ids=OBSERVED)
def test_a_call_becomes_an_observation_and_the_rollout_goes_on(play, qwen, said, seen, counted):
    trace, engine = play([said, "The end."])
    assert trace.ok, trace.errors
    assert trace.stop_condition == "agent_completed" and trace.num_turns == 2
    (observation,) = observations(trace)
    assert seen in observation
    assert f"<tool_response>\n{observation}\n</tool_response>" in qwen.text(engine.prompts[1])
    expected = {
        "turns": 2,
        "tools": 5,
        "tool_calls": counted != "malformed_calls",
        "tool_errors": 0,
        "malformed_calls": 0,
        "unread_calls": 0,
        "cut_texts": 0,
        counted: 1,
    }
    assert counts(trace) == expected
    assert trace.rewards["brevity"].score > 0


def test_llama_sees_its_mistakes_too(play, families):
    family = families("llama3.2")
    trace, _ = play(
        ['{"name": "kit_fetch", "parameters": {"index": }}', ("kit_fetch", {"index": 0}), "a"], family=family
    )
    assert trace.ok and counts(trace) == {
        "turns": 3,
        "tool_calls": 1,
        "tool_errors": 0,
        "malformed_calls": 1,
        "unread_calls": 0,
        "cut_texts": 0,
        "tools": 5,
    }
    assert "not valid JSON" in observations(trace)[0]


@pytest.mark.parametrize("result", ["a b " * 2_000_000, "\N{OLD ITALIC LETTER A}" * 3_000_000], ids=["words", "rare"])
def test_a_result_that_no_context_holds_is_cut_before_it_is_tokenised(play, qwen, kit, monkeypatch, result):
    read = []
    original = chat.tokenised
    monkeypatch.setattr(
        chat, "tokenised", lambda tokenizer, text: (read.append(len(text)), original(tokenizer, text))[1]
    )
    task = kit.Task(kit.Data(prompt="Go.", results=[result]))
    trace, _ = play([("kit_fetch", {}), "The end."], task, max_context=5000)
    assert trace.ok and trace.stop_condition == "max_total_tokens" and counts(trace)["cut_texts"] == 1
    assert max(read) < 5001 * qwen.chat.longest_token + 1000  # its beginning, and the template around it


def test_the_errors_of_a_trace_are_no_longer_than_anybody_reads(play, kit):
    class Loud(kit.Task):
        async def setup(self, trace):
            raise RuntimeError("no " * 1_000_000)

    trace, _ = play(["The end."], Loud(kit.Data(prompt="Go.")))
    (error,) = trace.errors
    assert not trace.ok and counts(trace)["cut_texts"] == 1
    assert "RuntimeError: no no " in error.message and len(error.message) + len(error.traceback) <= 40_000


def test_calls_of_one_turn_are_answered_in_order_and_see_each_other(play, qwen):
    calls = [("kit_note", {"word": "slow", "pause": 0.05}), ("nope", {}), ("kit_note", {"word": "fast"})]
    said = "Now.\n" + "\n".join(qwen.call_text(*call) for call in calls) + "\n<tool_call>{"
    trace, _ = play([said, "The end."])
    assert observations(trace)[0] == "slow" and observations(trace)[2] == "slow fast"
    assert "no tool 'nope'" in observations(trace)[1] and "never closed" in observations(trace)[3]
    assert counts(trace) == {
        "turns": 2,
        "tools": 5,
        "tool_calls": 3,
        "tool_errors": 1,
        "malformed_calls": 1,
        "unread_calls": 0,
        "cut_texts": 0,
    }
    message = trace.assistant_messages[0]
    assert message.content == "Now."
    assert [call.id for call in message.tool_calls] == [m.tool_call_id for m in trace.tool_messages]
    assert [call.name for call in message.tool_calls] == ["kit_note", "nope", "kit_note", ""]
    assert json.loads(message.tool_calls[0].arguments) == {"word": "slow", "pause": 0.05}
    assert trace.metrics["words_noted"] == 2


def test_call_ids_are_unique_in_a_rollout(play, qwen):
    trace, _ = play([qwen.call_text("kit_fetch", {}) * 2, qwen.call_text("kit_fetch", {}) * 2, "The end."])
    ids = [message.tool_call_id for message in trace.tool_messages]
    assert len(ids) == len(set(ids)) == 4


def test_a_task_without_tools_reads_no_calls(play, qwen, kit):
    trace, engine = play([("kit_fetch", {})], task=kit.BareTask(kit.Data(prompt="Go.")))
    assert trace.stop_condition == "agent_completed" and trace.last_reply == qwen.call_text("kit_fetch", {})
    assert trace.assistant_messages[0].tool_calls is None and trace.tools == []
    assert "kit_fetch" not in qwen.text(engine.prompts[0])


class Odd(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def surrogate(self) -> str:
        return "caf\udce9"

    @vf.tool
    def nothing(self) -> None:
        return None

    @vf.tool
    def many(self) -> list[str]:
        return ["a", "b"]

    @vf.tool
    def later(self):
        return asyncio.sleep(0, "at last")


@pytest.mark.parametrize(
    ("name", "seen"), [("surrogate", "caf?"), ("nothing", "[]"), ("many", "a\nb"), ("later", "at last")]
)
def test_results_of_any_kind_become_text(play, kit, name, seen):
    trace, _ = play(
        [(name, {}), "The end."], task=kit.BareTask(kit.Data(prompt="Go.")), shared=[Odd(vf.ToolsetConfig())]
    )
    assert trace.ok, trace.errors
    assert observations(trace) == [seen]
    json.dumps(trace.to_record(), ensure_ascii=False).encode()


def test_two_tools_of_one_name_are_refused(play, kit):
    trace, _ = play(["x"], shared=[kit.Toolset(vf.ToolsetConfig())])
    assert (
        not trace.ok
        and "two tools are named 'kit_break'; give one of their toolsets another TOOL_PREFIX" in trace.errors[0].message
    )


def test_few_shot_calls_in_the_prompt_reach_the_template(play, qwen, kit):
    shown = vf.ToolCall(id="0", name="kit_fetch", arguments='{"index": 3}')
    prompt = [
        vf.UserMessage(content="Fetch 3."),
        vf.AssistantMessage(content="Yes.", tool_calls=[shown]),
        vf.ToolMessage(tool_call_id="0", name="kit_fetch", content="Paris"),
        vf.AssistantMessage(content="Paris"),
        vf.UserMessage(content="Fetch 0."),
    ]
    trace, engine = play(["a"], task=kit.Task(kit.Data(prompt=prompt, system_prompt="Be brief.", results=["a"])))
    text = qwen.text(engine.prompts[0])
    assert f"Yes.\n{qwen.call_text('kit_fetch', {'index': 3})}<|im_end|>" in text
    assert trace.num_turns == 1 and [node.sampled for node in trace.nodes] == [False] * 6 + [True]
    assert sum(trace.branches[0].sampled_mask) == len(engine.drawn[0].token_ids)


# --- many rollouts at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["kit_note", "kit_note_slowly"])
@pytest.mark.parametrize("placement", ["shared", "per rollout"])
def test_fifty_rollouts_at_once_keep_their_state_apart(qwen, scripted, kit, placement, tool):
    shared = [kit.Toolset(vf.ToolsetConfig())] if placement == "shared" else []
    cls = kit.BareTask if shared else kit.Task

    async def main():
        rollouts = []
        for i in range(50):
            pause = {"pause" if tool == "kit_note" else "seconds": (i % 7) / 1000}
            replies = [qwen.call_text(tool, {"word": f"w{i}.{k}", **pause}) for k in range(3)]
            task = cls(kit.Data(prompt=f"Go {i}."))
            engine = scripted(qwen, [*replies, f"done {i}"])
            rollouts.append(run_rollout(task, engine, qwen.chat, shared_toolsets=shared))
        return await asyncio.gather(*rollouts)

    for i, trace in enumerate(asyncio.run(main())):
        words = [f"w{i}.{k}" for k in range(3)]
        assert trace.ok and trace.state.log == words
        assert observations(trace) == [" ".join(words[: k + 1]) for k in range(3)]
        assert trace.metrics["words_noted"] == 3 and trace.last_reply == f"done {i}"


def test_a_group_draws_every_turn_with_a_seed_of_its_own_and_the_same_ones_again(qwen, scripted, kit):
    task = kit.Task(kit.Data(prompt="Go.", results=["a"]))

    def seeds(seed):
        def reply(prompt, sampling):
            return "The end." if "tool_response" in qwen.text(prompt) else qwen.call_text("kit_fetch", {})

        engine = scripted(qwen, reply)
        traces = asyncio.run(run_group(task, engine, qwen.chat, Sampling(seed=seed), Limits(), 4))
        assert len(traces) == 4 and all(trace.ok and trace.num_turns == 2 for trace in traces)
        assert len({trace.id for trace in traces}) == 4
        return [sampling.seed for sampling in engine.samplings]

    first = seeds(7)
    assert len(set(first)) == 8 and all(0 <= seed < 2**63 for seed in first)
    assert sorted(seeds(7)) == sorted(first)
    assert not set(seeds(8)) & set(first)
    assert set(seeds(None)) == {None}


def test_seeds_are_the_same_on_every_machine():
    assert derive_seed(7, 0) == 9211390842685670451
    assert len({derive_seed(a, b) for a in range(30) for b in range(30)}) == 900


def test_the_engine_is_asked_for_what_the_caller_wants(play, qwen):
    wanted = Sampling(max_tokens=64, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1)
    _, engine = play(["x"], sampling=wanted)
    assert engine.samplings == [dataclasses.replace(wanted, stop_token_ids=qwen.chat.stop_token_ids)]


def test_a_sample_is_as_old_as_its_oldest_turn(qwen, scripted, kit):
    engine = scripted(qwen, [qwen.call_text("kit_fetch", {}), "x"], versions=[3, 4])
    trace = asyncio.run(run_rollout(kit.Task(kit.Data(prompt="Go.", results=["a"])), engine, qwen.chat))
    assert to_sample(trace, "g").policy_version == 3
