"""Does the gradient make rewarded tokens likelier, however the step is cut, and does clipping leave anything of it?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.subject import Subject, undone

ROWS = 8
SMALL_STEP = 1e-3
"""Of the weights' norm: small enough for the first order."""
INVARIANCE = {False: 1e-3, True: 0.05}
"""Relative, by --bf16."""
DROPPED = 0.3
"""How far dropout may take two gradients of the same rows apart, relative to them: rates of 0.05, 0.1 and 0.5 measure 0.12,
0.18 and 0.5."""
EPSILON = 1e-8
"""Adam's, where the optimizer does not say."""

Gradient = dict[str, torch.Tensor]


def probe(subject: Subject) -> Iterator[Finding]:
    rows, advantages = rows_with_advantage(subject)
    noise = _apart(*(gradient_of(subject, rows, advantages) for _ in range(2)))
    yield _repeated(subject, noise)
    for sign in (1.0, -1.0):
        finding = _direction(subject, rows[:ROWS], sign)
        yield finding
        if finding.cause == "no-gradient":
            return  # there is nothing to ask the rest of
    yield _invariance(subject, rows, advantages, noise)
    yield _clipping(subject, rows, advantages)
    if subject.run.objective.kl_beta > 0:
        yield _kl(subject, rows[:ROWS])


def rows_with_advantage(subject: Subject) -> tuple[list[Sample], list[float]]:
    """The run's own, or if no group has any, its rows with advantages of +1 and -1 in turn."""
    rows, advantages = subject.trained_rows()
    if not rows:
        rows = [s for s in subject.drawn.samples if s.num_sampled][:ROWS]
        advantages = [1.0 - 2.0 * (i % 2) for i in range(len(rows))]
    return rows, advantages


def gradient_of(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float]) -> Gradient:
    """By the name of each trained tensor that has one, in main memory. Nothing is left behind."""
    sharding = subject.run.policy.sharding
    subject.gradient(rows, advantages)
    found = {name: sharding.local_gradient(p) for name, p in subject.run.policy.trainable.items()}
    kept = {name: g.detach().to("cpu", torch.float32, copy=True) for name, g in found.items() if g is not None}
    sharding.zero_grad()
    return kept


def norm_of(gradient: Gradient) -> float:
    return math.sqrt(math.fsum(g.double().square().sum().item() for g in gradient.values()))


@torch.no_grad()
def step_along(subject: Subject, gradient: Gradient, size: float) -> None:
    """Go against the gradient, by `size` times the norm of the weights."""
    policy, norm = subject.run.policy, norm_of(gradient)
    weights = math.sqrt(math.fsum(p.detach().double().square().sum().item() for p in policy.trainable.values()))
    for name, parameter in policy.trainable.items():
        if name in gradient:
            local = policy.sharding.local(parameter)
            local.add_(gradient[name].to(local), alpha=-size * weights / norm)
    policy.sharding.changed()


def _direction(subject: Subject, rows: Sequence[Sample], sign: float) -> Finding:
    word = "raises" if sign > 0 else "lowers"
    check = f"an advantage of {sign:+g} {word} log-probabilities"
    gradient = gradient_of(subject, rows, [sign] * len(rows))
    norm = norm_of(gradient)
    if not norm > 0 or not math.isfinite(norm):
        return Finding(check, "fail", f"gradient norm {norm:g} over {len(gradient)} tensors", "no-gradient")
    before = _mean_logprob(subject, rows)
    change = 0.0
    for size in (SMALL_STEP, SMALL_STEP / 10):
        with undone(subject.run):
            step_along(subject, gradient, size)
            change = _mean_logprob(subject, rows) - before
        if change * sign > 0:
            break
    evidence = f"a small step moves {len(rows)} rows by {change:+.2g} nats per token; gradient norm {norm:.2g}"
    bad = not change * sign > 0
    return Finding(check, "fail" if bad else "pass", evidence, "gradient-backwards" if bad else None)


def _mean_logprob(subject: Subject, rows: Sequence[Sample]) -> float:
    """Over tokens, as the loss type weighs them: it may be that what one weighing raises, another lowers."""
    weights = subject.minibatch(rows, [1.0] * len(rows)).weights
    sums = [scores.double().sum().item() for scores in subject.score(rows)]
    total = math.fsum(w * row.num_sampled for w, row in zip(weights, rows, strict=True))
    return math.fsum(w * s for w, s in zip(weights, sums, strict=True)) / total


