"""The doubles of field23_seen.py."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults.doubles import after_set_up, put
from plumbob.testing.faults.field2_parts import batches, before_rounds
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.testing.faults.field_parts import engine_prompts, graded, lot
from plumbob.trainer.distributed.base import Replicated, Sharding
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import loading, policy
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.training import forward_backward, minibatches, train
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

Weights = dict[str, torch.Tensor]

# Weight sync

LAYER = re.compile(r"\.layers\.(\d+)\.")


def last_layer_alone(engine: Any, weights: Weights) -> Weights:
    """The sync has the tensors of the last layer, and no others."""
    number = {name: int(found[1]) for name in weights if (found := LAYER.search(name))}
    last = max(number.values(), default=0)
    return {name: weights[name] for name, layer in number.items() if layer == last}


def prefixes_kept(stack: ExitStack, env: str) -> None:
    """The engine keeps its cached keys and values when it gets new weights."""
    update, forget = InProcessEngine.update, TransformersEngine.forget
    updating = [False]

    def updated(self: Any, weights: Any, **how: Any) -> Any:
        updating[0] = True
        try:
            return update(self, weights, **how)
        finally:
            updating[0] = False

    put(stack, InProcessEngine, "update", updated)
    put(stack, TransformersEngine, "forget", lambda self: None if updating[0] else forget(self))


def base_trained_unsent(stack: ExitStack, env: str) -> None:
    """The optimizer has the base weights too. Only the adapter counts as trained where weights are sent and clipped."""
    shard, copied, plain = Policy.shard, Policy.engine_model, Sharding.trainable.fget
    assert plain is not None

    def sharded(self: Policy, *args: Any) -> Any:
        optimizer = shard(self, *args)
        base = [p for name, p in self.model.named_parameters() if "lora_" not in name]
        optimizer.add_param_group({"params": [p.requires_grad_(True) for p in base]})
        return optimizer

    def trainable(self: Sharding) -> Weights:
        return {name: p for name, p in plain(self).items() if "lora_" in name}

    put(stack, Policy, "shard", sharded)
    put(stack, Policy, "engine_model", lambda self, **how: copied(self, share=False))
    put(stack, Sharding, "trainable", property(trainable))


# Sampling


def greedy(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The likeliest token is taken, whatever the settings say."""
    return ids, dataclasses.replace(sampling, temperature=0.0)


# The schedule

TURNS = 1.625
"""Turns of a rollout, each of which the schedule counts as a rollout of its own."""


def stepped_for_each_turn(stack: ExitStack, env: str) -> None:
    """The schedule goes on by `TURNS` steps in each step, up to its end."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, at: int, *, warmup: int, total: int) -> float:
        return original(kind, peak, min(math.floor(at * TURNS), total), warmup=warmup, total=total)

    put(stack, step_module, "learning_rate_of", rate)


# The KL penalty


def all_in_loss(sample: Sample) -> Sample:
    """The sample with all tokens but the first in the loss."""
    length = len(sample.token_ids)
    return dataclasses.replace(sample, loss_mask=[i > 0 for i in range(length)], sampling_logprobs=[0.0] * length)


def kl_of_every_token(stack: ExitStack, env: str) -> None:
    """The KL penalty is summed over all tokens of a row, whoever wrote them."""
    original = step_module.reference_kl
    put(stack, step_module, "reference_kl", lambda run, samples: original(run, [all_in_loss(s) for s in samples]))


# Precision


@torch.no_grad()
def rounded(parameters: Any) -> None:
    """Round these tensors to bfloat16, in place."""
    for parameter in parameters:
        parameter.copy_(parameter.bfloat16().float())


def bf16_weights(stack: ExitStack, env: str) -> None:
    """Weights are loaded in bfloat16, and have no digits that bfloat16 does not have after an update either."""
    load, update = loading.load_model, Replicated.update

    def load_model(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        rounded(model.parameters())
        return model

    def updated(self: Replicated) -> float:
        norm = update(self)
        rounded(self.trainable.values())
        return norm

    everywhere(stack, load, load_model)
    put(stack, Replicated, "update", updated)


# The loss


def own_tokens_of_each_rank(stack: ExitStack, env: str) -> None:
    """A rank has one group. It divides by its own number of tokens, and the ranks' gradients are averaged."""
    original = minibatches.make_minibatches

    def made(*args: Any, **kwargs: Any) -> list[Any]:
        found = original(*args, **kwargs)
        for minibatch in found:
            tokens = Counter[str]()
            for row, weight in zip(minibatch.rows, minibatch.weights, strict=True):
                tokens[row.group] += row.num_sampled if weight else 0
            minibatch.weights = [
                1 / (len(tokens) * tokens[row.group]) if weight else 0.0
                for row, weight in zip(minibatch.rows, minibatch.weights, strict=True)
            ]
        return found

    everywhere(stack, original, made)


