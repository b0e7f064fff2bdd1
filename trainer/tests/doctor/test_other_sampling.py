"""Tokens that are drawn otherwise than reported, on logits made by random numbers: what is drawn is known."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import pytest
import torch
from plumbob.rollout import Sample
from plumbob.testing.examinations import causes
from plumbob.testing.faults.field2_parts import engine_completions
from plumbob.trainer.diagnosis.copied_rollouts import copied
from plumbob.trainer.doctor import explanations, other_sampling
from plumbob.trainer.doctor.explanations import explain
from plumbob.trainer.doctor.other_sampling import View, all_scores, closest, joined, weigh
from plumbob.trainer.doctor.probes import parity, penalties
from plumbob.trainer.doctor.third_opinion import Explanation

V = 60
Change = Callable[[torch.Tensor, list[int]], torch.Tensor]


def rows(change: Change | None, seed: int, count: int = 8, turns: int = 2, size: int = 40) -> list[tuple[Sample, Any]]:
    """(row, logits [T, V]) of tokens that are drawn from `change(logits, the row's ids so far)`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids: list[int] = []
        mask: list[bool] = []
        logits = 2 * torch.randn((turns * (size + 10), V), generator=generator)
        for _ in range(turns):
            ids += torch.randint(V, (10,), generator=generator).tolist()
            mask += [False] * 10
            for _ in range(size):
                before = logits[len(ids) - 1]
                p = (before if change is None else change(before, ids)).softmax(-1)
                ids.append(int(torch.multinomial(p, 1, generator=generator)))
                mask.append(True)
        found.append((Sample(ids, mask, [0.0] * len(ids), 0.0, "", "", False), logits))
    return found


