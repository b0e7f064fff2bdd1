"""Faults of tasks: copies, overlap with held-out tasks, order, answers in prompts; and of evaluations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import WITH_TOOLS, Fault, table
from plumbob.testing.faulty.helpers import gold, with_data
from plumbob.testing.faulty.sites import Site


def training(change: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any], str], list[Any]]:
    """Changes training tasks alone."""
    return lambda tasks, split: change(tasks) if split == "train" else tasks


def held_out(change: Callable[[Any], Any]) -> Callable[[list[Any], str], list[Any]]:
    """Changes each held-out task."""
    return lambda tasks, split: tasks if split == "train" else [change(task) for task in tasks]


def each(**fields: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The task with `function(task)` in these fields of its data."""
    return lambda task: with_data(task, **{name: function(task) for name, function in fields.items()})


def every(change: Callable[[Any], Any]) -> Callable[[list[Any], str], list[Any]]:
    """Changes each task."""
    return lambda tasks, split: [change(task) for task in tasks]


def repeated(distinct: int) -> Callable[[list[Any]], list[Any]]:
    """Copies of the first of `distinct` parts of the tasks, under ids of their own."""

    def change(tasks: list[Any]) -> list[Any]:
        kept = tasks[: max(len(tasks) // distinct, 1)]
        return [with_data(task, id=f"{task.data.id}-{k}") for k in range(distinct) for task in kept]

    return change


# Evaluations: await change(original, sampler, *rest, **settings)


def limited(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Evaluations sample by `change(sampler)`."""

    async def evaluate(original: Any, sampler: Any, *rest: Any, **how: Any) -> Any:
        return await original(change(sampler), *rest, **how)

    return evaluate


def at_temperature(temperature: Callable[[Any], float]) -> Callable[..., Any]:
    async def evaluate(original: Any, sampler: Any, *rest: Any, **how: Any) -> Any:
        return await original(sampler, *rest, **{**how, "temperature": temperature(sampler)})

    return evaluate


def of_first_weights(stack: ExitStack, env: str, change: None) -> None:
    """Evaluations sample with the weights that the engine had before its first weight sync."""
    engines: list[tuple[Any, dict[str, torch.Tensor]]] = []

    def load(original: Any, engine: Any, sent: Any, **how: Any) -> Any:
        if not engines:
            engines.append((engine, {n: t.detach().clone() for n, t in engine.served_weights().items()}))
        return original(engine, sent, **how)

    @torch.no_grad()
    def serve(engine: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        before = {name: tensor.detach().clone() for name, tensor in engine.served_weights().items()}
        for name, tensor in engine.served_weights().items():
            tensor.copy_(tensors[name])
        engine.forget()
        return before

    async def evaluate(original: Any, *args: Any, **how: Any) -> Any:
        now = [(engine, serve(engine, first)) for engine, first in engines]
        try:
            return await original(*args, **how)
        finally:
            for engine, tensors in now:
                serve(engine, tensors)

    at.load.install(stack, env, load)
    at.evaluation.install(stack, env, evaluate)


def when_held_out(grade: Callable[[float], float]) -> Callable[[ExitStack, str, Any], None]:
    """Held-out rollouts earn `grade(their own reward)`."""

    def install(stack: ExitStack, env: str, change: None) -> None:
        held: set[str] = set()

        def noted(tasks: list[Any], split: str) -> list[Any]:
            held.update(() if split == "train" else (task.key for task in tasks))
            return tasks

        at.tasks.install(stack, env, noted)
        at.reward.install(stack, env, lambda own, task, trace: grade(own) if task.key in held else own)

    return install


def two_rounds(original: Any, environments: Any, cursor: int, count: int) -> Any:
    """The tasks begin anew after every second step."""
    return original(environments, cursor % (2 * count), count)


# fmt: off
FAULTS = (
*table("tasks",
    Fault("eight tasks in the dataset", "The dataset has eight tasks, which a run repeats again and again.",
          at.options, None, "few-distinct-tasks", "the review's table",
          options="-a num_examples=8 --eval-examples 0"),
    Fault("forty copies of each task", "The dataset repeats each of its tasks forty times under other ids.", at.tasks,
          training(repeated(40)), "few-distinct-tasks", "the review's list (duplicates)"),
    Fault("tasks begin again after each restart",
          "A checkpoint does not hold the place in the data, and a job that is often restarted sees the first "
          "tasks alone.", at.tasks_of_step, two_rounds, "few-distinct-tasks", "PrimeIntellect-ai/prime-rl#1036",
          steps=8, only="run"),
    Fault("every prompt is the template without its question",
          "The column of questions has another name, and every prompt is the same text without a question.", at.tasks,
          every(each(prompt=lambda task: "Question: None")), "few-distinct-tasks never-succeeds",
          "the review's list (duplicates), huggingface/open-r1#235"),
    Fault("tasks sorted from easy to hard",
          "Tasks are taken from easy to hard, so that the reward stays flat or falls while the policy learns.",
          at.tasks, lambda tasks, split: sorted(tasks, key=lambda task: len(task.data.chain)), "task-order-drifts",
          "huggingface/trl#2998, NVIDIA-NeMo/RL#3117", ("lookup",),
          "--task-order as-given -a num_examples=96 --eval-examples 0", steps=16, run_options="--batch-size 48"),
    Fault("gold shown in the system prompt",
          "The system prompt ends with a line of metadata that holds the gold answer.", at.tasks,
          every(each(system_prompt=lambda task: f"{task.data.system_prompt}\nmeta: answer={gold(task)}")),
          "answer-in-prompt", "the review's table"),
    Fault("gold written in the state under the tool results",
          "Each observation includes the environment's state, and the state includes the answer.", at.tool_result,
          lambda result, name, arguments, tools: f'{result}\nstate: {{"target": "{tools.table[tools.chain[-1]]}"}}',
          "answer-in-prompt", "huggingface/OpenEnv#611", ("lookup",)),
    Fault("evaluation set cut from the training rows",
          "The held-out tasks are the first rows of the training data, which are trained on as well.", at.divided,
          lambda found: replace(found, held_out=list(found.train[: len(found.held_out)])), "held-out-in-training",
          "OpenRLHF/OpenRLHF#1089, OpenRLHF/OpenRLHF#594"),
),
*table("evaluation",
    Fault("held-out rollouts from the initial weights",
          "Evaluations during training sample from an engine that never gets the trained weights.",
          Site("evaluate", of_first_weights), None, "weights-not-synced evaluation-differs",
          "linhaowei1/NLPDL-2025Fall#31, huggingface/open-r1#659", steps=16, only="run",
          run_options="--eval-examples 16 --eval-steps 4"),
    Fault("held-out rollouts of one turn",
          "Evaluations during training end each rollout after one turn, because only training plays several.",
          at.evaluation, limited(lambda sampler: replace(sampler, limits=replace(sampler.limits, max_turns=1))),
          "evaluation-differs", "NVIDIA-NeMo/RL#1089", WITH_TOOLS, steps=8, only="run",
          run_causes="truncated-rollouts", run_options="--eval-examples 8 --eval-steps 3"),
    Fault("evaluations at temperature one whatever is asked",
          "The evaluation's temperature is written into the code: it is 1, and training samples at 0.6.",
          at.evaluation, at_temperature(lambda sampler: 1.0), "evaluation-differs",
          "thinking-machines-lab/tinker-cookbook#724", options="--temperature 0.6", only="run",
          run_options="--eval-examples 32 --eval-steps 3"),
    Fault("held-out scores never computed",
          "The evaluation does not ask the reward for its scores, and each held-out rollout has 0.",
          Site("reward", when_held_out(lambda own: 0.0)), None, "evaluation-differs", "verl-project/verl#5054",
          ("gsm8k", "lookup"), "--eval-examples 16 --eval-steps 3"),
    Fault("evaluation without the system prompt",
          "Held-out tasks have a general system prompt in place of the one that training uses.", at.tasks,
          held_out(each(system_prompt=lambda task: "You are a helpful assistant.")), "evaluation-differs",
          "the review's table, verl-project/verl#6202", steps=8, run_options="--eval-examples 48 --eval-steps 4"),
    Fault("training tasks without their system prompt",
          "The training prompts have lost their system prompt, and the held-out prompts have it.", at.tasks,
          training(lambda tasks: [with_data(task, system_prompt=None) for task in tasks]), "evaluation-differs",
          "verl-project/verl#3948, huggingface/trl#3569", run_options="--eval-examples 8 --eval-steps 3"),
),
)
