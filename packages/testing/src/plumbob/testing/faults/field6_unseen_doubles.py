"""The doubles of field6_unseen.py. Like that file, unseen: rule writers must not read it."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Completion, Sample, Sampling, derive_seed
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import without
from plumbob.testing.faults.field_parts import engine_logits, tasks_changed, with_data
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training.run import Run

# Rewards and tasks


def clipped_low(task: Any, trace: vf.Trace, reward: float) -> float:
    """The reward clipped at a fifth, which a search that finds something earns already."""
    return min(reward, 0.2)


def nearly_right(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 for a number that is at most a tenth away from the gold."""
    module = sys.modules[type(task).__module__]
    found, gold = module.find_answer(trace.last_reply, strict=task.data.strict), module.gold_value(task.data.answer)
    return float(found is not None and abs(found[1] - gold) * 10 <= abs(gold))


def own_start_for_each(stack: ExitStack, env: str) -> None:
    """Each rollout of a group begins the task with a seed of its own, and so with another start, under the same name."""
    every: dict[str, list[Any]] = {}

    def kept(tasks: list[Any], split: str) -> list[Any]:
        return every.setdefault(split, tasks)

    tasks_changed(kept)(stack, env)
    original = collect.run_group

    async def run_group(
        task: Any, engine: Any, chat: Any, sampling: Sampling, limits: Any, size: int, **how: Any
    ) -> list[vf.Trace]:
        tasks = every["train"]
        place = next((i for i, one in enumerate(tasks) if one.data.id == task.data.id), 0)
        groups = await asyncio.gather(
            *(
                original(
                    with_data(tasks[(place + 101 * i) % len(tasks)], id=task.data.id),
                    engine,
                    chat,
                    dataclasses.replace(sampling, seed=derive_seed(sampling.seed or 0, i)),
                    limits,
                    1,
                    **how,
                )
                for i in range(size)
            )
        )
        return [trace for (trace,) in groups]

    put(stack, collect, "run_group", run_group)


def held_out_golds_moved(tasks: list[Any], split: str) -> list[Any]:
    """Each held-out question has the gold of the next one, because only the questions were shuffled."""
    if split == "train":
        return tasks
    answers = [task.data.answer for task in tasks]
    return [with_data(task, answer=gold) for task, gold in zip(tasks, [*answers[1:], answers[0]], strict=True)]


def toolless_when_held_out(tasks: list[Any], split: str) -> list[Any]:
    """Held-out tasks have no tools: only the agent loop of training is given any."""
    if split == "train":
        return tasks
    cls: Any = type(tasks[0])
    members = {"toolsets": classmethod(lambda cls, config: []), "__module__": cls.__module__}
    bare: Any = type("Toolless", (cls,), members)
    return [bare(task.data, task.config) for task in tasks]


# Prompts and replies


def closing_tag_swallowed(stack: ExitStack, run: Run) -> None:
    """The server stops at the closing tag of the answer, which is not part of what it returns."""
    original, tokenizer = run.engine.generate, run.tokenizer

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        done = await original(prompt_ids, sampling)
        if "</answer>" not in tokenizer.decode(list(done.token_ids)):
            return done
        kept = list(done.token_ids)
        while "</" in tokenizer.decode(kept).rpartition("<answer>")[2]:
            kept.pop()
        ids, logprobs = (*kept, sampling.stop_token_ids[0]), (*done.logprobs[: len(kept)], 0.0)
        return dataclasses.replace(done, token_ids=ids, logprobs=logprobs, finish_reason="stop")

    put(stack, run.engine, "generate", generate)


