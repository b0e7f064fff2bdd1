"""How many tokens a pass may hold where weights are divided: there no process can try a pass again alone."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch
from plumbob.trainer.setup import Run
from plumbob.trainer.sync import fixed_row

SMALLEST_TRIAL = 512

SHARE = 0.9
"""Of the memory that there is, what passes are planned for: the rest is what allocators waste and what rows differ by."""

STEP = 256


def fit_pass_tokens(run: Run) -> None:
    """Lower `run.pass_tokens` to what fits into every rank's GPU, where running out of memory would end the run.

    Collective. By trial passes of twice as many tokens each time, as long as twice as many surely fit. Nothing is learned
    from them.
    """
    run.pass_tokens_fitted = True
    policy, ranks = run.policy, run.ranks
    if not policy.sharding.lockstep or run.pass_tokens <= SMALLEST_TRIAL or ranks.device.type != "cuda":
        return
    for _ in range(2):  # compiles, leaves gradients for the others to find there; DeepSpeed learns the order of layers
        trial_pass(run, SMALLEST_TRIAL)
    tokens = SMALLEST_TRIAL
    while True:
        before = torch.cuda.memory_allocated(ranks.device)
        run.peak_bytes = max(run.peak_bytes, torch.cuda.max_memory_allocated(ranks.device))
        torch.cuda.reset_peak_memory_stats(ranks.device)
        trial_pass(run, tokens)
        peak = torch.cuda.max_memory_allocated(ranks.device)
        fitting = min(run.pass_tokens, *ranks.gather(tokens_that_fit(tokens, before, peak, _room(run))))
        if 2 * tokens > fitting:
            break
        tokens *= 2
    policy.sharding.zero_grad()
    run.pass_tokens = fitting


def tokens_that_fit(tokens: int, before: int, peak: int, room: int) -> int:
    """At least so many tokens fit into `SHARE` of `room` bytes in one pass: a multiple of 256, never fewer than that.

    `peak`: the most bytes taken while a pass of `tokens` was computed, `before`: those taken before it. All the
    difference is held for the tokens': where a part of it has nothing to do with them, as gathered weights and gradients
    have not, more tokens fit than are said, and the fewer the larger `tokens` is.
    """
    per_token = max((peak - before) / tokens, 1.0)
    return max(STEP, int((SHARE * room - before) / per_token) // STEP * STEP)


def trial_pass(run: Run, tokens: int) -> None:
    """A forward and backward pass of about so many tokens, with a gradient of zero."""
    ids, length = run.parity_row.token_ids, min(SMALLEST_TRIAL, run.config.max_context)
    row = fixed_row((ids * (length // len(ids) + 1))[:length])
    gpus = [run.ranks.device] if run.ranks.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus):  # a dropout's draws are the steps'
            logprobs = run.policy.score([row] * -(-tokens // length), 1.0).logprobs
            run.policy.sharding.backward((logprobs * 0).sum(), last=False)
    except torch.OutOfMemoryError as error:
        give_up_alone(run, tokens, str(error).splitlines()[0])


def _room(run: Run) -> int:
    """Bytes that this process may take for tensors in all, once Adam has its two numbers per weight."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(run.ranks.device)
    room = free + torch.cuda.memory_reserved(run.ranks.device)
    state_to_come = 0 if run.optimizer.state else 8 * run.policy.num_trained // run.ranks.size
    return room - state_to_come


def give_up_alone(run: Run, tokens: int, failed: str) -> NoReturn:
    """End this process: the others wait in the middle of the same pass, and the launcher ends them in turn."""
    smaller = f"--pass-tokens {tokens // 2} or " if tokens > SMALLEST_TRIAL else ""
    print(
        f"rank {run.ranks.rank}: a pass of up to {tokens} tokens does not fit into memory, and where weights are "
        f"divided among processes none can try again alone; use {smaller}--gradient-checkpointing. {failed}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
