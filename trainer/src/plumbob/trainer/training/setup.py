"""Everything a run needs before its first step: tasks, model, engine, optimizer, run directory, restored state."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import verifiers.v1 as vf
from plumbob.console import UserError, counted
from plumbob.console.files import write_whole
from plumbob.console.working import note
from plumbob.rollout import Chat, Sampling
from plumbob.trainer.algorithm.losses import try_own_loss
from plumbob.trainer.config.chat_template import RECORDED, TemplateChoice
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.base import MakeOptimizer
from plumbob.trainer.distributed.launcher import requested
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference import choice
from plumbob.trainer.inference.engine import EngineParts, TrainingEngine, engine_module
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.inference.weight_sync import parity_row, sync_weights
from plumbob.trainer.policy.call_tokens import write_calls_as_text
from plumbob.trainer.policy.forward_plan import ForwardPlan, moved, plan_forward, vocabulary
from plumbob.trainer.policy.gpu_memory import limit_memory
from plumbob.trainer.policy.loading import (
    CPU,
    check_context,
    default_learning_rate,
    load_chat,
    load_model,
    load_tokenizer,
    positions_of,
    threads_for,
)
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.rollouts.collect import Sampler
from plumbob.trainer.rollouts.limits import limits_of
from plumbob.trainer.rollouts.tasks import Read, Tasks, fingerprint_of, leave_out_long_prompts, load_environments
from plumbob.trainer.rollouts.templates import check_template, opening_messages, tool_names
from plumbob.trainer.run_files import start
from plumbob.trainer.run_files.run_directory import lock_directory, new_directory, run_directory_of, truncate_metrics
from plumbob.trainer.run_files.stopped import Stop, write_stop
from plumbob.trainer.training.capacity import memory_plan
from plumbob.trainer.training.checkpoint import tidy
from plumbob.trainer.training.restore import choose_checkpoint, restore, set_aside_later
from plumbob.trainer.training.run import Run, TrainState
from plumbob.trainer.training.sft.demonstrations import Demonstrations, make_demonstrations, read_stored, store
from transformers import PreTrainedModel

Status = Callable[[str], None]

LOOKED_AT = 8
"""Number of tasks whose prompts are compared with --max-context before any weights are loaded."""


def set_up(
    config: TrainConfig,
    world: World,
    resume_from: Path | None,
    status: Status = lambda _: None,
    environments: Sequence[Tasks] | None = None,
    *,
    read: Sequence[Read | None] = (),
    parity_checked: bool = True,
) -> Run:
    """Load everything, make and lock the run directory, and restore a checkpoint when resuming.

    Collective. `resume_from`: a run directory, or one of its checkpoints; None for a new run. `status` is called with a
    text that says what the set-up is waiting for. `environments`: the tasks of the run if they are already loaded;
    `read`: those that are read, of `read_here`.
    `parity_checked`: whether it is an error if engine and trainer give different log-probabilities after the first weight
    sync. Raises UserError and SyncError.
    """
    with ExitStack() as on_failure:
        request = requested()
        lock, folder = _begin_resuming(config, world, resume_from, on_failure)
        config = dataclasses.replace(config, bf16=config.bf16 or request.bf16)
        if (memory := memory_plan.plan_memory(config, world.size)).line:
            limit_memory(world.device, cast(int, config.gpu_bytes))
            note(memory.line)
        config = memory.config
        rollouts = config.rollouts_per_step(world.size)
        try_own_loss(config.objective(), bool(config.kl_beta))
        template = TemplateChoice(config.chat_template, resume_from and run_directory_of(resume_from))
        tokenizer = load_tokenizer(config.model, template)
        chat = load_chat(tokenizer, None, config.tool_format)
        environments = tuple(environments or load_environments(config, read))
        for tasks in environments:  # before any weights are loaded
            check_template(chat, tasks, config.model)
            check_room(chat, tasks, config)
        start.lap("tokenizer and tasks")
        # Memory that lies in one block is not given back in part: a server on the same GPU, or other processes, may need it.
        model = load_model(config.model, CPU if config.engine == "vllm" or world.size > 1 else world.device)
        check_context(model, config.max_context)
        if any(tool_names(tasks.train[0], tasks.toolsets) for tasks in environments):
            write_calls_as_text(tokenizer, chat, model, config.tool_format)
        chat = load_chat(tokenizer, model.generation_config, config.tool_format, vocabulary(model))
        environments = tuple(
            dataclasses.replace(tasks, notes=[*tasks.notes, *check_template(chat, tasks, config.model)])
            for tasks in environments
        )
        start.lap("model")
        fixed_ids = _prompt(chat, environments[0].train[0])[:256]
        if config.max_prompt_length is not None:
            needed = config.max_steps * rollouts // config.num_generations
            environments = tuple(
                asyncio.run(leave_out_long_prompts(tasks, chat, config.max_prompt_length, needed))
                for tasks in environments
            )
        demonstrations = Demonstrations()
        if isinstance(config, SftConfig):
            (tasks,) = environments
            demonstrations = _demonstrations(config, tasks, chat, world, resume_from, status)
            environments = (dataclasses.replace(tasks, notes=(*tasks.notes, *demonstrations.notes())),)
            rollouts = min(rollouts, len(demonstrations.rows))  # a step has no demonstration twice
        config = _resolved(config, model, len(demonstrations.rows) or len(environments[0].train), rollouts)

        start.lap("tokenizer and tasks")
        torch.set_num_threads(threads_for(model, world.size))
        torch.manual_seed(config.seed)
        divided = request.divides(world)
        # A model that is divided begins on the CPU, on every process.
        plan, measured = world.from_main(
            _measured(model, config, world, len(tokenizer), back=divided) if world.is_main else None
        )
        if world.device.type == "cuda":  # it may have been measured on the CPU
            torch.set_num_threads(threads_for(model, world.size, beside_gpu=True))
        start.lap("measuring")
        policy = Policy(model, config, world.device, whole=not divided, plan=plan)
        chosen = _chosen_engine(measured, policy, config, world)
        config = dataclasses.replace(config, engine=chosen.engine)
        engines = engine_module(config.engine)
        # The engine's copy of the model must be made before `shard` divides the weights.
        engine_model = policy.engine_model(share=not divided) if engines.IN_PROCESS else None
        optimizer = policy.shard(request, world, _optimizer(config, world), config.max_grad_norm)
        if resume_from is not None:
            directory = run_directory_of(resume_from)
        else:
            directory = Path(world.from_main(str(new_directory(config)) if world.is_main else ""))
            lock = on_failure.push(lock_directory(directory)) if world.is_main else lock
        parts = EngineParts(
            config=config,
            world=world,
            directory=directory,
            vocab_size=vocabulary(model),
            positions=positions_of(model),
            at_once=max(rollouts // world.size, sum(len(t.held_out) for t in environments) * config.eval_rollouts, 1),
            model=engine_model,
            decoding=chosen.decoding,
            later_bytes=_bytes_of_first_step(policy) + memory.later,
            status=status,
        )
        engine = engines.open_engine(parts)
        on_failure.callback(engine.close)
        state = TrainState(microbatch_tokens=config.microbatch_tokens, engine_rests=memory.rests)
        run = Run(
            config=config,
            world=world,
            directory=directory,
            tokenizer=tokenizer,
            policy=policy,
            sampler=_sampler(config, environments, engine, chat, rollouts // config.num_generations),
            optimizer=optimizer,
            objective=config.objective(),
            parity_row=parity_row(fixed_ids),
            state=state,
            lock=lock,
            task_fingerprint={**fingerprint_of(environments), **demonstrations.fingerprint()} if world.is_main else {},
            demonstrations=demonstrations.rows,
        )
        _begin(run, folder, demonstrations, status, parity_checked)
        start.lap("engine")
        on_failure.pop_all()
    return run


def _demonstrations(
    config: SftConfig, tasks: Tasks, chat: Chat, world: World, resume_from: Path | None, status: Status
) -> Demonstrations:
    """What the run trains on: what it has stored if it is resumed, else what its settings ask for. Collective."""
    stored = None
    if resume_from is not None:
        stored = world.from_main(read_stored(run_directory_of(resume_from)) if world.is_main else None)
    return stored or make_demonstrations(config, tasks, chat, world, status)


def _measured(
    model: PreTrainedModel, config: TrainConfig, world: World, num_ids: int, *, back: bool
) -> tuple[ForwardPlan, choice.Measured]:
    """How trainer and engine must compute this model, measured and printed. One process does it for all.

    `num_ids`: size of the tokenizer. `back`: if the model is moved to the GPU for this, it is moved back.
    """
    with moved(model, world.device, back=back):
        plan = plan_forward(model, config.max_context, num_ids)
        found = choice.measure(config.engine, model, plan, config.max_context, world.device, world.size)
    for line in plan.lines():
        note(line)
    return plan, found


def _chosen_engine(measured: choice.Measured, policy: Policy, config: TrainConfig, world: World) -> choice.Chosen:
    """The engine that --engine names, or that auto chooses, once the trainer's weights have their place."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    parameters = policy.model.parameters()
    copied = sum(p.numel() * dtype.itemsize for p in parameters if p.requires_grad or p.dtype != dtype)
    chosen = choice.decide(
        measured,
        policy.model,
        world.device,
        world.size,
        dtype=dtype,
        max_context=config.max_context,
        share=config.engine_memory,
        later=_bytes_of_first_step(policy) + copied,
        command=f"add --engine vllm, or start a server with `vf-vllm --model {config.model}` and add --vllm-url too",
    )
    for line in chosen.lines if world.is_main else ():
        note(line)
    return chosen


