"""Places in a run that a fault changes, from the environment's tasks to the saved model.

`site.install(stack, env, change)` lets `change` decide what comes out of this place until the stack is closed; each
site's docstring says what `change` gets. Nearly all give it what is right as first argument, and use what it returns.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import verifiers.v1 as vf
from plumbob.hub import find
from plumbob.rollout import Chat, Completion, Sample, Sampling, runner
from plumbob.rollout import derive_seed as derived_seed
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm import losses as losses_module
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.inference import weight_sync
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.inference.transformers import engine as engine_module
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.transformers.kv_cache import SlotCache
from plumbob.trainer.policy import loading, lora
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.rollouts import collect, groups
from plumbob.trainer.rollouts import tasks as task_lists
from plumbob.trainer.training import forward_backward, minibatches, setup, train
from plumbob.trainer.training import step as step_module

Install = Callable[[ExitStack, str, Any], None]
MEASURING = 1 << 20
"""`max_length` of the engine with which set-up measures how the model can be decoded: no rollout is sampled by it."""


@dataclass(frozen=True)
class Site:
    """One place of a run."""

    name: str
    install: Install
    """`install(stack, env, change)`; the environment's name decides which classes are changed."""
    original_first: bool = False
    """Whether `change` gets the function that it replaces as first argument, followed by this function's arguments, and
    not its result."""


def site(install: Install) -> Site:
    """The site whose `change` gets a result."""
    return Site(install.__name__, install)


def around(install: Install) -> Site:
    """The site whose `change` gets a function and its arguments."""
    return Site(install.__name__, install, original_first=True)


def put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of `owner` until the stack is closed."""
    stack.enter_context(mock.patch.object(owner, name, value, create=not hasattr(owner, name)))


def everywhere(stack: ExitStack, original: Any, value: Any) -> None:
    """Replace a function in its own module and in all modules that have imported it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(original.__name__) is original:
            put(stack, module, original.__name__, value)


