"""Does the engine draw its tokens from the distribution that was asked for: all of it, without penalties, and each rollout anew?

Runs before parity, because other settings of the sampler are a reason why engine and trainer differ. If the engine reports
the model's log-probabilities and samples with other settings, they agree on every token, and only the tokens show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.copied_rollouts import copied
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.other_context import other_order
from plumbob.trainer.doctor.other_sampling import MOST_LOGITS, Evidence, View, all_scores, closest, joined, weigh
from plumbob.trainer.doctor.subject import Subject, mean_abs
from plumbob.trainer.doctor.third_opinion import in_turns, third_opinion, turn_of

ORDER = 48

ROWS = 24
"""Number of rows whose sampled tokens are examined."""
FITTED = 8
"""Number of them to whose log-probabilities other settings are fitted."""
PROMPTS = 24
"""Number of prompts after which completions are sampled once more, at the temperature `HOT`."""
DRAWS = 2
"""Number of completions after each of them."""
TOKENS = 64
"""Most tokens of such a completion."""
BRIEF_DRAWS, BRIEF_TOKENS = 8, 4
"""Number and length of brief completions after each: whoever returns one of several by its likelihood shows in the whole
completion's, and the fewer tokens it has, the less chance hides it."""
HOT = 2.0
"""Temperature of these completions."""
FEW = 20
"""Smallest number of new tokens, and of repeated ones, that are compared."""
ONE_SIDED = 0.95
"""Share of the new tokens that must be at least as likely in the engine: a penalty on others can only raise them."""
AMBIGUOUS = math.log(20)
"""Likelihood ratio of the best explanation against the best one with another cause below which neither is named."""


def probe(subject: Subject) -> Iterator[Finding]:
    hot, brief = _hot_rows(subject, DRAWS, TOKENS), _hot_rows(subject, BRIEF_DRAWS, BRIEF_TOKENS)
    asked, strength = _as_asked(subject, hot, brief)
    # Copies are no independent tokens, and a sampler that is colder than it says draws the same tokens again and again:
    # the explanation under which the tokens are likelier is the one that is named.
    anew = _anew(subject, hot, strength)
    yield anew
    if anew.verdict == "pass":
        yield asked


def _hot_rows(subject: Subject, draws: int, length: int) -> list[Sample]:
    """`draws` completions of up to `length` tokens after each of some of the run's prompts, all tokens of them uncertain.

    A policy that is sure of its tokens samples nearly the same ones under any settings. Empty if the engine fails.
    """
    calls = [calls[0] for calls in subject.drawn.calls if calls]
    prompts = subject.prompts([calls[i] for i in spread(len(calls), PROMPTS)], length)
    try:
        # With one seed for all, the tokens after different prompts would not be independent.
        seeds = range(1, 1 + draws * len(prompts))
        replies = subject.generate(prompts * draws, Sampling(length, temperature=HOT), seeds)
    except EngineError:
        return []
    rows = []
    for number, (prompt, reply) in enumerate(zip(prompts * draws, replies, strict=True)):
        mask = [False] * len(prompt) + [True] * len(reply.token_ids)
        logprobs = [0.0] * len(prompt) + list(reply.logprobs)
        group = f"prompt {number % len(prompts)}"
        rows.append(Sample([*prompt, *reply.token_ids], mask, logprobs, 0.0, group, "", False))
    return [row for row in rows if row.num_sampled]


def _anew(subject: Subject, hot: Sequence[Sample], other: float) -> Finding:
    """Are rollouts of one task, and completions of one prompt, drawn independently?

    `other`: logarithm of the likelihood ratio of other settings of the sampler.
    """
    check = "rollouts of one task are drawn independently"
    ratios, counts = [], []
    for rows, temperature in (([r for r in subject.drawn.samples if r.num_sampled], None), (hot, HOT)):
        groups: dict[str, list[tuple[Sequence[int], float]]] = {}
        for row, logprobs in zip(rows, subject.score(rows, temperature) if rows else [], strict=True):
            # Of engine and trainer, the one that is surer of the tokens: the other may be wrong.
            sure = max(logprobs.double().sum().item(), math.fsum(row.sampled_logprobs))
            groups.setdefault(row.group, []).append((row.token_ids, sure))
        equal = sum(len(g) - len({tuple(ids) for ids, _ in g}) for g in groups.values())
        counts.append(f"{equal} of {len(rows)}")
        ratios.append(copied(groups.values()))
    ratio = max(ratios)
    evidence = (
        f"{counts[0]} rollouts equal another one of their group, and {counts[1]} completions at temperature {HOT:g} another "
        f"one of their prompt; that they are copied is 10^{ratio / math.log(10):.1f} times as likely as that they are not"
    )
    bad = ratio > max(math.log(thresholds.OTHER_SAMPLING), other)
    return Finding(check, "fail" if bad else "pass", evidence, "groups-without-variety" if bad else None)


