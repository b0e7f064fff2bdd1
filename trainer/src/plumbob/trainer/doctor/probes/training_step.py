"""Does the training step give the loss what belongs to each token: its position, its advantage, its old log-probability?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor import left_out
from plumbob.trainer.doctor.explanations import explain
from plumbob.trainer.doctor.kl_in_reward import kl_sums, subtracted
from plumbob.trainer.doctor.loss_away import away
from plumbob.trainer.doctor.probes.gradient import gradient_of, invariance, norm_of, step_along, take_gradient
from plumbob.trainer.doctor.rehearsal import Trained, rehearse, trained_positions
from plumbob.trainer.doctor.slopes import EXACT, FEW, SHOWN, TELLING, Slopes, judged, scaled_together
from plumbob.trainer.doctor.subject import Subject, mean_abs, undone
from plumbob.trainer.doctor.third_opinion import third_opinion
from plumbob.trainer.training.expected_advantages import expected_advantages
from plumbob.trainer.training.expected_weights import expected_weights, in_loss

ORDER = 75

AWAY = 1e-2
"""Length of a step away from the reference policy, relative to the norm of the weights."""
ROWS = 16
"""Most rows of the rehearsed step, as far as whole groups allow."""
LOOKED_AT = 3
"""Number of rows whose trained positions are looked at, the ones with the most turns."""
SHIFTS = (1, -1, 2, -2)
"""Shifts of the loss mask that are tried, in tokens."""
CERTAIN = -1e-3
"""A token above this log-probability may have no gradient, in nats."""


def probe(subject: Subject) -> Iterator[Finding]:
    samples = [s for s in subject.drawn.samples if s.num_sampled and not s.truncated] or subject.drawn.samples
    turns = sorted(samples, key=lambda s: -sum(b and not a for a, b in zip(s.loss_mask, s.loss_mask[1:], strict=False)))
    rows = [s for s in turns if s.num_sampled][:LOOKED_AT]
    if (correction := left_out.correction(subject)) is not None:
        yield correction
    if subject.run.objective.kl_beta > 0 or subject.run.config.kl_in_reward:
        yield _reference(subject, rows)
    yield (term := _policy_term(subject, rows))
    muted = correction is not None and correction.verdict == "fail"
    if term.verdict != "fail" and not muted:  # otherwise what gets a gradient is not what the loss is on
        yield _positions(subject, rows)
    chosen = _some_groups(subject)
    check = "the loss gets each token's own advantage"
    if not chosen:
        yield Finding(check, "unsure", "no group has a signal, so no rollout is trained on")
        return
    first = {id(row): scores for row, scores in zip(chosen, subject.score(chosen), strict=True)}
    found = rehearse(subject, chosen)
    if not found:
        yield Finding(check, "unsure", "the training step's loss does not show which token is whose")
        return
    yield (given := _advantages(subject, check, chosen, found))
    # Without a policy term, or with other advantages, slopes are wrong by consequence.
    innocent = "fail" not in (term.verdict, given.verdict)
    if innocent and (slopes := _slopes(subject, chosen, found)) is not None:
        yield slopes
        if not slopes.cause and (later := _later_slopes(subject, chosen, found)) is not None:
            yield later
        if not slopes.cause and (moved := away(subject, chosen, _expected(subject, chosen))) is not None:
            yield moved
    if subject.run.config.lora_dropout == 0:
        yield _logprobs(subject, found, first)
    if subject.run.config.kl_in_reward and given.verdict != "fail":
        yield subtracted(subject, chosen, _rewards(subject, chosen))


def _reference(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """At the start of a run the reference policy must give tokens the log-probabilities that the policy gives them."""
    check, run = "the reference policy is the initial policy", subject.run
    temperature, limit = run.config.temperature, thresholds.SAMPLING_GAP[run.config.bf16]
    own = subject.score(rows)
    tokens = run.state.microbatch_tokens
    reference = [r.cpu() for r in run.policy.score_rows(rows, temperature, tokens, reference=True)]
    gap = mean_abs(own, reference)
    evidence = (
        f"in {len(rows)} rollouts the reference policy's log-probabilities differ by {gap:.2g} nats per token from the "
        f"policy's, which is untrained (limit {limit:g})"
    )
    if gap <= limit:
        return Finding(check, "pass", evidence)
    third = third_opinion(subject, temperature)
    truth = [third.scores(row) for row in rows]
    if mean_abs(reference, truth) <= limit:
        evidence += "; the reference computes what the model does that the run began with, and the policy does not"
        return Finding(check, "fail", evidence, "reference-is-another-policy")
    found = explain(subject, third, rows, truth, reference, limit, engine=False)
    if found is not None:
        return Finding(check, "fail", f"{evidence}; it computes {found.condition} (rest {found.gap:.2g})", found.cause)
    return Finding(check, "fail", evidence, "reference-is-another-policy")


def _policy_term(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """The gradient must depend on the advantages, also where a KL term has one of its own."""
    check = "rewards reach the gradient"
    apart, size = _by_sign(subject, rows)
    evidence = (
        f"the gradients of {len(rows)} rollouts with an advantage of +1 and of -1 differ by {apart:.2g}; their norms add up to "
        f"{size:.2g}"
    )
    if not math.isfinite(size):
        return Finding(check, "unsure", evidence)
    if size == 0:  # at the start a KL term has no gradient either, because the policy is the reference
        if subject.run.objective.kl_beta > 0 and (moved := _away_from_the_reference(subject, rows)):
            return Finding(check, "fail", f"{evidence}; {moved}", "policy-term-missing")
        mixed = norm_of(gradient_of(subject, rows, [(-1.0) ** i for i in range(len(rows))]))
        if mixed > 0:
            evidence += f"; with +1 and -1 in turn it has a norm of {mixed:.2g}: the loss takes the mean off the advantages it gets"
            return Finding(check, "fail", evidence, "loss-differs-from-settings")
        return left_out.without_gradient(subject, check, rows, evidence)
    if apart >= thresholds.SAME_GRADIENT * size:
        return Finding(check, "pass", evidence)
    without = norm_of(gradient_of(subject, rows, [0.0] * len(rows)))
    evidence += f"; with an advantage of 0 its norm is {without:.2g}"
    if without < thresholds.SAME_GRADIENT * size:  # so the size of advantages counts, and not their sign
        return Finding(check, "fail", f"{evidence}: worse rollouts are made likelier too", "gradient-backwards")
    return Finding(check, "fail", evidence, "policy-term-missing")


def _by_sign(subject: Subject, rows: Sequence[Sample]) -> tuple[float, float]:
    """(norm of the difference, sum of the norms) of the gradients of these rows with advantages of +1 and of -1."""
    up, down = (gradient_of(subject, rows, [sign] * len(rows)) for sign in (1.0, -1.0))
    return norm_of({name: up[name] - down[name] for name in up.keys() & down.keys()}), norm_of(up) + norm_of(down)


def _away_from_the_reference(subject: Subject, rows: Sequence[Sample]) -> str:
    """Evidence that only the KL term has a gradient, once the policy is another one than the reference; "" if there is none."""
    with undone(subject.run):
        logprobs = subject.run.policy.score(rows, subject.run.config.temperature).logprobs
        if not logprobs.requires_grad:
            return ""
        logprobs.sum().backward()
        push = take_gradient(subject)
        if not 0 < norm_of(push) < math.inf:
            return ""
        step_along(subject, push, AWAY)
        apart, size = _by_sign(subject, rows)
    if not 0 < size < math.inf or apart >= thresholds.SAME_GRADIENT * size:
        return ""
    return (
        f"after a step away from the reference policy they differ by {apart:.2g}, and their norms add up to {size:.2g}"
    )


def _some_groups(subject: Subject) -> list[Sample]:
    """The samples of the first groups with a signal, up to `ROWS`, and of at least as many as there are minibatches."""
    names = [n for n in dict.fromkeys(s.group for s in subject.drawn.samples) if n in subject.advantages.with_signal]
    size = subject.run.config.num_generations
    kept = set(names[: max(ROWS // size, 2, subject.run.config.num_minibatches)])
    return [s for s in subject.drawn.samples if s.group in kept]


def _positions(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """The tokens that get a gradient must be those of the loss mask."""
    check = "the loss is on the positions of the loss mask"
    extra = missing = total = seen = 0
    shifts = []
    scores = subject.score(rows)
    for row, logprobs in zip(rows, scores, strict=True):
        trained = trained_positions(subject, row)
        if trained is None:
            return Finding(check, "unsure", "the model does not show the hidden states after its last layer")
        mask = [i for i, m in enumerate(row.loss_mask) if m]
        certain = {i for i, logprob in zip(mask, logprobs.tolist(), strict=True) if logprob > CERTAIN}
        extra += len(trained - set(mask))
        missing += len(set(mask) - trained - certain)
        total += len(mask)
        seen += len(trained)
        shifts.append(_shift(trained, mask, len(row.token_ids)))
    evidence = (
        f"in {len(rows)} rollouts with {total} sampled tokens, {extra} other tokens get a gradient and {missing} sampled "
        "ones get none"
    )
    if extra + missing <= thresholds.SAME_POSITIONS * total:
        return Finding(check, "pass", evidence)
    if not seen:
        return Finding(check, "unsure", f"{evidence}: a rollout alone, with an advantage of 1, has no gradient at all")
    if shifts[0] is not None and len(set(shifts)) == 1:
        evidence += f"; the trained positions are those of the loss mask moved by {shifts[0]:+d}"
        return Finding(check, "fail", evidence, "loss-mask-shifted")
    if missing and not extra and subject.run.config.correction()[0].endswith("mask"):
        return Finding(
            check, "unsure", f"{evidence}; --importance-correction {subject.run.config.correction()[0]} masks some"
        )
    return Finding(check, "fail", evidence, "context-tokens-trained" if extra else "sampled-tokens-masked")


def _shift(trained: set[int], mask: Sequence[int], length: int) -> int | None:
    """By how many tokens the mask must be moved to explain at least nine tenths of what is trained; None if by none."""
    for by in SHIFTS:
        moved = {i + by for i in mask if 0 < i + by < length}
        if trained and len(trained & moved) >= 0.9 * len(trained | moved) > 0 and not trained <= set(mask):
            return by
    return None


def _rewards(subject: Subject, samples: Sequence[Sample]) -> list[float]:
    """The reward of each sample's own trace."""
    drawn = subject.drawn
    rewards = {id(s): t.reward for s, t in zip(drawn.samples, drawn.traces, strict=True)}
    return [rewards[id(s)] for s in samples]


