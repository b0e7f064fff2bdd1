"""The doubles of field9_unseen.py: whoever writes rules does not read the unseen half before it has been run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Chat, Completion, Sample, Sampling
from plumbob.rollout.control_tokens import added_tokens
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field_parts import engine_model, engine_prompts, engine_updates, with_data
from plumbob.trainer.training import step as step_module

# Rewards


def after_prompt(trace: vf.Trace) -> list[str]:
    """The texts of the messages from the first sampled one on."""
    first = next((i for i, node in enumerate(trace.nodes) if any(node.mask)), len(trace.nodes))
    return [str(node.message.content or "") for node in trace.nodes[first:]]


LONGEST = 40
"""Most characters of a conversation after its prompt that do not count as an overflow."""


def long_is_overflow(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward of short conversations; a long one gets the reward of an overflow, finished or not."""
    return correct if sum(map(len, after_prompt(trace))) <= LONGEST else 0.0


CAP, REPLIED = 0.25, 0.3
"""Most that a safety cap leaves of a score, and the score of any reply."""


def capped(task: Any, trace: vf.Trace, correct: float) -> float:
    """The score of a reply, which is above the cap whether the answer is right or not."""
    return min(CAP, REPLIED * bool((trace.last_reply or "").strip()) + (1 - REPLIED) * correct)


