"""Is a saved model the one that was trained? It is loaded afresh, as whoever uses it does, and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
from plumbob.trainer.policy.forward_plan import own_logprobs
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.training.run import Run

GAP, GAP_BF16 = 1e-5, 0.01
"""Largest `saved_gap` of a run in float32, and of one with --bf16, where it is higher because it was measured on CPUs only."""


def why_not_compared(run: Run) -> str | None:
    """Why the saved model cannot be loaded beside the trained one, in words; None: it can.

    It is loaded in float32, 4 bytes per parameter, which may take half of the memory that is free.
    """
    if run.policy.sharding.collective_forward:
        return "the trained one is divided among processes"
    size = 4 * run.policy.num_parameters
    free = {"the machine": free_memory()}
    if run.policy.device.type == "cuda":
        torch.cuda.empty_cache()
        free["the GPU"] = torch.cuda.mem_get_info(run.policy.device)[0]
    for place, room in free.items():
        if 2 * size > room:
            return (
                f"its {size / 1e9:.1f} GB would take more than half of the {room / 1e9:.1f} GB that are free on {place}"
            )
    return None


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: of the machine, or of the container's limit (cgroup v2), if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return free if limit == "max" else min(free, max(int(limit) - int(used), 0))
    except (OSError, ValueError):  # no container, or another system
        return free


def saved_limit(run: Run) -> float:
    """The largest `saved_gap` that is no sign of another model, in nats per token.

    The two are not computed in the same way, and some models are far from what float64 says of them: log-probabilities of
    Qwen2.5-Coder-0.5B differ by 3e-5 nats in float32 where nothing is wrong (CPU).
    """
    return max(GAP_BF16 if run.config.bf16 else GAP, run.policy.plan.limit)


@torch.no_grad()
def saved_gap(run: Run, folder: Path) -> float:
    """Mean |difference| of log-probabilities of the policy and of the model in `folder`, on the run's fixed ids, in nats.

    The larger one of the model's and of the adapter's in `folder`/adapter, where there is one.

    Temperature 1. All are computed in float32, also in a run with `--bf16`: in bfloat16, adding the adapter's output to a
    layer's and multiplying by the sum of their weights round differently, by more the longer the adapter is trained (0.12 to
    0.22 nats after 30 steps of Qwen2.5-Coder-0.5B in which nothing was wrong), which would hide a model that is another one.
    The policy's weights must be whole in this process.
    """
    policy = run.policy
    with policy.in_float32():
        policy.model.set_attn_implementation(policy.plan.own_attention)
        try:
            trained = own_logprobs(policy.model, run.parity_row.token_ids).cpu()
        finally:
            policy.model.set_attn_implementation(policy.plan.attention)
    gaps = [(_logprobs(run, load_model(str(folder))) - trained).abs().mean().item()]
    if (folder / "adapter").is_dir():
        from peft import PeftModel

        # Whoever loads the adapter puts it on the model that the run began with.
        base = load_model(run.config.model)
        gaps.append((_logprobs(run, PeftModel.from_pretrained(base, folder / "adapter")) - trained).abs().mean().item())
    return max(gaps)


def _logprobs(run: Run, model: Any) -> torch.Tensor:
    """Log-probabilities of the run's fixed ids by a model that was loaded afresh."""
    model = model.to(run.policy.device).eval()
    model.set_attn_implementation(run.policy.plan.own_attention)
    return own_logprobs(model, run.parity_row.token_ids).cpu()
