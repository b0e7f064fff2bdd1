"""Does the gradient make rewarded tokens more likely, independently of microbatches, and does clipping leave any?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.layers import layers_without_gradient
from plumbob.trainer.doctor.left_out import NO_GRADIENT, without_gradient
from plumbob.trainer.doctor.subject import Subject, undone

ORDER = 80

ROWS = 8
"""Number of rows on which the direction of the gradient is checked."""
SMALL_STEPS = tuple(4.0**-k for k in range(5, 13))
"""Lengths of small steps, relative to the norm of the weights, from 1e-3 to 6e-8, longest first."""
KL_STEP = 1e-3
"""Length of a step along the KL term."""
LINEAR = 0.3
"""Largest relative difference of the slopes of two steps, one a quarter of the other, that count as one slope."""
FIRST_ORDER, ROUNDED_AWAY = 3.0, 1e-8
"""A change of log-probabilities by so many times what a step along their own gradient makes is rounding, if it is below so many
nats per token."""
BACKWARDS = -0.7
"""A step along a gradient that points backwards changes log-probabilities by at least so many times what its norm says."""
NO_SIGNAL = "no group has a signal, so there is no advantage to examine it with"
EPSILON = 1e-8
"""Adam's epsilon, for an optimizer that has none in its parameter groups."""

Gradient = dict[str, torch.Tensor]
"""Trained tensor -> its gradient, in main memory and float32."""


@dataclass(frozen=True)
class Trained:
    """Rows, and the advantages that their gradient is computed with."""

    rows: list[Sample]
    advantages: list[float]
    real: bool
    """Whether these are advantages of the run; if no group has a signal, they are all 1, which is no training."""


def probe(subject: Subject) -> Iterator[Finding]:
    found = rows_with_advantage(subject)
    rows, advantages = found.rows, found.advantages
    if not rows:
        yield Finding("rollouts with an advantage give a gradient", "unsure", "no rollout has a sampled token")
        return
    first, again = (gradient_of(subject, rows, advantages) for _ in range(2))
    if bad := [name for name, g in first.items() if not bool(torch.isfinite(g).all())]:
        evidence = f"{len(bad)} of {len(first)} gradients hold NaN or infinite numbers, such as that of {bad[0]}"
        yield Finding("gradients are finite", "fail", evidence, "gradient-not-finite")
        return
    noise = _apart(first, again)
    yield (cleared := _cleared(subject))
    if cleared.verdict == "fail":
        return  # every gradient of a later check would be a sum
    yield _repeated(subject, noise)
    if (cut := _layers(subject, first)) is not None:
        yield cut
    # A gradient that depends on microbatches may be that of other rows, and then shows no direction.
    yield _invariance(subject, rows, advantages, noise)
    for sign in (1.0, -1.0):
        finding = _direction(subject, rows[:ROWS], sign)
        yield finding
        if finding.cause in NO_GRADIENT or finding.verdict == "unsure":
            return  # the other checks need a gradient
    if found.real:
        yield _clipping(subject, rows, advantages)
    else:
        yield Finding("gradient clipping leaves a gradient", "unsure", NO_SIGNAL)
    if subject.run.objective.kl_beta > 0 and subject.run.objective.kl_estimator != "k1":  # the settings show that of k1
        yield _kl(subject, rows[:ROWS])


def _layers(subject: Subject, gradient: Gradient) -> Finding | None:
    """Does the gradient reach every layer? None if it reaches no layer, or none is trained: a later check says why."""
    names = list(subject.run.policy.trainable)
    missed, count = layers_without_gradient(names, gradient)
    if len(missed) == count:
        return None
    check = "the gradient reaches every trained layer"
    evidence = f"{count - len(missed)} of {count} layers with trained tensors have a gradient"
    if not missed:
        return Finding(check, "pass", evidence)
    evidence += f"; in {missed[0]} and {len(missed) - 1} more, no trained tensor has one"
    return Finding(check, "fail", evidence, "no-gradient")