def _expected(subject: Subject, samples: Sequence[Sample]) -> list[float]:
    """The advantage of each sample, computed a second time."""
    config = subject.run.config
    kl = kl_sums(subject, samples) if config.kl_in_reward else None
    return expected_advantages(samples, _rewards(subject, samples), config.advantages(), kl)


def _advantages(subject: Subject, check: str, samples: Sequence[Sample], found: Sequence[Trained]) -> Finding:
    """Every token's advantage must be that of its row, by the settings' formula, from the reward of its own trace."""
    values = _expected(subject, samples)
    wanted = {id(s): value for s, value in zip(samples, values, strict=True)}
    pairs = [(t, wanted[id(t.row)]) for t in found if id(t.row) in wanted]
    limit = thresholds.ADVANTAGE_OF_TOKEN * max(1.0, *map(abs, values))
    wrong = [(t, a) for t, a in pairs if not (t.advantages - a).abs().max().item() <= limit]
    evidence = f"in {1 + max(t.update for t in found)} optimizer steps on {len(samples)} rollouts, "
    if not wrong:
        return Finding(check, "pass", f"{evidence}every token has the advantage of its rollout's reward")
    first, value = wrong[0]
    evidence += (
        f"{len(wrong)} of {len(pairs)} rollouts have another advantage in the loss, the first "
        f"{first.advantages[0].item():+.3g} in place of {value:+.3g} (group {first.row.group})"
    )
    got, right = (
        sorted(round(v, 4) for v in vs) for vs in ([t.advantages[0].item() for t, _ in pairs], [a for _, a in pairs])
    )
    return Finding(check, "fail", evidence, "rewards-of-other-rollouts" if got == right else "advantages-wrong")


