"""`train`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from plumbob.console import UserError
from plumbob.console.app import run_app
from plumbob.console.version import version_option
from plumbob.hub import find
from plumbob.trainer.cli.loading import (
    announce,
    compile_meanwhile,
    fast_imports,
    import_torch_beside,
    import_transformers,
    import_verifiers,
    use_growing_segments,
)
from plumbob.trainer.cli.typer_command import command_class
from plumbob.trainer.config import mixture
from plumbob.trainer.config.chat_template import TemplateChoice
from plumbob.trainer.config.environment import (
    check_by_source,
    check_data_exists,
    check_reads_data,
    known_settings,
    settle,
)
from plumbob.trainer.config.options import (
    UNKNOWN_OPTIONS,
    Settle,
    argument,
    as_command,
    flag,
    read_file,
    read_toml,
    resolve,
    settings_in,
    spellings,
)
from plumbob.trainer.config.sft import ORACLE, SftConfig
from plumbob.trainer.config.train import PLACE, TrainConfig
from plumbob.trainer.evaluation.results import first_trace
from plumbob.trainer.reporting.trackers import check_reporting
from plumbob.trainer.run_files import start
from plumbob.trainer.run_files.manifest import check_whole
from plumbob.trainer.run_files.metric_names import check_metric
from plumbob.trainer.run_files.model_path import check_model_exists
from plumbob.trainer.run_files.run_directory import (
    check_can_be_made,
    check_is_free,
    run_directory_of,
    saved_checkpoints,
)
from plumbob.trainer.run_files.trace_files import trace_paths

app = typer.Typer(rich_markup_mode=None)

_HELP = """Train a model with GRPO on an installed environment.

Without arguments, `train` trains the bundled model `tiny` on the environment `lookup`, in a few minutes on two CPU
cores.

Every setting of the environment is an option as well, as in `train musique --noise 0.5`. `train musique --help` lists
the settings of musique.
"""


def train(**given: Any) -> int:
    """The command. Its signature is made from TrainConfig's fields below."""
    return run_training(TrainConfig, given)


Settings = TypeVar("Settings", bound=TrainConfig)


def run_training(cls: type[TrainConfig], given: Mapping[str, Any]) -> int:
    """Carry out a run with settings of the class `cls`; returns the exit code. Raises UserError."""
    start.begin()
    dry = given.get("dry_run")
    no_settings = ("dry_run", "check_options")
    config, run_dir = configure_as(cls, {name: value for name, value in given.items() if name not in no_settings})
    check_before_loading(config, run_dir)
    if given.get("check_options"):  # of `lab init`, which knows no setting of its runs
        return 0
    start.lap("settings")
    named = " and ".join(env for env, _ in config.members)
    use_growing_segments(config.engine)
    if not dry:
        compile_meanwhile(config)
    with fast_imports(f"torch, verifiers and the environment{'s' * bool(config.mixture)} {named}"):
        for function in config.own_functions():  # after the line that says so, and before what takes seconds
            function.load()
        read = _read_first(config, run_dir, dry=bool(dry))
        torch = import_torch_beside()
        import_verifiers()
        import_transformers(torch)
        if dry:
            from plumbob.trainer.training.capacity.dry_run import dry_run

            begin = partial(dry_run, origins=_origins(cls, given))
        else:
            from plumbob.trainer.training.train import run as begin

    start.lap("imports")
    return begin(config, run_dir, read)


def _read_first(config: TrainConfig, resumed: Path | None, *, dry: bool) -> list[Any]:
    """What `read_here` finds of tasks, if the user's data or settings may be refused: that needs verifiers, but not torch."""
    stored = _stored(config, resumed)
    given = (stored, config.datasets, config.eval_datasets, config.env_args, config.trained_reward)
    if not dry and not any(given):
        return []
    import_verifiers()
    from plumbob.trainer.rollouts.tasks import read_here

    found = list(read_here(config, without_data=not dry))
    if stored and found[0] is not None:
        for path in stored:
            found[0].tasks.check_is_one_of(first_trace(path), path)
    return found


def _stored(config: TrainConfig, resumed: Path | None) -> list[Path]:
    """The files of stored rollouts that a run of `sft` learns from; none if it is resumed, as it has its own then."""
    if resumed is not None or not isinstance(config, SftConfig) or config.demonstrations == ORACLE:
        return []
    return trace_paths(config.demonstrations, config.env)


def _origins(cls: type[TrainConfig], given: Mapping[str, Any]) -> dict[str, str]:
    """Setting -> where its value comes from, for those that have no default value."""
    resumed, file = given.get("resume"), given.get("config_file")
    path = (
        Path(file) if resumed is None and file else run_directory_of(Path(resumed)) / "config.toml" if resumed else None
    )
    of_file = dict.fromkeys(read_file(path, cls)[0], str(path)) if path is not None else {}
    named = [name for name, value in given.items() if value not in (None, [], ())]
    return {**of_file, **dict.fromkeys(named, "command line")}


