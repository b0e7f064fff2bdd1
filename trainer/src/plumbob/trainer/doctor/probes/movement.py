"""How much does one optimizer step change the weights and the policy, and do a few steps learn one group?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.probes.gradient import (
    NO_SIGNAL,
    Gradient,
    gradient_left,
    gradient_of,
    norm_of,
    rows_with_advantage,
)
from plumbob.trainer.doctor.schedule import measured_rates
from plumbob.trainer.doctor.subject import Subject, full_rate, undone
from plumbob.trainer.doctor.weight_change import stretch
from plumbob.trainer.evaluation.statistics import t_95
from plumbob.trainer.watch.history import History
from plumbob.trainer.watch.ratio_rules import ROOM, clip_room
from plumbob.trainer.watch.settings_rules import REACHES_PEAK, warm_up
from plumbob.trainer.watch.update_rules import decay, projected_steps

ORDER = 90

RATE = "updates change the policy neither too little nor too much"
PART = 1 / 8
"""Part of an update after which the KL term's gradient is measured."""
SCATTERED = 0.5
"""Share of the weights that may move by another rate than the median, where the optimizer has another rate."""
OVERFITS = "a few updates on one group favour its better rollouts"
OTHERS = 32
"""Largest number of rows of other groups on which an update's change of the policy is measured."""
UPDATES = 4
"""Number of updates on one group."""


def probe(subject: Subject) -> Iterator[Finding]:
    found, run = rows_with_advantage(subject), subject.run
    if run.config.weight_decay:
        yield _decay(subject)
    if (reached := warm_up(run.config)) is not None:  # with --max-steps -1, the number of steps is known only now
        yield Finding.of(REACHES_PEAK, reached)
    rows, advantages = found.rows, found.advantages
    if not found.real:
        for check in (RATE, OVERFITS):
            yield Finding(check, "unsure", NO_SIGNAL)
        return
    with undone(run) as before:
        full_rate(run)
        others = _other_rows(subject, rows)
        # In bfloat16, rounding alone would seem to change the policy by 1e-4 nats per token.
        with run.policy.in_float32():
            old, old_others = subject.score(rows), subject.score(others)
        subject.gradient(rows, advantages)
        left = gradient_left(subject)
        push, touched = norm_of(left), {name: (g != 0).cpu() for name, g in left.items()}
        computed = _some_entries(left)
        run.policy.sharding.update()
        used = norm_of(left := gradient_left(subject))
        seen = _some_entries(left)
        with run.policy.in_float32():
            near = divergence(rows, old, subject.score(rows))
            far = divergence(others, old_others, subject.score(others))
        if run.world.size == 1:
            turn = _cosine(computed, seen) if len(computed) == len(seen) else math.nan
            gone = int(((computed != 0) & (seen == 0)).sum()) if len(computed) == len(seen) else 0
            yield _clipped_once(subject, push, used, turn, gone / max(int((computed != 0).sum()), 1))
        weights, little = _weights(subject, before, touched)
        with undone(run):
            schedule = _schedule(subject)
        # A rate that is hidden moves weights by as little as an epsilon that outweighs the gradient.
        yield from (schedule, weights) if little else (weights, schedule)
        yield _rate(subject, near, far)
        if run.objective.kl_beta > 0:
            with undone(run):
                stretch(run.policy.sharding, before, PART)
                yield _kl_pull(subject, rows, push, near.mean * PART**2)
    if (room := clip_room(run.config, near.mean)) is not None:  # the watch has the same rule
        yield Finding.of(ROOM, room)
    yield _overfits(subject, rows, advantages)


def _decay(subject: Subject) -> Finding:
    """What does weight decay leave of the weights at the end of the run? The watch has the same rule."""
    return Finding.of(
        "weight decay leaves the weights", decay(History(subject.run.config)) or (None, "the run has no steps")
    )


def _rate_of(subject: Subject) -> float:
    """Peak learning rate of the schedule."""
    group = subject.run.optimizer.param_groups[0]
    return float(group.get("initial_lr", group["lr"]))


ENTRIES = 4096
"""Most entries of each tensor's gradient that are kept, to compare it with what the optimizer sees."""


