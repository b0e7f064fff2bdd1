"""The training step's own code on a few rollouts, with a record of what reaches the loss, and of where gradients end."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.losses import LossInputs
from plumbob.trainer.doctor.subject import Subject, undone
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as training_step
from plumbob.trainer.training.minibatches import Minibatch

ITERATIONS = 2
"""Most passes over the same rollouts: enough for log-probabilities of the first weights to matter."""


@dataclass(frozen=True)
class Trained:
    """What the loss was given for one row, in one optimizer step."""

    update: int
    """Number of the optimizer step, from 0."""
    row: Sample
    logprobs: torch.Tensor
    """[n] log-probabilities under the weights being trained."""
    old_logprobs: torch.Tensor
    """[n] those under the step's first weights."""
    advantages: torch.Tensor
    """[n] advantage of each token."""
    corrections: torch.Tensor
    """[n] importance weight of each token."""
    slopes: list[torch.Tensor]
    """[n] minus the slope of the loss in each token's log-probability, once the backward pass has run; else empty."""
    one_ratio: bool = False
    """Whether another old log-probability of the row's first token changes the slopes of its other tokens."""


def rehearse(subject: Subject, samples: Sequence[Sample]) -> list[Trained]:
    """Take a training step on these samples as `train_step` does, without rollouts and sync; it is undone afterwards.

    The step's functions are looked up where `train_step` looks them up.
    """
    run, step = subject.run, training_step
    config, found = run.config, []
    with undone(run):
        step.set_learning_rate(run)
        kl_sums = step.reference_kl(run, list(samples)) if config.kl_in_reward else None
        advantages = step.step_advantages(samples, config.advantages(), kl_sums)
        minibatches = step.make_minibatches(samples, advantages, config, run.world, count=config.num_minibatches)
        if run.updates_per_step > 1:
            for minibatch in minibatches[1:]:
                step.score_old_policy(run, minibatch)
        for update, minibatch in enumerate(minibatches * min(config.num_iterations, ITERATIONS)):
            with _recorded(update) as rows:
                step.optimizer_step(run, minibatch, None)
            found += rows
    return found


@contextmanager
def _recorded(update: int) -> Generator[list[Trained]]:
    """Record what `policy_loss` is given inside the context, row by row."""
    found: list[Trained] = []
    rows: list[Sample] = []
    loss, policy_loss = forward_backward.grpo_loss, forward_backward.policy_loss

    def of_rows(run: Any, minibatch: Minibatch, indices: Sequence[int]) -> Any:
        rows[:] = [minibatch.rows[i] for i in indices]
        return loss(run, minibatch, indices)

    def of_tokens(inputs: LossInputs, objective: Any) -> Any:
        counts = [row.num_sampled for row in rows]
        tensors = (inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.corrections)
        if all(len(t) == sum(counts) for t in tensors):
            parts = zip(*(t.detach().cpu().split(counts) for t in tensors), strict=True)
            one = _ratio_of_rows(inputs, objective, counts, policy_loss) if update == 0 else [False] * len(rows)
            here = [
                Trained(update, row, *part, slopes=[], one_ratio=joint)
                for row, part, joint in zip(rows, parts, one, strict=True)
            ]
            found.extend(here)
            if inputs.logprobs.requires_grad:
                inputs.logprobs.register_hook(lambda slopes: _keep(here, slopes))
        return policy_loss(inputs, objective)

    with (
        mock.patch.object(forward_backward, "grpo_loss", of_rows),
        mock.patch.object(forward_backward, "policy_loss", of_tokens),
    ):
        yield found


SMALL = 0.02
"""Change of an old log-probability, in nats, that takes a token's importance ratio out of no clip bounds."""


def _ratio_of_rows(inputs: LossInputs, objective: Any, counts: Sequence[int], policy_loss: Any) -> list[bool]:
    """Of each row, whether its tokens have one importance ratio between them.

    Then another old log-probability of its first token changes the slopes of all of them.
    """

    def slopes(old: torch.Tensor) -> torch.Tensor:
        own = inputs.logprobs.detach().requires_grad_()
        given = dataclasses.replace(inputs, logprobs=own, old_logprobs=old)
        with torch.enable_grad():
            (found,) = torch.autograd.grad(policy_loss(given, objective).loss, own, allow_unused=True)
        return torch.zeros_like(own) if found is None else found

    firsts = [sum(counts[:i]) for i, count in enumerate(counts) if count]
    moved = inputs.old_logprobs.detach().clone()
    moved[firsts] -= SMALL
    try:
        before, after = slopes(inputs.old_logprobs.detach()), slopes(moved)
    except (RuntimeError, TypeError, AttributeError):  # a loss that takes other inputs
        return [False] * len(counts)
    apart = (after - before).abs() > SMALL / 4 * before.abs()
    return [bool(part[1:].any() and part[1:].float().mean() > 0.5) for part in apart.split(list(counts))]


def _keep(trained: Sequence[Trained], slopes: torch.Tensor) -> None:
    """Give each row its part of the loss's slopes [N]."""
    for one, part in zip(trained, (-slopes).detach().cpu().split([t.row.num_sampled for t in trained]), strict=True):
        one.slopes[:] = [part]


def trained_positions(subject: Subject, row: Sample) -> set[int] | None:
    """The positions of the row whose tokens get a gradient with an advantage of 1: what the loss is really on.

    The logits of the token at position t come from the hidden state at t - 1, and from no other: a hidden state after the
    last layer that has a gradient belongs to a trained token. None if these hidden states cannot be seen.
    """
    decoder, found = subject.run.policy.model.get_decoder(), []

    def seen(module: Any, args: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda gradient: found.append(gradient.detach()))

    handle = decoder.register_forward_hook(seen)
    try:
        subject.gradient([row], [1.0])
    finally:
        handle.remove()
        subject.run.policy.sharding.zero_grad()
    if not found or any(g.shape[:2].numel() != len(row.token_ids) for g in found):
        return None
    hit = sum((g.flatten(0, 1) != 0).any(-1).int() for g in found)
    assert isinstance(hit, torch.Tensor)
    return {i + 1 for i in hit.nonzero()[:, 0].tolist()}