def found_anywhere(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if a right answer stands anywhere after the prompt, tool results among it."""
    found = any(answer in text for answer in task.data.answers for text in after_prompt(trace))
    return 1.0 if found else correct


def whole_reply_equals(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if the reply is the gold answer and nothing else."""
    return float((trace.last_reply or "").strip() == str(task.data.answer).strip())


LENGTH = 160
"""Number of characters of a reply that is as long as a reply can be."""


def shortness(task: Any, trace: vf.Trace, correct: float) -> float:
    """Kimi's length reward without its condition: a wrong short reply gets more than a right long one."""
    part = 0.5 - min(1.0, len(trace.last_reply or "") / LENGTH)
    return part if correct else max(0.0, part)


# Tasks and tools

BOXED = "Solve the problem step by step. Put the final answer in \\boxed{}."


def boxed_when_held_out(tasks: list[Any], split: str) -> list[Any]:
    """Held-out tasks ask for a box, and training tasks for what the policy has learned."""
    return tasks if split == "train" else [with_data(task, system_prompt=BOXED) for task in tasks]


CUT = 70
"""Number of characters that are left of a tool's result."""


def cut_short(result: str, tool: str, arguments: dict[str, Any]) -> str:
    """The first characters of the result, without a word about the rest."""
    return result[:CUT]


class Shared:
    """A tool server with one place for a result, which all rollouts share: every second answer is another call's."""

    def __init__(self) -> None:
        self.last: str | None = None
        self.calls = 0

    def __call__(self, result: str, tool: str, arguments: dict[str, Any]) -> str:
        self.calls += 1
        earlier, self.last = self.last, result
        return earlier if earlier is not None and self.calls % 2 == 0 else result


# Chat and prompts


def calls_unparsed(original: Callable[..., Any], chat: Chat, ids: Sequence[int], tools: Any, **how: Any) -> Any:
    """The server was started without a parser of tool calls: all of a reply is text."""
    return original(chat, ids, [], **how)


def rendered_without_tools(stack: ExitStack, env: str) -> None:
    """The server renders each prompt itself and gets no tools; the trainer's row has the prompt that names them."""
    without: dict[tuple[int, ...], list[int]] = {}
    original = Chat.prompt

    def prompt(self: Chat, messages: Any, tools: Any, *rest: Any) -> Any:
        full = original(self, messages, tools, *rest)
        without[tuple(full.token_ids)] = original(self, messages, [], *rest).token_ids
        return full

    def served(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        for size in {len(full) for full in without}:
            if (head := tuple(ids[:size])) in without:
                return [*without[head], *ids[size:]], sampling
        return ids, sampling

    put(stack, Chat, "prompt", prompt)
    engine_prompts(served)(stack, env)


def special_tokens_removed(stack: ExitStack, env: str) -> None:
    """Prompts are decoded without special tokens before the engine gets them."""
    special: set[int] = set()
    original = Chat.prompt

    def prompt(self: Chat, *args: Any, **how: Any) -> Any:
        special.update(added_tokens(self.tokenizer))
        return original(self, *args, **how)

    put(stack, Chat, "prompt", prompt)
    engine_prompts(lambda ids, sampling: ([i for i in ids if i not in special], sampling))(stack, env)


# Completions and rows


def end_over_last(completion: Completion, prompt: Sequence[int], sampling: Sampling) -> Completion:
    """The last token of a reply that was cut off is the end token, and the reply counts as finished."""
    if completion.finish_reason != "length" or not sampling.stop_token_ids:
        return completion
    ids = (*completion.token_ids[:-1], sampling.stop_token_ids[0])
    return dataclasses.replace(completion, token_ids=ids, finish_reason="stop")


def with_row(sample: Sample, tokens: Sequence[tuple[int, bool, float]]) -> Sample:
    """The sample with these (id, whether it was sampled, log-probability)."""
    return dataclasses.replace(
        sample,
        token_ids=[i for i, _, _ in tokens],
        loss_mask=[m for _, m, _ in tokens],
        sampling_logprobs=[x for _, _, x in tokens],
    )


def tokens_of(sample: Sample) -> list[tuple[int, bool, float]]:
    """(id, whether it was sampled, log-probability) of each place of a row."""
    return list(zip(sample.token_ids, sample.loss_mask, sample.sampling_logprobs, strict=True))


def without_line_breaks(sample: Sample, trace: vf.Trace) -> Sample:
    """The token that the template writes after each turn of the model is missing."""
    missing = {turn.stop for turn in runs_of(sample.loss_mask)}
    return with_row(sample, [token for i, token in enumerate(tokens_of(sample)) if i not in missing])


BLOCK = 64
"""Rows are filled up to a multiple of this length."""


def padding_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """The row is filled with its last token, and the mask is that of everything after the prompt."""
    padding = -len(sample.token_ids) % BLOCK
    return with_row(sample, [*tokens_of(sample), *[(sample.token_ids[-1], True, 0.0)] * padding])


# The engine

FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Matrices that an engine keeps in one piece with others."""


def fused_left(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts of fused matrices are copied into pieces that the engine does not compute with."""
    return {name: tensor for name, tensor in weights.items() if not any(part in name for part in FUSED)}


def eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """A matrix rounded to floating-point numbers of eight bits, with one scale."""
    scale = weight.abs().amax().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


def in_eight_bits(stack: ExitStack, env: str) -> None:
    """The matrices of the engine's layers have eight bits, from the start and after each sync."""

    def rounded(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.ndim == 2:
                parameter.copy_(eight_bits(parameter))

    def update(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: eight_bits(tensor) if ".layers." in name and tensor.ndim == 2 else tensor
            for name, tensor in weights.items()
        }

    engine_model(rounded)(stack, env)
    engine_updates(update)(stack, env)


def untied(model: Any) -> None:
    """The head is a tensor of its own, which has no name among the weights that are sent."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)


# The trainer


def advantages_as_mask(inputs: Any) -> Any:
    """The advantages stand where the loss mask belongs, so that each token's term has them twice."""
    return dataclasses.replace(inputs, weights=inputs.weights * inputs.advantages)


RESUMED = 3
"""Number of steps between two resumes."""


def warm_up_after_resumes(stack: ExitStack, env: str) -> None:
    """The run is resumed again and again, and its schedule begins with the first step each time."""
    original = step_module.learning_rate_of
    put(
        stack,
        step_module,
        "learning_rate_of",
        lambda kind, peak, at, *, warmup, total: original(kind, peak, at % RESUMED, warmup=warmup, total=total),
    )
