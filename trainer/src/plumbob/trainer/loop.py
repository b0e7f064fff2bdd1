"""A GRPO run: `run` steps through it; set-up is in setup.py, one step in step.py, `_summary` is the result."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from plumbob.hub import UserError
from plumbob.trainer import checkpoint, ranks
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.console import Board, sparkline
from plumbob.trainer.corrections import sampling_warnings
from plumbob.trainer.doctor.watch import Warner
from plumbob.trainer.evaluation.estimates import Estimate
from plumbob.trainer.held_out import evaluate
from plumbob.trainer.hub_upload import check_hub_access, push_to_hub
from plumbob.trainer.interruption import Interrupted, Interruption
from plumbob.trainer.reporting import Reporter, check_reporting, make_reporter
from plumbob.trainer.rollouts import Batch, RolloutSource, RunFailed
from plumbob.trainer.run_directory import MetricsLog, write_traces, write_whole
from plumbob.trainer.setup import Run, set_up
from plumbob.trainer.step import train_step
from plumbob.trainer.sync import SyncError
from transformers.utils import logging as transformers_logging


def run(config: TrainConfig, resume_from: Path | None = None) -> int:
    """Train as configured; returns the exit code: 0, or 1 if the run was interrupted or failed. Raises UserError."""
    started = time.time()
    transformers_logging.disable_progress_bar()
    here = ranks.join()
    try:
        if here.is_main:  # what would fail after hours fails now
            check_reporting(config)
            if config.push_to_hub:
                check_hub_access(config)
        try:
            run_ = set_up(config, here, resume_from, _teller() if here.is_main else lambda _: None)
        except SyncError as error:
            raise UserError(f"before the first step: {error}") from None
        with (
            _board(run_) as board,
            Interruption(deferred=here.size > 1) as interruption,
            asyncio.Runner() as loop,
        ):
            reporter = make_reporter(run_.config, run_.directory) if here.is_main else None
            try:
                code = _steps(run_, board, reporter, loop, interruption)
            finally:
                run_.engine.close()
                if reporter is not None:
                    reporter.close()
        if code == 0 and (here.is_main or run_.policy.sharding.lockstep):
            return _finish(run_, time.time() - started)
        return code
    except Exception as error:
        if here.size > 1 and not isinstance(error, UserError):
            # Leaving the group politely would wait for processes that wait for this one. The launcher ends them.
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        raise
    finally:
        ranks.leave()


def _teller() -> Callable[[str], None]:
    """Says what is waited for, before there is a table: a line every ten seconds."""
    last = -math.inf

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"  {text}", file=sys.stderr, flush=True)

    return tell


def _board(run_: Run) -> Board:
    config = run_.config
    return Board(
        run_.num_steps,
        run_.first_step,
        quiet=not run_.ranks.is_main,
        every=config.logging_steps,
        completions=config.log_completions,
    )


def _steps(run_: Run, board: Board, reporter: Reporter | None, loop: asyncio.Runner, interruption: Interruption) -> int:
    config, log = run_.config, MetricsLog(run_.directory)
    seen_failures: set[str] = set()
    schedule = checkpoint.Schedule(config.save_steps)
    source = RolloutSource(run_, loop, interruption)
    step = run_.first_step
    for text in (_banner(run_), *sampling_warnings(config)):
        board.note(text)
    before = _means(run_.evaluations.get("before", {}))
    warner = Warner(run_.directory, config, step, board.note, before) if run_.ranks.is_main else None

    def evaluate_now(when: str) -> None:
        run_.evaluations[when] = _evaluate_both(run_, board, loop, interruption)
        means = _means(run_.evaluations[when])
        if warner is not None and means:
            _amend(log, step, means, board, reporter)
            warner.evaluated(step, means)

    try:
        if step == 0 and config.eval_on_start and "before" not in run_.evaluations:
            run_.evaluations["before"] = _evaluate_both(run_, board, loop, interruption)
            if warner is not None:
                warner.evaluated(0, _means(run_.evaluations["before"]))
        if step < run_.num_steps:  # the end of a shorter run that goes on now is not this one's
            run_.evaluations.pop("after", None)
        due = _evaluation_due(run_, step) if step else None
        if due is not None and due not in run_.evaluations:  # it was interrupted
            evaluate_now(due)
        while step < run_.num_steps:
            if run_.ranks.any(interruption.requested):
                raise Interrupted

            def status(what: str, number: int = step + 1) -> None:
                board.status(f"step {number}/{run_.num_steps}: {what}")

            with checkpoint.undone_if_interrupted(run_):
                metrics, batch = train_step(run_, step, source, interruption, status)
            step += 1
            if step == run_.first_step + 1:
                _report_pass_size(run_, board)
            _report_failures(batch, seen_failures, board)
            if warner is not None:
                _record(run_, log, metrics, batch, board, reporter)
                warner.step(metrics)
            # After the step is recorded: interrupted, the evaluation comes first thing when the run goes on.
            if (when := _evaluation_due(run_, step)) is not None:
                evaluate_now(when)
            # Rank 0 decides: the clock is its own.
            if run_.ranks.main(step == run_.num_steps or schedule.is_due(step)):
                _save(run_, step, board, schedule)
    except (RunFailed, SyncError) as error:
        if isinstance(error, RunFailed) and error.records:
            with suppress(OSError):
                write_traces(run_.directory, step + 1, error.records)
        board.note(f"Stopped in step {step + 1}: {error}")
        return 1
    except Interrupted:
        saved = _save(run_, step, board, schedule)
        kept = f"saved {saved}" if saved else f"the last checkpoint is {checkpoint.latest(run_.directory) or 'none'}"
        board.note(f"Interrupted after step {step}; {kept}. Go on with:  train --resume {run_.directory}")
        return 1
    finally:
        source.close()
        try:
            log.flush()
        except OSError as error:
            board.note(f"The metrics of the last {log.pending.count(chr(10))} steps could not be written: {error}")
    return 0


def _means(evaluation: dict[str, Estimate]) -> dict[str, float]:
    """As metrics, with the number of tasks as `eval/count`; none if nothing was evaluated."""
    count = {"eval/count": min(e.n for e in evaluation.values())} if evaluation else {}
    return {f"eval/{how}": estimate.mean for how, estimate in evaluation.items()} | count


def _record(
    run_: Run, log: MetricsLog, metrics: dict[str, float], batch: Batch, board: Board, reporter: Reporter | None
) -> None:
    """Traces, metrics and the table's row. A full disk costs what did not fit, and is said, but never the run."""
    try:
        write_traces(run_.directory, int(metrics["step"]), batch.records)
    except OSError as error:
        board.note(f"The traces of step {metrics['step']} are lost: {error}")
    try:
        log.append(metrics)
    except OSError as error:
        board.note(f"metrics.jsonl cannot be written now and will be later: {error}")
    board.step(metrics, batch.traces)
    if reporter is not None:
        reporter.log(int(metrics["step"]), metrics)


