"""An environment's own settings among the trainer's: `--noise 0.5`, and `noise = 0.5` in a file.

The environment is loaded only when an option or a key occurs that the trainer does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from plumbob.hub import UserError, find
from plumbob.trainer.settings import as_text, did_you_mean, flag, without_none

OLDER_NAMES = {
    "noise_rate": ("noise",),
    "retriever_name": ("retriever",),
    "retriever_top_k": ("top_k", "max_top_k"),
}
"""What the settings of earlier environments are called now: the first that the environment has."""

WITHOUT_EFFECT = {
    "eval_accumulation_steps": "an evaluation keeps no tensors to move off the device",
    "log_on_each_node": "only the first process logs",
    "no_log_on_each_node": "only the first process logs",
    "n_env_jobs": "rollouts are asynchronous in one process; --max-concurrent bounds them",
    "few_shot_prob": "prompts hold no solved examples",
}
"""Options of earlier command lines -> why they do nothing here. Accepted, so that old scripts run."""

FLAGS_WITHOUT_EFFECT = ("log_on_each_node", "no_log_on_each_node")
"""Those that take no value."""

_RESERVED = ("id", "task")
"""Fields of every taskset's configuration that are no settings of one."""


class _Names:
    """The environment's settings; loaded at the first use, which takes seconds."""

    def __init__(self, env: str) -> None:
        self.env = env
        self._fields: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        if self._fields is None:
            self._fields = setting_fields(self.env)
        return self._fields


def setting_fields(env: str) -> dict[str, Any]:
    """Name -> pydantic field of each setting. Raises UserError if there is no such environment, or it does not load."""
    environment = find(env)
    environment.load()
    import verifiers.v1 as vf

    fields = vf.taskset_config_type(environment.entry_point.module).model_fields
    return {name: field for name, field in fields.items() if name not in _RESERVED}


def settle(env: str, strangers: Mapping[str, Any], file: Path | None, own_names: Iterable[str]) -> dict[str, str]:
    """The environment's settings, as text, that options (or a file's keys) unknown to the trainer are.

    A value of None is an option without one. `own_names`: what the trainer's own settings are called, for "did you
    mean". Raises UserError for a name that neither has.
    """
    names, settings = _Names(env), {}
    for written, value in strangers.items():
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
            value = _alone(env, found, fields[found].annotation)
        if found in settings:
            raise UserError(f"{env}: the setting {found!r} is given twice, once as {_shown(written, file)}")
        settings[found] = as_text(value)
        _check(env, found, settings[found], flag(written) if file is None else f"{file}: {written}")
    return settings


def _check(env: str, name: str, text: str, written: str) -> None:
    """Raises UserError if the environment refuses this value by itself; how values fit together is seen when it loads."""
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


def _alone(env: str, name: str, annotation: Any) -> bool:
    if annotation is not bool:
        raise UserError(f"{flag(name)} needs a value: it is a setting of {env} that is not true or false")
    return True


def _shown(written: str, file: Path | None) -> str:
    return flag(written) if file is None else f"{written!r} in {file}"


def _unknown(env: str, written: str, file: Path | None, known: list[str]) -> str:
    if file is None:
        near = did_you_mean(flag(written), [flag(name) for name in known])
        help_ = near or f"; `train {env} --help` lists both"
        return f"there is no option {flag(written)}, and {env} has no such setting{help_}"
    near = did_you_mean(written.replace("-", "_"), known)
    return f"{file} has an unknown key {written!r}, which is no setting of {env} either{near}"


def describe(env: str, own_names: Iterable[str]) -> list[tuple[str, str]]:
    """(option, its default) of each setting, for the help; without those that are the trainer's own by name."""
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
