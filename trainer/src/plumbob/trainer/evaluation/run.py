"""An evaluation: `run` loads tasks and model, `_roll_out` fills one result file per environment, `_report` sums it up.

Rollouts and rewards are those of training. Every finished rollout is written to disk at once, so that an interrupted
evaluation can be resumed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf
from plumbob.console import INTERRUPTED, UserError, counted
from plumbob.console.files import write_whole
from plumbob.console.working import Working
from plumbob.hub import find
from plumbob.rollout import Chat, Limits, Sampling, ScriptedChat, blocking, derive_seed, run_rollout
from plumbob.rollout.environment_code import Caller
from plumbob.rollout.types import UnsupportedTaskset
from plumbob.trainer.config import mixture
from plumbob.trainer.config.chat_template import RECORDED
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.evaluation.results import Row, read_records, rows_of, summarize, table
from plumbob.trainer.reporting.progress_bar import Progress
from plumbob.trainer.rollouts.interruption import Interrupted, Interruption
from plumbob.trainer.rollouts.limits import limits_of
from plumbob.trainer.rollouts.tasks import EvaluationTasks, load_evaluation_tasks
from plumbob.trainer.rollouts.templates import check_template
from plumbob.trainer.run_files.run_directory import evaluation_name, lock_directory, make_directory
from plumbob.trainer.run_files.trace_files import part_of_step

if TYPE_CHECKING:
    from plumbob.trainer.inference.load import LoadedEngine

UNBOUNDED = 1 << 40
"""Limit of turns and tokens for oracles and replays: their scripts end by themselves and have no token counts."""
GIVE_UP_AFTER = 32
"""An evaluation stops if this many rollouts fail before the first success: the reason is probably the same for all."""


class EvaluationFailed(Exception):
    """No rollout succeeded; the message says why."""


@dataclass(frozen=True)
class Asked:
    """What samples the replies of rollouts, and with which settings."""

    loaded: LoadedEngine | None
    """None for oracles and replays, where each job has a script."""
    sampling: Sampling
    limits: Limits
    description: str

    @property
    def chat(self) -> Chat | None:
        return None if self.loaded is None else self.loaded.chat

    def close(self) -> None:
        if self.loaded is not None:
            self.loaded.close()


@dataclass(frozen=True)
class Job:
    """One rollout that is to be sampled."""

    task: vf.Task
    example: int
    """Index of the task among those of the evaluation."""
    rollout: int
    """Number of the rollout among those of its task, from 0."""
    script: ScriptedChat | None = None
    """Replies to play in place of a model's."""


@dataclass(frozen=True)
class Plan:
    """What is evaluated of one environment: its tasks in order, and the toolsets that all rollouts share."""

    env: str
    tasks: Sequence[vf.Task]
    loaded: EvaluationTasks
    """The environment's tasks as it gives them, and what their rollouts need."""
    stored: Sequence[dict[str, Any]] = ()
    """Stored transcripts that --replay scores again, one per task."""

    def jobs(self, config: EvaluateConfig, done: set[tuple[int, int]]) -> Iterator[Job]:
        """The rollouts that are not `done`, a set of (example, rollout)."""
        for example, task in enumerate(self.tasks):
            for rollout in range(config.rollouts_per_example):
                if (example, rollout) in done:
                    continue
                script = None
                if config.oracle:
                    script = ScriptedChat.of_messages(task.oracle())
                elif self.stored:
                    script = ScriptedChat.of_record(self.stored[example])
                yield Job(task, example, rollout, script)


def run(config: EvaluateConfig, resume_from: Path | None = None, *, as_json: bool = False) -> int:
    """Carry out an evaluation; returns the exit code. Raises UserError."""
    if config.computes_here:
        os.environ["PLUMBOB_DEVICE"] = "cuda"  # where small models of environments compute too, if there is a GPU
    plans = [plan(config, env) for env in config.envs]
    with closing(ask(config, resume_from)) as asked:
        directory = resume_from or make_directory(config.output_dir, evaluation_name(config))
        try:
            reports = evaluate_plans(config, plans, asked, directory)
        except (Interrupted, EvaluationFailed) as error:
            return stopped(error, f"evaluate --resume {directory}")
    (directory / "summary.json").write_text(json.dumps(reports, indent=2, allow_nan=False))
    if as_json:
        print(json.dumps({"directory": str(directory), "environments": reports}, indent=2, allow_nan=False))
    else:
        for report in reports:
            print(f"\n{report['heading']}\n{report['table']}")
        print(f"\nresults  {directory}")
    return 0 if all(report.get("equal", True) for report in reports) else 1


