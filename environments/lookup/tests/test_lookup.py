import asyncio
import hashlib
import json
import re
from pathlib import Path

import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import Completion, Limits, verifiers_messages, verifiers_scoring
from plumbob.rollout import verifiers_adapter as adapter
from pydantic import ValidationError
from verifiers.v1.types import AssistantMessage, ToolCall
from vf_lookup import LookupTaskset
from vf_lookup.taskset import PRESETS, VALUES, LookupConfig, expected_reward, make_data, split_of

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
        trace = verifiers_messages.new_trace(task)
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
            verifiers_messages.add_turn(trace, [], message, Completion((1,), (0.0,), "stop"), 1, 0.0)
            for call in message.tool_calls or []:
                match = re.fullmatch(r'\{"key": "?(\d+)"?\}', call.arguments)
                if call.name == "lookup" and match:
                    await box.tools["lookup"].call({"key": match[1]})
        await verifiers_scoring.finish(verifiers_scoring.Plan(task), trace, 60)
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


def sizes(config: LookupConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in PRESETS["easy"]}


def test_without_a_difficulty_the_tasks_are_what_they_always_were():
    """The bundled policy was trained on these; a change here must be meant."""
    digest = hashlib.sha256()
    for split in ("train", "eval"):
        for index in range(200):
            data = make_data(LookupConfig(id="vf_lookup", split=split), index)
            digest.update(data.model_dump_json(exclude_none=True).encode())
    assert digest.hexdigest() == "cfdbf230cd6a1c5f011ef05aeb3442c0ce054d6032bd04ca66982701bd8b7a21"
    assert sizes(LookupConfig()) == {"min_hops": 1, "max_hops": 5, "table_size": 16, "distractors": 0, "num_values": 64}


@pytest.mark.parametrize("difficulty", PRESETS)
def test_a_difficulty_sets_the_sizes(difficulty):
    config = LookupConfig(id="vf_lookup", difficulty=difficulty)
    assert sizes(config) == PRESETS[difficulty]
    hops = [len(make_data(config, index).chain) for index in range(300)]
    assert (min(hops), max(hops)) == (config.min_hops, config.max_hops)
    # Written out and read again it is the same, as in a stored configuration.
    assert LookupConfig.model_validate(config.model_dump()) == config


def test_what_is_given_wins_over_the_difficulty():
    config = LookupConfig(id="vf_lookup", difficulty="hard", distractors=0, max_hops="6")
    assert sizes(config) == {**PRESETS["hard"], "distractors": 0, "max_hops": 6}
    # Also where it equals the default without a difficulty.
    assert LookupConfig(difficulty="hard", min_hops=1).min_hops == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"difficulty": "impossible"}, "'trivial', 'easy', 'medium', 'hard' or 'extreme'"),
        ({"difficulty": ["hard"]}, "'trivial', 'easy', 'medium', 'hard' or 'extreme'"),
        (
            {"difficulty": "hard", "max_hops": 3},
            r"min_hops \(4\); difficulty hard sets the settings that are not given",
        ),
        (
            {"difficulty": "hard", "table_size": 8},
            r"table_size \(8\) cannot hold 10 links and 2 distractors; difficulty",
        ),
    ],
)
def test_a_difficulty_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        LookupConfig(id="vf_lookup", **given)


def test_every_difficulty_fits_the_default_number_of_turns():
    assert all(preset["max_hops"] + 1 <= Limits().max_turns for preset in PRESETS.values())


@pytest.mark.parametrize("p", [percent / 100 for percent in range(30, 97)])
def test_some_difficulty_suits_a_policy_of_any_strength(p):
    rewards = [expected_reward(preset["min_hops"], preset["max_hops"], p) for preset in PRESETS.values()]
    assert any(0.295 <= reward <= 0.705 for reward in rewards)
    assert rewards == sorted(rewards, reverse=True)


def test_the_readme_states_the_presets_and_what_they_mean():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    head = next(line for line in readme.splitlines() if line.startswith("| p |"))
    probabilities = [float(cell) for cell in head.split("|")[2:-1]]
    for name, preset in PRESETS.items():
        shortest, longest = preset["min_hops"], preset["max_hops"]
        hops = str(shortest) if shortest == longest else f"{shortest}-{longest}"
        row = f"| `{name}` | {hops} | {preset['table_size']} | {preset['distractors']} | {preset['num_values']} |"
        assert row in readme
        rewards = [expected_reward(shortest, longest, p) for p in probabilities]
        assert f"| `{name}` | {' | '.join(map(shown, rewards))} |" in readme
    assert f"| none | {' | '.join(shown(expected_reward(1, 5, p)) for p in probabilities)} |" in readme


def shown(reward: float) -> str:
    return f"**{reward:.2f}**" if 0.295 <= reward <= 0.705 else f"{reward:.2f}"


async def play_messages(task, messages) -> vf.Trace:
    trace = verifiers_messages.new_trace(task)
    box = await adapter.open_tools(task, trace)
    for message in messages:
        verifiers_messages.add_turn(trace, [], message, Completion((1,), (0.0,), "stop"), 1, 0.0)
        for call in message.tool_calls or []:
            await box.tools[call.name].call(json.loads(call.arguments))
    await verifiers_scoring.finish(verifiers_scoring.Plan(task), trace, 60)
    assert trace.ok, trace.errors
    return trace


@pytest.mark.parametrize("difficulty", [None, *PRESETS])
def test_the_oracle_scores_one(difficulty):
    for task in LookupTaskset(LookupConfig(id="vf_lookup", difficulty=difficulty, num_examples=30, split="eval")):
        messages = task.oracle()
        trace = asyncio.run(play_messages(task, messages))
        assert trace.reward == 1.0
        assert len({call.id for message in messages for call in message.tool_calls or []}) == len(task.data.chain)
        assert trace.metrics["links_followed"] == trace.metrics["calls"] == trace.metrics["hops"]
        assert not trace.metrics["unknown_keys"] + trace.metrics["malformed_calls"] + trace.metrics["repeated_calls"]
        assert task.prediction(trace) == {"id": task.key, "answer": task.data.answer}


@pytest.mark.parametrize(
    ("last", "answer"),
    [(("It is amber.", []), "It is amber."), (("", []), None), (("amber", [lookup(0)]), None)],
)
def test_a_prediction_is_the_last_reply_or_null(last, answer):
    task = next(iter(LookupTaskset(LookupConfig(id="vf_lookup", min_hops=3, max_hops=3))))
    row = task.prediction(play([("", [lookup(0)]), last]))
    assert json.loads(json.dumps(row)) == {"id": "lookup-train-0-0", "answer": answer}