def _some_entries(gradient: Gradient) -> torch.Tensor:
    """Evenly spread entries of all tensors' gradients, one after the other: [N]."""
    parts = [g.detach().flatten() for _, g in sorted(gradient.items())]
    return torch.cat(
        [torch.empty(0), *(g[:: len(g) // ENTRIES + 1].to("cpu", torch.float64, copy=True) for g in parts)]
    )


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two vectors, however short they are; NaN if one of them is 0."""
    return (a / a.norm() @ (b / b.norm())).item()


def _clipped_once(subject: Subject, computed: float, used: float, turn: float, gone: float) -> Finding:
    """Does the optimizer get the gradient that was computed, clipped to --max-grad-norm?

    `computed`, `used`: norms of the gradient before the update, and where the optimizer sees it. `turn`: cosine of the two;
    NaN if it is not known. `gone`: share of the entries other than 0 that are 0 where the optimizer sees them.
    """
    limit = subject.run.config.max_grad_norm
    wanted = min(computed, limit) if limit else computed
    check = "the optimizer gets the gradient that was computed"
    evidence = f"the gradient's norm is {computed:.2g} before the update, and {used:.2g} where the optimizer sees it"
    if limit:
        evidence += f"; --max-grad-norm {limit:g} leaves {wanted:.2g}"
    if used > 0 and gone > thresholds.GRADIENT_GONE:
        evidence += f"; {gone:.0%} of its entries are 0 there"
        return Finding(check, "fail", evidence, "no-gradient")
    if used > 0 and turn < thresholds.SAME_DIRECTION:
        evidence += f"; the cosine of the two is {turn:.2g}, and clipping leaves the direction"
        return Finding(
            check, "fail", evidence, "gradient-backwards" if turn < -thresholds.OPPOSITE else "does-not-overfit"
        )
    bad = 0 < used < thresholds.GRADIENT_LEFT * wanted
    return Finding(check, "fail" if bad else "pass", evidence, "gradient-clipped-to-nothing" if bad else None)


def _weights(
    subject: Subject, before: dict[str, torch.Tensor], touched: dict[str, torch.Tensor]
) -> tuple[Finding, bool]:
    """Does an update change most weights that have a gradient? And is it that weights move, but by too little?

    `before`: copies of the weights before the update. `touched`: trained tensor -> mask of its entries with a gradient.
    """
    policy = subject.run.policy
    moved = entries = 0
    still: list[str] = []
    squares = total = way = 0.0
    coarse = True
    for name, parameter in policy.trainable.items():
        local = policy.sharding.local(parameter).detach().cpu()
        if name not in touched:
            continue
        changed = int(((local != before[name]) & touched[name]).sum())
        # Rounding keeps weights still that are far larger than the learning rate; that is another cause.
        could = _rate_of(subject) > 10 * torch.finfo(local.dtype).eps * before[name].float().abs().mean().item()
        if could and touched[name].any() and not changed:
            still.append(name)
        moved += changed
        entries += int(touched[name].sum())
        change = local.double() - before[name].double()
        way += change[touched[name]].abs().sum().item()
        squares += change.square().sum().item()
        total += before[name].double().square().sum().item()
        coarse &= bool(torch.equal(before[name].float(), before[name].bfloat16().float()))
    share = moved / max(entries, 1)
    kinds = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in policy.trainable.values()}))
    evidence = (
        f"the update changes {share:.1%} of {entries:,} weights with a gradient, stored in {kinds}; relative change "
        f"{math.sqrt(squares / total) if total else math.inf:.2g} at learning rate {_rate_of(subject):.2g}"
    )
    check = "one update changes the weights in their own precision"
    full = sum(bool(mask.any()) for mask in touched.values())
    if moved and not coarse and len(still) > thresholds.STILL_TENSORS * full:
        evidence += f"; {len(still)} of {full} tensors with a gradient do not move at all, such as {still[0]}"
        return Finding(check, "fail", evidence, "optimizer-moves-nothing"), False
    step = way / max(entries, 1) / _rate_of(subject) if _rate_of(subject) else math.inf
    if share >= thresholds.MOVED_SHARE:
        if step >= thresholds.STEP_OF_RATE:
            return Finding(check, "pass", evidence), False
        evidence += f"; they move by {step:.2g} of that rate, where Adam's first update moves each by nearly all of it"
        evidence += ": its epsilon outweighs the gradient"
        return Finding(check, "fail", evidence, "optimizer-moves-nothing"), True
    if "bfloat16" in kinds or "float16" in kinds or (coarse and total):
        return Finding(check, "fail", evidence, "weights-in-bf16"), False
    cause = "learning-rate-too-low" if moved else "optimizer-moves-nothing"
    return Finding(check, "fail", evidence, cause), bool(moved)


def _schedule(subject: Subject) -> Finding:
    """Does the optimizer use the learning rates of the settings, over the whole run? The gradient must be there."""
    check, config = "the optimizer uses the learning rate of the settings", subject.run.config
    rates = list(measured_rates(subject))
    settings = f"--lr-scheduler-type {config.lr_scheduler_type} --warmup-steps {config.warmup_steps}"
    if not rates:
        return Finding(
            check, "unsure", f"{settings}: the updates are too small compared with the weights to be measured"
        )
    off = [(abs(math.log(m.rate / m.wanted)) if m.rate > 0 else math.inf) for m in rates]
    worst = max(off)
    at = rates[off.index(worst)]
    evidence = (
        f"{settings}: of {len(rates)} simulated steps from 1 to {rates[-1].step + 1}, step {at.step + 1} is furthest from it: "
        f"the weights move by a rate of {at.rate:.3g} in place of {at.wanted:.3g}"
    )
    if worst <= thresholds.RATE_APART:
        return Finding(check, "pass", evidence)
    if at.rate and at.scattered > SCATTERED:
        evidence += (
            f"; {at.scattered:.0%} of them move by another rate than that, so that it is no matter of the rate alone"
        )
        return Finding(check, "fail", evidence, "optimizer-moves-nothing")
    return Finding(check, "fail", evidence, "schedule-hides-rate")


def _other_rows(subject: Subject, rows: Sequence[Sample]) -> list[Sample]:
    """Rows of other groups than those of `rows`; `rows` themselves if there are no others."""
    groups = {row.group for row in rows}
    others = [s for s in subject.drawn.samples if s.group not in groups and s.num_sampled]
    return [others[i] for i in spread(len(others), OTHERS)] or list(rows)


@dataclass(frozen=True)
class Divergence:
    """A KL divergence in nats per token, with the 95% interval of its mean over tasks."""

    mean: float
    low: float
    high: float


def divergence(rows: Sequence[Sample], old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> Divergence:
    """KL divergence to second order (k2): half the mean square of the log ratios, from each row's [n] and [n].

    A token counts for at most 2 nats, because a rare token that was sampled and rewarded may become a hundred times as
    likely. Rollouts of one task change alike, so groups are the independent values of the interval (rows, if there is one
    group), which is that of a ratio of sums. It is infinite if a log-probability is no number.
    """
    alone = len({row.group for row in rows}) == 1
    sums: dict[str, tuple[float, int]] = {}
    for i, (row, a, b) in enumerate(zip(rows, old, new, strict=True)):
        name = str(i) if alone else row.group
        square, count = sums.get(name, (0.0, 0))
        sums[name] = square + (b - a).double().square().clamp(max=4.0).sum().item() / 2, count + len(a)
    total, tokens, n = math.fsum(s for s, _ in sums.values()), sum(count for _, count in sums.values()), len(sums)
    if not math.isfinite(total):
        return Divergence(math.inf, math.inf, math.inf)
    mean = total / tokens
    apart = math.fsum((s - mean * count) ** 2 for s, count in sums.values())
    half = t_95(n - 1) * math.sqrt(n / (n - 1) * apart) / tokens if n > 1 else math.inf
    return Divergence(mean, mean - half, mean + half)


def _rate(subject: Subject, near: Divergence, far: Divergence) -> Finding:
    """Does an update change the policy enough, but not too much?

    `near`: divergence on the rows of the update; `far`: divergence on other rows. Both bounds are failed only if chance does
    not explain it: the interval lies beyond.
    """
    config = subject.run.config
    steps = projected_steps(config)
    low, high = steps * near.mean, steps**2 * near.mean
    evidence = (
        f"one update at learning rate {_rate_of(subject):.2g}{' (LoRA)' if config.peft else ''} changes the policy by "
        f"{near.mean:.2g} nats per token, and by {far.mean:.2g} on other tasks (at least {max(far.low, 0.0):.2g}, by the "
        f"lower end of the 95% interval); {steps} updates change it by {low:.2g} in random directions and by {high:.2g} in "
        "the same direction"
    )
    check = RATE
    if far.low > thresholds.TOO_FAR:
        return Finding(check, "fail", evidence, "learning-rate-too-high")
    # Adam fits the few rows of its update first; what other tasks gain from it is what training is for.
    if steps**2 * min(near.high, far.high) < thresholds.TOO_NEAR:
        return Finding(check, "fail", evidence, "learning-rate-too-low")
    near_a_bound = far.mean > thresholds.TOO_FAR / 3 or high < 10 * thresholds.TOO_NEAR
    return Finding(check, "unsure" if near_a_bound else "pass", evidence)


def _kl_pull(subject: Subject, rows: Sequence[Sample], push: float, part_kl: float) -> Finding:
    """After one update, does the reward pull more than the KL term?

    The KL term's gradient grows with the distance from the reference policy, the reward's does not. It is measured after a part
    of the update, where it grows in proportion for every estimator: that of k3 per token, 1 - exp(reference - policy), explodes
    where one token has become much less likely.

    `push`: norm of the reward's gradient; `part_kl`: divergence after `PART` of the update, in nats per token.
    """
    pull = norm_of(gradient_of(subject, rows, [0.0] * len(rows)))
    ratio = pull / push / PART if push else math.inf
    settled = part_kl / (ratio * PART) ** 2 if ratio else math.inf
    evidence = (
        f"after one update, the gradient of the KL term (--kl-beta {subject.run.config.kl_beta:g}) is {ratio:.2g} times "
        f"the reward's, so the policy settles near a KL of {settled:.2g} nats per token"
    )
    # The reward pulls in another direction in each step, so a run goes further than the first one alone would let it.
    bad = ratio > thresholds.KL_PULL and settled < thresholds.KL_SETTLED
    return Finding(
        "the KL term leaves room to learn",
        "fail" if bad else "unsure" if ratio > thresholds.KL_PULL else "pass",
        evidence,
        "kl-too-large" if bad else None,
    )


def _overfits(subject: Subject, rows: Sequence[Sample], advantages: Sequence[float]) -> Finding:
    """Do a few updates on the group with the largest advantages make its better rollouts more likely?"""
    run = subject.run
    if run.config.random_rewards:
        return Finding(OVERFITS, "unsure", "rewards are drawn by lot (--random-rewards), so that none is better")
    rows, advantages = _told_apart(rows, advantages)
    if not any(a > 0 for a in advantages) or not any(a < 0 for a in advantages):
        return Finding(
            OVERFITS, "unsure", "rollouts with other advantages have the same tokens, so that none is better"
        )
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
        f"{UPDATES} updates on one group change the log-probability of its {len(good)} better rollouts by "
        f"{_mean(good):+.3g} nats each, and of its {len(bad)} worse ones by {_mean(bad):+.3g}"
    )
    failed = not margin > 0
    return Finding(
        OVERFITS,
        "fail" if failed else "pass",
        evidence,
        "does-not-overfit" if failed else None,
    )


def _told_apart(rows: Sequence[Sample], advantages: Sequence[float]) -> tuple[list[Sample], list[float]]:
    """The rows, and their advantages, without those whose tokens another row of the group has with another advantage."""
    seen: dict[tuple[str, tuple[int, ...]], set[float]] = {}
    for row, advantage in zip(rows, advantages, strict=True):
        seen.setdefault((row.group, tuple(row.token_ids)), set()).add(advantage)
    kept = [i for i, row in enumerate(rows) if len(seen[row.group, tuple(row.token_ids)]) == 1]
    return [rows[i] for i in kept], [advantages[i] for i in kept]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