def stopped(error: Exception, resume: str) -> int:
    """Say why an evaluation ended early, and how to go on with it; returns the exit code."""
    reason = f"Stopped: {error}" if str(error) else "Interrupted"
    print(f"{reason}; finished rollouts are kept. Resume with:  {resume}", file=sys.stderr)
    return INTERRUPTED if isinstance(error, Interrupted) else 1


def evaluate_plans(
    config: EvaluateConfig, plans: Sequence[Plan], asked: Asked, directory: Path
) -> list[dict[str, Any]]:
    """Write config.toml and sample the missing rollouts of each plan: one report per plan.

    Raises Interrupted and EvaluationFailed, and UserError if the model's chat template does not work with an environment.
    """
    # With the engine that was chosen, which --resume keeps.
    recorded = replace(config, engine=asked.loaded.name if asked.loaded else config.engine)
    (directory / "config.toml").write_text(recorded.to_toml(), encoding="utf-8")
    blocking.exit_if_unstoppable(
        lambda stretch: print(f"Stopped: {blocking.describe(stretch)}; finished rollouts are kept in {directory}")
    )
    reports = []
    if asked.chat is not None:
        notes = [note for part in plans for note in check_template(asked.chat, part.loaded, config.model)]
        for note in dict.fromkeys(notes):
            print(note, file=sys.stderr, flush=True)
        write_whole(directory / RECORDED, str(asked.chat.tokenizer.chat_template))
    with lock_directory(directory), Interruption() as interruption, asyncio.Runner() as loop:
        for part in plans:
            path = directory / f"{part.env}.jsonl"
            done = _read_finished(path, part)
            started = time.time()
            interruption.run(loop, _roll_out(config, part, asked, path, done))
            records = sorted(read_records(path), key=lambda record: (record["example"], record["rollout"]))
            _write_records(path, records)
            reports.append(_report(config, part, asked, records, time.time() - started))
    return reports


def plan(config: EvaluateConfig, env: str) -> Plan:
    """Load the tasks of one environment.

    Raises UserError for an unknown environment, setting or file, and if --oracle is set for an environment without
    oracles.
    """
    settings = config.settings_of(env)
    if config.replay is None:
        with Working(f"loading the tasks of {env}"):
            loaded = load_evaluation_tasks(env, settings, config.wanted_examples, oracle=config.oracle)
        if config.oracle and not hasattr(loaded.tasks[0], "oracle"):
            raise UserError(f"environment {env!r} has no oracle: its task has no method 'oracle'")
        return Plan(env, loaded.tasks, loaded)
    stored = read_records(Path(config.replay))
    if not stored:
        raise UserError(f"{config.replay} has no transcripts")
    if config.wanted_examples > 0:
        stored = stored[: config.wanted_examples]
    loaded = load_evaluation_tasks(env, {**_stored_settings(Path(config.replay), env), **settings}, 1, offline=True)
    like = loaded.tasks[0]
    try:
        data = [type(like.data).model_validate(record["task"]["data"]) for record in stored]
    except ValueError as error:
        raise UserError(
            f"{config.replay} holds tasks of another environment than {env}: {str(error).splitlines()[0]}"
        ) from None
    return Plan(env, [type(like)(each, like.config) for each in data], loaded, stored)


def _stored_settings(path: Path, env: str) -> dict[str, str]:
    """The environment's settings in the run or evaluation that stored a file, without those of its data source."""
    for folder in (path.parent, path.parent.parent):
        try:
            values = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        given, own = mixture.common_and_own(values.get("env_args", ()), env)
        oracle = getattr(find(env).load(), "oracle_settings", {}) if values.get("oracle") else {}
        return {name: value for name, value in {**oracle, **given, **own}.items() if name not in ("datasets", "split")}
    return {}


def ask(config: EvaluateConfig, resumed: Path | None = None) -> Asked:
    """Load the model or connect to the server. Raises UserError.

    `resumed`: the directory of an evaluation that is resumed, which has recorded its chat template.
    """
    temperature = config.sampling_temperature
    sampling = Sampling(
        config.max_tokens, temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p, seed=config.seed
    )
    limits = limits_of(config)
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    if config.oracle or config.replay:
        what = "oracle" if config.oracle else f"replay of {config.replay}"
        unbounded = replace(limits, max_turns=UNBOUNDED, max_context=UNBOUNDED)
        return Asked(None, sampling, unbounded, what)
    with Working(f"loading {config.model}"):
        from plumbob.trainer.inference.load import load_engine  # loads torch, which oracles and replays do not need

        loaded = load_engine(config, resumed)
    # A server's URL says what it is.
    by = f", engine {loaded.name}" if config.computes_here else ""
    where = f"{config.model} on {loaded.where}{by}, {how}"
    return Asked(loaded, sampling, limits, where)


