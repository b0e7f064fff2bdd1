"""Which of engine and trainer is wrong, and what makes its log-probabilities what they are.

A third opinion is needed for that: the model as it is on disk, computed by its own forward pass, one row at a time. A
side whose log-probabilities differ from it is wrong. Then the third opinion is asked again under other conditions (other
positions, another temperature, a part of the prompt), until one of them gives what the wrong side gives.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plumbob.rollout import EngineError, Sample, Sampling, verifiers_messages
from plumbob.rollout.chat import assistant_header
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.policy.loading import load_model

TEMPERATURES = tuple(0.3 * 1.08**k for k in range(26))
"""Temperatures that are tried: 0.3 to 2.05, each 8% above the one before."""
FINER = tuple(1.08 ** (k / 8) for k in range(-8, 9))
"""Then these multiples of the best one: 1% apart."""

SHORT = 48
"""Number of prompts of a single token."""

Ids = list[int]


@dataclass(frozen=True)
class Explanation:
    """Conditions under which the third opinion gives what a wrong side gives."""

    cause: str
    """Id of the cause."""
    condition: str
    """The conditions, as the end of a sentence: "... at temperature 0.7"."""
    gap: float
    """Mean |difference| of the wrong side and the third opinion under these conditions, in nats."""


@dataclass(frozen=True)
class Third:
    """The model as it is on disk, computed by its own forward pass."""

    model: Any
    bf16: bool
    temperature: float
    """Temperature of the log-probabilities that are to be explained."""

    @torch.no_grad()
    def logits(self, ids: Sequence[int], positions: Sequence[int] | None = None) -> torch.Tensor:
        """Logits after each id but the last: [T - 1, V] in float32. `positions`: of the ids, 0 to T - 1 by default."""
        device = self.model.device
        given = torch.tensor([list(ids)], device=device)
        inputs: dict[str, torch.Tensor] = {}
        if positions is not None:  # without a mask, transformers takes a jump of positions for the start of another row
            inputs = {"position_ids": torch.tensor([list(positions)], device=device), "attention_mask": given * 0 + 1}
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            return self.model(input_ids=given, use_cache=False, **inputs).logits[0, :-1].float().cpu()

    def scores(
        self, row: Sample, *, temperature: float | None = None, positions: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Log-probabilities of the row's sampled tokens: [n] in nats. `temperature`: `self.temperature` by default."""
        mask = torch.tensor(row.loss_mask[1:], dtype=torch.bool)  # a row of one token has an empty one
        logits = self.logits(row.token_ids, positions)[mask] / (temperature or self.temperature)
        ids = torch.tensor(row.token_ids[1:])[mask]
        return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]

    def of_all(self, row: Sample) -> torch.Tensor:
        """Log-probabilities of all of the row's tokens but the first, sampled or not: [T - 1] in nats."""
        return self.scores(dataclasses.replace(row, loss_mask=[i > 0 for i in range(len(row.token_ids))]))


def third_opinion(subject: Subject, temperature: float) -> Third:
    """Load the model once more. No weight may have been trained. It is float32, on the policy's device."""
    run = subject.run
    model = load_model(run.config.model).to(run.policy.device).eval()
    model.set_attn_implementation(run.policy.plan.own_attention)
    return Third(model, run.config.bf16, temperature)


def apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Mean |difference| of the log-probabilities of all rows, in nats."""
    return (torch.cat(list(a)) - torch.cat(list(b))).abs().mean().item()


def explain(
    subject: Subject,
    third: Third,
    rows: Sequence[Sample],
    own: Sequence[torch.Tensor],
    wrong: Sequence[torch.Tensor],
    limit: float,
    *,
    engine: bool,
) -> Explanation | None:
    """The conditions under which the third opinion comes closest to the wrong side; None if it never comes close.

    `own` and `wrong`: the third opinion's and the wrong side's log-probabilities of each row's sampled tokens. `engine`:
    whether that side is the engine.
    `limit`: difference of engine and trainer that is healthy, in nats.
    """
    before = apart(wrong, own)
    found = [_temperature(third, rows, wrong), *_positions(third, rows, wrong), *_other_tokens(own, wrong)]
    found += list(elsewhere(third, rows, wrong))
    found += list(_prompts(subject, third, rows, wrong)) if engine else list(_blanked(third, rows, wrong))
    best = min(found, key=lambda e: e.gap)
    return best if explains(best.gap, before, limit) else None


def explains(rest: float, before: float, limit: float) -> bool:
    """Whether conditions that leave this rest of a difference explain it. `limit`: a healthy difference. All in nats."""
    # A rest below the limit explains nothing where the difference was hardly above it: wrong conditions leave a third.
    return rest <= max(min(limit, before / 3), thresholds.UNEXPLAINED_REST * before)


def _temperature(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Explanation:
    """The temperature that fits best: first of a coarse grid, then of a fine one around its best."""
    coarse = _gaps(third, rows, wrong, TEMPERATURES)
    near = min(coarse, key=coarse.__getitem__)
    fine = _gaps(third, rows, wrong, (*(round(near * f, 3) for f in FINER), round(near, 1), round(near, 2)))
    best = min(fine, key=fine.__getitem__)
    return Explanation(
        "temperature-not-applied", f"at temperature {best:g} in place of {third.temperature:g}", fine[best]
    )


def _gaps(
    third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor], temperatures: Sequence[float]
) -> dict[float, float]:
    """Temperature -> mean |difference| of `wrong` and the third opinion at it, in nats. One pass over the rows."""
    sums = dict.fromkeys(temperatures, 0.0)
    for row, theirs in zip(rows, wrong, strict=True):
        mask = torch.tensor(row.loss_mask[1:])
        logits, ids = third.logits(row.token_ids)[mask], torch.tensor(row.token_ids[1:])[mask]
        for t in sums:
            scaled = logits / t
            mine = scaled.gather(-1, ids[:, None])[:, 0] - scaled.logsumexp(-1)
            sums[t] += (mine - theirs).abs().sum().item()
    return {t: total / sum(map(len, wrong)) for t, total in sums.items()}


PLACES: dict[str, Callable[[Sample], list[int]]] = {
    "with all positions moved by 1": lambda row: [i + 1 for i in range(len(row.token_ids))],
    "with the positions of what follows the first prompt moved by 1": lambda row: _after_prompt(row, 1),
    "with the positions of what follows the first prompt moved by -1": lambda row: _after_prompt(row, -1),
    "with positions that begin again after the first prompt": lambda row: _after_prompt(row, -_first(row)),
    "with positions that move by 1 in each turn": lambda row: [
        i + sum(b and not a for a, b in zip(row.loss_mask[:i], row.loss_mask[1 : i + 1], strict=False))
        for i in range(len(row.token_ids))
    ],
    "with positions that count sampled tokens alone": lambda row: [
        max(sum(row.loss_mask[: i + 1]) - 1, 0) for i in range(len(row.token_ids))
    ],
    "with positions that count sampled tokens alone, from 1": lambda row: [
        sum(row.loss_mask[: i + 1]) for i in range(len(row.token_ids))
    ],
    "with positions of sampled tokens alone, and 1 for all others": lambda row: [
        sum(row.loss_mask[: i + 1]) - 1 if m else 1 for i, m in enumerate(row.loss_mask)
    ],
    "with the same position for every token": lambda row: [0] * len(row.token_ids),
    "with positions that count by 2": lambda row: [2 * i for i in range(len(row.token_ids))],
}
"""Ways to get positions wrong, with what they make of a row's."""


def _first(row: Sample) -> int:
    return row.loss_mask.index(True)


def _after_prompt(row: Sample, by: int) -> list[int]:
    return [i + by * (i >= _first(row)) for i in range(len(row.token_ids))]


