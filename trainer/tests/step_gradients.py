"""The gradients of one optimizer step for every loss type, on however many processes. Also run as a program:

python step_gradients.py OUTPUT_FOLDER FILE     # under torchrun or with WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import get_args

import torch
from plumbob.rollout import Sample
from plumbob.trainer import ranks
from plumbob.trainer.advantages import compute_advantages
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.interruption import Interruption
from plumbob.trainer.losses import LossType, Objective
from plumbob.trainer.setup import Run, set_up
from plumbob.trainer.step import accumulate, make_minibatches

LOSS_TYPES = get_args(LossType)


def make_run(folder: Path, here: ranks.Ranks, **settings) -> Run:
    """A real run of the bundled policy, set up and not started."""
    defaults = {"eval_examples": 0, "batch_size": 32 // here.size, "gradient_accumulation_steps": 1, "save_steps": 1}
    return set_up(TrainConfig(output_dir=str(folder), run_name="r", **{**defaults, **settings}), here, None)


def samples(count: int = 32, seed: int = 0) -> list[Sample]:
    """Multi-turn rows in groups of eight, of very different lengths, some with engine log-probabilities far off."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = int(torch.randint(6, 90, (1,), generator=generator))
        ids = torch.randint(600, (length,), generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) < 0.5).tolist()
        mask[0], mask[-1] = False, True
        logprobs = [
            -float(x) if m else 0.0 for x, m in zip(torch.rand(length, generator=generator) * 9, mask, strict=True)
        ]
        reward = float(torch.rand(1, generator=generator))
        rows.append(Sample(ids, mask, logprobs, reward, f"0/{i // 8}", "agent_completed", i % 7 == 0))
    return rows


def gradient(run: Run, rows: list[Sample], loss_type: str, **settings) -> dict[str, torch.Tensor]:
    """The gradient of the first optimizer step on `rows`, off-policy, so that ratios are clipped and corrected."""
    settings = {"kl_beta": 0.0, "importance_correction": "token_truncate", **settings}
    config = dataclasses.replace(run.config, loss_type=loss_type, **settings)
    run.config, run.objective, run.pass_tokens = config, Objective.of(config), config.pass_tokens
    (minibatch,) = make_minibatches(run, rows, compute_advantages(rows, config.scale_rewards))
    for i in minibatch.mine:  # as if many updates had been made since: another "old" than the current weights
        row = rows[i]
        drawn = [lp for lp, m in zip(row.sampling_logprobs, row.loss_mask, strict=True) if m]
        minibatch.old[i] = torch.tensor(drawn) * 0.5 - 3.0
    accumulate(run, minibatch, Interruption())
    parameters = run.policy.trainable
    run.ranks.sum_gradients(parameters.values())
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """|a - b| / |b| over all parameters together."""
    assert a.keys() == b.keys()
    difference = sum((a[n] - b[n]).double().square().sum() for n in a)
    return float((difference / sum(b[n].double().square().sum() for n in b)).sqrt())


def main() -> None:
    here = ranks.join(torch.device("cpu"))
    run = make_run(Path(sys.argv[1]), here)
    gradients = {loss_type: gradient(run, samples(), loss_type) for loss_type in LOSS_TYPES}
    if here.is_main:
        torch.save(gradients, sys.argv[2])
    ranks.leave()


if __name__ == "__main__":
    main()