async def _roll_out(config: EvaluateConfig, part: Plan, asked: Asked, path: Path, done: set[tuple[int, int]]) -> None:
    """Sample every rollout that is not done yet, and append each to the file as soon as it is finished."""
    slots = asyncio.Semaphore(config.max_concurrent)
    jobs = list(part.jobs(config, done))
    good, failed = len(done), 0
    with path.open("a") as file, Progress(f"{part.env}: rollouts", len(jobs) + len(done), len(done)) as progress:

        async def one(job: Job) -> None:
            nonlocal good, failed
            seed = derive_seed(config.seed, job.example, job.rollout)
            async with slots:
                trace = await run_rollout(
                    job.task,
                    job.script or getattr(asked.loaded, "engine", None),  # ty: ignore[invalid-argument-type]
                    asked.chat,
                    replace(asked.sampling, seed=seed),
                    asked.limits,
                    shared_toolsets=part.loaded.toolsets,
                    driver=part.loaded.driver,
                )
            file.write(json.dumps(await _record(job, trace, asked.limits)) + "\n")
            file.flush()
            good, failed = good + trace.ok, failed + (not trace.ok)
            progress.advance(f"reward {trace.reward:.2f}" if trace.ok else "failed")
            if failed >= min(GIVE_UP_AFTER, len(jobs)) and not good:
                error = trace.errors[-1]
                raise EvaluationFailed(
                    f"the first {failed} rollouts all failed, the last with: {error.type}: {error.message}"
                )

        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(one(job))
        except BaseExceptionGroup as several:
            first = several.exceptions[0]
            if isinstance(first, UnsupportedTaskset):  # seen only now, because it depends on what the model says
                raise EvaluationFailed(f"{part.env} cannot be played: {first}") from None
            raise first from None


async def _record(job: Job, trace: vf.Trace, limits: Limits) -> dict[str, Any]:
    """A line of the result file: the trace, the numbers of task and rollout, and the answer to submit (if any)."""
    own: dict[str, Any] = {"example": job.example, "rollout": job.rollout}
    if zero_one := getattr(job.task, "zero_one_metrics", ()):
        own["zero_one_metrics"] = list(zero_one)
    if (predict := getattr(job.task, "prediction", None)) is not None:
        own["prediction"] = None
        if trace.ok:
            try:
                caller = Caller(limits.max_tool_seconds)
                own["prediction"] = await caller.call("`prediction`", lambda: predict(trace))
            except Exception as error:  # a rollout without an answer has failed
                trace.record_error(error)
    return {**trace.to_record(), **own}


def _read_finished(path: Path, part: Plan) -> set[tuple[int, int]]:
    """(example, rollout) of what an interrupted evaluation has finished.

    Failed rollouts are removed from the file, so that they are sampled again. Raises UserError if the file has other
    tasks.
    """
    if not path.exists():
        return set()
    kept = [record for record in read_records(path) if record["ok"]]
    for record in kept:
        example = record["example"]
        if example >= len(part.tasks):
            raise UserError(f"{path} has rollouts of more than {len(part.tasks)} tasks; raise --num-examples")
        if part.tasks[example].key != record["task"]["key"]:
            raise UserError(f"{path} has rollouts of other tasks than this evaluation; start a new evaluation")
    _write_records(path, kept)
    return {(record["example"], record["rollout"]) for record in kept}


def _write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def _report(
    config: EvaluateConfig, part: Plan, asked: Asked, records: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    rows = rows_of(records)
    summary = summarize(rows, config.pass_threshold)
    played = f"{part.env}: {counted(summary.num_tasks, 'task')} x {config.rollouts_per_example}"
    heading = f"{played} | {asked.description} | {seconds:.0f} s"
    if summary.failures:
        reasons = "; ".join(f"{n} x {reason}" for reason, n in summary.failures.items())
        heading += f"\n{summary.num_failed} of {summary.num_rollouts} rollouts failed and count as reward 0: {reasons}"
    report = {"env": part.env, "heading": heading, "table": table(summary), "seconds": seconds, **summary.to_json()}
    if part.stored:
        if config.wanted_examples < 0 and (of_step := part_of_step(Path(config.replay or ""), len(part.stored))):
            report["heading"] += f"\n{of_step}"  # these are not all rollouts of their training step
        before = [Row.of_record(record) for record in part.stored]
        differences = [abs(row.reward - old.reward) for row, old in zip(rows, before, strict=True)]
        equal = sum(difference < 1e-9 for difference in differences)
        report["equal"] = equal == len(rows)
        report["heading"] += (
            f"\nscored again: {equal} of {len(rows)} rewards equal the stored ones, largest difference {max(differences):.3g}"
        )
    return report