def rows_with_advantage(subject: Subject) -> Trained:
    """Rows with their advantages; if no group has a signal, rows of the run with an advantage of 1 each."""
    rows, advantages = subject.trained_rows()
    if rows:
        return Trained(rows, advantages, True)
    rows = [s for s in subject.drawn.samples if s.num_sampled][:ROWS]
    return Trained(rows, [1.0] * len(rows), False)


def gradient_of(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float]) -> Gradient:
    """The gradient of one optimizer step on these rows. The gradients in the trained weights are cleared afterwards."""
    subject.gradient(rows, advantages)
    return take_gradient(subject)


def gradient_left(subject: Subject) -> Gradient:
    """The gradient that a backward pass has left in the trained weights, as it lies there: the tensors are not copied."""
    sharding = subject.run.policy.sharding
    found = {name: sharding.local_gradient(p) for name, p in subject.run.policy.trainable.items()}
    return {name: g for name, g in found.items() if g is not None}


def take_gradient(subject: Subject) -> Gradient:
    """The gradient that a backward pass has left in the trained weights, which is cleared there."""
    left = gradient_left(subject).items()
    kept = {name: g.detach().to("cpu", torch.float32, copy=True) for name, g in left}
    subject.run.policy.sharding.zero_grad()
    return kept


def norm_of(gradient: Gradient) -> float:
    """L2 norm over all tensors."""
    return math.sqrt(math.fsum(g.double().square().sum().item() for g in gradient.values()))


@torch.no_grad()
def step_along(subject: Subject, gradient: Gradient, size: float) -> None:
    """Move the trained weights against the gradient, by `size` times the norm of the weights."""
    policy, norm = subject.run.policy, norm_of(gradient)
    weights = math.sqrt(math.fsum(p.detach().double().square().sum().item() for p in policy.trainable.values()))
    for name, parameter in policy.trainable.items():
        if name in gradient:
            local = policy.sharding.local(parameter)
            local.add_(gradient[name].to(local), alpha=-size * weights / norm)
    policy.sharding.changed()


def _direction(subject: Subject, rows: Sequence[Sample], sign: float) -> Finding:
    """A step along the gradient with an advantage of `sign` on every row must move log-probabilities in that direction.

    The change to first order is known: minus the inner product of the step and the gradient of the loss. It is measured
    by the difference of a step forwards and a step backwards, which has no term of second order, and the step is
    shortened until the measured change is in proportion to its length. A change that is not, or that rounding hides,
    shows no direction.
    """
    word = "raises" if sign > 0 else "lowers"
    check = f"an advantage of {sign:+g} {word} log-probabilities"
    gradient = gradient_of(subject, rows, [sign] * len(rows))
    norm = norm_of(gradient)
    evidence = f"gradient norm {norm:g} over {len(gradient)} tensors"
    if norm == 0:
        return without_gradient(subject, check, rows, evidence)
    if not math.isfinite(norm):
        return Finding(check, "fail", evidence, "gradient-not-finite")
    wanted, slopes = _expected_slope(subject, rows, norm), []
    for size in SMALL_STEPS:
        slopes.append(_slope(subject, rows, gradient, size))
        if len(slopes) > 1 and abs(slopes[-1] - slopes[-2]) < LINEAR * abs(slopes[-1]):
            break
    else:
        evidence = (
            f"the change is in proportion to no step from {SMALL_STEPS[0]:g} to {SMALL_STEPS[-1]:g} of the weights"
        )
        return Finding(check, "unsure", f"{evidence}, as rounding makes it; gradient norm {norm:.2g}")
    slope = slopes[-1]
    change = slope * SMALL_STEPS[len(slopes) - 1]
    if abs(slope) > FIRST_ORDER * abs(wanted) and abs(change) < ROUNDED_AWAY:
        evidence = (
            f"a step changes rollouts by {change:+.2g} nats per token, which is rounding; gradient norm {norm:.2g}"
        )
        return Finding(check, "unsure", evidence)
    along = slope * sign / wanted
    evidence = (
        f"a step of {SMALL_STEPS[len(slopes) - 1]:.0e} of the weights changes {len(rows)} rollouts by {change:+.2g} nats per "
        f"token, {along:+.2f} times what the gradient's norm of {norm:.2g} says"
    )
    # A gradient with its sign turned round is as long as the right one; anything else has another reason.
    cause = None if along > 0 else "gradient-backwards" if along < BACKWARDS else "loss-differs-from-settings"
    return Finding.of(check, (cause, evidence))


