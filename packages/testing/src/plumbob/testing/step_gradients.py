"""The gradients of one optimizer step for every loss type, on any number of processes. Also run as a program:

python step_gradients.py OUTPUT_FOLDER FILE     # under torchrun or with WORLD_SIZE, RANK, MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.algorithm.losses import LOSSES
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World, join_world, leave_world
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.training.forward_backward import accumulate
from plumbob.trainer.training.minibatches import make_minibatches
from plumbob.trainer.training.run import Run, TrainState
from plumbob.trainer.training.setup import set_up

LOSS_TYPES = tuple(LOSSES)


def make_run(folder: Path, here: World, **settings) -> Run:
    """A real run of the bundled policy, set up but not started."""
    defaults = {"eval_examples": 0, "batch_size": 32 // here.size, "gradient_accumulation_steps": 1, "save_steps": 1}
    return set_up(TrainConfig(output_dir=str(folder), run_name="r", **{**defaults, **settings}), here, None)


def samples(count: int = 32, seed: int = 0, *, prompts: bool = False) -> list[Sample]:
    """Multi-turn rows in groups of eight, of different lengths, with some engine log-probabilities far from the trainer's.

    `prompts`: the rows of a group begin with the same 20 to 23 ids, of which all groups have the first 10 in common.
    """
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
        if prompts:
            prompt = [*range(100, 110), *range(i // 8, i // 8 + 10 + i // 8)]
            ids, mask, logprobs = prompt + ids, [False] * len(prompt) + mask, [0.0] * len(prompt) + logprobs
        reward = float(torch.rand(1, generator=generator))
        rows.append(Sample(ids, mask, logprobs, reward, f"0/{i // 8}", "agent_completed", i % 7 == 0))
    return rows


def gradient(run: Run, rows: list[Sample], loss_type: str, **settings) -> dict[str, torch.Tensor]:
    """The gradient of an optimizer step on `rows`, by parameter; off-policy, so that ratios are clipped and corrected."""
    settings = {"kl_beta": 0.0, "importance_correction": "token_truncate", **settings}
    config = dataclasses.replace(run.config, loss_type=loss_type, **settings)
    state = TrainState(microbatch_tokens=config.microbatch_tokens)
    run = dataclasses.replace(run, config=config, objective=config.objective(), state=state)
    (minibatch,) = make_minibatches(rows, compute_advantages(rows, config.scale_rewards), config, run.world, count=1)
    for i in minibatch.mine:  # as if many updates had been made since the step began
        minibatch.old_logprobs[i] = torch.tensor(rows[i].sampled_logprobs) * 0.5 - 3.0
    accumulate(run, minibatch, Interruption())
    parameters = run.policy.trainable
    run.world.sum_gradients(parameters.values())
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """|a - b| / |b| over all parameters together."""
    assert a.keys() == b.keys()
    difference = sum((a[n] - b[n]).double().square().sum() for n in a)
    return float((difference / sum(b[n].double().square().sum() for n in b)).sqrt())


def main() -> None:
    here = join_world(torch.device("cpu"))
    run = make_run(Path(sys.argv[1]), here)
    gradients = {loss_type: gradient(run, samples(), loss_type) for loss_type in LOSS_TYPES}
    gradients["prompts"] = gradient(run, samples(prompts=True), LOSS_TYPES[0])
    if here.is_main:
        torch.save(gradients, sys.argv[2])
    leave_world()


if __name__ == "__main__":
    main()
