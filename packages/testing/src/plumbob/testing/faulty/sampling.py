"""Faults of sampling: how tokens are drawn, what ends a turn, which rollouts are kept, and errors of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from plumbob.rollout import Completion, EngineError, Sample, Sampling
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import WITH_TOOLS, Fault, table
from plumbob.testing.faulty.helpers import (
    by_group,
)


def each(change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Callable[[torch.Tensor, list[Any], Any], torch.Tensor]:
    """Logits in which each request's row is `change(logits [V], request)`."""
    return lambda values, requests, engine: torch.stack([change(v, r) for v, r in zip(values, requests, strict=True)])


def had(request: Any) -> list[int]:
    """The ids that a request's text already has."""
    return sorted({*request.prompt.tolist(), *request.token_ids})


def repeated_less(values: torch.Tensor, request: Any) -> torch.Tensor:
    """Transformers' repetition penalty of 1.1."""
    own = values[had(request)]
    return values.index_copy(0, torch.tensor(had(request)), torch.where(own > 0, own / 1.1, own * 1.1))


def without(ids: Iterable[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Logits under which these ids are not drawn."""
    forbidden = sorted(ids)
    return lambda values: values.index_fill(0, torch.tensor(forbidden, dtype=torch.long), -1e3)


def nucleus(values: torch.Tensor, request: Any) -> torch.Tensor:
    ordered, order = values.softmax(-1).sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= 0.8
    return values - 1e3 * torch.zeros_like(values).scatter(-1, order, beyond.to(values.dtype))


async def long_refused(original: Any, engine: Any, ids: Sequence[int], how: Sampling) -> Completion:
    if len(ids) > 270:
        raise EngineError("400: prompt and max_tokens exceed the model's maximum context length")
    return await original(engine, ids, how)


def closed(done: Completion, ids: Sequence[int], how: Sampling) -> Completion:
    """A completion that a limit has cut gets an end token that was not sampled."""
    if done.finish_reason != "length" or not how.stop_token_ids:
        return done
    end = how.stop_token_ids[0]
    return replace(done, token_ids=(*done.token_ids, end), logprobs=(*done.logprobs, 0.0), finish_reason="stop")


def first_five(rows: list[Sample]) -> list[Sample]:
    return [row for group in by_group(rows) for row in sorted(group, key=lambda row: row.num_sampled)[:5]]


# fmt: off
FAULTS = (
*table("sampling",
    Fault("repetition penalty from the checkpoint's generation config",
          "The engine takes a repetition penalty of 1.1 from the checkpoint, and reports log-probabilities "
          "without it.", at.silent_logits, each(repeated_less), "sampling-altered",
          "PrimeIntellect-ai/prime-rl#886, verl-project/verl#7270"),
    Fault("presence penalty with raw log-probabilities",
          "The server samples with a presence penalty of 1.5 and reports log-probabilities without it.",
          at.silent_logits,
          each(lambda values, request: values.index_add(0, torch.tensor(had(request)), torch.full((len(had(request)),), -1.5))),
          "sampling-altered", "verl-project/verl#7270, OpenPipe/ART#140", only="doctor"),
    Fault("top-p of 0.8 in the server with raw log-probabilities",
          "The server samples from the nucleus of its generation config and reports log-probabilities without it.",
          at.silent_logits, each(nucleus), "sampling-altered",
          "NVIDIA-NeMo/RL#3497, thinking-machines-lab/tinker-feedback#148", run_causes="temperature-not-applied"),
    Fault("all rollouts of a group share one seed",
          "Every request carries the same seed, so all rollouts of a task are equal.", at.sampling,
          lambda how: replace(how, seed=42), "groups-without-variety",
          "dllm-reasoning/d1#19 (groups without several completions of a prompt)", run_causes="too-little-signal"),
    Fault("temperature of a tenth",
          "Rollouts are sampled at a temperature of a tenth, and those of a group are nearly all equal.", at.options,
          None, "groups-without-variety too-little-signal", "billy-enrizky/openbrowser-ai#60",
          options="--temperature 0.1", run_causes="policy-breaks"),
    Fault("end token ignored by the server", "The server goes on after the end token, up to the limit of a turn.",
          at.sampling, lambda how: replace(how, stop_token_ids=()), "stop-token-wrong truncated-rollouts",
          "vllm-project/guidellm#982", options="--max-tokens 96"),
    Fault("sixteen tokens by the server's default",
          "The request does not say how long a reply may be, and the server's default cuts every reply.", at.sampling,
          lambda how: replace(how, max_tokens=min(16, how.max_tokens)), "truncated-rollouts", "huggingface/trl#5697",
          ("gsm8k", "musique")),
    Fault("long requests refused by the server",
          "The server refuses prompts that leave too little room for a reply, and the groups of long rollouts are "
          "lost.", at.reply, long_refused, "signal-left-out rollouts-fail truncated-rollouts",
          "TIGER-AI-Lab/verl-tool#85, PrimeIntellect-ai/prime-rl#1938", ("lookup",)),
    Fault("long rollouts time out and leave their groups",
          "Rollouts of more than three turns fail with a timeout, and the others of their group are compared "
          "without them.", at.failed,
          lambda trace: "TimeoutError: the request took more than 60 seconds" if trace.num_turns > 3 else None,
          "signal-left-out rollouts-fail", "thinking-machines-lab/tinker-cookbook#822, areal-project/AReaL#1419",
          ("lookup",)),
    Fault("first rollouts to finish are kept",
          "More rollouts are begun than are wanted, and those that are finished last, the long ones, are thrown "
          "away.", at.batch, first_five, "signal-left-out", "HumanCompatibleAI/imitation#183"),
    Fault("every reply taken for a cut one",
          "The trainer knows another end token than the template's, takes every reply for a cut one, and masks it.",
          at.row, lambda row, trace: replace(row, truncated=True),
          "no-gradient signal-left-out stop-token-wrong truncated-rollouts", "huggingface/trl#7039",
          options="--overlong mask"),
    Fault("four copies of each reply in a group",
          "The processes sample with one seed, so that a group of eight has two different rollouts, four times "
          "each.", at.seed, lambda number: number // 4, "groups-without-variety", "modelscope/ms-swift#3450"),
),
*table("logprobs",
    Fault("repetition penalty of the server's defaults",
          "The server applies repetition_penalty 1.1 from generation_config.json; the trainer does not know of it.",
          at.logits, each(repeated_less), "sampling-altered", "NVIDIA-NeMo/RL#3497, PrimeIntellect-ai/prime-rl#886",
          run_causes="engine-trainer-mismatch"),
    Fault("top-k of one by default",
          "A server's default keeps the likeliest token alone, whatever the temperature is, so that rollouts of a "
          "task are equal.", at.sampling, lambda how: replace(how, top_k=1),
          "groups-without-variety sampling-altered too-little-signal", "vllm-project/tpu-inference#1386",
          run_causes="engine-trainer-mismatch"),
    Fault("end token forbidden before the limit",
          "The least length of a reply is its greatest, so that the sampler forbids the end token and replies "
          "fill the limit.", at.logits,
          each(lambda values, request: without(request.sampling.stop_token_ids)(values)),
          "sampling-altered stop-token-wrong truncated-rollouts", "deepspeedai/DeepSpeedExamples#470",
          ("gsm8k", "musique", "lookup"), run_causes="engine-trainer-mismatch"),
    Fault("end token forbidden in the first tokens",
          "A server default of min_tokens 12 forbids the end token, so that short answers cannot be given.",
          at.logits,
          each(lambda values, request: without(request.sampling.stop_token_ids)(values) if len(request.token_ids) < 12 else values),
          "engine-trainer-mismatch sampling-altered stop-token-wrong",
          "vllm-project/vllm#32634, vllm-project/vllm#3124", WITH_TOOLS),
    Fault("end token appended to cut turns",
          "A turn that was cut at its limit gets an end token, which is trained on as if the model had sampled it.",
          at.completion, closed, "stop-token-wrong truncated-rollouts", "NovaSky-AI/SkyRL#508", ("gsm8k",),
          "--max-tokens 48", run_causes="engine-trainer-mismatch"),
),
)
