"""`predict`: an evaluation whose answers are written as a submission file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from plumbob.hub import UserError
from plumbob.trainer.evaluation.config import EvaluateConfig
from plumbob.trainer.evaluation.results import read_records
from plumbob.trainer.evaluation.run import EvaluationFailed, ask, evaluate_plans, plan
from plumbob.trainer.interruption import Interrupted
from plumbob.trainer.run_directory import evaluation_name, make_directory, write_whole


def run(config: EvaluateConfig, resume_from: Path | None, output: Path | None) -> int:
    """One line per task, in the order of the tasks; only written when every task has an answer. Raises UserError."""
    (env,) = config.envs
    part = plan(config, env)
    if not hasattr(part.tasks[0], "prediction"):
        raise UserError(f"environment {env!r} has no submission format: its task has no method 'prediction'")
    asked = ask(config)
    directory = resume_from or make_directory(config.output_dir, evaluation_name(config))
    (directory / "config.toml").write_text(config.to_toml())
    try:
        (report,) = evaluate_plans(config, [part], asked, directory)
    except (Interrupted, EvaluationFailed) as error:
        reason = f"Stopped: {error}" if str(error) else "Interrupted"
        print(f"{reason}; what was finished is kept. Go on with:  predict --resume {directory}", file=sys.stderr)
        return 1
    if report["num_failed"]:
        print(f"{report['heading']}\nNo file was written. Go on with:  predict --resume {directory}", file=sys.stderr)
        return 1
    output = output or directory / "predictions.jsonl"
    rows = [record["prediction"] for record in read_records(directory / f"{env}.jsonl")]
    try:
        write_whole(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}; the results are in {directory}") from None
    print(f"{len(rows)} predictions  {output}")
    return 0
