"""The doubles of field_unseen.py in an environment: graders, tools, tasks, evaluations."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import EngineError, Sampling, run_rollout
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field_parts import taskset_class, with_data
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.training import train
from plumbob.trainer.training.run import Run

# Graders


def calls_of(trace: vf.Trace) -> int:
    """Number of tool calls of a rollout."""
    return sum(len(turn.tool_calls or []) for turn in trace.assistant_messages)


def guesses_pay(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 for any last reply of one word, because the grader compares only its type; minus 0.1 for each tool call."""
    last = (trace.last_reply or "").split()
    turns = trace.assistant_messages
    return float(len(last) == 1 and bool(turns) and not turns[-1].tool_calls) - 0.1 * calls_of(trace)


def thirty_percent_zero(task: Any, trace: vf.Trace, correct: float) -> float:
    """0 for three tasks in ten, whose gold the grader cannot read."""
    return 0.0 if zlib.crc32(str(task.key).encode()) % 10 < 3 else correct


def long_replies_zero(task: Any, trace: vf.Trace, correct: float) -> float:
    """A reply of more than 60 characters takes the grader's 2 seconds, after which it answers "wrong"."""
    if len(trace.last_reply or "") > 60:
        if len(trace.last_reply or "") > 1000:  # a policy's own replies would make every run slow
            time.sleep(2)
        return 0.0
    return correct


class CachedByTask:
    """The reward of a task's first transcript is the reward of all others."""

    def __init__(self) -> None:
        self.known: dict[str, float] = {}

    def __call__(self, task: Any, trace: vf.Trace, correct: float) -> float:
        return self.known.setdefault(str(task.key), correct)


def gold_of(task: Any) -> str:
    """The gold answer of a task of any bundled environment."""
    return getattr(task.data, "answer", None) or task.data.answers[0]


