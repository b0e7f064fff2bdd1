"""Everything a run needs before its first step: tasks, model, engine, optimizer, run directory, restored state."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from plumbob.hub import UserError
from plumbob.rollout import Chat, ChatTemplateError, Limits, Sample, Sampling
from plumbob.trainer import checkpoint
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.engine import TransformersEngine
from plumbob.trainer.evaluation.estimates import Estimate
from plumbob.trainer.losses import Objective
from plumbob.trainer.models import (
    check_supported,
    default_learning_rate,
    default_threads,
    load_chat,
    load_model,
    load_tokenizer,
)
from plumbob.trainer.policy import Policy
from plumbob.trainer.ranks import Ranks
from plumbob.trainer.run_directory import new_directory, truncate_metrics, write_whole
from plumbob.trainer.sharding import MakeOptimizer, requested
from plumbob.trainer.sync import fixed_row, sync_weights
from plumbob.trainer.tasks import Tasks, leave_out_long_prompts, load_tasks
from plumbob.trainer.vllm.opening import open_vllm
from transformers import get_scheduler

if TYPE_CHECKING:
    from plumbob.trainer.vllm.engine import VllmEngine


@dataclass
class Run:
    """Everything that lives as long as the run."""

    config: TrainConfig
    ranks: Ranks
    directory: Path
    tasks: Tasks
    policy: Policy
    engine: TransformersEngine | VllmEngine
    chat: Chat
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    objective: Objective
    sampling: Sampling
    limits: Limits
    parity_row: Sample
    num_steps: int
    rollouts_per_step: int
    first_step: int = 0
    cursor: int = 0
    """How many tasks have been taken, over all epochs."""
    pass_tokens: int = 0
    """Of one forward and backward pass; halved when one runs out of memory."""
    pass_tokens_fitted: bool = False
    """They are what memory holds, as far as that is found out beforehand."""
    peak_bytes: int = 0
    """The most that tensors took on this rank's GPU before that was measured anew."""
    out_of_memory: int = 0
    """How often one did."""
    skipped_in_a_row: int = 0
    """Optimizer steps skipped for a gradient that was not finite."""
    evaluations: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    """"before", "after" or a step's number -> "greedy" and "sampled" -> held-out reward."""

    def servers(self, what: Literal["sleep", "wake_up"]) -> None:
        """Have the vLLM servers give up their GPU memory, or take it again; on every rank, with nothing drawn."""
        self.ranks.barrier()
        if self.ranks.is_main and not isinstance(self.engine, TransformersEngine):
            torch.cuda.empty_cache()
            getattr(self.engine, what)()
        self.ranks.barrier()

    @property
    def updates_per_step(self) -> int:
        return self.config.num_iterations * self.config.num_minibatches


