"""Places where faults of the field are injected before a run is set up."""

from __future__ import annotations

import dataclasses
import sys
import typing
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.hub import find
from plumbob.rollout import Chat, Sample, Sampling, to_sample
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.rewards import replace_rewards
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import loading
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import setup

MEASURING = 1 << 20
"""`max_length` of the engine with which set-up measures how the model can be decoded."""


def sampling_now(stack: ExitStack) -> Callable[[], bool]:
    """Whether the engine's present forward pass is one of rollouts, and not of set-up, which measures the model."""
    forward, sampling = TransformersEngine._forward, [False]

    def _forward(self: Any, *args: Any) -> Any:
        sampling[0] = self.max_length != MEASURING
        return forward(self, *args)

    put(stack, TransformersEngine, "_forward", _forward)
    return lambda: sampling[0]


def taskset_class(env: str) -> type[Any]:
    """The taskset of an installed environment."""
    return find(env).load()


def task_class(env: str) -> type[vf.Task]:
    """The class of an environment's tasks."""
    (base,) = (b for b in taskset_class(env).__orig_bases__ if typing.get_args(b))
    return typing.get_args(base)[0]


def toolset_class(env: str) -> type[Any]:
    """The class of an environment's tools."""
    name = {"lookup": "LookupToolset", "musique": "MusiqueToolset"}[env]
    package = task_class(env).__module__.partition(".")[0]
    return getattr(sys.modules[f"{package}.tools"], name)


def lot(text: str, parts: int) -> int:
    """A number from 0 to `parts` - 1 that depends on the text alone."""
    return zlib.crc32(text.encode()) % parts


def all_of(*starts: Start) -> Start:
    """All of these injections."""

    def start(stack: ExitStack, env: str) -> None:
        for one in starts:
            one(stack, env)

    return start


# The environment


def tasks_changed(change: Callable[[list[Any], str], list[Any]]) -> Start:
    """The environment's tasks are `change(its own tasks, split)`. The split of training tasks is "train"."""

    def start(stack: ExitStack, env: str) -> None:
        cls = taskset_class(env)
        original = cls.load
        put(stack, cls, "load", lambda self: iter(change(list(original(self)), self.config.split)))

    return start


def with_data(task: Any, **values: Any) -> Any:
    """A copy of the task with other values of these fields of its data."""
    return type(task)(task.data.model_copy(update=values), task.config)


def graded(weight: float = 1.0, **rewards: Callable[[Any, vf.Trace, float], float]) -> Start:
    """Replace or add rewards: see `plumbob.testing.faults.rewards.rewarded`."""
    return lambda stack, env: replace_rewards(stack, task_class(env), weight, rewards)


def tools_answer(change: Callable[[str, str, dict[str, Any]], str]) -> Start:
    """Each tool's result, as the model sees it, is `change(the tool's own result, name of the tool, arguments)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = adapter.BoundTool.call

        async def call(self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
            return change(await original(self, arguments, caller), self.spec.declared.name, arguments)

        put(stack, adapter.BoundTool, "call", call)

    return start


# Rollouts


def rows_changed(change: Callable[[Sample, vf.Trace], Sample]) -> Start:
    """Every row is changed between rollout and training."""
    return lambda stack, env: put(
        stack, collect, "to_sample", lambda trace, group: change(to_sample(trace, group), trace)
    )


def batches_changed(change: Callable[[list[Sample]], list[Sample]]) -> Start:
    """The samples of each round of sampling, whole groups in order, are changed after they were scored."""

    def start(stack: ExitStack, env: str) -> None:
        original = collect._add_round

        async def add_round(
            sampler: Any, world: Any, step: int, first_group: int, taken: Any, batch: collect.Batch
        ) -> None:
            old = len(batch.drawn)
            await original(sampler, world, step, first_group, taken, batch)
            batch.drawn[old:] = change(batch.drawn[old:])

        put(stack, collect, "_add_round", add_round)

    return start


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each group, in order."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def with_reward_of(sample: Sample, other: Sample) -> Sample:
    """The sample with the reward of another one."""
    return dataclasses.replace(sample, reward=other.reward, rewards=other.rewards, reward_weights=other.reward_weights)


# The chat template and the reader of tool calls


def decoded_as(rewrite: Callable[[str], str]) -> Start:
    """The model's tokens decode to another text: a model that writes tool calls in another form."""

    def start(stack: ExitStack, env: str) -> None:
        original = loading.load_tokenizer

        def load_tokenizer(*args: Any, **kwargs: Any) -> Any:
            tokenizer = original(*args, **kwargs)
            cls = type(tokenizer)

            def decode(self: Any, token_ids: Any, *more: Any, **how: Any) -> Any:
                text = cls.decode(self, token_ids, *more, **how)
                return rewrite(text) if isinstance(text, str) else [rewrite(one) for one in text]

            tokenizer.__class__ = type(cls.__name__, (cls,), {"decode": decode})
            return tokenizer

        put(stack, loading, "load_tokenizer", load_tokenizer)
        put(stack, setup, "load_tokenizer", load_tokenizer)

    return start


