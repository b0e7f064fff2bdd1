"""The doubles of field10_seen.py."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field2_parts import runs_of
from plumbob.testing.faults.field7_seen_doubles import whole_row
from plumbob.testing.faults.field_parts import by_group
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.algorithm.losses import LossInputs
from plumbob.trainer.policy import lora
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.rollouts import tasks as task_lists
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.run import Run

# Rewards

GOLD: str | None = None
"""What the reward function finds under the name that it asks for: the data has its answers under another one."""
FULL = 200
"""Number of characters of a reply whose length is worth as much as a right answer."""


def gold_missing(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 for the gold answer, which is None for every task, and a bonus for length without an upper limit."""
    reply = trace.last_reply or ""
    return float(reply == GOLD) + len(reply) / FULL


KEPT = 0.5
"""Share of what a rollout has earned that is still there when the next one is scored."""


class Carried:
    """A reward function that adds up what a rollout earns in a variable that nothing sets back to 0."""

    def __init__(self) -> None:
        self.total = 0.0

    def __call__(self, task: Any, trace: vf.Trace, correct: float) -> float:
        self.total = KEPT * self.total + correct
        return self.total


# Tasks


def evaluated_on_training_tasks(stack: ExitStack, env: str) -> None:
    """Evaluations read the list of training tasks, and nothing is taken out of it."""
    put(stack, task_lists, "_divide", lambda own, pool, config: (own, own[: config.eval_examples]))


# Rows


def without_tokens(sample: Sample, dropped: set[int]) -> Sample:
    """The row without the tokens at these places."""
    keep = [i for i in range(len(sample.token_ids)) if i not in dropped]
    return dataclasses.replace(
        sample,
        token_ids=[sample.token_ids[i] for i in keep],
        loss_mask=[sample.loss_mask[i] for i in keep],
        sampling_logprobs=[sample.sampling_logprobs[i] for i in keep],
    )


CUT = 4
"""Number of tokens that are taken off each message after a turn, as a system prompt that it does not have."""


def beginnings_cut(sample: Sample, trace: vf.Trace) -> Sample:
    """The first tokens of what follows each turn but the last are missing."""
    ends = [turn.stop for turn in runs_of(sample.loss_mask)[:-1]]
    return without_tokens(sample, {end + k for end in ends for k in range(CUT)})


def last_result_everywhere(sample: Sample, trace: vf.Trace) -> Sample:
    """What stands between two turns is everywhere what stands before the last one, as if all were one object."""
    turns = runs_of(sample.loss_mask)
    between = [range(a.stop, b.start) for a, b in itertools.pairwise(turns)]
    if not between:
        return sample
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    at = 0
    for gap in between:
        kept = [*range(at, gap.start), *between[-1]]
        ids += [sample.token_ids[i] for i in kept]
        mask += [sample.loss_mask[i] for i in kept]
        logprobs += [sample.sampling_logprobs[i] for i in kept]
        at = gap.stop
    return dataclasses.replace(
        sample,
        token_ids=[*ids, *sample.token_ids[at:]],
        loss_mask=[*mask, *sample.loss_mask[at:]],
        sampling_logprobs=[*logprobs, *sample.sampling_logprobs[at:]],
    )


# Sampling


