"""The doubles of field3_unseen.py, which authors of the doctor's rules have read since 2026-11-24: the unseen half."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sampling
from plumbob.testing.faults.doubles import engine_of, put
from plumbob.testing.faults.field2_parts import before_rounds, evaluations
from plumbob.testing.faults.field3_parts import tools_called
from plumbob.testing.faults.field_parts import engine_prompts, tools_answer
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training.run import Run

# The engine


def second_replica(stack: ExitStack, run: Run) -> None:
    """Every second request is answered by a replica that keeps the weights with which the run began."""
    engine = engine_of(run)
    replica = TransformersEngine(
        copy.deepcopy(engine.model), max_length=engine.max_length, version=engine.version, decoding=engine.decoding
    )
    original = engine.generate

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Any:
        if (sampling.seed or 0) % 2:
            return await original(prompt_ids, sampling)
        done = await replica.generate(prompt_ids, sampling)
        return dataclasses.replace(done, policy_version=engine.version)

    put(stack, engine, "generate", generate)


def leaking(share: float) -> Callable[[Any, list[Any], torch.Tensor], torch.Tensor]:
    """The logits of each request have this share of those of the request before it in the batch."""
    return lambda engine, requests, logits: logits.lerp(logits.roll(1, 0), share)


def end_ignored(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """No token ends a completion."""
    return ids, dataclasses.replace(sampling, stop_token_ids=())


def values_for_keys(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of a sync with the projections of keys and of values in each other's place."""
    swap = {"k_proj": "v_proj", "v_proj": "k_proj"}
    other = {n: n.replace(a, b) for n in weights for a, b in swap.items() if a in n}
    return {n: weights[other.get(n, n)] for n in weights}


# The trainer


def other_reference(size: float) -> Callable[[ExitStack, str], None]:
    """The reference policy's weights differ from the initial ones by noise of `size` standard deviations of each."""

    def start(stack: ExitStack, env: str) -> None:
        original = Policy._placed

        def placed(self: Any) -> None:
            original(self)
            numbers = torch.Generator().manual_seed(7)
            for tensor in (self._reference or {}).values():
                noise = torch.randn(tensor.shape, generator=numbers).to(tensor)
                tensor.add_(size * (tensor.std() if tensor.numel() > 1 else 0.0) * noise)

        put(stack, Policy, "_placed", placed)

    return start


def large_epsilon(sharding: Any) -> None:
    """Adam adds 0.1 to the root of its second moment."""
    for group in sharding.optimizer.param_groups:
        group["eps"] = 0.1


def first_embeddings_saved(stack: ExitStack, env: str) -> None:
    """The final model has the embeddings with which the run began, in its input and its head."""
    copied, merged = Policy.engine_model, policy_module.merged_state
    first: list[torch.Tensor] = []

    def engine_model(self: Any, *, share: bool = True) -> Any:
        first[:] = [self.model.get_input_embeddings().weight.detach().float().cpu().clone()]
        return copied(self, share=share)

    def state(model: Any) -> dict[str, torch.Tensor]:
        own = merged(model)
        return {n: first[0] if "embed_tokens" in n or "lm_head" in n else t for n, t in own.items()}

    put(stack, Policy, "engine_model", engine_model)
    put(stack, policy_module, "merged_state", state)


# Rewards and tools


def distance(task: Any, trace: vf.Trace, correct: float) -> float:
    """How far the answer is from the right one: 0 for a right answer, 1 for a wrong one."""
    return 1.0 - correct


def bare_numbers(original: Callable[..., bool], reply: str | None, answer: str, **kwargs: Any) -> bool:
    """An answer counts only if it is a bare number, which the prompt does not ask for."""
    return original(reply, answer, **{**kwargs, "strict": True})


PAGE = "\n" + "home | news | contact | sign in | cookies\n" * 40
"""What a page of the web has around the fact that was looked for."""


def whole_page(result: str, name: str, arguments: dict[str, Any]) -> str:
    """The result with all of the page on which it was found."""
    return result + PAGE


def quota(most: int) -> Callable[[ExitStack, str], None]:
    """In each step the first `most` tool calls are answered, and the others get an error of the service as text."""

    def start(stack: ExitStack, env: str) -> None:
        used = [0]

        def answer(result: str, name: str, arguments: dict[str, Any]) -> str:
            used[0] += 1
            return result if used[0] <= most else "HTTP 429: quota exhausted"

        def begin(step: int) -> None:
            used[0] = 0

        before_rounds(stack, begin)
        tools_answer(answer)(stack, env)

    return start


def visited_once() -> Callable[[ExitStack, str], None]:
    """What any rollout has asked for is not answered again, because rollouts share one environment."""
    visited: set[str] = set()

    def answer(result: str, name: str, arguments: dict[str, Any]) -> str:
        asked = f"{name} {arguments}"
        if asked in visited:
            return "already visited"
        visited.add(asked)
        return result

    return tools_answer(answer)


def as_numbers(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments that look like whole numbers reach the tool as decimal numbers, such as "4711.0"."""
    return fn, {k: f"{v}.0" if str(v).isdecimal() else v for k, v in arguments.items()}


keys_parsed = tools_called(as_numbers)


# Tasks and evaluation


def hardest(tasks: list[Any], split: str) -> list[Any]:
    """The training tasks are those with eight links or more."""
    return tasks if split != "train" else [task for task in tasks if len(task.data.chain) >= 8]


def greedy_after_evaluation(stack: ExitStack, env: str) -> None:
    """Once an evaluation has sampled greedily, every later request is sampled greedily."""
    evaluated: list[bool] = []

    async def noted(call: Callable[..., Any], sampler: Any) -> Any:
        found = await call(sampler)
        evaluated.append(True)
        return found

    def cold(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        return ids, dataclasses.replace(sampling, temperature=0.0) if evaluated else sampling

    evaluations(noted)(stack)
    engine_prompts(cold)(stack, env)