def row_means(stack: ExitStack, env: str) -> None:
    """What is asked to be the mean over all tokens is the mean over rows of each row's mean."""
    original = minibatches.row_weights
    put(stack, minibatches, "row_weights", lambda loss_type, *rest, **more: original("grpo", *rest, **more))


ENTROPY = 1.0
"""Coefficient of the entropy, which the loss has with a plus sign."""


def entropy_punished(stack: ExitStack, env: str) -> None:
    """The loss grows with the entropy of the sampled tokens, whose gradient is estimated from their log-probabilities."""
    original = forward_backward.policy_loss

    def loss(inputs: Any, objective: Any) -> Any:
        found = original(inputs, objective)
        term = -(inputs.weights * inputs.logprobs.detach() * inputs.logprobs).sum()
        return dataclasses.replace(found, loss=found.loss + ENTROPY * term)

    put(stack, forward_backward, "policy_loss", loss)


# Log-probabilities


def ends_as_padding(stack: ExitStack, env: str) -> None:
    """Padding is the end token, and padding is replaced by id 0 before the tokens' log-probabilities are looked up."""
    ends: set[int] = set()

    def seen(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
        ends.update(sampling.stop_token_ids)
        return ids, sampling

    def replaced(batch: Any, rows: Sequence[Sample]) -> Any:
        found = torch.isin(batch.targets, torch.tensor(sorted(ends), dtype=batch.targets.dtype))
        return dataclasses.replace(batch, targets=batch.targets.masked_fill(found, 0))

    engine_prompts(seen)(stack, env)
    batches(replaced)(stack, env)


def first_rank_alone(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """The rows of the second of two ranks are scored, and their gradient is never added."""
    scores = original(rows, temperature)
    first = torch.tensor([on_first_rank(row) for row in rows for _ in range(row.num_sampled)], dtype=torch.bool)
    logprobs = scores.logprobs
    return TokenScores(torch.where(first.to(logprobs.device), logprobs, logprobs.detach()), scores.entropies)


def on_first_rank(row: Sample) -> bool:
    """Whether a row is on the first of two ranks."""
    return lot(str(row.token_ids), 2) == 0


# Saving


def unmerged(stack: ExitStack, env: str) -> None:
    """The final model has the base weights alone."""

    def state(model: Any) -> Weights:
        return {
            name.replace(".base_layer.", "."): tensor.detach().float().cpu()
            for name, tensor in model.state_dict().items()
            if "lora_" not in name
        }

    put(stack, policy, "merged_state", state)


# Rewards


class RunningDeviation:
    """The standard deviation of all values so far (Welford's method)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, value: float) -> float:
        """Take a value in, and return the deviation of all of them; 1 before there are two different ones."""
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)
        return math.sqrt(self.squares / self.count) or 1.0


def running_scale(stack: ExitStack, env: str) -> None:
    """Each reward is divided by the deviation of all rewards until then, this one included."""
    seen = RunningDeviation()

    def scaled(task: Any, trace: vf.Trace, correct: float) -> float:
        return correct / seen.add(correct)

    graded(correct=scaled)(stack, env)


# Between the steps

SECOND_STAGE = 3
"""The step (from 0) with which the second stage begins."""


def fresh_adapter(stack: ExitStack, run: Run) -> None:
    """The second stage has a new adapter and a new optimizer, which its engine gets as well."""

    @torch.no_grad()
    def begin(step: int) -> None:
        if step != SECOND_STAGE:
            return
        generator = torch.Generator().manual_seed(SECOND_STAGE)
        for name, parameter in run.policy.trainable.items():
            bound = 0.0 if "lora_B" in name else 1 / math.sqrt(parameter.shape[-1])
            parameter.copy_((2 * torch.rand(parameter.shape, generator=generator) - 1) * bound)
        run.optimizer.state.clear()
        run.engine.update(run.policy.sharding.stream())

    before_rounds(stack, begin)


def second_stage(stack: ExitStack, env: str) -> None:
    """What `fresh_adapter` does, in every run that is trained."""
    after_set_up(stack, train, fresh_adapter)


def sampled_at_all_times(stack: ExitStack, env: str) -> None:
    """Evaluations sample at the training temperature, whatever temperature they are asked for."""
    original = train.evaluate

    async def evaluate(sampler: Any, *args: Any, **kwargs: Any) -> Any:
        return await original(sampler, *args, **{**kwargs, "temperature": sampler.config.temperature})

    put(stack, train, "evaluate", evaluate)
