"""A run from its first step to its last, of GRPO or of imitation. One step is in step.py or sft/step.py, set-up in
setup.py, the result in finish.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch
from plumbob.console import INTERRUPTED, UserError, counted, first_line
from plumbob.console.working import Working
from plumbob.rollout import blocking
from plumbob.rollout.types import UnsupportedTaskset
from plumbob.trainer.algorithm.own_functions import OwnFunctionError
from plumbob.trainer.config.doubtful_settings import reward_warnings, sampling_warnings
from plumbob.trainer.config.sft import SftConfig
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import join_world, leave_world
from plumbob.trainer.evaluation.held_out import evaluate
from plumbob.trainer.inference.errors import SyncError
from plumbob.trainer.reporting.hub_upload import check_hub_access
from plumbob.trainer.reporting.trackers import check_reporting
from plumbob.trainer.rollouts.batch import RunFailed
from plumbob.trainer.rollouts.interruption import Interrupted, Interruption
from plumbob.trainer.rollouts.tasks import Read
from plumbob.trainer.run_files import start
from plumbob.trainer.training import checkpoint
from plumbob.trainer.training.capacity.disk_space import bytes_of_checkpoint, disk_lines
from plumbob.trainer.training.capacity.out_of_memory import explanation, resume_with
from plumbob.trainer.training.finish import finish, write_report
from plumbob.trainer.training.record import Recorder, means, open_recorder
from plumbob.trainer.training.run import Run, is_new_best, judge
from plumbob.trainer.training.setup import set_up
from plumbob.trainer.training.sft.demonstrations import shown
from plumbob.trainer.training.steps import Steps, open_steps
from transformers.utils import logging as transformers_logging

OBJECTS_BEFORE_COLLECTION = 500_000
"""New objects after which Python looks for garbage by itself: several times those of 1,024 rollouts."""
COLLECTED_AFTER, COLLECTED_EVERY = 3, 20
"""The step of a process after which garbage is collected for the first time, as all is compiled then, and every how many."""
SWITCH_SECONDS = 5e-4
"""After which one thread of Python lets another one go on, in seconds: a tenth of Python's own. Threads of tools and retrievers
ask for it before every kernel and every library call, and rollouts wait for them."""


def run(config: TrainConfig, resume_from: Path | None = None, read: Sequence[Read | None] = ()) -> int:
    """Train as configured; returns the exit code: 0, 1 if the run failed, or `INTERRUPTED`.

    `read`: of `read_here`. Raises UserError.
    """
    started = time.time()
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.collect()  # an earlier run of this process: otherwise its model stays until this run's model is loaded
    transformers_logging.disable_progress_bar()
    world = join_world()
    try:
        if world.is_main:  # find out now what would otherwise fail after hours of training
            check_reporting(config)
            if config.push_to_hub:
                check_hub_access(config)
        try:
            named = " and ".join(env for env, _ in config.members)
            with Working(f"loading the tasks of {named} and {config.model}", silent=not world.is_main) as line:
                run_ = set_up(config, world, resume_from, line.say, read=read)
        except SyncError as error:
            raise UserError(f"the weight sync before the first step failed: {error}") from None
        _collect_garbage()
        gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
        sys.setswitchinterval(SWITCH_SECONDS)
        with run_.lock:
            with (
                closing(run_.engine),
                open_recorder(run_) as recorder,
                Interruption(deferred=world.size > 1) as interruption,
                asyncio.Runner() as runner,
            ):
                code = _train(run_, recorder, runner, interruption)
            if code == 0 and (world.is_main or run_.policy.sharding.collective_forward):
                code = finish(run_, time.time() - started)
            if world.is_main:
                write_report(run_.directory)
            return code
    except Exception as error:
        if world.size > 1 and not isinstance(error, UserError):
            # Exit at once: leaving the process group would wait for processes that wait for this one. The launcher ends
            # them when this process has ended.
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        raise
    finally:
        blocking.exit_if_unstoppable(None)  # what it would do holds the whole run
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        gc.unfreeze()  # a process may do several runs, and frozen ones would stay for ever
        leave_world()


def _train(run_: Run, recorder: Recorder, runner: asyncio.Runner, interruption: Interruption) -> int:
    """Take all remaining steps, with the evaluations and checkpoints between them; returns the exit code."""
    config, state, world = run_.config, run_.state, run_.world
    schedule = checkpoint.Schedule(config.save_steps, bytes_of_checkpoint(run_))
    for text in _opening_lines(run_):
        recorder.note(text)

    def evaluate_now(when: str, steps: Steps) -> None:
        if run_.tasks.held_out:
            steps.before_evaluation()
        state.evaluations[when] = _evaluate(run_, recorder, runner, interruption)
        recorder.evaluated(state.step, state.evaluations[when])
        judge(run_, state.step, means(state.evaluations[when]))

    blocking.exit_if_unstoppable(lambda stretch: _last_words(run_, recorder, stretch))
    with closing(open_steps(run_, runner, interruption, recorder)) as steps:
        try:
            for when in _evaluations_missing_at_start(run_):
                evaluate_now(when, steps)
                if is_new_best(run_):
                    _save(run_, recorder, schedule)
            start.lap("evaluation before")
            while not run_.is_over:
                metrics = _take_step(run_, recorder, steps, interruption)
                judge(run_, state.step, metrics)
                # The step is recorded before its evaluation: if the evaluation is interrupted, a resumed run begins
                # with it.
                if (when := _evaluation_due(run_)) is not None:
                    evaluate_now(when, steps)
                # Rank 0 decides for all processes, because their clocks may disagree on whether a checkpoint is due.
                if world.from_main(run_.is_over or is_new_best(run_) or schedule.is_due(state.step)):
                    _save(run_, recorder, schedule)
        except OwnFunctionError as error:
            recorder.failed(state.step + 1, error)
            return _end_by_own_function(run_, recorder, schedule, error)
        except (RunFailed, SyncError, UnsupportedTaskset) as error:
            recorder.failed(state.step + 1, error)
            if isinstance(error, RunFailed):
                unsaved = error.unmoved and state.step > state.first_step
                saved = _save(run_, recorder, schedule) if unsaved else None
                if saved or error.resume_with:
                    _note_checkpoint(run_, recorder, saved, error.resume_with)
            return 1
        except Interrupted:
            saved = _save(run_, recorder, schedule)
            kept = (
                f"saved {saved}" if saved else f"the last checkpoint is {checkpoint.latest(run_.directory) or 'none'}"
            )
            recorder.note(f"Interrupted after step {state.step}; {kept}. Resume with:  {run_.resume_command}")
            return INTERRUPTED
    return 0


def _take_step(run_: Run, recorder: Recorder, steps: Steps, interruption: Interruption) -> dict[str, float]:
    """Take one step and record it; returns its metrics. Raises RunFailed, SyncError and Interrupted."""
    state = run_.state
    if run_.world.any(interruption.requested):
        raise Interrupted
    with checkpoint.undone_if_unfinished(state), _failing_decently(run_):
        metrics, batch = steps.take(_status(run_, recorder))
    state.step += 1
    _note_microbatch_size(run_, recorder)
    recorder.step(metrics, batch)
    if state.step == state.first_step + 1 and run_.world.is_main:
        with suppress(OSError):
            recorder.note(start.first_step_ended(run_.directory, metrics.get("time/rollout", 0.0)))
    batch.release()
    taken = state.step - state.first_step
    if taken == COLLECTED_AFTER or taken % COLLECTED_EVERY == 0:
        _collect_garbage()
    return metrics


def _collect_garbage() -> None:
    """Free what is held in cycles, and let Python pass over all else until the next call.

    Tasks, model and compiled code stay to the end, and a step's rollouts to its end. To look through them takes .4 s on a GPU's
    host, in which no thread of Python does anything.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def _failing_decently(run_: Run) -> Generator[None]:
    """Raise RunFailed where a step runs out of memory outside of `accumulate`, as where the optimizer's state is made.

    Not with several processes: the others do not know, and would wait for this one.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if run_.world.size > 1:
            raise
        longest, failed = run_.config.max_context, first_line(error)
        raise RunFailed(
            f"the step runs out of memory{explanation(run_, longest)}. {failed}", resume_with=resume_with(run_, longest)
        ) from None


def _end_by_own_function(run_: Run, recorder: Recorder, schedule: checkpoint.Schedule, error: OwnFunctionError) -> int:
    """Save what a mistake in the user's own function has not touched; returns the exit code."""
    world, state = run_.world, run_.state
    if not world.is_main:  # it may have failed here alone, and the others wait
        print(f"Error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    # Several processes do not fail alike, and an earlier update of the step has moved the weights.
    unsaved = world.size == run_.config.updates_per_step == 1 and state.step > state.first_step
    if unsaved and (saved := _save(run_, recorder, schedule)):
        _note_checkpoint(run_, recorder, saved, "")
    return 2


def _note_checkpoint(run_: Run, recorder: Recorder, saved: Path | None, option: str) -> None:
    """Say which checkpoint a run that failed can be resumed from, and how."""
    kept = saved or checkpoint.latest(run_.directory)
    if kept is None:
        recorder.note(f"It has no checkpoint yet: start a new run with {option}")
        return
    how = f"{run_.resume_command} {option}".rstrip()
    recorder.note(f"{'Saved' if saved else 'The last checkpoint is'} {kept}. Resume with:  {how}")


def _own_lines(run_: Run) -> list[str]:
    """What is said before the first step of this kind of run: biases of sampling, or some demonstrations."""
    if isinstance(run_.config, SftConfig):
        asked = 0 if run_.state.first_step else run_.config.log_completions  # a resumed run has shown them
        return [f"--- {row.group}\n{shown(run_.tokenizer, row)}" for row in run_.demonstrations[:asked]]
    return [*reward_warnings(run_.config), *sampling_warnings(run_.config)]


def _last_words(run_: Run, recorder: Recorder, stretch: blocking.Stretch) -> None:
    """Save what can be saved, in the watchdog's thread, while the environment blocks the main thread for good.

    The main thread is in the middle of rollouts then, so the weights are those after the last finished step.
    """
    recorder.blocked(run_.state.step + 1, blocking.describe(stretch))
    if run_.world.size == 1 and run_.state.step > run_.state.first_step:
        with suppress(Exception):  # a full disk must not keep the process
            checkpoint.save(run_)
    kept = checkpoint.latest(run_.directory)
    recorder.note(f"The last checkpoint is {kept or 'none'}. Resume with:  {run_.resume_command}")


def _status(run_: Run, recorder: Recorder) -> Callable[[str], None]:
    """A function that shows on the screen what the next step is doing."""
    number = run_.state.step + 1
    return lambda text: recorder.status(f"step {number}/{run_.num_steps}: {text}")


def _evaluations_missing_at_start(run_: Run) -> list[str]:
    """Names of evaluations to run before the next step: the one before the first step, or one that was interrupted."""
    state = run_.state
    if not run_.is_over:  # a finished run is resumed with more steps: "after" is not its end any more
        state.evaluations.pop("after", None)
    due = _evaluation_due(run_) if state.step else "before"
    return [due] if due is not None and due not in state.evaluations else []


def _evaluation_due(run_: Run) -> str | None:
    """The name of the evaluation that follows the last finished step; None if none does."""
    step = run_.state.step
    if run_.is_over:
        return "after"
    return str(step) if run_.config.eval_steps and step % run_.config.eval_steps == 0 else None


def _evaluate(run_: Run, recorder: Recorder, runner: asyncio.Runner, interruption: Interruption) -> dict:
    """Held-out reward, greedy and at the training temperature: "greedy", "sampled" and "pass@K" -> Estimate."""
    num_tasks, config = run_.sampler.num_held_out, run_.config
    if not num_tasks:
        return {}
    result = {}
    for how, temperature, rollouts in (("greedy", 0.0, 1), ("sampled", config.temperature, config.eval_rollouts)):
        asked = f"{counted(num_tasks, 'held-out task')}, {how}"
        recorder.status(f"evaluating {asked}")
        evaluating = evaluate(
            run_.sampler,
            run_.world,
            how,
            temperature=temperature,
            rollouts=rollouts,
            counted=lambda done, of, asked=asked: recorder.status(f"evaluating {asked}: {done} of {of} rollouts"),
        )
        found = interruption.run(runner, evaluating)
        result |= found.estimates
        recorder.asked(found)
        if found.failures:
            recorder.note(
                f"{len(found.failures)} of {num_tasks * rollouts} held-out rollouts failed and count as reward 0: "
                f"{found.failures[0]}"
            )
    run_.engine.forget()  # a run that is resumed after this evaluation has an empty cache, and must sample the same
    return result


def _save(run_: Run, recorder: Recorder, schedule: checkpoint.Schedule) -> Path | None:
    """Write a checkpoint and return its folder. If that fails, report why and return None; older ones are kept."""
    start = time.monotonic()
    recorder.behind.wait()  # a run that goes on from the checkpoint has traces and records of the steps before it
    try:
        return checkpoint.save(run_)
    except OSError as error:
        recorder.note(
            f"The checkpoint of step {run_.state.step} could not be saved: {error}. Later steps will try again."
        )
        if run_.state.best is not None:
            run_.state.best = run_.state.best.without(run_.state.step)
        return None
    finally:
        schedule.saved(time.monotonic() - start)


def _note_microbatch_size(run_: Run, recorder: Recorder) -> None:
    """Report, once after the first step, if microbatches are smaller than asked for because of memory."""
    if run_.state.step != run_.state.first_step + 1:
        return
    asked, tokens, longest = run_.config.microbatch_tokens, run_.state.microbatch_tokens, run_.config.max_context
    if tokens < asked and not run_.state.out_of_memory:
        recorder.note(
            f"Microbatches hold {tokens} tokens instead of --microbatch-tokens {asked}, because more does not fit "
            "into GPU memory."
        )
        if tokens < longest:
            recorder.note(
                f"A rollout of up to --max-context {longest} tokens may not fit into GPU memory; use "
                "--gradient-checkpointing."
            )


def _disk_lines(run_: Run) -> list[str]:
    """What the run will need on disk. Raises UserError, on every process, if nothing trained could be saved."""
    found: list[str] | UserError = []
    if run_.world.is_main:
        try:
            found = disk_lines(run_)
        except UserError as error:
            found = error
        except OSError as error:
            found = [f"How much space is free on the disk of {run_.directory} could not be found out: {error}"]
    found = run_.world.from_main(found)
    if isinstance(found, UserError):
        raise found
    return found


def _opening_lines(run_: Run) -> list[str]:
    """What is printed before the first step."""
    notes = [note for tasks in run_.sampler.environments for note in tasks.notes]
    return [_banner(run_), *notes, *_disk_lines(run_), *_own_lines(run_)]


def _banner(run_: Run) -> str:
    """What is about to be trained, in one line."""
    c, policy, world = run_.config, run_.policy, run_.world
    orders = {"shuffle": "", "as-given": " in the environment's order", "curriculum": ", easiest first"}
    environments = run_.sampler.environments
    total = sum(tasks.weight for tasks in environments)
    told = "; ".join(
        f"{tasks.name or c.env}: {tasks.number} training task{'s' * (tasks.number != '1')}"
        f"{orders[tasks.order]}, {len(tasks.held_out)} held out"
        + (f", {tasks.weight}/{total} of the groups" if len(environments) > 1 else "")
        for tasks in environments
    )
    processes = f" in {world.size} processes, {policy.sharding.kind}" if world.size > 1 else ""
    count = run_.sampler.groups_per_step
    each = counted(count, "demonstration" if run_.demonstrations else "task")
    each += "" if run_.demonstrations else f" x {c.num_generations} rollouts"
    return (
        f"{told} | {c.model}: "
        f"{policy.num_parameters:,} parameters, {policy.num_trained:,} trained "
        f"({'LoRA' if c.peft else 'full'}) on {policy.device}{processes}, engine {c.engine} | "
        f"{counted(run_.num_steps, 'step')} of {each}, "
        f"learning rate {c.learning_rate:g} | {run_.directory}"
    )
