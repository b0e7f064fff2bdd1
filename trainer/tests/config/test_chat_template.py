"""--chat-template: from the command line to every rendering, and into the run's files."""

import asyncio
import json
import socket
import subprocess
import sys
import threading

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.rollout import Chat
from plumbob.testing.handmade_runs import stored
from plumbob.testing.quick_runs import quick_config
from plumbob.testing.vllm_double import Double, serving
from plumbob.trainer.cli import doctor as doctor_cli
from plumbob.trainer.cli import evaluate as evaluate_cli
from plumbob.trainer.cli import serve as serve_cli
from plumbob.trainer.cli import sft as sft_cli
from plumbob.trainer.cli import train as train_cli
from plumbob.trainer.config.chat_template import (
    RECORDED,
    TemplateChoice,
    read_parts,
    unchanged,
    with_calls_as_text,
    with_values,
)
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.options import read_toml, settings_in
from plumbob.trainer.config.serve import ServeConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import join_world
from plumbob.trainer.doctor.live import load_subject
from plumbob.trainer.evaluation.run import run as evaluate
from plumbob.trainer.inference.load import load_engine
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.rollouts.tasks import load_evaluation_tasks
from plumbob.trainer.rollouts.templates import check_template
from plumbob.trainer.serving.server import load_server, running
from plumbob.trainer.training.train import run as train

HELLO = [{"role": "user", "content": "Hello."}]
PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if mood is defined %}({{ mood }}) {% endif %}{% endif %}"
)
"""ChatML without tools, as SmolLM2's, and with a variable in the assistant header."""


