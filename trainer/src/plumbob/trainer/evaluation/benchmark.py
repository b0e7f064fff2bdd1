"""`benchmark`: models x retrievers x environments.

Each combination, a cell, is an evaluation in a folder of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.trainer.config.chat_template import RECORDED
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.config.options import to_toml

GRID = "benchmark.toml"


@dataclass(frozen=True)
class Grid:
    """The models and retrievers that a benchmark varies.

    If `retrievers` is empty, each environment uses its default.
    """

    models: tuple[str, ...]
    retrievers: tuple[str, ...]


def read_grid(directory: Path) -> Grid:
    """The grid of an earlier benchmark. Raises UserError if the directory is not a benchmark."""
    try:
        values = tomllib.loads((directory / GRID).read_text(encoding="utf-8"))
        return Grid(tuple(values["models"]), tuple(values["retrievers"]))
    except (OSError, ValueError, KeyError):
        raise UserError(f"{directory} is not a benchmark: it has no readable {GRID}") from None


def run(config: EvaluateConfig, grid: Grid, resume_from: Path | None, *, as_json: bool = False) -> int:
    """Evaluate every cell that is not finished, then print the table. Raises UserError before the first rollout."""
    from plumbob.trainer.evaluation import run as evaluation
    from plumbob.trainer.rollouts.interruption import Interrupted
    from plumbob.trainer.run_files.run_directory import make_directory

    cells = [
        (model, env, retriever)
        for model in grid.models
        for env in config.envs
        for retriever in _retrievers(env, grid.retrievers)
    ]
    if grid.retrievers and not any(retriever for _, _, retriever in cells):
        raise UserError(
            f"--retrievers varies a setting `retriever`, which {' and '.join(config.envs)} has not; leave it out"
        )
    # All tasks are loaded first, so that a wrong retriever or setting is reported before the first rollout. They do not
    # depend on the model, so each is loaded once.
    parts = {
        (env, retriever): evaluation.plan(_cell(config, model, env, retriever), env)
        for model, env, retriever in cells
        if model == grid.models[0]
    }
    name = config.run_name or f"benchmark-{time.strftime('%Y%m%d-%H%M%S')}"
    directory = resume_from or make_directory(config.output_dir, name)
    (directory / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    (directory / GRID).write_text(to_toml({"models": grid.models, "retrievers": grid.retrievers}), encoding="utf-8")
    reports: list[dict[str, Any]] = []
    loaded = ""
    with ExitStack() as open_engine:  # one model in memory at a time, loaded once
        for number, (model, env, retriever) in enumerate(cells, 1):
            own = _cell(config, model, env, retriever)
            folder = directory / _folder(model, env, retriever)
            print(f"[{number}/{len(cells)}] {folder.name}", file=sys.stderr, flush=True)
            finished = folder / "summary.json"
            if finished.is_file():
                report = json.loads(finished.read_text(encoding="utf-8"))
            else:
                folder.mkdir(exist_ok=True)
                if loaded != model:
                    open_engine.close()
                    begun = [directory / _folder(*cell) for cell in cells if cell[0] == model]
                    resumed = next((path for path in begun if (path / RECORDED).is_file()), None)
                    asked = evaluation.ask(dataclasses.replace(own, engine=_engine(config, begun)), resumed)
                    open_engine.enter_context(closing(asked))
                    loaded = model
                try:
                    (report,) = evaluation.evaluate_plans(own, [parts[env, retriever]], asked, folder)
                except (Interrupted, evaluation.EvaluationFailed) as error:
                    return evaluation.stopped(error, f"benchmark --resume {directory}")
                finished.write_text(json.dumps(report))
            reports.append({"model": model, "retriever": retriever, **report})
    print(json.dumps(reports, indent=2) if as_json else f"{_table(reports)}\n\nresults  {directory}")
    return 0


def _retrievers(env: str, wanted: tuple[str, ...]) -> tuple[str | None, ...]:
    from plumbob.hub import find
    from plumbob.rollout import tasksets

    environment = find(env)
    environment.load()
    has_any = tasksets.setting_choices(environment.module, "retriever") is not None
    return wanted if wanted and has_any else (None,)


def _cell(config: EvaluateConfig, model: str, env: str, retriever: str | None) -> EvaluateConfig:
    settings = config.settings_of(env) | ({} if retriever is None else {"retriever": retriever})
    pairs = tuple(f"{key}={value}" for key, value in settings.items())
    return dataclasses.replace(config, envs=(env,), model=model, env_args=pairs, datasets=None)


def _engine(config: EvaluateConfig, begun: Sequence[Path]) -> Any:
    """The value of --engine for the cells of a model: what auto chose for those that an earlier process began."""
    for folder in begun if config.engine == "auto" else ():
        with suppress(OSError, ValueError, KeyError):
            return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))["engine"]
    return config.engine


def _folder(model: str, env: str, retriever: str | None) -> str:
    """Folder of a cell. The hash keeps cells apart whose models share the last part of their names."""
    shown = [re.sub(r"[^\w.]+", "_", part) for part in (Path(model).name, env, retriever) if part]
    return "-".join([*shown, hashlib.sha256(repr((model, env, retriever)).encode()).hexdigest()[:8]])


def _table(reports: list[dict[str, Any]]) -> str:
    from plumbob.trainer.evaluation.results import aligned
    from plumbob.trainer.evaluation.statistics import Estimate

    lines = [["model", "environment", "retriever", "reward [95% interval]", "passed", "failed", "tokens", "seconds"]]
    for report in reports:
        lines.append(
            [
                report["model"],
                report["env"],
                report["retriever"] or "",
                str(Estimate(**report["scores"]["reward"])),
                f"{next(iter(report['pass_at'].values()))['mean']:.3f}",
                str(report["num_failed"]),
                f"{report['output_tokens']:.0f}",
                f"{report['seconds']:.0f}",
            ]
        )
    return aligned(lines)
