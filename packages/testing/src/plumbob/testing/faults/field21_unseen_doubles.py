"""The doubles of field21_unseen.py, the unseen half: for measuring alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verifiers.v1 as vf
from plumbob.rollout import Completion, Sample, Sampling, derive_seed, runner
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of, without
from plumbob.trainer.algorithm import advantages as advantages_module
from plumbob.trainer.algorithm import losses as losses_module
from plumbob.trainer.algorithm.kl import estimate_kl
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.distributed.model_files import lora_layers
from plumbob.trainer.inference.transformers import engine as transformers_engine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.transformers.kv_cache import SlotCache
from plumbob.trainer.policy import merged_weights
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.run import Best

Score = Callable[[Sequence[Sample], float], TokenScores]
"""(rows, temperature) -> the policy's scores of their sampled tokens."""

# The loss


def kl_by_itself(stack: ExitStack, env: str) -> None:
    """The KL term is a mean of its own over the microbatch's tokens, which is added to the loss of the advantages."""
    original = forward_backward.policy_loss

    def loss(inputs: Any, objective: Any) -> Any:
        if inputs.ref_logprobs is None or not len(inputs.logprobs):
            return original(inputs, objective)
        found = original(inputs, dataclasses.replace(objective, kl_beta=0.0))
        kl = estimate_kl(inputs.logprobs, inputs.ref_logprobs, objective.kl_estimator).mean()
        return dataclasses.replace(found, loss=found.loss + objective.kl_beta * kl)

    put(stack, forward_backward, "policy_loss", loss)


def weights_with_gradient(inputs: Any) -> Any:
    """The importance weights of engine and trainer are part of what is differentiated."""
    moving = (inputs.logprobs - inputs.logprobs.detach()).exp()
    return dataclasses.replace(inputs, corrections=inputs.corrections * moving)


def over_padded_length(inputs: Any) -> Any:
    """A row's sum of losses is divided by the length of the longest row of its microbatch, not by its own."""
    if not len(inputs.rows):
        return inputs
    lengths = inputs.rows.bincount()
    share = lengths[inputs.rows] / lengths.max()
    return dataclasses.replace(inputs, weights=inputs.weights * share)


def clipped_before(stack: ExitStack, env: str) -> None:
    """The smaller one of ratio and clipped ratio is multiplied by the advantage, also where that is negative."""
    original = losses_module._clipped

    def clipped(inputs: Any, objective: Any, ratio: torch.Tensor) -> Any:
        bounded = ratio.clamp(1 - objective.epsilon, 1 + objective.epsilon_high)
        gains = ratio.minimum(bounded) * inputs.advantages
        return dataclasses.replace(original(inputs, objective, ratio), gains=gains)

    put(stack, losses_module, "_clipped", clipped)


def product_weights(stack: ExitStack, env: str) -> None:
    """A sequence's importance weight is the product of its tokens' weights, in place of their geometric mean."""
    original = forward_backward.importance_corrections

    def corrections(trainer: torch.Tensor, sampling: torch.Tensor, rows: torch.Tensor, mode: Any, cap: float) -> Any:
        if not mode.startswith("sequence") or not len(rows):
            return original(trainer, sampling, rows, mode, cap)
        gaps = trainer.detach() - sampling.detach()
        sums = gaps.new_zeros(len(rows.bincount())).index_add(0, rows, gaps)
        # The mean over a row of the row's sum is that sum.
        return original(sampling + sums[rows], sampling, rows, mode, cap)

    put(stack, forward_backward, "importance_corrections", corrections)


PART = 4
"""Number of rollouts of a group on one process."""


def baseline_of_a_part(stack: ExitStack, env: str) -> None:
    """Advantages compare a rollout with those of its group that the same process has sampled: `PART` of them."""
    original = advantages_module.compute_advantages

    def compute(samples: Sequence[Sample], *args: Any, **how: Any) -> Any:
        seen: dict[str, int] = {}
        parts = []
        for sample in samples:
            number = seen[sample.group] = seen.get(sample.group, -1) + 1
            parts.append(dataclasses.replace(sample, group=f"{sample.group}/{number // PART}"))
        return dataclasses.replace(original(samples, *args, **how), values=original(parts, *args, **how).values)

    put(stack, advantages_module, "compute_advantages", compute)


# Gradients


def frozen(score: Score, rows: Sequence[Sample], temperature: float) -> TokenScores:
    """The log-probabilities have no gradient, because no tensor that they depend on is trained."""
    scores = score(rows, temperature)
    return TokenScores(scores.logprobs.detach(), scores.entropies)


def gradients_lost(sharding: Replicated) -> None:
    """Every gradient is 0."""
    for parameter in sharding.trainable.values():
        if parameter.grad is not None:
            parameter.grad.zero_()


def never_cleared(stack: ExitStack, env: str) -> None:
    """No gradient is ever set to zero."""
    put(stack, Replicated, "zero_grad", lambda self: None)


# Rows

PAD = 0
"""The id of padding."""


