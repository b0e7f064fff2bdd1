"""Settings defined once, as a frozen dataclass, for Python, the command line and TOML files. Imports nothing heavy.

A field made by `option` is also the command-line option `--field-name`, and the docstring below the field is its help. An
option that is not given is None, so that the value in the file, or else the field's default, applies.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import operator
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from plumbob.console import UserError
from plumbob.trainer.config.removed import REMOVED_VALUES, accept_removed, under_new_names, without_removed

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}

THE_RUN = "The run"
"""Heading of the options that come before the first field with a group."""

UNKNOWN_OPTIONS = "unknown_options"
"""Key under which `resolve` gets the command-line options that no field has, each as "name=value" or "name"."""

Settle = Callable[[Sequence[str], Mapping[str, Any], "Path | None"], dict[str, str]]
"""(environments, options or keys that no field has, their file or None) -> settings of the environment.

Raises UserError.
"""


BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
    "at_most": ("at most", operator.le),
}
"""Keyword of `option` -> (the bound in words, the comparison of value and bound that must hold)."""


def option(
    default: Any,
    *names: str,
    group: str | None = None,
    bare: Any = None,
    off: Any = None,
    choices: tuple[str, ...] = (),
    **bounds: float,
) -> Any:
    """A dataclass field that is also a command-line option `--name-with-dashes`. `names`: further spellings.

    `group`: heading in the help for this field and the following ones. `bare`: value of `--name` without a value, and
    of `true` in a file. `off`: value of `--no-name`, and of `false` in a file. `choices`: the allowed texts, if the
    type is not a Literal. `bounds`: limits by the keywords in `BOUNDS`, for every value but None.

    Example: `min_p: float = option(0.0, at_least=0, below=1)`.
    """
    about = {"names": names, "group": group, "bare": bare, "off": off}
    return field(default=default, metadata={**about, "choices": choices, "bounds": bounds})


def settable(cls: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a settings class without those of its base classes that mean nothing to its command (`LACKS`)."""
    return [f for f in dataclasses.fields(cls) if f.name not in getattr(cls, "LACKS", ())]