def _invariance(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float], noise: float) -> Finding:
    run, tokens = subject.run, subject.run.pass_tokens
    found = []
    try:
        for size in (sum(len(r.token_ids) for r in rows), max(len(r.token_ids) for r in rows)):
            run.pass_tokens = size
            found.append(gradient_of(subject, rows, advantages))
    finally:
        run.pass_tokens = tokens
    difference = _apart(*found)
    evidence = f"relative difference {difference:.2g} between one pass of {len(rows)} rows and many"
    bad = not difference <= max(INVARIANCE[run.config.bf16], 3 * noise)
    return Finding(
        "the gradient does not depend on how a step is cut",
        "fail" if bad else "pass",
        evidence,
        "normaliser-depends-on-passes" if bad else None,
    )


def _repeated(subject: Subject, noise: float) -> Finding:
    """`noise`: how far two gradients of the same rows are apart."""
    check, dropout = "the gradient is the same when it is taken again", subject.run.config.lora_dropout
    evidence = f"relative difference {noise:.2g}" + (f" with --lora-dropout {dropout:g}" if dropout else "")
    if noise <= INVARIANCE[subject.run.config.bf16]:
        return Finding(check, "pass", evidence)
    if dropout and noise > DROPPED:
        return Finding(check, "fail", evidence, "dropout-in-training")
    return Finding(check, "unsure", evidence if dropout else f"{evidence}: something in the model draws random numbers")


def _apart(a: Gradient, b: Gradient) -> float:
    """The norm of their difference, relative to the first's."""
    return norm_of({name: a[name] - b[name] for name in a}) / norm_of(a) if norm_of(a) else 0.0


def _clipping(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float]) -> Finding:
    """Adam divides by the gradient's size plus epsilon: clipping leaves it alone until it comes near epsilon."""
    gradient = gradient_of(subject, rows, advantages)
    norm, limit = norm_of(gradient), subject.run.config.max_grad_norm
    entries = sum(int((g != 0).sum()) for g in gradient.values())
    factor = min(1.0, limit / norm) if limit else 1.0
    size = norm / math.sqrt(max(entries, 1))
    epsilon = subject.run.optimizer.param_groups[0].get("eps", EPSILON)
    evidence = (
        f"norm {norm:.2g}, clipped to {norm * factor:.2g}: {size * factor:.2g} per entry against "
        f"the optimizer's epsilon {epsilon:g}"
    )
    left = size * factor / epsilon
    bad = left < 2 and factor < 1
    verdict = "fail" if bad else "unsure" if left < 10 else "pass"
    return Finding("clipping leaves a gradient", verdict, evidence, "gradient-clipped-to-nothing" if bad else None)


def _kl(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """Moved away from the reference and trained by the KL term alone, the policy must come back."""
    run, check = subject.run, "the KL term pulls towards the reference"
    reference = run.policy.reference_logprobs(rows, run.config.temperature).cpu()

    def divergence() -> float:
        return 0.5 * (torch.cat(subject.score(rows)) - reference).square().mean().item()

    with undone(run):
        push = gradient_of(subject, rows, [1.0] * len(rows))
        step_along(subject, push, 10 * SMALL_STEP)
        away = divergence()
        pull = gradient_of(subject, rows, [0.0] * len(rows))
        if not norm_of(pull) > 0:
            return Finding(check, "fail", "its gradient is 0 away from the reference", "kl-backwards")
        step_along(subject, pull, SMALL_STEP)
        back = divergence()
    estimator = run.objective.kl_estimator
    evidence = f"with {estimator}, {away:.2g} nats per token away, a small step leads to {back:.2g}"
    if estimator == "k1":
        return Finding(check, "unsure", f"{evidence}; k1 in the loss has a gradient of zero mean: use k2")
    if back >= away:
        return Finding(check, "fail", evidence, "kl-backwards")
    if estimator == "k3":
        return Finding(check, "unsure", f"{evidence}; k3's gradient is that of the other divergence: use k2")
    return Finding(check, "pass", evidence)
