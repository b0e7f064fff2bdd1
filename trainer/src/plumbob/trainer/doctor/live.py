"""A run that is set up, as the doctor's stages examine it, and the records of its first training steps."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from plumbob.console import UserError
from plumbob.doctor.record import StepRecord
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.rollouts.collect import RolloutSource
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.rollouts.tasks import Tasks
from plumbob.trainer.training import step as training_step
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.setup import set_up

GROUPS = 8
"""Number of groups of a step: enough for a signal, quick for a tiny model."""
HELD_OUT = 16
"""Largest number of held-out tasks that are loaded."""
MICROBATCH = 4096
"""Tokens of a microbatch in a recorded step of the doctor."""


@dataclass
class LiveRun:
    """`plumbob.doctor.reference.model.Live` for a run of this trainer. `close` must be called at the end."""

    run: Run
    runner: asyncio.Runner

    def close(self) -> None:
        """Close the engine and the event loop."""
        self.run.engine.close()
        self.runner.close()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        policy = self.run.policy
        return {name: policy.sharding.local(p) for name, p in policy.trainable.items()}

    def changed(self) -> None:
        self.run.policy.sharding.changed()

    @contextmanager
    def undone(self) -> Generator[None]:
        """Undo, at the end, all changes to the trained weights, their gradients and the optimizer's state."""
        run = self.run
        # Copies of the weights are in main memory, because a GPU that holds a run may have no room for a second set.
        kept = {name: t.detach().to("cpu", copy=True) for name, t in self.tensors().items()}
        state = copy.deepcopy(run.optimizer.state_dict())
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self.tensors().items():
                    tensor.copy_(kept[name])
            self.changed()
            run.optimizer.load_state_dict(state)
            run.policy.sharding.zero_grad()

    def sync(self) -> None:
        run = self.run
        sync_weights(run.policy, run.engine, run.parity_row, checked=False)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[tuple[list[int], list[float]]]:
        run = self.run
        sampling = Sampling(tokens, run.config.temperature, stop_token_ids=run.sampler.chat.stop_token_ids)
        room = run.config.max_context - tokens

        async def all_of_them() -> list[Completion]:
            each = [(list(p)[:room], replace(sampling, seed=seed * 1000 + k)) for k, p in enumerate(prompts)]
            return await asyncio.gather(*(run.engine.generate(ids, asked) for ids, asked in each))

        return [(list(one.token_ids), list(one.logprobs)) for one in self.runner.run(all_of_them())]

    def score(self, rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> list[np.ndarray]:
        run = self.run
        samples = [Sample(list(i), list(at), [0.0] * len(i), 0.0, "", "", False) for i, at in rows]
        scored = run.policy.score_rows(samples, run.config.temperature, run.state.microbatch_tokens)
        return [scores.cpu().double().numpy() for scores in scored]

    def save(self, folder: Path) -> None:
        self.run.policy.save_final(folder)


def load_subject(
    config: TrainConfig,
    here: World,
    folder: Path,
    status: Callable[[str], None],
    groups: int = GROUPS,
    environments: Sequence[Tasks] | None = None,
) -> LiveRun:
    """Set up the run that `config` describes, in a run directory under `folder`.

    Engine and trainer may differ: the stages find out why. Raises UserError, and SyncError if the engine refuses the
    weights.

    `environments`: its tasks, if they are already loaded.
    """
    if here.size > 1:
        raise UserError("doctor examines a run in one process; start it without torchrun or another launcher")
    config = dataclasses.replace(
        config,
        output_dir=str(folder),
        run_name="examined",
        report_to="none",
        zero_signal="drop",
        max_staleness=0,
        eval_examples=min(config.eval_examples, HELD_OUT),
    )
    run = set_up(config, here, None, status, environments, parity_checked=False)
    run = dataclasses.replace(run, sampler=dataclasses.replace(run.sampler, groups_per_step=groups))
    return LiveRun(run, asyncio.Runner())


@dataclass
class Kept:
    """A sink that keeps the records of the first steps, and the weights that each of them began with."""

    live: LiveRun
    most: int
    """Number of steps that are recorded."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Of all steps."""
    records: list[StepRecord] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def wants(self, step: int) -> bool:
        return step < self.most

    def remember(self) -> None:
        """Keep the weights of now."""
        self.weights.append({name: t.detach().cpu().clone() for name, t in self.live.tensors().items()})

    def keep(self, made: Callable[[], StepRecord]) -> None:
        self.records.append(made())
        self.remember()


def record_steps(live: LiveRun, count: int, most: int | None = None) -> Kept:
    """Take `count` training steps as `train` does, record the first `most` of them, and undo them. Raises RunFailed.

    A weight sync that is refused ends them, and so does a first step without any signal, after which nothing changes;
    its step is recorded.
    """
    run, kept = live.run, Kept(live, count if most is None else most)
    kept.remember()
    before = copy.copy(vars(run.state))
    interruption = Interruption()
    try:
        with (
            live.undone(),
            closing(RolloutSource(run.sampler, run.world, live.runner, interruption, kept.wants)) as source,
        ):
            # Small microbatches, so that what depends on them shows.
            run.state.microbatch_tokens = min(run.state.microbatch_tokens, MICROBATCH)
            for _ in range(count):
                metrics, _ = training_step.train_step(run, source, interruption, lambda _: None, kept)
                kept.metrics.append(metrics)
                run.state.step += 1
                if not any(row.advantage for row in kept.records[0].rows):
                    break
    except SyncError:
        pass  # the record of that step has what the engine serves
    finally:
        vars(run.state).update(before)
        sync_weights(run.policy, run.engine, run.parity_row, checked=False)
    return kept