def wrapped(stack: ExitStack, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """`owner.name(...)` is `change(the original function, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    put(stack, owner, name, function)


def function(owner: Any, name: str) -> Site:
    """The site whose `change` gets the function `owner.name` and its arguments."""
    return Site(name, lambda stack, env, change: wrapped(stack, owner, name, change), original_first=True)


def anew(place: Site) -> Site:
    """The site whose change is made by the row's function, so that each run has one with a state of its own."""
    return Site(place.name, lambda stack, env, make: place.install(stack, env, make()), place.original_first)


def since(step: int, place: Site) -> Site:
    """The site whose change begins with this training step, counted from 0."""

    def install(stack: ExitStack, env: str, change: Any) -> None:
        now = [0]

        def late(first: Any, *args: Any, **kwargs: Any) -> Any:
            if now[0] >= step:
                return change(first, *args, **kwargs)
            return first(*args, **kwargs) if place.original_first else first

        step_begins.install(stack, env, lambda number: now.__setitem__(0, number))
        place.install(stack, env, late)

    return Site(f"{place.name} since step {step}", install, place.original_first)


def nothing(stack: ExitStack, env: str, change: None) -> None:
    """No place: the options are the fault."""


options = Site("options", nothing)


# Environments


def taskset_class(env: str) -> type[Any]:
    """The taskset of an installed environment."""
    return find(env).load()


def task_class(env: str) -> type[Any]:
    """The class of an environment's tasks."""
    (base,) = (b for b in taskset_class(env).__orig_bases__ if typing.get_args(b))
    return typing.get_args(base)[0]


def toolset_class(env: str) -> type[Any]:
    """The class of an environment's tools."""
    name = {"lookup": "LookupToolset", "musique": "MusiqueToolset"}[env]
    return getattr(sys.modules[f"{task_class(env).__module__.partition('.')[0]}.tools"], name)


def reward_name(cls: type[Any]) -> str:
    """Name of the one reward of a bundled environment's task class."""
    (name,) = (name for name in ("correct", "musique_reward") if hasattr(cls, name))
    return name


def lot(text: Any, parts: int) -> int:
    """A number from 0 to `parts` - 1 that depends on the text alone."""
    return zlib.crc32(str(text).encode()) % parts


@site
def step_begins(stack: ExitStack, env: str, change: Any) -> None:
    """`change(number of the training step from 0)` is called before each round of sampling."""

    async def add_round(original: Any, sampler: Any, world: Any, step: int, *rest: Any, **how: Any) -> None:
        change(step)
        await original(sampler, world, step, *rest, **how)

    wrapped(stack, collect, "_add_round", add_round)


@site
def tasks(stack: ExitStack, env: str, change: Any) -> None:
    """The environment's tasks of one split are `change(tasks, split)`. The split of training tasks is "train"."""
    wrapped(
        stack,
        taskset_class(env),
        "load",
        lambda original, self: iter(change(list(original(self)), self.config.split)),
    )


@site
def divided(stack: ExitStack, env: str, change: Any) -> None:
    """A run's tasks are `change(Tasks)`: `train` and `held_out`."""
    wrapped(stack, task_lists, "load_tasks", lambda original, config: change(original(config)))


tasks_of_step = function(collect, "next_groups")
"""The tasks of a step's groups are `change(original, environments, cursor, count)`."""


@site
def reward(stack: ExitStack, env: str, change: Any) -> None:
    """A rollout's reward is `change(the environment's own, task, trace)`, or what this returns if it is awaited."""
    name = reward_name(task_class(env))
    _component(stack, env, name, change)


def component(name: str) -> Site:
    """A further component `name` of the reward is `change(the environment's own reward, task, trace)`."""
    return Site(name, lambda stack, env, change: _component(stack, env, name, change))


def _component(stack: ExitStack, env: str, name: str, change: Any) -> None:
    cls: Any = task_class(env)
    original = getattr(cls, reward_name(cls))

    async def score(self: Any, trace: vf.Trace) -> float:
        value = change(await original(self, trace), self, trace)
        return await value if inspect.isawaitable(value) else value

    score.__name__ = name
    put(stack, cls, name, vf.reward(weight=1.0)(score))


@around
def grader(stack: ExitStack, env: str, change: Any) -> None:
    """A reply of GSM8K is right if `change(is_correct, reply, answer, **settings)`."""
    wrapped(stack, sys.modules[task_class(env).__module__], "is_correct", change)


@site
def ended(stack: ExitStack, env: str, change: Any) -> None:
    """An episode also ends after a turn if `change(task, trace)`."""

    async def ended_early(self: Any, trace: vf.Trace) -> bool:
        return change(self, trace)

    put(stack, task_class(env), "ended_early", vf.stop(ended_early))


@site
def tool_result(stack: ExitStack, env: str, change: Any) -> None:
    """Each tool result, as the model sees it, is `change(the tool's own, its name, arguments, the rollout's tools)`."""

    async def call(original: Any, self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        result = await original(self, arguments, caller)
        return change(result, self.spec.declared.name, arguments, self.fn.__self__)

    wrapped(stack, adapter.BoundTool, "call", call)


@site
def tool_call(stack: ExitStack, env: str, change: Any) -> None:
    """Each call runs (function, arguments) = `change((function, arguments), name)`, under the limits of a tool call."""
    specs: dict[int, Any] = {}

    def forget() -> None:
        for spec in specs.values():  # what is known of a tool's calls, which other runs of this process share
            spec.calls = type(spec.calls)()

    stack.callback(forget)

    async def call(original: Any, self: Any, arguments: dict[str, Any], caller: Any = None) -> str:
        specs[id(self.spec)] = self.spec
        fn, changed = change((self.fn, arguments), self.spec.declared.name)
        return await original(dataclasses.replace(self, fn=fn), changed, caller)

    wrapped(stack, adapter.BoundTool, "call", call)


@around
def tool_setup(stack: ExitStack, env: str, change: Any) -> None:
    """A rollout's tools are set up by `await change(original, toolset, the task's data)`."""
    wrapped(stack, toolset_class(env), "setup_task", change)


evaluation = function(train, "evaluate")
"""An evaluation on held-out tasks is `await change(original, sampler, *rest, **settings)`."""
# Prompts, replies and rows


def chat(name: str) -> Site:
    """The method `prompt`, `suffix` or `parse` of every chat is `change(original, chat, *its arguments)`."""
    return function(Chat, name)


@site
def decoded(stack: ExitStack, env: str, change: Any) -> None:
    """The model's tokens decode to `change(text)`: a model that writes in another form."""

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        tokenizer = original(*args, **kwargs)
        cls = type(tokenizer)

        def decode(self: Any, ids: Any, *more: Any, **how: Any) -> Any:
            text = cls.decode(self, ids, *more, **how)
            return change(text) if isinstance(text, str) else [change(one) for one in text]

        tokenizer.__class__ = type(cls.__name__, (cls,), {"decode": decode})
        return tokenizer

    for module in (setup, loading):
        wrapped(stack, module, "load_tokenizer", load)


def _tokenizer(stack: ExitStack) -> Callable[[], Any]:
    """What the run's tokenizer is, once it has been loaded."""
    held: list[Any] = []

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        held.append(original(*args, **kwargs))
        return held[-1]

    for module in (setup, loading):
        wrapped(stack, module, "load_tokenizer", load)
    return lambda: held[-1]


@site
def row(stack: ExitStack, env: str, change: Any) -> None:
    """Every row is `change(row, trace)` between rollout and training."""
    wrapped(stack, groups, "to_sample", lambda original, trace, group: change(original(trace, group), trace))


@site
def row_text(stack: ExitStack, env: str, change: Any) -> None:
    """Every row is `change(row, tokenizer)` between rollout and training."""
    tokenizer = _tokenizer(stack)
    wrapped(stack, groups, "to_sample", lambda original, trace, group: change(original(trace, group), tokenizer()))


@site
def batch(stack: ExitStack, env: str, change: Any) -> None:
    """The rows of each round of sampling, whole groups in order, are `change(rows)` after they were scored."""

    async def add_round(original: Any, *args: Any, **how: Any) -> None:
        held = next(one for one in args if isinstance(one, collect.Batch))
        old = len(held.drawn)
        await original(*args, **how)
        held.drawn[old:] = change(held.drawn[old:])

    wrapped(stack, collect, "_add_round", add_round)


@site
def failed(stack: ExitStack, env: str, change: Any) -> None:
    """A rollout fails with the error `change(trace)`, unless that is None."""

    def unusable(original: Any, trace: vf.Trace, limits: Any) -> Any:
        error = change(trace)
        return original(trace, limits) if error is None else groups.Unusable("errored", error)

    wrapped(stack, groups, "_unusable", unusable)


# The engine


def _sampling(stack: ExitStack) -> Callable[[], bool]:
    """Whether the engine's present forward pass is one of rollouts, and not one of set-up."""
    now = [False]

    def forward(original: Any, self: Any, *args: Any) -> Any:
        now[0] = self.max_length != MEASURING
        return original(self, *args)

    wrapped(stack, TransformersEngine, "_forward", forward)
    return lambda: now[0]


@site
def seed(stack: ExitStack, env: str, change: Any) -> None:
    """The rollout with this number in its group is sampled with the seed of number `change(number)`."""
    put(stack, runner, "derive_seed", lambda group, number: derived_seed(group, change(number)))


reply = function(TransformersEngine, "generate")
"""A completion is `await change(original, engine, prompt ids, sampling)`."""


@site
def request(stack: ExitStack, env: str, change: Any) -> None:
    """The engine samples after `change(prompt ids, sampling)`."""
    reply.install(stack, env, lambda original, self, ids, how: original(self, change(list(ids), how), how))


@site
def request_text(stack: ExitStack, env: str, change: Any) -> None:
    """The engine samples after `change(prompt ids, tokenizer)`."""
    tokenizer = _tokenizer(stack)
    request.install(stack, env, lambda ids, how: change(ids, tokenizer()))


@site
def sampling(stack: ExitStack, env: str, change: Any) -> None:
    """The engine samples with `change(sampling)`."""
    reply.install(stack, env, lambda original, self, ids, how: original(self, ids, change(how)))


@site
def completion(stack: ExitStack, env: str, change: Any) -> None:
    """A completion is `change(completion, prompt ids, sampling)`."""

    async def generate(original: Any, self: Any, ids: Sequence[int], how: Sampling) -> Completion:
        return change(await original(self, ids, how), ids, how)

    reply.install(stack, env, generate)


@site
def logits(stack: ExitStack, env: str, change: Any) -> None:
    """The engine draws from `change(logits [B, V], requests, engine)`, and reports the log-probabilities of that.

    Of requests that have the same ids so far, which share a row of the logits, `change` gets one.
    """
    _draw(stack, change, raw=False)


@site
def silent_logits(stack: ExitStack, env: str, change: Any) -> None:
    """As `logits`, but the engine reports the log-probabilities of the unchanged logits, as vLLM does by default."""
    _draw(stack, change, raw=True)


def _draw(stack: ExitStack, change: Any, *, raw: bool) -> None:
    differences: list[torch.Tensor] = []

    def draw_all(original: Any, self: Any, rows: list[list[Any]], values: torch.Tensor) -> None:
        changed = values if self.max_length == MEASURING else change(values, [row[0] for row in rows], self)
        differences[:] = [values - changed]
        original(self, rows, changed)

    def draw(original: Any, values: torch.Tensor, *rest: Any) -> Any:
        tokens, logprobs = original(values, *rest)
        if raw:
            logprobs = torch.log_softmax(values + differences[0], dim=-1).gather(-1, tokens)
        return tokens, logprobs

    wrapped(stack, TransformersEngine, "_draw", draw_all)
    wrapped(stack, engine_module, "draw", draw)


@site
def reported(stack: ExitStack, env: str, change: Any) -> None:
    """The engine reports `change(log-probabilities [B, K], tokens [B, K], logits [B, V] after the temperature)`."""
    now = _sampling(stack)

    def draw(original: Any, values: torch.Tensor, *rest: Any) -> Any:
        tokens, logprobs = original(values, *rest)
        return tokens, change(logprobs, tokens, values) if now() else logprobs

    wrapped(stack, engine_module, "draw", draw)


@site
def engine_model(stack: ExitStack, env: str, change: Any) -> None:
    """The engine's copy of the model is changed in place by `change(model)` before anything is computed with it."""

    def copied(original: Any, self: Policy, *, share: bool = True) -> Any:
        model = original(self, share=False)
        with torch.no_grad():
            change(model)
        return model

    wrapped(stack, Policy, "engine_model", copied)


@site
def engine_mask(stack: ExitStack, env: str, change: Any) -> None:
    """The engine attends to `change(mask, positions of queries, positions of keys)`."""
    now = _sampling(stack)

    def begin(original: Any, self: Any, rows: Any, positions: torch.Tensor, kv_length: int) -> Any:
        mask = original(self, rows, positions, kv_length)
        keys = torch.arange(kv_length, device=positions.device)
        return change(mask, positions[:, None, :, None], keys) if now() else mask

    wrapped(stack, SlotCache, "begin", begin)


load = function(InProcessEngine, "update")
"""Each weight sync is `change(original, engine, weights, **how)`."""


@site
def weights(stack: ExitStack, env: str, change: Any) -> None:
    """Each weight sync loads `change(name -> tensor, engine)`."""
    load.install(
        stack,
        env,
        lambda original, self, sent, **how: original(self, change(dict(sent.items()), self), **how),
    )


# The trainer's forward pass


@site
def adapter_made(stack: ExitStack, env: str, change: Any) -> None:
    """A model with a new LoRA adapter is changed in place by `change(model)`."""

    def add(original: Any, model: Any, config: Any) -> None:
        original(model, config)
        with torch.no_grad():
            change(model)

    wrapped(stack, lora, "add_lora", add)


scores = function(Policy, "score")
"""Every policy scores rows by `change(original, policy, rows, temperature)`."""


@site
def forward(stack: ExitStack, env: str, change: Any) -> None:
    """A forward pass of the trainer is laid out as `change(batch, rows)`."""
    wrapped(stack, policy_module, "make_batch", lambda original, rows, *rest: change(original(rows, *rest), rows))


@site
def positions(stack: ExitStack, env: str, change: Any) -> None:
    """Positions of packed rows are `change(rows)`, a tensor per row."""

    def moved(laid: Any, rows: Sequence[Sample]) -> Any:
        if "position_ids" in laid.inputs:
            laid.inputs["position_ids"] = torch.cat(change(rows))[None].to(laid.ids.device)
        return laid

    forward.install(stack, env, moved)


reference_scores = function(Policy, "reference_logprobs")
"""The reference policy scores rows by `change(original, policy, rows, temperature)`."""


@site
def reference(stack: ExitStack, env: str, change: Any) -> None:
    """The reference policy's tensors are changed in place by `change(name -> tensor, policy)` when they are made."""

    def placed(original: Any, self: Policy) -> None:
        original(self)
        with torch.no_grad():
            change(self._reference or {}, self)

    wrapped(stack, Policy, "_placed", placed)


# Advantages and the loss


@around
def advantages(stack: ExitStack, env: str, change: Any) -> None:
    """A step's advantages are `change(compute, rows)`, where `compute(rows)` follows the settings."""
    wrapped(
        stack,
        advantages_module,
        "compute_advantages",
        lambda original, rows, *rest, **more: change(lambda some: original(some, *rest, **more), rows),
    )


@site
def advantage_values(stack: ExitStack, env: str, change: Any) -> None:
    """A step's advantages have the values `change(values, rows)`; groups in which one is not 0 count as having a signal."""

    def compute(original: Any, rows: Sequence[Sample]) -> Any:
        found = original(rows)
        values = list(change(list(found.values), rows))
        named = frozenset(one.group for one, value in zip(rows, values, strict=True) if value)
        return dataclasses.replace(found, values=values, with_signal=found.with_signal | named)

    advantages.install(stack, env, compute)


@site
def advantage_scale(stack: ExitStack, env: str, change: Any) -> None:
    """--scale-rewards is taken for `change(its value)` where advantages are computed."""
    wrapped(
        stack,
        advantages_module,
        "compute_advantages",
        lambda original, rows, scale="none", **more: original(rows, change(scale), **more),
    )


def unjudged(stack: ExitStack, env: str, limit: float) -> None:
    """Engine and trainer may differ by `limit` nats after a weight sync, so that a run goes on with a fault of its sync."""
    put(stack, weight_sync, "PARITY", limit)


UNJUDGED = ((Site("parity", unjudged), 100.0),)


@around
def divided_rows(stack: ExitStack, env: str, change: Any) -> None:
    """A step's minibatches are `change(original, rows, advantages, config, world, count=...)`."""
    original = minibatches.make_minibatches
    everywhere(stack, original, functools.wraps(original)(functools.partial(change, original)))


@site
def minibatch(stack: ExitStack, env: str, change: Any) -> None:
    """The loss of each microbatch is computed from `change(minibatch, indices of its rows, run)`."""
    wrapped(
        stack,
        forward_backward,
        "grpo_loss",
        lambda original, run, held, indices: original(run, change(held, indices, run), indices),
    )


loss = function(forward_backward, "policy_loss")
"""The loss of a microbatch is `change(original, inputs, objective)`."""


@site
def loss_inputs(stack: ExitStack, env: str, change: Any) -> None:
    """The loss of a microbatch is computed from `change(its inputs)`."""
    loss.install(stack, env, lambda original, inputs, objective: original(change(inputs), objective))


@site
def kl_beta(stack: ExitStack, env: str, change: Any) -> None:
    """The coefficient of the KL term in the loss is `change(its setting)`."""
    loss.install(
        stack,
        env,
        lambda original, inputs, objective: original(
            inputs, dataclasses.replace(objective, kl_beta=change(objective.kl_beta))
        ),
    )


clip = function(losses_module, "_clipped")
"""What the ratio clip leaves is `change(original, inputs, objective, ratio)`."""
correction = function(forward_backward, "importance_corrections")
"""Importance weights are `change(original, trainer's, engine's log-probabilities, rows, mode, cap)`."""


@site
def pass_loss(stack: ExitStack, env: str, change: Any) -> None:
    """Each pass's loss is `change(loss, run, minibatch, number of the update's passes)`."""
    passes = [1]

    def divide(original: Any, *args: Any) -> Any:
        found = original(*args)
        passes[0] = max(len(found), 1)
        return found

    def compute(original: Any, run: Any, held: Any, indices: Sequence[int]) -> Any:
        value, sums = original(run, held, indices)
        return change(value, run, held, passes[0]), sums

    wrapped(stack, forward_backward, "_microbatches", divide)
    original = forward_backward.grpo_loss
    everywhere(stack, original, functools.wraps(original)(functools.partial(compute, original)))


# Gradients, the optimizer, the saved model


backward = function(Replicated, "backward")
"""A backward pass is `change(original, sharding, loss, last=whether it is the update's last)`."""


@site
def gradients(stack: ExitStack, env: str, change: Any) -> None:
    """`change(sharding)` is called when the gradients of an update are complete."""

    def update(original: Any, self: Replicated) -> float:
        change(self)
        return original(self)

    wrapped(stack, Replicated, "update", update)


update = function(Replicated, "update")
"""An optimizer step is `change(original, sharding)`; it returns the gradient's norm."""
optimizer = function(Replicated, "make_optimizer")
"""The optimizer is `change(original, sharding, make, largest norm)`."""
rate = function(step_module, "learning_rate_of")
"""The learning rate of a step is `change(original, kind, peak, step from 0, warmup=..., total=...)`."""
zero_grad = function(Replicated, "zero_grad")
"""Gradients are cleared by `change(original, sharding)`."""
saved_state = function(policy_module, "merged_state")
"""The tensors of the final model are `change(original, model)`."""


@site
def saved_files(stack: ExitStack, env: str, change: Any) -> None:
    """`change(folder)` is called when the final model was written there."""

    def save(original: Any, self: Policy, folder: Any) -> None:
        original(self, folder)
        change(folder)

    wrapped(stack, Policy, "save_final", save)