def _bytes_of_first_step(policy: Policy) -> int:
    """Memory that the first optimizer step allocates for good: float32 gradients and both moments of AdamW."""
    return 12 * sum(policy.sharding.local(p).numel() for p in policy.trainable.values())


def check_room(chat: Chat, tasks: Tasks, config: TrainConfig) -> None:
    """Raise UserError if the first tasks' prompts alone fill --max-context, even without descriptions of tools."""
    shortest = min(len(_prompt(chat, task)) for task in tasks.train[:LOOKED_AT])
    if shortest >= config.max_context:
        raise UserError(
            f"--max-context {config.max_context} leaves no room for a reply: the shortest prompt of {tasks.name}'s first "
            f"{counted(min(LOOKED_AT, len(tasks.train)), 'task')} has {counted(shortest, 'token')}; raise it"
        )


def _sampler(
    config: TrainConfig, environments: Sequence[Tasks], engine: TrainingEngine, chat: Chat, groups_per_step: int
) -> Sampler:
    sampling = Sampling(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
    )
    tasks, *others = environments
    return Sampler(config, tasks, engine, chat, sampling, limits_of(config), groups_per_step, tuple(others))


def _begin_resuming(
    config: TrainConfig, world: World, resume_from: Path | None, on_failure: ExitStack
) -> tuple[AbstractContextManager[object], Path | None]:
    """(the lock of the run directory, the checkpoint to restore or None). Comes first, so that errors come early."""
    lock: AbstractContextManager[object] = nullcontext()
    if resume_from is None:
        return lock, None
    chosen = ""
    if world.is_main:
        lock = on_failure.push(lock_directory(run_directory_of(resume_from)))
        tidy(run_directory_of(resume_from))
        chosen = str(choose_checkpoint(resume_from, config) or "")
    chosen = world.from_main(chosen)
    return lock, Path(chosen) if chosen else None


