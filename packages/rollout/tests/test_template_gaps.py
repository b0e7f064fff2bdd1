"""Templates without a place for tools, results, calls or system messages: all of it reaches the model, token by token.

The templates are put together here, each from a few behaviours of real ones.
"""

import asyncio
import copy
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import Chat, Limits, ParsedCall, Sampling, run_rollout
from plumbob.rollout.template_gaps import TemplateGaps, short_id
from plumbob.testing.exact_rows import assert_exact

PROPERTY = settings(max_examples=60, deadline=None)

REFUSE = "{{- raise_exception('this role is not known') }}"
TURN = "<|im_start|>{ROLE}\\n{CONTENT}<|im_end|>\\n"
QUESTION = {"role": "user", "content": "Where?"}
FETCH = {
    "type": "function",
    "function": {"name": "kit_fetch", "description": "Fetch a result.", "parameters": {"type": "object"}},
}


@dataclass(frozen=True)
class Variant:
    """What a template does."""

    system: str = "turn"
    """turn; "merged" into the first question, as Gemma 3; "refused", as Gemma 2; "dropped"."""
    tools: bool = False
    """Whether it describes tools and writes calls."""
    results: str = "turn"
    """turn, in their own role (ChatML for any role); "refused"; "dropped", as Phi-3."""
    alternates: bool = False
    """Whether it refuses two user messages in a row."""
    thoughts: str = "none"
    """none; "kept"; "stripped" from turns before the last question, as Qwen3; "dropped" from all, as R1."""
    header: str = ""
    """After the assistant header: nothing, an empty thought, or the beginning of a thought."""
    trims: bool = False
    """Whether it trims contents."""
    ends: bool = False
    """Whether a conversation that no turn follows ends with a token of its own, as Phi-3's."""

    def text(self) -> str:
        """The template."""

        def turn(role, content):
            trim = " | trim" if self.trims else ""
            return "{{- '<|im_start|>' ~ " + role + " ~ '\\n' ~ (" + content + ")" + trim + " ~ '<|im_end|>\\n' }}"

        tools = "{{- '<|im_start|>system\\nTools: ' ~ (tools | tojson) ~ '<|im_end|>\\n' if tools else '' }}"
        lead = "(messages[0].content ~ '\\n\\n' if opened and loop.index0 == 1 else '')"
        merged = self.system == "merged"
        system = {"turn": turn("'system'", "m.content"), "refused": REFUSE}.get(self.system, "")
        results = {"turn": turn("'tool'", "m.content"), "refused": REFUSE, "dropped": ""}[self.results]
        calls = "{{- m.tool_calls | tojson if m.tool_calls else '' }}" if self.tools else ""
        alternate = "{%- if m.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}"
        strip = {
            "none": "",
            "kept": "{%- if m.reasoning_content %}{%- set said = '<think>' ~ m.reasoning_content ~ '</think>' ~ said %}"
            "{%- endif %}",
            "stripped": "{%- if m.reasoning_content and loop.index0 > last.question %}"
            "{%- set said = '<think>' ~ m.reasoning_content ~ '</think>' ~ said %}{%- endif %}"
            "{%- if loop.index0 < last.question %}{%- set said = said.split('</think>')[-1] %}{%- endif %}",
            "dropped": "{%- set said = said.split('</think>')[-1] %}",
        }[self.thoughts]
        return "".join(
            [
                "{%- set opened = messages[0].role == 'system' %}{%- set last = namespace(question=-1) %}",
                "{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}",
                "{%- endfor %}",
                tools if self.tools else "",
                "{%- for m in messages %}",
                alternate + REFUSE + "{%- endif %}" if self.alternates else "",
                "{%- if m.role == 'system' %}" + system,
                "{%- elif m.role == 'tool' %}" + results,
                "{%- elif m.role == 'user' %}" + turn("'user'", (lead if merged else "''") + " ~ m.content"),
                "{%- else %}{%- set said = m.content or '' %}" + strip,
                "{{- '<|im_start|>assistant\\n' ~ said }}" + calls + "{{- '<|im_end|>\\n' }}",
                "{%- endif %}{%- endfor %}",
                "{{- '<|im_start|>assistant\\n" + self.header.replace("\n", "\\n") + "' if add_generation_prompt else '"
                + ("<|endoftext|>" if self.ends else "") + "' }}",
            ]
        )  # fmt: skip


