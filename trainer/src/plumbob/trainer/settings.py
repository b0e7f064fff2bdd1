"""Settings that are a frozen dataclass, a command line and a TOML file at once. Imports nothing heavy.

A field made by `option` is also `--its-name`; unset options are None on the command line, so that a file's values hold.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from plumbob.hub.errors import UserError


def option(default: Any, help: str, *names: str) -> Any:
    """A field that is also a command-line option `--name-with-dashes`; `names` adds spellings."""
    return field(default=default, metadata={"help": help, "names": names})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


def check_types(settings: Any) -> None:
    """Check every field of a frozen dataclass against its type, in place. Raises UserError that names the option."""
    hints = get_type_hints(type(settings))
    for f in dataclasses.fields(settings):
        object.__setattr__(settings, f.name, _coerce(f.name, getattr(settings, f.name), hints[f.name]))


def to_toml(values: Mapping[str, Any]) -> str:
    """Settings as a TOML file that `read_toml` reads back; what is None is left out."""
    import tomli_w

    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return tomli_w.dumps({k: v for k, v in listed.items() if v is not None})


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Check a value against its field's type; a TOML file may hold an integer where a float is meant."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        require(value in choices, f"{flag(name)} must be one of {', '.join(choices)}, not {value!r}")
        return value
    if get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), f"{flag(name)} must be a list, not {value!r}")
        return tuple(str(item) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    matches = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    require(matches, f"{flag(name)} must be of type {hint.__name__}, not {value!r}")
    return value


def read_toml(path: Path, cls: Any) -> dict[str, Any]:
    """Settings of the dataclass `cls` from a TOML file. Raises UserError for a missing or broken file and for an unknown key."""
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            raise UserError(f"{path} has an unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return values


def resolve(
    cls: Any, given: Mapping[str, Any], fixed: Sequence[str], *, kind: str, directory_is: str
) -> tuple[Any, Path | None]:
    """What a command line means: the settings, of the dataclass `cls`, and the directory to go on with.

    `given`: the options by name, "config_file" and "resume" among them; what is None was not given. Flags win over the
    file, and over the saved configuration of the directory, of which `fixed` cannot change. `kind` and `directory_is`:
    what is gone on with and what its directory is called, as "run" and "a run directory". Raises UserError.
    """
    values = {name: value for name, value in given.items() if value is not None}
    resume, config_file = values.pop("resume", None), values.pop("config_file", None)
    if resume is None:
        saved = {} if config_file is None else read_toml(Path(config_file), cls)
        return cls(**{**saved, **values}), None
    require(config_file is None, f"--resume reads the {kind}'s own configuration; leave --config out")
    directory = Path(resume)
    path = directory / "config.toml"
    require(path.is_file(), f"{directory} is not {directory_is}: it has no config.toml")
    saved = read_toml(path, cls)
    before, now = cls(**saved), cls(**{**saved, **values})
    for name in fixed:
        unchanged = getattr(now, name) == getattr(before, name)
        require(unchanged, f"--resume goes on with the {kind}'s own {flag(name)}; start a new {kind} to change it")
    return now, directory


def options(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    """(field, annotation for typer) of every setting that is an option. Unset options are None, so that a file's hold."""
    import typer

    hints = get_type_hints(cls)
    result = []
    for f in dataclasses.fields(cls):
        if "help" not in f.metadata:
            continue
        hint = hints[f.name]
        if get_origin(hint) is tuple:
            hint = list[str]
        default = (
            "" if f.default in (None, ()) else f" [default: {str(f.default).lower() if hint is bool else f.default}]"
        )
        names = (
            [flag(f.name), *f.metadata["names"]]
            if hint is not bool
            else [f"{flag(f.name)}/--no-{f.name.replace('_', '-')}"]
        )
        if f.name == "env_args":
            names = list(f.metadata["names"])
        result.append(
            (f, Annotated[hint | None, typer.Option(*names, help=f.metadata["help"] + default, show_default=False)])
        )
    return result


def as_command(function: Callable[..., int], first: Mapping[str, Any], cls: Any) -> Callable[..., int]:
    """Give a function of keyword arguments the signature that typer reads: `first`, then every option of `cls`."""
    annotations = [*first.items(), *((f.name, hint) for f, hint in options(cls))]
    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in annotations
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = dict(annotations)
    return function
