"""The doubles of field_seen.py in engine, trainer and advantages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults.doubles import generating, put
from plumbob.testing.faults.field_parts import by_group, with_reward_of
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

# The engine


def scale_adapters(factor: Callable[[Any], float]) -> Callable[[Any], None]:
    """Multiplies the scale of every adapter by `factor(layer)`."""

    def change(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.scaling = {name: value * factor(module) for name, value in module.scaling.items()}

    return change


def rank_root(layer: Any) -> float:
    """alpha / sqrt(rank) over alpha / rank."""
    (rank,) = layer.r.values()
    return math.sqrt(rank)


def later_positions(model: Any) -> None:
    """Each token after the prompt gets a position that is one too high."""

    def shift(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
        if positions is not None and ids.shape[1] == 1:
            kwargs["position_ids"] = positions + 1
        return args, kwargs

    model.get_decoder().register_forward_pre_hook(shift, with_kwargs=True)


def round_frequencies(model: Any) -> None:
    """The rotary frequencies are rounded to bfloat16, as a cast of the whole model does."""
    rotary = model.get_decoder().rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


def in_bf16(model: Any) -> None:
    """All weights are rounded to bfloat16."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def rounded(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a sync, rounded to bfloat16."""
    return {name: weight.bfloat16().float() for name, weight in weights.items()}