def top_k(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logits.masked_fill(logits < logits.topk(8).values[-1], -math.inf)


def presence(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logits.index_add(0, torch.tensor(sorted(set(ids))), torch.full((len(set(ids)),), -1.2))


def repetition(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    seen = torch.zeros(V, dtype=torch.bool)
    seen[ids] = True
    return torch.where(seen, torch.where(logits > 0, logits / 1.37, logits * 1.37), logits)


def no_repeats(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Written as transformers describes no_repeat_ngram_size = 2, by comparing every pair of neighbours."""
    banned = [b for a, b in itertools.pairwise(ids) if a == ids[-1]]
    return logits.index_fill(0, torch.tensor(banned, dtype=torch.long), -math.inf)


@pytest.mark.parametrize(
    ("change", "cause", "count"),
    [
        (lambda logits, ids: logits / 0.75, "temperature-not-applied", 8),
        (lambda logits, ids: logits / 1.4, "temperature-not-applied", 8),
        (lambda logits, ids: logits / 1e-6, "temperature-not-applied", 8),  # greedy
        (top_k, "sampling-truncated", 8),
        (presence, "sampling-penalised", 8),
        (repetition, "sampling-penalised", 8),
        (no_repeats, "sampling-penalised", 32),  # random tokens seldom repeat two
    ],
)
def test_tokens_alone_show_other_settings_of_the_sampler(change, cause, count):
    """Nothing but the tokens differs, as with an engine that reports the model's own log-probabilities."""
    views = [View(row, logits, 1.0) for row, logits in rows(change, 0, count)]
    found = weigh([view.logprobs for view in views], [all_scores(view) for view in views])
    assert found.log_ratio > math.log(1e6) and found.cause == cause and found.next_cause > math.log(20)


def test_without_a_fault_a_large_likelihood_ratio_is_as_rare_as_said():
    """Ville's bound: above 20 in at most one of 20 examinations, although all numbers of all ways are tried."""
    above = 0
    for seed in range(60):
        views = [View(row, logits, 1.0) for row, logits in rows(None, seed, count=2, size=15)]
        above += weigh([v.logprobs for v in views], [all_scores(v) for v in views]).log_ratio > math.log(20)
    assert above <= 3


def test_every_other_distribution_is_one():
    """The probabilities of all tokens at one place sum to 1 under every way and number."""
    (row, logits), *_ = rows(None, 1, count=1)
    sums: dict[Any, float] = {}
    for token in range(V):
        changed = Sample([*row.token_ids[:-1], token], row.loss_mask, row.sampling_logprobs, 0.0, "", "", False)
        for key, logprobs in all_scores(View(changed, logits, 0.8)).items():
            sums[key] = sums.get(key, 0.0) + logprobs[-1].exp().item()
    assert len(sums) > 50 and all(total == pytest.approx(1, abs=1e-4) for total in sums.values())


@pytest.mark.parametrize("limit", [1, 3 * 20 * V, 1 << 30])
def test_rows_that_are_looked_at_together_have_the_scores_of_each_alone(monkeypatch, limit):
    """Also where one has tokens that another has not, and where repeated tokens would be banned in both."""
    monkeypatch.setattr(other_sampling, "JOINED_LOGITS", limit)
    some = [*rows(None, 3, count=3, size=4), *rows(None, 4, count=2, turns=1, size=30)]
    views = [View(row, logits, 0.8) for row, logits in some]
    together = list(joined(iter(views)))
    assert len(together) == {1: len(views), 1 << 30: 1}.get(limit, len(together)) and len(together) <= len(views)
    alone, found = [all_scores(view) for view in views], [all_scores(view) for view in together]
    for key in alone[0]:
        expected = torch.cat([scores[key] for scores in alone])
        torch.testing.assert_close(torch.cat([scores[key] for scores in found]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "way"),
    [(repetition, "repetition penalty of 1.37"), (no_repeats, "without a repetition of 2 tokens")],
)
def test_a_penalty_is_found_in_log_probabilities(change, way):
    views, wrong = [], []
    for row, logits in rows(change if change is no_repeats else None, 2, count=3):
        views.append(View(row, logits, 0.9))
        at = [i for i, sampled in enumerate(row.loss_mask) if sampled]
        changed = [change(logits[i - 1], row.token_ids[:i]) / 0.9 for i in at]
        wrong.append(torch.stack([c.log_softmax(-1)[row.token_ids[i]] for c, i in zip(changed, at, strict=True)]))
    cause, words, rest = closest(views, wrong)
    before = (torch.cat(wrong) - torch.cat([v.logprobs for v in views])).abs().mean().item()
    assert cause == "sampling-penalised" and way in words and rest < 0.02 * before


def test_copies_are_told_from_a_policy_that_is_sure_of_its_tokens():
    sure = [[([1, 2, 3], -0.05)] * 8 for g in range(8)]
    assert copied(sure) < math.log(20)
    same_seed = [[([g, 2, 3], -4.0)] * 8 for g in range(4)]
    assert copied(same_seed) > math.log(1e6)
    in_pairs = [[([g, k // 2], -6.0) for k in range(8)] for g in range(4)]
    assert copied(in_pairs) > math.log(1e6)
    independent = [[([g, k], -4.0) for k in range(8)] for g in range(4)]
    assert copied(independent) < 0


def test_a_pattern_of_copies_shows_where_most_rollouts_are_equal_by_chance():
    """A policy that is sure of its tokens: each rollout is one of four texts, the first in most cases."""
    chance = random.Random(0)

    def drawn(number: int) -> list[tuple[list[int], float]]:
        texts = chance.choices(range(4), weights=(0.7, 0.1, 0.1, 0.1), k=number)
        return [([text], math.log(0.7 if text == 0 else 0.1)) for text in texts]

    workers = [drawn(4) * 2 for _ in range(8)]  # two workers whose seeds begin alike
    assert copied(workers) > math.log(1e6)
    in_pairs = [[row for row in drawn(4) for _ in range(2)] for _ in range(8)]
    assert copied(in_pairs) > math.log(1e6)
    above = sum(copied([drawn(8) for _ in range(4)]) > math.log(20) for _ in range(400))
    assert above <= 400 / 20  # Ville's bound, although all patterns are tried


def test_a_rest_below_the_limit_is_no_explanation_of_a_difference_hardly_above_it(monkeypatch):
    """Else a condition that changes nearly nothing would be named for any difference that is small enough."""
    own, wrong = [torch.zeros(4)], [torch.full((4,), 1.3e-3)]
    for name in (
        "_positions",
        "other_tokens",
        "_other_numbers",
        "elsewhere",
        "other_prompts",
        "_favoured",
        "_blanked",
    ):
        monkeypatch.setattr(explanations, name, lambda *given: [])
    for name in ("_means", "_no_early_end"):
        monkeypatch.setattr(explanations, name, lambda *given: Explanation("x", "x", 1.0))
    for rest, named in ((9e-4, False), (1e-4, True)):
        monkeypatch.setattr(explanations, "_temperature", lambda *given, rest=rest: Explanation("x", "x", rest))
        found = explain(None, None, [None], own, wrong, 1e-3, engine=True)  # type: ignore[arg-type, list-item]
        assert (found is not None) == named


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda own: own / math.log(2), "in bits"),
        (lambda own: -own, "without their sign"),
        (lambda own: 0.7 * own, "times 0.7"),
        (lambda own: own - 2.0, "-2"),
    ],
)
def test_log_probabilities_in_other_numbers_are_named(change, said):
    own = torch.rand(50, generator=torch.Generator().manual_seed(0)).log()
    best = min(explanations._other_numbers([own], [change(own)]), key=lambda found: found.gap)
    assert best.condition == f"the right log-probabilities {said}" and best.gap < 1e-6


@pytest.mark.slow
def test_the_mean_of_a_turn_for_each_token_is_no_penalty(subject_of):
    def mean_of_all(completion, prompt, sampling):
        return dataclasses.replace(completion, logprobs=(fmean(completion.logprobs),) * len(completion.logprobs))

    with ExitStack() as stack:
        engine_completions(mean_of_all)(stack, "lookup")
        subject = subject_of(groups=8)
        assert causes(penalties.probe(subject)) == []
        finding = next(f for f in parity.probe(subject) if "sampled tokens" in f.check)
    assert finding.cause == "engine-trainer-mismatch" and "the mean of its turn for each token" in finding.evidence
