"""Does what stands before a token matter to it, in the trainer and in the engine, and nothing else?"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import torch
from plumbob.rollout import Sample, Sampling
from plumbob.trainer.doctor.findings import Finding
from plumbob.trainer.doctor.probes.reward import spread
from plumbob.trainer.doctor.subject import Subject, mean_abs

ROWS = 8
NOTHING = 1e-6
"""Nats: what a change of context must exceed. A blind model gives 0 exactly."""
LEAK = {False: 1e-3, True: 0.1}
"""Nats, by --bf16: what other rows and later tokens may change, for the order of floating-point sums."""


def probe(subject: Subject) -> Iterator[Finding]:
    samples = subject.drawn.samples
    rows = [samples[i] for i in spread(len(samples), ROWS) if samples[i].num_sampled]
    yield _sees_prompt(subject, rows)
    if any(_tool_spans(row) for row in rows):
        yield _sees_tools(subject, [row for row in rows if _tool_spans(row)])
    yield _alone(subject, rows)
    yield _engine_sees_beginning(subject, rows)


def _sees_prompt(subject: Subject, rows: Sequence[Sample]) -> Finding:
    changed = [_replaced(row, [(0, row.loss_mask.index(True))], rows) for row in rows]
    moved = mean_abs(subject.score(rows), subject.score(changed))
    return _blindness("the trainer sees the prompt", "other prompts", moved)


def _sees_tools(subject: Subject, rows: Sequence[Sample]) -> Finding:
    changed = [_replaced(row, _tool_spans(row), rows) for row in rows]
    moved = mean_abs(
        [_after_first_tool(row, s) for row, s in zip(rows, subject.score(rows), strict=True)],
        [_after_first_tool(row, s) for row, s in zip(rows, subject.score(changed), strict=True)],
    )
    return _blindness("the trainer sees what tools say", "other tool results", moved)


def _blindness(check: str, what: str, moved: float) -> Finding:
    evidence = f"{what} move the log-probabilities of sampled tokens by {moved:.3g} nats on average"
    blind = not moved > NOTHING
    return Finding(check, "fail" if blind else "pass", evidence, "loss-mask-as-attention-mask" if blind else None)


def _alone(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """A row's scores are the same alone and in a pass with others, and whatever follows in it."""
    limit = LEAK[subject.run.config.bf16]
    together = subject.score(rows)
    alone = [subject.score([row])[0] for row in rows]
    others = max((a - b).abs().max().item() for a, b in zip(together, alone, strict=True))
    later = 0.0
    for row, scores in zip(rows, alone, strict=True):
        half = len(row.token_ids) // 2
        kept = sum(row.loss_mask[:half])
        if kept:
            changed = subject.score([_replaced(row, [(half, len(row.token_ids))], rows)])[0]
            later = max(later, (changed[:kept] - scores[:kept]).abs().max().item())
    leaks = not max(others, later) <= limit
    evidence = (
        f"other rows of a pass change a token's log-probability by up to {others:.2g}, later tokens by {later:.2g}"
    )
    return Finding(
        "a token is scored given its own past only",
        "fail" if leaks else "pass",
        evidence,
        "rows-see-each-other" if leaks else None,
    )


def _engine_sees_beginning(subject: Subject, rows: Sequence[Sample]) -> Finding:
    """What the engine draws for long prompts must depend on their beginning, which a truncated context has lost."""
    longest = sorted(subject.drawn.calls, key=lambda calls: -len(calls[-1].prompt_ids) if calls else 0)[:ROWS]
    prompts = [calls[-1].prompt_ids for calls in longest if calls]
    words = sorted({t for row in rows for t in row.token_ids})
    chance = random.Random(0)
    changed = [[chance.choice(words) for _ in p[: len(p) // 4]] + p[len(p) // 4 :] for p in prompts]
    # Hot, so that no token is so sure that nothing could show in it.
    sampling = Sampling(max_tokens=4, temperature=2.0, seed=0)
    first, again, other = (subject.generate(p, sampling) for p in (prompts, prompts, changed))
    noise = max(_apart(a.logprobs, b.logprobs) for a, b in zip(first, again, strict=True))
    moved = [_apart(a.logprobs, b.logprobs) for a, b in zip(first, other, strict=True)]
    blind = sum(not m > max(NOTHING, noise) for m in moved)
    evidence = (
        f"another first quarter of {len(prompts)} prompts of up to {max(map(len, prompts))} tokens leaves {blind} "
        f"completions as they were; the median moves by {sorted(moved)[len(moved) // 2]:.3g} nats"
    )
    bad = blind > len(moved) / 2
    return Finding(
        "the engine sees the beginning of long prompts",
        "fail" if bad else "pass",
        evidence,
        "truncated-context" if bad else None,
    )


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    return abs(a[0] - b[0]) + (sum(abs(x - y) for x, y in zip(a[1:], b[1:], strict=False)) if len(a) == len(b) else 1.0)


def _tool_spans(row: Sample) -> list[tuple[int, int]]:
    """The stretches of unsampled ids between sampled ones."""
    spans, start = [], None
    for i, sampled in enumerate(row.loss_mask):
        if sampled and start is not None:
            spans.append((start, i))
            start = None
        elif not sampled and start is None and any(row.loss_mask[:i]):
            start = i
    return spans


def _after_first_tool(row: Sample, scores: torch.Tensor) -> torch.Tensor:
    start, _ = _tool_spans(row)[0]
    return scores[sum(row.loss_mask[:start]) :]


def _replaced(row: Sample, spans: Sequence[tuple[int, int]], rows: Sequence[Sample]) -> Sample:
    """The row with other ids in these spans, of those that occur in `rows`."""
    words = sorted({t for other in rows for t in other.token_ids})
    chance = random.Random(len(row.token_ids))
    ids = list(row.token_ids)
    for start, end in spans:
        ids[start:end] = [chance.choice([w for w in words[:64] + words[-64:] if w != t]) for t in ids[start:end]]
    return dataclasses.replace(row, token_ids=ids)