def _slopes(subject: Subject, samples: Sequence[Sample], found: Sequence[Trained]) -> Finding | None:
    """The loss must weigh each token by its rollout's advantage, up to the backward pass; None if this cannot be computed.

    Only the first update counts: after it, importance ratios and clipping change the slopes.
    """
    run, config = subject.run, subject.run.config
    first = [t for t in found if t.update == 0 and t.slopes]
    kl = run.objective.kl_beta > 0 and run.objective.kl_estimator == "k1"  # the others have no slope at the reference
    if not first or kl or run.policy.sharding.kind != "replicated":
        return None
    names = list(dict.fromkeys(s.group for s in samples))
    here = set(names[: len(names) // config.num_minibatches]) if config.num_minibatches > 1 else set(names)
    minibatch = [s for s in samples if s.group in here]
    parts = _slopes_of(subject, samples, minibatch, first)
    if not any(p.wanted.abs().max() > 0 for p in parts):
        return None
    cause, evidence = judged(parts, run.objective.kl_beta)
    # Weights that depend on microbatches look like other advantages.
    if cause == "loss-differs-from-settings" and scaled_together(parts) and (divided := invariance(subject)).cause:
        return divided
    return Finding.of("the loss weighs each token by its rollout's advantage", (cause, evidence))


def _slopes_of(
    subject: Subject, samples: Sequence[Sample], minibatch: Sequence[Sample], trained: Sequence[Trained]
) -> list[Slopes]:
    """The slopes of rows in an update, beside what an importance ratio of 1 makes of them; other rows are left out.

    `samples`: those of the step. `minibatch`: those of the update.
    """
    config = subject.run.config
    advantages = {id(s): value for s, value in zip(samples, _expected(subject, samples), strict=True)}
    weights = expected_weights(config, minibatch, sum(in_loss(config, s) for s in samples))
    weight_of = {id(s): weight for s, weight in zip(minibatch, weights, strict=True)}
    return [
        Slopes(
            t.row,
            t.slopes[0],
            t.corrections * weight_of[id(t.row)],
            advantages[id(t.row)],
            t.logprobs,
            t.one_ratio,
        )
        for t in trained
        if id(t.row) in weight_of
    ]


def _later_slopes(subject: Subject, samples: Sequence[Sample], found: Sequence[Trained]) -> Finding | None:
    """In later updates of a step, the loss must weigh tokens by their importance ratios; None if no token shows it."""
    config = subject.run.config
    if config.num_minibatches > 1 or subject.run.objective.kl_beta or config.loss_type == "gspo":
        return None
    known = {id(s) for s in samples}
    later = [t for t in found if t.update and t.slopes and id(t.row) in known]
    pairs = []
    for t, part in zip(later, _slopes_of(subject, samples, samples, later), strict=True):
        told = ((t.logprobs - t.old_logprobs).abs() > TELLING) & (part.wanted != 0)
        pairs.append((part.found[told], part.wanted[told]))
    here, wanted = (torch.cat([pair[k] for pair in pairs]) if pairs else torch.empty(0) for k in (0, 1))
    if len(here) < FEW:
        return None
    at_one = int(((here - wanted).abs() <= EXACT * wanted.abs()).sum())
    check = "later updates of a step weigh tokens by their importance ratios"
    evidence = (
        f"of {len(here)} tokens whose log-probability an update changes by more than {TELLING:g} nats, {at_one} have the slope of "
        "an importance ratio of 1 in the next one"
    )
    return Finding.of(check, ("ratio-to-reference" if at_one > SHOWN * len(here) else None, evidence))


def _logprobs(subject: Subject, found: Sequence[Trained], first: dict[int, torch.Tensor]) -> Finding:
    """Old log-probabilities, and those of the first update, must be the ones that the same rows got before the step."""
    check, limit = (
        "the loss compares log-probabilities of the same tokens",
        thresholds.SAMPLING_GAP[subject.run.config.bf16],
    )
    known = [t for t in found if id(t.row) in first]
    before = [t for t in known if t.update == 0]
    old = mean_abs([t.old_logprobs for t in known], [first[id(t.row)] for t in known])
    new = mean_abs([t.logprobs for t in before], [first[id(t.row)] for t in before]) if before else 0.0
    evidence = (
        f"mean |difference| from log-probabilities before the step: {old:.2g} nats for the old ones of {len(known)} rows, "
        f"{new:.2g} for those of the first update (limit {limit:g})"
    )
    if max(old, new) <= limit:
        return Finding(check, "pass", evidence)
    if (apart := _drawn_anew(subject, [t.row for t in known[:LOOKED_AT]])) > limit:
        evidence += f"; with gradients on, two passes of the same rows differ by {apart:.2g}"
        return Finding(check, "fail", evidence, "dropout-in-training")
    later = [t for t in known if t.update > 0]
    now = mean_abs([t.old_logprobs for t in later], [t.logprobs for t in later]) if later else math.inf
    if old > limit and now <= limit:
        evidence += f"; after the first update the old ones are those of the weights of that moment (rest {now:.2g})"
        return Finding(check, "fail", evidence, "ratio-to-reference")
    tensors = [t.old_logprobs if old > limit else t.logprobs for t in (known if old > limit else before)]
    truth = [first[id(t.row)] for t in (known if old > limit else before)]
    for what, change in (
        ("those of other tokens of the same row", lambda parts: [p.sort().values for p in parts]),
        ("those of other rows", lambda parts: [torch.cat(list(parts)).sort().values]),
    ):
        rest = mean_abs(change(tensors), change(truth))
        if rest <= max(limit, thresholds.UNEXPLAINED_REST * max(old, new)):
            return Finding(check, "fail", f"{evidence}; they are {what} (rest {rest:.2g})", "logprobs-permuted")
    if old > limit:
        return Finding(check, "fail", evidence, "logprobs-permuted")
    evidence += "; with gradients on, the trainer computes something else than without"
    return Finding(check, "fail", evidence, "engine-trainer-mismatch")


def _drawn_anew(subject: Subject, rows: Sequence[Sample]) -> float:
    """Mean |difference| of two training passes of the same rows, in nats: large only if a pass draws random numbers."""
    run = subject.run
    with torch.enable_grad():
        first, second = (run.policy.score(rows, run.config.temperature).logprobs.detach().cpu() for _ in range(2))
    return mean_abs([first], [second])
