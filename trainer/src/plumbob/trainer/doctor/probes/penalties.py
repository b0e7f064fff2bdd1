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
PENALTIES = (0.1, 0.3, 1.0, 3.0)
"""Penalties, in nats, that are held against none where log-probabilities do not show one."""
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
    masses, hits, scores = [], [], []
    for row in rows:
        with suppress(RuntimeError, TypeError, ValueError):
            mass, hit, score = _repeats(subject, row)
            masses, hits, scores = [*masses, mass], [*hits, hit], [*scores, score]
    if len(scores) < len(rows) or (torch.cat(scores) - trainer).abs().mean() > thresholds.PENALISED[config.bf16]:
        return Finding(check, "pass", f"{evidence}; engine and trainer agree on their log-probabilities")
    mass, hit = torch.cat(masses), torch.cat(hits)
    ratio = too_seldom(mass, hit)
    evidence += (
        f"; {int(hit.sum())} repeat a token that the model wrote itself, where {mass.sum().item():.1f} should; with a "
        f"penalty that is 10^{ratio / math.log(10):.1f} times as likely as without"
    )
    bad = ratio > math.log(thresholds.TOO_SELDOM)
    return Finding(check, "fail" if bad else "pass", evidence, "sampling-penalised" if bad else None)


def too_seldom(mass: torch.Tensor, hit: torch.Tensor) -> float:
    """Logarithm of the likelihood ratio of a penalty against none, of how often sampled tokens repeat others.

    `mass` [N]: probability, before each token was sampled, that it would be a repeated one; `hit` [N]: whether it was.
    A penalty of d nats makes the odds of a repeated token exp(d) times smaller. The ratio is the mean over `PENALTIES`.
    Without a penalty its expectation is 1 whatever the probabilities and however few tokens count (each factor has
    expectation 1 given all tokens before), so that it exceeds k with a probability of at most 1/k (Ville's inequality).
    A number of standard deviations has no such bound: where repeated tokens are almost certain, a few others are many.
    """
    mass = mass.double().clamp(0, 1)
    ratios = [-d * hit.sum() - (1 - mass + mass * math.exp(-d)).log().sum() for d in PENALTIES]
    return (torch.stack(ratios).logsumexp(0) - math.log(len(PENALTIES))).item()


def _repeats(subject: Subject, row: Sample) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each sampled token [n]: probability that it repeats what the model wrote, whether it does, log-probability.

    By the trainer's whole distribution before it.
    """
    run = subject.run
    at = [i for i, sampled in enumerate(row.loss_mask) if sampled]
    with torch.no_grad():
        logits = run.policy.model(torch.tensor([row.token_ids], device=run.world.device)).logits[0].float().cpu()
    own: set[int] = set()
    masses, hits, logprobs = [], [], []
    for i in at:
        distribution = (logits[i - 1] / run.config.temperature).log_softmax(-1)
        masses.append(distribution[sorted(own)].exp().sum() if own else torch.zeros(()))
        hits.append(row.token_ids[i] in own)
        logprobs.append(distribution[row.token_ids[i]])
        own.add(row.token_ids[i])
    return torch.stack(masses), torch.tensor(hits), torch.stack(logprobs)
