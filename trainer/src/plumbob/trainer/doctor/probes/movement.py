"""How far does one optimizer step move weights and policy, and do a few of them learn one group?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes.gradient import gradient_of, norm_of, rows_with_advantage
from plumbob.trainer.doctor.subject import Subject, full_rate, undone

MOVED_SHARE = 0.5
TOO_FAR = 0.03
"""Nats per token in one update, on rollouts that it was not computed from. The bundled policies at their own rates measure
up to 0.001, at ten times them 0.025 to 0.05, at a hundred times 2."""
TOO_NEAR = 1e-3
"""Nats per token after a hundred steps that all go one way."""
UPDATES = 4


def probe(subject: Subject) -> Iterator[Finding]:
    rows, advantages = rows_with_advantage(subject)
    run = subject.run
    with undone(run) as before:
        full_rate(run)
        others = _other_rows(subject, rows)
        old, old_others = torch.cat(subject.score(rows)), torch.cat(subject.score(others))
        push = norm_of(gradient_of(subject, rows, advantages))
        subject.gradient(rows, advantages)
        touched = _touched(subject)
        run.policy.sharding.update()
        near = divergence(old, torch.cat(subject.score(rows)))
        far = divergence(old_others, torch.cat(subject.score(others)))
        yield _weights(subject, before, touched)
        yield _rate(subject, near, far)
        if run.objective.kl_beta > 0:
            yield _kl_pull(subject, rows, push, near)
    yield _overfits(subject, rows, advantages)


def _rate_of(subject: Subject) -> float:
    group = subject.run.optimizer.param_groups[0]
    return float(group.get("initial_lr", group["lr"]))


def _touched(subject: Subject) -> dict[str, torch.Tensor]:
    """Which entries of each trained tensor have a gradient."""
    sharding = subject.run.policy.sharding
    found = {name: sharding.local_gradient(p) for name, p in subject.run.policy.trainable.items()}
    return {name: (g != 0).cpu() for name, g in found.items() if g is not None}


def _weights(subject: Subject, before: dict[str, torch.Tensor], touched: dict[str, torch.Tensor]) -> Finding:
    policy = subject.run.policy
    moved = entries = 0
    squares = total = 0.0
    coarse = True
    for name, parameter in policy.trainable.items():
        local = policy.sharding.local(parameter).detach().cpu()
        if name not in touched:
            continue
        moved += int(((local != before[name]) & touched[name]).sum())
        entries += int(touched[name].sum())
        squares += (local.double() - before[name].double()).square().sum().item()
        total += before[name].double().square().sum().item()
        coarse &= bool(torch.equal(before[name].float(), before[name].bfloat16().float()))
    share = moved / max(entries, 1)
    kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in policy.trainable.values()}))
    evidence = (
        f"{share:.1%} of {entries:,} entries with a gradient change in {kinds}; relative movement "
        f"{math.sqrt(squares / total) if total else math.inf:.2g} at rate {_rate_of(subject):.2g}"
    )
    check = "one update moves the weights in their own precision"
    if share >= MOVED_SHARE:
        return Finding(check, "pass", evidence)
    if "bfloat16" in kinds or "float16" in kinds or (coarse and total):
        return Finding(check, "fail", evidence, "weights-in-bf16")
    return Finding(check, "fail", evidence, "learning-rate-too-low" if moved else "optimizer-moves-nothing")


def _other_rows(subject: Subject, rows: Sequence[Sample]) -> list[Sample]:
    """Rollouts of other tasks; of the same if there are no others."""
    groups = {row.group for row in rows}
    others = [s for s in subject.drawn.samples if s.group not in groups and s.num_sampled][: len(rows)]
    return others or list(rows)


def divergence(old: torch.Tensor, new: torch.Tensor) -> float:
    """Half the mean square of the log-ratio, in nats per token: the KL divergence to second order (k2).

    No token counts for more than 2 nats: a rare one that was drawn and rewarded may become a hundred times as likely.
    """
    square = (new - old).square().clamp(max=4.0).mean().item() / 2
    return square if math.isfinite(square) else math.inf


def _rate(subject: Subject, near: float, far: float) -> Finding:
    """`near`: the divergence on the rows of the update; `far`: on others."""
    config = subject.run.config
    low, high = 100 * near, 100**2 * near
    evidence = (
        f"one update at rate {_rate_of(subject):.2g}{' (LoRA)' if config.peft else ''} moves the policy by {near:.2g} nats "
        f"per token, and by {far:.2g} on other tasks; a hundred of them by {low:.2g} if they go anyhow, {high:.2g} if all go "
        "one way"
    )
    check = "updates move the policy neither too little nor too much"
    if not far <= TOO_FAR:
        return Finding(check, "fail", evidence, "learning-rate-too-high")
    if high < TOO_NEAR:
        return Finding(check, "fail", evidence, "learning-rate-too-low")
    return Finding(check, "unsure" if far > TOO_FAR / 3 or high < 10 * TOO_NEAR else "pass", evidence)


def _kl_pull(subject: Subject, rows: Sequence[Sample], push: float, step_kl: float) -> Finding:
    """After one step, the KL term's gradient against the reward's: it grows with the distance, the reward's does not."""
    pull = norm_of(gradient_of(subject, rows, [0.0] * len(rows)))
    ratio = pull / push if push else math.inf
    evidence = (
        f"after one update the KL term (--kl-beta {subject.run.config.kl_beta:g}) pulls back with {ratio:.2g} times the "
        f"reward's gradient, so the policy settles near {step_kl / ratio**2 if ratio else math.inf:.2g} nats per token"
    )
    bad = ratio > 1
    return Finding(
        "the KL term leaves room to learn",
        "fail" if bad else "unsure" if ratio > 0.3 else "pass",
        evidence,
        "kl-too-large" if bad else None,
    )


def _overfits(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float]) -> Finding:
    """A few updates on the group whose rewards differ most."""
    run = subject.run
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.group, []).append(i)
    chosen = max(groups.values(), key=lambda members: sum(abs(advantages[i]) for i in members))
    mine, values = [rows[i] for i in chosen], [advantages[i] for i in chosen]
    before = subject.score(mine)
    with undone(run):
        full_rate(run)
        for _ in range(UPDATES):
            subject.gradient(mine, values)
            run.policy.sharding.update()
            run.policy.sharding.zero_grad()
        after = subject.score(mine)
    changes = [(b - a).sum().item() for a, b in zip(before, after, strict=True)]
    good = [c for c, v in zip(changes, values, strict=True) if v > 0]
    bad = [c for c, v in zip(changes, values, strict=True) if v < 0]
    margin = sum(c * v for c, v in zip(changes, values, strict=True)) / sum(map(abs, values))
    evidence = (
        f"{UPDATES} updates on one group move its {len(good)} better rollouts by {_mean(good):+.3g} nats each and its "
        f"{len(bad)} worse ones by {_mean(bad):+.3g}"
    )
    failed = not margin > 0
    return Finding(
        "a few updates on one group favour its better rollouts",
        "fail" if failed else "pass",
        evidence,
        "does-not-overfit" if failed else None,
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
