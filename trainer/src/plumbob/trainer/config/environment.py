"""Settings of an environment, given next to the trainer's own: `--noise 0.5`, or `noise = 0.5` in a TOML file.

Importing an environment takes seconds, so its settings are read from its source (environment_source.py). It is imported
only where the source does not tell its settings, or a validator may convert a value that it refuses. What a validator
refuses is told when the environment loads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.hub import find
from plumbob.trainer.config.environment_source import Setting, read_settings
from plumbob.trainer.config.options import as_text, did_you_mean, flag, kind_of
from plumbob.trainer.config.removed import INSTEAD, accept_removed

OLDER_NAMES = {
    "noise_rate": ("noise",),
    "retriever_name": ("retriever",),
    "retriever_top_k": ("top_k", "max_top_k"),
}
"""Setting of earlier environments -> its names today; the first one that the environment has is used."""

_RESERVED = ("id", "task")
"""Fields of every taskset's configuration that are not settings of the environment."""

Announce = Callable[[], AbstractContextManager[object]]

_DATA = ("datasets", "eval_datasets")
"""Settings of an environment that the trainer's options of the same name give."""


def known_settings(env: str, announce: Announce = nullcontext) -> dict[str, Setting]:
    """Setting name -> setting. Raises UserError if the environment does not exist or cannot be loaded.

    The environment is imported inside of the context that `announce` makes, because that takes seconds.
    """
    found = _from_source(find(env).name)
    if found is None:
        fields = _config_type(env, announce).model_fields
        found = {
            name: Setting(name, kind_of(field.annotation), field.default, field.annotation)
            for name, field in fields.items()
        }
    return {name: setting for name, setting in found.items() if name not in _RESERVED}


@lru_cache
def _from_source(env: str) -> dict[str, Setting] | None:
    return read_settings(find(env).entry_point)


def _config_type(env: str, announce: Announce) -> Any:
    """The pydantic class of the environment's settings, which is imported. Raises UserError if that fails."""
    environment = find(env)
    with nullcontext() if environment.module in sys.modules else announce():
        environment.load()
        import verifiers.v1 as vf

    return vf.taskset_config_type(environment.module)


def settle(
    env: str,
    unknown_options: Mapping[str, Any],
    file: Path | None,
    own_names: Iterable[str],
    announce: Announce = nullcontext,
    command: str = "train",
    others: Iterable[str] = (),
) -> dict[str, str]:
    """Turn options or file keys that the trainer does not have into settings of the environment: name -> text.

    `unknown_options`: name -> value, None for an option without a value. `file`: the TOML file that has the keys; None
    for the command line. `own_names`: names of the trainer's settings, for "did you mean". `announce`: see
    `known_settings`. `command`: which is run; `others`: options that `train` has and it has not. Raises UserError for a
    name that neither the trainer nor the environment has, and for a value that the environment refuses.
    """
    settings: dict[str, str] = {}
    for written, value in unknown_options.items():
        name = written.replace("-", "_")
        known = known_settings(env, announce)
        if name not in known and accept_removed(written, value, _shown(written, file)):
            continue
        found = next((n for n in (name, *OLDER_NAMES.get(name, ())) if n in known), None)
        if found is None and value is None and name.startswith("no_") and name.removeprefix("no_") in known:
            found, value = name.removeprefix("no_"), False
        if found is None:
            if name in others:
                raise UserError(f"{_shown(written, file)} is an option of `train`, not of `{command}`: leave it out")
            raise UserError(_unknown(env, written, file, [*own_names, *known], command))
        if value is None:
            if known[found].kind != "bool":
                raise UserError(f"{flag(found)} needs a value: this setting of {env} is not a true/false switch")
            value = True
        if found in settings:
            raise UserError(f"the setting {found!r} of {env} is given twice, once as {_shown(written, file)}")
        settings[found] = as_text(value)
        if (reason := _refusal(env, known[found], settings[found], announce)) is not None:
            shown = flag(written) if file is None else f"{file}: {written}"
            reason = reason.removeprefix("Value error, ")
            raise UserError(f"{shown}: {reason[0].lower()}{reason[1:]}, not {settings[found]!r}")
    return settings


