"""Do engine and trainer mean the same distribution?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import Sample
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes.reward import spread
from plumbob.trainer.doctor.subject import Subject

ROWS = 32
LIMIT = {False: 1e-3, True: 0.05}
"""Nats, mean absolute, by --bf16. Float32 engines measure about 1e-6, bfloat16 ones about 0.012 (huggingface/trl#4772)."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
LEFT_OUT = 0.1
"""Of the probability of what was not drawn."""
LEFT_OUT_MASS = 0.01
"""Of all probability."""
FEW, ONE_SIDED = 10, 0.95
"""So many tokens must differ, and this share of them in one direction, before the direction says anything."""


def probe(subject: Subject) -> Iterator[Finding]:
    samples = subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), ROWS) if samples[i].num_sampled]
    engine, trainer = drawn_logprobs(rows), subject.score(rows)
    yield _gap(subject, rows, engine, trainer)
    yield _sampling(subject, torch.cat(engine), torch.cat(trainer))


def drawn_logprobs(rows: Sequence[Sample]) -> list[torch.Tensor]:
    """The engine's log-probabilities of each row's sampled tokens, as it drew them."""
    return [torch.tensor([lp for lp, m in zip(row.sampling_logprobs, row.loss_mask, strict=True) if m]) for row in rows]


def _gap(
    subject: Subject, rows: Sequence[Sample], engine: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor]
) -> Finding:
    check = "engine and trainer agree on what was drawn"
    config, limit = subject.run.config, LIMIT[subject.run.config.bf16]
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
            evidence += "; the trainer's are the same at any temperature"
            return Finding(check, "fail", evidence, "temperature-not-applied")
        if (there := (drawn - other).abs().mean().item()) <= max(limit, gap / 20):
            evidence += f"; scored at temperature {temperature:g} in place of {config.temperature:g} it is {there:.2g}"
            return Finding(check, "fail", evidence, "temperature-not-applied")
    if (cut := left_out(drawn, own, limit)).one_sided and cut.certain:
        return Finding(check, "fail", f"{evidence}; {cut}", "sampling-truncated")
    return Finding(check, "fail", f"{evidence}; {_by_place(engine, trainer)}", "engine-trainer-mismatch")


def _by_place(engine: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor]) -> str:
    """Whether the difference grows along a rollout, as it does where later turns see another context."""
    halves = [
        (e[: len(e) // 2] - t[: len(t) // 2], e[len(e) // 2 :] - t[len(t) // 2 :])
        for e, t in zip(engine, trainer, strict=True)
    ]
    first, second = (torch.cat([pair[k] for pair in halves]).abs().mean().item() for k in (0, 1))
    return f"{first:.2g} in the first halves of rows, {second:.2g} in the second"


@dataclass(frozen=True)
class LeftOut:
    """How much of the trainer's distribution the engine never draws.

    For x drawn from e, the mean of t(x)/e(x) is the mass of t where e is not zero: 1 if every token can be drawn,
    however the two may differ otherwise; less if top-p, top-k or min-p leave tokens out of e.
    """

    mass: float
    """Of all probability, per token."""
    of_others: float
    """Of the probability of what was not drawn: near 1, hardly anything but what was drawn could have been."""
    certain: bool
    """By three standard errors."""
    one_sided: bool
    """Wherever the two differ, the engine's is the higher: leaving tokens out makes every other one likelier."""

    def __str__(self) -> str:
        return f"the engine leaves out {self.mass:.2%} of all probability, {self.of_others:.0%} of that of other tokens"


def left_out(engine: torch.Tensor, trainer: torch.Tensor, noise: float) -> LeftOut:
    """Of log-probabilities [N] that the engine drew and that the trainer gives the same tokens.

    `noise`: nats by which engines of this precision may differ.
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
    """What is never drawn is never learned about, and the trainer's gradient takes no account of it."""
    check = "every token can be drawn, as the trainer assumes"
    config = subject.run.config
    found = left_out(engine, trainer, LIMIT[config.bf16])
    settings = [
        f"--{name} {value:g}"
        for name, value, active in (
            ("top-p", config.top_p, config.top_p < 1),
            ("top-k", config.top_k, config.top_k > 0),
            ("min-p", config.min_p, config.min_p > 0),
        )
        if active
    ]
    evidence = f"{', '.join(settings) or 'no setting leaves any out'}; by the log-probabilities {found}"
    harmful = found.of_others > LEFT_OUT or found.mass > LEFT_OUT_MASS
    if found.certain and (harmful if settings else harmful or found.one_sided):
        if config.correction()[0] == "none" or not settings:
            return Finding(check, "fail", evidence, "sampling-truncated")
        return Finding(check, "unsure", f"{evidence}, which {config.correction()[0]} weighs and cannot bring back")
    return Finding(check, "unsure" if settings else "pass", evidence)