def _amend(log: MetricsLog, step: int, metrics: dict[str, float], board: Board, reporter: Reporter | None) -> None:
    """What became known of a step after it was recorded."""
    try:
        log.amend(step, metrics)
    except OSError as error:
        board.note(
            f"The evaluation after step {step} is in the checkpoint, but could not be written to the metrics: {error}"
        )
    if reporter is not None:
        reporter.log(step, metrics)


def _evaluation_due(run_: Run, step: int) -> str | None:
    """The name of the evaluation that follows finished step `step`."""
    if step == run_.num_steps:
        return "after"
    return str(step) if run_.config.eval_steps and step % run_.config.eval_steps == 0 else None


def _save(run_: Run, step: int, board: Board, schedule: checkpoint.Schedule) -> Path | None:
    """A checkpoint; None, and a line that says why, if it cannot be written: an older one still is there."""
    start = time.monotonic()
    try:
        return checkpoint.save(run_, step)
    except OSError as error:
        board.note(f"The checkpoint of step {step} could not be saved: {error}. The next one will be tried.")
        return None
    finally:
        schedule.saved(time.monotonic() - start)


def _report_failures(batch: Batch, seen: set[str], board: Board) -> None:
    """Say each kind of failure once."""
    for reason in dict.fromkeys(batch.failures):
        if reason not in seen:
            seen.add(reason)
            count = batch.failures.count(reason)
            board.note(f"{count} of {batch.num_rollouts} rollouts failed and leave their groups: {reason}")


def _report_pass_size(run_: Run, board: Board) -> None:
    asked, longest = run_.config.pass_tokens, run_.config.max_context
    if run_.pass_tokens < asked and not run_.out_of_memory:
        board.note(f"Passes hold {run_.pass_tokens} tokens, not {asked}: as much as fits into every GPU.")
        if run_.pass_tokens < longest:
            board.note(f"A rollout of up to {longest} tokens may not fit alone: use --gradient-checkpointing.")


