"""Why rollouts with an advantage may have no gradient although nothing is wrong with the gradient: what leaves them out."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.importance_weights import Corrections, importance_corrections
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.training import forward_backward
from plumbob.trainer.watch.sampling_rules import muted

CERTAIN = -1e-6
"""Log-probability of a token that has no gradient, because no other token has any probability."""
ROWS = 24
"""Number of rows on which the importance correction is examined."""
NO_GRADIENT = frozenset({"no-gradient", "signal-masked", "correction-mutes-rollouts"})
"""Causes that say that rollouts with an advantage have no gradient."""


def correction(subject: Subject) -> Finding | None:
    """Does --importance-correction leave most of the gradient of the drawn rollouts? None without a correction.

    The watch has the same rule.
    """
    samples = subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), ROWS) if samples[i].num_sampled]
    if subject.run.config.correction()[0] == "none" or not rows:
        return None
    found = _corrections(subject, rows)
    cause, evidence = muted(found.masked_share, found.mean)
    mode, cap = subject.run.config.correction()
    evidence = f"with --importance-correction {mode} and a cap of {cap:g}, {evidence}"
    check = "the importance correction leaves most of the gradient"
    return Finding.of(check, (cause, evidence))


def without_gradient(subject: Subject, check: str, rows: Sequence[Sample], evidence: str) -> Finding:
    """The finding that these rows have no gradient, with the most specific reason that can be shown.

    `evidence`: what was measured. Where every token is certain there is nothing to find: the verdict is unsure.
    """
    config = subject.run.config
    if config.overlong == "mask" and all(row.truncated for row in rows):
        evidence += "; all of them count as cut off, and --overlong mask takes them out of the loss"
        return Finding(check, "fail", evidence, "signal-masked")
    if config.correction()[0] != "none" and _uncorrected(subject, rows):
        mode, cap = config.correction()
        evidence += (
            f"; without --importance-correction {mode} with a cap of {cap:g} they have one: it takes every token out"
        )
        return Finding(check, "fail", evidence, "correction-mutes-rollouts")
    if all((scores > CERTAIN).all() for scores in subject.score(rows)):
        evidence += "; every sampled token has a probability of 1, so no gradient is to be expected"
        return Finding(check, "unsure", evidence)
    return Finding(check, "fail", evidence, "no-gradient")


def _uncorrected(subject: Subject, rows: Sequence[Sample]) -> bool:
    """Whether these rows have a gradient once every token has an importance weight of 1, whatever computes the weights."""

    def ones(trainer: torch.Tensor, sampling: torch.Tensor, rows: torch.Tensor, *_: object) -> Corrections:
        return importance_corrections(trainer, sampling, rows, "none", 1.0)

    sharding = subject.run.policy.sharding
    with mock.patch.object(forward_backward, "importance_corrections", ones):
        subject.gradient(rows, [1.0] * len(rows))
    found = [sharding.local_gradient(p) for p in subject.run.policy.trainable.values()]
    sharding.zero_grad()
    return any(gradient is not None and bool((gradient != 0).any()) for gradient in found)


def _corrections(subject: Subject, rows: Sequence[Sample]) -> Corrections:
    """The importance weights of the rows' sampled tokens, as the training step computes them before its first update."""
    scores = subject.score(rows)
    sampled = torch.tensor([logprob for row in rows for logprob in row.sampled_logprobs])
    index = torch.arange(len(rows)).repeat_interleave(torch.tensor([row.num_sampled for row in rows]))
    # Looked up where the training step looks it up, so that it is the same function.
    return forward_backward.importance_corrections(torch.cat(scores), sampled, index, *subject.run.config.correction())