def set_up(
    config: TrainConfig, ranks: Ranks, resume_from: Path | None, status: Callable[[str], None] = lambda _: None
) -> Run:
    """Load all, make the run directory, restore the last checkpoint when resuming. Raises UserError.

    `status` is told what is waited for.
    """
    request = requested()
    config = dataclasses.replace(config, bf16=config.bf16 or request.bf16)
    rollouts = config.rollouts_per_step(ranks.size)
    tokenizer = load_tokenizer(config.model)
    tasks = load_tasks(config)
    model = load_model(config.model)
    chat = load_chat(tokenizer, model.generation_config)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.max_context > positions:
        raise UserError(f"--max-context {config.max_context} is more than the model's {positions} positions")
    check_supported(model, config.max_context)
    prompt_ids = _first_prompt(chat, tasks)
    if config.max_prompt_length is not None:
        tasks = asyncio.run(leave_out_long_prompts(tasks, chat, config.max_prompt_length))
    config = _resolved(config, model, len(tasks.train), rollouts)
    assert config.learning_rate is not None

    torch.set_num_threads(config.threads or max(1, default_threads(model) // ranks.size))
    torch.manual_seed(config.seed)
    divided = request.divides(ranks)
    policy = Policy(model, config, ranks.device, whole=not divided)
    engine_model = policy.engine_model(share=not divided) if config.engine == "transformers" else None
    optimizer = policy.shard(request, ranks, _optimizer(config, ranks), config.max_grad_norm)
    updates = config.num_iterations * config.num_minibatches
    scheduler = get_scheduler(
        config.lr_scheduler_type, optimizer, config.warmup_steps * updates, config.max_steps * updates
    )
    directory = Path(ranks.main(str(resume_from or (new_directory(config) if ranks.is_main else ""))))
    if engine_model is not None:
        at_once = max(rollouts // ranks.size, len(tasks.held_out), 1)
        slots, length = min(config.max_concurrent, at_once), positions or config.max_context
        engine = TransformersEngine(engine_model, max_slots=slots, max_length=length)
    else:
        vocab_size = model.config.get_text_config().vocab_size
        engine = open_vllm(config, ranks, directory, tokenizer, vocab_size, status)
    run = Run(
        config=config,
        ranks=ranks,
        directory=directory,
        tasks=tasks,
        policy=policy,
        engine=engine,
        chat=chat,
        tokenizer=tokenizer,
        optimizer=optimizer,
        scheduler=scheduler,
        objective=Objective.of(config),
        sampling=Sampling(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
        ),
        limits=Limits(config.max_turns, config.max_context, config.max_seconds),
        parity_row=fixed_row(prompt_ids[:256]),
        num_steps=config.max_steps,
        rollouts_per_step=rollouts,
        pass_tokens=config.pass_tokens,
    )
    try:
        _begin(run, resume_from)
    except BaseException:
        engine.close()
        raise
    return run


def _begin(run: Run, resume_from: Path | None) -> None:
    """Restore the last checkpoint when resuming, write down what was configured, and give the engine the weights."""
    ranks = run.ranks
    if resume_from is not None and ranks.is_main:
        checkpoint.tidy(resume_from)
    ranks.barrier()
    if resume_from is not None and (folder := checkpoint.latest(resume_from)) is not None:
        checkpoint.restore(folder, run)
    if ranks.is_main:
        try:
            truncate_metrics(run.directory, run.first_step)
            write_whole(run.directory / "config.toml", run.config.to_toml())
        except OSError as error:
            raise UserError(f"cannot write to {run.directory}: {error.strerror}") from None
    run.engine.version = run.first_step  # a resumed run's policy versions go on where they were
    sync_weights(run.policy, run.engine, run.parity_row)


def _optimizer(config: TrainConfig, ranks: Ranks) -> MakeOptimizer:
    assert config.learning_rate is not None
    return functools.partial(
        torch.optim.AdamW,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        fused=ranks.device.type == "cuda",
    )


def _resolved(config: TrainConfig, model: Any, num_tasks: int, rollouts: int) -> TrainConfig:
    """The settings that depend on the model and the data, filled in: what is written to the run directory."""
    steps = config.max_steps
    if steps == -1:
        steps = math.ceil(config.num_epochs * num_tasks * config.num_generations / rollouts)
    return dataclasses.replace(
        config,
        max_steps=steps,
        learning_rate=config.learning_rate or default_learning_rate(model, config.peft),
        kl_estimator=config.kl_estimator or ("k1" if config.kl_placement == "reward" else "k2"),
    )


def _first_prompt(chat: Chat, tasks: Tasks) -> list[int]:
    """The first task's prompt. Raises UserError if the chat template refuses it, or a tool result after it."""
    from plumbob.rollout import verifiers_adapter as adapter

    task = tasks.train[0]
    try:
        if tasks.toolsets or type(task).toolsets(task.config):
            chat.suffix([{"role": "tool", "content": "?", "name": "tool", "tool_call_id": "0"}])
        return chat.prompt([adapter.to_wire(m) for m in adapter.initial_messages(task)], tools=[]).token_ids
    except ChatTemplateError as error:
        raise UserError(f"this model's chat template cannot be used here: {error}") from None
