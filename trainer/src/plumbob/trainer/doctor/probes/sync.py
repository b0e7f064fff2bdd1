"""Does the engine sample with the trained weights?

A large known weight change must show in what the engine samples and be gone once it is undone; a small one must reach
the engine completely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.explanations import DIFFERENT, after_short_prompts
from plumbob.trainer.doctor.held_weights import is_tied, other_weights
from plumbob.trainer.doctor.probes.gradient import rows_with_advantage
from plumbob.trainer.doctor.rounded_weights import rounded_scores
from plumbob.trainer.doctor.subject import Subject, full_rate, mean_abs, undone
from plumbob.trainer.doctor.weight_change import Direction, direction_of, move, stretch
from plumbob.trainer.inference.weight_sync import SyncError, SyncReport, sync_weights

ORDER = 70

PROMPTS = 6
"""Number of prompts that are sampled from."""
SEEDS = (1, 2)
"""Seeds of the completions, each of which a part of the prompts has."""
SHOWN = 4
"""Number of rows on which a change is measured."""
TOKENS = 16
"""Number of tokens that are sampled after each prompt."""
EARLY_UPDATES = (1, 10, 100)
"""Numbers of updates that the small change stands for; the smallest that exceeds floating-point noise is used."""
SCALES = tuple(2.0**k for k in range(-6, 7))
"""Scales of an adapter that are tried first."""
NOTHING = 0.02
"""Scale up to which an adapter counts as not applied: the smallest one that is tried is 0.016."""
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_proj", "up_proj", "down_proj"),
)
"""Modules whose adapters may have a scale of their own in an engine: those that engines keep in one matrix, and whole blocks."""
ROUNDED_REST = 0.5
"""Share of what a sync loses that may remain unexplained when the trainer's weights are rounded as the engine's may be."""
AUDIBLE = 20.0
"""How many times the floating-point noise a change must be to be measured."""


@dataclass(frozen=True)
class Seen:
    """Completions that the engine sampled, compared with the trainer."""

    rows: list[Sample]
    gap: float
    """Mean |difference| of engine and trainer log-probabilities on the sampled tokens, in nats."""


def probe(subject: Subject) -> Iterator[Finding]:
    run = subject.run
    usual, samples = _draw(subject).gap, subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), SHOWN) if samples[i].num_sampled]
    with undone(run) as before:
        yield _large_change(subject, rows, direction_of(subject, rows), usual, before)
    _sync(subject)  # if the engine refuses it, the next finding shows the numbers
    yield _gone(subject, usual)
    if not run.config.bf16:  # in bfloat16, the engine's own rounding is as large as a small change
        with undone(run) as before:
            finding = _small_change(subject, before)
        _sync(subject)
        yield finding


def _large_change(
    subject: Subject, rows: Sequence[Sample], direction: Direction, usual: float, first: Mapping[str, torch.Tensor]
) -> Finding:
    """A large weight change must show in what the engine samples.

    Leaves the weights changed. `usual`: the gap before, in nats. `first`: copies of the weights before.
    """
    run, check = subject.run, "a large weight change shows in what the engine samples"
    before = subject.score(rows)
    move(subject, direction, 1.0)
    wanted = mean_abs(subject.score(rows), before)
    report, refused = _sync(subject)
    seen = _draw(subject)
    limit = max(thresholds.ARRIVED * wanted, 0.05 if run.config.bf16 else 2e-3, 2 * usual)
    evidence = (
        f"the change moves log-probabilities by {wanted:.2g} nats; after the sync, engine and trainer differ by "
        f"{seen.gap:.2g} nats"
    )
    modules = (
        ""
        if report is None or report.update.bound_modules is None
        else f"; the adapter is bound to {report.update.bound_modules} modules"
    )
    complaint = modules + (f"; {refused}" if refused else "")
    if seen.gap <= limit:
        arrived, total = _arrived(subject) if refused else (0, 0)
        if 0 < arrived < total:
            evidence += f"; {arrived} of {total} tensors arrived{complaint}"
            return Finding(check, "fail", evidence, "weights-not-synced")
        # If the engine refused the sync for so small a difference, the check of a small change shows whether that is
        # rounding. In bfloat16 there is no such check.
        return Finding(check, "unsure" if refused and run.config.bf16 else "pass", evidence + complaint)
    apart = [row for row in seen.rows if _gap(subject, [row]) > limit] or seen.rows
    with undone(run):
        move(subject, direction, -1.0)
        old = _gap(subject, apart)
    if len(apart) < len(seen.rows):
        evidence += f", in {len(apart)} of {len(seen.rows)} completions"
    if old > limit:
        run.engine.forget()
        if _draw(subject).gap <= limit:
            return Finding(
                check, "fail", f"{evidence}; they agree once the engine's cache is cleared{complaint}", "engine-stale"
            )
    else:
        evidence += f", and the engine differs by {old:.2g} from the weights before the change"
    _sync(subject)
    if _draw(subject).gap <= limit:
        return Finding(check, "fail", f"{evidence}; after a second sync they agree{complaint}", "engine-stale")
    unchanged = old <= max(thresholds.SAMPLING_GAP[run.config.bf16], 2 * usual)
    if not unchanged and (found := _served_otherwise(subject, seen, first)) is not None:
        return Finding(check, "fail", f"{evidence}; {found[1]}", found[0])
    arrived, total = _arrived(subject)
    if total:
        evidence += f"; {arrived} of {total} tensors arrived"
    evidence += complaint
    none_bound = report is not None and report.update.bound_modules == 0
    if run.config.peft and old <= limit and none_bound:
        return Finding(check, "fail", evidence, "adapter-bound-to-no-module")
    if run.config.peft and old <= limit and arrived == total:
        return Finding(check, "fail", evidence, "adapter-not-applied")
    if old > limit and arrived == total and (cause := _not_by_weights(subject, usual)) is not None:
        return Finding(check, "fail", f"{evidence}; {cause[1]}", cause[0])
    if old > limit and arrived == total > 0:
        if (other := other_weights(subject)) is not None:  # those that are not trained count as well
            return Finding(check, "fail", f"{evidence}; {other[1]}", other[0])
        evidence += ": the engine has the weights, and computes something else with them"
        return Finding(check, "fail", evidence, "engine-trainer-mismatch")
    return Finding(check, "fail", evidence, "weights-not-synced")


def _not_by_weights(subject: Subject, usual: float) -> tuple[str, str] | None:
    """(cause, evidence) if the engine scores given tokens as the trainer does: then it has the weights.

    As the trainer does means as well as before the change, which `usual` says, in nats: a part of the weights that is
    lost in the sync may make less of a difference than the whole change.
    """
    row, limit = subject.run.parity_row, max(thresholds.SAMPLING_GAP[subject.run.config.bf16], 2 * usual)
    try:
        given = mean_abs([torch.tensor(subject.run.engine.score(row.token_ids))], subject.score([row], 1.0))
    except EngineError:
        return None
    if given > limit:
        return None
    evidence = f"on given tokens they differ by {given:.2g} only"
    asked = after_short_prompts(subject, lambda row: subject.score([row], 1.0)[0], limit)
    return "engine-trainer-mismatch", evidence + (f"; {asked}" if asked else "")


def _served_otherwise(subject: Subject, seen: Seen, first: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """(cause, evidence) if the engine has the new weights but computes with them otherwise than the trainer.

    `first`: copies of the trained weights before the change, on which an engine with a head of its own still computes.
    """
    limit = max(thresholds.SAMPLING_GAP[subject.run.config.bf16], seen.gap * thresholds.UNEXPLAINED_REST)
    if subject.run.config.peft:
        for kinds in ((), *FUSED):
            scale, rest = _fitted_scale(subject, seen.rows, kinds)
            if rest <= limit:
                which = f"the adapters of {', '.join(kinds)} add" if kinds else "the adapter adds"
                lost = "weights-not-synced" if kinds else "adapter-not-applied"
                return "adapter-scale-differs" if scale > NOTHING else lost, (
                    f"the engine computes base + {scale:.3g} times what {which} in the trainer (rest {rest:.2g})"
                )
        return None
    rest = _gap_with_first_head(subject, seen.rows, first)
    if rest is not None and rest <= limit:
        return "head-not-tied", (
            f"the engine computes logits with the output embeddings from before the change (rest {rest:.2g}), though they "
            "are tied to the input embeddings, which it has"
        )
    return None


def _fitted_scale(subject: Subject, rows: Sequence[Sample], kinds: Sequence[str]) -> tuple[float, float]:
    """(s, gap in nats) with which base + s (trainer - base) is closest to the engine. LoRA only: s scales its B.

    `kinds`: names of modules, such as q_proj, whose adapters alone have another scale; empty if all have. The gap is infinite
    if there is no such adapter.
    """
    policy = subject.run.policy
    every = {n: policy.sharding.local(p) for n, p in policy.trainable.items() if "lora_B" in n}
    tensors = {n: t for n, t in every.items() if not kinds or any(f".{kind}." in n for kind in kinds)}
    if not tensors or (kinds and len(tensors) == len(every)):
        return 1.0, math.inf
    kept = {name: tensor.clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def gap(scale: float) -> float:
        for name, tensor in tensors.items():
            tensor.copy_(kept[name] * scale)
        policy.sharding.changed()
        return _gap(subject, rows)

    try:
        tried = {s: gap(s) for s in SCALES}
        for step in (1.2, 1.04, 1.01):
            best = min(tried, key=tried.__getitem__)
            tried |= {s: gap(s) for k in range(-4, 5) if (s := best * step**k) not in tried}
        best = min(tried, key=tried.__getitem__)
        return best, tried[best]
    finally:
        gap(1.0)


def _gap_with_first_head(subject: Subject, rows: Sequence[Sample], first: Mapping[str, torch.Tensor]) -> float | None:
    """Gap in nats if the trainer, too, computes logits with the first output embeddings; None if they are not tied."""
    model: Any = subject.run.policy.model
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    name = next((n for n, p in model.named_parameters() if p is inputs.weight), None)
    if head is None or not is_tied(model) or name is None or name not in first:
        return None
    tied = head.weight
    head.weight = torch.nn.Parameter(first[name].to(tied), requires_grad=False)
    try:
        return _gap(subject, rows)
    finally:
        head.weight = tied


def _sync(subject: Subject) -> tuple[SyncReport | None, str]:
    """Sync the weights: (the engine's acknowledgement or None, the reason if there is none)."""
    run = subject.run
    try:
        return sync_weights(run.policy, run.engine, run.parity_row), ""
    except (SyncError, EngineError) as error:
        return None, str(error)


def _gone(subject: Subject, usual: float) -> Finding:
    """An undone change must be gone. `usual`: the gap before the change, in nats, which the parity probe has judged."""
    gap = _draw(subject).gap
    limit = max(thresholds.SAMPLING_GAP[subject.run.config.bf16], 2 * usual)
    evidence = f"engine and trainer differ by {gap:.2g} nats after the change was undone, and by {usual:.2g} before it"
    bad = not gap <= limit
    return Finding(
        "a weight change that is undone is gone from the engine",
        "fail" if bad else "pass",
        evidence,
        "engine-stale" if bad else None,
    )


def _small_change(subject: Subject, before: Mapping[str, torch.Tensor]) -> Finding:
    """A change of the size of the run's first updates, which rounding loses first, must arrive.

    Leaves the weights changed.
    """
    run, check = subject.run, "a small weight change reaches the engine completely"
    found = rows_with_advantage(subject)
    rows, advantages = found.rows, found.advantages
    # A server that scores a prompt needs room for one more token.
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
        stretch(run.policy.sharding, before, more / updates)
        updates, wanted = more, _trainer_scores(subject, shown) - own
    many = f"a change like that of {updates} updates" if updates > 1 else "one update"
    evidence = f"{many} changes the trainer's log-probabilities by {wanted.abs().mean().item():.2g} nats"
    if not wanted.norm() > AUDIBLE * noise:
        return Finding(
            check,
            "unsure",
            f"{evidence}, which is too little compared with the noise of {noise / math.sqrt(len(own)):.2g}",
        )
    _, refused = _sync(subject)
    missing = _engine_scores(subject, shown) - served - wanted
    lost = (missing.norm() / wanted.norm()).item()
    evidence += f"; {lost:.1%} of the change is missing in the engine"
    if refused:
        evidence += f"; {refused}"
    cause = "merged-in-bf16" if not lost <= thresholds.ROUNDED else "engine-trainer-mismatch" if refused else None
    if cause != "merged-in-bf16":
        return Finding.of(check, (cause, evidence))
    other = other_weights(subject, updated=True)
    if other is not None and other[0] != cause:
        return Finding(check, "fail", f"{evidence}; {other[1]}", DIFFERENT)
    if other is None:  # the tensors do not show it
        rounded = [scores - own - wanted for scores in rounded_scores(subject, lambda: _trainer_scores(subject, shown))]
        rest = min(((missing - lack).norm() / missing.norm()).item() for lack in rounded)
        if rest > ROUNDED_REST:
            evidence += f"; rounding to bfloat16 would leave {rest:.0%} of that unexplained"
            return Finding(check, "fail", evidence, DIFFERENT)
    return Finding(check, "fail", evidence, cause)


def _trainer_scores(subject: Subject, rows: Sequence[Sample]) -> torch.Tensor:
    """The trainer's log-probabilities of the sampled tokens of all rows, at temperature 1: [N]."""
    return torch.cat(subject.score(rows, 1.0))


def _engine_scores(subject: Subject, rows: Sequence[Sample]) -> torch.Tensor:
    """The engine's log-probabilities of the same tokens, at temperature 1, which every engine supports: [N]."""
    return torch.cat([torch.tensor(subject.run.engine.score(r.token_ids))[torch.tensor(r.loss_mask[1:])] for r in rows])


def _draw(subject: Subject) -> Seen:
    """Sample completions of prompts that the engine has seen before, which shows whether its cache outlives a sync."""
    drawn, config = subject.drawn, subject.run.config
    calls = [drawn.calls[i][-1] for i in spread(len(drawn.calls), PROMPTS) if drawn.calls[i]]
    prompts = subject.prompts(calls, TOKENS)
    rows = []
    for seed in SEEDS:  # several replicas may answer, of which only some have the weights
        sampling = Sampling(max_tokens=TOKENS, temperature=config.temperature, seed=seed)
        replies = subject.generate(prompts[seed - 1 :: len(SEEDS)], sampling)
        rows += [
            _row(prompt, completion.token_ids, completion.logprobs)
            for prompt, completion in zip(prompts[seed - 1 :: len(SEEDS)], replies, strict=True)
        ]
    return Seen(rows, _gap(subject, rows))


def _row(prompt: Sequence[int], drawn: Sequence[int], logprobs: Sequence[float]) -> Sample:
    n = len(prompt)
    mask = [False] * n + [True] * len(drawn)
    return Sample([*prompt, *drawn], mask, [0.0] * n + list(logprobs), 0.0, "sync", "", False)


def _gap(subject: Subject, rows: Sequence[Sample]) -> float:
    """Mean |difference| of engine and trainer log-probabilities on the sampled tokens of these rows, in nats."""
    engine = torch.tensor([logprob for row in rows for logprob in row.sampled_logprobs])
    return (engine - torch.cat(subject.score(rows))).abs().mean().item()


def _arrived(subject: Subject) -> tuple[int, int]:
    """(tensors that are equal in engine and trainer, all tensors): their numbers; (0, 0) if the engine is a server."""
    run = subject.run
    own = run.engine.served_weights()
    if own is None:
        return 0, 0
    weights = dict(run.policy.sharding.stream().items())
    same = sum(
        name in own and torch.equal(own[name].float().cpu(), w.to(own[name].dtype).float().cpu())
        for name, w in weights.items()
    )
    return same, len(weights)
