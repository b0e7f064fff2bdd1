"""The settings of an installed environment, read from its source: importing it takes seconds, because of verifiers.

A name that is computed is reported as unknown, and the caller imports the environment to find out. Validators are not
read: what a setting's type refuses, a validator may still convert, and what the type accepts, a validator may refuse.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

from plumbob.trainer.config.options import kind_of

_ROOTS = {("pydantic", "BaseModel"), ("pydantic_config", "BaseConfig")}
"""(module, class) of the base classes at which the search for settings ends: they have none."""

_CONFIG = "TasksetConfig"
"""verifiers' base class of every taskset's configuration."""

_WITHOUT_FIELDS = ("Generic", "ABC", "Protocol", "object")

_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str}

_LIBRARIES = ("typing", "typing_extensions", "pydantic")
"""Modules whose names annotations and defaults may use: they are imported."""


class NotCertain(Exception):
    """The source alone does not tell the settings."""


@dataclass(frozen=True)
class Setting:
    """A setting of an environment. Example: `max_hops: int = Field(5, ge=1)`."""

    name: str
    kind: str
    """Its type or its choices, for the help. Example: "int"."""
    default: Any = None
    """Its default, if it is a plain value; else None."""
    annotation: Any = None
    """Its type with its bounds, in a form that pydantic accepts; None if the source does not tell."""


@dataclass
class _Module:
    """A parsed source file: its top-level definitions by name, each a class, a value, or where it is imported from."""

    name: str
    is_package: bool
    names: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Imported:
    """`from module import name`; with name None, the module itself."""

    module: str
    name: str | None


def read_settings(entry_point: EntryPoint) -> dict[str, Setting] | None:
    """Setting name -> setting, of the taskset class at this entry point; None if the source does not tell."""
    try:
        module, taskset = _find(_parsed(entry_point.module), entry_point.attr)
        found = _config_of(module, taskset)
        return None if found is None else _fields(*found)
    except (NotCertain, OSError, SyntaxError, ValueError, ImportError, RecursionError):
        return None


def _config_of(module: _Module, taskset: Any) -> tuple[_Module, ast.ClassDef] | None:
    """The configuration class in `class T(vf.Taskset[Task, Config])` or in one of T's base classes; None if none is."""
    if not isinstance(taskset, ast.ClassDef) or taskset.keywords:
        raise NotCertain
    found = None
    for base in taskset.bases:
        if isinstance(base, ast.Subscript):
            for argument in base.slice.elts if isinstance(base.slice, ast.Tuple) else [base.slice]:
                where, node = _evaluate(module, argument)
                if found is None and _is_config(where, node):
                    found = where, node
        where, node = _evaluate(module, base)
        if found is None and isinstance(node, ast.ClassDef) and node.name != "Taskset":
            found = _config_of(where, node)
    return found


def _is_config(module: _Module, node: Any) -> bool:
    """Whether a class is derived from verifiers' TasksetConfig. Raises NotCertain."""
    if not isinstance(node, ast.ClassDef):
        raise NotCertain
    if node.name == _CONFIG:
        return True
    bases = [base for base in node.bases if not _is_root(module, base) and _last_name(base) not in _WITHOUT_FIELDS]
    return any(_is_config(*_evaluate(module, base)) for base in bases)


def _is_root(module: _Module, base: ast.expr) -> bool:
    found = module.names.get(base.id) if isinstance(base, ast.Name) else None
    return isinstance(found, _Imported) and (found.module, found.name) in _ROOTS


def _fields(module: _Module, node: ast.ClassDef) -> dict[str, Setting]:
    """The fields of a pydantic class and of its base classes, the first base class's first. Raises NotCertain."""
    if node.decorator_list or node.keywords:
        raise NotCertain
    settings: dict[str, Setting] = {}
    for base in reversed(node.bases):
        if not _is_root(module, base):
            where, parent = _evaluate(module, base)
            if not isinstance(parent, ast.ClassDef):
                raise NotCertain
            settings |= _fields(where, parent)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if (setting := _setting(module, statement.target.id, statement)) is not None:
                settings[setting.name] = setting
        elif not isinstance(statement, ast.Expr | ast.Pass | ast.Assign | ast.FunctionDef | ast.AsyncFunctionDef):
            raise NotCertain
    return settings