def working_masked(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """Only the last line of the reply is in the loss."""
    (mark,) = run.tokenizer.encode("####", add_special_tokens=False)
    marks = [
        i for i, (token, m) in enumerate(zip(sample.token_ids, sample.loss_mask, strict=True)) if m and token == mark
    ]
    return without(sample, {i for i, m in enumerate(sample.loss_mask) if m and marks and i < marks[-1]})


# Tools


def call_forced(stack: ExitStack, run: Run) -> None:
    """The first token of each turn is that of a tool call, as with a tool choice of "required"."""
    call = run.tokenizer.convert_tokens_to_ids("<tool_call>")

    def forced(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
        first = torch.tensor([not request.token_ids for request in requests], device=logits.device)
        forbidden = torch.ones_like(logits, dtype=torch.bool)
        forbidden[:, call] = False
        return logits.masked_fill(forbidden & first[:, None], float("-inf"))

    engine_logits(forced)(stack, "")


def value_shown(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Each result also has the value at which the chain ends, as a repository has the later commit that mends it."""
    tools = fn.__self__
    return lambda **given: f"{fn(**given)} {tools.table[tools.chain[-1]]}", arguments


# The engine


def best_of_two(stack: ExitStack, env: str) -> None:
    """The server samples two replies, and returns the one with the higher log-probability."""
    original = TransformersEngine.generate

    async def generate(self: Any, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        if not sampling.temperature:
            return await original(self, prompt_ids, sampling)
        seeds = (sampling.seed, None if sampling.seed is None else derive_seed(sampling.seed, 1))
        both = [dataclasses.replace(sampling, seed=seed) for seed in seeds]
        replies = await asyncio.gather(*(original(self, prompt_ids, one) for one in both))
        return max(replies, key=lambda reply: sum(reply.logprobs))

    put(stack, TransformersEngine, "generate", generate)


def another_base(model: Any) -> None:
    """The engine makes rotary frequencies of a base of a million, in place of ten thousand."""
    rotary = model.get_decoder().rotary_emb
    size = 2 * len(rotary.inv_freq)
    rotary.inv_freq.copy_(1e6 ** (-torch.arange(0, size, 2, device=rotary.inv_freq.device) / size))


def attention_adapters_only(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The engine has places for the adapters of attention, and skips those of feed-forward layers."""
    return {name: w for name, w in weights.items() if ".mlp." not in name}


# Training and its end


def groups_of_one(stack: ExitStack, env: str) -> None:
    """Each rollout has a group id of its own, and a group of one keeps its raw reward as its advantage."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        found = original(samples, *args, **kwargs)
        names = frozenset(sample.group for sample in samples if sample.reward)
        return dataclasses.replace(found, values=[sample.reward for sample in samples], with_signal=names)

    put(stack, advantages, "compute_advantages", computed)


def first_layers_cut(stack: ExitStack, env: str) -> None:
    """The inputs of the last layer have no gradient, as checkpoints have none whose inputs do not ask for one."""
    original, cut = Policy.score, weakref.WeakSet[Any]()

    def without_gradient(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if "hidden_states" in named:
            named = {**named, "hidden_states": named["hidden_states"].detach()}
        return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in given), named

    def score(self: Policy, rows: Sequence[Sample], temperature: float) -> TokenScores:
        last: Any = self.model.get_decoder().layers[-1]
        if last not in cut:  # the hook stays, because checkpoints compute the layer again in the backward pass
            cut.add(last)
            stack.callback(last.register_forward_pre_hook(without_gradient, with_kwargs=True).remove)
        return original(self, rows, temperature)

    put(stack, Policy, "score", score)


def updated_twice(stack: ExitStack, env: str) -> None:
    """The wrapper's backward pass takes an optimizer step, and the training loop takes another with the same gradient."""
    original = Replicated.update

    def update(self: Replicated) -> float:
        norm = original(self)
        self.optimizer.step()
        return norm

    put(stack, Replicated, "update", update)


def last_layer_new(stack: ExitStack, env: str) -> None:
    """The final model's file lacks the last layer, so that who loads it gets newly initialised weights there."""
    original = policy_module.merged_state

    def state(model: Any) -> dict[str, torch.Tensor]:
        last = f".layers.{len(model.get_decoder().layers) - 1}."
        numbers = torch.Generator().manual_seed(0)

        def new(tensor: torch.Tensor) -> torch.Tensor:
            random = torch.randn(tensor.shape, generator=numbers) * 0.02
            return random if tensor.dim() > 1 else torch.ones_like(tensor)

        return {name: new(tensor) if last in name else tensor for name, tensor in original(model).items()}

    put(stack, policy_module, "merged_state", state)
