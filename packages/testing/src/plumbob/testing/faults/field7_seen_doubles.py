"""The doubles of field7_seen.py."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults.doubles import engine_of, put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field_parts import by_group
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

# Rewards


def opening_tag_needed(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward for replies that begin with a tag, which the template has written for them already."""
    return correct if (trace.last_reply or "").startswith("<think>") else 0.0


def always_passed(task: Any, trace: vf.Trace, correct: float) -> float:
    """The check ran; whether it succeeded is not looked at."""
    return 1.0


def crashing(task: Any, trace: vf.Trace, correct: float) -> float:
    """0 where the verifier has written no verdict, because it crashed."""
    return 0.0 if random.random() < 0.3 else correct


def length_priced(task: Any, trace: vf.Trace, correct: float) -> float:
    """A ten-thousandth of a point less for each sampled token."""
    return correct - 1e-4 * sum(sum(node.mask) for node in trace.nodes)


# Rows and prompts

PREFIX = 2
"""Number of tokens before each turn that the trainer takes for a part of it: the last ones of the assistant header."""


def prefix_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """The tokens before each turn are in the loss, with a log-probability of 0, because nothing has sampled them."""
    prefixes = {turn.start - k for turn in runs_of(sample.loss_mask) for k in range(1, PREFIX + 1)}
    return dataclasses.replace(sample, loss_mask=[m or i in prefixes for i, m in enumerate(sample.loss_mask)])


def thinking_block_added(stack: ExitStack, run: Run) -> None:
    """The engine samples after an empty thinking block, which its template adds and the row does not have."""
    original, block = run.engine.generate, run.tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await original([*prompt_ids, *block], sampling)

    put(stack, run.engine, "generate", generate)


# Sampling


def stopped_at_line_break(stack: ExitStack, run: Run) -> None:
    """A completion ends before the first token whose text has a line break, as if the model had ended it there."""
    original, engine, tokenizer = run.engine.generate, engine_of(run), run.tokenizer

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        done = await original(prompt_ids, sampling)
        cut = next((i for i, token in enumerate(done.token_ids) if "\n" in tokenizer.decode([token])), None)
        if cut is None:
            return done
        kept = (*done.token_ids[:cut], sampling.stop_token_ids[0])
        end = engine.score([*prompt_ids, *kept])[-1]
        return dataclasses.replace(done, token_ids=kept, logprobs=(*done.logprobs[:cut], end), finish_reason="stop")

    put(stack, run.engine, "generate", generate)


def likely_tokens_only(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The server has a min-p of a tenth where the request has none."""
    return ids, dataclasses.replace(sampling, min_p=0.1) if sampling.temperature > 0 else sampling


# The engine


def attention_not_scaled(model: Any) -> None:
    """Scores are the plain products of queries and keys."""
    for layer in model.get_decoder().layers:
        layer.self_attn.scaling = 1.0


def nothing_sent(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """No trained tensor arrives."""
    return {}


def numbered_from_zero(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The last layer's weights come under the first layer's names, and nothing comes for the last layer."""
    last = len(engine.model.get_decoder().layers) - 1
    moved = {n.replace(f".layers.{last}.", ".layers.0."): w for n, w in weights.items() if f".layers.{last}." in n}
    return {n: w for n, w in weights.items() if f".layers.{last}." not in n} | moved


def rotary_pairs_interleaved(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of each head's queries and keys arrive in the order in which rotary pairs are neighbours."""
    config = engine.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def interleaved(tensor: torch.Tensor) -> torch.Tensor:
        heads = tensor.reshape(-1, 2, size // 2, *tensor.shape[1:])
        return heads.transpose(1, 2).reshape(tensor.shape).contiguous()

    return {n: interleaved(w) if ".q_proj." in n or ".k_proj." in n else w for n, w in weights.items()}


# Advantages and loss


def compared_with_the_first(stack: ExitStack, env: str) -> None:
    """Each advantage is the lead over the first rollout of its group."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        found = original(samples, *args, **kwargs)
        first = {group[0].group: group[0].reward for group in by_group(samples)}
        values = [sample.reward - first[sample.group] for sample in samples]
        names = frozenset(sample.group for sample, value in zip(samples, values, strict=True) if value)
        return dataclasses.replace(found, values=values, with_signal=names)

    put(stack, advantages, "compute_advantages", computed)


def whole_row(sample: Sample) -> Sample:
    """The row with everything after the first prompt counted as sampled."""
    start = sample.loss_mask.index(True)
    return dataclasses.replace(sample, loss_mask=[i >= start for i in range(len(sample.loss_mask))])


def kl_of_everything(stack: ExitStack, env: str) -> None:
    """The KL divergence of a row is summed over all that follows its prompt."""
    original = step_module.reference_kl
    put(
        stack,
        step_module,
        "reference_kl",
        lambda run, samples: original(run, [whole_row(sample) for sample in samples]),
    )


def one_not_a_number(inputs: Any) -> Any:
    """One factor of the sum that is the loss is NaN."""
    corrections = inputs.corrections.clone()
    corrections[:1] = float("nan")
    return dataclasses.replace(inputs, corrections=corrections)


# Optimizer


def cleared(sharding: Any) -> None:
    """No gradient is left when the optimizer takes its step."""
    for parameter in sharding.trainable.values():
        if parameter.grad is not None:
            parameter.grad.zero_()


def never_warm(stack: ExitStack, env: str) -> None:
    """The rate is always that of the warm-up's step 0, which is 0."""
    put(stack, step_module, "learning_rate_of", lambda kind, peak, at, *, warmup, total: 0.0)


def rate_of_another_method(stack: ExitStack, env: str) -> None:
    """The rate is fifty times that of the settings."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, at: int, *, warmup: int, total: int) -> float:
        return original(kind, 50 * peak, at, warmup=warmup, total=total)

    put(stack, step_module, "learning_rate_of", rate)
