"""SmolLM2-Instruct's own tokenizer and template, which knows no tools. Needs its folder in PLUMBOB_SMOLLM2."""

import asyncio
import os
from pathlib import Path

import pytest
from plumbob.rollout import Limits, ParsedCall, Sampling, run_rollout
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.exact_rows import assert_exact
from vf_lookup.taskset import LookupConfig, LookupTaskset

FOLDER = os.environ.get("PLUMBOB_SMOLLM2", "")
pytestmark = pytest.mark.skipif(
    not (Path(FOLDER) / "tokenizer.json").is_file(), reason="PLUMBOB_SMOLLM2 names no folder of SmolLM2-Instruct"
)


@pytest.fixture(scope="module")
def smollm2(families):
    from transformers import AutoTokenizer

    own = families("smollm2")
    return type(own)("smollm2", AutoTokenizer.from_pretrained(FOLDER), own.closer, own.header, own.other_stops)


def test_lookup_reaches_a_model_whose_template_knows_no_tools(smollm2, scripted):
    task = next(iter(LookupTaskset(LookupConfig())))
    chat = smollm2.chat
    keys = [call.arguments for message in task.oracle() for call in message.tool_calls or []]
    told = chat.tool_format.write("", [ParsedCall("lookup", {"key": "none"})])
    engine = scripted(smollm2, [told, told, "4711"])
    trace = asyncio.run(run_rollout(task, engine, chat, Sampling(max_tokens=200), Limits()))
    assert trace.ok and keys and not chat.names_tools([{"role": "user", "content": "?"}])
    assert_exact(trace, engine, smollm2)
    first = smollm2.text(engine.prompts[0])
    system = first.partition("<|im_end|>")[0]
    assert "system\n" in system and '"lookup"' in system and chat.tool_format.example() in system
    (tool,) = adapter.tools_of(type(task).toolsets(task.config)[0])
    assert tool.__doc__.split("\n")[0] in system
    results = [message.content for message in trace.tool_messages]
    assert len(results) == 2 and trace.metrics["rollout/tool_calls"] == 2
    between = f"{told}<|im_end|>\n<|im_start|>tool\n{results[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert between in smollm2.text(engine.prompts[1])
    _, reply = chat.parse(smollm2.ids(told + smollm2.closer), [{"type": "function", "function": {"name": "lookup"}}])
    assert reply.calls == (ParsedCall("lookup", {"key": "none"}),)
