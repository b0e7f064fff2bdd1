import asyncio
import re

import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import verifiers_adapter as adapter
from pydantic import ValidationError
from verifiers.v1.types import AssistantMessage, ToolCall
from vf_lookup import LookupTaskset
from vf_lookup.taskset import VALUES, LookupConfig, make_data, split_of

configs = st.builds(
    lambda low, extra, table, distractors, values, seed, split: LookupConfig(
        id="vf_lookup",
        min_hops=low,
        max_hops=low + extra,
        table_size=low + extra + distractors + table,
        distractors=distractors,
        num_values=values,
        seed=seed,
        split=split,
    ),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 30),
    st.integers(0, 4),
    st.integers(2, len(VALUES)),
    st.integers(0, 10_000),
    st.sampled_from(["train", "eval"]),
)


def follow(data) -> list[str]:
    """The replies of an agent that does as it is told."""
    replies, key = [], re.search(r"\d+", data.prompt)[0]
    while True:
        replies.append(data.table[key])
        if match := re.match(r"value=(\w+)", replies[-1]):
            return [*replies, match[1]]
        key = re.match(r"next=(\d+)", replies[-1])[1]


@settings(max_examples=60, deadline=None)
@given(configs, st.integers(0, 10_000))
def test_the_chain_leads_to_the_answer_in_the_stated_number_of_hops(config, index):
    data = make_data(config, index)
    *replies, answer = follow(data)
    assert answer == data.answer in VALUES[: config.num_values]
    assert config.min_hops <= len(replies) == len(data.chain) <= config.max_hops
    assert len(data.table) == config.table_size
    # No other entry holds the answer, and no decoy points back into the chain: the chain is the only way.
    decoys = {key: reply for key, reply in data.table.items() if key not in data.chain}
    assert all(f"value={data.answer}" not in reply for reply in decoys.values())
    assert not any(key in reply for reply in decoys.values() for key in data.chain)
    for reply in replies:
        mentioned = re.findall(r"\d{4}", reply.partition("see also")[2])
        assert len(set(mentioned)) == config.distractors and set(mentioned) <= set(decoys)


@settings(max_examples=30, deadline=None)
@given(configs, st.integers(0, 1000))
def test_a_task_depends_on_config_and_index_alone(config, index):
    assert make_data(config, index) == make_data(config, index)
    longer = config.model_copy(update={"num_examples": config.num_examples + 7})
    assert make_data(longer, index) == make_data(config, index)


def test_splits_start_at_different_keys_whatever_the_seed():
    starts = {
        split: {
            make_data(LookupConfig(id="vf_lookup", split=split, seed=seed), i).chain[0]
            for seed in range(20)
            for i in range(50)
        }
        for split in ("train", "eval")
    }
    assert not starts["train"] & starts["eval"]
    assert len(starts["eval"]) > 400
    assert all(split_of(key) == split for split, keys in starts.items() for key in keys)


def test_hops_are_evenly_spread():
    hops = [len(make_data(LookupConfig(id="vf_lookup"), i).chain) for i in range(2000)]
    assert set(hops) == {1, 2, 3, 4, 5}
    assert all(0.17 < hops.count(h) / 2000 < 0.23 for h in set(hops))


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"min_hops": 4, "max_hops": 3}, r"max_hops \(3\) is less than min_hops \(4\)"),
        ({"table_size": 5, "distractors": 2}, r"table_size \(5\) cannot hold 5 links and 2 distractors"),
        ({"num_values": 1}, "greater than or equal to 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings_, message):
    with pytest.raises(ValidationError, match=message):
        LookupConfig(id="vf_lookup", **settings_)


def play(turns: list[tuple[str, list[tuple[str, str]]]]) -> vf.Trace:
    """Score a transcript: per turn its content and its calls (tool name, raw arguments), which the tools answer."""
    task = next(iter(LookupTaskset(LookupConfig(id="vf_lookup", min_hops=3, max_hops=3))))

    async def run():
        trace = adapter.new_trace(task)
        box = await adapter.open_tools(task, trace)
        for content, calls in turns:
            message = AssistantMessage(
                content=content.format(*task.data.chain, answer=task.data.answer),
                tool_calls=[
                    ToolCall(id=str(i), name=name, arguments=arguments.replace("$", "").format(*task.data.chain))
                    for i, (name, arguments) in enumerate(calls)
                ]
                or None,
            )
            adapter.add_turn(trace, [], message, adapter.Completion((1,), (0.0,), "stop"), 1, 0.0)
            for call in message.tool_calls or []:
                match = re.fullmatch(r'\{"key": "?(\d+)"?\}', call.arguments)
                if call.name == "lookup" and match:
                    await box.tools["lookup"].call({"key": match[1]})
        await adapter.finish(task, trace, 60)
        assert trace.ok, trace.errors
        return trace

    return asyncio.run(run())


def lookup(i: int) -> tuple[str, str]:
    return ("lookup", '{{"key": "' + f"{{{i}}}" + '"}}')


def test_the_right_answer_after_following_the_chain():
    trace = play([("", [lookup(0)]), ("", [lookup(1)]), ("", [lookup(2)]), ("{answer}", [])])
    assert trace.reward == 1.0
    expected = {"hops": 3, "links_followed": 3, "calls": 3, "repeated_calls": 0, "unknown_keys": 0}
    assert {name: trace.metrics[name] for name in expected} == expected
    assert (trace.metrics["malformed_calls"], trace.metrics["turns"]) == (0, 4)


@pytest.mark.parametrize(
    "last",
    ["The value is {answer}.", "{answer} {answer}", "", "amberly", "{2}"],
)
def test_only_the_exact_value_counts(last):
    assert play([("", [lookup(0)]), (last, [])]).reward == 0.0


def test_an_answer_beside_another_call_is_no_answer():
    assert play([("{answer}", [lookup(0)])]).reward == 0.0


def test_metrics_tell_what_went_wrong():
    trace = play(
        [
            ("", [lookup(0), lookup(0)]),
            ("", [lookup(2)]),
            ("", [("lookup", '{{"key": "12"}}'), ("find", '{{"key": "1"}}'), ("lookup", "oops"), ("", "<tool_call>")]),
            ("dunno", []),
        ]
    )
    metrics = trace.metrics
    assert trace.reward == 0.0
    assert metrics["links_followed"] == 1  # the third key before the second does not count
    assert metrics["calls"] == 7
    assert metrics["repeated_calls"] == 1
    assert metrics["unknown_keys"] == 1
    assert metrics["malformed_calls"] == 3
    assert metrics["turns"] == 4


def test_a_key_written_as_a_number_is_the_same_key():
    assert play([("", [("lookup", '{{"key": {0}}}')]), ("x", [])]).metrics["links_followed"] == 1
