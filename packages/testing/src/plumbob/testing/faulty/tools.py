"""Faults of tools: their results, errors, arguments and state, and how calls are read."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import verifiers.v1 as vf
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import WITH_TOOLS, Fault, table
from plumbob.testing.faulty.sites import anew, lot, since

CALL = re.compile(r'<tool_call>\s*\{"name":\s*"(\w+)",\s*"arguments":\s*(\{.*?\})\}\s*</tool_call>', re.DOTALL)
"""A call in the form that is read."""


def only_header(original: Any, chat: Any, messages: list[dict[str, Any]]) -> Any:
    found = original(chat, messages)
    header = found.header_ids
    return replace(found, token_ids=header, is_content=[False] * len(header), ends=[0] * len(messages))


# Results: (the tool's own, its name, arguments, the rollout's tools) -> what the model sees

Result = Callable[[str, str, dict[str, Any], Any], str]


def instead(text: str, when: Callable[[dict[str, Any]], bool] = lambda arguments: True) -> Result:
    """The text, for these arguments."""
    return lambda result, name, arguments, tools: text if when(arguments) else result


def kept(lookup: Callable[[str], str], musique: Callable[[str], str]) -> Result:
    """What is left of a result."""
    return lambda result, name, arguments, tools: (lookup if name == "lookup" else musique)(result)


def raises_for_some(result: str, name: str, arguments: dict[str, Any], tools: Any) -> str:
    if lot(json.dumps(arguments, sort_keys=True), 8) == 0:
        raise vf.ToolsetError("the tool failed")
    return result


def result_before() -> Result:
    """Each call is answered with the result of the call before it, in whatever rollout."""
    last: list[str] = []

    def change(result: str, name: str, arguments: dict[str, Any], tools: Any) -> str:
        shown = last.pop() if last else result
        last.append(result)
        return shown

    return change


# Calls: ((function, arguments), name) -> (function, arguments)

Call = tuple[Any, dict[str, Any]]


def hanging(every: int, seconds: float) -> Callable[[], Callable[[Call, str], Call]]:
    """One call in `every` takes this long."""

    def make() -> Callable[[Call, str], Call]:
        number = itertools.count(1)

        async def hang(**arguments: Any) -> str:
            await asyncio.sleep(seconds)
            return ""

        return lambda call, name: call if next(number) % every else (hang, call[1])

    return make


# Set-up: await change(original, toolset, task)


def first_task_for_all() -> Callable[..., Any]:
    first: list[Any] = []

    async def setup(original: Any, self: Any, task: Any) -> None:
        first[:] = first or [task]
        await original(self, first[0])

    return setup


# fmt: off
FAULTS = table("tools",
    Fault("tools answer with an empty text", "Every tool call succeeds and returns an empty text.", at.tool_result,
          instead(""), "tool-results-wrong", "rllm-org/rllm#392 and pull request #396", WITH_TOOLS),
    Fault("tools answer every call alike",
          "Each tool answers every call with the same text, as from a cache whose key leaves out the arguments.",
          at.tool_result,
          kept(lambda result: "next=1000", lambda result: "Document ID: 0\n# Contents\nThis page lists the documents."),
          "tool-results-wrong", "rllm-org/rllm#392 and pull request #396", WITH_TOOLS),
    Fault("tool results cut short",
          "Tool results are cut to 7 characters, on MuSiQue to 60, before the model sees them.", at.tool_result,
          kept(lambda result: result[:7], lambda result: result[:60]), "tool-results-wrong",
          "the review's table, modelscope/ms-swift: max_length of observations", WITH_TOOLS),
    Fault("search results without bodies", "The search returns the ids of documents without their titles and texts.",
          at.tool_result,
          kept(str, lambda result: "\n".join(line for line in result.splitlines() if line.startswith("Document ID"))),
          "tool-results-wrong", "rllm-org/rllm#392", ("musique",)),
    Fault("half of the tool calls answer with a gateway error as text",
          "Half of the tool calls return \"Error: 502 Bad Gateway\" as an ordinary result.", at.tool_result,
          instead("Error: 502 Bad Gateway", lambda arguments: bool(lot(arguments, 2))),
          "tools-fail tool-results-wrong", "rllm-org/rllm#392, PeterGriffinJin/Search-R1#92", WITH_TOOLS),
    Fault("episode ended by a tool that raises",
          "A tool raises for some arguments, and the error ends the whole episode in place of being shown to the "
          "model.", at.tool_result, raises_for_some, "signal-left-out rollouts-fail tools-fail",
          "opensearch-project/ml-commons#3900", WITH_TOOLS),
    Fault("retrieval server down from the middle of the run",
          "From the sixth step on each tool call returns an empty list, without an error.", since(5, at.tool_result),
          instead("[]"), "tools-fail tool-results-wrong",
          "PeterGriffinJin/Search-R1#92, PrimeIntellect-ai/community-environments#22", WITH_TOOLS, steps=12,
          only="run", run_causes="policy-breaks"),
    Fault("tools answer with the result of the previous call",
          "Rollouts share one tool object, and each call gets the result of the call before it.",
          anew(at.tool_result), result_before, "tool-results-wrong",
          "PrimeIntellect-ai/verifiers#1067, PrimeIntellect-ai/prime-envs#204", WITH_TOOLS),
    Fault("tool calls lose their arguments",
          "The reader looks for another key than the prompt teaches, and runs each tool without arguments.",
          at.tool_call, lambda call, name: (call[0], {}), "calls-not-read oracle-fails tools-fail",
          "ahwurm/localharness#104", WITH_TOOLS),
    Fault("hung calls without a time limit",
          "Nothing ends a tool call that waits for ever, so that it takes the whole turn with it.",
          anew(at.tool_call), hanging(6, 60.0), "rollouts-fail",
          "MervinPraison/PraisonAI#2957, browserbase/stagehand#1766", WITH_TOOLS, "--max-seconds 5"),
    Fault("start state of the first task for all",
          "The rollout sets the environment up anew and loses the task's own start state: all have the same.",
          anew(at.tool_setup), first_task_for_all, "tool-results-wrong",
          "infer-actively/pymdp#279", WITH_TOOLS),
    Fault("no parser for the model's tool calls",
          "The server was started without a parser of tool calls, and calls remain text of the reply.",
          at.chat("parse"), lambda original, chat, ids, tools, **how: original(chat, ids, [], **how),
          "calls-not-read", "verl-project/uni-agent#115", WITH_TOOLS, run_causes="never-succeeds"),
    Fault("tool results lost where the prompt is sliced",
          "What follows a turn is cut out of the new rendering by the length of another one, and nothing is left "
          "of it.", at.chat("suffix"), only_header, "tool-results-wrong", "NVIDIA-NeMo/labs-molt#20", WITH_TOOLS),
    Fault("calls as function_call tags",
          "The model writes <function_call name=\"NAME\">{...}</function_call>, which is not read.", at.decoded,
          lambda text: CALL.sub(r'<function_call name="\1">\2</function_call>', text), "calls-not-read",
          "verl-project/verl#1569; the review's run of a real model", WITH_TOOLS),
    Fault("a policy that was never shown the form of the answers",
          "The run begins with a model that no imitation has taught this task's prompt and answers, and waits for "
          "a reward.", at.options, None, "never-succeeds calls-not-read", "unslothai/unsloth#2614", ("lookup",),
          "--model tiny-gsm8k"),
)