@pytest.fixture
def plain(tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text(PLAIN)
    return file


def rendered(template, **variables):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(HELLO, tokenize=False, **variables)


# --- values of variables --------------------------------------------------------------------------------------------


def test_values_are_json_or_text(tmp_path, monkeypatch):
    pairs = ["a=false", "b=1.5", 'c=["x", null]', "d=1 Jan 2025", "e=", 'f="quoted"', "g=NaN", "h=k=v"]
    expected = {
        "a": False,
        "b": 1.5,
        "c": ["x", None],
        "d": "1 Jan 2025",
        "e": "",
        "f": "quoted",
        "g": "NaN",
        "h": "k=v",
    }
    assert read_parts(pairs) == (None, expected)
    assert read_parts(["a=1", "./x.jinja"]) == ("./x.jinja", {"a": 1})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v=2.jinja").touch()
    assert read_parts(["a=1", "v=2.jinja"]) == ("v=2.jinja", {"a": 1})


@pytest.mark.parametrize("parts", [("messages=[]",), ("tools=[]",), ("one.jinja", "two.jinja")])
def test_what_cannot_be_set_and_a_second_file_are_refused(parts):
    with pytest.raises(UserError, match="--chat-template"):
        TrainConfig(chat_template=parts)


@pytest.mark.parametrize("part", ["enable_thinking", "=1", "a b=1"])
def test_what_is_no_variable_is_taken_for_a_file(part):
    with pytest.raises(UserError, match="there is no file .* a variable is given as NAME=VALUE"):
        TemplateChoice((part,)).check()


@pytest.mark.parametrize(
    "text",
    [
        'chat_template = ["x.jinja", "a=false", "b=1"]',
        'chat_template = "x.jinja"\nchat-template-args = { a = false, b = 1 }',
    ],
)
def test_a_file_of_settings_may_have_file_and_variables_apart_as_older_ones_have(tmp_path, text):
    (tmp_path / "x.toml").write_text(text)
    assert read_toml(tmp_path / "x.toml", TrainConfig) == {"chat_template": ["x.jinja", "a=false", "b=1"]}
    assert settings_in(text, TrainConfig) == {"chat_template": ["x.jinja", "a=false", "b=1"]}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(value=JSON, start=st.sampled_from(["", "\n", "  \n ", "{#- -#} ", "{%- set x = 1 %}"]))
def test_a_template_with_values_renders_as_if_a_caller_gave_them(value, start):
    template = start + "{{ value is defined }} {{ value | tojson }}\n{% for m in messages %}{{ m.content }}{% endfor %}"
    asked = with_values(template, read_parts([f"value={json.dumps(value)}"])[1])
    assert rendered(asked) == rendered(template, value=value)
    assert rendered(asked, value="mine") == rendered(template, value="mine")  # a caller comes first
    assert rendered(with_values(asked, {"value": 7})) == rendered(template, value=7)  # and so does a later choice


# --- the option -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_options_reach_every_chat(tmp_path, plain):
    options = {"chat_template": (str(plain), "mood=calm")}
    template = TemplateChoice(*options.values())
    chats = [load_server("tiny", template=template).chat]
    with serving(Double()) as url:
        for engine in ("transformers", "vllm"):
            loaded = load_engine(EvaluateConfig(envs=("lookup",), engine=engine, base_url=url, **options))
            chats.append(loaded.chat)
            if engine == "vllm":
                loaded.close()
    config = TrainConfig(eval_examples=4, num_generations=4, **options)
    subject = load_subject(config, join_world(torch.device("cpu")), tmp_path, lambda _: None, 1)
    chats.append(subject.run.sampler.chat)
    assert any("has no place for tools" in note for note in subject.run.tasks.notes)
    subject.close()
    result = {"role": "tool", "content": "7", "name": "t", "tool_call_id": "c"}
    for chat in chats:
        for ids in (chat.prompt(HELLO, []).token_ids, chat.suffix([result]).token_ids):
            assert chat.tokenizer.decode(ids).endswith("<|im_end|>\n<|im_start|>assistant\n(calm) ")


@pytest.mark.parametrize(
    ("name", "app"),
    [
        ("train", train_cli.app),
        ("doctor", doctor_cli.app),
        ("evaluate", evaluate_cli.evaluate_app),
        ("serve", serve_cli.app),
    ],
)
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "there is no file"),
        ("", "is empty"),
        ("{% if %}", "is not a Jinja template: line 1"),
        (b"\xff", "is not a text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, ended, name, app, content, why):
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, _, err = ended(name, app, *([] if name == "serve" else ["lookup"]), "--chat-template", file)
    message = err.strip()
    assert code == 2 and why in message and str(file) in message and "\n" not in message


@pytest.mark.slow
def test_a_bad_file_is_found_before_torch_is_loaded(tmp_path):
    program = """
import sys
from plumbob.console import UserError
from plumbob.trainer.cli.train import check_before_loading, configure
try:
    check_before_loading(*configure({"env": "lookup", "chat_template": ["nowhere.jinja"]}))
except UserError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (
        done.stdout.strip()
        == "there is no file nowhere.jinja (--chat-template; a variable is given as NAME=VALUE) False"
    )


def test_a_template_that_cannot_hold_a_conversation_is_one_sentence(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}")
    with pytest.raises(UserError, match="chat template cannot be used: .*drops an assistant message"):
        load_server("tiny", template=TemplateChoice((str(file),)))


def test_a_chat_server_gets_values_and_no_template():
    with pytest.raises(UserError, match="give --chat-template to the server"):
        EvaluateConfig(envs=("lookup",), engine="openai", chat_template=("x.jinja",))


def test_a_request_may_set_variables_of_the_template(plain):
    server = load_server("tiny", template=TemplateChoice((str(plain), "mood=calm")))
    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 1}

    async def main():
        async with (
            running(server) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
        ):
            create = client.chat.completions.create
            usual = await create(**ask)
            other = await create(**ask, extra_body={"chat_template_kwargs": {"mood": "very very calm"}})
            with pytest.raises(openai.BadRequestError, match="chat_template_kwargs.*messages"):
                await create(**ask, extra_body={"chat_template_kwargs": {"messages": []}})
            return usual.usage.prompt_tokens, other.usage.prompt_tokens

    usual, other = asyncio.run(main())
    assert usual == len(server.chat.prompt(HELLO, []).token_ids)
    assert other == len(server.chat.prompt(HELLO, [], {"mood": "very very calm"}).token_ids) > usual


# --- what is said ---------------------------------------------------------------------------------------------------


def noted(template, env="lookup", **settings):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template or tokenizer.chat_template
    return check_template(Chat.of(tokenizer), load_evaluation_tasks(env, settings, 1), "M")


THINKS = "{% set thoughts = '</think>' %}"
EMPTY = PLAIN.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n")
REFUSING = PLAIN.replace(
    "%}<|im_start|>{{", "%}{{ raise_exception('no') if message.role in ('system', 'tool') }}<|im_start|>{{", 1
)


def test_a_template_without_a_place_for_tools_is_used_and_said():
    assert noted(None) == []
    assert noted(PLAIN, "gsm8k", datasets="synthetic") == []
    (note,) = noted(PLAIN)
    assert note.startswith(
        "the chat template of M has no place for tools: they are described in the system message, with"
    )
    assert "--tool-format " in note and "user messages" not in note
    tools, system = noted(REFUSING)
    assert "described in the first user message" in tools and tools.endswith("and tool results are user messages")
    assert "no place for a system message" in system


UNREAD = PLAIN.replace(
    "{{ message.content }}",
    "{{ tools | tojson if loop.first and tools }}{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<invoke name="{{ call.function.name }}">{% for key, value in call.function.arguments.items() %}'
    '<parameter name="{{ key }}">{{ value }}</parameter>{% endfor %}</invoke>{% endfor %}',
)


def test_a_template_whose_own_calls_are_not_read_back_is_refused_where_there_are_tools():
    with pytest.raises(
        UserError, match=r"writes a tool call as '<invoke name=.*not read back.* one of the forms hermes"
    ):
        noted(UNREAD)
    assert noted(UNREAD, "gsm8k", datasets="synthetic") == []
    # The header before a model's turn is another one than before an earlier turn, as Qwen3's is without thinking.
    with pytest.raises(UserError, match="writes a tool call as"):
        noted(UNREAD.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"))
    # A template that leaves tools out asks for no form: the system message does, and its calls are read.
    (note,) = noted(UNREAD.replace("{{ tools | tojson if loop.first and tools }}", ""))
    assert "has no place for tools" in note


@pytest.mark.parametrize("command", ["train", "sft", "evaluate", "doctor"])
def test_every_command_says_that_calls_are_not_read_before_the_first_step(tmp_path, monkeypatch, ended, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unread.jinja").write_text(UNREAD)
    apps = {"train": train_cli.app, "sft": sft_cli.app, "evaluate": evaluate_cli.evaluate_app, "doctor": doctor_cli.app}
    more = {"evaluate": ["-n", "2"], "doctor": ["--without-model"]}.get(command, ["--max-steps", "2"])
    args = ["lookup", "--model", "tiny", "--chat-template", "unread.jinja", *more]
    code, *said = ended(command, apps[command], *args)
    shown = " ".join(" ".join(said).split())
    assert code == (1 if command == "doctor" else 2)
    assert (
        "calls-not-read" if command == "doctor" else f"{command}: this model's chat template writes a tool call"
    ) in shown
    assert '<invoke name="tool_name">' in shown and "step 1" not in shown


def test_serve_says_it_and_serves_what_needs_no_tools(tmp_path, capsys):
    (tmp_path / "unread.jinja").write_text(UNREAD)
    for template, said in ((TemplateChoice((str(tmp_path / "unread.jinja"),)), True), (TemplateChoice(), False)):
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="cannot listen on"):
            asyncio.run(serve_cli._serve(ServeConfig(port=taken.getsockname()[1]), template))
        shown = " ".join(capsys.readouterr().err.split())
        assert ("the chat template of tiny writes a tool call as '<invoke name" in shown) == said
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    assert not [name for name in left if name.startswith("serve")], left


def test_thinking_that_a_chat_server_would_drop_is_said():
    """Contents are printed as they are, so thoughts stay if they are content, and are lost if they are kept apart."""
    kept = PLAIN.replace("{{ message.content }}", "{{ message.reasoning_content }}{{ message.content }}")
    dropping = PLAIN.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
    assert not any("thinking" in note for template in (PLAIN, THINKS + kept) for note in noted(template))
    assert any("leaves the thinking out of earlier turns" in note for note in noted(dropping))
    assert any("opens each turn with an empty thought" in note for note in noted(EMPTY))


# --- the record -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_keeps_its_template_whatever_becomes_of_the_file(tmp_path, plain, capsys):
    settings = {"max_steps": 1, "batch_size": 8, "max_tokens": 8, "max_turns": 2}
    assert train(quick_config(tmp_path, chat_template=(str(plain), "mood=calm"), **settings)) == 0
    shown = " ".join(" ".join(capsys.readouterr()).split())
    assert "the chat template of tiny has no place for tools: they are described in the system message" in shown
    run = tmp_path / "r"
    used = (run / RECORDED).read_text()
    assert used.endswith(PLAIN) and "mood" in used.removesuffix(PLAIN)
    plain.write_text(PLAIN.replace("<|im_end|>", "!<|im_end|>"))
    resumed, folder = train_cli.configure({"resume": str(run), "max_steps": "2"})
    train_cli.check_before_loading(resumed, folder)
    assert train(resumed, folder) == 0
    assert (run / RECORDED).read_text() == used
    plain.unlink()
    train_cli.check_before_loading(resumed, folder)
    for model in (run, run / "model"):
        assert load_tokenizer(str(model)).chat_template == used
    rows = [load_tokenizer("tiny").decode([i for n in t["nodes"] for i in n["token_ids"]]) for t in stored(run, 2)]
    assert all("<|im_start|>assistant\n(calm) " in row and "!<|im_end|>" not in row for row in rows)
    with pytest.raises(UserError, match="keeps the run's own --chat-template"):
        train_cli.configure({"resume": str(run), "chat_template": ["other.jinja"]})


def test_an_evaluation_keeps_its_template(tmp_path, plain, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = EvaluateConfig(
        envs=("lookup",),
        num_examples=2,
        max_tokens=8,
        chat_template=(str(plain),),
        output_dir=str(tmp_path),
        run_name="e",
    )
    assert evaluate(config) == 0
    assert capsys.readouterr().err.count("has no place for tools") == 1
    directory = tmp_path / "e"
    plain.unlink()
    assert evaluate(config, directory) == 0
    assert (directory / RECORDED).read_text() == PLAIN


def test_the_template_before_its_calls_became_text_is_found_behind_values_set_in_front_of_it():
    changed = with_calls_as_text("\n{{ mood }}", "xml", ["<call>"])
    assert unchanged(changed) == unchanged(with_values(changed, {"mood": "glad"})) == "\n{{ mood }}"
