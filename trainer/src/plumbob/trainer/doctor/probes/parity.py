"""Do engine and trainer compute the same distribution?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.probes.reward import spread
from plumbob.trainer.doctor.subject import Subject

ORDER = 50

ROWS = 32
"""Number of rows that are compared."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
"""Temperatures that are tried as an explanation of a difference."""
FEW, ONE_SIDED = 10, 0.95
"""Number of tokens that must differ, and share of them that must differ in one direction, to call it one-sided."""


def probe(subject: Subject) -> Iterator[Finding]:
    samples = subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), ROWS) if samples[i].num_sampled]
    engine, trainer = sampled_logprobs(rows), subject.score(rows)
    yield _gap(subject, rows, engine, trainer)
    yield _sampling(subject, torch.cat(engine), torch.cat(trainer))


def sampled_logprobs(rows: Sequence[Sample]) -> list[torch.Tensor]:
    """The engine's log-probabilities of each row's sampled tokens, recorded while sampling: one tensor [N] per row."""
    return [torch.tensor(row.sampled_logprobs) for row in rows]


def _gap(
    subject: Subject, rows: Sequence[Sample], engine: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor]
) -> Finding:
    """Do engine and trainer give sampled tokens the same log-probabilities? If not, is it temperature or truncation?"""
    check = "engine and trainer agree on sampled tokens"
    config, limit = subject.run.config, thresholds.SAMPLING_GAP[subject.run.config.bf16]
    drawn, own = torch.cat(list(engine)), torch.cat(list(trainer))
    gap, largest = (drawn - own).abs().mean().item(), (drawn - own).abs().max().item()
    evidence = f"mean |difference| {gap:.2g} nats over {len(own)} tokens (limit {limit:g}), largest {largest:.2g}"
    if gap <= limit:
        return Finding(check, "pass", evidence)
    for temperature in TEMPERATURES:
        if temperature == config.temperature:
            continue
        other = torch.cat(subject.score(rows, temperature))
        if torch.equal(other, own):
            evidence += "; the trainer's log-probabilities are the same at any temperature"
            return Finding(check, "fail", evidence, "temperature-not-applied")
        if (there := (drawn - other).abs().mean().item()) <= max(limit, gap / 20):
            evidence += (
                f"; scored at temperature {temperature:g} in place of {config.temperature:g}, the mean is {there:.2g}"
            )
            return Finding(check, "fail", evidence, "temperature-not-applied")
    if (cut := left_out(drawn, own, limit)).one_sided and cut.certain:
        return Finding(check, "fail", f"{evidence}; {cut}", "sampling-truncated")
    return Finding(check, "fail", f"{evidence}; {_by_place(engine, trainer)}", "engine-trainer-mismatch")


def _by_place(engine: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor]) -> str:
    """The mean |difference| in the two halves of rows: it grows if later turns are scored in another context."""
    halves = [
        (e[: len(e) // 2] - t[: len(t) // 2], e[len(e) // 2 :] - t[len(t) // 2 :])
        for e, t in zip(engine, trainer, strict=True)
    ]
    first, second = (torch.cat([pair[k] for pair in halves]).abs().mean().item() for k in (0, 1))
    return f"{first:.2g} in the first halves of rows, {second:.2g} in the second"


@dataclass(frozen=True)
class LeftOut:
    """How much of the trainer's distribution t the engine, which samples from e, can never sample.

    For x sampled from e, the mean of t(x)/e(x) is the probability under t of all tokens with e(x) > 0. It is 1 if every
    token can be sampled, however e and t differ otherwise, and below 1 if top-p, top-k or min-p leave tokens out of e.
    """

    mass: float
    """Probability of the tokens that are left out, as a share of all probability."""
    of_others: float
    """Probability of the tokens that are left out, as a share of the probability of all tokens that were not sampled.

    Close to 1, hardly any token but the sampled ones could have been sampled.
    """
    certain: bool
    """Whether `mass` exceeds three of its standard errors."""
    one_sided: bool
    """Whether the engine's log-probabilities are the higher ones wherever engine and trainer differ.

    They are if tokens are left out, which makes every other token more likely.
    """

    def __str__(self) -> str:
        return (
            f"the engine leaves out {self.mass:.2%} of all probability, {self.of_others:.0%} of that of tokens that "
            "were not sampled"
        )


def left_out(engine: torch.Tensor, trainer: torch.Tensor, noise: float) -> LeftOut:
    """Estimate what the engine leaves out, from both log-probabilities [N] of the same sampled tokens, in nats.

    `noise`: healthy difference of engine and trainer in this precision, in nats.
    """
    missing = 1 - (trainer - engine).exp()
    mass = missing.mean().item()
    error = missing.std().item() / math.sqrt(len(missing)) if len(missing) > 1 else math.inf
    others = (1 - trainer.exp()).mean().item()
    differ = (engine - trainer).abs() > 2 * noise
    higher, count = int((differ & (engine > trainer)).sum()), int(differ.sum())
    one_sided = count >= FEW and higher >= ONE_SIDED * count
    return LeftOut(mass, mass / others if others > 0 else 0.0, mass > 3 * error, one_sided)


def _sampling(subject: Subject, engine: torch.Tensor, trainer: torch.Tensor) -> Finding:
    """Can the engine sample every token? The policy learns nothing about tokens that are left out."""
    check = "the engine can sample every token, as the trainer assumes"
    config = subject.run.config
    found = left_out(engine, trainer, thresholds.SAMPLING_GAP[config.bf16])
    settings = [
        f"--{name} {value:g}"
        for name, value, active in (
            ("top-p", config.top_p, config.top_p < 1),
            ("top-k", config.top_k, config.top_k > 0),
            ("min-p", config.min_p, config.min_p > 0),
        )
        if active
    ]
    evidence = f"{', '.join(settings) or 'no setting leaves any token out'}; by the log-probabilities, {found}"
    harmful = found.of_others > thresholds.LEFT_OUT or found.mass > thresholds.LEFT_OUT_MASS
    if found.certain and (harmful if settings else harmful or found.one_sided):
        if config.correction()[0] == "none" or not settings:
            return Finding(check, "fail", evidence, "sampling-truncated")
        return Finding(
            check,
            "unsure",
            f"{evidence}; --importance-correction {config.correction()[0]} cannot bring these tokens back",
        )
    return Finding(check, "unsure" if settings else "pass", evidence)
