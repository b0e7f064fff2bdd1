"""A GRPO run, from top to bottom: `run` sets up, `_train_step` is one step, `_summary` is the result.

One step: pick tasks -> roll out a group for each -> centre rewards within groups -> weigh tokens -> forward and
backward in microbatches -> optimizer step -> weight sync, acknowledged -> metrics and traces.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.hub import UserError
from plumbob.rollout import Chat, ChatTemplateError, Limits, Sample, Sampling, derive_seed, run_group, to_sample
from plumbob.trainer import checkpoint
from plumbob.trainer.advantages import compute_advantages
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.console import Board, sparkline
from plumbob.trainer.engine import TransformersEngine
from plumbob.trainer.evaluation.estimates import Estimate
from plumbob.trainer.held_out import evaluate
from plumbob.trainer.interruption import Interrupted, Interruption
from plumbob.trainer.losses import LossInputs, clipped_loss, row_weights
from plumbob.trainer.metrics import Tally, advantage_metrics, rollout_metrics, sync_metrics
from plumbob.trainer.policy import (
    Policy,
    check_supported,
    default_learning_rate,
    default_threads,
    load_chat,
    load_model,
    load_tokenizer,
    microbatches,
)
from plumbob.trainer.run_directory import append_metrics, new_directory, truncate_metrics, write_traces
from plumbob.trainer.sync import SyncError, fixed_row, sync_weights
from plumbob.trainer.tasks import Tasks, load_tasks
from transformers import get_scheduler
from transformers.utils import logging as transformers_logging


class RunFailed(Exception):
    """Nothing is left to train on; the message says why."""


@dataclasses.dataclass
class Run:
    """Everything that lives as long as the run."""

    config: TrainConfig
    directory: Path
    tasks: Tasks
    policy: Policy
    engine: TransformersEngine
    chat: Chat
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any
    sampling: Sampling
    limits: Limits
    parity_row: Sample
    evaluations: dict[str, dict[str, Estimate]] = dataclasses.field(default_factory=dict)
    """"before" and "after" -> "greedy" and "sampled" -> held-out reward."""
    seen_failures: set[str] = dataclasses.field(default_factory=set)

    def slots(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self.config.max_concurrent)


def run(config: TrainConfig, resume_from: Path | None = None) -> int:
    """Train as configured; returns the exit code: 0, or 1 if the run was interrupted or failed. Raises UserError."""
    started = time.time()
    transformers_logging.disable_progress_bar()
    run_, first_step = _set_up(config, resume_from)
    config = run_.config
    with Board(config.max_steps, first_step) as board, Interruption() as interruption, asyncio.Runner() as loop:
        board.note(_banner(run_))
        step = first_step
        try:
            if "before" not in run_.evaluations:
                run_.evaluations["before"] = interruption.run(loop, _evaluate_both(run_, board))
            while step < config.max_steps:
                board.status(f"step {step + 1}/{config.max_steps}: rollouts")
                metrics = _train_step(run_, step, loop, interruption, board)
                step += 1
                append_metrics(run_.directory, metrics)
                board.step(metrics)
                if step % config.save_steps == 0 or step == config.max_steps:
                    _save(run_, step)
            run_.evaluations["after"] = interruption.run(loop, _evaluate_both(run_, board))
        except (RunFailed, SyncError) as error:
            board.note(f"Stopped in step {step + 1}: {error}")
            return 1
        except Interrupted:
            folder = _save(run_, step)
            board.note(f"Interrupted after step {step}; saved {folder}. Go on with:  train --resume {run_.directory}")
            return 1
    _summary(run_, time.time() - started)
    return 0


def _set_up(config: TrainConfig, resume_from: Path | None) -> tuple[Run, int]:
    """Load tasks, model and tokenizer, make the run directory, and restore a checkpoint when resuming."""
    tokenizer = load_tokenizer(config.model)
    tasks = load_tasks(config)
    model = load_model(config.model)
    chat = load_chat(tokenizer, model.generation_config)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and config.max_context > positions:
        raise UserError(f"--max-context {config.max_context} is more than the model's {positions} positions")
    check_supported(model, config.max_context)
    prompt_ids = _first_prompt(chat, tasks)
    rate = config.learning_rate or default_learning_rate(model, config.peft)
    config = dataclasses.replace(config, learning_rate=rate)
    torch.set_num_threads(config.threads or default_threads(model))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = Policy(model, config, device)
    optimizer = torch.optim.AdamW(policy.trainable.values(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, config.max_steps)
    first_step, evaluations = 0, {}
    directory = resume_from or new_directory(config)
    if resume_from is not None and (folder := checkpoint.latest(resume_from)) is not None:
        state = checkpoint.restore(folder, policy, optimizer, scheduler)
        checkpoint.set_rate(optimizer, scheduler, rate)
        first_step = state["step"]
        evaluations = {
            when: {how: Estimate(**values) for how, values in both.items()}
            for when, both in state["evaluations"].items()
        }
    truncate_metrics(directory, first_step)
    (directory / "config.toml").write_text(config.to_toml())
    engine = TransformersEngine(
        policy.engine_model(),
        max_slots=min(config.max_concurrent, max(config.rollouts_per_step, len(tasks.held_out))),
        max_length=positions or config.max_context,
        version=first_step,  # a resumed run's policy versions go on where they were
    )
    parity_row = fixed_row(prompt_ids[:256])
    sync_weights(policy, engine, parity_row)
    run_ = Run(
        config=config,
        directory=directory,
        tasks=tasks,
        policy=policy,
        engine=engine,
        chat=chat,
        tokenizer=tokenizer,
        optimizer=optimizer,
        scheduler=scheduler,
        sampling=Sampling(max_tokens=config.max_tokens, temperature=config.temperature),
        limits=Limits(config.max_turns, config.max_context, config.max_seconds),
        parity_row=parity_row,
        evaluations=evaluations,
    )
    return run_, first_step


def _train_step(
    run_: Run, step: int, loop: asyncio.Runner, interruption: Interruption, board: Board
) -> dict[str, float]:
    config, policy = run_.config, run_.policy

    # Rollouts: one group per task, seeded by (run, step, group), so that a resumed run draws the same.
    start = time.perf_counter()
    generated = run_.engine.generated_tokens
    groups = interruption.run(loop, _roll_out(run_, step))
    traces = [trace for group in groups for trace in group]
    samples = [to_sample(t, f"{step}/{i}") for i, group in enumerate(groups) for t in group if t.ok]
    rollout_seconds = time.perf_counter() - start
    write_traces(run_.directory, step, traces)
    _report_failures(run_, traces, board)

    # Advantages, and a weight for every token from the totals of the whole step.
    advantages = compute_advantages(samples, config.scale_rewards)
    weights = row_weights(config.loss_type, [s.num_sampled for s in samples], config.max_tokens)
    drawn_from = [i for i, s in enumerate(samples) if s.num_sampled]
    with_signal = [i for i in drawn_from if advantages.values[i] != 0.0]
    board.status(f"step {step + 1}/{config.max_steps}: training on {len(with_signal)} of {len(traces)} rollouts")

    # Forward and backward: the loss is a sum, so the gradient is the same however it is cut.
    start = time.perf_counter()
    policy.model.train()
    run_.optimizer.zero_grad()
    tally = Tally()
    # Without any signal there is nothing to train on; a few rows are scored all the same, to watch gap and entropy.
    scored = with_signal or drawn_from[: config.batch_size]
    with torch.set_grad_enabled(bool(with_signal)):
        for batch in microbatches([samples[i] for i in scored], config.batch_size):
            interruption.check()
            rows = [scored[j] for j in batch]
            tally.add(
                _backward(
                    run_, [samples[i] for i in rows], [advantages.values[i] for i in rows], [weights[i] for i in rows]
                )
            )
    grad_norm = 0.0
    if with_signal:
        bound = config.max_grad_norm or float("inf")
        grad_norm = torch.nn.utils.clip_grad_norm_(list(policy.trainable.values()), bound).item()
    rate = run_.scheduler.get_last_lr()[0]
    run_.optimizer.step()  # leaves every weight alone whose gradient is None
    run_.scheduler.step()
    train_seconds = time.perf_counter() - start

    start = time.perf_counter()
    report = sync_weights(policy, run_.engine, run_.parity_row)
    sync_seconds = time.perf_counter() - start
    drawn = run_.engine.generated_tokens - generated
    return {
        "step": step + 1,
        **rollout_metrics(traces, samples),
        **advantage_metrics(advantages),
        **tally.metrics(),
        **sync_metrics(report),
        "optimizer/grad_norm": grad_norm,
        "optimizer/learning_rate": rate,
        "time/rollout": rollout_seconds,
        "time/train": train_seconds,
        "time/sync": sync_seconds,
        "time/rollout_tokens_per_second": drawn / rollout_seconds,
        "time/train_tokens_per_second": tally.row_tokens / train_seconds,
    }


def _report_failures(run_: Run, traces: Sequence[vf.Trace], board: Board) -> None:
    """Say each kind of failure once. Raises RunFailed if no rollout is left: reward 0 would hide that nothing ran."""
    failed = [trace for trace in traces if not trace.ok]
    for trace in failed:
        error = trace.errors[-1]
        reason = f"{error.type}: {error.message}".splitlines()[0]
        if len(failed) == len(traces):
            raise RunFailed(f"all {len(traces)} rollouts failed: {reason}")
        if reason not in run_.seen_failures:
            run_.seen_failures.add(reason)
            board.note(f"{len(failed)} of {len(traces)} rollouts failed and leave their groups: {reason}")


async def _roll_out(run_: Run, step: int) -> list[list[vf.Trace]]:
    config, slots = run_.config, run_.slots()
    return await asyncio.gather(
        *(
            run_group(
                task,
                run_.engine,
                run_.chat,
                dataclasses.replace(run_.sampling, seed=derive_seed(config.seed, step, i)),
                run_.limits,
                config.num_generations,
                shared_toolsets=run_.tasks.toolsets,
                slots=slots,
            )
            for i, task in enumerate(run_.tasks.step_tasks(step, config.tasks_per_step))
        )
    )


def _backward(run_: Run, rows: Sequence[Sample], advantages: Sequence[float], weights: Sequence[float]) -> Tally:
    """Add one microbatch's gradient; nothing but the measurements where gradients are off."""
    policy = run_.policy
    scores = policy.score(rows, run_.config.temperature)
    lengths = torch.tensor([row.num_sampled for row in rows], device=policy.device)

    def per_token(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=policy.device).repeat_interleave(lengths)

    sampled = torch.tensor(
        [lp for row in rows for lp, m in zip(row.sampling_logprobs, row.loss_mask, strict=True) if m],
        device=policy.device,
    )
    outputs = clipped_loss(
        LossInputs(
            logprobs=scores.logprobs,
            # What the engine drew with: in float32 the ratio is 1 up to rounding, in bfloat16 it corrects the mismatch.
            old_logprobs=sampled,
            advantages=per_token(advantages),
            weights=per_token(weights),
        ),
        run_.config.epsilon,
    )
    if outputs.loss.requires_grad:
        outputs.loss.backward()
    return Tally(
        loss=outputs.loss.item(),
        tokens=len(sampled),
        row_tokens=sum(len(row.token_ids) for row in rows),
        entropy=scores.entropies.sum().item(),
        gap=(scores.logprobs.detach() - sampled).abs().sum().item(),
        clipped=int(outputs.clipped.item()),
    )


