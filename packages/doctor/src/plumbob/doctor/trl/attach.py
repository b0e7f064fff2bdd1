"""`attach`: records of a GRPOTrainer of TRL, and what they say, while it trains."""

from __future__ import annotations

import functools
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from plumbob.doctor import record as records
from plumbob.doctor import trends
from plumbob.doctor.confirm import TRIALS
from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import Finding
from plumbob.doctor.measuring import SampledTensors
from plumbob.doctor.page import lines, render
from plumbob.doctor.saved import alike
from plumbob.doctor.trl import before, course, settings
from plumbob.doctor.trl.answers import Answers, Results, Shared
from plumbob.doctor.trl.reading import COURSE, MOST_RECORDS, Reading, finding_text
from plumbob.doctor.trl.recording import played_of, record_of, trained
from plumbob.doctor.trl.snapshot import Snapshot
from plumbob.doctor.trl.watching import Watch, unchanged_randomness
from transformers import TrainerCallback

FOLDER, PAGE = "plumbob_records", "report.html"


def attach(
    trainer: Any,
    *,
    every: int = records.EVERY,
    folder: str | Path | None = None,
    rescore: bool = True,
) -> Doctor:
    """Let the doctor watch a GRPOTrainer of TRL. Called once, before `trainer.train()`; it changes nothing of the training.

    Before the first step the data, the chat template and the reward functions are examined. The first steps, and every `every`th
    one, are recorded in `folder` (by default `plumbob_records` in the trainer's output folder) and compared with an exact
    computation of the same step. What is wrong is printed when it is found, and a page of all that was examined when training ends.

    `rescore`: call the reward functions before the first step, twice with a few texts that are written from the columns of the
    data in place of completions. False: not to call them, for example because they cost money. Raises TypeError for another
    trainer.
    """
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise TypeError(f"attach takes a GRPOTrainer of TRL, not a {type(trainer).__name__}")
    doctor = Doctor(trainer, every, Path(folder or Path(trainer.args.output_dir) / FOLDER), rescore)
    trainer.add_callback(doctor)
    return doctor


def _guarded(work: Callable[..., None]) -> Callable[..., None]:
    """An error of the doctor ends no run."""

    @functools.wraps(work)
    def run(self: Doctor, *given: Any, **more: Any) -> None:
        try:
            work(self, *given, **more)
        except Exception as error:
            self.failed(error)

    return run