def _positions(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    for name, places in PLACES.items():
        try:
            scores = [third.scores(row, positions=places(row)) for row in rows]
        except (TypeError, IndexError, RuntimeError):  # a model without positions, or with fewer of them
            continue
        yield Explanation("positions-shifted", name, apart(wrong, scores))


def _other_tokens(own: Sequence[torch.Tensor], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    """Are these the right log-probabilities, at other tokens?"""
    cause, those = "logprobs-permuted", "if each token is given the log-probability of"
    for by, name in ((1, "the token before it"), (-1, "the token after it")):
        pairs = [(a.roll(by)[1:-1], b[1:-1]) for a, b in zip(own, wrong, strict=True) if len(a) > 2]
        if pairs:
            yield Explanation(cause, f"{those} {name}", apart([a for a, _ in pairs], [b for _, b in pairs]))
    yield Explanation(
        cause,
        f"{those} another token of its row",
        apart([a.sort().values for a in own], [b.sort().values for b in wrong]),
    )


def elsewhere(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    """Are these the log-probabilities of other tokens of the row, as many in a line, sampled or not?"""
    every = [third.of_all(row) for row in rows]
    for where in ("at the row's start", "at the row's end"):
        pairs = [
            (own[: len(theirs)] if "start" in where else own[-len(theirs) :], theirs)
            for own, theirs in zip(every, wrong, strict=True)
        ]
        if all(len(a) == len(b) for a, b in pairs):
            gap = apart([a for a, _ in pairs], [b for _, b in pairs])
            yield Explanation("logprobs-permuted", f"if tokens are given those of as many tokens {where}", gap)


TELLING = 0.01
"""A token whose log-probability is above minus this in both lists tells nothing: that of nearly every token is about 0."""
FEW_TELLING = 20
"""Smallest number of the other tokens that are compared."""
MOST_EXPLAINED = 0.8
"""Share of them that neighbours must explain: at the end of a turn a shifted mask has nothing, or what is put there."""


def neighbours(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor], limit: float) -> Explanation | None:
    """Are these the log-probabilities of the tokens one or two places before or after, sampled or not? None if not.

    `limit`: a healthy difference of a token, in nats.
    """
    every = [third.of_all(row) for row in rows]
    for by in (1, -1, 2, -2):
        pairs = [
            (values[i - 1 + by].item(), other, values[i - 1].item())
            for row, values, theirs in zip(rows, every, wrong, strict=True)
            for i, other in zip((i for i, sampled in enumerate(row.loss_mask) if sampled), theirs.tolist(), strict=True)
            if 0 <= i - 1 + by < len(values)
        ]
        telling = [(there, other) for there, other, own in pairs if min(other, own) < -TELLING]
        right = sum(abs(there - other) <= limit for there, other in telling)
        if len(telling) >= FEW_TELLING and right >= MOST_EXPLAINED * len(telling):
            where = f"{abs(by)} place{'s' * (abs(by) > 1)} {'after' if by > 0 else 'before'} it"
            condition = f"for {right} of {len(telling)} tokens if each is given that of the token {where}"
            return Explanation("logprobs-permuted", condition, limit)
    return None


def _blanked(third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]) -> Iterator[Explanation]:
    """The trainer may not see the prompt: as much of the row as can be taken away without touching what is scored."""
    alone = [_without(row, range(1, _first(row) - 1)) for row in rows]
    scores = [third.scores(row) for row in alone]
    yield Explanation("loss-mask-as-attention-mask", "without the prompt", apart(wrong, scores))


def _prompts(
    subject: Subject, third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor]
) -> Iterator[Explanation]:
    """The engine may have seen another prompt, in each turn, than the one it was given, which is the one in the row."""
    tokenizer = subject.run.tokenizer
    header = len(tokenizer.encode(assistant_header(tokenizer), add_special_tokens=False))
    turns = [turn for row in rows for turn in by_turn(row)]
    ways: list[tuple[str, str, Callable[[Ids], Ids]]] = [
        ("prompt-replaced", "without the first token of prompts", lambda ids: ids[1:]),
        ("prompt-replaced", "without the last token of prompts", lambda ids: ids[:-1]),
        ("prompt-replaced", "with the first token of prompts twice", lambda ids: ids[:1] + ids),
        ("prompt-replaced", "with the first token of prompts three times", lambda ids: 2 * ids[:1] + ids),
        ("truncated-context", "without the first quarter of prompts", lambda ids: ids[len(ids) // 4 :]),
        ("truncated-context", "without the first half of prompts", lambda ids: ids[len(ids) // 2 :]),
        ("assistant-header-missing", "without the assistant header at the end of prompts", lambda ids: ids[:-header]),
    ]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ways.append(
        ("prompt-replaced", "without special tokens in prompts", lambda ids: [i for i in ids if i not in special])
    )
    ways.append(
        (
            "prompt-replaced",
            "with prompts that are decoded and encoded again",
            lambda ids: tokenizer(tokenizer.decode(ids)).input_ids,
        )
    )
    ways.append(
        (
            "prompt-replaced",
            "with the arguments of earlier calls as a string that holds their JSON",
            lambda ids: _called_by_strings(tokenizer, ids),
        )
    )
    if (start := tokenizer.bos_token_id) is not None:
        ways.append(("prompt-replaced", "with one more start token", lambda ids: [start, *ids]))
    openings = _toolless(subject, rows)
    if openings:
        ways.append(("tools-not-in-prompt", "without tools in prompts", lambda ids: _reopened(ids, openings)))
    tried = [(cause, name, [(change(prompt), reply) for prompt, reply in turns]) for cause, name, change in ways]
    results = [_results(subject, row) for row in rows]
    for name, kept in (("without earlier tool results in prompts", 1), ("without tool results in prompts", 0)):
        changed = [
            (_left(prompt, [r for r in own if r.stop <= len(prompt)], kept), reply)
            for row, own in zip(rows, results, strict=True)
            for prompt, reply in by_turn(row)
        ]
        if changed != turns:
            tried.append(("prompt-replaced", name, changed))
    for cause, name, changed in tried:
        if all(prompt for prompt, _ in changed):
            scores = [third.scores(turn_of(prompt, reply)) for prompt, reply in changed]
            yield Explanation(cause, name, (torch.cat(scores) - torch.cat(list(wrong))).abs().mean().item())


ARGUMENTS = re.compile(r'("arguments": ?)(\{[^{}]*\})')
"""The arguments of a call, as most chat templates write them."""


def _called_by_strings(tokenizer: Any, ids: Ids) -> Ids:
    """The prompt with the arguments of each call encoded as JSON twice; `ids` if there is none."""
    text = tokenizer.decode(ids)
    changed = ARGUMENTS.sub(lambda found: found[1] + json.dumps(found[2]), text)
    return ids if changed == text else tokenizer.encode(changed, add_special_tokens=False)


def _results(subject: Subject, row: Sample) -> list[range]:
    """Places of the row's tokens that are texts of tool results, in order."""
    drawn, places, start = subject.drawn, [], 0
    trace = next((t for s, t in zip(drawn.samples, drawn.traces, strict=True) if s is row), None)
    for node in trace.nodes if trace is not None else ():
        own = [start + i for i, content in enumerate(node.is_content) if content]
        if own and node.message.role == "tool":
            places.append(range(own[0], own[-1] + 1))
        start += len(node.token_ids)
    return places


def _left(ids: Ids, texts: Sequence[range], kept: int) -> Ids:
    """`ids` without these texts, but for the last `kept` of them."""
    gone = {i for text in texts[: len(texts) - kept] for i in text}
    return [token for i, token in enumerate(ids) if i not in gone]


def after_short_prompts(subject: Subject, score: Callable[[Sample], torch.Tensor], limit: float) -> str | None:
    """Evidence that the engine adds to prompts or replaces them; None if there is none.

    Of a prompt of one token nothing can be missing. If the engine's log-probabilities are wrong even after such prompts,
    at temperature 1, it has another context, or it makes some tokens less likely. What makes some tokens less likely, or
    leaves them out, makes all others likelier, so that sampled tokens other than the prompt's must be less likely in the
    engine for that to be ruled out. `score`: right log-probabilities of a row's sampled tokens at temperature 1.
    """
    words = sorted({t for row in subject.drawn.samples for t in row.token_ids})
    prompts = [[words[len(words) * k // SHORT]] for k in range(SHORT)]
    try:
        replies = subject.generate(prompts, Sampling(1, temperature=1.0, seed=0))
    except EngineError:
        return None
    pairs = [(p, reply) for p, reply in zip(prompts, replies, strict=True) if reply.token_ids]
    if not pairs:
        return None
    rows = [turn_of(p, list(reply.token_ids)) for p, reply in pairs]
    engine, own = [torch.tensor(reply.logprobs) for _, reply in pairs], [score(row) for row in rows]
    others = [(e - o) for e, o, row in zip(engine, own, rows, strict=True) if row.token_ids[0] != row.token_ids[1]]
    lower = int((torch.cat(others) < -limit).sum()) if others else 0
    if not (gap := apart(engine, own)) > limit or not lower:
        return None
    return f"after prompts of a single token, the engine differs by {gap:.2g} nats, {lower} of {len(rows)} tokens are less likely"


def by_turn(row: Sample) -> list[tuple[Ids, Ids]]:
    """The row's turns: (ids of the prompt, sampled ids)."""
    mask = [*row.loss_mask, False]
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    ends = [i for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]
    return [(row.token_ids[:start], row.token_ids[start:end]) for start, end in zip(starts, ends, strict=True)]


def turn_of(prompt: Ids, reply: Ids) -> Sample:
    """A row of one prompt and the tokens that were sampled after it."""
    mask = [False] * len(prompt) + [True] * len(reply)
    return Sample([*prompt, *reply], mask, [0.0] * len(mask), 0.0, "", "", False)


def _without(row: Sample, left_out: range) -> Sample:
    kept = [i for i in range(len(row.token_ids)) if i not in left_out]
    values = [0.0] * len(kept)
    return Sample([row.token_ids[i] for i in kept], [row.loss_mask[i] for i in kept], values, 0.0, "", "", False)


def _toolless(subject: Subject, rows: Sequence[Sample]) -> list[tuple[Ids, Ids]]:
    """(first prompt, the same rendered without tools) of each row whose task has tools."""
    drawn, pairs = subject.drawn, []
    for row in rows:
        trace = next((t for s, t in zip(drawn.samples, drawn.traces, strict=True) if s is row), None)
        if trace is None or not trace.tools:
            continue
        opening = itertools.takewhile(lambda node: not node.sampled, trace.nodes)
        messages = [verifiers_messages.to_wire(node.message) for node in opening]
        bare = subject.run.sampler.chat.prompt(messages, tools=[]).token_ids
        pairs.append((row.token_ids[: _first(row)], list(bare)))
    return pairs


def _reopened(ids: Ids, openings: Sequence[tuple[Ids, Ids]]) -> Ids:
    """The prompt with the second opening in place of the first, where it begins with the first."""
    return next((bare + ids[len(full) :] for full, bare in openings if ids[: len(full)] == full), ids)