def check_by_source(env: str, settings: Mapping[str, str]) -> None:
    """Raise UserError for a setting that the environment does not have, or a value that it refuses by its type.

    The environment is imported only if a validator may convert what its source refuses; the rest is checked when it loads.
    """
    known = _from_source(find(env).name)
    if known is None:
        return
    for name, text in settings.items():
        if name not in known:
            raise UserError(f"{env}: there is no setting {name!r}{did_you_mean(name, list(known))}")
        if (reason := _refusal(env, known[name], text)) is not None:
            raise UserError(f"{env}: {name}: {reason}")


def check_data_exists(datasets: str | None) -> None:
    """Raise UserError for data that are a file by their name, and do not exist. Of other data only the environment knows."""
    path = (datasets or "").partition(",")[0]  # what follows chooses a part of the data
    is_file = path.startswith((".", "/", "~")) or path.endswith((".jsonl", ".json", ".csv", ".parquet"))
    if is_file and "*" not in path and not any(Path(one).expanduser().exists() for one in (path, str(datasets))):
        raise UserError(f"no such dataset file: {path}")


def check_reads_data(env: str, known: Iterable[str] | None = None) -> None:
    """Raise UserError if `--datasets` was given for an environment without a setting of that name.

    `known`: the names of its settings. Default: those that its source tells; nothing is checked if it does not tell.
    """
    known = _from_source(find(env).name) if known is None else known
    if known is None or "datasets" in known:
        return
    example = next((name for name in known if name.startswith("data")), None)
    theirs = f"; its own settings are given with -a, such as -a {example}=..." if example else ""
    raise UserError(f"{env} has no setting 'datasets', which is what --datasets (or --dataset-name) sets{theirs}")


def _refusal(env: str, setting: Setting, text: str, announce: Announce = nullcontext) -> str | None:
    """Why the environment refuses this value; None if the setting's type accepts it, or the source does not tell the type.

    If a validator may convert what the type refuses, the environment is imported, and asked.
    """
    if setting.annotation is None:
        return None
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(setting.annotation).validate_python(None if text == "None" else text)  # as verifiers reads "None"
        return None
    except ValidationError as error:
        if not setting.converted:
            return error.errors()[0]["msg"]
    try:
        _config_type(env, announce).model_validate({"id": find(env).module, setting.name: text})
    except ValidationError as error:
        return next((found["msg"] for found in error.errors() if found["loc"][:1] == (setting.name,)), None)
    return None


def _shown(written: str, file: Path | None) -> str:
    return flag(written) if file is None else f"{written!r} in {file}"


def _unknown(env: str, written: str, file: Path | None, known: list[str], command: str) -> str:
    if (instead := INSTEAD.get(written.replace("-", "_"))) is not None:
        where, nothing = _shown(written, file), instead.removeprefix("nothing: ")
        return f"there is no option {where}" + (f": {nothing}" if nothing != instead else f"; here it is {instead}")
    if file is None:
        near = did_you_mean(written.replace("-", "_"), known, flag)
        help_ = near or f"; `{command} {env} --help-all` lists all options and settings"
        return f"there is no option {flag(written)}, and {env} has no such setting{help_}"
    near = did_you_mean(written.replace("-", "_"), known)
    return f"{file} has an unknown key {written!r}, which is not a setting of {env} either{near}"


def describe(env: str, own_names: Iterable[str]) -> list[tuple[str, str]]:
    """(option, default) of each setting of the environment, for the help.

    A name that the trainer has too is shown as `-a NAME=...`, which is how it is given, except the data, for which the
    trainer's own options are.
    """
    rows, own_names = [], set(own_names)
    for name, setting in known_settings(env).items():
        if name in _DATA:
            continue
        plain = isinstance(setting.default, bool | int | float | str | tuple)
        default = as_text(setting.default) if plain else ""
        written = f"-a {name}=<{setting.kind}>" if name in own_names else f"{flag(name)} <{setting.kind}>"
        rows.append((written, f"[default: {default}]" if default else ""))
    return rows
