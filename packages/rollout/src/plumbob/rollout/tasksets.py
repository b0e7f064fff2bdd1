"""Make a taskset from its class and a user's settings, with verifiers' public configuration types."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import verifiers.v1 as vf
from pydantic import ValidationError


def make_taskset(cls: type[vf.Taskset], module: str, settings: dict[str, Any]) -> vf.Taskset:
    """Make a taskset of class `cls` with these settings. A text value is converted to its field's type.

    A setting that has settings of its own, such as `task`, may be a JSON object.

    Raises ValueError with one sentence that names the wrong setting.
    """
    config_type = vf.taskset_config_type(module)
    for name in settings:
        if name not in config_type.model_fields:
            near = difflib.get_close_matches(name, config_type.model_fields, n=1)
            raise ValueError(f"there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        return cls(config_type.model_validate({"id": module, **with_objects(module, settings)}))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{field + ': ' if field else ''}{first['msg'].removeprefix('Value error, ')}") from None


def with_objects(module: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with a text that is a JSON object as that object. Example: {"task": '{"power": 2}'}.

    Settings that are texts themselves stay as they are.
    """
    fields = vf.taskset_config_type(module).model_fields
    return {
        name: value if fields[name].annotation is str else _object_or_same(value) for name, value in settings.items()
    }


def _object_or_same(value: Any) -> Any:
    if not (isinstance(value, str) and value.startswith("{")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def each_task(taskset: vf.Taskset) -> Iterator[vf.Task]:
    """The tasks in order, loaded as they are read. Raises ValueError if `load` gives something else, and whatever it raises."""
    try:
        yield from taskset
    except AttributeError as error:
        if error.name != "with_data":
            raise
        raise ValueError(
            f"load() must yield tasks, of type verifiers.v1.Task, not {type(error.obj).__name__}"
        ) from None


def setting_names(module: str) -> list[str]:
    """The names of a taskset's settings. `module`: its id."""
    return list(vf.taskset_config_type(module).model_fields)


def setting_choices(module: str, name: str) -> tuple[str, ...] | None:
    """The literal values that a setting accepts; None if there is no such setting, () if its type is not a Literal."""
    field = vf.taskset_config_type(module).model_fields.get(name)
    if field is None:
        return None
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def shared_toolsets(taskset: vf.Taskset) -> list[vf.Toolset]:
    """The taskset's own toolsets, one instance of each.

    All rollouts use these instances, and each sees its own state.
    """
    return type(taskset).toolsets(taskset.config)
