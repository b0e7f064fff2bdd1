"""Is a saved model the one that was trained? It is loaded afresh, as whoever uses it does, and compared."""

from __future__ import annotations

from pathlib import Path

import torch
from plumbob.trainer.policy.forward_plan import own_logprobs
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.training.run import Run

LARGEST = 1_000_000_000
"""Most parameters of a model that is loaded for a comparison alone: 4 GB in float32."""


@torch.no_grad()
def saved_gap(run: Run, folder: Path) -> float:
    """Mean |difference| of log-probabilities of the policy and of the model in `folder`, on the run's fixed ids, in nats.

    Temperature 1, in the precision of the run. The policy's weights must be whole in this process.
    """
    row, device = run.parity_row, run.policy.device
    trained = run.policy.score([row], 1.0).logprobs.cpu()
    model = load_model(str(folder)).to(device).eval()
    model.set_attn_implementation(run.policy.plan.own_attention)
    with torch.autocast(device.type, torch.bfloat16, enabled=run.config.bf16):
        saved = own_logprobs(model, row.token_ids).cpu()
    return (saved - trained).abs().mean().item()
