"""Does a token's log-probability depend on all tokens before it, in trainer and engine, and on nothing else?"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.explanations import elsewhere, neighbours, other_tokens
from plumbob.trainer.doctor.subject import Subject, mean_abs
from plumbob.trainer.doctor.third_opinion import explains, third_opinion

FEWEST_PROMPTS = 3
"""Fewest prompts, after which the engine has a choice, by which its sight of a prompt's beginning is judged."""
ORDER = 40

ROWS = 8
"""Number of rows that are scored, and of long prompts that are sampled from."""
PARTS = 16
"""Number of parts of a prompt of which the engine may miss some."""
DRAWS = 4
"""Number of completions that are sampled from each prompt."""


def probe(subject: Subject) -> Iterator[Finding]:
    samples = subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), ROWS) if samples[i].num_sampled]
    if not subject.agrees and (found := _misplaced(subject, rows)) is not None:
        yield found  # the log-probabilities of other tokens depend on other parts of a row
        return
    yield _sees_prompt(subject, rows)
    if any(_tool_spans(row) for row in rows):
        yield _sees_tools(subject, [row for row in rows if _tool_spans(row)])
    yield _alone(subject, rows)
    yield _engine_sees_beginning(subject, rows)


def _misplaced(subject: Subject, rows: Sequence[Sample]) -> Finding | None:
    """The trainer may score other tokens than the sampled ones, all of them in full view of what is before them."""
    third = third_opinion(subject, subject.run.config.temperature)
    theirs, limit = subject.score(rows), subject.gap_limit
    if mean_abs(theirs, [third.scores(row) for row in rows]) <= limit:
        return None
    check = "the trainer scores the sampled tokens"
    best = min(elsewhere(third, rows, theirs), key=lambda found: found.gap, default=None)
    if best is None or best.gap > limit:
        # A single token may differ by more than the mean of all.
        shifted = neighbours(third, rows, theirs, 10 * limit)
        if shifted is None:
            return None
        return Finding(check, "fail", f"its log-probabilities are right {shifted.condition}", shifted.cause)
    evidence = f"its log-probabilities are right {best.condition} (rest {best.gap:.2g} nats)"
    return Finding(check, "fail", evidence, best.cause)


def _sees_prompt(subject: Subject, rows: Sequence[Sample]) -> Finding:
    # The last token of a context stays: even a model that attends to nothing of it predicts from that one's embedding.
    changed = [_replaced(row, [(0, row.loss_mask.index(True) - 1)], rows) for row in rows]
    moved = mean_abs(_inside(rows, subject.score(rows)), _inside(rows, subject.score(changed)))
    return _blindness("the trainer sees the prompt", "other prompts", moved)


def _sees_tools(subject: Subject, rows: Sequence[Sample]) -> Finding:
    spans = [[(start, end - 1) for start, end in _tool_spans(row)] for row in rows]
    changed = [_replaced(row, own, rows) for row, own in zip(rows, spans, strict=True)]
    before, after = subject.score(rows), subject.score(changed)
    moved = mean_abs(
        [_after_first_tool(row, s) for row, s in zip(rows, _inside(rows, before), strict=True)],
        [_after_first_tool(row, s) for row, s in zip(rows, _inside(rows, after), strict=True)],
    )
    return _blindness("the trainer sees tool results", "other tool results", moved)


