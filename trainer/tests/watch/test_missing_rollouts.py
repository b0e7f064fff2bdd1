"""Finished rollouts that are missing from their groups, and whether their length decides which."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.left_out_rollouts import LeftOut, left_out, standard_errors
from plumbob.trainer.diagnosis.left_out_rollouts import judged as cause_of
from plumbob.trainer.watch.history import History
from plumbob.trainer.watch.sampling_rules import dropped_lengths

SIZE = 8


def trace(group: int, number: int, length: int, **changes: Any) -> Any:
    node = SimpleNamespace(mask=[True] * length, token_ids=[group, number, *range(length)], logprobs=[-1.0] * length)
    own = {"id": f"{group}/{number}", "nodes": [node], "ok": True, "reward": 0.0}
    return SimpleNamespace(**{**own, "task": SimpleNamespace(key=str(group)), **changes})


def row(of: Any) -> Sample:
    ids = of.nodes[0].token_ids
    return Sample(ids, [True] * len(ids), [0.0] * len(ids), 0.0, of.task.key, of.id, False)


def groups(seed: int, count: int = 8) -> list[list[Any]]:
    chance = random.Random(seed)
    return [[trace(g, k, chance.randint(1, 30)) for k in range(SIZE)] for g in range(count)]


def judged(keep: Callable[[list[Any]], list[Any]]) -> tuple[str | None, str]:
    """What the rule says of five steps in which `keep` chooses the rollouts of each group."""
    watched = History(TrainConfig())
    for number in range(1, 6):
        every = groups(number)
        found = left_out([row(t) for group in every for t in keep(group)], [t for group in every for t in group])
        step = {"step": float(number), "rollout/missing": float(found.count), "rollout/count": 64.0}
        names = ("longer", "variance", "better", "better_variance", "odd")
        watched.add(step | {f"rollout/missing_{name}": float(getattr(found, name)) for name in names})
    outcome = dropped_lengths(watched)
    assert outcome is not None
    return outcome


def test_the_longest_are_missed_and_a_random_part_is_not_called_biased() -> None:
    cause, evidence = judged(lambda group: sorted(group, key=lambda t: len(t.nodes[0].mask))[:5])
    assert cause == "drops-are-biased" and "they are longer" in evidence
    cause, evidence = judged(lambda group: sorted(group, key=lambda t: -len(t.nodes[0].mask))[:5])
    assert cause == "drops-are-biased" and "they are shorter" in evidence
    cause, evidence = judged(lambda group: group[:5])
    assert cause == "too-little-signal" and "120 rollouts" in evidence
    cause, evidence = judged(lambda group: group[:7])
    assert cause is None and "40 rollouts" in evidence


def test_few_missing_rollouts_are_not_judged() -> None:
    kept = LeftOut(count=2, longer=6, variance=1.0, better=0.0, better_variance=1.0)
    assert cause_of(kept, 64)[0] is None
    assert cause_of(dataclasses.replace(kept, count=4), 64)[0] == "drops-are-biased"
    assert cause_of(LeftOut(count=32), 64)[0] == "too-little-signal"


def test_those_that_earn_less_are_missed() -> None:
    def keep(group: list[Any]) -> list[Any]:
        for t in group[::2]:
            t.reward = 1.0
        return [t for k, t in enumerate(group) if t.reward or k % 4 == 1]

    cause, evidence = judged(keep)
    assert cause == "drops-are-biased" and "earn less" in evidence


def test_what_has_no_finite_log_probability_cannot_be_used() -> None:
    every = groups(1)
    every[0][0].nodes[0].logprobs[0] = float("nan")
    kept = [row(t) for group in every for t in group if t is not every[0][0]]
    assert left_out(kept, [t for group in every for t in group]).count == 0


@pytest.mark.parametrize(("also", "cause"), [(0, "too-little-signal"), (1, "drops-are-biased")])
def test_a_filter_of_odd_rewards_is_told_from_one_that_leaves_a_signal(also: int, cause: str | None) -> None:
    """One rollout of each group has another reward and is missing; `also`: so is one with the reward of the others."""

    def keep(group: list[Any]) -> list[Any]:
        group[3].reward = 1.0
        return group[:3] + group[4 : SIZE - also]

    found, evidence = judged(keep)
    assert found == cause and ("the only one of its group with its reward" in evidence) == (also == 0)
    assert also == 0 or "earn more" in evidence


def test_what_cannot_be_used_and_whole_groups_are_not_missing() -> None:
    every = groups(1)
    every[0][0].ok = False
    every[1][0].reward = float("nan")
    every[2][0].nodes = []
    kept = [t for group in every[:7] for t in group if t.ok and t.reward == t.reward and t.nodes]
    assert left_out([row(t) for t in kept], [t for group in every for t in group]).count == 0
    # A row with the tokens of a rollout is that rollout's, whatever its id.
    renamed = [row(trace(int(t.task.key), int(t.id[2:]), len(t.nodes[0].mask), id="other")) for t in kept]
    assert left_out(renamed, [t for group in every for t in group]).count == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, SIZE - 1))
def test_the_variance_is_that_of_rollouts_left_out_at_random(seed: int, missing: int) -> None:
    """Over all ways to leave out one rollout the mean is 0 and the variance as stated; of more, by a simulation's bound."""
    (group,) = groups(seed, 1)
    if missing == 1:
        found = [left_out([row(t) for t in group if t is not gone], group) for gone in group]
        assert sum(f.longer for f in found) == 0
        assert sum(f.longer**2 for f in found) / SIZE == pytest.approx(found[0].variance)
    else:
        chance = random.Random(seed)
        found = [left_out([row(t) for t in chance.sample(group, SIZE - missing)], group) for _ in range(200)]
        assert found[0].variance == pytest.approx(found[1].variance)
        observed = sum(standard_errors(f.longer, f.variance) ** 2 for f in found) / len(found)
        assert 0.5 < observed < 1.6 or found[0].variance == 0
