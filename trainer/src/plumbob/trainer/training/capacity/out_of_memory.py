"""Out of memory in training: what the engine gives back first, what took the memory, and which options need less.

Where weights are divided among processes, forward and backward passes are collectives, so a process that runs out of
memory cannot retry a microbatch alone. How many tokens a microbatch may hold is measured there before the first step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch
from plumbob.trainer.inference.engine import engine_module
from plumbob.trainer.inference.weight_sync import parity_row
from plumbob.trainer.training.checkpoint import latest
from plumbob.trainer.training.run import Run

GIB = 1 << 30


@dataclass(frozen=True)
class Remedy:
    """What needs less memory: as a sentence says it, and as an option that `--resume` takes; "" if it takes a new run."""

    said: str
    option: str


def rest_engine(run: Run) -> None:
    """Let the engine give memory back until `wake_engine`. Collective."""
    if not run.state.engine_asleep:
        run.engine.sleep()
        run.state.engine_asleep = True


def wake_engine(run: Run) -> None:
    """End what `rest_engine` began, if it did. Collective."""
    if run.state.engine_asleep:
        run.engine.wake_up()
        run.state.engine_asleep = False


def give_back(run: Run) -> bool:
    """Let an engine in this process give back what it does not need while a step trains, in this step and all later ones.

    Returns whether it has given back anything that it held before. Collective.
    """
    state, device = run.state, run.world.device
    in_use = run.config.max_staleness > 0  # it samples the next step's rollouts
    if state.engine_asleep or in_use or not engine_module(run.config.engine).IN_PROCESS:
        return False
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    rest_engine(run)
    state.engine_rests = True
    if device.type == "cuda":
        torch.cuda.empty_cache()
        state.engine_gave = before - torch.cuda.memory_allocated(device)
        note_peak(run)  # from here on the peak is that of training beside an engine without a cache
    return True


def note_peak(run: Run) -> None:
    """Begin a new peak of GPU memory, and keep the one so far for the step's metric."""
    device = run.world.device
    run.state.peak_bytes = max(run.state.peak_bytes, torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)


def remedies(run: Run, longest: int) -> list[Remedy]:
    """What would need less memory and is not on, the cheapest first. `longest`: tokens of the longest row."""
    c = run.config
    shares_gpu = c.engine == "vllm" and not c.vllm_url
    less = max(longest * 3 // 4, 1)
    candidates = [
        (shares_gpu and not c.vllm_sleep and not c.max_staleness, Remedy("--vllm-sleep", "--vllm-sleep")),
        (c.max_staleness > 0 and not shares_gpu, Remedy("--max-staleness 0", "--max-staleness 0")),
        (not c.gradient_checkpointing, Remedy("--gradient-checkpointing", "--gradient-checkpointing")),
        (not c.bf16, Remedy("--bf16", "--bf16")),
        (True, Remedy(f"a --max-context below the {longest} tokens of the longest rollout", f"--max-context {less}")),
        (not c.peft, Remedy("in a new run --peft", "")),
    ]
    return [remedy for applies, remedy in candidates if applies]


def explanation(run: Run, longest: int) -> str:
    """What to use, and what took the memory: the end of a sentence that says what ran out of memory."""
    said = [remedy.said for remedy in remedies(run, longest)]
    use = " or ".join([", ".join(said[:-1]), said[-1]] if said[1:] else said)
    gave = f" after the engine gave {run.state.engine_gave / GIB:.3g} GiB back" if run.state.engine_gave else ""
    return f"{gave}; use {use}. What took the memory: {_listed(taken(run))}"


def resume_with(run: Run, longest: int) -> str:
    """The option that a run which ran out of memory is best resumed with."""
    return next(remedy.option for remedy in remedies(run, longest) if remedy.option)


def taken(run: Run) -> dict[str, int]:
    """What holds how many bytes. Activations are what is left of the peak, so they include what has leaked."""
    local, device = run.policy.sharding.local, run.world.device
    tensors = [local(p) for p in run.policy.model.parameters()]
    mine = {t.untyped_storage().data_ptr() for t in tensors}
    copies = [t for t in (run.engine.served_weights() or {}).values() if t.untyped_storage().data_ptr() not in mine]
    moments = [v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    taken = {
        "weights": _bytes(tensors),
        "the engine's copy of them": _bytes(t for t in copies if t.device.type == device.type),
        "gradients": _bytes(p.grad for p in run.policy.trainable.values() if p.grad is not None),
        "optimizer state": _bytes(moments),
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        taken["activations, and what else this process keeps"] = max(
            torch.cuda.max_memory_allocated(device) - sum(taken.values()), 0
        )
        taken["other processes"] = total - free - own
        taken["the whole GPU"] = total
    return taken


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors, each place once: tied weights share one, and an engine joins several weights in one storage."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _listed(taken: dict[str, int]) -> str:
    return ", ".join(f"{what} {size / GIB:.3g} GiB" for what, size in taken.items() if size)


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
