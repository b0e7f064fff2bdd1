"""Open the engine: read the model, compare with its own forward pass, and find out how many pages fit into memory."""

from __future__ import annotations

import torch
from plumbob.console import UserError
from plumbob.trainer.inference.paged.engine import PAGE, TOKENS_PER_RUN, PagedEngine
from plumbob.trainer.inference.paged.forward import bytes_of_page
from plumbob.trainer.inference.paged.weights import NotSupported, Weights, vocabulary
from plumbob.trainer.policy.forward_plan import ForwardPlan, measured_rows, measuring, own_logprobs
from transformers import PreTrainedModel

SHARE = 0.4
"""Default share of a GPU's memory for keys and values."""


def check_exact(model: PreTrainedModel, plan: ForwardPlan, max_context: int) -> None:
    """Raise UserError unless the engine's log-probabilities are those of `model`'s own forward pass, in float32."""
    try:
        with measuring(model, max_context) as lengths:
            rows = [row.token_ids for row in measured_rows(vocabulary(model), lengths)]
            engine = PagedEngine(Weights.of(model, max(map(len, rows)) + TOKENS_PER_RUN), max_slots=1, max_length=PAGE)
            model.set_attn_implementation(plan.own_attention)
            gaps = [(own_logprobs(model, ids).cpu() - torch.tensor(engine.score(ids))).abs().max() for ids in rows]
    except NotSupported as error:
        raise _refused(str(error)) from None
    if not (largest := max(gaps).item()) <= plan.limit:
        raise _refused(f"its log-probabilities differ by {largest:.2g} nats from the model's own")


def open_paged(model: PreTrainedModel, max_slots: int, max_length: int, share: float = SHARE) -> PagedEngine:
    """An engine for `model`, whose weights it copies.

    `share`: of a GPU's memory, for keys and values. Raises UserError if the engine does not know the model, or if not
    even one rollout fits.
    """
    try:
        weights = Weights.of(model, max_length + TOKENS_PER_RUN)
    except NotSupported as error:
        raise _refused(str(error)) from None
    per_rollout = -(-(max_length + TOKENS_PER_RUN) // PAGE)
    pages = max_slots * per_rollout
    if weights.embed.is_cuda:
        _, total = torch.cuda.mem_get_info()
        pages = min(pages, int(total * share) // bytes_of_page(weights, PAGE))
    if pages < per_rollout:
        raise UserError(
            f"not even one rollout of --max-context {max_length} tokens fits into {share:.0%} of the GPU's memory "
            "(--vllm-memory); lower --max-context"
        )
    return PagedEngine(weights, max_slots=max_slots, max_length=max_length, num_pages=pages)


def _refused(why: str) -> UserError:
    return UserError(f"--engine paged does not know this model: {why}; use --engine transformers or vllm")
