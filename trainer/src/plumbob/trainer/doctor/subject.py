"""What the probes examine: a run that is set up but not started, and rollouts sampled as in its first step."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.rollout import Completion, EngineError, Sample, Sampling, derive_seed
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.algorithm.advantages import Advantages, step_advantages
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.distributed.world import World
from plumbob.trainer.doctor.environment import scripted
from plumbob.trainer.doctor.expected_successes import expected_successes
from plumbob.trainer.rollouts.batch import Batch
from plumbob.trainer.rollouts.collect import collect
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.rollouts.tasks import Tasks
from plumbob.trainer.training.forward_backward import accumulate
from plumbob.trainer.training.minibatches import Minibatch, make_minibatches
from plumbob.trainer.training.run import Run
from plumbob.trainer.training.setup import set_up
from plumbob.trainer.watch.history import is_exact
from plumbob.trainer.watch.stored_rollouts import Rollout

GROUPS = 8
"""Number of groups that are sampled: enough to detect mixed groups and a constant reward, quick for a tiny model."""
FEW = 4
"""Number of rollouts on which engine and trainer are compared before anything else."""
HELD_OUT = 16
"""Largest number of held-out tasks that are loaded."""


@dataclass(frozen=True)
class Call:
    """One request of a rollout to the engine, and the completion that the engine returned."""

    prompt_ids: list[int]
    completion: Completion
    sampling: Sampling


@dataclass(frozen=True)
class Refused:
    """One request of a rollout that the engine did not answer."""

    prompt_ids: list[int]
    sampling: Sampling


@dataclass(frozen=True)
class Drawn:
    """The rollouts of one step.

    `samples[i]` was made from `traces[i]`, whose turns were sampled by the requests `calls[i]`.
    """

    batch: Batch
    samples: list[Sample]
    traces: list[vf.Trace]
    tasks: list[vf.Task]
    """Task of each trace."""
    calls: list[list[Call]]
    refused: list[Refused] = field(default_factory=list)
    """Requests of rollouts that failed because the engine raised an error."""

    @functools.cached_property
    def rollouts(self) -> list[Rollout]:
        """The traces as the checks of stored rollouts see them, without a place in a run."""
        return [Rollout.of(trace.to_record(), 1, i, 0, 0) for i, trace in enumerate(self.traces)]

    @property
    def different_tasks(self) -> list[vf.Task]:
        """Each task once."""
        return list({id(task): task for task in self.tasks}.values())


@dataclass
class Subject:
    """A run, with rollouts that are sampled once and examined by many probes. `close` must be called at the end."""

    run: Run
    runner: asyncio.Runner
    groups: int

    @functools.cached_property
    def drawn(self) -> Drawn:
        """Rollouts sampled as in the first training step. Raises RunFailed if every rollout failed."""
        return draw(self)

    @property
    def is_drawn(self) -> bool:
        """Whether rollouts were sampled and at least one of them is usable."""
        return "drawn" in vars(self) and bool(self.drawn.samples)

    def prompts(self, calls: Sequence[Call], room: int) -> list[list[int]]:
        """Prompts of these requests, shortened at the end so that `room` new tokens fit into --max-context."""
        most = self.run.config.max_context - room
        return [call.prompt_ids[:most] for call in calls]

    @functools.cached_property
    def advantages(self) -> Advantages:
        """Advantages of the samples in `drawn`, by the run's settings."""
        return step_advantages(self.drawn.samples, self.run.config.advantages())

    @functools.cached_property
    def expected_successes(self) -> float | None:
        """How many rollouts should have succeeded, by the policy's probability of perfect transcripts; None if unknown."""
        return expected_successes(self)

    @functools.cached_property
    def first_gap(self) -> float:
        """Mean |difference| of engine and trainer log-probabilities on the run's fixed ids, in nats: the parity of set-up.

        NaN if one of them has no log-probabilities.
        """
        row = self.run.parity_row
        try:
            engine = torch.tensor(self.run.engine.score(row.token_ids))
        except EngineError:
            return math.nan
        return mean_abs([engine], self.score([row], 1.0))

    @functools.cached_property
    def began(self) -> bool:
        """Whether engine and trainer agreed after the first weight sync, so that `train` would have begun."""
        config = self.run.config
        return self.first_gap <= (config.parity_limit or thresholds.SYNC_PARITY[config.bf16])

    @functools.cached_property
    def agrees(self) -> bool:
        """Whether engine and trainer agree on given tokens, and on a few of those that were sampled.

        Raises RunFailed if every rollout failed.
        """
        rows = [row for row in self.drawn.samples if row.num_sampled][:FEW]
        if not rows:  # the loss masks leave out all that was sampled
            return self.began
        gap = mean_abs([torch.tensor(row.sampled_logprobs) for row in rows], self.score(rows))
        return self.began and gap <= self.gap_limit

    @property
    def gap_limit(self) -> float:
        """Largest mean difference of engine and trainer on sampled tokens that is healthy, in nats."""
        config = self.run.config
        return thresholds.ROUNDING_GAP if is_exact(config) else thresholds.SAMPLING_GAP[config.bf16]

    def play(self, task: vf.Task, script: ScriptedChat) -> vf.Trace:
        """Play `task` with replies from a script in place of the model's, and score it."""
        return self.runner.run(scripted(task, script, self.run.config, self.run.tasks))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int] = ()
    ) -> list[Completion]:
        """Sample one completion of each prompt with the run's engine. `seeds`: of each prompt, in place of `sampling`'s.

        Raises EngineError if one of them cannot be sampled: what is asked may be no prompt that the engine expects.
        """
        each = [dataclasses.replace(sampling, seed=seed) for seed in seeds] or [sampling] * len(prompts)

        async def all_of_them() -> list[Completion]:
            pairs = zip(prompts, each, strict=True)
            return await asyncio.gather(*(self.run.engine.generate(list(p), own) for p, own in pairs))

        try:
            return self.runner.run(all_of_them())
        except (EngineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise EngineError(f"the engine raised {type(error).__name__}: {error}") from error

    def score(self, rows: Sequence[Sample], temperature: float | None = None) -> list[torch.Tensor]:
        """The trainer's log-probabilities of each row's sampled tokens: one tensor [N] per row, in nats.

        Rows are packed into microbatches as in training. `temperature`: the run's if it is None.
        """
        run = self.run
        temperature = run.config.temperature if temperature is None else temperature
        return [scores.cpu() for scores in run.policy.score_rows(rows, temperature, run.state.microbatch_tokens)]

    def minibatch(self, rows: Sequence[Sample], advantages: Sequence[float]) -> Minibatch:
        """One minibatch of all these rows, in this order, regardless of --num-minibatches."""
        given = Advantages(list(advantages))
        (minibatch,) = make_minibatches(rows, given, self.run.config, self.run.world, count=1)
        return minibatch

    def gradient(self, rows: Sequence[Sample], advantages: Sequence[float]) -> None:
        """Compute the gradient of one optimizer step on these rows with the run's own code.

        It stays in the trained weights.
        """
        accumulate(self.run, self.minibatch(rows, advantages), Interruption())

    def trained_rows(self, most: int = 16) -> tuple[list[Sample], list[float]]:
        """The first rows with a non-zero advantage, `most` at most, and their advantages. Masked rows are left out."""
        masked = self.run.config.overlong == "mask"
        pairs = zip(self.drawn.samples, self.advantages.values, strict=True)
        kept = [(s, a) for s, a in pairs if a and not (masked and s.truncated)][:most]
        return [s for s, _ in kept], [a for _, a in kept]

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

    Engine and trainer may differ: the probes find out why. Raises UserError, and SyncError if the engine refuses the
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
    return Subject(run, asyncio.Runner(), groups)


def draw(subject: Subject, step: int = 0, first: int = 0) -> Drawn:
    """Sample the batch of `step` and record all requests to the engine. Raises RunFailed if every rollout failed.

    `first`: number of the training tasks before those that are taken.
    """
    run, group_size = subject.run, subject.run.config.num_generations
    with recorded(run.engine) as (calls, refused):
        batch = subject.runner.run(collect(run.sampler, step, first, run.world))
    planned = run.tasks.take(first, subject.groups)
    # A fault may give a group another task than the one whose turn it is.
    tasks = {task.hash: task for task in planned}
    by_seed = dict(calls)
    kept: list[tuple[vf.Trace, vf.Task, list[Call]]] = []
    for i, trace in enumerate(batch.traces):
        if not trace.ok:
            continue
        seed = derive_seed(derive_seed(run.config.seed, step, i // group_size), i % group_size)
        turns = [by_seed.get(derive_seed(seed, turn)) for turn in range(trace.num_turns)]
        task = tasks.get(trace.task.hash or "", planned[i // group_size])
        kept.append((trace, task, [turn for turn in turns if turn is not None]))
    chosen = [kept[i] for i in matched(batch.drawn, [trace for trace, _, _ in kept])]
    return Drawn(
        batch, list(batch.drawn), [c[0] for c in chosen], [c[1] for c in chosen], [c[2] for c in chosen], refused
    )


def matched(samples: Sequence[Sample], traces: Sequence[vf.Trace]) -> list[int]:
    """Index of the trace that each sample was made from. There must be at least as many traces as samples.

    Samples are matched by token ids; those whose ids differ from every trace's, by sampling log-probabilities; those
    for which that fails too (if only one token can be sampled, all log-probabilities are 0), in order.
    """
    left = list(range(len(traces)))
    found: dict[int, int] = {}
    branches = [trace.branches[0] for trace in traces]
    nothing: tuple[float, ...] = ()
    for of_samples, of_traces in (
        ([tuple(s.token_ids) for s in samples], [tuple(b.token_ids) for b in branches]),
        ([_numbers(s.sampling_logprobs) for s in samples], [_numbers(b.logprobs) for b in branches]),
        ([nothing] * len(samples), [nothing] * len(traces)),
    ):
        places: dict[tuple[float, ...], list[int]] = {}
        for j in reversed(left):
            places.setdefault(of_traces[j], []).append(j)
        for i, key in enumerate(of_samples):
            if i not in found and places.get(key):
                found[i] = places[key].pop()
                left.remove(found[i])
    return [found[i] for i in range(len(samples))]


def _numbers(logprobs: Sequence[float]) -> tuple[float, ...]:
    return tuple(x for x in logprobs if x)


@contextmanager
def recorded(engine: Any) -> Generator[tuple[list[tuple[int | None, Call]], list[Refused]]]:
    """Record every request to the engine inside the context: (seed, call) of those that it answers, and the others.

    A seed identifies a request, because each turn of each rollout has its own.
    """
    calls: list[tuple[int | None, Call]] = []
    refused: list[Refused] = []
    generate = engine.generate

    async def recording(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        try:
            completion = await generate(prompt_ids, sampling)
        except EngineError:
            refused.append(Refused(list(prompt_ids), sampling))
            raise
        calls.append((sampling.seed, Call(list(prompt_ids), completion, sampling)))
        return completion

    engine.generate = recording
    try:
        yield calls, refused
    finally:
        engine.generate = generate


@contextmanager
def undone(run: Run) -> Generator[dict[str, torch.Tensor]]:
    """Undo, at the end, all changes to the trained weights, their gradients and the optimizer's state.

    Yields copies of the weights before the changes: trained tensor -> copy. They are in main memory, because a GPU that
    holds a run may have no room for a second set.
    """
    policy = run.policy
    kept = {name: policy.sharding.local(p).detach().to("cpu", copy=True) for name, p in policy.trainable.items()}
    state = copy.deepcopy(run.optimizer.state_dict())
    try:
        yield kept
    finally:
        with torch.no_grad():
            for name, parameter in policy.trainable.items():
                policy.sharding.local(parameter).copy_(kept[name])
        policy.sharding.changed()
        run.optimizer.load_state_dict(state)
        policy.sharding.zero_grad()


def full_rate(run: Run) -> None:
    """Set the optimizer's learning rate to the schedule's peak, because a warm-up starts at 0."""
    for group in run.optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])


def mean_abs(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Mean absolute difference of two lists of log-probabilities, over the tokens of all rows, in nats."""
    return (torch.cat(list(a)) - torch.cat(list(b))).abs().mean().item()