def default_system_prompt(stack: ExitStack, run: Run) -> None:
    """The engine's chat template puts its default in place of the task's system prompt."""
    own = run.tokenizer.encode(run.tasks.train[0].data.system_prompt, add_special_tokens=False)[2:-2]
    default = run.tokenizer.encode("You are a helpful assistant", add_special_tokens=False)

    def replaced(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        for at in range(len(ids) - len(own)):
            if ids[at : at + len(own)] == own:
                return ids[:at] + default + ids[at + len(own) :], sampling
        return ids, sampling

    generating(replaced)(stack, run)


def earlier_results_dropped(stack: ExitStack, run: Run) -> None:
    """The engine's template renders only the last tool result; earlier ones are empty."""
    opening, closing = (run.tokenizer.convert_tokens_to_ids(t) for t in ("<tool_response>", "</tool_response>"))

    def dropped(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        last = max((i for i, t in enumerate(ids) if t == opening), default=0)
        kept, inside = [], False
        for i, token in enumerate(ids):
            inside = (inside and token != closing) or (token == opening and i < last)
            if not inside or token == opening:
                kept.append(token)
        return kept, sampling

    generating(dropped)(stack, run)


def cut_at(most: int) -> Callable[[list[int], Sampling], tuple[list[int], Sampling]]:
    """The engine keeps only the first `most` tokens of a prompt."""
    return lambda ids, sampling: (ids[:most], sampling)


def same_seed(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """Every request has the same seed."""
    return ids, dataclasses.replace(sampling, seed=42)


def repeated_less(penalty: float) -> Callable[[Any, list[Any], torch.Tensor], torch.Tensor]:
    """Transformers' repetition penalty, on the tokens of prompt and completion."""

    def change(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        for i, request in enumerate(requests):
            seen = torch.tensor(sorted({*request.prompt.tolist(), *request.token_ids}))
            value = changed[i, seen]
            changed[i, seen] = torch.where(value > 0, value / penalty, value * penalty)
        return changed

    return change


def present_less(penalty: float) -> Callable[[Any, list[Any], torch.Tensor], torch.Tensor]:
    """OpenAI's presence penalty, on the tokens of the completion and of the conversation so far."""

    def change(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        for i, request in enumerate(requests):
            seen = sorted({*request.prompt.tolist(), *request.token_ids})
            changed[i, seen] -= penalty
        return changed

    return change


def cooler(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """Samples at temperature 0.6."""
    return ids, dataclasses.replace(sampling, temperature=0.6 if sampling.temperature else 0.0)


class SecondSync:
    """From the second weight sync on, a frozen matrix of the engine is zero."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.count += 1
        if self.count >= 2:
            layers = [m for n, m in engine.model.named_modules() if n.endswith("layers.1.mlp.down_proj")]
            for layer in layers:
                base = getattr(layer, "base_layer", layer)
                base.weight = torch.nn.Parameter(torch.zeros_like(base.weight), requires_grad=False)
        return weights


# The trainer's scores, rows and losses


def sampled_positions(stack: ExitStack, env: str) -> None:
    """Positions of the trainer's rows count only tokens of the loss mask, as a mask of left padding would."""
    original = policy_module.make_batch

    def make_batch(rows: Sequence[Sample], *rest: Any) -> Any:
        batch = original(rows, *rest)
        if "position_ids" in batch.inputs:
            counts = [torch.tensor(row.loss_mask).long().cumsum(0) for row in rows]
            batch.inputs["position_ids"] = torch.cat(counts)[None].to(batch.ids.device)
        return batch

    put(stack, policy_module, "make_batch", make_batch)


def rolled_logprobs(sample: Sample, trace: vf.Trace) -> Sample:
    """The sampling log-probabilities are rolled by one sampled token."""
    values = sample.sampled_logprobs
    rolled = iter(values[1:] + values[:1])
    return dataclasses.replace(sample, sampling_logprobs=[next(rolled) if m else 0.0 for m in sample.loss_mask])


def reversed_old(stack: ExitStack, env: str) -> None:
    """The log-probabilities under the step's first weights are stored in the reverse order of each row's tokens."""
    original = forward_backward._by_row
    put(
        stack,
        forward_backward,
        "_by_row",
        lambda *args: {i: values.flip(0) for i, values in original(*args).items()},
    )


def last_microbatch_only(stack: ExitStack, env: str) -> None:
    """The gradient is set to zero before each microbatch, so that only the last one counts."""
    original = forward_backward.grpo_loss

    def loss(run: Run, minibatch: Any, indices: Sequence[int]) -> Any:
        run.policy.sharding.zero_grad()
        return original(run, minibatch, indices)

    put(stack, forward_backward, "grpo_loss", loss)


def exploding_from(step: int) -> Callable[[ExitStack, str], None]:
    """From this step (from 0) on, the loss is multiplied by 300, 3000, ..."""

    def start(stack: ExitStack, env: str) -> None:
        original = forward_backward.grpo_loss

        def loss(run: Run, minibatch: Any, indices: Sequence[int]) -> Any:
            value, measured = original(run, minibatch, indices)
            late = run.state.step - step
            return (value * 300.0 * 10.0**late if late >= 0 else value), measured

        put(stack, forward_backward, "grpo_loss", loss)

    return start


def early_end(stack: ExitStack, env: str) -> None:
    """The schedule advances four steps in each step."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, step: int, *, warmup: int, total: int) -> float:
        return original(kind, peak, 4 * step, warmup=warmup, total=total)

    put(stack, step_module, "learning_rate_of", rate)


# Rewards and advantages


def rotated(samples: list[Sample]) -> list[Sample]:
    """Each sample has the reward of the next sample of its group."""
    return [
        with_reward_of(sample, group[(i + 1) % len(group)])
        for group in by_group(samples)
        for i, sample in enumerate(group)
    ]


def broadcast(samples: list[Sample]) -> list[Sample]:
    """Every sample of a group has the reward of the group's first sample."""
    return [with_reward_of(sample, group[0]) for group in by_group(samples) for sample in group]


def advantages_of(change: Callable[..., Any]) -> Callable[[ExitStack, str], None]:
    """Advantages are `change(original, samples, *settings)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = advantages.compute_advantages
        put(
            stack,
            advantages,
            "compute_advantages",
            lambda samples, *args, **kwargs: change(original, samples, *args, **kwargs),
        )

    return start


def over_the_batch(original: Any, samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
    """The baseline is the mean of all rewards of the step."""
    found = original(samples, *args, **kwargs)
    values = original([dataclasses.replace(s, group="all") for s in samples], *args, **kwargs).values
    return dataclasses.replace(found, values=values, with_signal=frozenset(s.group for s in samples))


def strided(original: Any, samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
    """Rewards are grouped as if the rollouts of a task lay a number of groups apart."""
    names = list(dict.fromkeys(s.group for s in samples))
    regrouped = [dataclasses.replace(s, group=names[i % len(names)]) for i, s in enumerate(samples)]
    return original(regrouped, *args, **kwargs)


def only_positive(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Negative advantages are set to 0."""
    found = original(*args, **kwargs)
    return dataclasses.replace(found, values=[max(value, 0.0) for value in found.values])


def long_ones_fail(most: int) -> Callable[[ExitStack, str], None]:
    """A rollout with more than `most` turns fails, as if its request had timed out."""

    def start(stack: ExitStack, env: str) -> None:
        original = collect._unusable

        def unusable(trace: vf.Trace, limits: Any) -> Any:
            if trace.num_turns > most:
                return collect._Unusable("errored", "TimeoutError: the request took more than 60 seconds")
            return original(trace, limits)

        put(stack, collect, "_unusable", unusable)

    return start


# The saved model


def base_saved(stack: ExitStack, run: Run) -> None:
    """The final model is written from the weights with which the run began."""
    first = {name: tensor.detach().clone() for name, tensor in run.policy.trainable.items()}
    original = run.policy.save_final

    @torch.no_grad()
    def save_final(folder: Any) -> None:
        trained = {name: tensor.detach().clone() for name, tensor in run.policy.trainable.items()}
        _load(run.policy, first)
        try:
            original(folder)
        finally:
            _load(run.policy, trained)

    put(stack, run.policy, "save_final", save_final)


def _load(policy: Policy, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in policy.trainable.items():
        tensor.copy_(values[name])


def unmerged(stack: ExitStack, env: str) -> None:
    """The final model is written without merging the adapter."""
    original = policy_module.merged_state

    def state(model: Any) -> Any:
        adapters = [m for m in model.modules() if isinstance(m, LoraLinear)]
        kept = [dict(m.scaling) for m in adapters]
        for module in adapters:
            module.scaling = dict.fromkeys(module.scaling, 0.0)
        try:
            return original(model)
        finally:
            for module, scaling in zip(adapters, kept, strict=True):
                module.scaling = scaling

    put(stack, policy_module, "merged_state", state)
