"""Tokens of tool calls that were never trained: they are found, and calls are then ordinary text everywhere."""

import json
import tomllib

import pytest
import torch
from plumbob.console import UserError
from plumbob.rollout import ParsedCall
from plumbob.trainer.config.chat_template import marks_left_out, unchanged
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.evaluation.run import run as evaluate
from plumbob.trainer.policy.call_tokens import lookalikes, unwritable, write_calls_as_text
from plumbob.trainer.policy.forward_plan import vocabulary
from plumbob.trainer.policy.loading import load_chat, load_model, load_tokenizer
from plumbob.trainer.training.train import run

MARKS = ["<tool_call>", "</tool_call>"]
SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}
CALL = {"name": "find", "arguments": {"q": "Ada"}}
TOOL = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny"), load_tokenizer("tiny")


def untrained(model, ids, spread: float):
    """Give these tokens the row of the first of them, up to noise of this size relative to its length."""
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        own = head[ids[0]].clone()
        noise = torch.randn(len(ids), len(own), generator=torch.Generator().manual_seed(0))
        head[ids] = own + spread * own.norm() * noise / noise.norm(dim=1, keepdim=True)


def broken(spread: float = 0.01):
    """The bundled policy, with calls' tokens that look like 18 others, and its tokenizer."""
    model, tokenizer = load_model("tiny"), load_tokenizer("tiny")
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in MARKS]
    untrained(model, [*ids, *[i for i in range(200, 300) if i not in ids][:18]], spread)
    return model, tokenizer


def test_a_model_that_was_trained_to_call_tools_keeps_its_template(tiny):
    model, tokenizer = tiny
    before = tokenizer.chat_template
    chat = load_chat(tokenizer, model.generation_config)
    assert all(mark in chat.call_text() for mark in MARKS)
    assert unwritable(tokenizer, chat, model) == {}
    assert not write_calls_as_text(tokenizer, chat, model, None) and tokenizer.chat_template == before


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_lookalikes_are_counted_whatever_the_scale_of_the_embeddings(scale):
    model, tokenizer = broken()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    assert [lookalikes(model, tokenizer.convert_tokens_to_ids(mark)) for mark in MARKS] == [19, 19]


def test_tokens_that_are_far_enough_apart_are_no_lookalikes():
    model, tokenizer = broken(spread=0.5)
    assert unwritable(tokenizer, load_chat(tokenizer, model.generation_config), model) == {}


def test_a_template_that_writes_an_id_beyond_the_model_is_refused():
    tokenizer, model = load_tokenizer("tiny"), load_model("tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    assert load_chat(tokenizer, None, embedded=vocabulary(model))  # a token that nothing writes does no harm
    tokenizer.chat_template = "<|extra|>" + tokenizer.chat_template
    with pytest.raises(UserError, match=r"'<\|extra\|>' with id \d+, and the model knows \d+ ids"):
        load_chat(tokenizer, None, embedded=vocabulary(model))


def test_calls_become_text_that_is_read_back_and_the_rest_of_the_template_stays():
    model, tokenizer = broken()
    own = load_chat(tokenizer, model.generation_config)
    before, template = own.prompt([SYSTEM, QUESTION], []), tokenizer.chat_template
    assert set(unwritable(tokenizer, own, model)) == set(MARKS)
    assert not write_calls_as_text(tokenizer, own, model, "hermes")
    assert write_calls_as_text(tokenizer, own, model, None)
    assert set(marks_left_out(tokenizer.chat_template).split(" and ")) == set(MARKS)
    assert unchanged(tokenizer.chat_template) == template

    chat = load_chat(tokenizer, model.generation_config)
    assert chat.tool_format.name == "qwen-coder" and unwritable(tokenizer, chat, model) == {}
    assert chat.prompt([SYSTEM, QUESTION], []).token_ids == before.token_ids
    prompt = tokenizer.decode(chat.prompt([SYSTEM, QUESTION], [TOOL]).token_ids)
    assert "find" in prompt and "Be brief." in prompt and not any(mark in prompt for mark in MARKS)
    text = chat.call_text()
    assert not any(mark in text for mark in MARKS)
    written = chat.tool_format.write("", [ParsedCall(**CALL)])
    _, reply = chat.parse(tokenizer.encode(written, add_special_tokens=False), [TOOL])
    assert reply.calls == (ParsedCall(**CALL),)


@pytest.mark.slow
@pytest.mark.long
def test_sft_teaches_a_form_that_the_model_can_write_and_evaluations_of_the_run_ask_for_it(tmp_path, capsys):
    model, tokenizer = broken()
    folder = str(tmp_path / "model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    values = {"max_steps": 4, "eval_examples": 0, "log_completions": 1, "learning_rate": 3e-3}
    config = SftConfig(env="lookup", model=folder, output_dir=str(tmp_path), run_name="taught", **values)
    assert run(config) == 0
    out, err = capsys.readouterr()
    assert "\u27e6<tools>" in out + err  # a demonstration's first turn of the model
    assert "cannot write them" in err and "(--tool-format qwen-coder)" in err and "With --tool-format hermes" in err
    taught = tmp_path / "taught"
    assert marks_left_out((taught / "chat_template.jinja").read_text())
    assert marks_left_out(load_tokenizer(str(taught)).chat_template)
    assert tomllib.loads((taught / "config.toml").read_text()).get("tool_format") is None

    common = {"num_examples": 4, "output_dir": str(tmp_path)}
    assert evaluate(EvaluateConfig(envs=("lookup",), model=str(taught), run_name="after", **common), None) == 0
    rows = [json.loads(line) for line in (tmp_path / "after" / "lookup.jsonl").read_text().splitlines()]
    prompts = [tokenizer.decode([i for node in row["nodes"][:2] for i in node["token_ids"]]) for row in rows]
    assert all("<tools>" in prompt and not any(mark in prompt for mark in MARKS) for prompt in prompts)