def chat_method(name: str, change: Callable[..., Any]) -> Start:
    """The method `name` of every chat is `change(original, self, *its arguments)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = getattr(Chat, name)
        put(stack, Chat, name, lambda self, *args, **kwargs: change(original, self, *args, **kwargs))

    return start


# The engine


def engine_model(change: Callable[[Any], None]) -> Start:
    """The engine's copy of the model is changed by `change` before anything is computed with it."""

    def start(stack: ExitStack, env: str) -> None:
        original = Policy.engine_model

        def copied(self: Policy, *, share: bool = True) -> Any:
            model = original(self, share=False)
            with torch.no_grad():
                change(model)
            return model

        put(stack, Policy, "engine_model", copied)

    return start


def engine_prompts(change: Callable[[list[int], Sampling], tuple[list[int], Sampling]]) -> Start:
    """The engine samples with the prompt and settings that `change(prompt ids, settings)` returns."""

    def start(stack: ExitStack, env: str) -> None:
        original = TransformersEngine.generate

        async def generate(self: Any, prompt_ids: Sequence[int], sampling: Sampling) -> Any:
            return await original(self, *change(list(prompt_ids), sampling))

        put(stack, TransformersEngine, "generate", generate)

    return start


def engine_logits(change: Callable[[Any, list[Any], torch.Tensor], torch.Tensor], *, raw: bool = False) -> Start:
    """The engine draws from `change(engine, requests, logits [B, V])`.

    `raw`: it reports the log-probabilities of the unchanged logits, as vLLM does by default.
    """

    def start(stack: ExitStack, env: str) -> None:
        draw_all, draw = TransformersEngine._draw, transformers_engine.draw
        differences: list[torch.Tensor] = []

        def _draw(self: Any, requests: list[Any], logits: torch.Tensor) -> None:
            # The engine that `choose_decoding` makes to measure the model is not the one that samples rollouts.
            changed = logits if self.max_length == MEASURING else change(self, requests, logits)
            differences[:] = [logits - changed]
            draw_all(self, requests, changed)

        def drawn(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, logprobs = draw(logits, *rest)
            if raw:
                own = torch.log_softmax(logits + differences[0], dim=-1)
                logprobs = own.gather(-1, tokens[:, None])[:, 0]
            return tokens, logprobs

        put(stack, TransformersEngine, "_draw", _draw)
        put(stack, transformers_engine, "draw", drawn)

    return start


def engine_updates(change: Callable[[Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Start:
    """Each weight sync loads `change(engine, weights)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = InProcessEngine.update

        def update(self: Any, weights: Any, **how: Any) -> Any:
            return original(self, change(self, dict(weights.items())), **how)

        put(stack, InProcessEngine, "update", update)

    return start


# The trainer


def policy_scores(score: Callable[[Callable[..., TokenScores], Sequence[Sample], float], TokenScores]) -> Start:
    """Every policy scores rows by `score(original, rows, temperature)`."""

    def start(stack: ExitStack, env: str) -> None:
        original = Policy.score
        put(
            stack,
            Policy,
            "score",
            lambda self, rows, temperature: score(lambda r, t: original(self, r, t), rows, temperature),
        )

    return start
