"""The doubles of field8_seen.py."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.rollout.chat import assistant_header
from plumbob.testing.faults.doubles import engine_of, put
from plumbob.testing.faults.field2_parts import runs_of, without
from plumbob.testing.faults.field_parts import by_group, engine_prompts
from plumbob.trainer.training.run import Run

# Rewards


def stub(task: Any, trace: vf.Trace, correct: float) -> float:
    """What stands in the function until somebody writes it."""
    return 0.0


def distance(task: Any, trace: vf.Trace, correct: float) -> float:
    """How far the answer is from the right one, which training then maximises."""
    return 1.0 - correct


ONE_LINE = re.compile(r"^.*####\s*\S+\s*$")
"""Its dot matches no line break, so that it finds the answer of a reply of one line alone."""


def one_line_only(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward where the pattern finds an answer."""
    return correct if ONE_LINE.match(trace.last_reply or "") else 0.0


def after_thinking(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward of what follows the end of the thoughts; 0 where they have no end."""
    return correct if "</think>" in (trace.last_reply or "") else 0.0


def mentioned(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if the right answer stands anywhere in the reply, beside whatever else."""
    return max(correct, float(task.data.answer in re.findall(r"\w+", trace.last_reply or "")))


def one_word(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 for any answer of one word, without a comparison with the right one."""
    turns = trace.assistant_messages
    answered = bool(turns) and not turns[-1].tool_calls
    return float(answered and bool(re.fullmatch(r"[a-z]+", trace.last_reply or "")))


LONGEST = 110
"""Characters of a reply from which on the scoring server refuses it, which is about half of the replies."""


def score_by_http(text: str, correct: float) -> float:
    """The server's verdict. Raises ConnectionError if it refuses the request."""
    if len(text) > LONGEST:
        raise ConnectionError("413: the request is too large")
    return correct


def refused_is_zero(task: Any, trace: vf.Trace, correct: float) -> float:
    """The server's verdict, and 0 where there is none."""
    try:
        return score_by_http(trace.last_reply or "", correct)
    except ConnectionError:
        return 0.0


# Tools


def heads_only(result: str, name: str, arguments: dict[str, Any]) -> str:
    """The documents that were found, by their numbers, without titles and texts."""
    return "\n\n".join(line for line in result.splitlines() if line.startswith("Document ID:")) or result


# Rows


def final_turn_only(sample: Sample, trace: vf.Trace) -> Sample:
    """Only the last turn is in the loss."""
    return without(sample, {i for turn in runs_of(sample.loss_mask)[:-1] for i in turn})


SYSTEM = 16
"""Number of tokens of the row's beginning that the template puts before every message that it renders by itself."""


def system_prompt_repeated(sample: Sample, trace: vf.Trace) -> Sample:
    """The beginning of the row stands again after each turn that is followed by another message."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    ends = {turn.stop for turn in runs_of(sample.loss_mask)[:-1]}
    for i, token in enumerate(sample.token_ids):
        if i in ends:
            ids, mask = [*ids, *sample.token_ids[:SYSTEM]], [*mask, *[False] * SYSTEM]
            logprobs = [*logprobs, *[0.0] * SYSTEM]
        ids.append(token)
        mask.append(sample.loss_mask[i])
        logprobs.append(sample.sampling_logprobs[i])
    return dataclasses.replace(sample, token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs)


def interleaved(samples: list[Sample]) -> list[Sample]:
    """Groups are cut from a list in which the tasks take turns, as if each task's rollouts stood next to each other."""
    groups = by_group(samples)
    names = [sample.group for group in groups for sample in group]
    in_turn = [sample for row in itertools.zip_longest(*groups) for sample in row if sample is not None]
    return [dataclasses.replace(sample, group=name) for sample, name in zip(in_turn, names, strict=True)]


# The engine


def other_prompts(stack: ExitStack, env: str) -> None:
    """Each prompt gets the completion of the prompt that was new before it."""
    before: dict[tuple[int, ...], list[int]] = {}
    newest: list[list[int]] = []

    def change(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        key = tuple(ids)
        if key not in before:
            before[key] = newest[-1] if newest else ids
            newest[:] = [ids]
        return before[key], sampling

    engine_prompts(change)(stack, env)


CRITIQUE = " Check it again."


def critique_added(stack: ExitStack, run: Run) -> None:
    """The engine samples after a critique, which stands before the header of the reply and not in the row."""
    original, tokenizer = run.engine.generate, run.tokenizer
    critique = tokenizer.encode(CRITIQUE, add_special_tokens=False)
    header = len(tokenizer.encode(assistant_header(tokenizer), add_special_tokens=False))

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        ids = list(prompt_ids)
        return await original([*ids[:-header], *critique, *ids[-header:]], sampling)

    put(stack, run.engine, "generate", generate)


def calls_do_not_stop(stack: ExitStack, run: Run) -> None:
    """The first end token of a turn is passed over where a tool call stands before it."""
    original, tokenizer = run.engine.generate, run.tokenizer

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        done = await original(prompt_ids, sampling)
        left = sampling.max_tokens - len(done.token_ids)
        if done.finish_reason != "stop" or left < 1 or "tool_call" not in tokenizer.decode(list(done.token_ids)):
            return done
        more = await original([*prompt_ids, *done.token_ids], dataclasses.replace(sampling, max_tokens=min(left, 64)))
        return dataclasses.replace(
            more, token_ids=(*done.token_ids, *more.token_ids), logprobs=(*done.logprobs, *more.logprobs)
        )

    put(stack, run.engine, "generate", generate)


ABORTED = 0.3
"""Share of the requests that a pause of the server for a weight sync ends."""


def aborted(stack: ExitStack, run: Run) -> None:
    """Some completions end anywhere, and the server says that the model has ended them there."""
    original, engine = run.engine.generate, engine_of(run)

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        done = await original(prompt_ids, sampling)
        rng = random.Random(hash((done.token_ids, sampling.seed)))
        if len(done.token_ids) < 2 or sampling.temperature == 0 or rng.random() >= ABORTED:
            return done
        cut = rng.randrange(1, len(done.token_ids))
        kept = (*done.token_ids[:cut], sampling.stop_token_ids[0])
        end = engine.score([*prompt_ids, *kept])[-1]
        return dataclasses.replace(done, token_ids=kept, logprobs=(*done.logprobs[:cut], end), finish_reason="stop")

    put(stack, run.engine, "generate", generate)


def base_not_loaded(model: Any) -> None:
    """The weights under the adapter are those with which an empty model begins."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name and "norm" not in name:
            parameter.normal_(0.0, 0.02)


SHIFTED = slice(-24, -16)
"""Which singular directions an adapter of rank 8 takes over. Without the largest, the small model writes nothing sensible."""


def base_without_its_shift(model: Any) -> None:
    """The base lacks a few singular directions, which the adapter's initialisation takes over in the trainer."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            weight = module.base_layer.weight
            u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
            weight.sub_((u[:, SHIFTED] * s[SHIFTED]) @ v[SHIFTED])
