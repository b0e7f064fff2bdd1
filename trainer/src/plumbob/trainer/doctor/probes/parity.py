"""Do engine and trainer compute the same distribution?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.explanations import DIFFERENT, after_short_prompts, explain
from plumbob.trainer.doctor.held_weights import other_weights
from plumbob.trainer.doctor.messages_replaced import replaced_message
from plumbob.trainer.doctor.other_context import another_tasks_prompt, other_order
from plumbob.trainer.doctor.probes.conditioning import unseen_parts
from plumbob.trainer.doctor.subject import Subject, mean_abs
from plumbob.trainer.doctor.third_opinion import third_opinion
from plumbob.trainer.policy.forward_plan import vocabulary

ORDER = 50

ROWS = 32
"""Number of rows that are compared."""
EXPLAINED = 8
"""Number of rows on which a difference is explained."""
FEW, ONE_SIDED, EXACT = 10, 0.95, 0.999
"""Number of tokens that must differ, and share of them that must differ in one direction, to call it one-sided.

`EXACT` is the share in float32: what is left out makes every other token likelier, and noise makes none less likely.
"""

SURE, NEARLY_ALL = 1e-3, 0.95
"""Log-probability, in nats below 0, of a token that the engine is sure of, and the share of such tokens from which on a low
temperature and tokens that are left out look alike."""
FEW_ENDS = 3
"""Smallest number of end tokens on which they must differ, if they agree on all other tokens."""
FORCED = 0.1
"""Smallest difference, in nats, by which the model must be less sure of a token than an engine that has no choice."""


def probe(subject: Subject) -> Iterator[Finding]:
    samples = subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), ROWS) if samples[i].num_sampled]
    engine, trainer = sampled_logprobs(rows), subject.score(rows)
    yield _fixed(subject, mean_abs(engine, trainer))
    yield _gap(subject, rows, engine, trainer)
    yield _sampling(subject, torch.cat(engine), torch.cat(trainer))


def sampled_logprobs(rows: Sequence[Sample]) -> list[torch.Tensor]:
    """The engine's log-probabilities of each row's sampled tokens, recorded while sampling: one tensor [N] per row."""
    return [torch.tensor(row.sampled_logprobs) for row in rows]


def _fixed(subject: Subject, sampled_gap: float) -> Finding:
    """Do they agree on given ids, which the engine scores in one pass? If not, do they hold other weights?

    `sampled_gap`: mean |difference| on sampled tokens, in nats.
    """
    check, config = "engine and trainer agree on given tokens", subject.run.config
    gap, limit = subject.first_gap, config.parity_limit or thresholds.SYNC_PARITY[config.bf16]
    count = len(subject.run.parity_row.token_ids) - 1
    evidence = f"mean |difference| {gap:.2g} nats over {count} tokens of the first prompt (limit {limit:g})"
    if subject.began:
        return Finding(check, "pass", evidence)
    if math.isnan(gap):
        return Finding(check, "unsure", "the engine gives no log-probabilities of given tokens")
    if (other := other_weights(subject)) is not None:
        return Finding(check, "fail", f"{evidence}; {other[1]}", other[0])
    row = subject.run.parity_row
    sides = ([torch.tensor(subject.run.engine.score(row.token_ids))], subject.score([row], 1.0))
    cause, why, _ = _why(subject, [row], *sides, limit, temperature=1.0)
    if cause is None and sampled_gap > subject.gap_limit:
        return Finding(check, "unsure", f"{evidence}; {why}; the next check has more tokens to find out the reason")
    return Finding(check, "fail", f"{evidence}; {why}", cause or DIFFERENT)


def _gap(
    subject: Subject, rows: Sequence[Sample], engine: Sequence[torch.Tensor], trainer: Sequence[torch.Tensor]
) -> Finding:
    """Do engine and trainer give sampled tokens the same log-probabilities? If not, which is wrong, and how?"""
    check = "engine and trainer agree on sampled tokens"
    limit = subject.gap_limit
    drawn, own = torch.cat(list(engine)), torch.cat(list(trainer))
    gap, largest = (drawn - own).abs().mean().item(), (drawn - own).abs().max().item()
    evidence = f"mean |difference| {gap:.2g} nats over {len(own)} tokens (limit {limit:g}), largest {largest:.2g}"
    if gap <= limit:
        return Finding(check, "pass", evidence)
    if (ends := _ends_alone(subject, rows, engine, trainer, limit)) is not None:
        third = third_opinion(subject, subject.run.config.temperature)
        truth = torch.cat([third.scores(row) for row in rows])
        if (drawn - truth).abs().mean().item() <= limit:
            why = "and the engine is right: the trainer gives these what belongs to other tokens"
            return Finding(check, "fail", f"{evidence}; {ends}, {why}", "logprobs-permuted")
        return Finding(check, "fail", f"{evidence}; {ends}: those were not sampled", "stop-token-wrong")
    few = spread(len(rows), EXPLAINED)
    chosen, sides = [rows[i] for i in few], [[side[i] for i in few] for side in (engine, trainer)]
    cause, why, wrong = _why(subject, chosen, *sides, limit, temperature=subject.run.config.temperature)
    # Where a token is forced, another one is left out, which explains as much and says less.
    sampler = cause in (None, "sampling-truncated") and "trainer" not in wrong
    if sampler and (forced := forced_tokens(drawn, own, limit)):
        return Finding(check, "fail", f"{evidence}; {forced}", "sampling-truncated")
    if cause is None:
        # The likeliest token is never left out, and has at least 1 / V of all probability, so nothing rises by more than V.
        possible = "trainer" not in wrong and largest <= math.log(vocabulary(subject.run.policy.model))
        if possible and (cut := left_out(drawn, own, limit)).one_sided and cut.certain:
            if not drawn.any():  # so does the likeliest token alone, as a temperature near 0
                why = "every token has a log-probability of 0: the likeliest one is taken, or the temperature is near 0"
                return Finding(check, "fail", f"{evidence}; {cut}; {why}", "groups-without-variety")
            if (sure := (drawn > -SURE).float().mean().item()) >= NEARLY_ALL:
                why = f"{sure:.0%} of tokens have a log-probability of nearly 0, as at a low temperature"
                return Finding(check, "fail", f"{evidence}; {cut}; {why}", DIFFERENT)
            return Finding(check, "fail", f"{evidence}; {cut}", "sampling-truncated")
        if (other := other_weights(subject)) is not None:
            return Finding(check, "fail", f"{evidence}; {why}; {other[1]}", other[0])
        why += f"; {_by_place(engine, trainer)}"
        if "engine" in wrong:
            third = third_opinion(subject, 1.0)
            asked = (
                another_tasks_prompt(subject, third, chosen, sides[0], limit)
                or replaced_message(subject, third, limit)
                or unseen_parts(subject)
                or ("trainer" not in wrong and other_order(subject, third, limit))
            )
            if asked:
                return Finding(check, "fail", f"{evidence}; {why}; {asked}", "prompt-replaced")
            # So it does if its arithmetic is wrong, so that this alone is no evidence of another prompt.
            if (short := after_short_prompts(subject, third.scores, limit)) is not None:
                why += f"; {short}: its arithmetic is wrong, or it adds to prompts"
    return Finding(check, "fail", f"{evidence}; {why}", cause or DIFFERENT)


def _ends_alone(
    subject: Subject,
    rows: Sequence[Sample],
    engine: Sequence[torch.Tensor],
    trainer: Sequence[torch.Tensor],
    limit: float,
) -> str | None:
    """Evidence that they agree on all tokens but end tokens. If the engine is wrong on these, something else has written them."""
    stops = subject.run.sampler.chat.stop_token_ids
    ids = [[t for t, sampled in zip(row.token_ids, row.loss_mask, strict=True) if sampled] for row in rows]
    end = torch.tensor([token in stops for own in ids for token in own])
    apart_ = (torch.cat(list(engine)) - torch.cat(list(trainer))).abs()
    wrong = int((apart_[end] > FORCED).sum())
    if wrong < FEW_ENDS or apart_[~end].mean().item() > limit:
        return None
    return f"they agree on all other tokens, and differ on {wrong} of {int(end.sum())} end tokens"


def _why(
    subject: Subject,
    rows: Sequence[Sample],
    engine: Sequence[torch.Tensor],
    trainer: Sequence[torch.Tensor],
    limit: float,
    *,
    temperature: float,
) -> tuple[str | None, str, list[str]]:
    """(cause, evidence, which sides differ from a third opinion): "engine", "trainer" or both.

    The cause is None if none of the tried conditions explains the difference.
    """
    third = third_opinion(subject, temperature)
    truth = [third.scores(row) for row in rows]
    apart_ = {"engine": mean_abs(engine, truth), "trainer": mean_abs(trainer, truth)}
    # Of two sides that differ by g, one differs from any third opinion by g/2 or more, however small g is.
    wrong = [side for side, gap in apart_.items() if gap > min(limit, mean_abs(engine, trainer) / 3)]
    evidence = "; ".join(
        f"the {side} differs from the model's own forward pass by {apart_[side]:.2g}" for side in apart_
    )
    for side in wrong:
        theirs = engine if side == "engine" else trainer
        if (found := explain(subject, third, rows, truth, theirs, limit, engine=side == "engine")) is not None:
            return found.cause, f"{evidence}; the {side} computes {found.condition} (rest {found.gap:.2g})", wrong
    return None, evidence, wrong


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
    one_sided = count >= FEW and higher >= (EXACT if noise <= thresholds.SAMPLING_GAP[False] else ONE_SIDED) * count
    return LeftOut(mass, mass / others if others > 0 else 0.0, mass > 3 * error, one_sided)


def forced_tokens(engine: torch.Tensor, trainer: torch.Tensor, limit: float) -> str:
    """Evidence that both differ only in tokens for which the engine had no choice; "" if there is other, or no difference.

    A required tool call or a grammar leaves one token, of probability 1, where the model has many. `engine`, `trainer`:
    log-probabilities [N] of the same sampled tokens, in nats. `limit`: healthy mean difference.
    """
    forced = (engine > -limit) & (trainer < -FORCED)
    others = (engine - trainer)[~forced].abs()
    if forced.sum() < FEW or not len(others) or others.mean() > limit:
        return ""
    mean = trainer[forced].exp().mean().item()
    return (
        f"the engine samples {int(forced.sum())} tokens with probability 1, which have {mean:.2g} in the model, and agrees on "
        f"the others ({others.mean().item():.2g} nats): something leaves it a single token there"
    )


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