def _inside(rows: Sequence[Sample], scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same log-probabilities, with 0 for the first token of each turn of more than one, in each row [n].

    The first token of a turn depends on the last token of its context even in a model that attends to no context.
    """
    kept = []
    for row, values in zip(rows, scores, strict=True):
        mask = row.loss_mask
        first = [not mask[i - 1] and mask[i + 1 : i + 2] == [True] for i in range(len(mask)) if mask[i]]
        kept.append(values.masked_fill(torch.tensor(first), 0.0))
    return kept


def _blindness(check: str, what: str, moved: float) -> Finding:
    evidence = f"{what} move the log-probabilities of sampled tokens by {moved:.3g} nats on average"
    blind = not moved > thresholds.BLIND
    return Finding(check, "fail" if blind else "pass", evidence, "loss-mask-as-attention-mask" if blind else None)


def _alone(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """A token's log-probability must not depend on other rows of its microbatch, or on later tokens of its row."""
    bf16 = subject.run.config.bf16
    limit, what = thresholds.OTHER_TOKENS[bf16], "by a mean of" if bf16 else "by up to"
    together = subject.score(rows)
    alone = [subject.score([row])[0] for row in rows]
    others = changed_by([a - b for a, b in zip(together, alone, strict=True)], bf16)
    by_later = []
    for row, scores in zip(rows, alone, strict=True):
        half = len(row.token_ids) // 2
        kept = sum(row.loss_mask[:half])
        if kept:
            changed = subject.score([_replaced(row, [(half, len(row.token_ids))], rows)])[0]
            by_later.append(changed[:kept] - scores[:kept])
    later = changed_by(by_later, bf16)
    leaks = not max(others, later) <= limit
    if others <= limit < later and (moved := _of_neighbours(subject, rows, alone, limit)):
        check = "a token's log-probability depends only on earlier tokens of its row"
        return Finding(check, "fail", f"later tokens change it {what} {later:.2g} nats; {moved}", "logprobs-permuted")
    evidence = f"other rows change a token's log-probability {what} {others:.2g} nats, later tokens {what} {later:.2g}"
    return Finding(
        "a token's log-probability depends only on earlier tokens of its row",
        "fail" if leaks else "pass",
        evidence,
        "rows-see-each-other" if leaks else None,
    )


def changed_by(differences: Sequence[torch.Tensor], bf16: bool) -> float:
    """The largest of these differences of log-probabilities, [n] each, in nats; in bfloat16 their mean. 0 without any."""
    every = torch.cat([torch.zeros(0), *differences]).abs()
    if not len(every):
        return 0.0
    return (every.mean() if bf16 else every.max()).item()


def _of_neighbours(subject: Subject, rows: Sequence[Sample], alone: Sequence[torch.Tensor], limit: float) -> str:
    """Evidence that the trainer gives tokens the log-probabilities of the sampled tokens next to them; "" if there is none."""
    third = third_opinion(subject, subject.run.config.temperature)
    truth = [third.scores(row) for row in rows]
    best = min(other_tokens(truth, alone), key=lambda e: e.gap, default=None)
    if best is None or not explains(best.gap, mean_abs(alone, truth), limit):
        return ""
    return f"they are the model's own {best.condition} (rest {best.gap:.2g})"


def _engine_sees_beginning(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """What the engine samples from long prompts must depend on their beginning, which a truncated context loses."""
    longest = sorted(subject.drawn.calls, key=lambda calls: -len(calls[-1].prompt_ids) if calls else 0)[:ROWS]
    prompts = subject.prompts([calls[-1] for calls in longest if calls], 1)
    words = sorted({t for row in rows for t in row.token_ids})
    chance = random.Random(0)
    changed = [[chance.choice(words) for _ in p[: len(p) // 4]] + p[len(p) // 4 :] for p in prompts]
    first, again, other = (_drawn(subject, p) for p in (prompts, prompts, changed))
    noise = max((d for a, b in zip(first, again, strict=True) for d in _differences(a, b)), default=0.0)
    # If top-p or top-k leave a single token, its log-probability is always 0; the parity probe reports that.
    telling = [(a, b) for a, b in zip(first, other, strict=True) if _has_choice(a, b)]
    check = "the engine sees the beginning of long prompts"
    if not telling:
        return Finding(check, "unsure", "after each prompt, the engine can sample a single token only")
    # Without a token in common the change counts as infinite: the engine samples other tokens.
    moved = sorted(max(_differences(a, b), default=math.inf) for a, b in telling)
    blind = sum(not m > max(thresholds.BLIND, 3 * noise) for m in moved)
    median = moved[len(moved) // 2]
    shift = f"changes by {median:.3g} nats" if median < math.inf else "is no longer sampled"
    evidence = (
        f"with another first quarter, {blind} of {len(moved)} prompts of up to {max(map(len, prompts))} tokens leave the "
        f"next token as likely as before; the median {shift}"
    )
    if blind <= len(moved) / 2:
        return Finding(check, "pass", evidence)
    if len(moved) < FEWEST_PROMPTS:
        return Finding(check, "unsure", f"{evidence}; after the others, the engine is sure of a single token")
    rest = [p[: len(p) // 4] + [chance.choice(words) for _ in p[len(p) // 4 : -8]] + p[-8:] for p in prompts]
    seen = [max(_differences(a, b), default=math.inf) for a, b in zip(first, _drawn(subject, rest), strict=True)]
    if sum(not m > max(thresholds.BLIND, 3 * noise) for m in seen) > len(seen) / 2:
        evidence += "; so do other tokens in the rest of the prompt"
    return Finding(check, "fail", evidence, "prompt-replaced")  # cut, or replaced by something else


def unseen_parts(subject: Subject) -> str | None:
    """Evidence that the engine samples alike whatever stands in some part of long prompts.

    None if it sees all parts, or cannot sample after prompts with others.
    """
    with contextlib.suppress(EngineError):
        return _unseen_parts(subject)
    return None


def _unseen_parts(subject: Subject) -> str | None:
    longest = sorted(subject.drawn.calls, key=lambda calls: -len(calls[-1].prompt_ids) if calls else 0)[:ROWS]
    prompts = subject.prompts([calls[-1] for calls in longest if calls], 1)
    words, chance = sorted({t for prompt in prompts for t in prompt}), random.Random(0)
    first, again = (_drawn(subject, prompts) for _ in range(2))
    # A token without any other choice is sampled after every prompt, whatever the engine sees of it.
    telling = [i for i, (a, b) in enumerate(zip(first, again, strict=True)) if _has_choice(a, b)]
    if not telling:
        return None
    prompts = [prompts[i] for i in telling]
    first, again = ([side[i] for i in telling] for side in (first, again))
    noise = max((d for a, b in zip(first, again, strict=True) for d in _differences(a, b)), default=0.0)
    unseen = []
    for part in range(PARTS - 1):  # the first tokens and the last part may be what every prompt has in common
        bounds = [(max(len(p) * part // PARTS, 4), len(p) * (part + 1) // PARTS) for p in prompts]
        changed = [
            p[:start] + [chance.choice(words) for _ in p[start:end]] + p[end:]
            for p, (start, end) in zip(prompts, bounds, strict=True)
        ]
        moved = [
            max(_differences(a, b), default=math.inf) for a, b in zip(first, _drawn(subject, changed), strict=True)
        ]
        if sum(not m > max(thresholds.BLIND, 3 * noise) for m in moved) > len(moved) / 2:
            unseen.append(part + 1)
    if not unseen:
        return None
    return (
        f"the engine samples alike whatever stands in {len(unseen)} of {PARTS} equal parts of prompts (part {unseen[0]} is "
        "the first)"
    )


def _drawn(subject: Subject, prompts: Sequence[list[int]]) -> list[dict[int, float]]:
    """For each prompt, the first tokens that the engine samples: token id -> log-probability in nats.

    `DRAWS` completions are sampled, because a server may return another token every time. The temperature of 2 keeps
    every token uncertain, so that a change of its log-probability can be seen.
    """
    found: list[dict[int, float]] = [{} for _ in prompts]
    for seed in range(DRAWS):
        for tokens, reply in zip(
            found, subject.generate(prompts, Sampling(1, temperature=2.0, seed=seed)), strict=True
        ):
            if reply.token_ids:
                tokens[reply.token_ids[0]] = reply.logprobs[0]
    return found


def _has_choice(*drawn: Mapping[int, float]) -> bool:
    """Whether the engine could have sampled other tokens: the log-probability of a single possible one is 0."""
    return any(any(tokens.values()) for tokens in drawn)


def _differences(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Differences in log-probability of the tokens that are in both, in nats."""
    return [abs(a[token] - b[token]) for token in a.keys() & b.keys()]


def _tool_spans(row: Sample) -> list[tuple[int, int]]:
    """(start, end) of each span of ids that were not sampled and lie between sampled ones."""
    spans, start = [], None
    for i, sampled in enumerate(row.loss_mask):
        if sampled and start is not None:
            spans.append((start, i))
            start = None
        elif not sampled and start is None and any(row.loss_mask[:i]):
            start = i
    return spans


def _after_first_tool(row: Sample, scores: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of tokens that were sampled after the first tool result."""
    start, _ = _tool_spans(row)[0]
    return scores[sum(row.loss_mask[:start]) :]


def _replaced(row: Sample, spans: Sequence[tuple[int, int]], rows: Sequence[Sample]) -> Sample:
    """The row with other ids in these spans, taken from ids that occur in `rows`."""
    words = sorted({t for other in rows for t in other.token_ids})
    chance = random.Random(len(row.token_ids))
    ids = list(row.token_ids)
    for start, end in spans:
        ids[start:end] = [chance.choice([w for w in words[:64] + words[-64:] if w != t]) for t in ids[start:end]]
    return dataclasses.replace(row, token_ids=ids)
