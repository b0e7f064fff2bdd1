"""The settings of an installed environment, read from its source: importing it takes seconds, because of verifiers.

A name that is computed is reported as unknown, and the caller imports the environment to find out. Validators are not
run: what a setting's type accepts, one may refuse, and what the type refuses, one that runs before may still convert.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from dataclasses import dataclass, field, replace
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
    converted: bool = False
    """Whether a validator of the class may convert what the type refuses."""


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
        found = _config_of(getattr(_Attributes(entry_point.module), entry_point.attr))
        return None if found is None else _fields(found)
    except (NotCertain, OSError, SyntaxError, ValueError, LookupError, ImportError, RecursionError, TypeError):
        return None


@dataclass(frozen=True)
class _Class:
    """A class in the source of a module that is not imported. `arguments`: those in brackets, of a generic base class."""

    module: _Module
    node: ast.ClassDef
    arguments: tuple[Any, ...] = ()

    def __getitem__(self, arguments: Any) -> _Class:
        return replace(self, arguments=arguments if isinstance(arguments, tuple) else (arguments,))

    def bases(self) -> list[_Class]:
        """Its base classes, without those at which the search for settings ends. Raises NotCertain."""
        found = []
        for base in self.node.bases:
            named = self.module.names.get(base.id) if isinstance(base, ast.Name) else None
            is_root = isinstance(named, _Imported) and (named.module, named.name) in _ROOTS
            if not is_root and _last_name(base) not in _WITHOUT_FIELDS:
                found.append(_value(self.module, base))
        if not all(isinstance(base, _Class) for base in found):
            raise NotCertain
        return found


def _config_of(taskset: Any) -> _Class | None:
    """The configuration class in `class T(vf.Taskset[Task, Config])` or in one of T's base classes; None if none is."""
    if not isinstance(taskset, _Class) or taskset.node.keywords:
        raise NotCertain
    found = None
    for base in taskset.bases():
        found = found or next((argument for argument in base.arguments if _is_config(argument)), None)
        if found is None and base.node.name != "Taskset":
            found = _config_of(base)
    return found


def _is_config(found: Any) -> bool:
    """Whether a class is derived from verifiers' TasksetConfig. Raises NotCertain."""
    if not isinstance(found, _Class):
        raise NotCertain
    return found.node.name == _CONFIG or any(map(_is_config, found.bases()))


def _fields(config: _Class) -> dict[str, Setting]:
    """The fields of a pydantic class and of its base classes, the first base class's first. Raises NotCertain."""
    if config.node.decorator_list or config.node.keywords:
        raise NotCertain
    settings: dict[str, Setting] = {}
    for base in reversed(config.bases()):
        settings |= _fields(base)
    for statement in config.node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if (setting := _setting(config.module, statement.target.id, statement)) is not None:
                settings[setting.name] = setting
        elif not isinstance(statement, ast.Expr | ast.Pass | ast.Assign | ast.FunctionDef | ast.AsyncFunctionDef):
            raise NotCertain
    if any(map(_converts, config.node.body)):
        settings = {name: replace(setting, converted=True) for name, setting in settings.items()}
    return settings


def _converts(statement: ast.stmt) -> bool:
    """Whether values are read in another way than by the fields' types: a validator that runs first, or `model_config`."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return "model_config" in ast.unparse(statement)
    for decorator in getattr(statement, "decorator_list", ()):
        call, name = isinstance(decorator, ast.Call), _last_name(getattr(decorator, "func", decorator))
        mode = [ast.unparse(word.value) for word in decorator.keywords if word.arg == "mode"] if call else []
        if name.endswith("validator") and mode != ["'after'"] and not (name == "field_validator" and not mode):
            return True
    return False


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
        if isinstance(annotation, _Class):
            raise NotCertain
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
        if isinstance(found, ast.ClassDef):
            return _Class(self.module, found)
        return _Attributes(found.module) if found.name is None else getattr(_Attributes(found.module), found.name)


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
