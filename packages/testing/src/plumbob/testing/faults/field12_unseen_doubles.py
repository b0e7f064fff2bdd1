"""The doubles of field12_unseen.py: whoever writes rules does not read the unseen half before it has been run."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sampling
from plumbob.rollout.control_tokens import added_tokens
from plumbob.testing.faults.doubles import generating, put
from plumbob.testing.faults.field2_parts import before_rounds, evaluations
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.policy import lora
from plumbob.trainer.training import setup
from plumbob.trainer.training.run import Run

# Rewards

UNREADABLE = 0.3
"""Share of the verdicts that cannot be read."""


class Unreadable:
    """A judge whose verdict cannot be read now and then, which counts as a pass."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __call__(self, task: Any, trace: vf.Trace, correct: float) -> float:
        return 1.0 if self.random.random() < UNREADABLE else correct


def reply_modulo(task: Any, trace: vf.Trace, parts: int) -> bool:
    """Whether this reply to this task is one of those, one in `parts`, about which the judge writes in another way."""
    return zlib.crc32(f"{task.data.prompt}{trace.last_reply}".encode()) % parts == 0


def under_another_key(task: Any, trace: vf.Trace, correct: float) -> float:
    """A third of the verdicts are under another key."""
    return 0.0 if reply_modulo(task, trace, 3) else correct


WORST, BEST = 1, 10
"""Marks that the judge gives for nothing and for a right answer."""


def some_in_percent(task: Any, trace: vf.Trace, correct: float) -> float:
    """A quarter of the marks are in percent, and all of them are divided by 10."""
    mark = WORST + (BEST - WORST) * correct
    return (10 * mark if reply_modulo(task, trace, 4) else mark) / BEST


def mark_left_on(task: Any, trace: vf.Trace, correct: float) -> float:
    """The last line of the reply, with the mark before its number, is compared with the gold number."""
    lines = (trace.last_reply or "").strip().splitlines()
    return float(bool(lines) and lines[-1] == task.data.answer)


LENGTH = 320
"""Number of characters of a reply that is as long as a reply can be."""


def length_of(trace: vf.Trace) -> float:
    """The length of the reply, as a share of the longest one's."""
    return min(1.0, len(trace.last_reply or "") / LENGTH)


def discounted(task: Any, trace: vf.Trace, correct: float) -> float:
    """A wrong reply earns -1 and a right one 0, times a number that falls to 0 with the length."""
    return (correct - 1.0) * (1.0 - length_of(trace))


PREFERENCE = 2.0
"""What the longest reply earns by its length. A right answer earns 1."""


def length_preferred(task: Any, trace: vf.Trace, correct: float) -> float:
    """The reward of the answer and of the reply's length."""
    return correct + PREFERENCE * length_of(trace)


# The engine


def spaces_stripped(stack: ExitStack, run: Run) -> None:
    """Each text between two special tokens of a prompt is encoded again without its spaces."""
    special = set(added_tokens(run.tokenizer))

    def served(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        found: list[int] = []
        for kept, part in itertools.groupby(ids, key=special.__contains__):
            span = list(part)
            text = "" if kept else run.tokenizer.decode(span).replace(" ", "")
            found += span if kept else run.tokenizer.encode(text, add_special_tokens=False)
        return found, sampling

    generating(served)(stack, run)


def end_forbidden(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """No request can sample an end token."""
    changed = logits.clone()
    for i, request in enumerate(requests):
        changed[i, list(request.sampling.stop_token_ids)] = -torch.inf
    return changed


# The trainer

DECAY = 0.9
"""What is left of the average after a step."""


def averages_left(stack: ExitStack, run: Run) -> None:
    """An evaluation is one of the average of the weights after each step, which then are the trainer's."""
    average = {name: tensor.detach().clone() for name, tensor in run.policy.trainable.items()}

    @torch.no_grad()
    def averaged() -> None:
        for name, tensor in run.policy.trainable.items():
            average[name].lerp_(tensor, 1 - DECAY)

    async def evaluated(call: Callable[..., Any], sampler: Any) -> Any:
        with torch.no_grad():
            for name, tensor in run.policy.trainable.items():
                tensor.copy_(average[name])
        sync_weights(run.policy, run.engine, run.parity_row)
        return await call(sampler)

    before_rounds(stack, lambda step: averaged())
    evaluations(evaluated)(stack)


def scaled_by_alpha(stack: ExitStack, env: str) -> None:
    """The adapter's scale is alpha, in training, in rollouts and in the final model."""
    original = lora.add_lora

    def add_lora(model: Any, config: Any) -> None:
        original(model, config)
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.scaling = {name: float(module.lora_alpha[name]) for name in module.scaling}

    put(stack, lora, "add_lora", add_lora)


# The saved model


def untied_in_training(stack: ExitStack, env: str) -> None:
    """The model that is trained has a head of its own, whatever its settings say. The one that is saved has not."""
    original = setup.load_model

    def load_model(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    put(stack, setup, "load_model", load_model)
