"""Open the engine: read the model, compare with its own forward pass, and find out how many pages fit into memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
from plumbob.console import UserError, first_line
from plumbob.trainer.inference.paged.engine import PAGE, PREFILL_TOKENS, TOKENS_PER_RUN, PagedEngine, pages_of
from plumbob.trainer.inference.paged.forward import bytes_of_page
from plumbob.trainer.inference.paged.memory import pages_that_fit
from plumbob.trainer.inference.paged.weights import NotSupported, Weights
from plumbob.trainer.policy.forward_plan import (
    ForwardPlan,
    limit_by_float64,
    measured_rows,
    measuring,
    own_logprobs,
)
from plumbob.trainer.policy.gpu_memory import memory_of
from transformers import PreTrainedModel

MOST_OF_A_TOKEN = 0.1
"""Most nats that rounding moves one token by. Seen on an H200: .022 in Qwen2.5-Coder-1.5B after 199 steps of GRPO."""

INSTEAD = "use --engine transformers or vllm"
"""What to do where this engine cannot be used."""


def check_exact(model: PreTrainedModel, plan: ForwardPlan, max_context: int) -> None:
    """Raise NotSupported unless the engine's log-probabilities are those of `model`'s own forward pass, in float32."""
    try:
        differs, limit = _compared(model, plan, max_context)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold what the engine had joined
        raise
    finally:
        for p in model.parameters():  # its own again, and not a part of what the engine had joined
            if p.untyped_storage().nbytes() > p.nbytes:
                p.data = p.detach().clone()
    if not differs <= limit:
        raise NotSupported(f"its log-probabilities differ by {differs:.2g} nats from the model's own")


@torch.no_grad()
def _compared(model: PreTrainedModel, plan: ForwardPlan, max_context: int) -> tuple[float, float]:
    """How much the two differ, and how much they may, in nats: at most, or where rounding may be the reason on average."""
    with measuring(model, max_context) as lengths:
        rows = measured_rows(plan.num_ids, lengths)
        longest = max(len(row.token_ids) for row in rows)
        # Not of a copy of the weights: in float32, memory seldom holds a large model twice.
        weights = Weights.of(model, longest + TOKENS_PER_RUN, take=True)
        engine = PagedEngine(weights, max_slots=1, max_length=PAGE)
        model.set_attn_implementation(plan.own_attention)
        own = torch.cat([own_logprobs(model, row.token_ids) for row in rows])
        scored = torch.cat([torch.tensor(engine.score(row.token_ids)) for row in rows])
        differences = (own.cpu() - scored).abs()
        largest = differences.max().item()
        if largest <= plan.limit or largest > MOST_OF_A_TOKEN:
            return largest, plan.limit
        # A second float32 computation rounds otherwise, and after training by more than before it. Of the measured ids, which
        # are drawn by lot, a trained model finds some so unlikely that rounding moves one of them by far more than the others.
        return differences.mean().item(), limit_by_float64(model, rows, own, plan.limit)


def open_paged(
    model: PreTrainedModel,
    max_slots: int,
    max_length: int,
    share: float,
    later: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> PagedEngine:
    """An engine for `model`, whose weights it takes: the model's parameters become views of the engine's tensors.

    `share`: most of a GPU's memory for keys and values. `later`: bytes that the trainer will allocate on this GPU after
    this call. `say`: called with a line if memory holds fewer rollouts than `max_slots`. Raises UserError if the engine
    does not know the model, or if not even one rollout fits.
    """
    try:
        weights = Weights.of(model, max_length + TOKENS_PER_RUN, take=True)
    except NotSupported as error:
        raise refused(error) from None
    except torch.OutOfMemoryError:
        raise UserError(
            f"the GPU's memory does not hold the model's weights while --engine paged joins them; {INSTEAD}"
        ) from None
    if weights.embed.is_cuda:
        torch.cuda.empty_cache()  # what the joined tensors have replaced
    per_rollout = pages_of(max_length)
    pages, prefill = max_slots * per_rollout, PREFILL_TOKENS
    if (memory := memory_of(weights.embed.device)) is not None:
        pages = pages_that_fit(pages, per_rollout, bytes_of_page(weights, PAGE), memory, share, later)
        # What a prompt's token takes is mostly the MLP's wide activations: in bfloat16, and once more in between. A third of the
        # margin is for them: a 7B in 24 GB ran out of memory in a prefill that took half of it, because .8 GiB were in pieces.
        of_a_token = 2 * weights.layers[0].gate_up.weight.shape[0] * weights.dtype.itemsize
        prefill = min(prefill, memory.margin // (3 * of_a_token))
    engine = None
    while engine is None and pages >= per_rollout:
        try:
            engine = PagedEngine(
                weights, max_slots=max_slots, max_length=max_length, num_pages=pages, prefill_tokens=prefill
            )
        except torch.OutOfMemoryError:  # free memory is in small pieces, or another process has taken it
            pages = 0 if pages == per_rollout else max(pages // 2, per_rollout)
    if engine is None:
        raise UserError(
            f"--engine paged: the keys and values of one rollout of --max-context {max_length} tokens do not fit into "
            f"the memory of the GPU that they may take ({share:.0%} of it, --engine-memory, and only what is free and "
            f"what training does not need); lower --max-context, or {INSTEAD}"
        )
    if pages < max_slots * per_rollout:
        say(
            f"the GPU's memory holds the keys and values of {pages // per_rollout} rollouts of --max-context "
            f"{max_length} tokens: as many of {max_slots} decode at once, and more of them while they are shorter"
        )
    return engine


def refused(error: Exception) -> UserError:
    """What is said if --engine paged was asked for, or recorded by a run that another machine goes on with."""
    return UserError(f"--engine paged {why_not(error)}; {INSTEAD}")


def why_not(error: Exception) -> str:
    """What this engine cannot do, from what `check_exact` raised: the rest of a clause."""
    if isinstance(error, NotSupported):
        return f"does not know this model: {error}"
    # The first line of what Triton says of code that it cannot compile is a place in it, and the last one is the reason.
    lines = str(error).strip().splitlines() if type(error).__name__ == "CompilationError" else []
    return f"does not work with this model on this machine: {lines[-1].strip() if lines else first_line(error)}"
