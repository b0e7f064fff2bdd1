"""Does the engine serve what is trained? A large known change must show in what it draws, a small one exactly, and go again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes.gradient import rows_with_advantage
from plumbob.trainer.doctor.probes.reward import spread
from plumbob.trainer.doctor.subject import Subject, full_rate, mean_abs, undone
from plumbob.trainer.engine import TransformersEngine
from plumbob.trainer.sharding import Sharding
from plumbob.trainer.sync import SyncError, SyncReport, sync_weights

PROMPTS = 6
SHOWN = 4
"""Rows on which a change is measured."""
TOKENS = 16
LARGE_CHANGE = 0.3
"""Nats, mean absolute, that the large change moves the trainer's log-probabilities by, at least."""
EARLY_UPDATES = (1, 10, 100)
"""A small change is so many of the run's own updates, the fewest that can be told from the floating-point noise."""
AUDIBLE = 20.0
"""Times the noise."""
ARRIVED = 0.1
"""What may remain of a change's size as a difference of engine and trainer."""
ROUNDED = 0.3
"""The share of a small change that may be lost; beyond it, rounding has eaten it."""

Direction = dict[str, float]
"""Trained tensor -> the size of the noise that is added to it."""


@dataclass(frozen=True)
class Seen:
    """What the engine draws, against the trainer's log-probabilities of it."""

    rows: list[Sample]
    gap: float


def probe(subject: Subject) -> Iterator[Finding]:
    run = subject.run
    usual, samples = _draw(subject).gap, subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), SHOWN) if samples[i].num_sampled]
    with undone(run):
        yield _large_change(subject, rows, _direction(subject, rows), usual)
    _sync(subject)  # if it is refused, the finding says in numbers why
    yield _gone(subject, usual)
    if not run.config.bf16:  # there the engine's own arithmetic is no finer than that
        with undone(run) as before:
            finding = _small_change(subject, before)
        _sync(subject)
        yield finding


def _direction(subject: Subject, rows: Sequence[Sample]) -> Direction:
    """So long that going along it changes the log-probabilities of what was drawn by LARGE_CHANGE.

    Of what was drawn, not of prompts: a policy that is sure of its replies holds on to them far longer.
    """
    run, sharding = subject.run, subject.run.policy.sharding
    norms = {name: sharding.local(p).float().square().mean().sqrt().item() for name, p in run.policy.trainable.items()}
    sizes = {name: 0.1 * (norm or 0.02) for name, norm in norms.items()}  # an adapter's B begins at 0
    before = subject.score(rows)
    for _ in range(8):
        with undone(run):
            _move(subject, sizes, 1.0)
            moved = mean_abs(subject.score(rows), before)
        if moved >= LARGE_CHANGE:
            break
        sizes = {name: 2 * size for name, size in sizes.items()}
    return sizes


@torch.no_grad()
def _move(subject: Subject, direction: Direction, factor: float) -> None:
    """Add noise, the same at every call: it is drawn again and not kept."""
    sharding = subject.run.policy.sharding
    for i, (name, parameter) in enumerate(subject.run.policy.trainable.items()):
        local = sharding.local(parameter)
        generator = torch.Generator(local.device).manual_seed(i)
        noise = torch.randn(local.shape, generator=generator, device=local.device)
        local.add_(noise.to(local.dtype), alpha=factor * direction[name])
    sharding.changed()


def _large_change(subject: Subject, rows: Sequence[Sample], direction: Direction, usual: float) -> Finding:
    """Moves the weights and leaves them so. `usual`: the gap before."""
    run, check = subject.run, "a large change of the weights shows in what the engine draws"
    before = subject.score(rows)
    _move(subject, direction, 1.0)
    wanted = mean_abs(subject.score(rows), before)
    report, refused = _sync(subject)
    seen = _draw(subject)
    limit = max(ARRIVED * wanted, 0.05 if run.config.bf16 else 2e-3, 2 * usual)
    evidence = f"changed by {wanted:.2g} nats; engine and trainer then differ by {seen.gap:.2g} on what it draws"
    modules = "" if report is None or report.bound_modules is None else f"; {report.bound_modules} modules bound"
    complaint = modules + (f"; {refused}" if refused else "")
    if seen.gap <= limit:
        arrived, total = _arrived(subject) if refused else (0, 0)
        if 0 < arrived < total:
            evidence += f"; {arrived} of {total} tensors arrived{complaint}"
            return Finding(check, "fail", evidence, "weights-not-synced")
        # If it was refused for so little, the small change shows whether it is rounding. With bfloat16 none follows.
        return Finding(check, "unsure" if refused and run.config.bf16 else "pass", evidence + complaint)
    with undone(run):
        _move(subject, direction, -1.0)
        old = _gap(subject, seen.rows)
    if old > limit:
        run.engine.forget()
        if _draw(subject).gap <= limit:
            return Finding(check, "fail", f"{evidence}; without its cache they agree{complaint}", "engine-stale")
    else:
        evidence += f", and by {old:.2g} from the weights before the change"
    _sync(subject)
    if _draw(subject).gap <= limit:
        return Finding(check, "fail", f"{evidence}; after a second sync they agree{complaint}", "engine-stale")
    arrived, total = _arrived(subject)
    if total:
        evidence += f"; {arrived} of {total} tensors arrived"
    evidence += complaint
    none_bound = report is not None and report.bound_modules == 0
    if run.config.peft and old <= limit and (none_bound or (total and not arrived)):
        return Finding(check, "fail", evidence, "adapter-bound-to-no-module")
    if run.config.peft and old <= limit and arrived == total:
        return Finding(check, "fail", evidence, "adapter-not-applied")
    return Finding(check, "fail", evidence, "weights-not-synced")


