"""Exercise optimizer steps, weight syncs and checkpoints of a run with any kind of sharding. Also run as a program:

    python sharded_updates.py FOLDER KIND[:CASE]...      # under WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT

which writes its results to FOLDER/KIND-CASE.json and the final models to FOLDER/KIND-CASE/model. KIND is fsdp2, zero2,
zero3 or replicated.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World, join_world, leave_world
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.training import checkpoint
from plumbob.trainer.training.capacity.out_of_memory import trial_microbatch
from plumbob.trainer.training.minibatches import Minibatch, make_minibatches
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.setup import set_up
from plumbob.trainer.training.step import optimizer_step
from plumbob.trainer.training.tally import Tally

CASES: dict[str, dict[str, Any]] = {
    "full": {"kl_beta": 0.05, "learning_rate": 1e-3, "num_iterations": 2},
    "lora": {"peft": True, "kl_beta": 0.05, "learning_rate": 1e-2, "lora_r": 4, "gradient_checkpointing": True},
    "paged": {"engine": "paged", "peft": True, "learning_rate": 1e-2, "lora_r": 4},
    "bf16": {"bf16": True, "learning_rate": 1e-3},
}
"""Name of a case -> its settings."""

ZERO = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}


def ask_for(kind: str, folder: Path) -> None:
    """Set the environment variables with which `accelerate launch` asks for this kind of sharding."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(name, None)
    if kind == "fsdp2":
        loading = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **loading}
    if kind.startswith("zero"):
        # With its default bounds, DeepSpeed would divide no parameter of so small a model, and never free a gathered
        # one. With these bounds, some parameters are divided and some are not, and at the end of a forward pass
        # DeepSpeed is already fetching the first parameters of the backward pass.
        live = {"max_live_parameters": 60000, "max_reuse_distance": 30000, "prefetch_bucket_size": 20000}
        bounds = {"param_persistence_threshold": 3000, **live}
        stage = {"stage": int(kind[-1]), **{f"stage3_{name}": value for name, value in bounds.items()}}
        file = folder / f"{kind}-{os.environ['RANK']}.json"
        file.write_text(json.dumps({**ZERO, "zero_optimization": stage}))
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}


def rows() -> list[Sample]:
    """16 rows in two groups. Two ranks get 1 and 15 of them, so their numbers of microbatches differ.

    Those of the second group begin with the same prompt, which a microbatch computes once for its rows.
    """
    generator = torch.Generator().manual_seed(0)
    prompt = list(range(100, 112))
    result = []
    for i in range(16):
        n = 300 if i == 3 else 20
        ids = torch.randint(600, (n,), generator=generator).tolist()
        mask = [False, *(j % 3 > 0 for j in range(1, n))]
        if i >= 8:
            ids[: len(prompt)], mask[: len(prompt)] = prompt, [False] * len(prompt)
        logprobs = [-2.0 if m else 0.0 for m in mask]
        result.append(Sample(ids, mask, logprobs, float(i % 3), f"0/{i // 8}", "agent_completed", False))
    return result


def update(run: Run) -> tuple[float, float]:
    """Train on `rows`, `num_iterations` times; returns (loss, gradient norm), summed over updates and ranks."""
    minibatch = _minibatch(run)
    own = Tally.total(optimizer_step(run, minibatch, None) for _ in range(run.config.num_iterations))
    tally = Tally.total(run.world.gather(own))
    return tally.loss, tally.grad_norm


def update_that_is_skipped(run: Run) -> int:
    """Try an update with a NaN advantage in one rank's rows; returns the number of updates skipped in a row."""
    minibatch = _minibatch(run)
    minibatch.advantages[5] = float("nan")
    optimizer_step(run, minibatch, None)
    return run.state.skipped_in_a_row


def _minibatch(run: Run) -> Minibatch:
    (minibatch,) = make_minibatches(rows(), compute_advantages(rows()), run.config, run.world, count=1)
    return minibatch


def kl_of(run: Run) -> float:
    """The k1 estimate of the KL divergence of `rows` to the reference policy, in nats. Collective."""
    own, reference = (run.policy.score_rows(rows(), 1.0, 70, reference=other) for other in (False, True))
    return sum(float((a - b).sum()) for a, b in zip(own, reference, strict=True))


def weights(run: Run) -> dict[str, torch.Tensor]:
    """A copy of the trained weights, gathered from all ranks. Collective."""
    return {name: tensor.cpu().clone() for name, tensor in run.policy.sharding.stream().items()}


def exercise(here: World, folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Take updates, sync, save and resume. All kinds of sharding must agree in the returned results. Collective."""
    config = TrainConfig(
        output_dir=str(folder),
        run_name=name,
        eval_examples=0,
        env_args=("num_examples=64",),
        batch_size=16,
        num_generations=8,
        gradient_accumulation_steps=1,
        lr_scheduler_type="constant",
        **settings,
    )
    run = set_up(config, here, None)
    for tokens in (512, 1024):  # trial microbatches must not change the results
        trial_microbatch(run, tokens)
    run.policy.sharding.zero_grad()
    run.state.microbatch_tokens = 70
    reports = [update(run) for _ in range(2)]
    before = weights(run)
    skipped = update_that_is_skipped(run)
    same = all(torch.equal(t, before[n]) for n, t in weights(run).items())
    reports.append(update(run))
    kl = kl_of(run) if config.kl_beta else 0.0
    parity = sync_weights(run.policy, run.engine, run.parity_row).parity
    run.state.step = 3
    checkpoint.save(run)
    here.barrier()
    reports.append(update(run))
    expected = weights(run)
    with run.lock:
        pass  # released: the run goes on in another object
    resumed = set_up(run.config, here, run.directory)
    resumed.state.microbatch_tokens = 70
    again = update(resumed)
    differences = [float((t - expected[n]).abs().max()) for n, t in weights(resumed).items()]
    resumed.policy.save_final(run.directory / "model")
    here.barrier()
    return {
        "kind": run.policy.sharding.kind,
        "losses": [loss for loss, _ in reports],
        "norms": [norm for _, norm in reports],
        "kl": kl,
        "parity": parity,
        "skipped": skipped,
        "unchanged_when_skipped": same,
        "resumed": max(differences) == 0.0 and list(again) == list(reports[-1]),
        "resumed_differs_by": max(differences),
        "numbers_held": sum(run.policy.sharding.local(p).numel() for p in run.policy.sharding.parameters.values()),
    }


def main() -> None:
    torch.set_num_threads(1)
    here = join_world(torch.device("cpu"))
    folder = Path(sys.argv[1])
    for what in sys.argv[2:]:
        kind, _, only = what.partition(":")
        ask_for(kind, folder)
        for case in [only] if only else CASES:
            report = exercise(here, folder, f"{kind}-{case}", CASES[case])
            if here.is_main:
                (folder / f"{kind}-{case}.json").write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main()
