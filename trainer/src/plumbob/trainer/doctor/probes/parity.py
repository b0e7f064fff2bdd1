"""Do engine and trainer mean the same distribution?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes.reward import spread
from plumbob.trainer.doctor.subject import Subject

ROWS = 32
LIMIT = {False: 1e-3, True: 0.05}
"""Nats, mean absolute, by --bf16. Float32 engines measure about 1e-6, bfloat16 ones about 0.012 (huggingface/trl#4772)."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
KEPT_MASS = 0.99


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
    # Leaving tokens out makes every other one likelier: the engine's are then higher throughout, by the mass that was kept.
    higher = (drawn - own >= -limit).float().mean().item()
    if higher > 0.99:
        ratio = (own - drawn).exp().mean().item()
        return Finding(
            check, "fail", f"{evidence}; the engine's are never lower, kept mass {ratio:.3f}", "sampling-truncated"
        )
    return Finding(check, "fail", f"{evidence}; {_by_place(engine, trainer)}", "engine-trainer-mismatch")


def _by_place(engine: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor]) -> str:
    """Whether the difference grows along a rollout, as it does where later turns see another context."""
    halves = [
        (e[: len(e) // 2] - t[: len(t) // 2], e[len(e) // 2 :] - t[len(t) // 2 :])
        for e, t in zip(engine, trainer, strict=True)
    ]
    first, second = (torch.cat([pair[k] for pair in halves]).abs().mean().item() for k in (0, 1))
    return f"{first:.2g} in the first halves of rows, {second:.2g} in the second"


def _sampling(subject: Subject, engine: torch.Tensor, trainer: torch.Tensor) -> Finding:
    """Settings that leave tokens out bias training, whatever log-probabilities the engine reports."""
    check = "every token can be drawn, as the trainer assumes"
    config = subject.run.config
    left_out = [
        f"--{name} {value:g}"
        for name, value, active in (
            ("top-p", config.top_p, config.top_p < 1),
            ("top-k", config.top_k, config.top_k > 0),
            ("min-p", config.min_p, config.min_p > 0),
        )
        if active
    ]
    ratio = (trainer - engine).exp().mean().item()
    evidence = f"{', '.join(left_out) or 'nothing is left out'}; mean of trainer over engine probability {ratio:.3f}"
    if not left_out:
        return Finding(check, "pass", evidence)
    corrected = config.correction()[0] != "none"
    bad = ratio < KEPT_MASS and not corrected
    return Finding(check, "fail" if bad else "unsure", evidence, "sampling-truncated" if bad else None)
