"""`predict`: an evaluation whose answers are written as a submission file."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from plumbob.console import UserError
from plumbob.console.files import write_whole
from plumbob.hub import find
from plumbob.rollout import ChatReply, ScriptedChat, run_rollout, tasksets
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.evaluation.results import read_records
from plumbob.trainer.evaluation.run import EvaluationFailed, ask, evaluate_plans, plan, stopped
from plumbob.trainer.rollouts.interruption import Interrupted
from plumbob.trainer.run_files.run_directory import evaluation_name, make_directory


def run(config: EvaluateConfig, resume_from: Path | None, output: Path | None, *, fill_failed: bool = False) -> int:
    """Write one answer per task, in the order of the source, once every task has one; returns the exit code.

    `fill_failed`: a rollout that failed gets the answer of an empty reply. Raises UserError.
    """
    (env,) = config.envs
    config = _in_order(config, env)
    part = plan(config, env)
    if not hasattr(part.tasks[0], "prediction"):
        raise UserError(f"environment {env!r} has no submission format: its task has no method 'prediction'")
    with closing(ask(config, resume_from)) as asked:
        directory = resume_from or make_directory(config.output_dir, evaluation_name(config))
        try:
            (report,) = evaluate_plans(config, [part], asked, directory)
        except (Interrupted, EvaluationFailed) as error:
            return stopped(error, f"predict --resume {directory}")
    if report["num_failed"]:
        print(report["heading"], file=sys.stderr)
        if not fill_failed:
            again = f"predict --resume {directory}"
            print(
                f"No file was written. Retry what failed:  {again}    or write empty answers:  {again} --fill-failed",
                file=sys.stderr,
            )
            return 1
    output = output or directory / "predictions.jsonl"
    records = read_records(directory / f"{env}.jsonl")
    rows = [record["prediction"] or _empty(part.tasks[record["example"]]) for record in records]
    try:
        write_whole(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}; the results are in {directory}") from None
    print(f"{len(rows)} predictions  {output}")
    return 0


def _in_order(config: EvaluateConfig, env: str) -> EvaluateConfig:
    """Official scorers expect the order of the source, so shuffling is turned off unless the user has set it."""
    environment = find(env)
    environment.load()
    shuffles = tasksets.setting_choices(environment.module, "shuffle") is not None
    if not shuffles or "shuffle" in config.settings_of(env):
        return config
    return dataclasses.replace(config, env_args=(*config.env_args, "shuffle=false"))


def _empty(task: vf.Task) -> dict[str, Any]:
    trace = asyncio.run(run_rollout(task, ScriptedChat([ChatReply("")]), None))
    return getattr(task, "prediction")(trace)  # noqa: B009 - not every task has it
