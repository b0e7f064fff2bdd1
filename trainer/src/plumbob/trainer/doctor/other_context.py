"""Does the engine sample after another context than the prompt that it was given?

Asked where engine and trainer differ on sampled tokens, the engine is wrong, and no known change of the prompt explains it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import torch
from plumbob.rollout import EngineError, Sample, Sampling
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.subject import Subject, mean_abs
from plumbob.trainer.doctor.third_opinion import Ids, Third, by_turn, explains, turn_of

ONE_TOKEN = "prompts of one token"
OTHERS = 16
"""Most prompts of other tasks that are tried."""
PROMPTS, DRAWS = 4, 64
"""Number of prompts of one kind after which tokens are drawn, and of draws after each."""
HOT = 4.0
"""Temperature of these draws, so that they have many different tokens."""
FEWEST_PAIRS = 40
"""Fewest pairs of tokens by whose order this is judged."""
FEWEST_TURNED = 3
"""Fewest of them that must have the other order."""
CLEARLY = 1e-3
"""Difference in nats from which on one of two tokens is likelier than the other, if a healthy difference is smaller."""
BIASED = 4
"""Number of tokens that are left out, those with the most pairs in the other order: a sampler may favour or avoid a few tokens."""


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
        here = mean_abs([third.scores(turn_of(own, reply))], [given])
        gaps = [mean_abs([third.scores(turn_of(prompt, reply))], [given]) for prompt in tried if prompt != own]
        moved += min(gaps, default=here) < here
        before.append(here)
        after.append(min([here, *gaps]))
    gap, rest = sum(before) / len(rows), sum(after) / len(rows)
    if not explains(rest, gap, limit):
        return None
    return f"the engine computes first turns of {moved} of {len(rows)} rollouts after the prompt of another task (rest {rest:.2g})"


def other_order(subject: Subject, third: Third, limit: float) -> str | None:
    """Evidence that the engine adds to prompts or changes them; None if there is none, or if it is wrong on given tokens too.

    The engine agrees with the model on given tokens, so its weights are right. Whatever a sampler then does to the logits
    (temperature, tokens left out, a limit of logits), likelier tokens stay likelier. Where many pairs of tokens have the other
    order, and the same one each time, the logits are those of another context. Prompts of one token are asked first, in
    which wrong attention or positions cannot show, and then prompts of the rollouts, first and later turns apart, on whose
    own tokens engine and model must agree as well.
    """
    if not subject.began:
        return None
    least = float(thresholds.OTHER_ORDER[subject.run.config.bf16])
    for what, prompts in _kinds(subject, third, limit):
        if (found := _turned(subject, third, prompts, limit)) is None:
            return None
        turned, pairs, most = found
        if pairs < FEWEST_PAIRS:
            continue
        if not (turned >= FEWEST_TURNED and turned > least * pairs):
            continue
        # Wrong arithmetic turns pairs of like tokens, after longer prompts as after those of one token; another context turns
        # more after prompts in which more depends on it.
        if what == ONE_TOKEN and most <= thresholds.ARITHMETIC:
            least = max(least, 2 * turned / pairs)
            continue
        return (
            f"the engine agrees on given tokens, but of {pairs} pairs of tokens after {len(prompts)} {what} it has {turned} "
            "in the other order of probability, each time: it samples after another context than the prompt"
        )
    return None


def _kinds(subject: Subject, third: Third, limit: float) -> Iterator[tuple[str, list[Ids]]]:
    """(what they are, some prompts) of each kind of prompts on whose own tokens engine and model agree."""
    words = sorted({token for row in subject.drawn.samples for token in row.token_ids})
    yield ONE_TOKEN, [[words[i]] for i in spread(len(words), PROMPTS)]
    own = [[prompt for prompt, _ in by_turn(row)] for row in subject.drawn.samples if row.num_sampled]
    first = _spread([turns[0] for turns in own])
    later = _spread([turns[-1] for turns in own if len(turns) > 1])
    for what, prompts in (("first prompts", first), ("prompts of later turns", later)):
        if prompts and _agree(subject, third, prompts, limit):
            yield what, prompts


def _spread(prompts: Sequence[Ids]) -> list[Ids]:
    distinct = [list(ids) for ids in dict.fromkeys(map(tuple, prompts))]
    return [distinct[i] for i in spread(len(distinct), PROMPTS)]


def _agree(subject: Subject, third: Third, prompts: Sequence[Ids], limit: float) -> bool:
    """Whether the engine, asked for the log-probabilities of these prompts' own tokens, agrees with the model."""
    try:
        scored = [torch.tensor(subject.run.engine.score(ids)) for ids in prompts]
    except EngineError:
        return False
    return mean_abs(scored, [third.of_all(turn_of(ids, [])) for ids in prompts]) <= limit