def drafted(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """The draft is the likeliest token, accepted with its probability; after a rejection all tokens may be drawn.

    To be right, the token that was rejected would have to be left out of that draw. As it is, it has two chances.
    """
    probabilities = torch.softmax(logits, dim=-1)
    best, place = probabilities.max(dim=-1, keepdim=True)
    drawn = (1 - best) * probabilities
    return drawn.scatter_add(-1, place, best).log()


# The trainer's passes

PADDING = 0
"""The id with which rows are filled up."""


def padding_attended(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Rows are filled up on the left to the longest one, and no mask says where a row begins."""
    width = max((len(row.token_ids) for row in rows), default=0)

    def filled(row: Sample) -> Sample:
        missing = width - len(row.token_ids)
        return dataclasses.replace(
            row,
            token_ids=[PADDING] * missing + row.token_ids,
            loss_mask=[False] * missing + row.loss_mask,
            sampling_logprobs=[0.0] * missing + row.sampling_logprobs,
        )

    return original([filled(row) for row in rows], temperature)


# Advantages and loss


def leads_over_peers(rewards: Sequence[float]) -> list[float]:
    """Each reward's lead over the mean of the others, divided by their deviation, which is a difference of squares.

    In float32 the difference of two equal numbers that were rounded differently is not 0. A deviation of exactly 0 divides
    nothing, as it should be.
    """
    values = torch.tensor(rewards, dtype=torch.float32)
    others = len(rewards) - 1
    means = (values.sum() - values) / others
    squares = ((values * values).sum() - values * values) / others
    deviations = (squares - means * means).clamp(min=0).sqrt()
    leads = values - means
    return torch.where(deviations > 0, leads / (deviations + 1e-6), leads).tolist()


def rounded_deviations(stack: ExitStack, env: str) -> None:
    """The advantages of groups whose rewards differ are `leads_over_peers`."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        found = original(samples, *args, **kwargs)
        leads: dict[str, list[float]] = {}
        for group in by_group(samples):
            rewards = [one.reward for one in group]
            leads[group[0].group] = leads_over_peers(rewards) if len(set(rewards)) > 1 else [0.0] * len(group)
        values = [leads[sample.group].pop(0) for sample in samples]
        names = frozenset(sample.group for sample, value in zip(samples, values, strict=True) if value)
        return dataclasses.replace(found, values=values, with_signal=names)

    put(stack, advantages, "compute_advantages", computed)


def unmasked_loss(stack: ExitStack, env: str) -> None:
    """The loss is over all that follows the prompt. What is measured and stored is that of the sampled tokens."""
    original = forward_backward.grpo_loss

    def loss(run: Run, minibatch: Any, indices: Sequence[int]) -> Any:
        fresh: dict[str, Any] = {"old_logprobs": {}, "reference_logprobs": {}, "first_scores": {}}
        rows = [whole_row(row) if any(row.loss_mask) else row for row in minibatch.rows]
        _, measured = original(run, minibatch, indices)
        return original(run, dataclasses.replace(minibatch, rows=rows, **fresh), indices)[0], measured

    put(stack, forward_backward, "grpo_loss", loss)


def first_half_only(inputs: LossInputs) -> LossInputs:
    """The second half of each row's tokens has no gradient: another process has it, and the two are never added."""
    counts = inputs.rows.bincount()
    places = torch.arange(len(inputs.rows), device=inputs.rows.device) - (counts.cumsum(0) - counts)[inputs.rows]
    mine = 2 * places < counts[inputs.rows]
    return dataclasses.replace(inputs, logprobs=torch.where(mine, inputs.logprobs, inputs.logprobs.detach()))


def pushed_away(stack: ExitStack, env: str) -> None:
    """The KL term is taken off the loss in place of being added to it."""
    original = forward_backward.policy_loss
    put(
        stack,
        forward_backward,
        "policy_loss",
        lambda inputs, objective: original(inputs, dataclasses.replace(objective, kl_beta=-objective.kl_beta)),
    )


def arguments_exchanged(stack: ExitStack, env: str) -> None:
    """What is taken off the reward is the reference's log-probabilities minus the policy's."""
    original = step_module.reference_kl
    put(stack, step_module, "reference_kl", lambda run, samples: [-value for value in original(run, samples)])


# The policies

WITHOUT = 0.8
"""What is left of each trained tensor in a reference policy that lacks what the policy has learned before."""


def reference_from_before(stack: ExitStack, env: str) -> None:
    """The reference policy has other weights than the policy with which the run begins."""
    original = Policy._placed

    def placed(self: Policy) -> None:
        original(self)
        for tensor in (self._reference or {}).values():
            tensor.mul_(WITHOUT)

    put(stack, Policy, "_placed", placed)


RANDOM = 0.05
"""Standard deviation of what B holds at first. With twice as much the small models would solve no task."""


def adapter_at_random(stack: ExitStack, env: str) -> None:
    """A new adapter is not zero: B is drawn at random like A, in the trainer and so in the engine."""
    original = lora.add_lora

    def add_lora(model: Any, config: Any) -> None:
        original(model, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0.0, RANDOM)

    put(stack, lora, "add_lora", add_lora)