def _slope(subject: Subject, rows: Sequence[Sample], gradient: Gradient, size: float) -> float:
    """Change of the mean log-probability per step length: a step forwards minus one backwards, by their distance."""
    ends = []
    for way in (1.0, -1.0):
        with undone(subject.run):
            step_along(subject, gradient, way * size)
            with subject.run.policy.in_float32():
                ends.append(_mean_logprob(subject, rows))
    return (ends[0] - ends[1]) / (2 * size)


def _expected_slope(subject: Subject, rows: Sequence[Sample], norm: float) -> float:
    """The slope to first order if `norm` is that of the gradient of minus the weighted sum of log-probabilities."""
    weights = subject.minibatch(rows, [1.0] * len(rows)).weights
    total = math.fsum(w * row.num_sampled for w, row in zip(weights, rows, strict=True))
    trainable = subject.run.policy.trainable.values()
    return norm * math.sqrt(math.fsum(p.detach().double().square().sum().item() for p in trainable)) / total


def _mean_logprob(subject: Subject, rows: Sequence[Sample]) -> float:
    """Mean log-probability per token, weighted as by the loss type: weighted otherwise, it may change the other way."""
    weights = subject.minibatch(rows, [1.0] * len(rows)).weights
    sums = [scores.double().sum().item() for scores in subject.score(rows)]
    total = math.fsum(w * row.num_sampled for w, row in zip(weights, rows, strict=True))
    return math.fsum(w * s for w, s in zip(weights, sums, strict=True)) / total


def invariance(subject: Subject) -> Finding:
    """Does the gradient of the run's rows, computed again, depend on how they are divided into microbatches?"""
    found = rows_with_advantage(subject)
    first, again = (gradient_of(subject, found.rows, found.advantages) for _ in range(2))
    return _invariance(subject, found.rows, found.advantages, _apart(first, again))


def _invariance(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float], noise: float) -> Finding:
    """The gradient of one large microbatch must equal that of many small ones.

    `noise`: relative difference of two gradients of the same rows in the same microbatches.
    """
    run, tokens = subject.run, subject.run.state.microbatch_tokens
    found = []
    try:
        for size in (sum(len(r.token_ids) for r in rows), max(len(r.token_ids) for r in rows)):
            run.state.microbatch_tokens = size
            found.append(gradient_of(subject, rows, advantages))
    finally:
        run.state.microbatch_tokens = tokens
    difference = _apart(*found)
    evidence = f"relative difference {difference:.2g} between one microbatch of {len(rows)} rollouts and many"
    bad = not difference <= max(thresholds.GRADIENT_REPEATS[run.config.bf16], 3 * noise)
    return Finding(
        "the gradient does not depend on how a step is divided into microbatches",
        "fail" if bad else "pass",
        evidence,
        "normaliser-depends-on-microbatches" if bad else None,
    )


def _cleared(subject: Subject) -> Finding:
    """Is no gradient left after the step's own way to clear them? One must have been computed and cleared before."""
    check, policy = "gradients are cleared between steps", subject.run.policy
    found = {name: policy.sharding.local_gradient(p) for name, p in policy.trainable.items()}
    left = [name for name, gradient in found.items() if gradient is not None and bool((gradient != 0).any())]
    evidence = f"{len(left)} of {len(found)} trained tensors still have a gradient after it was cleared"
    if not left:
        return Finding(check, "pass", evidence)
    evidence += f", such as {left[0]}"
    for name in left:  # so that other probes are not misled
        policy.trainable[name].grad = None
    known = {id(tensor) for group in subject.run.optimizer.param_groups for tensor in group["params"]}
    missing = sum(id(policy.trainable[name]) not in known for name in left)
    if missing:
        evidence += f"; the optimizer has no entry for {missing} of these"
        return Finding(check, "fail", evidence, "optimizer-moves-nothing")
    return Finding(check, "fail", evidence, "gradients-not-cleared")


