"""Are turns that are an end token alone as frequent as the model makes them? A turn without a token is an engine's failure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from plumbob.rollout import EngineError, Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.other_context import other_order
from plumbob.trainer.doctor.subject import Subject, mean_abs
from plumbob.trainer.doctor.third_opinion import in_turns, third_opinion

ORDER = 12

FEWEST = 4
"""Number of empty turns from which on they are looked at."""
MOST = 32
"""Number of empty turns whose probability is computed."""


def probe(subject: Subject) -> Iterator[Finding]:
    """Of empty turns, compare the number with the model's probabilities.

    Sampled by a model, turn number i begins with its end token with probability p_i. So the sum of 1/p_i over the empty
    turns has the number of all turns as its expectation, and exceeds k times that with probability 1/k at most (Markov).
    """
    check = "turns are not empty"
    calls = [call for turns in subject.drawn.calls for call in turns]
    ends = set(subject.run.sampler.chat.stop_token_ids)
    empty = [
        call for call in calls if len(call.completion.token_ids) == 1 and ends.issuperset(call.completion.token_ids)
    ]
    evidence = f"{len(empty)} of {len(calls)} turns are an end token alone"
    if len(empty) < FEWEST or len(empty) < thresholds.EMPTY_TURNS * len(calls):
        yield Finding(check, "pass", evidence)
        return
    rows = []
    for call in empty[:MOST]:
        n = len(call.prompt_ids)
        ids = [*call.prompt_ids, *call.completion.token_ids]
        rows.append(Sample(ids, [False] * n + [True], [0.0] * (n + 1), 0.0, "", "", False))
    rare = math.fsum(_rarity(subject, rows)) / len(calls)
    evidence += f"; that the model made so many has a probability of at most {min(1 / rare, 1.0):.2g}"
    if not rare > thresholds.UNLIKELY_EMPTY:
        yield Finding(check, "pass", evidence)
    elif asked := other_order(subject, third_opinion(subject, 1.0), subject.gap_limit):
        yield Finding(check, "fail", f"{evidence}; {asked}", "prompt-replaced")
    elif (apart := _others_apart(subject)) > subject.gap_limit:
        evidence += (
            f"; on the tokens of other turns engine and trainer differ by {apart:.2g} nats, so these are not alone"
        )
        yield Finding(check, "unsure", evidence)
    else:
        yield Finding(check, "fail", evidence, "empty-completions")


def _others_apart(subject: Subject) -> float:
    """Mean |difference| of engine and trainer on the tokens of turns that have several, in nats; 0 without any."""
    samples = [s for s in subject.drawn.samples if s.num_sampled]
    rows = [samples[i] for i in spread(len(samples), MOST)]
    pairs = [
        (theirs, own)
        for row, scores in zip(rows, subject.score(rows), strict=True)
        for theirs, own in zip(in_turns(row, torch.tensor(row.sampled_logprobs)), in_turns(row, scores), strict=True)
        if len(own) > 1
    ]
    return mean_abs([a for a, _ in pairs], [b for _, b in pairs]) if pairs else 0.0


def _rarity(subject: Subject, rows: list[Sample]) -> list[float]:
    """1 / probability of each row's last token, by the trainer or the engine, whichever says that it is likelier."""
    found = []
    for row, scores in zip(rows, subject.score(rows), strict=True):
        logprob = scores[-1].item()
        with contextlib.suppress(EngineError):
            logprob = max(logprob, subject.run.engine.score(row.token_ids)[-1])
        found.append(math.exp(min(-logprob, 500.0)))
    return found
