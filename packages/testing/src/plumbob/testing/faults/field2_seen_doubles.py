"""The doubles of field2_seen.py."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field2_parts import evaluations, runs_of, since, without
from plumbob.testing.faults.field_parts import by_group, engine_prompts, tools_answer, with_data
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

# Rows


def ends_masked(sample: Sample, trace: vf.Trace) -> Sample:
    """The last token of each turn is not in the loss, so that nothing teaches the model when to stop."""
    return without(sample, {turn[-1] for turn in runs_of(sample.loss_mask)})


def starts_masked(sample: Sample, trace: vf.Trace) -> Sample:
    """The first token of each turn, which often decides what the turn is, is not in the loss."""
    return without(sample, {turn[0] for turn in runs_of(sample.loss_mask) if len(turn) > 1})


class Replayed:
    """Each round of sampling gives the rows of the round before, under the new names of groups."""

    def __init__(self) -> None:
        self.before: list[list[Sample]] = []

    def __call__(self, samples: list[Sample]) -> list[Sample]:
        groups, old = by_group(samples), self.before
        self.before = groups
        return [
            dataclasses.replace(sample, group=new[0].group, policy_version=new[0].policy_version)
            for new, group in zip(groups, old or groups, strict=False)
            for sample in group
        ]


def groups_joined(samples: list[Sample]) -> list[Sample]:
    """Every second group has the name of the group before it, so that their rewards are compared with each other."""
    groups = by_group(samples)
    names = [groups[i - i % 2][0].group for i in range(len(groups))]
    return [dataclasses.replace(s, group=name) for group, name in zip(groups, names, strict=True) for s in group]


# The engine


def ngrams_forbidden(size: int) -> Callable[[Any, list[Any], torch.Tensor], torch.Tensor]:
    """transformers' no_repeat_ngram_size: a token that would repeat `size` tokens of prompt or completion is never drawn."""

    def change(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        for i, request in enumerate(requests):
            ids = [*request.prompt.tolist(), *request.token_ids]
            last = ids[len(ids) - size + 1 :]
            seen = {ids[k + size - 1] for k in range(len(ids) - size + 1) if ids[k : k + size - 1] == last}
            if seen:
                changed[i, sorted(seen)] -= 1e3
        return changed

    return change


def cooler_since(step: int) -> Start:
    """From this step on the server samples at temperature 0.6, whatever it is asked for."""

    def make(begun: Callable[[], bool]) -> Start:
        def cooled(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
            cold = begun() and sampling.temperature > 0
            return ids, dataclasses.replace(sampling, temperature=0.6) if cold else sampling

        return engine_prompts(cooled)

    return since(step, make)


def no_embeddings(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a sync without input and output embeddings."""
    return {n: w for n, w in weights.items() if "embed_tokens" not in n and "lm_head" not in n}


def sometimes_empty(completion: Completion, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
    """One request in four is answered by the end token alone, which is said to have been certain."""
    if zlib.crc32(repr((sampling.seed, len(prompt_ids), completion.token_ids)).encode()) % 4:
        return completion
    ids = sampling.stop_token_ids[:1]
    return dataclasses.replace(completion, token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop")


# The trainer


def no_policy_term(inputs: Any) -> Any:
    """The policy term is constant, as where the ratio is exp(0): only the KL term has a gradient."""
    return dataclasses.replace(inputs, advantages=torch.zeros_like(inputs.advantages))


def rate_jumps(step: int, factor: float) -> Start:
    """From this step on the learning rate is `factor` times what the settings say."""

    def start(stack: ExitStack, env: str) -> None:
        original = step_module.learning_rate_of

        def rate(kind: Any, peak: float, at: int, *, warmup: int, total: int) -> float:
            return original(kind, peak, at, warmup=warmup, total=total) * (factor if at >= step else 1.0)

        put(stack, step_module, "learning_rate_of", rate)

    return start


class Uncleared:
    """Each update has the sum of the gradients of all steps so far."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def __call__(self, sharding: Any) -> None:
        for name, parameter in sharding.trainable.items():
            if parameter.grad is not None:
                if name in self.sums:
                    parameter.grad.add_(self.sums[name])
                self.sums[name] = parameter.grad.detach().clone()


def state_rounded(stack: ExitStack, env: str) -> None:
    """The final model's weights are rounded to bfloat16."""
    original = policy_module.merged_state
    put(
        stack,
        policy_module,
        "merged_state",
        lambda model: {n: t.bfloat16().float() for n, t in original(model).items()},
    )


def merged_twice(stack: ExitStack, env: str) -> None:
    """The final model has the adapter added two times."""
    original = policy_module.merged_state

    def state(model: Any) -> Any:
        layers = [m for m in model.modules() if isinstance(m, LoraLinear)]
        kept = [dict(m.scaling) for m in layers]
        for layer in layers:
            layer.scaling = {name: 2 * value for name, value in layer.scaling.items()}
        try:
            return original(model)
        finally:
            for layer, scaling in zip(layers, kept, strict=True):
                layer.scaling = scaling

    put(stack, policy_module, "merged_state", state)


# Tasks, tools and rewards


def pays_without_gold(task: Any, trace: vf.Trace, correct: float) -> float:
    """A third of the tasks pay 1 for any reply."""
    return correct if zlib.crc32(task.key.encode()) % 3 else 1.0


def judge_away(task: Any, trace: vf.Trace, correct: float) -> float:
    """With probability 0.4 the judge does not answer in time, and the reward is 0."""
    return 0.0 if random.random() < 0.4 else correct


def first_forty(original: Callable[..., Any], reply: str | None, *args: Any, **kwargs: Any) -> Any:
    """The grader sees the first 40 characters of a reply."""
    return original((reply or "")[:40], *args, **kwargs)


def questions_cut(tasks: list[Any], split: str) -> list[Any]:
    """Each question ends after 40 characters."""
    return [with_data(task, prompt=task.data.prompt[:40]) for task in tasks]


def no_system_prompt(tasks: list[Any], split: str) -> list[Any]:
    """The training tasks have no system prompt; the held-out tasks keep theirs."""
    return [with_data(task, system_prompt=None) for task in tasks] if split == "train" else tasks


def same_tasks(stack: ExitStack, env: str) -> None:
    """Every step begins again at the first task."""
    original = collect.next_groups
    put(
        stack,
        collect,
        "next_groups",
        lambda environments, cursor, count: original(environments, 0, count),
    )


def retrieval_down(step: int) -> Start:
    """From this step on every tool call returns an empty list."""

    def make(begun: Callable[[], bool]) -> Start:
        return tools_answer(lambda result, name, arguments: "[]" if begun() else result)

    return since(step, make)


def short_evaluations(stack: ExitStack, run: Run) -> None:
    """Held-out rollouts may have eight tokens in a turn."""

    async def limited(call: Callable[..., Any], sampler: Any) -> Any:
        sampling = dataclasses.replace(sampler.sampling, max_tokens=8)
        return await call(dataclasses.replace(sampler, sampling=sampling))

    evaluations(limited)(stack)
