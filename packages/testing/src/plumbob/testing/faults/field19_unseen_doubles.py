"""The doubles of field19_unseen.py: whoever writes rules does not read the unseen half before it has been run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field3_parts import everywhere
from plumbob.testing.faults.field_parts import MEASURING, by_group, sampling_now
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training import forward_backward, minibatches, train
from plumbob.trainer.training import step as step_module

# Rows


def all_after_the_prompt(sample: Sample, trace: vf.Trace) -> Sample:
    """Everything from the first sampled token on is in the loss; what was not sampled has no log-probability."""
    if not any(sample.loss_mask):
        return sample
    start = sample.loss_mask.index(True)
    return dataclasses.replace(sample, loss_mask=[i >= start for i in range(len(sample.loss_mask))])


PADDING = 6
"""Number of tokens after the end token."""


def padding_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """A row that ended by its end token has more of them behind it, and all are in the loss."""
    if sample.truncated:
        return sample
    return dataclasses.replace(
        sample,
        token_ids=[*sample.token_ids, *[sample.token_ids[-1]] * PADDING],
        loss_mask=[*sample.loss_mask, *[True] * PADDING],
        sampling_logprobs=[*sample.sampling_logprobs, *[0.0] * PADDING],
    )


def dealt_out(samples: list[Sample]) -> list[Sample]:
    """Samples are given to the groups in turn: each group has rollouts of all tasks."""
    names = [group[0].group for group in by_group(samples)]
    dealt = [dataclasses.replace(one, group=names[i % len(names)]) for i, one in enumerate(samples)]
    return sorted(dealt, key=lambda one: names.index(one.group))


# The engine


def of_other_requests(stack: ExitStack, env: str) -> None:
    """A sampled token's log-probability is taken from the logits of the next request of the batch."""
    draw, now = transformers_engine.draw, sampling_now(stack)

    def drawn(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = draw(logits, *rest)
        if now():
            others = torch.log_softmax(logits, dim=-1).roll(-1, dims=0)
            logprobs = others.gather(-1, tokens[:, None])[:, 0].clamp(min=-60.0)
        return tokens, logprobs

    put(stack, transformers_engine, "draw", drawn)


COLD = 0.01
"""Temperature of the evaluations."""


def cold(prompt: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """Rollouts have the temperature that was given for evaluations."""
    return prompt, dataclasses.replace(sampling, temperature=COLD) if sampling.temperature else sampling


def no_adapter(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter's second matrices are zeros in the engine."""
    return {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in weights.items()}


def merged_and_beside(stack: ExitStack, env: str) -> None:
    """Each weight sync also adds the adapter to the base weights of the engine, which computes with both."""
    original = InProcessEngine.update
    bases: dict[int, tuple[Any, torch.Tensor]] = {}

    def update(self: Any, weights: Any, **how: Any) -> Any:
        done = original(self, weights, **how)
        with torch.no_grad():
            for module in self.model.modules():
                if isinstance(module, LoraLinear):
                    _, base = bases.setdefault(id(module), (module, module.base_layer.weight.detach().clone()))
                    (adapter,) = module.lora_A.keys()
                    # A new tensor replaces the old one, because the policy shares the old one.
                    merged = base + module.get_delta_weight(adapter).to(base.dtype)
                    module.base_layer.weight = torch.nn.Parameter(merged, requires_grad=False)
        return done

    put(stack, InProcessEngine, "update", update)


BUCKET, AGAIN = 8, 0.7
"""Tensors of a bucket, and what a second finish multiplies the down projections by."""


def finished_by_bucket(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What finishes the down projections is done after every bucket, and so again for those of earlier buckets."""
    last = (len(weights) - 1) // BUCKET
    return {
        name: tensor * AGAIN ** (last - i // BUCKET) if "down_proj" in name else tensor
        for i, (name, tensor) in enumerate(weights.items())
    }


AHEAD = 2
"""Positions between the prompt and the first decoded token that no token has."""


def decoding_ahead(stack: ExitStack, env: str) -> None:
    """Tokens that the engine decodes one by one have other positions than those of a prompt."""
    original = TransformersEngine._forward

    def _forward(self: Any, rows: Any, ids: torch.Tensor, positions: torch.Tensor, kv_length: int) -> torch.Tensor:
        if self.max_length == MEASURING or not isinstance(rows, slice):
            return original(self, rows, ids, positions, kv_length)
        mask = self._cache.begin(rows, positions, kv_length)
        return (
            self.model.get_decoder()(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions + AHEAD,
                past_key_values=self._cache,
                use_cache=True,
            )
        ).last_hidden_state

    put(stack, TransformersEngine, "_forward", _forward)


# Evaluations


def at_temperature_one(stack: ExitStack, env: str) -> None:
    """Every evaluation is sampled at temperature 1."""
    original = train.evaluate

    async def evaluate(*args: Any, temperature: float, **how: Any) -> Any:
        return await original(*args, temperature=1.0, **how)

    put(stack, train, "evaluate", evaluate)


# The trainer


def loss_scaled(factor: Callable[[int], float]) -> Start:
    """The loss of each of n passes over a minibatch is multiplied by `factor(n)`."""

    def start(stack: ExitStack, env: str) -> None:
        divide, loss, passes = forward_backward._microbatches, forward_backward.grpo_loss, [1]

        def _microbatches(run: Any, minibatch: Any) -> list[list[int]]:
            found = divide(run, minibatch)
            passes[0] = max(1, len(found))
            return found

        def grpo_loss(run: Any, minibatch: Any, indices: Sequence[int]) -> Any:
            value, sums = loss(run, minibatch, indices)
            return value * factor(passes[0]), sums

        put(stack, forward_backward, "_microbatches", _microbatches)
        everywhere(stack, loss, grpo_loss)

    return start


FADING = 0.98
"""What a token's credit is multiplied by for each token between it and the end of its row."""


def fading(mask: Sequence[bool]) -> list[float]:
    """For each sampled token of a row: `FADING` to the power of the number of tokens after it, of tools and all."""
    return [FADING ** (len(mask) - 1 - i) for i, sampled in enumerate(mask) if sampled]


def credit_fades(stack: ExitStack, env: str) -> None:
    """Each token's advantage is multiplied by what `fading` gives for it."""
    loss, policy_loss = forward_backward.grpo_loss, forward_backward.policy_loss
    factors: list[float] = []

    def grpo_loss(run: Any, minibatch: Any, indices: Sequence[int]) -> Any:
        factors[:] = [x for i in indices for x in fading(minibatch.rows[i].loss_mask)]
        return loss(run, minibatch, indices)

    def faded(inputs: Any, objective: Any) -> Any:
        if len(factors) == len(inputs.advantages):
            scale = torch.tensor(factors, device=inputs.advantages.device)
            inputs = dataclasses.replace(inputs, advantages=inputs.advantages * scale)
        return policy_loss(inputs, objective)

    everywhere(stack, loss, grpo_loss)
    put(stack, forward_backward, "policy_loss", faded)


def mask_forgotten(stack: ExitStack, env: str) -> None:
    """Rollouts that a limit cut off are trained, although they were to be masked."""
    original = minibatches.make_minibatches

    def make_minibatches(samples: Any, advantages: Any, config: Any, world: Any, *, count: int) -> Any:
        return original(samples, advantages, dataclasses.replace(config, overlong="keep"), world, count=count)

    everywhere(stack, original, make_minibatches)


def growing_rate(stack: ExitStack, env: str) -> None:
    """The decay is computed for -1 steps: the rate of step k, from 1, is k times the peak."""
    original = step_module.learning_rate_of

    def rate(kind: Any, peak: float, at: int, **how: Any) -> float:
        return original("constant", peak, at, **how) * (at + 1)

    put(stack, step_module, "learning_rate_of", rate)


def half_repeated(stack: ExitStack, env: str) -> None:
    """In the trainer, the second half of each frozen up projection is its first half again."""
    original = Policy.shard

    def shard(self: Policy, *args: Any, **how: Any) -> Any:
        optimizer = original(self, *args, **how)
        for name, module in self.model.named_modules():
            if isinstance(module, LoraLinear) and name.endswith("up_proj"):
                weight = module.base_layer.weight.detach()
                half = weight[: len(weight) // 2]
                # A new tensor replaces the old one, because the engine shares the old one.
                module.base_layer.weight = torch.nn.Parameter(torch.cat([half, half]), requires_grad=False)
        return optimizer

    put(stack, Policy, "shard", shard)


# The saved model


def base_alone_saved(stack: ExitStack, env: str) -> None:
    """The final model has the weights of the base alone: the adapter's names were not found where it was merged."""
    original = policy_module.merged_state

    def merged_state(model: Any) -> dict[str, torch.Tensor]:
        state = original(model)
        for name, module in model.named_modules():
            if isinstance(module, LoraLinear):
                state[f"{name}.weight"] = module.base_layer.weight.detach().float().cpu()
        return state

    put(stack, policy_module, "merged_state", merged_state)