VARIANTS = st.builds(
    Variant,
    system=st.sampled_from(["turn", "merged", "refused", "dropped"]),
    tools=st.booleans(),
    results=st.sampled_from(["turn", "refused", "dropped"]),
    alternates=st.booleans(),
    thoughts=st.sampled_from(["none", "kept", "stripped", "dropped"]),
    header=st.sampled_from(["", "<think>\n\n</think>\n\n", "<think>\n"]),
    trims=st.booleans(),
    ends=st.booleans(),
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", " a ", "\n\n", "<|im_end|>\n<|im_start|>user\n", "</tool_response>", "</think>", "{{ 7 }}", '"é雪"']
    ),
)


@pytest.fixture(scope="session")
def made(families):
    """A family with the template of a variant."""

    @cache
    def make(variant):
        own = families("qwen3")
        tokenizer = copy.deepcopy(own.tokenizer)
        tokenizer.chat_template = variant.text()
        header = "<|im_start|>assistant\n" + variant.header
        return type(own)("qwen3", tokenizer, own.closer, header, own.other_stops)

    return make


def play(task, engine, family):
    return asyncio.run(run_rollout(task, engine, family.chat, Sampling(max_tokens=400), Limits(max_context=100_000)))


# --- all of it reaches the model ------------------------------------------------------------------------------------


@PROPERTY
@given(
    variant=VARIANTS, system=st.none() | TEXTS, question=TEXTS, results=st.lists(TEXTS, max_size=4), stop=st.booleans()
)
def test_rows_are_exact_and_the_model_sees_everything(made, scripted, kit, variant, system, question, results, stop):
    family = made(variant)
    thought = "hm</think>" if variant.header == "<think>\n" else ""
    calls = [family.call_text("kit_fetch", {"index": i}) for i in range(len(results))]
    turns = [[], calls[:1], calls[1:]] if results else [[]]
    replies = [thought + "\n".join(turn) for turn in turns if turn]
    end = "<|endoftext|>" if stop else ""  # a stop token of the generation config, in place of the closer
    engine = scripted(family, [*(reply + end for reply in replies), thought + "The end."])
    trace = play(kit.Task(kit.Data(prompt=question, system_prompt=system, results=results)), engine, family)
    assert trace.ok, trace.errors
    assert_exact(trace, engine, family)
    first, last = (family.text(engine.prompts[i]) for i in (0, -1))
    assert all(f'"{tool.name}"' in first and tool.description.split("\n")[0] in first for tool in trace.tools)
    assert question.strip() in first and (system or "").strip() in first
    assert all(result.strip() in last for result in results)
    assert all(family.text(prompt).endswith(family.header) for prompt in engine.prompts)
    assert [m.content for m in trace.tool_messages] == results


@PROPERTY
@given(variant=VARIANTS, contents=st.lists(TEXTS, min_size=1, max_size=4), kind=st.sampled_from(["prompt", "suffix"]))
def test_every_id_belongs_to_its_message_or_to_the_template(made, variant, contents, kind):
    """Descriptions of tools and the tags around results are the template's, wherever they stand."""
    family = made(variant)
    # A template that trims leaves no place for a blank content beside other text.
    contents = [c if c.strip() or not variant.trims else f"{c}x" for c in contents]
    if kind == "prompt":
        messages = [{"role": role, "content": c} for role, c in zip(("system", "user"), contents, strict=False)]
        messages[-1]["role"] = "user"
        ours = family.chat.prompt(messages, [FETCH])
    else:
        messages = [{"role": "tool", "content": c, "name": "kit_fetch", "tool_call_id": "call_0_0"} for c in contents]
        ours = family.chat.suffix(messages)
    parts = [*(ours.token_ids[span] for span in ours.spans()), ours.header_ids]
    assert [i for part in parts for i in part] == ours.token_ids
    for message, span in zip(messages, ours.spans(), strict=True):
        flagged = zip(ours.token_ids[span], ours.is_content[span], strict=True)
        text = family.text([i for i, flag in flagged if flag])
        assert message["content"].strip() in text and len(text) <= len(message["content"]) + 8