@lru_cache
def helps(cls: Any) -> dict[str, str]:
    """Field -> its help: the docstring below it in the source of the nearest class that has one."""
    found: dict[str, str] = {}
    for base in [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]:
        tree = ast.parse(Path(inspect.getfile(base)).read_text(encoding="utf-8"))
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
        for declared, below in itertools.pairwise(body):
            if (
                isinstance(declared, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[ast.unparse(declared.target)] = " ".join(str(below.value.value).split())
    return found


def grouped(cls: Any) -> dict[str, list[dataclasses.Field[Any]]]:
    """Heading -> the options under it, in the order of the help."""
    groups: dict[str, list[dataclasses.Field[Any]]] = {THE_RUN: []}
    heading = THE_RUN
    absent = set(getattr(cls, "LACKS", ()))
    for f in dataclasses.fields(cls):
        heading = f.metadata.get("group") or heading
        if "names" in f.metadata and f.name not in absent:
            groups.setdefault(heading, []).append(f)
    return groups


def choices_of(f: dataclasses.Field[Any], hint: Any) -> tuple[str, ...]:
    """The allowed texts of a field that is a choice; () for any other field."""
    kind = without_none(hint)
    return get_args(kind) if get_origin(kind) is Literal else f.metadata.get("choices", ())


def flag(name: str) -> str:
    """The command-line option of a field. Example: flag("max_steps") == "--max-steps"."""
    return "--" + name.replace("_", "-")


def require(holds: bool, message: str) -> None:
    """Raise UserError with this message unless `holds`."""
    if not holds:
        raise UserError(message)


def check_run_name(name: str | None) -> None:
    """Raise UserError unless the name of a run directory is a plain folder name: it is made inside --output-dir."""
    plain = name is None or (name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"})
    require(plain, f"--run-name is the name of a folder in --output-dir and cannot hold slashes, so not {name!r}")


def did_you_mean(name: str, known: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """A hint to append to an error message, with the known name that is most similar, as `shown`; empty if none is."""
    near = [one for one in known if one.endswith(f"_{name}")] or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {shown(near[0])!r}?" if near else ""


def check_values(settings: Any) -> None:
    """Check and convert, in place, every field of a frozen dataclass by its type and bounds.

    Raises UserError with the option.
    """
    hints = get_type_hints(type(settings))
    for f in dataclasses.fields(settings):
        value = _coerce(f.name, getattr(settings, f.name), hints[f.name], choices_of(f, hints[f.name]))
        object.__setattr__(settings, f.name, value)
        bounds = f.metadata.get("bounds") or {}
        if value is not None and not all(BOUNDS[kind][1](value, bound) for kind, bound in bounds.items()):
            wanted = " and ".join(f"{BOUNDS[kind][0]} {bound:g}" for kind, bound in bounds.items())
            raise UserError(f"{flag(f.name)} must be {wanted}, not {value}")


def to_toml(values: Mapping[str, Any]) -> str:
    """Settings as the text of a TOML file that `read_toml` can read. Settings that are None are left out."""
    import tomli_w

    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return tomli_w.dumps({k: v for k, v in listed.items() if v is not None})


def without_none(hint: Any) -> Any:
    """The type `T` of a hint `T | None`; any other hint unchanged."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint


def _coerce(name: str, value: Any, hint: Any, choices: tuple[str, ...]) -> Any:
    """A value converted to its field's type: in a TOML file a float may be written as an integer. Raises UserError."""
    if value is None and hint != without_none(hint):
        return None
    hint = without_none(hint)
    if choices:
        near = did_you_mean(str(value), choices)
        if not _is_kept(name, value):
            raise UserError(f"{flag(name)} {value} is gone: {REMOVED_VALUES[name, value]}")
        require(value in choices, f"{flag(name)} must be one of {', '.join(choices)}, not {value!r}{near}")
        return value
    if get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), f"{flag(name)} must be a list, not {value!r}")
        return tuple(str(item) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    matches = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    require(matches, f"{flag(name)} must be {KINDS[hint]}, not {value!r}")
    require(hint is not float or math.isfinite(value), f"{flag(name)} must be a finite number, not {value}")
    require(hint is not int or abs(value) < 2**63, f"{flag(name)} must be a number of 64 bits, not {value}")
    return value


def _read_text(name: str, text: str, hint: Any) -> Any:
    """A value from its text on the command line.

    Raises UserError that names the option, the text and what is allowed.
    """
    kind = without_none(hint)
    try:
        return kind(text) if kind in (int, float) else text
    except ValueError:
        raise UserError(f"{flag(name)} must be {KINDS[kind]}, not {text!r}") from None


def spellings(cls: Any) -> dict[str, str]:
    """Every spelling of every setting of `cls`, with underscores -> its field. Example: {"beta": "kl_beta", ...}"""
    names = {f.name: f.name for f in settable(cls)}
    for f in settable(cls):
        others = [name for name in f.metadata.get("names", ()) if name.startswith("--")]
        names |= {name.removeprefix("--").replace("-", "_"): f.name for name in others}
    return names


def read_toml(path: Path, cls: Any) -> dict[str, Any]:
    """Settings of the dataclass `cls` from a TOML file, without those, and without values, that are gone.

    Raises UserError for a missing or invalid file or an unknown key.
    """
    values, unknown_options = read_file(path, cls)
    for key in without_removed(unknown_options):
        raise UserError(f"{path} has an unknown key {key!r}{did_you_mean(key, list(spellings(cls)))}")
    return {key: value for key, value in values.items() if _is_kept(key, value)}


def _is_kept(name: str, value: Any) -> bool:
    return not isinstance(value, str) or (name, value) not in REMOVED_VALUES


def read_file(path: Path, cls: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a TOML file: (settings of the dataclass `cls` by field, keys that no field has). Raises UserError.

    Settings of the environment may be a list `env_args`, a table `[env_args]`, or a table `[env]` that also has its
    `name`.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
    except FileNotFoundError:
        raise UserError(f"there is no config file {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    if hasattr(cls, "COMMAND"):
        _check_command(path, content.pop("command", cls.COMMAND), cls.COMMAND)
    known, fields = spellings(cls), {f.name: f for f in dataclasses.fields(cls)}
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    unknown_options: dict[str, Any] = {}
    for key, value in _whole_template(content).items():
        name = known.get(key.replace("-", "_"))
        if name is None:
            unknown_options[key] = value
            continue
        before = written.setdefault(name, key)
        require(before == key, f"{path} gives one option twice, as {before!r} and as {key!r}; leave one of them out")
        if name == "env" and isinstance(value, dict):
            unknown_options |= {k: v for k, v in value.items() if k != "name"}
            if "name" in value:
                values["env"] = value["name"]
            continue
        values[name] = _from_file(fields[name], value)
    return values, unknown_options


def settings_in(text: str, cls: Any) -> dict[str, Any]:
    """Settings of the dataclass `cls` by field, from the text that `to_toml` made of them, without those that are gone.

    A key that no field has stays as it is. Raises ValueError for a text that is no TOML.
    """
    known = spellings(cls)
    values = _whole_template(tomllib.loads(text))
    kept = {known.get(k, k): v for k, v in without_removed(values).items() if k != "command" and _is_kept(k, v)}
    return kept | under_new_names(values)


def command_of(path: Path) -> str:
    """The command whose run saved this config.toml; "train" if it does not say, or cannot be read."""
    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8")).get("command", "train"))
    except (OSError, ValueError):
        return "train"


def _check_command(path: Path, command: object, own: str | None) -> None:
    """Raise UserError if a file of settings was saved by a run of another command than `own`; None: an evaluation."""
    if command != own:
        raise UserError(
            f"{path} holds the settings of a run of `{command}`, not of {f'`{own}`' if own else 'an evaluation'}; to go on "
            f"with that run:  {command} --resume {path.parent}"
        )


def _from_file(f: dataclasses.Field[Any], value: Any) -> Any:
    if isinstance(value, bool) and f.metadata.get("bare") is not None:
        return f.metadata["bare"] if value else f.metadata["off"]
    return _pairs(value) if f.name == "env_args" else value


def _pairs(value: Any) -> Any:
    """A table of a TOML file as texts "key=value"; any other value as it is."""
    return tuple(f"{key}={as_text(v)}" for key, v in value.items()) if isinstance(value, dict) else value


def _whole_template(content: Mapping[str, Any]) -> dict[str, Any]:
    """A file's settings with what they say of the chat template in one list: older files have a Jinja file apart."""
    names = {key: key.replace("-", "_") for key in content}
    found = [key for name in ("chat_template", "chat_template_args") for key in content if names[key] == name]
    said = [[value] if isinstance(value, str) else value for value in (_pairs(content[key]) for key in found)]
    kept = {key: value for key, value in content.items() if key not in found}
    return kept | ({"chat_template": [part for value in said for part in value]} if found else {})


def as_text(value: Any) -> str:
    """A value of a TOML file as it is written on the command line: items of lists and tables are joined by commas."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(as_text(item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{key}={as_text(item)}" for key, item in value.items())
    return str(value)


def resolve(
    cls: Any,
    given: Mapping[str, Any],
    fixed: Sequence[str],
    *,
    kind: str,
    directory_is: str,
    settle: Settle | None = None,
    lost: Mapping[str, Any] | None = None,
) -> tuple[Any, Path | None]:
    """Resolve a command line to (settings as the dataclass `cls`, the directory to resume from or None).

    `given`: the options by name, "config_file" and "resume" among them; None means not given. Options override the file
    of --config, or the saved configuration of the resumed directory. `fixed`: settings that cannot change on resuming.
    `kind` and `directory_is`: words for messages, such as "run" and "a run directory". `settle`: turns options and keys
    that `cls` does not have into settings of the environment. `lost`: settings that the configuration of the resumed
    directory lacks, where another file still has them. Raises UserError.
    """
    hints = get_type_hints(cls)
    values = {
        name: _read_text(name, value, hints[name]) if isinstance(value, str) and name in hints else value
        for name, value in given.items()
        if value is not None and value not in ([], ())  # an option that may be repeated, and was not given
    }
    resume, config_file = values.pop("resume", None), values.pop("config_file", None)
    parts = (text.partition("=") for text in values.pop(UNKNOWN_OPTIONS, ()))
    unknown_options = {name: value if equals else None for name, equals, value in parts}
    path, saved, unknown_keys = None, {}, {}
    if resume is not None:
        require(config_file is None, f"--resume reads the {kind}'s own configuration; leave --config out")
        path = Path(resume) / "config.toml"
        require(path.is_file(), f"{resume} is not {directory_is}: it has no config.toml")
        if not hasattr(cls, "COMMAND"):
            with suppress(OSError, ValueError):
                _check_command(path, tomllib.loads(path.read_text()).get("command"), None)
    elif config_file is not None:
        path = Path(config_file)
    if path is not None and settle is None:
        saved = read_toml(path, cls)
        for key, value in read_file(path, cls)[1].items():
            accept_removed(key, value, f"{key!r} in {path}")
    elif path is not None:
        saved, unknown_keys = read_file(path, cls)
    saved = {**(lost or {}), **{k: v for k, v in saved.items() if k not in values or _is_kept(k, v)}}
    if settle is not None and (unknown_options or unknown_keys):
        asked = ("envs", values), ("env", values), ("envs", saved), ("mixture", saved), ("env", saved)
        named = next((found[key] for key, found in asked if found.get(key)), getattr(cls, "env", ()))
        envs = [named] if isinstance(named, str) else list(named)
        _add_env_args(saved, settle(envs, unknown_keys, path))
        _add_env_args(values, settle(envs, unknown_options, None))
    if "env_args" in saved and "env_args" in values:
        values["env_args"] = _merged(saved["env_args"], values["env_args"])
    merged = {**saved, **values}
    if merged.get("num_epochs") is not None:
        merged.setdefault("max_steps", -1)  # passes alone ask for no number of steps
    before = _of_file(cls, saved, path) if resume is not None else None
    try:
        now = cls(**merged)
    except UserError:
        if path is not None and merged == saved:
            _of_file(cls, saved, path)
        raise
    if resume is None:
        return now, None
    for name in fixed:
        unchanged = getattr(now, name) == getattr(before, name)
        require(unchanged, f"--resume keeps the {kind}'s own {flag(name)}; start a new {kind} to change it")
    return now, Path(resume)


def _of_file(cls: Any, values: Mapping[str, Any], path: Path | None) -> Any:
    """The settings that a file has. Raises UserError that names the file."""
    try:
        return cls(**values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _add_env_args(values: dict[str, Any], settings: Mapping[str, str]) -> None:
    if settings:
        values["env_args"] = _merged(values.get("env_args", ()), [f"{key}={value}" for key, value in settings.items()])


def _merged(first: Sequence[str], then: Sequence[str]) -> tuple[str, ...]:
    """Pairs "key=value" of both lists, each key once: the last pair of a key replaces earlier ones."""
    pairs = {str(pair).partition("=")[0]: str(pair) for pair in first}
    return tuple((pairs | {str(pair).partition("=")[0]: str(pair) for pair in then}).values())


def options(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    """(field, annotation for typer) of every field made by `option`. Options that are not given are None.

    Typer reads numbers and choices as text; `resolve` converts them, so that error messages name the option and its
    values.
    """
    import typer

    hints = get_type_hints(cls)
    result = []
    for f in (f for group in grouped(cls).values() for f in group):
        hint = without_none(hints[f.name])
        names = [flag(f.name), *f.metadata["names"]]
        if hint is bool:
            names = [f"{flag(f.name)}/--no-{f.name.replace('_', '-')}", *f.metadata["names"]]
        elif f.name == "env_args":
            names = list(f.metadata["names"])
        shown = f.default if hint is not bool else str(f.default).lower()
        default = "" if f.default in (None, ()) else f" [default: {shown}]"
        metavar = None if hint is bool else _metavar(hint, choices_of(f, hint))
        read_as: Any = bool if hint is bool else list[str] if get_origin(hint) is tuple else str
        info = typer.Option(*names, help=helps(cls)[f.name] + default, show_default=False, metavar=metavar)
        result.append((f, Annotated[read_as | None, info]))
    return result


def kind_of(hint: Any) -> str:
    """A type for the help: its choices, or the name of the type without None. Example: kind_of(int | None) == "int"."""
    kind = without_none(hint)
    if get_origin(kind) is Annotated:
        return kind_of(get_args(kind)[0])
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return "|".join(map(str, choices)) or getattr(kind, "__name__", "text")


def _metavar(hint: Any, choices: tuple[str, ...]) -> str:
    if choices:
        return f"<{'|'.join(choices)}>"
    return {int: "<int>", float: "<float>", str: "<text>"}.get(hint, "<text>")


def argument(kind: Any, *names: str, help: str, metavar: str | None = None) -> Any:
    """An option `names` of a command that is no setting, for `as_command`; without it the command gets None."""
    import typer

    return Annotated[kind | None, typer.Option(*names, help=help, metavar=metavar)]


def as_command(function: Callable[..., int], first: Mapping[str, Any], cls: Any) -> Callable[..., int]:
    """Give a function of keyword arguments the signature that typer reads: `first`, then every option of `cls`."""
    annotations = [*first.items(), *((f.name, hint) for f, hint in options(cls))]
    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in annotations
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = dict(annotations)
    return function
