"""A run that is set up to be examined, but not started."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from plumbob.console import UserError
from plumbob.rollout import Completion, EngineError, Sample, Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.rollouts.tasks import Tasks
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.setup import set_up

GROUPS = 8
"""Number of groups of a step: enough for a signal, quick for a tiny model."""
HELD_OUT = 16
"""Largest number of held-out tasks that are loaded."""


@dataclass
class Subject:
    """A run, and what asks its engine and its policy. `close` must be called at the end."""

    run: Run
    runner: asyncio.Runner

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        """Sample one completion of each prompt with the run's engine. `seeds`: of each prompt, in place of `sampling`'s.

        Raises EngineError if one of them cannot be sampled: what is asked may be no prompt that the engine expects.
        """
        generate = self.run.engine.generate

        async def all_of_them() -> list[Completion]:
            pairs = zip(prompts, seeds, strict=True)
            return await asyncio.gather(*(generate(list(p), dataclasses.replace(sampling, seed=s)) for p, s in pairs))

        try:
            return self.runner.run(all_of_them())
        except (EngineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise EngineError(f"the engine raised {type(error).__name__}: {error}") from error

    def score(self, rows: Sequence[Sample]) -> list[torch.Tensor]:
        """The trainer's log-probabilities of each row's sampled tokens: one tensor [N] per row, in nats.

        Rows are packed into microbatches as in training.
        """
        run = self.run
        scored = run.policy.score_rows(rows, run.config.temperature, run.state.microbatch_tokens)
        return [scores.cpu() for scores in scored]

    def close(self) -> None:
        """Close the engine and the event loop."""
        self.run.engine.close()
        self.runner.close()


def load_subject(
    config: TrainConfig,
    here: World,
    folder: Path,
    status: Callable[[str], None],
    groups: int = GROUPS,
    environments: Sequence[Tasks] | None = None,
) -> Subject:
    """Set up the run that `config` describes, in a run directory under `folder`.

    Engine and trainer may differ: the stages find out why. Raises UserError, and SyncError if the engine refuses the
    weights.

    `environments`: its tasks, if they are already loaded; of the held-out ones, the first `HELD_OUT` are kept.
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
    if environments is not None:
        environments = [dataclasses.replace(e, held_out=e.held_out[:HELD_OUT]) for e in environments]
    run = set_up(config, here, None, status, environments, parity_checked=False)
    run = dataclasses.replace(run, sampler=dataclasses.replace(run.sampler, groups_per_step=groups))
    return Subject(run, asyncio.Runner())


@contextmanager
def undone(run: Run) -> Generator[None]:
    """Undo, at the end, all changes to the trained weights, their gradients and the optimizer's state.

    Copies of the weights are in main memory, because a GPU that holds a run may have no room for a second set.
    """
    policy = run.policy
    kept = {name: policy.sharding.local(p).detach().to("cpu", copy=True) for name, p in policy.trainable.items()}
    state = copy.deepcopy(run.optimizer.state_dict())
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in policy.trainable.items():
                policy.sharding.local(parameter).copy_(kept[name])
        policy.sharding.changed()
        run.optimizer.load_state_dict(state)
        policy.sharding.zero_grad()