@PROPERTY
@given(variant=VARIANTS, spelled=st.sampled_from(["<|im_end|>", "<|im_start|>", "</tool_response>", "<tool_call>"]))
def test_a_control_token_that_is_spelled_in_a_message_or_a_tool_stays_text(made, variant, spelled):
    family = made(variant)
    chat, token = family.chat, family.id_of(spelled)
    told = {**FETCH, "function": {**FETCH["function"], "description": f"Fetch{spelled}."}}
    result = {"role": "tool", "content": "7", "name": "kit_fetch", "tool_call_id": "call_0_0"}
    assert chat.suffix([{**result, "content": f"7{spelled}8"}]).token_ids.count(token) == chat.suffix(
        [result]
    ).token_ids.count(token)
    if spelled.startswith("<|"):  # marks inside of turns are marks in a description, as they are in a question
        system = [{"role": "system", "content": f"Be{spelled}brief."}, QUESTION]
        assert chat.prompt(system, [told]).token_ids.count(token) == chat.prompt(
            [{"role": "system", "content": "Be brief."}, QUESTION], [FETCH]
        ).token_ids.count(token)
    assert f"Fetch{spelled}." in family.text(chat.prompt([QUESTION], [told]).token_ids)


# --- where it goes --------------------------------------------------------------------------------------------------


def shown(family, messages, tools=()):
    return family.text(family.chat.prompt(messages, list(tools)).token_ids)


def test_tools_go_into_the_system_message_in_the_form_that_is_read(made):
    family = made(Variant())
    chat = family.chat
    told = chat.tool_format.instructions([FETCH])
    assert chat.tool_format.example() in told and "kit_fetch" in told
    assert shown(family, [QUESTION], [FETCH]).startswith(
        f"<|im_start|>system\n{told}<|im_end|>\n<|im_start|>user\nWhere?"
    )
    own = shown(family, [{"role": "system", "content": "Be brief."}, QUESTION], [FETCH])
    assert own.startswith(f"<|im_start|>system\nBe brief.\n\n{told}<|im_end|>")
    assert "system" not in shown(family, [QUESTION])
    assert "kit_fetch" in (own := shown(made(Variant(tools=True)), [QUESTION], [FETCH])) and told not in own


@pytest.mark.parametrize("system", ["refused", "dropped"])
def test_without_system_messages_tools_and_the_system_prompt_open_the_first_user_message(made, system):
    family = made(Variant(system=system))
    told = family.chat.tool_format.instructions([FETCH])
    text = shown(family, [{"role": "system", "content": "Be brief."}, QUESTION], [FETCH])
    assert text.startswith(f"<|im_start|>user\nBe brief.\n\n{told}\n\nWhere?<|im_end|>")
    assert shown(family, [{"role": "system", "content": "Be brief."}]).startswith(
        "<|im_start|>user\nBe brief.<|im_end|>"
    )


@pytest.mark.parametrize("results", ["refused", "dropped"])
def test_results_without_a_place_share_one_user_message(made, results):
    family = made(Variant(results=results))
    several = [{"role": "tool", "content": c, "name": "f", "tool_call_id": "c"} for c in ("7", "8")]
    text = family.text(family.chat.suffix(several).token_ids)
    tagged = "<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response>"
    assert text == f"\n<|im_start|>user\n{tagged}<|im_end|>\n<|im_start|>assistant\n"
    kept = family.text(made(Variant()).chat.suffix(several).token_ids)
    assert "<|im_start|>tool\n7<|im_end|>" in kept and "user" not in kept


def test_earlier_calls_are_written_in_the_form_that_is_read(made):
    family = made(Variant())
    call = {"type": "function", "id": "c", "function": {"name": "kit_fetch", "arguments": {"index": 3}}}
    text = shown(family, [QUESTION, {"role": "assistant", "content": "Hm.", "tool_calls": [call]}, QUESTION])
    written = family.chat.tool_format.write("Hm.", [ParsedCall("kit_fetch", {"index": 3})])
    assert f"<|im_start|>assistant\n{written}<|im_end|>" in text


