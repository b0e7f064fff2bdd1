"""How many tokens a microbatch may hold where weights are divided among processes.

Forward and backward passes are collectives there, so a process that runs out of memory cannot retry a microbatch alone.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch
from plumbob.trainer.inference.weight_sync import parity_row
from plumbob.trainer.training.checkpoint import latest
from plumbob.trainer.training.out_of_memory import note_peak, remedies
from plumbob.trainer.training.run import Run

SMALLEST_TRIAL = 512
"""Number of tokens of the first trial pass."""

SHARE = 0.9
"""Share of the free memory that microbatches may take; the rest is a margin for allocators and differences of rows."""

STEP = 256
"""The limit of tokens is a multiple of this."""


def fit_microbatch_tokens(run: Run) -> None:
    """Lower `run.state.microbatch_tokens` to what fits into every process's GPU, where running out would end the run.

    Collective. The memory per token is measured by trial passes with a gradient of zero. Each has twice as many tokens
    as the one before, as long as the last measurement says that these fit.
    """
    state, policy, world = run.state, run.policy, run.world
    state.microbatch_tokens_fitted = True
    if (
        not policy.sharding.collective_forward
        or state.microbatch_tokens <= SMALLEST_TRIAL
        or world.device.type != "cuda"
    ):
        return
    # The first passes are not measured: they compile and allocate gradients, and DeepSpeed learns the order of layers.
    for _ in range(2):
        trial_microbatch(run, SMALLEST_TRIAL)
    tokens = SMALLEST_TRIAL
    while True:
        before = torch.cuda.memory_allocated(world.device)
        note_peak(run)
        trial_microbatch(run, tokens)
        peak = torch.cuda.max_memory_allocated(world.device)
        fitting = min(state.microbatch_tokens, *world.gather(tokens_that_fit(tokens, before, peak, _room(run))))
        if 2 * tokens > fitting:
            break
        tokens *= 2
    policy.sharding.zero_grad()
    state.microbatch_tokens = fitting


def tokens_that_fit(tokens: int, before: int, peak: int, room: int) -> int:
    """How many tokens of one microbatch fit into `SHARE` of `room` bytes: a multiple of 256, and at least 256.

    `peak`: the most bytes allocated while a microbatch of `tokens` tokens was computed; `before`: bytes allocated
    before it. The difference is attributed to tokens, although gathered weights and gradients do not depend on them. So
    the result is too low rather than too high, and the larger `tokens` is, the closer.
    """
    per_token = max((peak - before) / tokens, 1.0)
    return max(STEP, int((SHARE * room - before) / per_token) // STEP * STEP)


def trial_microbatch(run: Run, tokens: int) -> None:
    """Run a forward and backward pass of about `tokens` tokens with a gradient of zero. Collective."""
    ids, length = run.parity_row.token_ids, min(SMALLEST_TRIAL, run.config.max_context)
    row = parity_row((ids * (length // len(ids) + 1))[:length])
    gpus = [run.world.device] if run.world.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus):  # trial passes must not use up random numbers of the steps' dropout
            logprobs = run.policy.score([row] * -(-tokens // length), 1.0).logprobs
            run.policy.sharding.backward((logprobs * 0).sum(), last=False)
    except torch.OutOfMemoryError as error:
        exit_out_of_memory(run, tokens, str(error).splitlines()[0])


def _room(run: Run) -> int:
    """Bytes that this process can use for tensors in total, without those that Adam's state has yet to take."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(run.world.device)
    room = free + torch.cuda.memory_reserved(run.world.device)
    state_to_come = 0 if run.optimizer.state else 8 * run.policy.num_trained // run.world.size
    return room - state_to_come


def exit_out_of_memory(run: Run, tokens: int, failed: str) -> NoReturn:
    """Say what to change and end this process. The others wait in the same microbatch until the launcher ends them."""
    smaller = [f"--microbatch-tokens {tokens // 2}"] if tokens > SMALLEST_TRIAL else []
    options = [*smaller, *(remedy.option for remedy in remedies(run, run.config.max_context) if remedy.option)]
    print(
        f"rank {run.world.rank}: a microbatch of up to {tokens} tokens does not fit into memory, and with sharded "
        f"weights a process cannot retry it alone; use {' or '.join(options)}. {failed.rstrip('.')}. The last checkpoint is "
        f"{latest(run.directory) or 'none'}; it can be resumed with these options",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