def _turned(subject: Subject, third: Third, prompts: Sequence[Ids], limit: float) -> tuple[int, int, float] | None:
    """(pairs of tokens that have another order of probability in the engine, all pairs that were compared, largest share after one
    prompt) after these prompts.

    None if the sampler adds noise, or if it favours the same tokens by the same amount after every prompt, as a logit bias does.
    Prompts that the engine refuses are left out, and so are tokens that a prompt of several tokens has: penalties on them are
    another defect.
    """
    clearly = max(limit, CLEARLY)
    pairs: list[tuple[int, int, bool, int]] = []
    surplus: dict[tuple[int, int], list[float]] = defaultdict(list)
    # As rollouts ask for it.
    asked = Sampling(1, temperature=HOT, stop_token_ids=subject.run.sampler.chat.stop_token_ids)
    for number, prompt in enumerate(prompts):
        try:
            drawn = subject.generate([prompt] * DRAWS, asked, range(DRAWS))
        except EngineError:
            continue
        told: dict[int, list[float]] = defaultdict(list)
        for reply in drawn:
            if reply.token_ids and (len(prompt) == 1 or reply.token_ids[0] not in prompt):
                told[reply.token_ids[0]].append(reply.logprobs[0])
        if any(max(values) - min(values) > clearly for values in told.values()):
            return None
        logits = (third.logits([*prompt, prompt[-1]])[-1] / HOT).tolist()
        for a, b in itertools.combinations(told, 2):
            engine, model = told[a][0] - told[b][0], logits[a] - logits[b]
            if min(abs(engine), abs(model)) > clearly:
                pairs.append((a, b, (engine > 0) != (model > 0), number))
                surplus[min(a, b), max(a, b)].append((engine - model) if a < b else (model - engine))
    if _everywhere(surplus, clearly):
        return None
    for _ in range(BIASED):
        involved = Counter(token for a, b, other, _ in pairs if other for token in (a, b))
        if involved:
            most = involved.most_common(1)[0][0]
            pairs = [pair for pair in pairs if most not in pair[:2]]
    by_prompt: dict[int, list[bool]] = defaultdict(list)
    for _, _, other, number in pairs:
        by_prompt[number].append(other)
    most = max((fmean(own) for own in by_prompt.values() if len(own) >= FEWEST_PAIRS / PROMPTS), default=0.0)
    return sum(other for _, _, other, _ in pairs), len(pairs), most


def _everywhere(surplus: Mapping[tuple[int, int], Sequence[float]], clearly: float) -> bool:
    """Whether engine and model differ by the same amount after each prompt, for nearly each pair of tokens.

    `surplus`: pair of tokens -> by how many nats more the engine prefers the first to the second, after each of some prompts.
    """
    several = [values for values in surplus.values() if len(values) > 1]
    differ = [values for values in several if max(map(abs, values)) > clearly]
    same = sum(max(values) - min(values) <= clearly for values in differ)
    return len(differ) >= FEWEST_PAIRS and same > thresholds.SAME_BIAS * len(differ)