def _as_asked(subject: Subject, hot: Sequence[Sample], brief: Sequence[Sample]) -> tuple[Finding, float]:
    """Are tokens drawn from the whole distribution that was asked for? With the logarithm of the likelihood ratio of others."""
    check, config = "tokens are sampled as often as they should be", subject.run.config
    samples = subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), ROWS) if samples[i].num_sampled]
    engine, trainer = [torch.tensor(row.sampled_logprobs) for row in rows], subject.score(rows)
    if config.top_p < 1 or config.top_k or config.min_p:
        return Finding(check, "unsure", "with --top-p, --top-k or --min-p, not all tokens can be sampled"), 0.0
    gap = mean_abs(engine, trainer)
    if gap > subject.gap_limit:
        return _of_logprobs(subject, check, rows, engine, trainer), 0.0
    found = [
        (evidence, at, where)
        for some, at, where in (
            (rows, config.temperature, "sampled in rollouts"),
            (hot, HOT, f"sampled at temperature {HOT:g}"),
            (brief, HOT, f"sampled at temperature {HOT:g}, {BRIEF_TOKENS} at a time"),
        )
        if (evidence := _weighed(subject, some, at)) is not None
    ]
    if not found:
        return Finding(
            check, "pass", f"engine and trainer agree on log-probabilities (mean |difference| {gap:.2g} nats)"
        ), 0.0
    best, temperature, where = max(found, key=lambda pair: pair[0].log_ratio)
    evidence = (
        f"of tokens {where}, that the engine samples {best.best} is 10^{best.log_ratio / math.log(10):.1f} times as likely "
        "as that it samples as it reports"
    )
    if best.log_ratio <= math.log(thresholds.OTHER_SAMPLING):
        finding = Finding(check, "pass", evidence)
    elif temperature != config.temperature and best.temperature and 0.9 < best.temperature / config.temperature < 1.1:
        evidence += f"; rollouts are sampled at {config.temperature:g}, so they are not touched"
        finding = Finding(check, "unsure", evidence)
    elif best.next_cause < AMBIGUOUS:
        finding = Finding(check, "unsure", f"{evidence}; so are other explanations with another cause")
    else:
        finding = Finding(check, "fail", evidence, best.cause)
    return finding, best.log_ratio


def _weighed(subject: Subject, rows: Sequence[Sample], temperature: float) -> Evidence | None:
    """The evidence of these rows; None if the model gives no logits, or others than in training."""
    rows, own = sorted(rows, key=lambda row: len(row.token_ids)), list[torch.Tensor]()

    def noted() -> Iterator[View]:
        for view in _views(subject, rows, temperature):
            own.append(view.logprobs.cpu())
            yield view

    weighed = [(view.logprobs.cpu(), all_scores(view)) for view in joined(noted())]
    if not rows or len(own) < len(rows):
        return None
    some = spread(len(rows), ROWS)
    scored = subject.score([rows[i] for i in some], temperature)
    trained = [scores[: len(own[i])] for i, scores in zip(some, scored, strict=True)]
    if mean_abs(trained, [own[i] for i in some]) > thresholds.PENALISED[subject.run.config.bf16]:
        return None
    return weigh([logprobs for logprobs, _ in weighed], [scores for _, scores in weighed])