def _sync(subject: Subject) -> tuple[SyncReport | None, str]:
    """(the engine's acknowledgement, why there is none)."""
    run = subject.run
    try:
        return sync_weights(run.policy, run.engine, run.parity_row), ""
    except (SyncError, EngineError) as error:
        return None, str(error)


def _gone(subject: Subject, usual: float) -> Finding:
    """`usual`: the gap before the change, which is another matter: parity's."""
    gap = _draw(subject).gap
    limit = max(0.05 if subject.run.config.bf16 else 1e-3, 2 * usual)
    evidence = f"engine and trainer differ by {gap:.2g} nats after it was undone, and by {usual:.2g} before it was made"
    bad = not gap <= limit
    return Finding(
        "undone, the change is gone from the engine",
        "fail" if bad else "pass",
        evidence,
        "engine-stale" if bad else None,
    )


def _small_change(subject: Subject, before: Mapping[str, torch.Tensor]) -> Finding:
    """Moves the weights as the run's own early updates do, and leaves them so. Rounding loses what they need most."""
    run, check = subject.run, "what early updates change arrives whole"
    rows, advantages = rows_with_advantage(subject)
    # A server that scores a prompt wants room for one more token.
    short = [row for row in rows if len(row.token_ids) < run.config.max_context]
    shown = [short[i] for i in spread(len(short), SHOWN)]
    if not shown:
        return Finding(check, "unsure", "every rollout with an advantage fills --max-context")
    own, served = _trainer_scores(subject, shown), _engine_scores(subject, shown)
    noise = (own - served).norm().item()
    full_rate(run)
    subject.gradient(rows, advantages)
    run.policy.sharding.update()
    run.policy.sharding.zero_grad()
    updates, wanted = 1, _trainer_scores(subject, shown) - own
    for more in EARLY_UPDATES[1:]:
        if wanted.norm() > AUDIBLE * noise:
            break
        _stretch(run.policy.sharding, before, more / updates)
        updates, wanted = more, _trainer_scores(subject, shown) - own
    many = f"{updates} updates' worth" if updates > 1 else "one update"
    evidence = f"{many} of change moves the trainer's log-probabilities by {wanted.abs().mean().item():.2g} nats"
    if not wanted.norm() > AUDIBLE * noise:
        return Finding(
            check, "unsure", f"{evidence}, too little to be told from the noise of {noise / math.sqrt(len(own)):.2g}"
        )
    _, refused = _sync(subject)
    lost = ((_engine_scores(subject, shown) - served - wanted).norm() / wanted.norm()).item()
    evidence += f", of which {lost:.1%} is lost in the engine's"
    if refused:
        evidence += f"; {refused}"
    cause = "merged-in-bf16" if not lost <= ROUNDED else "weights-not-synced" if refused else None
    return Finding(check, "fail" if cause else "pass", evidence, cause)


@torch.no_grad()
def _stretch(sharding: Sharding, before: Mapping[str, torch.Tensor], factor: float) -> None:
    """Move the trained weights `factor` times as far from what they were as they are."""
    for name, parameter in sharding.trainable.items():
        local = sharding.local(parameter)
        local.add_(local - before[name].to(local), alpha=factor - 1)
    sharding.changed()


def _trainer_scores(subject: Subject, rows: Sequence[Sample]) -> torch.Tensor:
    return torch.cat(subject.score(rows, 1.0))


def _engine_scores(subject: Subject, rows: Sequence[Sample]) -> torch.Tensor:
    """Of the same tokens as the trainer's: temperature 1 is what any engine can score at."""
    return torch.cat([torch.tensor(subject.run.engine.score(r.token_ids))[torch.tensor(r.loss_mask[1:])] for r in rows])


def _draw(subject: Subject) -> Seen:
    """Completions of prompts that the engine has seen before: whatever it keeps of them must not outlive a sync."""
    drawn, config = subject.drawn, subject.run.config
    calls = [drawn.calls[i][-1] for i in spread(len(drawn.calls), PROMPTS) if drawn.calls[i]]
    prompts = subject.prompts(calls, TOKENS)
    sampling = Sampling(max_tokens=TOKENS, temperature=config.temperature, seed=1)
    rows = [
        _row(prompt, completion.token_ids, completion.logprobs)
        for prompt, completion in zip(prompts, subject.generate(prompts, sampling), strict=True)
    ]
    return Seen(rows, _gap(subject, rows))


def _row(prompt: Sequence[int], drawn: Sequence[int], logprobs: Sequence[float]) -> Sample:
    n = len(prompt)
    mask = [False] * n + [True] * len(drawn)
    return Sample([*prompt, *drawn], mask, [0.0] * n + list(logprobs), 0.0, "sync", "", False)


def _gap(subject: Subject, rows: Sequence[Sample]) -> float:
    engine = torch.tensor([lp for row in rows for lp, m in zip(row.sampling_logprobs, row.loss_mask, strict=True) if m])
    return (engine - torch.cat(subject.score(rows))).abs().mean().item()


def _arrived(subject: Subject) -> tuple[int, int]:
    """(tensors that are the trainer's in the engine's own model, how many there are); (0, 0) for a server."""
    run = subject.run
    if not isinstance(run.engine, TransformersEngine):
        return 0, 0
    own = dict(run.engine.model.named_parameters())
    weights = dict(run.policy.sharding.stream().items())
    same = sum(
        name in own and torch.equal(own[name].float().cpu(), w.to(own[name].dtype).float().cpu())
        for name, w in weights.items()
    )
    return same, len(weights)