def test_user_messages_that_follow_each_other_are_joined_where_the_template_refuses_them(made):
    result = {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c"}
    messages = [QUESTION, {"role": "assistant", "content": "Hm."}, result, QUESTION]
    family = made(Variant(results="refused", alternates=True))
    assert "<tool_response>\n7\n</tool_response>\n\nWhere?<|im_end|>" in shown(family, messages)
    assert shown(made(Variant()), [QUESTION, QUESTION]).count("<|im_start|>user") == 2


def test_ids_of_calls_are_nine_letters_and_digits_where_the_template_wants_that(made, families):
    family = made(Variant(tools=True))
    strict = copy.deepcopy(family.tokenizer)
    check = "{%- if m.role == 'tool' and m.tool_call_id | length != 9 %}" + REFUSE + "{%- endif %}"
    strict.chat_template = family.tokenizer.chat_template.replace(
        "{%- if m.role == 'system' %}", check + "{%- if m.role == 'system' %}"
    )
    assert TemplateGaps.of(strict) == TemplateGaps(long_ids=True)
    result = {"role": "tool", "content": "7", "name": "f", "tool_call_id": "call_11_0"}
    assert Chat.of(strict).suffix([result]).token_ids == family.chat.suffix([result]).token_ids
    assert [short_id(i) for i in ("call_3_0", "", "abcdefgh12")] == ["000call30", "0" * 9, "bcdefgh12"]


# --- thinking -------------------------------------------------------------------------------------------------------

RESULT = {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c"}
EMPTY = "<think>\n\n</think>\n\n"


@PROPERTY
@given(variant=VARIANTS.filter(lambda v: v.thoughts != "none"), following=st.sampled_from([QUESTION, RESULT]))
def test_what_a_template_forgets_is_what_its_rendering_of_the_whole_conversation_lacks(made, variant, following):
    as_user = following is QUESTION or variant.results != "turn"
    forgotten = variant.thoughts == "dropped" or (variant.thoughts == "stripped" and as_user)
    expected = "headers" if variant.header == EMPTY else "thoughts" if forgotten else ""
    assert made(variant).chat.forgets(following) == expected


def test_a_template_without_thoughts_forgets_none(made, families):
    assert made(Variant()).chat.forgets(QUESTION) == families("llama3.1").chat.forgets(QUESTION) == ""
    qwen = families("qwen3").chat
    assert (qwen.forgets(QUESTION), qwen.forgets(RESULT)) == ("thoughts", "")
    assert families("qwen3-nothink").chat.forgets(RESULT) == "headers"


def test_thoughts_and_empty_thoughts_stay_in_the_row(made, scripted, kit):
    for variant in (Variant(thoughts="stripped"), Variant(thoughts="stripped", header=EMPTY)):
        family = made(variant)
        thought = variant.header or "<think>hm</think>"
        own = thought.removeprefix(variant.header)
        engine = scripted(family, [own + family.call_text("kit_fetch", {}), own + "The end."])
        trace = play(kit.Task(kit.Data(prompt="Go.", results=["a"])), engine, family)
        assert_exact(trace, engine, family)
        assert family.text(trace.branches[0].token_ids).count(thought) == 2


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("hm\n</think>\n\nParis", "hm", "Paris", 0),
        ("hm", "hm", "", 0),
        ("", "", "", 0),
        ("<think>hm</think>Paris", "hm", "Paris", 0),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', None, "", 0),
        ('hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>', "hm", "", 1),
    ],
)
def test_a_reply_that_begins_inside_a_thought(made, text, reasoning, content, calls):
    """As after the header of Qwen3-Thinking or R1: what was never closed is all thought, and holds no call."""
    family = made(Variant(thoughts="stripped", header="<think>\n"))
    found, reply = family.chat.parse(family.ids(text + family.closer), [FETCH])
    assert (found, reply.content, len(reply.calls)) == (text if reasoning is None else reasoning, content, calls)
    assert family.chat.prompt([QUESTION], []).opens_thought and family.chat.suffix([RESULT]).opens_thought


def test_a_header_that_opens_no_thought_after_a_tool_result(made):
    """DeepSeek-R1's template opens one after a question only."""
    family = made(Variant(thoughts="dropped", header="<think>\n"))
    tokenizer = copy.deepcopy(family.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "'<|im_start|>assistant\\n<think>\\n' if",
        "'<|im_start|>assistant\\n' ~ ('<think>\\n' if messages[-1].role == 'user' else '') if",
    )
    chat = Chat.of(tokenizer)
    assert chat.prompt([QUESTION], []).opens_thought and not chat.suffix([RESULT]).opens_thought
    assert chat.parse(family.ids("Paris"), [], opens_thought=False) == (
        None,
        chat.parse(family.ids("</think>Paris"), [])[1],
    )


# --- ends of turns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
def test_the_same_text_follows_any_stop_token(families, scripted, kit, end):
    """Llama 3.1 ends a call with `<|eom_id|>` or `<|eot_id|>`, and its generation config lists three stop tokens."""
    family = families("llama3.1")
    engine = scripted(family, [family.call_text("kit_fetch", {}) + end, "The end."])
    trace = play(kit.Task(kit.Data(prompt="Fetch.", results=["a"])), engine, family)
    assert_exact(trace, engine, family)
    between = '<|start_header_id|>ipython<|end_header_id|>\n\n"a"<|eot_id|>'
    assert f"{end}{between}{family.header}" in family.text(engine.prompts[1])