def padded_in_front(score: Score, rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Rows are padded in front to the longest of their microbatch, and attend to the padding."""
    width = max((len(row.token_ids) for row in rows), default=0)
    return score([_with_padding(row, width - len(row.token_ids)) for row in rows], temperature)


def _with_padding(row: Sample, count: int) -> Sample:
    return dataclasses.replace(
        row,
        token_ids=[PAD] * count + row.token_ids,
        loss_mask=[False] * count + row.loss_mask,
        sampling_logprobs=[0.0] * count + row.sampling_logprobs,
    )


def without_end_tokens(sample: Sample, trace: vf.Trace) -> Sample:
    """The last token of each turn, which is also the padding token, is not in the loss."""
    return without(sample, {turn[-1] for turn in runs_of(sample.loss_mask)})


# The engine


def reported_before_temperature(stack: ExitStack, env: str) -> None:
    """The engine samples at the temperature, and reports the log-probabilities of the model's own distribution."""
    draw_all, draw, now = TransformersEngine._draw, transformers_engine.draw, [1.0]

    def _draw(self: Any, requests: list[Any], logits: torch.Tensor) -> None:
        kinds = {request.sampling.temperature for request in requests}
        now[0] = max(kinds, default=1.0) if len(kinds) == 1 else 1.0
        draw_all(self, requests, logits)

    def drawn(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = draw(logits, *rest)
        return tokens, torch.log_softmax(logits * now[0], dim=-1).gather(-1, tokens[:, None])[:, 0]

    put(stack, TransformersEngine, "_draw", _draw)
    put(stack, transformers_engine, "draw", drawn)


KEPT = 128
"""Number of leading positions of each conversation whose keys and values stay in the cache."""


def beginnings_kept(stack: ExitStack, env: str) -> None:
    """Where the cache is emptied, the keys and values of the first `KEPT` tokens of each conversation stay in it."""

    def forget_all(self: SlotCache) -> None:
        self.ids[:, KEPT:] = -1
        self.counts[:] = np.minimum(self.counts, KEPT)

    put(stack, SlotCache, "forget_all", forget_all)


PENALTY = 1.3
"""The repetition penalty."""


def penalised(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Logits of tokens that the text has already are divided by the penalty, also where they are negative."""
    changed = logits.clone()
    for i, request in enumerate(requests):
        seen = sorted({*request.prompt.tolist(), *request.token_ids})
        changed[i, seen] = changed[i, seen] / PENALTY
    return changed


def end_appended(completion: Completion, ids: Sequence[int], sampling: Sampling) -> Completion:
    """A turn that was cut at its limit gets an end token that nobody sampled, and counts as complete."""
    if completion.finish_reason != "length" or not sampling.stop_token_ids:
        return completion
    return dataclasses.replace(
        completion,
        token_ids=(*completion.token_ids, sampling.stop_token_ids[0]),
        logprobs=(*completion.logprobs, 0.0),
        finish_reason="stop",
    )


def two_seeds(stack: ExitStack, env: str) -> None:
    """The rollouts of a group have two seeds in all, one for each process that samples them."""
    put(stack, runner, "derive_seed", lambda seed, number: derive_seed(seed, number % 2))


def layers_exchanged(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the first and of the second layer arrive under each other's names."""
    other = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}

    def source(name: str) -> str:
        found = next((part for part in other if part in name), "")
        renamed = name.replace(found, other[found]) if found else name
        return renamed if renamed in weights and weights[renamed].shape == weights[name].shape else name

    return {name: weights[source(name)] for name in weights}


# Rewards

FULL_LENGTH = 200
"""Number of characters of a reply that earns the whole second reward."""


def ten_for_length(task: Any, trace: vf.Trace, correct: float) -> float:
    """0 to 10 for the length of the last reply, where a right answer earns 1."""
    return 10 * min(len(trace.last_reply or ""), FULL_LENGTH) / FULL_LENGTH


# Files


def saved_without_alpha(stack: ExitStack, env: str) -> None:
    """An adapter's saved settings say that its alpha is 0."""

    def without(original: Any) -> Any:
        def save(self: Policy, folder: Path) -> None:
            original(self, folder)
            for file in folder.rglob("adapter_config.json"):
                settings = json.loads(file.read_text())
                file.write_text(json.dumps({**settings, "lora_alpha": 0}))

        return save

    for name in ("save", "save_final"):
        put(stack, Policy, name, without(getattr(Policy, name)))


def base_alone(stack: ExitStack, env: str) -> None:
    """The final model has the base model's weights: merging the adapter leaves them as they are."""

    def merged_state(model: Any) -> dict[str, torch.Tensor]:
        state = merged_weights.merged_state(model)
        for name, layer in lora_layers(model).items():
            state[f"{name}.weight"] = layer.base_layer.weight.detach().float().cpu()
        return state

    put(stack, policy_module, "merged_state", merged_state)


def first_stays_best(stack: ExitStack, env: str) -> None:
    """The first checkpoint that was the best stays it, whatever later ones are worth."""
    original = Best.after

    def after(self: Best, step: int, value: float) -> Best:
        now = original(self, step, value)
        return now if self.kept is None else dataclasses.replace(now, kept=self.kept, previous=None)

    put(stack, Best, "after", after)
