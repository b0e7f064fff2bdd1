"""What the probes look at: a run that is set up and not started, and rollouts drawn as its first step would draw them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.hub import UserError
from plumbob.rollout import Completion, Limits, Sample, Sampling, derive_seed, run_rollout
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.advantages import Advantages, compute_advantages, shape_rewards
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.interruption import Interruption
from plumbob.trainer.packing import pack
from plumbob.trainer.policy import TokenScores
from plumbob.trainer.ranks import Ranks
from plumbob.trainer.rollouts import Batch, collect
from plumbob.trainer.setup import Run, set_up
from plumbob.trainer.step import Minibatch, accumulate, make_minibatches

GROUPS = 8
"""Drawn for the probes: enough to tell mixed groups and a dead reward, and a few seconds of a tiny model."""
HELD_OUT = 16
UNBOUNDED = Limits(1 << 20, 1 << 40, 600.0)


@dataclass(frozen=True)
class Call:
    """One request to the engine, as it left the rollout, and what came back."""

    prompt_ids: list[int]
    completion: Completion


@dataclass(frozen=True)
class Drawn:
    """The rollouts of one step. `samples[i]` was made of `traces[i]`, whose turns were `calls[i]`."""

    batch: Batch
    samples: list[Sample]
    traces: list[vf.Trace]
    tasks: list[vf.Task]
    """Of each trace."""
    calls: list[list[Call]]


@dataclass
class Subject:
    """A run, and what is drawn from it once and looked at by many probes. Close it with its `close`."""

    run: Run
    runner: asyncio.Runner
    groups: int

    @functools.cached_property
    def drawn(self) -> Drawn:
        """As step 1 would draw them. Raises RunFailed if every rollout failed."""
        return draw(self)

    @property
    def is_drawn(self) -> bool:
        """Whether there are rollouts to look at."""
        return "drawn" in vars(self) and bool(self.drawn.samples)

    def prompts(self, calls: Sequence[Call], room: int) -> list[list[int]]:
        """Their prompts, without the last ids where these would leave no room for so many new ones."""
        most = self.run.config.max_context - room
        return [call.prompt_ids[:most] for call in calls]

    @functools.cached_property
    def advantages(self) -> Advantages:
        """Of `drawn`, as the run's settings compute them."""
        config = self.run.config
        shaped = shape_rewards(self.drawn.samples, overlong=config.overlong, overlong_penalty=config.overlong_penalty)
        return compute_advantages(
            shaped,
            config.scale_rewards,
            epsilon=config.scale_epsilon,
            baseline=config.baseline,
            aggregation=config.multi_objective_aggregation,
        )

    def play(self, task: vf.Task, script: ScriptedChat) -> vf.Trace:
        """`task` with the model's part read from a script, scored."""
        toolsets = self.run.tasks.toolsets
        return self.runner.run(run_rollout(task, script, None, limits=UNBOUNDED, shared_toolsets=toolsets))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """One completion of each prompt, through the engine."""

        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*(self.run.engine.generate(list(p), sampling) for p in prompts))

        return self.runner.run(all_of_them())

    def score(self, rows: Sequence[Sample], temperature: float | None = None) -> list[torch.Tensor]:
        """The trainer's log-probabilities of each row's sampled tokens, in passes as training takes them."""
        run = self.run
        temperature = run.config.temperature if temperature is None else temperature
        scores: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for part in pack([len(r.token_ids) for r in rows], run.pass_tokens):
                lengths = [rows[i].num_sampled for i in part]
                output: TokenScores = run.policy.score([rows[i] for i in part], temperature)
                scores.update(zip(part, output.logprobs.cpu().split(lengths), strict=True))
        return [scores[i] for i in range(len(rows))]

    def minibatch(self, rows: Sequence[Sample], advantages: Sequence[float]) -> Minibatch:
        """Of all these rows, in order, whatever --num-minibatches says."""
        config = self.run.config
        self.run.config = dataclasses.replace(config, num_minibatches=1)
        try:
            (minibatch,) = make_minibatches(self.run, rows, Advantages(list(advantages)))
        finally:
            self.run.config = config
        return minibatch

    def gradient(self, rows: Sequence[Sample], advantages: Sequence[float]) -> None:
        """Leave the gradient of one optimizer step on these rows in the trained weights, by the run's own path to it."""
        accumulate(self.run, self.minibatch(rows, advantages), Interruption())

    def trained_rows(self, most: int = 16) -> tuple[list[Sample], list[float]]:
        """Up to `most` rows with an advantage, whole groups first come, and their advantages."""
        masked = self.run.config.overlong == "mask"
        pairs = zip(self.drawn.samples, self.advantages.values, strict=True)
        kept = [(s, a) for s, a in pairs if a and not (masked and s.truncated)][:most]
        return [s for s, _ in kept], [a for _, a in kept]

    def close(self) -> None:
        self.run.engine.close()
        self.runner.close()