def _begin(run: Run, folder: Path | None, demonstrations: Demonstrations, status: Status, parity_checked: bool) -> None:
    """Restore the checkpoint `folder`, if any, write config.toml and what is imitated, and sync the weights."""
    world = run.world
    if folder is not None:
        restore(folder, run)
    if world.is_main:
        try:
            if folder is not None and (later := set_aside_later(folder)):
                status(f"resuming from {folder.name}; checkpoints of later steps are now {', '.join(map(str, later))}")
            if (lost := truncate_metrics(run.directory, run.state.step)) > 0:
                print(
                    f"metrics.jsonl lacks {lost} of the {run.state.step} steps that the run has finished: the run goes on "
                    "from its weights, but its report and its diagnosis do not know these steps",
                    file=sys.stderr,
                    flush=True,
                )
            write_whole(run.directory / "config.toml", run.config.to_toml())
            write_whole(run.directory / RECORDED, run.tokenizer.chat_template)
            if demonstrations.records:
                store(run.directory, demonstrations)
        except OSError as error:
            raise UserError(f"cannot write to {run.directory}: {error.strerror}") from None
    run.engine.version = run.state.step  # the policy versions of a resumed run continue those of the interrupted one
    try:
        sync_weights(run.policy, run.engine, run.parity_row, checked=parity_checked)
    except SyncError as error:
        if world.is_main:
            write_stop(run.directory, Stop(0, "SyncError", str(error)))
        if not parity_checked or run.config.COMMAND != "train":
            raise
        settings = run.directory / "config.toml"
        raise SyncError(
            f"{error}\nFind the cause with:  doctor --config {settings}", error.status, error.reason
        ) from error


def _optimizer(config: TrainConfig, world: World) -> MakeOptimizer:
    assert config.learning_rate is not None
    return functools.partial(
        torch.optim.AdamW,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        fused=world.device.type == "cuda",
    )


def _resolved(config: TrainConfig, model: Any, num_tasks: int, rollouts: int) -> TrainConfig:
    """Fill in the settings whose defaults depend on the model or the data. config.toml holds the result."""
    steps = config.max_steps
    if steps == -1 or config.num_epochs is not None:
        epochs = config.num_epochs or config.DEFAULT_EPOCHS
        needed = math.ceil(epochs * num_tasks * config.num_generations / rollouts)
        steps = needed if steps == -1 else min(steps, needed)
    return dataclasses.replace(
        config,
        max_steps=steps,
        num_epochs=None,  # it has become a number of steps
        learning_rate=config.learning_rate
        or default_learning_rate(model, config.peft, imitates=isinstance(config, SftConfig)),
    )


def _prompt(chat: Chat, task: vf.Task) -> list[int]:
    """The token ids of a task's prompt, without tool descriptions."""
    return chat.prompt(opening_messages(task), tools=[]).token_ids
