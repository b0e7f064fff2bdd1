"""Tokens of a template's tool calls that a model cannot write, because their embeddings were never trained.

A chat template may ask for tokens that the model's makers added and never used. Their rows of the output embedding are
still those of their initialisation, nearly the same as those of hundreds of other unused tokens, so no hidden state
gives one of them a higher probability than the others, and LoRA cannot change that. Qwen2.5-Coder is such a model:
`<tool_call>` has 2,489 lookalikes in the 1.5B one, and after SFT on calls in this form each sampled call begins with
some token among them (measured here on 4-bit files, dequantised).
"""

from __future__ import annotations

from typing import Any

import torch
from plumbob.rollout import Chat
from plumbob.rollout.tool_formats import AS_TEXT
from plumbob.trainer.config.chat_template import with_calls_as_text
from transformers import PreTrainedModel

NEAR = 0.1
"""Largest distance of two tokens' rows of the output embedding at which a model cannot tell them apart, as a share of the row's
length. Of the tokens that Qwen2.5-Coder writes, none has another within it."""
MANY = 8
"""Smallest number of other tokens within that distance at which the model cannot write the token."""


def write_calls_as_text(tokenizer: Any, chat: Chat, model: PreTrainedModel, asked: str | None) -> bool:
    """Give the tokenizer a chat template with calls in ordinary text if the model cannot write those of its own.

    `asked`: the value of --tool-format; the template stays if a form was asked for. Returns whether it has changed.
    """
    marks = {} if asked else unwritable(tokenizer, chat, model)
    if marks:
        tokenizer.chat_template = with_calls_as_text(tokenizer.chat_template, AS_TEXT, list(marks))
    return bool(marks)


def unwritable(tokenizer: Any, chat: Chat, model: PreTrainedModel) -> dict[str, int]:
    """The added tokens of a tool call that the model cannot write, with the number of their lookalikes."""
    added = {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    ids = sorted(added.keys() & set(tokenizer.encode(chat.call_text(), add_special_tokens=False)))
    found = {added[i]: lookalikes(model, i) for i in ids if added[i] != chat.closer}
    return {name: count for name, count in found.items() if count >= MANY}


@torch.no_grad()
def lookalikes(model: PreTrainedModel, token_id: int) -> int:
    """Number of other tokens whose row of the output embedding is nearly the token's own."""
    head: Any = model.get_output_embeddings()
    if head is None or token_id >= len(head.weight):
        return 0
    own = head.weight[token_id].float()
    rows = (part.float() for part in head.weight.split(1 << 14))
    squared = torch.cat([row.square().sum(dim=1) - 2 * (row @ own) for row in rows]) + own.square().sum()
    near = squared < (NEAR * own.norm()).square()
    return int(near.sum()) - 1