def load_subject(
    config: TrainConfig, here: Ranks, folder: Path, status: Callable[[str], None], groups: int = GROUPS
) -> Subject:
    """Set up the run that `config` means, in a run directory under `folder`. Raises UserError and SyncError."""
    if here.size > 1:
        raise UserError("doctor examines a run in one process; start it without a launcher")
    config = dataclasses.replace(
        config,
        output_dir=str(folder),
        run_name="examined",
        report_to="none",
        zero_signal="drop",
        max_staleness=0,
        eval_examples=min(config.eval_examples, HELD_OUT),
    )
    run = set_up(config, here, None, status)
    run.rollouts_per_step = groups * run.config.num_generations
    return Subject(run, asyncio.Runner(), groups)


def draw(subject: Subject, step: int = 0) -> Drawn:
    """The batch of `step`, with the engine's traffic beside it. Raises RunFailed."""
    run, group_size = subject.run, subject.run.config.num_generations
    with recorded(run.engine) as calls:
        batch = subject.runner.run(collect(run, step, 0, run.ranks))
    tasks = run.tasks.take(0, subject.groups)
    by_seed = dict(calls)
    kept: list[tuple[vf.Trace, vf.Task, list[Call]]] = []
    for i, trace in enumerate(batch.traces):
        if not trace.ok:
            continue
        seed = derive_seed(derive_seed(run.config.seed, step, i // group_size), i % group_size)
        turns = [by_seed.get(derive_seed(seed, turn)) for turn in range(trace.num_turns)]
        kept.append((trace, tasks[i // group_size], [turn for turn in turns if turn is not None]))
    chosen = [kept[i] for i in matched(batch.drawn, [trace for trace, _, _ in kept])]
    return Drawn(batch, list(batch.drawn), [c[0] for c in chosen], [c[1] for c in chosen], [c[2] for c in chosen])


def matched(samples: Sequence[Sample], traces: Sequence[vf.Trace]) -> list[int]:
    """Which trace each sample was made of, no more samples than traces.

    By its ids; where a row was made of others, by the log-probabilities that were drawn; where these do not tell either
    (they are all 0 if only one token could be drawn), in order.
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
def recorded(engine: Any) -> Generator[list[tuple[int | None, Call]]]:
    """Every request that the engine answers meanwhile, with its seed, which no two rollouts or turns share."""
    calls: list[tuple[int | None, Call]] = []
    generate = engine.generate

    async def recording(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await generate(prompt_ids, sampling)
        calls.append((sampling.seed, Call(list(prompt_ids), completion)))
        return completion

    engine.generate = recording
    try:
        yield calls
    finally:
        engine.generate = generate


@contextmanager
def undone(run: Run) -> Generator[dict[str, torch.Tensor]]:
    """Whatever is done to the trained weights and their optimizer meanwhile is undone.

    Gives copies of the weights, in main memory: a GPU that just holds a run has no room for another set.
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
    """Put the optimizer at the schedule's peak: a warm-up begins at 0."""
    for group in run.optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])


def mean_abs(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Mean absolute difference over the tokens of all rows."""
    return (torch.cat(list(a)) - torch.cat(list(b))).abs().mean().item()