async def _evaluate_both(run_: Run, board: Board) -> dict[str, Estimate]:
    """Held-out reward, greedy and at the training temperature."""
    config, tasks = run_.config, run_.tasks

    async def one(how: str, temperature: float) -> Estimate:
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            board.status(f"held-out evaluation, {how}: {done}/{len(tasks.held_out)}")

        sampling = dataclasses.replace(run_.sampling, temperature=temperature, seed=derive_seed(config.seed, -1))
        result, traces = await evaluate(
            tasks.held_out, run_.engine, run_.chat, sampling, run_.limits, tasks.toolsets, run_.slots(), count
        )
        _report_failures(run_, traces, board)
        return result

    return {"greedy": await one("greedy", 0.0), "sampled": await one("sampled", config.temperature)}


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


def _save(run_: Run, step: int) -> Path:
    evaluations = {when: {h: dataclasses.asdict(e) for h, e in both.items()} for when, both in run_.evaluations.items()}
    return checkpoint.save(
        run_.directory, step, run_.policy, run_.tokenizer, run_.optimizer, run_.scheduler, {"evaluations": evaluations}
    )


def _banner(run_: Run) -> str:
    c, policy = run_.config, run_.policy
    trained = sum(p.numel() for p in policy.trainable.values())
    total = sum(p.numel() for p in policy.model.parameters())
    return (
        f"{c.env}: {len(run_.tasks.train)} training tasks, {len(run_.tasks.held_out)} held out | {c.model}: {total:,} "
        f"parameters, {trained:,} trained ({'LoRA' if c.peft else 'full'}) on {policy.device} | {c.max_steps} steps of "
        f"{c.tasks_per_step} tasks x {c.num_generations} rollouts, rate {c.learning_rate:g} | {run_.directory}"
    )


def _summary(run_: Run, seconds: float) -> None:
    rows = [json.loads(line) for line in (run_.directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    summary = {
        "seconds": seconds,
        "evaluations": {w: {h: dataclasses.asdict(e) for h, e in b.items()} for w, b in run_.evaluations.items()},
    }
    (run_.directory / "summary.json").write_text(json.dumps(summary, indent=2))
    print()
    if run_.tasks.held_out:
        before, after = run_.evaluations["before"], run_.evaluations["after"]
        print(f"held-out reward, {len(run_.tasks.held_out)} tasks, 95% intervals:")
        for how in before:
            lift = after[how].mean - before[how].mean
            print(f"  {how:<8} {before[how]} -> {after[how]}   ({lift:+.3f})")
    if all(row["groups/zero_signal"] == row["groups/count"] for row in rows):
        print("No group had any signal: all rollouts of each task got the same reward, so nothing was learned.")
    print(f"training reward  {rewards[0]:.3f} {sparkline(rewards)} {rewards[-1]:.3f}")
    print(f"time             {seconds:.0f} s")
    print(f"run directory    {run_.directory}")