def _repeated(subject: Subject, noise: float) -> Finding:
    """`noise`: relative difference of two gradients of the same rows."""
    check, dropout = "the gradient is the same when it is computed again", subject.run.config.lora_dropout
    evidence = f"relative difference {noise:.2g}" + (f" with --lora-dropout {dropout:g}" if dropout else "")
    if noise <= thresholds.GRADIENT_REPEATS[subject.run.config.bf16]:
        return Finding(check, "pass", evidence)
    if dropout and noise > thresholds.DROPOUT_NOISE:
        return Finding(check, "fail", evidence, "dropout-in-training")
    return Finding(check, "unsure", evidence if dropout else f"{evidence}: something in the model uses random numbers")


def _apart(a: Gradient, b: Gradient) -> float:
    """Norm of the difference of two gradients, relative to the norm of the first; 0 if that is 0."""
    return norm_of({name: a[name] - b[name] for name in a}) / norm_of(a) if norm_of(a) else 0.0


def _clipping(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float]) -> Finding:
    """Does clipping leave a gradient that is larger than the optimizer's epsilon?

    Adam divides by the gradient's size plus epsilon, so clipping reduces updates only if the gradient comes near
    epsilon.
    """
    gradient = gradient_of(subject, rows, advantages)
    norm, limit = norm_of(gradient), subject.run.config.max_grad_norm
    entries = sum(int((g != 0).sum()) for g in gradient.values())
    factor = min(1.0, limit / norm) if limit else 1.0
    size = norm / math.sqrt(max(entries, 1))
    epsilon = subject.run.optimizer.param_groups[0].get("eps", EPSILON)
    evidence = (
        f"norm {norm:.2g}, clipped to {norm * factor:.2g}: {size * factor:.2g} per weight against "
        f"the optimizer's epsilon {epsilon:g}"
    )
    left = size * factor / epsilon
    bad = left < thresholds.EPSILONS_LEFT and factor < 1
    verdict = "fail" if bad else "unsure" if left < 5 * thresholds.EPSILONS_LEFT else "pass"
    return Finding(
        "gradient clipping leaves a gradient", verdict, evidence, "gradient-clipped-to-nothing" if bad else None
    )


def _kl(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """A policy that was moved away from the reference policy must move back if it is trained by the KL term alone."""
    run, check = subject.run, "the KL term pulls towards the reference policy"
    reference = run.policy.reference_logprobs(rows, run.config.temperature).cpu()

    def divergence() -> float:
        return 0.5 * (torch.cat(subject.score(rows)) - reference).square().mean().item()

    with undone(run):
        push = gradient_of(subject, rows, [1.0] * len(rows))
        step_along(subject, push, 10 * KL_STEP)
        away = divergence()
        pull = gradient_of(subject, rows, [0.0] * len(rows))
        if not norm_of(pull) > 0:
            return Finding(
                check, "fail", "the gradient of the KL term is 0 away from the reference policy", "kl-backwards"
            )
        step_along(subject, pull, KL_STEP)
        back = divergence()
    estimator = run.objective.kl_estimator
    evidence = (
        f"with estimator {estimator}, a step along the KL term changes the KL divergence from {away:.2g} to {back:.2g} "
        "nats per token"
    )
    if back >= away:
        return Finding(check, "fail", evidence, "kl-backwards")
    if estimator == "k3":
        return Finding(
            check,
            "unsure",
            f"{evidence}; the gradient of k3 is that of the reverse KL divergence: use --kl-estimator k2",
        )
    return Finding(check, "pass", evidence)