def configure(given: Mapping[str, Any]) -> tuple[TrainConfig, Path | None]:
    """`configure_as` for the settings of `train`."""
    return configure_as(TrainConfig, given)


def configure_as(cls: type[Settings], given: Mapping[str, Any]) -> tuple[Settings, Path | None]:
    """Resolve the options to (settings of the class `cls`, run directory or checkpoint to resume from, or None).

    Raises UserError.
    """
    given = dict(given)
    given["env"] = _environments(given.pop("env", None), given.pop("env_option", None))
    resumed = Path(given["resume"]) if given.get("resume") is not None else None
    lost: dict[str, Any] = {}
    if resumed is not None:
        given["resume"] = str(run_directory_of(resumed))
        if resumed.parent.name == "checkpoints" and not resumed.is_dir():
            kept = ", ".join(path.name for path in saved_checkpoints(resumed.parent.parent)) or "none"
            raise UserError(f"there is no checkpoint {resumed}; those of the run: {kept}")
        lost = _lost_settings(cls, resumed)
        _check_mixture(cls, Path(given["resume"]), given["env"])
    fixed = (*cls().fixed_on_resume, *PLACE)
    config, _ = resolve(cls, given, fixed, kind="run", directory_is="a run directory", settle=settling(cls), lost=lost)
    return config, resumed


def settling(cls: Any) -> Settle:
    """What turns options that the settings `cls` do not have into settings of the environments; see `resolve`."""
    own_names = [name for name in spellings(cls) if name != "env_args"]
    command = getattr(cls, "COMMAND", "evaluate")
    others = set(spellings(TrainConfig)) - set(own_names)

    def settle_here(envs: Sequence[str], unknown: Mapping[str, Any], file: Path | None) -> dict[str, str]:
        names = [mixture.parse(env)[0] for env in envs]
        if not names:
            raise UserError("name an environment: `hub list` shows those that are installed")
        by_env = {names[0]: dict(unknown)} if len(names) == 1 else _by_environment(names, unknown)
        settings: dict[str, str] = {}
        for env, own in by_env.items():
            tell = partial(announce, f"the environment {env}")
            prefix = f"{env}." if len(names) > 1 else ""
            settings |= {
                prefix + key: value for key, value in settle(env, own, file, own_names, tell, command, others).items()
            }
        return settings

    return settle_here


def _environments(positional: Sequence[str] | str | None, option: str | None) -> list[str] | None:
    """The environments of the command line, "NAME:WEIGHT" where there are several; None if none is named.

    Settings hold one name per environment, because `vf-musique` and `musique` are the same when a run is resumed.
    """
    written = [mixture.parse(text) for text in ([positional] if isinstance(positional, str) else positional or ())]
    found = [(find(name).name, weight) for name, weight in written]
    if option is not None and [find(option).name] != [name for name, _ in found]:
        if found:
            named = sorted({option, *(name for name, _ in written)})
            raise UserError(f"--env names one environment, but two are named: {' and '.join(named)}")
        found = [(find(option).name, 1)]
    if len(found) < 2:
        return [name for name, _ in found] or None
    return [f"{name}:{weight}" for name, weight in found]


def _lost_settings(cls: type[TrainConfig], resumed: Path) -> dict[str, Any]:
    """Settings that the run's config.toml lacks, from the checkpoint that is resumed from. They are named in a line.

    A default in their place would change the run in the middle without a word.
    """
    path = run_directory_of(resumed) / "config.toml"
    checkpoint = next(reversed(saved_checkpoints(path.parent)), None) if resumed == path.parent else resumed
    if checkpoint is None or not path.is_file():
        return {}
    with suppress(OSError, ValueError, LookupError, TypeError):  # a damaged checkpoint is refused when it is loaded
        saved = settings_in(json.loads((checkpoint / "state.json").read_text())["config"], cls)
        own, fields = read_file(path, cls)[0], set(spellings(cls).values())
        lost = {name: value for name, value in saved.items() if name in fields and name not in own}
        if lost:
            named = ", ".join(f"{key} = {value}" for key, value in sorted(lost.items()))
            print(f"{path} lacks settings of the run, which are taken from {checkpoint.name}: {named}", file=sys.stderr)
        return lost
    return {}


def _check_mixture(cls: type[TrainConfig], run_dir: Path, envs: Sequence[str] | None) -> None:
    """Raise UserError if a run of several environments is resumed with other environments or weights than its own."""
    path = run_dir / "config.toml"
    if envs is None or not path.is_file():
        return
    saved = read_toml(path, cls)
    own = list(saved.get("mixture") or [saved.get("env", cls.env)])
    if list(envs) != own and max(len(envs), len(own)) > 1:
        raise UserError(
            f"--resume keeps the run's own environments and weights, {' '.join(own)}, so they cannot become "
            f"{' '.join(envs)}; start a new run to change them"
        )


