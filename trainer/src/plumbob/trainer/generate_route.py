"""vLLM's token route, `/inference/v1/generate`: what both of our clients write and read. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plumbob.rollout import Sampling


def sampling_names(sampling: Sampling) -> dict[str, Any]:
    """How a completion is drawn, by the server's names; without the seed."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def are_of(items: Sequence[Mapping[str, Any]], token_ids: Sequence[int]) -> bool:
    """Whether these log-probabilities are those of these tokens, in order.

    Up to some version after 0.30 each names its token as "token_id:17", later by the number.
    """
    named = [item.get("token_id", item.get("token")) for item in items]
    return named in (list(token_ids), [f"token_id:{token}" for token in token_ids])
