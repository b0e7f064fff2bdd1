"""Recording a run while it trains: metrics, traces, the progress table, trackers and warnings."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from plumbob.console import counted
from plumbob.trainer.evaluation.held_out import HeldOut
from plumbob.trainer.evaluation.statistics import Estimate
from plumbob.trainer.reporting.progress_table import Board
from plumbob.trainer.reporting.trackers import make_reporter
from plumbob.trainer.rollouts.batch import Batch, RunFailed
from plumbob.trainer.rollouts.prompt_forms import FEWEST, difference, prompt_form
from plumbob.trainer.run_files.behind import Behind
from plumbob.trainer.run_files.run_directory import MetricsLog
from plumbob.trainer.run_files.silence import SilenceWatch
from plumbob.trainer.run_files.stopped import Stop, forget_stop, write_stop
from plumbob.trainer.run_files.trace_files import write_traces
from plumbob.trainer.training.run import MOST_SKIPPED, Run
from plumbob.trainer.watch.warnings import Warner

BEGINNING = 0.25
"""The part of the time of rollouts in which they begin."""
CUT_APART = 0.5
"""Difference of the shares of held-out and training rollouts that limits cut off, above which `eval/cut_off` is recorded."""


class Silent:
    """The recorder of every process but rank 0: a context manager whose methods, those of `RunRecorder`, do nothing."""

    def __init__(self) -> None:
        self.behind = Behind()

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class RunRecorder:
    """Rank 0's recorder. A failure to write never ends the run: it is reported on the screen, and training goes on."""

    def __init__(self, run: Run) -> None:
        config = run.config
        self.config, self.directory, self.state = config, run.directory, run.state
        forget_stop(run.directory)
        self.board = Board(
            run.num_steps,
            run.state.first_step,
            completions=config.log_completions,
            imitates=bool(run.demonstrations),
        )
        self.log = MetricsLog(run.directory)
        self._store = partial(write_traces, run.directory, group_size=config.num_generations, seed=config.seed)
        self.reporter = make_reporter(config, run.directory)
        before = means(run.state.evaluations.get("before", {}))
        # The trends are about rollouts and their rewards, which a run of `sft` does not have.
        self.warner = (
            None if run.demonstrations else Warner(run.directory, config, run.state.first_step, self.note, before)
        )
        self._seen_failures: set[str] = set()
        self.behind = Behind()
        """Stores traces and records of a step while the next one is sampled, whose rollouts would wait for it otherwise."""
        self._held_out: HeldOut | None = None
        self._compares_prompts = len(run.sampler.environments) == 1
        """A step of several environments may have no task of one of them."""
        self.silence = SilenceWatch(run.directory, self.note)  # last: if anything above fails, no thread is left behind

    def __enter__(self) -> RunRecorder:
        self.board.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if isinstance(exc[1], Exception):  # not Ctrl-C
            self._store_stop(self.state.step + 1, exc[1])
        self.silence.close()
        self.behind.wait()
        try:
            self.log.flush()
        except OSError as error:
            lost = self.log.pending.count("\n")
            self.note(f"The metrics of the last {lost} steps could not be written: {error}")
        self.board.__exit__(*exc)
        self.reporter.close()

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self.board.note(text)

    def status(self, text: str) -> None:
        """Show what the run is doing at the moment."""
        self.silence.news(text)
        self.board.status(text)

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        """Record a finished step. Its traces may still be on their way when this returns: see `behind`."""
        step = int(metrics["step"])
        metrics = {**metrics, **self._compared(batch)}
        self._note_failures(step, batch)
        records, tokens = batch.records, batch.token_records  # the batch is about to let go of them

        def store() -> None:
            try:
                self._store(step, records, steps=self.config.max_steps, tokens=tokens)
            except Exception as error:
                self.note(
                    f"The traces of step {step} could not be written and are lost: {type(error).__name__}: {error}"
                )

        # While the next step's rollouts begin, the engine waits for this thread; it has less to do once they are under way.
        self.behind.start(store, delay=BEGINNING * metrics.get("time/rollout", 0.0))
        try:
            self.log.append(metrics)
        except OSError as error:
            self.note(f"The metrics of step {step} could not be written; a later step tries again: {error}")
        self.board.step(metrics, batch.traces)
        self.reporter.log(step, metrics)
        self.reporter.rollouts(step, self._completions(batch))
        if self.warner is not None:
            self.warner.step(metrics)

    def asked(self, held_out: HeldOut) -> None:
        """Take in how the tasks of an evaluation were prompted and limited, for comparison with the next step's."""
        self._held_out = held_out if self._compares_prompts else None

    def _compared(self, batch: Batch) -> dict[str, float]:
        """Whether the last evaluation asked its tasks otherwise than this step; once after each evaluation.

        Metrics only where they differ: a run that is resumed after the evaluation has the same ones as one that was not.
        """
        held_out, self._held_out = self._held_out, None
        if held_out is None:
            return {}
        metrics: dict[str, float] = {}
        found = difference(held_out.forms, [prompt_form(trace) for trace in batch.traces])
        if found:
            self.note(f"The evaluation does not ask what the training asks: {found}")
            metrics["eval/prompts_differ"] = 1.0
        ended = held_out.cut, [sample.truncated for sample in batch.drawn]
        if min(map(len, ended)) >= FEWEST:
            ours, theirs = map(statistics.fmean, ended)
            if abs(ours - theirs) > CUT_APART:
                metrics["eval/cut_off"] = ours
        return metrics

    def _completions(self, batch: Batch) -> list[tuple[Any, float | None]]:
        """--log-completions rollouts for the tracker with their advantages, evenly spaced over the groups."""
        count = min(self.config.log_completions, len(batch.traces))
        chosen = [batch.traces[i * len(batch.traces) // count] for i in range(count)]
        known = batch.token_records
        return [(trace, known[trace.id].advantage if trace.id in known else None) for trace in chosen]

    def evaluated(self, step: int, evaluation: Mapping[str, Estimate]) -> None:
        """Record held-out rewards after step `step`, whose metrics are recorded already; 0: before the first step."""
        values = means(evaluation)
        if values and step:
            try:
                self.log.amend(step, values)
            except OSError as error:
                self.note(
                    f"The evaluation after step {step} could not be added to metrics.jsonl, "
                    f"but the next checkpoint will hold it: {error}"
                )
            self.reporter.log(step, values)
        if self.warner is not None and (values or not step):
            self.warner.evaluated(step, values)

    def failed(self, step: int, error: Exception) -> None:
        """Record that `error` ends the run in step `step` (from 1)."""
        self.behind.wait()
        if isinstance(error, RunFailed) and error.records:
            with suppress(OSError):
                self._store(step, error.records, steps=None)  # all of them: they show why the run ends
        self._store_stop(step, error)
        self.note(f"Stopped in step {step}: {error}")
        self.note(f"To find out why:  doctor {self.directory}")

    def blocked(self, step: int, reason: str) -> None:
        """Record that the environment blocks step `step` (from 1) for good, which ends the run."""
        write_stop(self.directory, Stop(step, "Blocked", reason, "rollouts-fail"))
        self.note(f"Stopped in step {step}: {reason}")

    def _store_stop(self, step: int, error: Exception) -> None:
        cause = error.cause if isinstance(error, RunFailed) else None
        if isinstance(error, RunFailed) and self.state.skipped_in_a_row >= MOST_SKIPPED:
            cause = "not-finite"
        write_stop(self.directory, Stop(step, type(error).__name__, str(error), cause))

    def _note_failures(self, step: int, batch: Batch) -> None:
        """Report what hung, in every step, and each other reason why rollouts are left out when it first occurs."""
        for reason, count in Counter(batch.failures).items():
            if reason.startswith("stuck in "):
                self.note(f"step {step}: {counted(count, 'rollout')} {reason}, left out of their groups")
            elif reason not in self._seen_failures:
                self._seen_failures.add(reason)
                # What has no turn or no finite reward has not failed, but cannot be used.
                what = "failed and" if batch.errored == len(batch.failures) else "cannot be used and"
                self.note(f"{count} of {batch.num_rollouts} rollouts {what} are left out of their groups: {reason}")


def means(evaluation: Mapping[str, Estimate]) -> dict[str, float]:
    """An evaluation as metrics, with the number of tasks as `eval/count`; empty if nothing was evaluated."""
    whole = [e.n for how, e in evaluation.items() if "/" not in how]  # not of one of several environments
    count = {"eval/count": min(whole)} if whole else {}
    return {f"eval/{how}": estimate.mean for how, estimate in evaluation.items()} | count


Recorder = RunRecorder | Silent


def open_recorder(run: Run) -> Recorder:
    """The recorder of this process. Raises UserError if the tracker of --report-to cannot start."""
    return RunRecorder(run) if run.world.is_main else Silent()
