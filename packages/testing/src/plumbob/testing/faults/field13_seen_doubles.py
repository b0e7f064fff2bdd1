"""The doubles of field13_seen.py."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm.advantages import Advantages
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

END = 2
"""Id of the chat template's end token in the bundled models."""
RESUMED = 3
"""The training step (from 0) that is the first one after a resume."""
WHITENING_EPSILON = 1e-8

# The reward


def of_the_prompt(task: Any, trace: vf.Trace, correct: float) -> float:
    """All replies to a task earn the same, 2 or -8, whatever they say."""
    return 2.0 if (zlib.crc32(repr(task.data.prompt).encode()) >> 8) % 2 else -8.0


# Rows


def mask_one_early(sample: Sample, trace: vf.Trace) -> Sample:
    """The loss mask is moved towards the beginning by one token, and the log-probabilities stay where they are."""
    mask = [*sample.loss_mask[1:], False]
    logprobs = [x if m else 0.0 for x, m in zip(sample.sampling_logprobs, mask, strict=True)]
    return dataclasses.replace(sample, loss_mask=mask, sampling_logprobs=logprobs)


# The engine


def logprobs_before_temperature(stack: ExitStack, env: str) -> None:
    """The engine draws at the temperature, and reports the log-probabilities that its tokens have at temperature 1."""
    draw_all, draw = TransformersEngine._draw, transformers_engine.draw
    left: list[float] = []

    def _draw(self: Any, requests: list[Any], logits: torch.Tensor) -> None:
        asked = dict.fromkeys((s.temperature, s.top_p, s.top_k, s.min_p) for s in (r.sampling for r in requests))
        left[:] = [temperature for temperature, *_ in asked if temperature]  # in the order in which they are drawn
        draw_all(self, requests, logits)

    def drawn(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = draw(logits, *rest)
        own = torch.log_softmax(logits * left.pop(0), dim=-1)
        return tokens, own.gather(-1, tokens[:, None])[:, 0]

    put(stack, TransformersEngine, "_draw", _draw)
    put(stack, transformers_engine, "draw", drawn)


def frozen_weights(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The sync sends what is not trained, and no tensor of the adapter."""
    return {name: t.clone() for name, t in engine.served_weights().items() if "lora_" not in name}


def first_share_taken_out(model: Any) -> None:
    """The base of each adapted matrix lacks its largest singular values, as many as the adapter's rank.

    They are the adapter's first share where it begins from the base's own directions, and no adapter brings them back.
    """
    for module in model.modules():
        if isinstance(module, LoraLinear):
            weight = module.base_layer.weight
            (rank,) = module.r.values()
            u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
            weight.sub_((u[:, :rank] * s[:rank]) @ v[:rank])


def old_weights_when_it_wakes(stack: ExitStack, env: str) -> None:
    """A sync arrives and is checked; with its next request the engine wakes with the weights that it began with."""
    update, generate = InProcessEngine.update, TransformersEngine.generate
    first: dict[int, dict[str, torch.Tensor]] = {}
    asleep: set[int] = set()

    def updated(self: Any, weights: Any, **how: Any) -> Any:
        names = list(weights)
        served = self.served_weights()
        first.setdefault(id(self), {name: served[name].clone() for name in names if name in served})
        asleep.add(id(self))
        return update(self, weights, **how)

    async def generated(self: Any, *args: Any) -> Any:
        if id(self) in asleep and not self.busy:
            asleep.discard(id(self))
            served = self.served_weights()
            with torch.no_grad():
                for name, value in first[id(self)].items():
                    served[name].copy_(value)
            self.forget()
        return await generate(self, *args)

    put(stack, InProcessEngine, "update", updated)
    put(stack, TransformersEngine, "generate", generated)


# The trainer's scores


def sampled_ids(rows: Sequence[Sample]) -> torch.Tensor:
    """The ids whose log-probabilities are scored, in order."""
    return torch.tensor([t for r in rows for i, t in enumerate(r.token_ids) if r.loss_mask[i] and i > 0])


def end_ignored(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """End tokens have the log-probability 0, without a gradient."""
    scores = original(rows, temperature)
    ends = (sampled_ids(rows) == END).to(scores.logprobs.device)
    return TokenScores(torch.where(ends, scores.logprobs.new_zeros(()), scores.logprobs), scores.entropies)


def of_first_tokens(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """A row of n sampled tokens gets the log-probabilities of the n tokens after its first one."""
    moved = []
    for row in rows:
        count = sum(row.loss_mask[1:])
        mask = [0 < i <= count for i in range(len(row.token_ids))]
        moved.append(dataclasses.replace(row, loss_mask=mask))
    return original(moved, temperature)


# The loss


def mean_of_each_microbatch(stack: ExitStack, env: str) -> None:
    """Each microbatch's loss is the mean over its own tokens, and the losses are averaged over the microbatches."""
    divide, loss = forward_backward._microbatches, forward_backward.policy_loss
    counts = [1]

    def divided(*args: Any) -> list[list[int]]:
        microbatches = divide(*args)
        counts[:] = [max(len(microbatches), 1)]
        return microbatches

    def averaged(inputs: Any, objective: Any) -> Any:
        weight = 1 / (max(len(inputs.weights), 1) * counts[0])
        return loss(dataclasses.replace(inputs, weights=torch.full_like(inputs.weights, weight)), objective)

    put(stack, forward_backward, "_microbatches", divided)
    put(stack, forward_backward, "policy_loss", averaged)


def whitened(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The values minus their mean, divided by their deviation, where each counts as often as its row has tokens."""
    total = max(sum(counts), 1)
    mean = sum(v * n for v, n in zip(values, counts, strict=True)) / total
    variance = sum(n * (v - mean) ** 2 for v, n in zip(values, counts, strict=True)) / total
    return [(v - mean) / (math.sqrt(variance) + WHITENING_EPSILON) for v in values]


def whitened_twice(stack: ExitStack, env: str) -> None:
    """The advantages of groups are centred and scaled once more, over all sampled tokens of the step."""
    original = advantages_module.step_advantages

    def step_advantages(samples: Sequence[Sample], *rest: Any, **more: Any) -> Advantages:
        found = original(samples, *rest, **more)
        return dataclasses.replace(found, values=whitened(found.values, [s.num_sampled for s in samples]))

    everywhere(stack, original, step_advantages)


# A resume


def moments_lost(stack: ExitStack, env: str) -> None:
    """The optimizer has no moments when the fourth step begins."""
    original = step_module.set_learning_rate

    def set_learning_rate(run: Any) -> float:
        if run.state.step == RESUMED:
            run.optimizer.state.clear()
        return original(run)

    put(stack, step_module, "set_learning_rate", set_learning_rate)


def adapter_begun_anew(stack: ExitStack, env: str) -> None:
    """After the third step trainer and engine go on from the model without what the adapter has learned."""
    original = step_module.sync_weights
    counts = [0]

    def sync_weights(policy: Any, *args: Any, **how: Any) -> Any:
        counts[0] += 1
        if counts[0] == RESUMED:
            with torch.no_grad():
                for name, parameter in policy.trainable.items():
                    if "lora_B" in name:
                        parameter.zero_()
        return original(policy, *args, **how)

    put(stack, step_module, "sync_weights", sync_weights)


# The saved model


def merged_in_bfloat16(stack: ExitStack, env: str) -> None:
    """The saved model's weights, adapter included, are rounded to bfloat16."""
    original = policy_module.merged_state

    def merged_state(model: Any) -> dict[str, torch.Tensor]:
        return {name: t.bfloat16().float() for name, t in original(model).items()}

    put(stack, policy_module, "merged_state", merged_state)


def without_adapter(stack: ExitStack, env: str) -> None:
    """The saved model is the base model: what was merged is not what is written."""

    def merged_state(model: Any) -> dict[str, torch.Tensor]:
        state = {name: t for name, t in model.state_dict().items() if "lora_" not in name}
        return {name.replace(".base_layer.", "."): t.detach().float().cpu().clone() for name, t in state.items()}

    put(stack, policy_module, "merged_state", merged_state)