def _by_environment(names: Sequence[str], unknown: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Environment -> the options among `unknown` that are its settings, without its name."""
    known = {env: list(known_settings(env)) for env in names}
    result: dict[str, dict[str, Any]] = {}
    for written, value in unknown.items():
        env, name = mixture.owner_of(written, known)
        result.setdefault(env, {})[name] = value
    return result


def check_before_loading(config: TrainConfig, run_dir: Path | None) -> None:
    """Raise UserError for what cannot work and can be found out before torch and verifiers load, which takes seconds.

    `run_dir`: the run directory, or a checkpoint in it, to resume from; None for a new run.
    """
    for own in config.for_each_environment():
        settings = own.settings_of(own.env)
        if data := {own.datasets, own.eval_datasets} - {None}:
            check_reads_data(own.env)
        for datasets in data:
            check_data_exists(datasets)
            check_by_source(own.env, {**settings, "datasets": str(datasets)})
        check_by_source(own.env, settings)
    for path in _stored(config, run_dir):
        first_trace(path)
    if (
        run_dir is not None
        and not saved_checkpoints(run_directory_of(run_dir))
        and (run_dir / "summary.json").is_file()
    ):
        raise UserError(
            f"{run_dir} has ended and its checkpoints are gone, so there is nothing to resume; start a new run from its "
            f"model with --model {run_dir}"
        )
    check_metric(config.keep_best, "--keep-best")
    for function in config.own_functions():
        function.line()
    config.rollouts_per_step(_processes())
    check_model_exists(config.model)
    if config.engine == "vllm":
        from plumbob.trainer.inference.vllm.control import check_served

        check_served(config.vllm_url, config.model)
    TemplateChoice(config.chat_template, run_dir and run_directory_of(run_dir)).check()
    if os.environ.get("RANK", "0") == "0":
        check_reporting(config)
        if run_dir is None:
            check_can_be_made(config)
        else:
            _check_can_go_on(config, run_dir)


def _check_can_go_on(config: TrainConfig, path: Path) -> None:
    """Raise UserError if another process writes to the run, or if files of the checkpoint to resume from are missing or cut."""
    directory = run_directory_of(path)
    check_is_free(directory)
    for checkpoint in [path] if path != directory else saved_checkpoints(directory)[-1:]:
        check_whole(checkpoint, config.COMMAND, checksums=False)


def _processes() -> int:
    """Number of processes that the launcher has started. Raises UserError if it has not said all that a process needs."""
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    size = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in names if name not in os.environ] if size != "1" else []
    if missing or not size.isdecimal():
        raise UserError(
            f"the variable WORLD_SIZE is {size!r}"
            + (
                f", but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
                if missing
                else ", which is no number of processes"
            )
            + "; unset it, or start several processes with `accelerate launch --num-processes N -m plumbob.trainer ENV ...`"
        )
    return int(size)


ENV_OPTION = argument(str, "--env", "--env-id", help="The environment; the same as the argument ENV.", metavar="<text>")
CONFIG_FILE = argument(
    str, "--config", help="TOML file with these options; options on the command line override it.", metavar="<file>"
)
UNKNOWN = Annotated[list[str] | None, typer.Option(flag(UNKNOWN_OPTIONS), hidden=True)]
"""Options that no setting has: settings of the environment, or typing errors."""

ARGUMENTS: dict[str, Any] = {
    "env": Annotated[
        list[str] | None,
        typer.Argument(
            help="An installed environment: see `hub list`. Several, as in gsm8k:2 musique:1, share the groups of the "
            "run by their weights.",
            show_default="lookup",
            metavar="[ENV]...",
        ),
    ],
    "env_option": ENV_OPTION,
    "config_file": CONFIG_FILE,
    "resume": argument(
        str,
        "--resume",
        "--resume-from-checkpoint",
        help="Continue the run of this run directory from its last checkpoint; or, with the folder of one of its "
        "checkpoints, from that one.",
        metavar="<folder>",
    ),
    "dry_run": argument(
        bool,
        "--dry-run",
        help="Print every setting with where it comes from, the memory that the run takes by part, and what the time of a "
        "step depends on. Nothing is started; of a model on the hub only its configuration is downloaded.",
    ),
    "check_options": Annotated[bool | None, typer.Option("--check-options", hidden=True)],
    "version": Annotated[bool | None, version_option("plumbob-trainer")],
    UNKNOWN_OPTIONS: UNKNOWN,
}
"""The arguments of `train` and `sft` that are no settings."""
app.command(help=_HELP, cls=command_class(TrainConfig), context_settings={"max_content_width": 110})(
    as_command(train, ARGUMENTS, TrainConfig)
)


def main() -> None:
    """The command. The word `train` before everything else is left out: scripts whose first argument it was run as they are."""
    run_app("train", app, sys.argv[2:] if sys.argv[1:2] == ["train"] else sys.argv[1:])
