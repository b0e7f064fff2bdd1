"""Does the engine serve what is trained? A large known change must show in what it draws, a small one exactly, and go again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes.reward import spread
from plumbob.trainer.doctor.subject import Subject, undone
from plumbob.trainer.engine import TransformersEngine
from plumbob.trainer.sync import SyncError, SyncReport, sync_weights

PROMPTS = 6
TOKENS = 16
LARGE_CHANGE = 0.3
"""Nats, mean absolute, that the large change moves the trainer's log-probabilities by, at least."""
SMALL_CHANGE = 0.01
ARRIVED = 0.1
"""What may remain of a change's size as a difference of engine and trainer."""
ROUNDED = 0.3
"""The same of a small change, beyond which rounding has eaten it."""

Direction = dict[str, float]
"""Trained tensor -> the size of the noise that is added to it."""


@dataclass(frozen=True)
class Seen:
    """What the engine draws, against the trainer's log-probabilities of it."""

    rows: list[Sample]
    gap: float


def probe(subject: Subject) -> Iterator[Finding]:
    run = subject.run
    with undone(run):
        direction = _direction(subject)
        yield _large_change(subject, direction)
    _sync(subject)  # if it is refused, the finding says in numbers why
    yield _gone(subject)
    if not run.config.bf16:  # there the engine's own arithmetic is no finer than that
        with undone(run):
            finding = _small_change(subject, direction)
        _sync(subject)
        yield finding


def _direction(subject: Subject) -> Direction:
    """So long that going along it changes log-probabilities by LARGE_CHANGE."""
    run, sharding = subject.run, subject.run.policy.sharding
    norms = {name: sharding.local(p).float().square().mean().sqrt().item() for name, p in run.policy.trainable.items()}
    sizes = {name: 0.1 * (norm or 0.02) for name, norm in norms.items()}  # an adapter's B begins at 0
    before = subject.score([run.parity_row], 1.0)[0]
    for _ in range(8):
        with undone(run):
            _move(subject, sizes, 1.0)
            moved = (subject.score([run.parity_row], 1.0)[0] - before).abs().mean().item()
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


def _large_change(subject: Subject, direction: Direction) -> Finding:
    """Moves the weights and leaves them so."""
    run, check = subject.run, "a large change of the weights shows in what the engine draws"
    before = subject.score([run.parity_row], 1.0)[0]
    _move(subject, direction, 1.0)
    wanted = (subject.score([run.parity_row], 1.0)[0] - before).abs().mean().item()
    report, refused = _sync(subject)
    seen = _draw(subject)
    limit = max(ARRIVED * wanted, 2e-3)
    modules = "" if report is None or report.bound_modules is None else f"; {report.bound_modules} modules bound"
    evidence = (
        f"changed by {wanted:.2g} nats; engine and trainer then differ by {seen.gap:.2g} on what it draws{modules}"
    )
    if refused:
        evidence += f"; {refused}"
    if seen.gap <= limit:  # if it was refused for less than that, the small change shows of what kind the difference is
        return Finding(check, "pass", evidence)
    with undone(run):
        _move(subject, direction, -1.0)
        old = _gap(subject, seen.rows)
    if old > limit:
        run.engine.forget()
        if _draw(subject).gap <= limit:
            return Finding(check, "fail", f"{evidence}; without its cache they agree", "engine-stale")
    else:
        evidence += f", and by {old:.2g} from the weights before the change"
    _sync(subject)
    if _draw(subject).gap <= limit:
        return Finding(check, "fail", f"{evidence}; after a second sync they agree", "engine-stale")
    arrived, total = _arrived(subject)
    if total:
        evidence += f"; {arrived} of {total} tensors arrived"
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


def _gone(subject: Subject) -> Finding:
    gap = _draw(subject).gap
    limit = 0.05 if subject.run.config.bf16 else 1e-3
    evidence = f"engine and trainer differ by {gap:.2g} nats after it was undone"
    bad = not gap <= limit
    return Finding(
        "undone, the change is gone from the engine",
        "fail" if bad else "pass",
        evidence,
        "engine-stale" if bad else None,
    )


def _small_change(subject: Subject, direction: Direction) -> Finding:
    """Moves the weights and leaves them so. Early updates are of about this size."""
    run, check = subject.run, "a small change of the weights arrives whole"
    ids = run.parity_row.token_ids
    own = subject.score([run.parity_row], 1.0)[0]
    served = torch.tensor(run.engine.score(ids))
    with undone(run):
        _move(subject, direction, 1e-3)
        slope = (subject.score([run.parity_row], 1.0)[0] - own).abs().mean().item() / 1e-3
    _move(subject, direction, min(SMALL_CHANGE / slope, 1.0))
    _, refused = _sync(subject)
    wanted = subject.score([run.parity_row], 1.0)[0] - own
    came = torch.tensor(run.engine.score(ids)) - served
    lost = ((came - wanted).norm() / wanted.norm()).item()
    evidence = f"changed by {wanted.abs().mean().item():.2g} nats, of which the engine's differ by {lost:.1%}"
    if refused:
        evidence += f"; {refused}"
    bad = not lost <= ROUNDED
    return Finding(check, "fail" if bad else "pass", evidence, "merged-in-bf16" if bad else None)


def _draw(subject: Subject) -> Seen:
    """Completions of prompts that the engine has seen before: whatever it keeps of them must not outlive a sync."""
    drawn, config = subject.drawn, subject.run.config
    calls = [drawn.calls[i][-1] for i in spread(len(drawn.calls), PROMPTS) if drawn.calls[i]]
    sampling = Sampling(max_tokens=TOKENS, temperature=config.temperature, seed=1)
    rows = [
        _row(call.prompt_ids, completion.token_ids, completion.logprobs)
        for call, completion in zip(calls, subject.generate([c.prompt_ids for c in calls], sampling), strict=True)
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
