"""Does the engine sample after another context than the prompt that it was given?

Asked where engine and trainer differ on sampled tokens, the engine is wrong, and no known change of the prompt explains it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.explanations import Third, apart, by_turn, explains, turn_of
from plumbob.trainer.doctor.subject import Subject

OTHERS = 16
"""Most prompts of other tasks that are tried."""
PROMPTS, DRAWS = 4, 48
"""Number of prompts of one token after which tokens are drawn, and of draws after each."""
HOT = 4.0
"""Temperature of these draws, so that they have many different tokens."""
FEWEST_PAIRS = 40
"""Fewest pairs of tokens by whose order this is judged."""
CLEARLY = 0.05
"""Difference in nats from which on one of two tokens is likelier than the other."""


def another_tasks_prompt(
    subject: Subject, third: Third, rows: Sequence[Sample], wrong: Sequence[torch.Tensor], limit: float
) -> str | None:
    """Evidence that first turns were sampled after the prompts of other tasks; None if there is none.

    `wrong`: the engine's log-probabilities [N] of each row's sampled tokens. `limit`: healthy difference, in nats.
    """
    prompts = [by_turn(row)[0][0] for row in subject.drawn.samples if row.num_sampled]
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    tried = [distinct[i] for i in spread(len(distinct), OTHERS)]
    before, after, moved = [], [], 0
    for row, theirs in zip(rows, wrong, strict=True):
        own, reply = by_turn(row)[0]
        given = theirs[: len(reply)]
        here = apart([third.scores(turn_of(own, reply))], [given])
        gaps = [apart([third.scores(turn_of(prompt, reply))], [given]) for prompt in tried if prompt != own]
        moved += min(gaps, default=here) < here
        before.append(here)
        after.append(min([here, *gaps]))
    gap, rest = sum(before) / len(rows), sum(after) / len(rows)
    if not explains(rest, gap, limit):
        return None
    return f"the engine computes first turns of {moved} of {len(rows)} rollouts after the prompt of another task (rest {rest:.2g})"


def other_order(subject: Subject, third: Third, limit: float) -> str | None:
    """Evidence that the engine adds to prompts; None if there is none, or if it disagrees on given tokens as well.

    Prompts of one token are asked, in which wrong attention or positions cannot show. The engine agrees with the model on given
    tokens, so its weights are right. Whatever a sampler then does to the logits (temperature, tokens left out, a limit of logits),
    likelier tokens stay likelier. Where many pairs of tokens have the other order, and the same one each time, the logits are those
    of another context.
    """
    if not subject.began:
        return None
    words = sorted({token for row in subject.drawn.samples for token in row.token_ids})
    chosen = [[words[i]] for i in spread(len(words), PROMPTS)]
    pairs, turned = 0, 0
    for prompt in chosen:
        try:
            drawn = subject.generate([prompt] * DRAWS, Sampling(1, temperature=HOT), range(DRAWS))
        except EngineError:
            return None
        told: dict[int, list[float]] = defaultdict(list)
        for reply in drawn:
            if reply.token_ids:
                told[reply.token_ids[0]].append(reply.logprobs[0])
        if any(max(values) - min(values) > max(limit, CLEARLY) for values in told.values()):
            return None  # the sampler adds noise
        own = (third.logits([*prompt, *prompt])[-1] / HOT).tolist()
        for a, b in itertools.combinations(told, 2):
            engine, model = told[a][0] - told[b][0], own[a] - own[b]
            if min(abs(engine), abs(model)) > max(limit, CLEARLY):
                pairs += 1
                turned += (engine > 0) != (model > 0)
    if pairs < FEWEST_PAIRS or turned <= thresholds.OTHER_ORDER * pairs:
        return None
    return (
        f"the engine agrees on given tokens, but of {pairs} pairs of tokens after {len(chosen)} prompts of one token it has "
        f"{turned} in the other order of probability, each time: it samples after something more than the prompt"
    )
