"""`evaluate`, `predict` and `benchmark`: the command lines. torch and verifiers load only when work begins."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from plumbob.console import UserError
from plumbob.console.app import run_app
from plumbob.console.files import check_output
from plumbob.console.version import version_option
from plumbob.trainer.cli.loading import fast_imports, import_verifiers
from plumbob.trainer.cli.train import CONFIG_FILE, UNKNOWN, settling
from plumbob.trainer.cli.typer_command import command_class
from plumbob.trainer.config.chat_template import TemplateChoice
from plumbob.trainer.config.environment import check_by_source, check_data_exists
from plumbob.trainer.config.evaluate import FIXED_ON_RESUME, EvaluateConfig
from plumbob.trainer.config.options import UNKNOWN_OPTIONS, argument, as_command, resolve
from plumbob.trainer.run_files.model_path import check_model_exists
from plumbob.trainer.run_files.run_directory import check_is_free, check_is_new
from plumbob.trainer.run_files.trace_files import NOT_ROLLOUTS

_EVALUATE = """Sample rollouts in installed environments and score them, with the rollout code and rewards of training.

Prints each environment's scores with 95% intervals over tasks, pass@k, and the scores by number of hops (steps of a
multi-step task). Every rollout is stored as a line of evaluations/NAME/ENV.jsonl. --resume evaluations/NAME continues
an interrupted evaluation.
"""
_PREDICT = """Answer every task of an environment, and write one JSON line per task in its official submission format.

Takes the options of `evaluate`. Without --num-examples, all tasks of the held-out split are answered.
"""
_BENCHMARK = """Evaluate models x retrievers x environments, and print one table.

Takes the options of `evaluate`. Each combination is stored as an evaluation in a subdirectory of its own. --resume
DIRECTORY runs the missing combinations, and `analyze DIRECTORY` compares the combinations task by task.
"""

_ENVS = Annotated[list[str] | None, typer.Argument(help="Installed environments: see `hub list`.", metavar="ENV...")]
_ENV = Annotated[str | None, typer.Argument(help="An installed environment: see `hub list`.", metavar="ENV")]
_RESUME = argument(str, "--resume", help="Continue the evaluation or benchmark of this result directory.")
_VERSION = Annotated[bool | None, version_option("plumbob-trainer")]
_JSON = argument(bool, "--json", help="Print JSON instead of tables.")


def evaluate(**given: Any) -> int:
    as_json = bool(given.pop("as_json"))
    config, directory = _configure(given)
    with _imports(config):
        import_verifiers()
        from plumbob.trainer.evaluation.run import run

    return run(config, directory, as_json=as_json)


def predict(**given: Any) -> int:
    file, fill_failed = given.pop("output_file"), bool(given.pop("fill_failed"))
    env = given.pop("env")
    given["envs"] = None if env is None else [env]
    if given["num_examples"] is None and given["resume"] is None:
        given["num_examples"] = -1
    config, directory = _configure(given)
    if file is not None:
        check_output("--output-file", Path(file), b"{")
        if Path(file).name in NOT_ROLLOUTS:
            raise UserError(f"--output-file {file} has the name of a file that a run writes; name another one")
    if len(config.envs) != 1 or config.rollouts_per_example != 1:
        raise UserError(
            "predict writes one answer per task: name one environment, and leave out --rollouts-per-example"
        )
    with _imports(config):
        import_verifiers()
        from plumbob.trainer.evaluation.predict import run

    return run(config, directory, None if file is None else Path(file), fill_failed=fill_failed)


def benchmark(**given: Any) -> int:
    as_json = bool(given.pop("as_json"))
    models, retrievers = _listed(given.pop("models")), _listed(given.pop("retrievers"))
    if given["resume"] is not None and (models or retrievers):
        raise UserError("--resume uses the benchmark's own --models and --retrievers; leave these options out")
    from plumbob.trainer.evaluation import benchmark as work

    if given["resume"] is None:
        grid = work.Grid(tuple(models) or (given["model"] or "tiny",), tuple(retrievers))
        given["model"] = grid.models[0]
        config, directory = _configure(given)
    else:
        directory = Path(given.pop("resume"))
        grid = work.read_grid(directory)
        config, _ = _configure({**given, "resume": str(directory)})
    with _imports(config):
        import_verifiers()
        import plumbob.trainer.evaluation.run  # noqa: F401 - what work.run imports when it begins

    return work.run(config, grid, directory, as_json=as_json)


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _configure(given: dict[str, Any]) -> tuple[EvaluateConfig, Path | None]:
    """(settings, directory to resume from or None).

    Reports an unknown environment or setting before imports that take seconds.
    """
    from plumbob.hub import find

    config, directory = resolve(
        EvaluateConfig,
        given,
        FIXED_ON_RESUME,
        kind="evaluation",
        directory_is="an evaluation",
        settle=settling(EvaluateConfig),
    )
    check_data_exists(config.datasets)
    for env in config.envs:
        find(env)
        check_by_source(env, config.settings_of(env))
    if not config.oracle and config.replay is None:
        if config.computes_here:
            check_model_exists(config.model)
        else:
            from plumbob.trainer.inference.token_servers import check_server

            check_server(config)
    TemplateChoice(config.chat_template, directory).check()
    if directory is None and config.run_name is not None:
        with suppress(OSError):  # making the directory reports it
            check_is_new(Path(config.output_dir) / config.run_name)
    elif directory is not None:
        check_is_free(directory)
    return config, directory


def _imports(config: EvaluateConfig) -> AbstractContextManager[None]:
    environments = "environment" if len(config.envs) == 1 else "environments"
    return fast_imports(f"verifiers and the {environments} {', '.join(config.envs)}")


def _app(function: Any, help: str, arguments: dict[str, Any]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)
    app.command(help=help, cls=command_class(EvaluateConfig))(
        as_command(function, {**arguments, "version": _VERSION, UNKNOWN_OPTIONS: UNKNOWN}, EvaluateConfig)
    )
    return app


_COMMON: dict[str, Any] = {"config_file": CONFIG_FILE, "resume": _RESUME}
_OUTPUT = argument(
    str, "--output-file", help="Submission file to write. Default: predictions.jsonl in the result directory."
)
_FILL = argument(bool, "--fill-failed", help="Write an empty answer for each rollout that failed.")
_MODELS = argument(str, "--models", help="Models to evaluate, separated by commas. Default: the value of --model.")
_RETRIEVERS = argument(
    str, "--retrievers", help="Values of the environments' setting `retriever` to evaluate, separated by commas."
)

evaluate_app = _app(evaluate, _EVALUATE, {"envs": _ENVS, **_COMMON, "as_json": _JSON})
predict_app = _app(predict, _PREDICT, {"env": _ENV, **_COMMON, "output_file": _OUTPUT, "fill_failed": _FILL})
benchmark_app = _app(
    benchmark, _BENCHMARK, {"envs": _ENVS, "models": _MODELS, "retrievers": _RETRIEVERS, **_COMMON, "as_json": _JSON}
)


def main() -> None:
    run_app("evaluate", evaluate_app)


def predict_main() -> None:
    run_app("predict", predict_app)


def benchmark_main() -> None:
    run_app("benchmark", benchmark_app)