def _views(subject: Subject, rows: Sequence[Sample], temperature: float) -> Iterator[View]:
    """The rows with the trainer's logits, as far as the model can be asked for them.

    Neighbours of equal length, such as replies to one prompt, take one forward pass, which needs no padding. The logits of a
    large vocabulary take much memory, so a pass has at most about `MOST_LOGITS`.
    """
    run = subject.run
    for length, alike in groupby(rows, key=lambda row: len(row.token_ids)):
        equal, size = list(alike), max(1, MOST_LOGITS // (length * run.policy.plan.num_ids))
        for some in (equal[i : i + size] for i in range(0, len(equal), size)):
            try:
                ids = torch.tensor([row.token_ids for row in some], device=run.world.device)
                with torch.no_grad():
                    logits = run.policy.model(ids).logits
                views = [View(row, row_logits, temperature) for row, row_logits in zip(some, logits, strict=True)]
            except (RuntimeError, TypeError, ValueError):
                return
            yield from views


def _of_logprobs(
    subject: Subject,
    check: str,
    rows: Sequence[Sample],
    engine: Sequence[torch.Tensor],
    trainer: Sequence[torch.Tensor],
) -> Finding:
    """Do the engine's log-probabilities, which differ from the trainer's, show a penalty?"""
    before = mean_abs(engine, trainer)
    few = spread(len(rows), FITTED)
    views = list(_views(subject, [rows[i] for i in few], subject.run.config.temperature))
    if len(views) == len(few):
        cause, way, rest = closest(views, [engine[i] for i in few])
        apart = mean_abs([engine[i] for i in few], [trainer[i] for i in few])
        asked = mean_abs([engine[i] for i in few], [view.logprobs.cpu() for view in views])
        if asked <= thresholds.UNEXPLAINED_REST * apart:
            # A penalty near 0 would fit as well.
            evidence = (
                f"engine and trainer differ by {apart:.2g} nats; the engine's log-probabilities are those of the trainer's "
                f"model at the temperature that was asked for (rest {asked:.2g})"
            )
            return Finding(check, "pass", evidence)
        # Temperatures and what is left out belong to the probe of parity, which also knows of other explanations.
        if cause == "sampling-penalised" and rest <= thresholds.UNEXPLAINED_REST * apart:
            evidence = f"engine and trainer differ by {apart:.2g} nats; the engine computes {way} (rest {rest:.2g})"
            return Finding(check, "fail", evidence, cause)
    limit = subject.gap_limit
    repeated = torch.tensor([flag for row in rows for flag in _repeated(row)])
    rise = torch.cat(list(engine)) - torch.cat(list(trainer))
    old, new = rise[repeated], rise[~repeated]
    evidence = f"of {len(rise)} sampled tokens {len(old)} stood in the text before"
    if min(len(old), len(new)) < FEW:
        return Finding(
            check, "unsure", f"{evidence}, too few to compare; engine and trainer differ by {before:.2g} nats"
        )
    share, difference = (new >= -limit).float().mean().item(), (old.mean() - new.mean()).item()
    evidence += (
        f"; the engine's log-probabilities of these are {-difference:.2g} nats lower, against the trainer's, than those of "
        f"new tokens, of which {share:.0%} are not lower"
    )
    small = thresholds.PENALISED[subject.run.config.bf16]
    bad = difference < -small and old.mean().item() < 0 and share >= ONE_SIDED
    turns = [turn for row, scores in zip(rows, engine, strict=True) for turn in in_turns(row, scores)]
    if bad and all((turn == turn[0]).all() for turn in turns):
        evidence += "; in the engine's, all tokens of a turn have the same one, whatever stood before"
        return Finding(check, "pass", evidence)
    # New tokens are few where the policy is sure of what it has read, so that another prompt can look like a penalty.
    if bad and (asked := other_order(subject, third_opinion(subject, 1.0), limit)):
        return Finding(check, "fail", f"{evidence}; {asked}", "prompt-replaced")
    if bad and (alone := _right_alone(subject)):
        return Finding(check, "fail", f"{evidence}; {alone}", "engine-trainer-mismatch")
    # No penalty of any size explains the difference, so that what else lowers these tokens is not known.
    return Finding(check, "fail" if bad else "pass", evidence, "engine-trainer-mismatch" if bad else None)


ALONE, SHORT = 4, 24
"""Number of prompts that are sampled one at a time, and of the tokens after each."""


def _right_alone(subject: Subject) -> str:
    """Evidence that requests get the trainer's log-probabilities if nothing is sampled beside them; "" if they do not."""
    calls = [calls[0] for calls in subject.drawn.calls if calls]
    prompts = subject.prompts([calls[i] for i in spread(len(calls), ALONE)], SHORT)
    sampling = Sampling(SHORT, temperature=subject.run.config.temperature, seed=0)
    try:
        pairs = [(prompt, subject.generate([prompt], sampling)[0]) for prompt in prompts]
    except EngineError:
        return ""
    pairs = [(prompt, reply) for prompt, reply in pairs if reply.token_ids]
    if not pairs:
        return ""
    rows = [turn_of(prompt, list(reply.token_ids)) for prompt, reply in pairs]
    gap = mean_abs([torch.tensor(reply.logprobs) for _, reply in pairs], subject.score(rows))
    if not gap <= subject.gap_limit:
        return ""
    return (
        f"{len(rows)} requests that are sampled one at a time differ by {gap:.2g} nats only: requests change each other"
    )


def _repeated(row: Sample) -> list[bool]:
    """Of each sampled token, whether the row has it before."""
    seen: set[int] = set()
    found = []
    for token, sampled in zip(row.token_ids, row.loss_mask, strict=True):
        if sampled:
            found.append(token in seen)
        seen.add(token)
    return found
