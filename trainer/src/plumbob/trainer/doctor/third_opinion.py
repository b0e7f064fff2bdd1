"""The model as it is on disk, and what it says of rows: a third opinion beside those of engine and trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.policy.loading import load_model

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


def explains(rest: float, before: float, limit: float) -> bool:
    """Whether conditions that leave this rest of a difference explain it. `limit`: a healthy difference. All in nats."""
    # A rest below the limit explains nothing where the difference was hardly above it: of many wrong conditions, one leaves a third
    # of it by chance, or a fifth in float32, where the right one leaves nothing.
    exact = limit < thresholds.SAMPLING_GAP[True]
    return rest <= max(min(limit, before / (10 if exact else 3)), thresholds.UNEXPLAINED_REST * before)


def by_turn(row: Sample) -> list[tuple[Ids, Ids]]:
    """The row's turns: (ids of the prompt, sampled ids)."""
    mask = [*row.loss_mask, False]
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    ends = [i for i in range(1, len(mask)) if mask[i - 1] and not mask[i]]
    return [(row.token_ids[:start], row.token_ids[start:end]) for start, end in zip(starts, ends, strict=True)]


def in_turns(row: Sample, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Values of the row's sampled tokens, [num_sampled], divided by turns."""
    return values.split([len(reply) for _, reply in by_turn(row)])


def turn_of(prompt: Ids, reply: Ids) -> Sample:
    """A row of one prompt and the tokens that were sampled after it."""
    mask = [False] * len(prompt) + [True] * len(reply)
    return Sample([*prompt, *reply], mask, [0.0] * len(mask), 0.0, "", "", False)