def _setting(module: _Module, name: str, statement: ast.AnnAssign) -> Setting | None:
    """The setting that `name: annotation = value` declares; None if it declares none."""
    from pydantic.fields import FieldInfo

    if name.startswith("_") or name == "model_config" or _last_name(statement.annotation) == "ClassVar":
        return None
    try:
        default = _value(module, statement.value) if statement.value is not None else None
    except NotCertain:
        default = None
    bounds, default = (default, default.default) if isinstance(default, FieldInfo) else (None, default)
    plain = default if isinstance(default, bool | int | float | str | tuple | list | dict) else None
    try:
        annotation = _value(module, statement.annotation)
        if isinstance(annotation, str):
            annotation = _value(module, ast.parse(annotation, mode="eval").body)
    except NotCertain:
        return Setting(name, _shown(statement.annotation), plain)
    return Setting(name, kind_of(annotation), plain, annotation if bounds is None else Annotated[annotation, bounds])


def _value(module: _Module, node: ast.expr) -> Any:
    """The value of an expression of simple types, names of `_LIBRARIES`, literals and constants. Raises NotCertain."""
    try:
        return eval(compile(ast.Expression(node), module.name, "eval"), {"__builtins__": {"len": len}}, _Names(module))  # ty: ignore[invalid-argument-type]
    except Exception:
        raise NotCertain from None


class _Names:
    """Name -> its value in a module that is not imported, for `eval`."""

    def __init__(self, module: _Module) -> None:
        self.module = module

    def __getitem__(self, name: str) -> Any:
        found = self.module.names.get(name)
        if found is None:
            return _SIMPLE[name]
        if isinstance(found, ast.expr):
            return _value(self.module, found)
        if isinstance(found, _Imported):
            return _Attributes(found.module) if found.name is None else getattr(_Attributes(found.module), found.name)
        raise NotCertain


@dataclass(frozen=True)
class _Attributes:
    """Stands for a module in an expression: its attributes are read from its source, or are those of a library."""

    _module: str

    def __getattr__(self, name: str) -> Any:
        if self._module in _LIBRARIES:
            return getattr(importlib.import_module(self._module), name)
        return _Names(_parsed(self._module))[name]


def _shown(node: ast.expr) -> str:
    """The name of an annotation that is not understood. Example: Annotated[tuple[int, ...], f] -> "tuple"."""
    if isinstance(node, ast.Subscript) and _last_name(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
        return _shown(node.slice.elts[0])
    if isinstance(node, ast.BinOp):
        return _shown(node.left)
    return _last_name(node.value if isinstance(node, ast.Subscript) else node) or "text"


def _last_name(node: ast.expr) -> str:
    """`c` of the expressions `c`, `a.c`, `a.c[...]`; empty for others."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _evaluate(module: _Module, node: ast.expr) -> tuple[_Module, Any]:
    """(module, definition) that the expression `name` or `package.name` refers to. Raises NotCertain."""
    if isinstance(node, ast.Subscript):  # a generic base class
        node = node.value
    if isinstance(node, ast.Name):
        return _find(module, node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        found = module.names.get(node.value.id)
        if isinstance(found, _Imported) and found.name is None:
            return _find(_parsed(found.module), node.attr)
    raise NotCertain


def _find(module: _Module, name: str) -> tuple[_Module, Any]:
    """(module, definition) of a top-level name, in the module that defines it. Raises NotCertain."""
    found = module.names.get(name)
    if found is None:
        raise NotCertain
    if not isinstance(found, _Imported):
        return module, found
    if found.name is None:
        raise NotCertain
    return _find(_parsed(found.module), found.name)


@lru_cache
def _parsed(name: str) -> _Module:
    """The parsed source of a module, which is not imported. Raises NotCertain, OSError or SyntaxError."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    full = top
    for part in rest:
        full = f"{full}.{part}"
        spec = None if spec is None else PathFinder.find_spec(full, spec.submodule_search_locations)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise NotCertain
    module = _Module(name, spec.submodule_search_locations is not None)
    _collect(module, ast.parse(Path(spec.origin).read_bytes()).body)
    return module


def _collect(module: _Module, body: list[ast.stmt]) -> None:
    """Read the top-level definitions, also those under `if TYPE_CHECKING`."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            _collect(module, statement.body)
        elif isinstance(statement, ast.ClassDef):
            module.names[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            package = _package(module, statement.level)
            origin = ".".join(part for part in (package, statement.module) if part)
            for alias in statement.names:
                module.names[alias.asname or alias.name] = _Imported(origin, alias.name)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname or "." not in alias.name:
                    module.names[alias.asname or alias.name] = _Imported(alias.name, None)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            if isinstance(target := statement.targets[0], ast.Name):
                module.names[target.id] = statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            module.names[statement.target.id] = statement.value


def _package(module: _Module, level: int) -> str:
    """The package that the dots of a relative import mean; empty for an absolute import."""
    if level == 0:
        return ""
    parts = module.name.split(".")
    return ".".join(parts[: len(parts) - level + (1 if module.is_package else 0)])