def _evaluate_both(run_: Run, board: Board, loop: asyncio.Runner, interruption: Interruption) -> dict[str, Estimate]:
    """Held-out reward, greedy and at the training temperature."""
    config, tasks = run_.config, run_.tasks.held_out
    if not tasks:
        return {}
    at_once = config.per_device_eval_batch_size or config.max_concurrent
    result = {}
    for how, temperature in (("greedy", 0.0), ("sampled", config.temperature)):
        board.status(f"evaluating {len(tasks)} held-out tasks, {how}")
        sampling = dataclasses.replace(run_.sampling, temperature=temperature, seed=config.seed)
        result[how], failures = interruption.run(
            loop,
            evaluate(tasks, run_.engine, run_.chat, sampling, run_.limits, run_.tasks.toolsets, at_once, run_.ranks),
        )
        if failures:
            board.note(f"{len(failures)} of {len(tasks)} held-out rollouts failed and count as 0: {failures[0]}")
    run_.engine.forget()  # a run that is gone on with after this evaluation begins with an empty cache, too
    return result


def _banner(run_: Run) -> str:
    c, policy = run_.config, run_.policy
    processes = f" in {run_.ranks.size} processes, {policy.sharding.kind}" if run_.ranks.size > 1 else ""
    groups = run_.rollouts_per_step // c.num_generations
    return (
        f"{c.env}: {len(run_.tasks.train)} training tasks, {len(run_.tasks.held_out)} held out | {c.model}: "
        f"{policy.num_parameters:,} parameters, {policy.num_trained:,} trained "
        f"({'LoRA' if c.peft else 'full'}) on {policy.device}{processes} | "
        f"{run_.num_steps} steps of {groups} tasks x {c.num_generations} rollouts, rate {c.learning_rate:g} | "
        f"{run_.directory}"
    )


def _finish(run_: Run, seconds: float) -> int:
    """Write the final model and the summary, print the result. Returns the exit code."""
    directory = run_.directory
    if run_.policy.sharding.lockstep:
        run_.ranks.barrier()  # rank 0 may still be renaming
    if (
        checkpoint.latest(directory) is None
        or checkpoint.latest(directory) != directory / f"checkpoints/step_{run_.num_steps}"
    ):
        print(f"The last step is not saved; free some space, then:  train --resume {directory}", file=sys.stderr)
        return 1
    try:
        run_.policy.save_final(directory / "model")
        if not run_.ranks.is_main:
            return 0
        run_.tokenizer.save_pretrained(directory / "model")
        _summary(run_, seconds)
    except OSError as error:
        print(
            f"The final model could not be written: {error}. Free some space, then:  train --resume {directory}",
            file=sys.stderr,
        )
        return 1
    if run_.config.push_to_hub:
        try:
            print(f"uploaded to      {push_to_hub(directory / 'model', run_.config.hub_model_id or directory.name)}")
        except UserError as error:
            print(f"The model is in {directory / 'model'}, but was not uploaded: {error}", file=sys.stderr)
            return 1
    return 0


def _summary(run_: Run, seconds: float) -> None:
    rows = [json.loads(line) for line in (run_.directory / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    summary = {
        "seconds": seconds,
        "evaluations": {w: {h: dataclasses.asdict(e) for h, e in b.items()} for w, b in run_.evaluations.items()},
    }
    write_whole(run_.directory / "summary.json", json.dumps(summary, indent=2))
    print()
    _print_evaluations(run_.evaluations, len(run_.tasks.held_out))
    if rows and all(row["groups/zero_signal"] == row["groups/count"] for row in rows):
        print("No group had any signal: all rollouts of each task got the same reward, so nothing was learned.")
    if rewards:
        print(f"training reward  {rewards[0]:.3f} {sparkline(rewards)} {rewards[-1]:.3f}")
    print(f"time             {seconds:.0f} s")
    print(f"run directory    {run_.directory}")


def _print_evaluations(evaluations: dict[str, dict[str, Estimate]], num_tasks: int) -> None:
    before, after = evaluations.get("before", {}), evaluations.get("after", {})
    if not after:
        return
    print(f"held-out reward, {num_tasks} tasks, 95% intervals:")
    for how in after:
        if how in before:
            lift = after[how].mean - before[how].mean
            print(f"  {how:<8} {before[how]} -> {after[how]}   ({lift:+.3f})")
        else:
            print(f"  {how:<8} {after[how]}")
