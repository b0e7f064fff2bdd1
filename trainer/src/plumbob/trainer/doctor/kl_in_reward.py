"""With --kl-placement reward: is the KL divergence to the reference policy subtracted from each rollout's reward?

At a run's start the policy is the reference and the divergence is 0, so that a penalty which is never applied looks like one
that is. The policy is moved away first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.probes.gradient import gradient_of, norm_of, step_along
from plumbob.trainer.doctor.rehearsal import rehearse
from plumbob.trainer.doctor.subject import Subject, undone
from plumbob.trainer.training.expected_advantages import expected_advantages

CHECK = "the KL divergence is subtracted from each rollout's reward"
STEPS = (1e-3, 4e-3, 1.6e-2, 6.4e-2)
"""Lengths of the step away from the reference policy, relative to the norm of the weights: the first that shows is taken."""
SHOWS = 10.0
"""How many times the limit the penalty must change an advantage to be seen."""


def kl_sums(subject: Subject, rows: Sequence[Sample], *, apart: bool = False) -> list[float]:
    """The KL divergence of each row to the reference policy, summed over its tokens, in nats.

    By the formulas in the help of --kl-estimator, in float64. `apart`: each row is scored by itself, which rounds otherwise.
    """
    run, temperature = subject.run, subject.run.config.temperature
    tokens = 1 if apart else run.state.microbatch_tokens
    sides = [run.policy.score_rows(list(rows), temperature, tokens, reference=r) for r in (False, True)]
    found = []
    for own, reference in zip(*sides, strict=True):
        ratio = own.cpu().double() - reference.cpu().double()
        estimates = {"k1": ratio, "k2": ratio**2 / 2, "k3": torch.expm1(-ratio) + ratio}
        found.append(estimates[run.objective.kl_estimator].sum().item())
    return found


def subtracted(subject: Subject, rows: Sequence[Sample], rewards: Sequence[float]) -> Finding:
    """Rehearse a training step with a policy that was moved away from the reference, and compare its advantages.

    `rows`: whole groups with a signal; `rewards`: of each row, from its trace.
    """
    run, settings = subject.run, subject.run.config.advantages()
    push = gradient_of(subject, rows, [1.0] * len(rows))
    if not 0 < norm_of(push) < math.inf:
        return Finding(CHECK, "unsure", "the policy cannot be moved away from the reference policy")
    plain = expected_advantages(rows, rewards, settings)
    for size in STEPS:
        with undone(run):
            step_along(subject, push, size)
            sums, again = kl_sums(subject, rows), kl_sums(subject, rows, apart=True)
            wanted = expected_advantages(rows, rewards, settings, sums)
            rounding = _apart(wanted, expected_advantages(rows, rewards, settings, again))
            limit = thresholds.ADVANTAGE_OF_TOKEN * max(1.0, *map(abs, wanted)) + 3 * rounding
            if not _apart(wanted, plain) > SHOWS * limit:
                continue
            trained = {id(t.row): t.advantages[0].item() for t in rehearse(subject, rows) if t.update == 0}
        return _judged(subject, rows, rewards, sums, trained, limit)
    return Finding(CHECK, "unsure", "no step away from the reference policy changes an advantage enough to be seen")


def _judged(
    subject: Subject,
    rows: Sequence[Sample],
    rewards: Sequence[float],
    sums: Sequence[float],
    trained: dict[int, float],
    limit: float,
) -> Finding:
    """`trained`: advantage in the loss, by the id of its row."""
    config = subject.run.config
    places = [i for i, row in enumerate(rows) if id(row) in trained]
    if not places:
        return Finding(CHECK, "unsure", "the training step's loss does not show which token is whose")
    lengths = [max(row.num_sampled, 1) for row in rows]
    kinds = {
        "": sums,
        "they are those without any KL divergence": [0.0] * len(sums),
        "they are those with the KL divergence added to rewards": [-kl for kl in sums],
        "they are those with the mean over a rollout's tokens in place of the sum": [
            kl / n for kl, n in zip(sums, lengths, strict=True)
        ],
    }
    got = [trained[id(rows[i])] for i in places]
    fits = {}
    for name, kls in kinds.items():
        values = expected_advantages(rows, rewards, config.advantages(), kls)
        fits[name] = _apart(got, [values[i] for i in places])
    evidence = (
        f"--kl-beta {config.kl_beta:g}, after a step away from the reference policy, whose KL divergence is then up to "
        f"{max(map(abs, sums)):.2g} nats per rollout: advantages of {len(places)} rollouts, computed again, differ by up to "
        f"{fits['']:.2g} (limit {limit:.2g})"
    )
    if fits[""] <= limit:
        return Finding(CHECK, "pass", evidence)
    best = min(fits, key=fits.__getitem__)
    fitting = best if best and fits[best] <= limit else ""
    cause = "kl-backwards" if "added" in fitting else "advantages-wrong"
    return Finding(CHECK, "fail", evidence + (f"; {fitting}" if fitting else ""), cause)


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0)
