"""Faults of rewards on their way to advantages: those of other rollouts, other groups, another baseline or scale."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import Fault, table
from plumbob.testing.faulty.helpers import by_group, regrouped, rewarded


def others_of(rewards: Callable[[list[Sample]], Iterable[Sample]]) -> Callable[[list[Sample]], list[Sample]]:
    """Each row of a group has the reward of the one at its place in `rewards(group)`."""
    return lambda rows: [
        rewarded(row, other) for group in by_group(rows) for row, other in zip(group, rewards(group), strict=True)
    ]


def neighbours(rows: list[Sample]) -> list[Sample]:
    """The groups exchange their rewards in pairs."""
    groups = by_group(rows)
    pairs = ((group, groups[min(k ^ 1, len(groups) - 1)]) for k, group in enumerate(groups))
    return [rewarded(row, other[i % len(other)]) for group, other in pairs for i, row in enumerate(group)]


def signal(rows: list[Sample]) -> list[Sample]:
    """The rows of the groups whose rewards differ."""
    return [row for group in by_group(rows) if len({one.reward for one in group}) > 1 for row in group]


def unrewarded(row: Sample) -> Sample:
    return replace(row, reward=0.0, rewards=dict.fromkeys(row.rewards, 0.0))


def names_of(rows: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(row.group for row in rows))


def dealt_out(rows: list[Sample]) -> list[Sample]:
    names = names_of(rows)
    dealt = regrouped(rows, itertools.islice(itertools.cycle(names), len(rows)))
    return sorted(dealt, key=lambda row: names.index(row.group))


def joined_in_pairs(rows: list[Sample]) -> list[Sample]:
    names = names_of(rows)
    return regrouped(rows, (names[names.index(row.group) & ~1] for row in rows))


# Advantages


def over(group: Callable[[int, Sample], str]) -> Callable[[Any, Sequence[Sample]], Any]:
    """Advantages as if row number i was in the group `group(i, row)`."""

    def change(compute: Any, rows: Sequence[Sample]) -> Any:
        other = compute(regrouped(rows, (group(i, row) for i, row in enumerate(rows))))
        return replace(other, with_signal=frozenset(row.group for row in rows))

    return change


def baseline(of: Callable[[list[Sample]], float]) -> Callable[[list[float], Sequence[Sample]], list[float]]:
    """Rewards minus `of(the row's group)`."""

    def change(values: list[float], rows: Sequence[Sample]) -> list[float]:
        found = {group[0].group: of(group) for group in by_group(rows)}
        return [row.reward - found[row.group] for row in rows]

    return change


def leads_by_rounding(values: list[float], rows: Sequence[Sample]) -> list[float]:
    """Each reward minus the mean of the others, over their deviation as float32 computes it."""
    found: dict[str, Any] = {}
    for group in by_group(rows):
        rewards, others = torch.tensor([row.reward for row in group], dtype=torch.float32), len(group) - 1
        means = (rewards.sum() - rewards) / others
        squares = ((rewards * rewards).sum() - rewards * rewards) / others
        deviations, leads = (squares - means * means).clamp(min=0).sqrt(), rewards - means
        same = len({row.reward for row in group}) == 1
        scaled = torch.where(deviations > 0, leads / (deviations + 1e-6), leads)
        found[group[0].group] = iter([0.0] * len(group) if same else scaled.tolist())
    return [next(found[row.group]) for row in rows]


def unsorted(original: Any, rows: Sequence[Sample], found: Any, *rest: Any, **how: Any) -> Any:
    """Advantages stay in the order in which rows would be sorted by their length."""
    values = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].token_ids))
    for value, i in zip(found.values, order, strict=True):
        values[i] = value
    return original(rows, replace(found, values=values), *rest, **how)


def mask_forgotten(original: Any, rows: Any, found: Any, config: Any, *rest: Any, **how: Any) -> Any:
    return original(rows, found, replace(config, overlong="keep"), *rest, **how)


# fmt: off
FAULTS = (
*table("advantages",
    Fault("rewards rotated within each group",
          "Each rollout is trained with the reward of the next rollout of its group.", at.batch,
          others_of(lambda group: [*group[1:], group[0]]), "rewards-of-other-rollouts",
          "PeterGriffinJin/Search-R1#88; the review's table"),
    Fault("one reward broadcast to its group",
          "The reward of a group's first rollout is given to all of its rollouts.", at.batch,
          others_of(lambda group: [group[0]] * len(group)), "rewards-of-other-rollouts", "huggingface/trl#6533"),
    Fault("rewards in the order in which rollouts end",
          "Rewards are collected as rollouts end, the shortest first, and given out in the order of the group.",
          at.batch, others_of(lambda group: sorted(group, key=lambda row: row.num_sampled)),
          "rewards-of-other-rollouts", "the review's table, verl-project/verl#1569 (asynchronous rollouts)"),
    Fault("rewards swapped between neighbouring groups", "Two tasks next to each other have each other's rewards.",
          at.batch, neighbours, "rewards-of-other-rollouts", "PeterGriffinJin/Search-R1#88; the review's table"),
    Fault("rewards out of line after groups were filtered",
          "Groups without a signal are taken out of the step and their rewards are not, so that later rows get "
          "wrong ones.", at.batch,
          lambda rows: [rewarded(row, other) for row, other in zip(signal(rows) or rows, rows, strict=False)],
          "rewards-of-other-rollouts", "NVIDIA-NeMo/RL#3794", ("lookup",), "-a max_hops=6"),
    Fault("score added behind the end token",
          "The score is put on the token after the end of the reply, which is masked: only cut replies keep theirs.",
          at.batch, lambda rows: [row if row.truncated else unrewarded(row) for row in rows],
          "no-gradient oracle-fails rewards-of-other-rollouts", "huggingface/trl#3750, huggingface/trl#5338"),
    Fault("two tasks share one group id",
          "Ids of groups collide, so that each baseline is the mean over the rollouts of two tasks.", at.batch,
          joined_in_pairs, "advantages-wrong",
          "PrimeIntellect-ai/prime-rl#2332 (ids that are not unique within a step)"),
    Fault("groups cut out of a batch of different prompts",
          "The batches do not repeat their prompts as groups need it: rewards of different tasks are compared.",
          at.batch, dealt_out, "advantages-wrong", "om-ai-lab/VLM-R1#98"),
    Fault("advantages over the batch", "The baseline is the mean reward of the whole step instead of the group's.",
          at.advantages, over(lambda i, row: "all"), "advantages-wrong", "THUDM/slime#1655; the review's table",
          only="doctor"),
    Fault("each rollout a group of its own",
          "Groups are formed by the ids of rollouts, so that each raw reward is its own advantage.",
          at.advantage_values, lambda values, rows: [row.reward for row in rows], "advantages-wrong",
          "rllm-org/rllm#605, rllm-org/rllm#924", only="doctor"),
    Fault("negative advantages dropped",
          "Negative advantages are set to 0 before the loss, so only good rollouts are trained on.",
          at.advantage_values, lambda values, rows: [max(value, 0.0) for value in values],
          "advantages-wrong loss-differs-from-settings",
          "axon-rl/gem#113 (advantages changed a second time after normalisation)", only="doctor"),
    Fault("leave-one-out deviation of equal rewards is rounding",
          "The deviation of the others' equal rewards is a rounding error, by which the lead of the odd one is "
          "divided.", at.advantage_values, leads_by_rounding, "advantages-wrong tiny-std-scaling",
          "NVIDIA-NeMo/RL#4158", options="--baseline leave_one_out --scale-rewards group", run_causes="policy-breaks",
          also=((at.reward, lambda own, task, trace: 0.95 * own),)),
    Fault("asked for plain advantages and got scaled ones",
          "The setting of the advantages' scale is accepted and not used: they are divided by the group's "
          "deviation.", at.advantage_scale, lambda scale: "group", "advantages-wrong",
          "NVIDIA-NeMo/nemo-platform#1504", ("musique", "lookup", "gsm8k")),
    Fault("scaling of rewards asked for and never applied",
          "A setting asks for rewards to be normalised by their deviation, and no code reads it.", at.advantage_scale,
          lambda scale: "none", "advantages-wrong", "huggingface/trl#2665, OpenRLHF/OpenRLHF#693",
          options="--scale-rewards group"),
    Fault("rows sorted for packing and advantages not",
          "Rows are sorted by length before they are packed, and each is trained with the advantage of another row.",
          at.divided_rows, unsorted, "advantages-wrong update-differs-from-settings rewards-of-other-rollouts",
          "NovaSky-AI/SkyRL#2209", steps=10),
),
*table("loss",
    Fault("cut-off rollouts kept in the loss although masked",
          "The mask of cut-off rollouts is applied to one of two masks, and the loss uses the other.",
          at.divided_rows, mask_forgotten, "advantages-wrong loss-differs-from-settings", "huggingface/trl#4976",
          ("gsm8k",), "--overlong mask --max-tokens 96"),
),
)