class Doctor(TrainerCallback):
    """What `attach` returns."""

    def __init__(self, trainer: Any, every: int, folder: Path, rescore: bool) -> None:
        self.trainer, self.every, self.folder, self.rescore = trainer, every, folder, rescore
        unknown = before.Before(namers=[False] * len(trainer.reward_funcs))
        self._answers = Answers(settings.names_of(trainer), trainer.num_generations, unknown)
        self._results, self._shared = Results(trainer.tools or ()), Shared(trainer.reward_funcs)
        self.began, args = 0, trainer.args
        self._refused = settings.refusal(trainer)
        unseen, left_out = settings.unseen(trainer)
        self.reading = Reading(left_out=[stage.__name__ for stage in left_out], limits=unseen)
        if self._refused:
            self.reading.limits = [self._refused]
        self.reading.folder, self.reading.places = folder, settings.places(trainer)
        self.reading.options = {trial.option: getattr(args, trial.option) for trial in TRIALS.values()}
        if script := getattr(sys.modules["__main__"], "__file__", None):  # there is none in a notebook
            self.reading.script = [str(Path(script).resolve()), *sys.argv[1:]]
        self.watch = Watch(trainer, lambda: self._kept)
        self.watch.gradients_are_complete = lambda: self._gradients()
        self.watch.model_is_saved = lambda folder: self._saved(folder)
        new = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        self._exact = {0, 1, new}
        """Steps whose first weights are kept: the first two, and the first with completions of weights that were trained."""
        self._kept = False
        """Whether the step that is under way is recorded: the same on every process, whatever fails on one."""
        self._snapshot: Snapshot | None = None
        self._tensors: SampledTensors | None = None
        self._previous: records.StepRecord | None = None
        self._sample: list[np.ndarray] | None = None
        """Of the trained weights, read at the end of each step."""
        self._gap: float | None = None
        """In nats a token, of what a rollout_func returned first and the trainer computed."""
        self._change: dict[str, float] = {}
        self._row: dict[str, float] | None = None

    def wants(self, step: int) -> bool:
        """Whether step `step` (from 0) is recorded."""
        return not self._refused and (self._is_early(step) or (step + 1) % self.every == 0)

    def _is_early(self, step: int) -> bool:
        return step - self.began < records.FIRST or step - self.began in self._exact

    @property
    def examination(self) -> Examination:
        """What was found so far."""
        return self.reading.examination()

    # What the trainer calls

    @_guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = state.global_step
        if not state.is_world_process_zero:
            return
        if self._refused:
            print(f"plumbob.doctor: {self._refused}", flush=True)
        plan = course.plan_of(self.trainer)
        self.reading.trends = trends.Trends(plan, patience=min(trends.WINDOW, max(plan.num_steps, 1)))
        self.folder.mkdir(parents=True, exist_ok=True)
        if not trained(self.trainer):
            check, told = "the run trains a part of its model", "no parameter of the model requires a gradient"
            self._print(
                self.reading.add_findings([Finding.of(check, "no-gradient", True, told, "gradient")], "records")
            )
            self._refused = "Steps were not recorded: nothing is trained."
            self.reading.limits.append(self._refused)
        else:
            self._examine_before()
        if not self.began:  # records of an earlier training in the same folder
            for old in (*self.folder.glob("step_*.npz"), *self.folder.glob(COURSE)):
                old.unlink()

    @_guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        [self._refused] = broadcast_object_list([self._refused])
        self._kept = self.wants(state.global_step)
        self._print(self._take_row())
        self.watch.microbatches, self._tensors, self._change = [], None, {}
        if self._sample is None and not self._refused:
            self._sample = course.entries(trained(self.trainer))
        exact = state.is_world_process_zero and self._kept and state.global_step - self.began in self._exact
        self._snapshot = Snapshot(self.trainer) if exact else None

    @_guarded
    def _gradients(self) -> None:
        self._tensors = SampledTensors(trained(self.trainer), self.trainer.optimizer)

    @_guarded
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._tensors is not None:
            self._tensors.updated()

    @_guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step - 1
        if self._kept:
            self.watch.complete()
        if self._tensors is not None and not self._refused and state.is_world_process_zero:
            with unchanged_randomness():
                self._print(self._examine(step, self._tensors))
        self._snapshot, self._tensors, self.watch.microbatches = None, None, []
        self._print(self._numbers(step))

    @_guarded
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self._row is not None and logs:
            self._row |= {name: float(logs[own]) for own, name in course.LOGGED.items() if own in logs}

    @_guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._print(self._take_row())
        if not state.is_world_process_zero:
            return
        self.reading.ended = True
        self._keep()
        width = shutil.get_terminal_size((80, 24)).columns
        print("\nplumbob.doctor: what was examined of this run\n")
        print("\n".join(lines(self.examination, width=width)), flush=True)

    @_guarded
    def _saved(self, folder: str) -> None:
        """What `save_model` has written, in the course of training or after it."""
        whole = not (self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled)
        if whole and self.trainer.accelerator.is_main_process and self.trainer.state.global_step > self.began:
            self._print(self.reading.add_findings([course.saved(self.trainer, Path(folder))]))
            self._keep()

    # Its work

    def _examine_before(self) -> None:
        score = self.watch.score if self.rescore and self.trainer.environments is None and not self._refused else None
        known = self._answers.before
        try:
            with unchanged_randomness():
                before.examine(self.trainer, score, known)
        except Exception as error:  # data, templates and reward functions are the user's own
            why = f"{type(error).__name__}: {error}"
            self.reading.limits.append(f"Data, rewards and template were not examined before the first step: {why}")
        self._answers = Answers(settings.names_of(self.trainer), self.trainer.num_generations, known)
        self._print(self.reading.add_findings(known.findings))

    def _examine(self, step: int, tensors: SampledTensors) -> list[Finding]:
        """The new failures of a step that has just been taken."""
        record = record_of(self.watch, tensors.samples, step)
        records.write(record, self.folder / f"step_{step + 1:05}.npz")
        if self.reading.examined >= MOST_RECORDS and not self._is_early(step):
            return []
        previous, self._previous = self._previous, record
        if self._snapshot is not None and self.reading.trends.plan.exact:
            rows = [(r.token_ids.tolist(), r.loss_mask.tolist()) for r in record.rows[:4]]
            self._change = {"policy/step_kl": self._snapshot.change(rows)}
        plain = None if self._snapshot is None else self._snapshot.plain(record.settings)
        with torch.enable_grad():
            new = self.reading.add(record, plain, settings.tokenizer_of(self.trainer), self._snapshot, previous)
        if self.trainer.rollout_func is not None:
            found, self._gap = course.given(self.reading.trends.plan, record, self._gap)
            new += self.reading.add_findings(found)
        self._keep()
        return new

    def _keep(self) -> None:
        """Keep what is known so far, of which the records alone do not tell all."""
        (self.folder / COURSE).write_bytes(self.reading.as_json())
        if self.reading.ended:
            page = render(self.examination, f"plumbob.doctor {self.folder}")
            (self.folder / PAGE).write_text(page, encoding="utf-8")

    def _numbers(self, step: int) -> list[Finding]:
        """Take in what is known of a step without a record; returns what is found wrong in it for the first time."""
        made = self.watch.round
        if self._refused or self._sample is None or made is None or made.rewards is None or not made.output:
            return []
        played = played_of(self.trainer, made)
        before_, self._sample = self._sample, course.entries(trained(self.trainer))
        self._row = {**course.row_of(self.trainer, made, played, (before_, self._sample), step), **self._change}
        found = list[Finding]()
        if made.step == step:
            alone, rewards = [one for one, _ in played], [one.reward for one, _ in played]
            # What differs in equal completions of one prompt is no property of the completion.
            keys = [(i // self.trainer.num_generations, tuple(ids)) for i, ids in enumerate(made.ids)]
            found.append(alike(zip(keys, rewards, strict=False), before.tolerance(np.array(rewards)), step + 1))
            found.append(self._answers.add(played, step))
            found += [*self._results.add(alone, step), *course.ended(self.trainer, made)]
            found += self._shared.add(self.trainer.environments or (), self.watch.empty, step)
        return self.reading.add_findings(found)

    def _take_row(self) -> list[Finding]:
        """The numbers of the step before, now that TRL has logged it."""
        row, self._row = self._row, None
        return [] if row is None else self.reading.add_row(row)

    def failed(self, error: Exception) -> None:
        """The doctor itself failed: it says where, and records no further step."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
        self.reading.broken(f"{type(error).__name__}: {error} ({where})")
        self._refused, self._row = "Further steps were not recorded, because the doctor failed.", None
        self.reading.limits.append(self._refused)

    def _print(self, new: list[Finding]) -> None:
        for finding in new if self.trainer.accelerator.is_main_process else ():
            print(f"plumbob.doctor: {finding_text(self.examination, finding)}", flush=True)