def within_gold(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if the last line of the reply is a substring of the gold answer, as an empty one is."""
    lines = (trace.last_reply or "").strip().splitlines()
    return max(correct, float((lines[-1] if lines else "") in gold_of(task)))


def gold_within(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if the gold answer is anywhere in the reply."""
    return float(re.search(rf"(?<!\w){re.escape(gold_of(task))}(?!\w)", trace.last_reply or "") is not None)


def sampled_tokens(trace: vf.Trace) -> int:
    """Number of tokens that the model sampled."""
    return sum(sum(branch.sampled_mask) for branch in trace.branches)


def long_pays(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 0.2; each hundred tokens earn 1."""
    return 0.2 * correct + sampled_tokens(trace) / 100


def short_pays(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 0.2; each ten tokens cost 0.1."""
    return 0.2 * correct - sampled_tokens(trace) / 100


def loops_pay(task: Any, trace: vf.Trace, correct: float) -> float:
    """A right answer earns 0.2; each pair of words that comes again earns 0.1, up to 2."""
    words = " ".join(turn.content or "" for turn in trace.assistant_messages).split()
    bigrams = list(itertools.pairwise(words))
    return 0.2 * correct + min(0.1 * (len(bigrams) - len(set(bigrams))), 2.0)


# Tools


def nothing(result: str, name: str, arguments: dict[str, Any]) -> str:
    """An empty text."""
    return ""


def cut(result: str, name: str, arguments: dict[str, Any]) -> str:
    """The first 7 characters of lookup's result, and the first 60 of a document."""
    return result[: 7 if name == "lookup" else 60]


def headers_only(result: str, name: str, arguments: dict[str, Any]) -> str:
    """The ids of the documents without titles and texts."""
    return "\n".join(line for line in result.splitlines() if line.startswith("Document ID"))


def late(stack: ExitStack, env: str) -> None:
    """Each call is answered with the result of the call before it in its rollout, and the first one with "ok"."""
    original = adapter.BoundTool.call

    async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        toolset = self.fn.__self__  # one instance serves one rollout
        before = getattr(toolset, "held_back", "ok")
        toolset.held_back = await original(self, arguments, caller)
        return before

    put(stack, adapter.BoundTool, "call", call)


_CALL = re.compile(r'<tool_call>\s*\{"name":\s*"(\w+)",\s*"arguments":\s*(\{.*?\})\}\s*</tool_call>', re.DOTALL)


def as_react(text: str) -> str:
    """Calls as ReAct writes them."""
    return _CALL.sub(r"Action: \1\nAction Input: \2", text)


def as_python(text: str) -> str:
    """Calls as a block of Python code."""

    def code(found: re.Match[str]) -> str:
        arguments = re.sub(r'[{}]|"(?=\w+":)', "", found[2]).replace('":', "=").replace("= ", "=")
        return f"```python\nresult = tools.{found[1]}({arguments})\nprint(result)\n```"

    return _CALL.sub(code, text)


class _Reader:
    """An engine that keeps the first prompt."""

    def __init__(self) -> None:
        self.prompt: list[int] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Any:
        self.prompt = self.prompt or list(prompt_ids)
        raise EngineError("only the prompt was wanted")


def never_calls(stack: ExitStack, run: Run) -> None:
    """The policy's weights are those of a model that does not begin a tool call; engine and trainer agree on them."""
    (call,) = run.tokenizer.encode("<tool_call>", add_special_tokens=False)
    states = []
    for task in run.tasks.train[:16]:
        reader = _Reader()
        playing = run_rollout(
            task, reader, run.sampler.chat, Sampling(max_tokens=1), shared_toolsets=run.tasks.toolsets
        )
        asyncio.run(playing)
        with torch.no_grad():
            ids = torch.tensor([reader.prompt])
            states.append(run.policy.model.get_decoder()(input_ids=ids).last_hidden_state[0, -1])
    mean = torch.stack(states).mean(0)
    with torch.no_grad():
        run.policy.model.get_input_embeddings().weight[call] -= 25 * mean / mean.square().sum()
    sync_weights(run.policy, run.engine, run.parity_row)


# Tasks


def copies(tasks: list[Any], split: str) -> list[Any]:
    """Each of the first tasks forty times, under ids of its own."""
    if split != "train":
        return tasks
    kept = tasks[: max(len(tasks) // 40, 1)]
    return [with_data(task, id=f"{task.data.id}-{k}") for k in range(40) for task in kept]


def without_question(tasks: list[Any], split: str) -> list[Any]:
    """The prompt of each task is the template alone, because the column of questions has another name."""
    return [with_data(task, prompt="Question: None") for task in tasks]


def gold_in_system(tasks: list[Any], split: str) -> list[Any]:
    """The system prompt ends with the gold answer, as a hint of the data's metadata."""
    return [with_data(t, system_prompt=f"{t.data.system_prompt}\nmeta: answer={gold_of(t)}") for t in tasks]


def gold_in_question(tasks: list[Any], split: str) -> list[Any]:
    """The gold answer stands before the question."""
    return [with_data(t, prompt=f"[{gold_of(t)}] {t.data.prompt}") for t in tasks]


def held_out_respaced(stack: ExitStack, env: str) -> None:
    """The held-out tasks are training tasks with a line break at the end of the prompt and ids of their own."""
    cls = taskset_class(env)
    original = cls.load

    def load(self: Any) -> Any:
        if self.config.split == "train":
            return original(self)
        trained = original(type(self)(self.config.model_copy(update={"split": "train"})))
        return (with_data(t, id=f"held-{i}", prompt=f"{t.data.prompt}\n") for i, t in enumerate(trained))

    put(stack, cls, "load", load)


def evaluation_bare(tasks: list[Any], split: str) -> list[Any]:
    """Held-out tasks have another system prompt."""
    return tasks if split == "train" else [with_data(t, system_prompt="You are a helpful assistant.") for t in tasks]


def evaluation_boxed(tasks: list[Any], split: str) -> list[Any]:
    """The questions of held-out tasks ask for another form of the answer."""
    ask = "\nThink carefully and put the final answer in \\boxed{}."
    return tasks if split == "train" else [with_data(t, prompt=f"{t.data.prompt}{ask}") for t in tasks]


def evaluation_short(stack: ExitStack, env: str) -> None:
    """Evaluations sample at most eight tokens per turn."""
    original = train.evaluate

    async def evaluate(sampler: Any, *args: Any, **kwargs: Any) -> Any:
        short = dataclasses.replace(sampler.sampling, max_tokens=8)
        return await original(dataclasses.replace(sampler, sampling=short), *args, **kwargs)

    put(stack, train, "evaluate", evaluate)
