"""Set a run up with a fault of the field and sample a few of its rollouts, for tests that the fault does what it says."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import typer
from plumbob.rollout import Sample
from plumbob.rollout.verifiers_adapter import Trace
from plumbob.testing.faults.doubles import Inject
from plumbob.testing.faults.field import BASE, FieldFault
from plumbob.trainer.algorithm.advantages import step_advantages
from plumbob.trainer.algorithm.losses import LossInputs
from plumbob.trainer.cli import doctor
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import join_world
from plumbob.trainer.doctor.subject import Subject, load_subject
from plumbob.trainer.policy import merged_weights
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import train
from plumbob.trainer.training.minibatches import Minibatch, make_minibatches
from safetensors.torch import load_file


def config_of(fault: FieldFault, env: str) -> TrainConfig:
    """The settings with which `doctor ENV` examines this fault, but without the check of a weight sync."""
    words = [env, *BASE[env].split(), *fault.options.split(), "--eval-examples", "4"]
    command = typer.main.get_command(doctor.app)
    given = dict(command.make_context("doctor", words).params)
    for name in ("everything", "as_json", "html", "without_model", "version"):
        given.pop(name, None)
    config, _ = doctor.configure(given)
    return dataclasses.replace(config, parity_limit=1e6)


@contextmanager
def tried(fault: FieldFault, folder: Path, env: str | None = None, groups: int = 2) -> Generator[Subject]:
    """A run with the fault in it, whose rollouts can be drawn."""
    env = env or fault.envs[0]
    with ExitStack() as stack:
        if fault.start is not None:
            fault.start(stack, env)
        subject = load_subject(
            config_of(fault, env), join_world(torch.device("cpu")), folder, lambda _: None, groups=groups
        )
        stack.enter_context(closing(subject))
        if fault.inject is not None:
            fault.inject(stack, subject.run)
        yield subject


def without(fault: FieldFault) -> FieldFault:
    """The fault's entry without the fault: its settings alone."""
    return dataclasses.replace(fault, start=None, inject=None)


def minibatch_of(subject: Subject) -> Minibatch:
    """The drawn rollouts as one minibatch, with their advantages."""
    run, samples = subject.run, subject.drawn.samples
    found = step_advantages(samples, run.config.advantages())
    (minibatch,) = make_minibatches(samples, found, run.config, run.world, count=1)
    return minibatch


def gap(subject: Subject) -> float:
    """Mean absolute difference of the engine's and the trainer's log-probabilities of the sampled tokens, in nats."""
    samples = subject.drawn.samples
    trained = torch.cat(subject.score(samples))
    return (trained - torch.tensor([x for s in samples for x in s.sampled_logprobs])).abs().mean().item()


def rewards(subject: Subject) -> list[float]:
    """The rewards of the drawn rollouts."""
    return [one.reward for one in subject.drawn.samples]


def loss_inputs(advantages: Sequence[float], **others: torch.Tensor) -> LossInputs:
    """One token a row with these advantages, weights of 1, and a log-probability of -1 now and before. `others`: other fields."""
    logprobs, ones = torch.full((len(advantages),), -1.0, requires_grad=True), torch.ones(len(advantages))
    given = {
        "logprobs": logprobs,
        "weights": ones,
        "corrections": ones,
        "rows": torch.arange(len(advantages)),
        **others,
    }
    old = given["logprobs"].detach().clone()
    return LossInputs(advantages=torch.tensor(advantages), old_logprobs=old, **given)


def sample(reward: float = 0.0, group: str = "0/0", mask: Sequence[bool] = (False, True, True)) -> Sample:
    """A row with the ids 0, 1, 2, ..., this loss mask, and log-probabilities of -1."""
    return Sample(list(range(len(mask))), list(mask), [-1.0 * m for m in mask], reward, group, "", False)


def arrived(subject: Subject) -> dict[str, bool]:
    """Name of a trained tensor -> whether the engine holds it after all of them have changed by 0.01 and were sent."""
    run = subject.run
    with torch.no_grad():
        for parameter in run.policy.trainable.values():
            parameter.add_(0.01)
    run.engine.update(run.policy.sharding.stream())
    served = run.engine.served_weights() or {}
    return {name: torch.equal(served[name], tensor) for name, tensor in run.policy.trainable.items()}


def texts(trace: Trace, kind: str) -> list[str]:
    """The texts of a rollout's messages of one kind: "ToolMessage", "SystemMessage", "UserMessage" or
    "AssistantMessage"."""
    return [str(node.message.content) for node in trace.nodes if type(node.message).__name__ == kind]


def begin_step(number: int) -> None:
    """Tell the faults that begin in the middle of a run that sampling for this step (from 0) has begun."""
    nobody: Any = None
    batch: Any = SimpleNamespace(drawn=[])
    with suppress(AttributeError):  # there is nothing to sample with; the faults hear of the step before that
        asyncio.run(collect._add_round(nobody, nobody, number, 0, [], batch))


def saved_and_trained(subject: Subject, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(weights of the final model that the run saves into `folder`, those of its policy), after a change of all of them."""
    policy = subject.run.policy
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.01 * torch.randn_like(parameter))
    trained = merged_weights.merged_state(policy.model)
    policy.save_final(folder / "model")
    return load_file(folder / "model/model.safetensors"), trained


def sampler_of_evaluation(inject: Inject, **settings: Any) -> Any:
    """The sampler that evaluations get from `train` with this fault, where the run's own has these settings."""

    async def seen(sampler: Any, *rest: object) -> Any:
        return sampler

    # The patch goes in first and comes out last: the double puts back what it found there.
    with mock.patch.object(train, "evaluate", seen), ExitStack() as stack:
        run: Any = SimpleNamespace()
        inject(stack, run)
        sampler: Any = collect.Sampler(*[None] * 4, groups_per_step=1, **{"sampling": None, "limits": None, **settings})
        return asyncio.run(train.evaluate(sampler, None, "reward"))
