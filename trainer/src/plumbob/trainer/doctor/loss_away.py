"""Does the loss do with tokens what its formula says, also where the policy is another one than before, and than the reference?

At a run's start all importance ratios are 1 and a KL term has no slope, so that clip bounds, ratios and the KL term of a
wrong loss show nothing. The run's own loss is asked here with old and reference log-probabilities that are moved away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.losses import LossInputs, Objective
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.step_checks import misweighted

CHECK = "the loss weighs tokens rightly where the policy has moved"
RATIOS = (0.6, -0.6, 0.05, -0.05)
"""Differences of new and old log-probabilities, in nats, one after the other: beyond usual clip bounds, and within them."""
REFERENCES = (0.5, -0.3, -0.5, 0.3, 0.1)
"""The same of the policy's and the reference's."""


def away(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float]) -> Finding | None:
    """Ask the run's loss for the slopes of these rows' tokens with moved ratios; None if it cannot be asked.

    The slopes are compared with the same formulas, written a second time, as those of each step of a run are.
    """
    if subject.run.policy.sharding.kind != "replicated":
        return None
    given = _inputs(subject, rows, advantages)
    if given is None or not len(given[0].logprobs):
        return None
    try:
        wrong, kinds = _judged(*given)
    except (RuntimeError, TypeError, AttributeError, ValueError):  # a loss that takes other inputs
        return None
    count = len(given[0].logprobs)
    evidence = (
        f"the loss, asked with old log-probabilities that are up to {max(RATIOS):g} nats away, has another slope than its formula "
        f"at {wrong} of {count} tokens"
    )
    if wrong <= thresholds.MISWEIGHTED * count:
        return Finding(CHECK, "pass", evidence)
    named = next((cause for name, cause in KINDS.items() if kinds[name] >= (1 - thresholds.MISWEIGHTED) * wrong), None)
    return Finding(CHECK, "fail", evidence, named or "loss-differs-from-settings")


KINDS = {"stronger_kl": "kl-too-large", "other_kl": "kl-backwards", "unratioed": "ratio-to-reference"}
"""What all wrong slopes may be, as `misweighted` counts them -> the cause."""


def _inputs(
    subject: Subject, rows: Sequence[Sample], advantages: Sequence[float]
) -> tuple[LossInputs, Objective] | None:
    """(inputs of the first microbatch, the objective) as the training step's code has them; None if it asks no loss."""
    found: list[tuple[LossInputs, Objective]] = []
    loss = forward_backward.policy_loss

    def of_tokens(inputs: LossInputs, objective: Objective) -> Any:
        found.append((inputs, objective))
        return loss(inputs, objective)

    with mock.patch.object(forward_backward, "policy_loss", of_tokens):
        subject.gradient(rows, advantages)
    subject.run.policy.sharding.zero_grad()
    return found[0] if found else None


def _judged(inputs: LossInputs, objective: Objective) -> tuple[int, dict[str, int]]:
    """(number of tokens with a wrong slope, counts of what these are) once old and reference log-probabilities are moved."""
    own = inputs.logprobs.detach().clone().requires_grad_()

    def moved(by: Sequence[float]) -> torch.Tensor:
        steps = torch.tensor(by, device=own.device, dtype=own.dtype)
        return own.detach() - steps[torch.arange(len(own), device=own.device) % len(by)]

    given = dataclasses.replace(
        inputs,
        logprobs=own,
        old_logprobs=moved(RATIOS),
        ref_logprobs=None if inputs.ref_logprobs is None else moved(REFERENCES),
    )
    with torch.enable_grad():
        counts = misweighted(given, objective)
        forward_backward.policy_loss(given, objective).loss.backward()
    kinds = {name: int(value.item()) for name, value in counts.items() if name in {"misweighted", *KINDS}}
    return kinds.pop("misweighted"), kinds
