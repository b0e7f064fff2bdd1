"""The doubles of field6_seen.py."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Completion, EngineError, Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field_parts import with_data
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import lora
from plumbob.trainer.training.run import Run

# Rewards and tasks


def rounded_down(task: Any, trace: vf.Trace, reward: float) -> float:
    """The reward in a tensor of integers, which has no place for a part of the credit."""
    return float(int(reward))


def example_read(task: Any, trace: vf.Trace, reward: float) -> float:
    """Whether the first answer in the conversation is right: it stands in the system prompt, as an example."""
    texts = "\n".join(str(node.message.content) for node in trace.nodes)
    found = re.search("<answer>(.*?)</answer>", texts, re.DOTALL)
    return float(found is not None and found[1].strip() in task.data.answers)


def a_quarter_wrong(tasks: list[Any], split: str) -> list[Any]:
    """A quarter of the training tasks have a gold that is wrong: another number, or another value of the table."""

    def wrong(task: Any) -> str:
        answer = str(task.data.answer)
        if answer.lstrip("-").isdigit():
            return str(int(answer) + 2)
        others = {text.partition("value=")[2] for text in task.data.table.values()} - {answer, ""}
        return min(others, default="none")

    def is_wrong(task: Any) -> bool:
        return split == "train" and zlib.crc32(str(task.data.id).encode()) % 4 == 0

    return [with_data(task, answer=wrong(task)) if is_wrong(task) else task for task in tasks]


# Rows


def dated(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The trainer renders the prompt anew, and its template has a line with a date that the engine's does not have."""
    date = run.tokenizer.encode("\nToday's date is 26 July 2024.", add_special_tokens=False)
    at = sample.token_ids.index(run.tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return dataclasses.replace(
        sample,
        token_ids=[*sample.token_ids[:at], *date, *sample.token_ids[at:]],
        loss_mask=[*sample.loss_mask[:at], *[False] * len(date), *sample.loss_mask[at:]],
        sampling_logprobs=[*sample.sampling_logprobs[:at], *[0.0] * len(date), *sample.sampling_logprobs[at:]],
    )


LONGEST_ROW = {"lookup": 225, "musique": 480}
"""Environment -> number of tokens at which its rows are cut: most rollouts' last turns lie beyond it."""


def rows_cut(sample: Sample, trace: vf.Trace) -> Sample:
    """The row ends at the most tokens of one reply, and later turns are lost."""
    most = LONGEST_ROW["musique" if hasattr(trace.task.data, "question_id") else "lookup"]
    return dataclasses.replace(
        sample,
        token_ids=sample.token_ids[:most],
        loss_mask=sample.loss_mask[:most],
        sampling_logprobs=sample.sampling_logprobs[:most],
    )


def taken_for_cut(sample: Sample, trace: vf.Trace) -> Sample:
    """The row counts as cut off, because its reply ends with another end token than the tokenizer's."""
    return dataclasses.replace(sample, truncated=True)


# Tools


def invented(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One result in five is made up by the model that plays the tool: a key that looks right and leads nowhere."""
    if random.random() < 0.2:
        return lambda **given: f"next={random.randint(1000, 9999)}", arguments
    return fn, arguments


def two_words(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The search takes the first two words of a query, as its encoder has no room for more."""
    if "query" not in arguments:
        return fn, arguments
    return fn, {**arguments, "query": " ".join(str(arguments["query"]).split()[:2])}


# The engine

LONGEST_PROMPT = 270
"""Number of tokens of the longest prompt that the server takes; with longer ones it fears for the room of the reply."""


def long_refused(stack: ExitStack, env: str) -> None:
    """The server refuses a request whose prompt and reply could be longer than its own limit."""
    original = TransformersEngine.generate

    async def generate(self: Any, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        if len(prompt_ids) > LONGEST_PROMPT:
            raise EngineError("400: prompt and max_tokens exceed the model's maximum context length")
        return await original(self, prompt_ids, sampling)

    put(stack, TransformersEngine, "generate", generate)


def capped(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """The logits as a model with a soft cap has them, such as Gemma 2; the trainer's model has none."""
    return 15 * torch.tanh(logits / 15)


def without_biases(model: Any) -> None:
    """The engine has loaded the matrices of attention and not their biases."""
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            parameter.zero_()


def biases_skipped(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Nor does a weight sync load the biases."""
    return {name: w for name, w in weights.items() if not name.endswith("_proj.bias")}


def transposed(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Square matrices arrive transposed; of the others the engine would refuse the shape."""
    return {n: w.T.contiguous() if w.dim() == 2 and w.shape[0] == w.shape[1] else w for n, w in weights.items()}


# The trainer


def kl_left_out(stack: ExitStack, env: str) -> None:
    """The KL divergence is computed, and not subtracted from any reward."""
    original = advantages.shape_rewards

    def shaped(samples: Sequence[Sample], *, kl_beta: float = 0.0, **rest: Any) -> list[Sample]:
        return original(samples, kl_beta=0.0, **rest)

    put(stack, advantages, "shape_rewards", shaped)


def scaled_by_group(stack: ExitStack, env: str) -> None:
    """Asked for the standard deviation of the batch, the trainer divides by that of each group."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], scale: Any = "none", **rest: Any) -> Any:
        return original(samples, "group" if scale == "batch" else scale, **rest)

    put(stack, advantages, "compute_advantages", computed)


def underflowing(sharding: Any) -> None:
    """Gradients go through half precision at a loss scale that overflows have lowered to almost nothing."""
    for parameter in sharding.trainable.values():
        if parameter.grad is not None:
            parameter.grad.copy_((parameter.grad * 2.0**-10).half().float() * 2.0**10)


def zeros_on_both_sides(stack: ExitStack, env: str) -> None:
    """The adapter's first matrix is zero as well as its second one: each of them multiplies the other's gradient."""
    original = lora.add_lora

    def add_lora(model: Any, config: Any) -> None:
        original(model, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_A" in name:
                    parameter.zero_()

    put(stack, lora, "add_lora", add_lora)


# Healthy settings


def fine_for_repeating(task: Any, trace: vf.Trace, correct: float) -> float:
    """A tenth of a point less for each call that was made before."""
    return -0.1 * getattr(trace.state, "repeated_calls", 0)


def slowly(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tool answers after a hundredth of a second."""

    async def slow(**given: Any) -> Any:
        await asyncio.sleep(0.01)
        return fn(**given)

    return slow, arguments
