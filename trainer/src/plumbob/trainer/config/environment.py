"""Settings of an environment, given next to the trainer's own: `--noise 0.5`, or `noise = 0.5` in a TOML file.

The environment is loaded only if the command line or the file has a name that is not a setting of the trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from plumbob.console import UserError
from plumbob.hub import find
from plumbob.trainer.config.options import as_text, did_you_mean, flag, without_none

OLDER_NAMES = {
    "noise_rate": ("noise",),
    "retriever_name": ("retriever",),
    "retriever_top_k": ("top_k", "max_top_k"),
}
"""Setting of earlier environments -> its names today; the first one that the environment has is used."""

WITHOUT_EFFECT = {
    "eval_accumulation_steps": "evaluation keeps no tensors on the device",
    "log_on_each_node": "only rank 0 logs",
    "no_log_on_each_node": "only rank 0 logs",
    "n_env_jobs": "rollouts run asynchronously in the training process; --max-concurrent bounds their number",
    "few_shot_prob": "no environment of plumbob puts solved examples into its prompts",
}
"""Option of earlier command lines -> why it has no effect here. It is accepted so that old scripts still run."""

FLAGS_WITHOUT_EFFECT = ("log_on_each_node", "no_log_on_each_node")
"""Names in WITHOUT_EFFECT whose options take no value."""

_RESERVED = ("id", "task")
"""Fields of every taskset's configuration that are not settings of the environment."""


class _Names:
    """The settings of an environment. It is loaded at the first use, because loading takes seconds."""

    def __init__(self, env: str) -> None:
        self.env = env
        self._fields: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        if self._fields is None:
            self._fields = setting_fields(self.env)
        return self._fields


def setting_fields(env: str) -> dict[str, Any]:
    """Setting name -> its pydantic field. Raises UserError if the environment does not exist or cannot be loaded."""
    environment = find(env)
    environment.load()
    import verifiers.v1 as vf

    fields = vf.taskset_config_type(environment.entry_point.module).model_fields
    return {name: field for name, field in fields.items() if name not in _RESERVED}


def settle(env: str, unknown_options: Mapping[str, Any], file: Path | None, own_names: Iterable[str]) -> dict[str, str]:
    """Turn options or file keys that the trainer does not have into settings of the environment: name -> text.

    `unknown_options`: name -> value, None for an option without a value. `file`: the TOML file that has the keys; None
    for the command line. `own_names`: names of the trainer's settings, for "did you mean". Raises UserError for a name
    that neither the trainer nor the environment has.
    """
    names, settings = _Names(env), {}
    for written, value in unknown_options.items():
        name = written.replace("-", "_")
        if name in WITHOUT_EFFECT:
            print(f"{_shown(written, file)} has no effect: {WITHOUT_EFFECT[name]}", file=sys.stderr)
            continue
        fields = names.fields()
        found = next((n for n in (name, *OLDER_NAMES.get(name, ())) if n in fields), None)
        if found is None and value is None and fields.get(name.removeprefix("no_")) and name.startswith("no_"):
            found, value = name.removeprefix("no_"), False
        if found is None:
            raise UserError(_unknown(env, written, file, [*own_names, *fields]))
        if value is None:
            value = _without_value(env, found, fields[found].annotation)
        if found in settings:
            raise UserError(f"the setting {found!r} of {env} is given twice, once as {_shown(written, file)}")
        settings[found] = as_text(value)
        _check(env, found, settings[found], flag(written) if file is None else f"{file}: {written}")
    return settings


def _check(env: str, name: str, text: str, written: str) -> None:
    """Raises UserError if the environment refuses this value on its own.

    Combinations of values are checked when it loads.
    """
    import verifiers.v1 as vf
    from pydantic import ValidationError

    module = find(env).entry_point.module
    try:
        vf.taskset_config_type(module).model_validate({"id": module, name: text})
    except ValidationError as error:
        for found in error.errors():
            if found["loc"][:1] == (name,):
                reason = found["msg"].removeprefix("Value error, ")
                raise UserError(f"{written}: {reason[0].lower()}{reason[1:]}, not {text!r}") from None


def _without_value(env: str, name: str, annotation: Any) -> bool:
    if annotation is not bool:
        raise UserError(f"{flag(name)} needs a value: this setting of {env} is not a true/false switch")
    return True


def _shown(written: str, file: Path | None) -> str:
    return flag(written) if file is None else f"{written!r} in {file}"


def _unknown(env: str, written: str, file: Path | None, known: list[str]) -> str:
    if file is None:
        near = did_you_mean(flag(written), [flag(name) for name in known])
        help_ = near or f"; `train {env} --help` lists all options and settings"
        return f"there is no option {flag(written)}, and {env} has no such setting{help_}"
    near = did_you_mean(written.replace("-", "_"), known)
    return f"{file} has an unknown key {written!r}, which is not a setting of {env} either{near}"


def describe(env: str, own_names: Iterable[str]) -> list[tuple[str, str]]:
    """(option, default) of each setting of the environment, for the help.

    Names that the trainer has too are left out.
    """
    rows, own_names = [], set(own_names)
    for name, field in setting_fields(env).items():
        if name in own_names:
            continue
        kind = without_none(field.annotation)
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        shown = "|".join(map(str, choices)) or getattr(kind, "__name__", "text")
        default = as_text(field.default) if isinstance(field.default, bool | int | float | str | tuple) else ""
        rows.append((f"{flag(name)} <{shown}>", f"[default: {default}]" if default else ""))
    return rows
