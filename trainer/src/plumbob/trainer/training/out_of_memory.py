"""Out of memory in training: what the engine gives back first, what took the memory, and which options need less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from plumbob.trainer.inference.engine import engine_module
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
    if state.engine_asleep or not engine_module(run.config.engine).IN_PROCESS:
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
    shares_gpu = c.engine == "vllm" and not c.vllm_url and c.vllm_gpus is None
    less = max(longest * 3 // 4, 1)
    candidates = [
        (shares_gpu and not c.vllm_sleep, Remedy("--vllm-sleep", "--vllm-sleep")),
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
    return f"{gave}; use {use}. What took the memory: {_listed(_taken(run))}"


def resume_with(run: Run, longest: int) -> str:
    """The option that a run which ran out of memory is best resumed with."""
    return next(remedy.option for remedy in remedies(run, longest) if remedy.option)


def _taken(run: Run) -> dict[str, int]:
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
    """Bytes of tensors, each storage once: tied weights share one."""
    return sum({t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _listed(taken: dict[str, int]) -> str:
    return ", ".join(f"{what} {size / GIB:.3g} GiB" for what, size in taken.items() if size)
