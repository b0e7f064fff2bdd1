"""One forward pass over some rows: how the rows lie in it, and the log-probabilities that come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from plumbob.rollout import Sample
from plumbob.trainer.policy import packed_attention as attention
from plumbob.trainer.policy.packing import indices_of, to_device
from plumbob.trainer.policy.token_logprobs import score_logits, score_tokens
from transformers import PreTrainedModel

Layout = Literal["packed", "padded", "alone"]
"""How rows lie in a forward pass: concatenated; as a batch, padded on the right; or one row in each pass."""


@dataclass(frozen=True)
class LogitMap:
    """What a model does to products of hidden states and output embeddings: logits = cap tanh(scale product / cap)."""

    scale: float = 1.0
    """Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`."""
    cap: float = 0.0
    """Gemma's `final_logit_softcapping`; 0: none."""

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        if self == LogitMap():
            return products
        scaled = products * self.scale
        return self.cap * torch.tanh(scaled / self.cap) if self.cap else scaled


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward pass over B rows. Packed rows are one long row: B is 1."""

    ids: torch.Tensor
    """[B, T] token ids."""
    inputs: dict[str, Any]
    """What else the model is given: packed rows' positions and bounds, or the attention mask of padded rows."""
    wanted: torch.Tensor
    """[N] indices into the B T tokens: those whose logits score `targets`."""
    targets: torch.Tensor
    """[N] the sampled ids, in the order of the rows."""


def make_batch(rows: Sequence[Sample], layout: Layout, device: torch.device, flash: bool = False) -> Batch:
    """Lay out `rows` for one forward pass; with layout "alone" there may be only one.

    The loss mask chooses which tokens are scored; the model never sees it. `flash`: see `packed_attention.row_bounds`.
    """
    lengths = [len(row.token_ids) for row in rows]
    # By way of numpy, because it reads lists of numbers twice as fast as torch.
    ids = torch.from_numpy(np.array([t for row in rows for t in row.token_ids], dtype=np.int64))
    positions = indices_of([0] * len(rows), lengths)
    # The logits that score token t are computed at t - 1, so a row's first token cannot be scored.
    sampled = torch.from_numpy(np.array([m for row in rows for m in row.loss_mask], dtype=bool)) & (positions > 0)
    at = sampled.nonzero()[:, 0]
    targets, wanted = to_device(ids[at], device), at - 1
    if layout == "packed":
        inputs = {"position_ids": to_device(positions[None], device), **attention.row_bounds(lengths, device, flash)}
        return Batch(to_device(ids[None], device), inputs, to_device(wanted, device), targets)
    if layout == "alone" and len(rows) > 1:
        raise ValueError("rows that are computed alone take one pass each")
    # Padding on the right: each token keeps its position, and no real token comes after a padded one.
    width = max(lengths, default=0)
    row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    padded, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    padded[row_of, positions], mask[row_of, positions] = ids, 1
    wanted = row_of[at] * width + positions[at] - 1
    inputs = {"attention_mask": to_device(mask, device)} if layout == "padded" else {}
    return Batch(to_device(padded, device), inputs, to_device(wanted, device), targets)


class TokenScorer(torch.nn.Module):
    """Model and scoring in one module, which FSDP2 and DeepSpeed wrap. The model must only run in its forward pass."""

    def __init__(self, model: PreTrainedModel, bf16: bool, logits: LogitMap | None) -> None:
        """`logits`: how the model makes logits; None: unknown, so that its own forward pass must compute all of them."""
        super().__init__()
        self.model = model
        self.bf16 = bf16
        self.logits = logits

    def forward(
        self,
        ids: torch.Tensor,
        inputs: dict[str, Any],
        wanted: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [N] and entropies [N] of `targets` [N]; the first four arguments are those of a `Batch`."""
        # Autocast begins inside the module, because DeepSpeed ends an autocast around a module's forward pass.
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.bf16):
            if self.logits is None:
                own = self.model(input_ids=ids, use_cache=False, **inputs).logits
                return score_logits(own.flatten(0, 1)[wanted], targets, temperature)
            hidden = self.model.get_decoder()(input_ids=ids, use_cache=False, **inputs).last_hidden_state
            head = cast(Any, self.model.get_output_embeddings())
            weight = head.weight
            again = slice(None)
            # Rows that begin alike share scores too. A GPU would have to wait for their number.
            if ids.device.type == "cpu":
                pairs, again = torch.unique(wanted * len(weight) + targets, return_inverse=True)
                wanted, targets = pairs // len(weight), pairs % len(weight)
            hidden = hidden.flatten(0, 1)[wanted]
            if getattr(head, "bias", None) is not None:  # a bias is the weight of an extra feature that is always 1
                weight = torch.cat([weight, head.bias[:, None]], dim=1)
                hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
            scale, cap = self.logits.scale, self.logits.cap
            logprobs, entropies = score_tokens(hidden, weight, targets, temperature / scale, cap / temperature)
            return logprobs[again], entropies[again]
