"""The trained row is, id for id, what the engine saw and what it drew: for any conversation, tool and template."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import Limits, Sampling, run_rollout
from plumbob.testing.exact_rows import assert_exact

PROPERTY = settings(max_examples=30, deadline=None)

SPECIAL = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "</think>",
    "<tool_call>",
    "PLUMBOB-SENTINEL-0f6c1d",
]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["", " ", "\n\n", "  a ", "\tb\r\n", '"quoted"', "{{ 7 }}", "naïve – 雪 👩‍🚀"]),
    st.lists(st.one_of(st.sampled_from(SPECIAL), st.text(max_size=5)), max_size=4).map("".join),
)


def play(task, engine, family, **limits):
    return asyncio.run(run_rollout(task, engine, family.chat, Sampling(max_tokens=200, seed=7), Limits(**limits)))


def assert_tools_described(trace, engine, family, names):
    text = family.text(engine.prompts[0])
    assert all(f'"{name}"' in text for name in names)
    assert [tool.name for tool in trace.tools] == list(names)


@PROPERTY
@given(system=st.none() | TEXTS, question=TEXTS, results=st.lists(TEXTS, max_size=4), said=st.lists(TEXTS, max_size=3))
def test_scripted_conversations(family, scripted, kit, system, question, results, said):
    task = kit.Task(kit.Data(prompt=question, system_prompt=system, results=results))
    calls = [family.call_text("kit_fetch", {"index": i}) for i in range(len(results))]
    talk = "" if family.name.startswith("llama") else "".join(said)
    engine = scripted(family, [*(talk + call for call in calls), "".join(said)] + ["The end."] * 20)
    trace = play(task, engine, family, max_context=100_000)
    assert trace.ok, trace.errors
    assert_exact(trace, engine, family)
    assert_tools_described(trace, engine, family, [tool.name for tool in trace.nodes[0].tools])
    assert "kit_fetch" in {tool.name for tool in trace.tools}


@pytest.mark.slow
@PROPERTY
@given(seed=st.integers(0, 2**32), question=TEXTS, results=st.lists(TEXTS, max_size=4))
def test_engines_that_draw_any_ids(family, scripted, random_ids, kit, seed, question, results):
    """Untrained policies write special tokens, half characters, ids that no token has, and calls cut anywhere."""
    rng = random.Random(seed)
    task = kit.Task(kit.Data(prompt=question, results=results))
    short = scripted(family, [""])
    play(task, short, family, max_context=100_000)
    room = len(short.prompts[0]) + rng.randrange(400)

    engine = scripted(family, random_ids(family, rng))
    trace = play(task, engine, family, max_turns=rng.randrange(1, 8), max_context=room)
    assert trace.ok, trace.errors
    assert len(trace.branches[0].token_ids) <= room + len(family.ids(family.header))
    if trace.num_turns:
        assert_exact(trace, engine, family)


@pytest.mark.slow
@PROPERTY
@given(contents=st.lists(TEXTS, min_size=1, max_size=4))
def test_several_results_in_one_turn(family, scripted, kit, contents):
    one = [family.call_text("kit_fetch", {"index": i}) for i in range(len(contents))]
    engine = scripted(family, [(";" if family.name.startswith("llama") else "\n").join(one), "The end."])
    trace = play(kit.Task(kit.Data(prompt="Fetch all.", results=contents)), engine, family, max_context=100_000)
    assert trace.ok, trace.errors
    assert_exact(trace, engine, family)
    assert [message.content for message in trace.tool_messages] == contents


def test_an_engine_may_keep_the_prompt_that_it_was_given(family, scripted, kit):
    class Keeper(scripted):
        async def generate(self, prompt_ids, sampling):
            kept.append(prompt_ids)
            return await super().generate(prompt_ids, sampling)

    kept = []
    engine = Keeper(family, [family.call_text("kit_fetch", {})] * 3)
    play(kit.Task(kit.Data(prompt="Fetch.", results=["a"])), engine, family, max_turns=3, max_context=100_000)
    assert kept == engine.prompts


# --- the row reads as the template would write it -------------------------------------------------------------------

WORDS = st.text(alphabet="abcdefgh XYZ.,'\"é雪", max_size=30).map(str.strip)
SAID = WORDS.filter(bool)


@pytest.mark.slow
@PROPERTY
@given(
    question=SAID,
    system=st.none() | SAID,
    thoughts=st.lists(SAID, min_size=4, max_size=4),
    turns=st.lists(st.tuples(WORDS, st.lists(SAID, min_size=1, max_size=3)), max_size=3),
    answer=SAID,
)
def test_a_canonical_conversation_is_the_template_s_own_rendering(
    family, scripted, kit, question, system, thoughts, turns, answer
):
    if family.name == "qwen3-nothink":
        turns = []  # the template writes the empty thought before the last turn only
    results, replies = [], []
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": question})
    for (talk, contents), thought in zip(turns, thoughts, strict=False):
        if family.name.startswith("llama"):
            talk, contents = "", contents[:1]
        arguments = [{"index": len(results) + i} for i in range(len(contents))]
        calls = [family.call_text("kit_fetch", a) for a in arguments]
        between = "" if family.name == "bundled" else "\n"
        replies.append(thinking(family, thought) + (talk + between if talk else "") + between.join(calls))
        said = [{"type": "function", "function": {"name": "kit_fetch", "arguments": a}} for a in arguments]
        messages.append({"role": "assistant", "content": talk, "reasoning_content": thought, "tool_calls": said})
        messages += [{"role": "tool", "content": content} for content in contents]
        results += contents
    replies.append(thinking(family, thoughts[-1]) + answer)
    messages.append({"role": "assistant", "content": answer})
    if family.name == "qwen3":
        messages[-1]["reasoning_content"] = thoughts[-1]

    engine = scripted(family, replies)
    trace = play(
        kit.Task(kit.Data(prompt=question, system_prompt=system, results=results)), engine, family, max_context=100_000
    )
    assert trace.ok and trace.num_turns == len(replies)
    tools = [
        {"type": "function", "function": t.model_dump(include={"name", "description", "parameters"})}
        for t in trace.tools
    ]
    whole = family.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    row = family.text(trace.branches[0].token_ids)
    assert whole.rstrip("\n") == row
    assert trace.last_reply == answer
    assert [m.reasoning_content for m in trace.assistant_messages] == (
        [*thoughts[: len(turns)], thoughts[-1]] if family.name == "qwen3" else [None] * len(replies)
    )


def thinking(family, thought):
    return f"<think>\n{thought}\n</think>\n\n" if family.name == "qwen3" else ""


# --- what once went wrong elsewhere ---------------------------------------------------------------------------------


def test_the_header_before_every_turn_and_the_tools_before_the_first_are_in_the_trained_row(family, scripted, kit):
    """Two silent defects of the trainer that came before this one: both were in the prompt, neither in the row."""
    task = kit.Task(kit.Data(prompt="Fetch.", results=["a", "b"]))
    engine = scripted(family, [family.call_text("kit_fetch", {"index": i}) for i in (0, 1)] + ["The end."])
    trace = play(task, engine, family, max_context=100_000)
    branch = trace.branches[0]
    header = family.ids(family.header)
    starts = [i for i, sampled in enumerate(branch.sampled_mask) if sampled and not branch.sampled_mask[i - 1]]
    assert len(starts) == 3
    for start in starts:
        assert branch.token_ids[start - len(header) : start] == header
    first_prompt = family.text(branch.token_ids[: starts[0]])
    for tool in trace.tools:
        assert f'"{tool.name}"' in first_prompt and tool.description in first_prompt.replace("\\n", "\n")


def test_llama_may_call_twice_in_a_turn_although_its_template_cannot_write_that(families, scripted, kit):
    family = families("llama3.1")
    call = family.call_text("kit_fetch", {"index": 0})
    engine = scripted(family, [f"{call}; {call}", "The end."])
    trace = play(kit.Task(kit.Data(prompt="Fetch.", results=["a"])), engine, family)
    assert trace.ok and [m.content for m in trace.tool_messages] == ["a", "a"]
    assert_exact(trace, engine, family)


@pytest.mark.parametrize("name", ["llama3.1", "llama3.2"])
def test_llama_has_one_beginning_and_any_stop_token_goes_into_the_row(families, scripted, kit, name):
    family = families(name)
    call = family.call_text("kit_fetch", {"index": 0})
    engine = scripted(family, [f"<|python_tag|>{call}<|eom_id|>", "The end."])
    trace = play(kit.Task(kit.Data(prompt="Fetch.", results=["a"])), engine, family)
    row = trace.branches[0].token_ids
    assert row.count(family.id_of("<|begin_of_text|>")) == 1
    assert row.count(family.id_of("<|eom_id|>")) == 1
    assert '<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n"a"<|eot_id|>' in family.text(row)
    assert_exact(trace, engine, family)


def test_results_are_attributed_to_their_messages(family, scripted, kit):
    """Also such as stand in the template: "tool", "user"."""
    contents = ["tool", "user", "e", ""]
    engine = scripted(family, [family.call_text("kit_fetch", {"index": i}) for i in range(4)] + ["The end."])
    trace = play(kit.Task(kit.Data(prompt="assistant", results=contents)), engine, family, max_context=100_000)
    nodes = [node for node in trace.nodes if not node.sampled]
    assert len(nodes) == 5
    for node, content in zip(nodes, ["assistant", *contents], strict=True):
        text = family.text([i for i, flag in zip(node.token_ids, node.is_content, strict=True) if flag])
        assert content in text and len(text) <= len(content) + 8
        assert node.token_ids
