"""Does the engine penalise tokens that the text already has, which the trainer knows nothing of?

Runs before parity, because penalties are a reason why engine and trainer differ. If the engine reports log-probabilities
without its penalties, they agree on every token, and only the sampled tokens themselves show it: too few of them are
repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.subject import Subject

ORDER = 48

ROWS = 24
"""Number of rows whose sampled tokens are examined."""
FEW = 20
"""Smallest number of new tokens, and of repeated ones, that are judged."""
ONE_SIDED = 0.95
"""Share of the new tokens that must be at least as likely in the engine: a penalty on others can only raise them."""


def probe(subject: Subject) -> Iterator[Finding]:
    check = "repeated tokens are sampled as often as they should be"
    samples = subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), ROWS) if samples[i].num_sampled]
    engine = torch.cat([torch.tensor(row.sampled_logprobs) for row in rows])
    trainer = torch.cat(subject.score(rows))
    repeated = torch.tensor([flag for row in rows for flag in _repeated(row)])
    limit = thresholds.SAMPLING_GAP[subject.run.config.bf16]
    gap, rise = (engine - trainer).abs().mean().item(), engine - trainer
    old, new = rise[repeated], rise[~repeated]
    evidence = f"of {len(rise)} sampled tokens {len(old)} stood in the text before"
    if gap > limit:
        if min(len(old), len(new)) < FEW:
            yield Finding(check, "unsure", f"{evidence}, too few to compare")
            return
        share = (new >= -limit).float().mean().item()
        difference = (old.mean() - new.mean()).item()
        evidence += (
            f"; the engine's log-probabilities of these are {-difference:.2g} nats lower, against the trainer's, than those "
            f"of new tokens, of which {share:.0%} are not lower"
        )
        small = thresholds.PENALISED[subject.run.config.bf16]
        bad = difference < -small and old.mean().item() < 0 and share >= ONE_SIDED
        yield Finding(check, "fail" if bad else "pass", evidence, "sampling-penalised" if bad else None)
        return
    yield _frequency(subject, rows, check, evidence, trainer)


def _repeated(row: Sample) -> list[bool]:
    """Of each sampled token, whether the row has it before."""
    seen: set[int] = set()
    found = []
    for token, sampled in zip(row.token_ids, row.loss_mask, strict=True):
        if sampled:
            found.append(token in seen)
        seen.add(token)
    return found


def _frequency(subject: Subject, rows: Sequence[Sample], check: str, evidence: str, trainer: torch.Tensor) -> Finding:
    """Compare how often sampled tokens repeat what the model wrote with how often they should by the trainer."""
    config = subject.run.config
    if config.top_p < 1 or config.top_k or config.min_p:
        return Finding(check, "unsure", f"{evidence}; with --top-p, --top-k or --min-p their share is another one")
    expected, variance, count, scores = 0.0, 0.0, 0, []
    for row in rows:
        with suppress(RuntimeError, TypeError, ValueError):
            e, v, c, s = _expected(subject, row)
            expected, variance, count, scores = expected + e, variance + v, count + c, [*scores, s]
    if len(scores) < len(rows) or (torch.cat(scores) - trainer).abs().mean() > thresholds.PENALISED[config.bf16]:
        return Finding(check, "pass", f"{evidence}; engine and trainer agree on their log-probabilities")
    deviation = (count - expected) / math.sqrt(max(variance, 1e-9))
    evidence += (
        f"; {count} repeat a token that the model wrote itself, where {expected:.1f} should: "
        f"{deviation:+.1f} standard deviations"
    )
    bad = deviation < -thresholds.TOO_SELDOM
    return Finding(check, "fail" if bad else "pass", evidence, "sampling-penalised" if bad else None)


def _expected(subject: Subject, row: Sample) -> tuple[float, float, int, torch.Tensor]:
    """(expected number of sampled tokens that the model wrote before, its variance, their number, log-probabilities [N]).

    By the trainer's whole distribution at each sampled token.
    """
    run = subject.run
    at = [i for i, sampled in enumerate(row.loss_mask) if sampled]
    with torch.no_grad():
        logits = run.policy.model(torch.tensor([row.token_ids], device=run.world.device)).logits[0].float().cpu()
    own: set[int] = set()
    expected, variance, count, logprobs = 0.0, 0.0, 0, []
    for i in at:
        distribution = (logits[i - 1] / run.config.temperature).log_softmax(-1)
        mass = distribution[sorted(own)].exp().sum().item() if own else 0.0
        expected, variance = expected + mass, variance + mass * (1 - mass)
        count += row.token_ids[i] in own
        logprobs.append(distribution[row.token_ids[i]])
        own.add(row.token_ids[i])
    return expected, variance, count, torch.stack(logprobs)
