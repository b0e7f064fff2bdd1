"""The settings of an installed environment, read from its source: importing it takes seconds, because of verifiers.

A name that is computed is reported as unknown, and the caller imports the environment to find out. Validators are not
read: what a setting's type refuses, a validator may still convert, and what the type accepts, a validator may refuse.
"""

from __future__ import annotations

import ast
import importlib.util
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from plumbob.trainer.config.options import kind_of

_ROOTS = {("pydantic", "BaseModel"), ("pydantic_config", "BaseConfig")}
"""(module, class) of the base classes at which the search for settings ends: they have none."""

_CONFIG = "TasksetConfig"
"""verifiers' base class of every taskset's configuration."""

_WITHOUT_FIELDS = ("Generic", "ABC", "Protocol", "object")

_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")
"""Arguments of pydantic's Field that limit values."""

_SIMPLE = {"int": int, "float": float, "bool": bool, "str": str}


# As values, because these types are made from what the source says.
_ANNOTATED: Any = Annotated
_LITERAL: Any = Literal
_UNION: Any = Union


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
    if name.startswith("_") or name == "model_config" or _last_name(statement.annotation) == "ClassVar":
        return None
    value, bounds = statement.value, {}
    if isinstance(value, ast.Call) and _last_name(value.func) == "Field":
        bounds, value = _read_field(module, value)
    try:
        default = _constant(module, value) if value is not None else None
    except NotCertain:
        default = None
    try:
        annotation = _annotation(module, statement.annotation)
    except NotCertain:
        return Setting(name, _shown(statement.annotation), default)
    return Setting(name, kind_of(annotation), default, _bounded(annotation, bounds))


def _bounded(annotation: Any, bounds: dict[str, Any]) -> Any:
    from pydantic import Field

    return _ANNOTATED[annotation, Field(**bounds)] if bounds else annotation


def _read_field(module: _Module, call: ast.Call) -> tuple[dict[str, Any], ast.expr | None]:
    """(the bounds that are known, default) of a call of pydantic's Field."""
    default = call.args[0] if call.args else None
    bounds: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg == "default":
            default = keyword.value
        elif keyword.arg in _BOUNDS:
            with suppress(NotCertain):
                bounds[keyword.arg] = _constant(module, keyword.value)
    return bounds, default


def _annotation(module: _Module, node: ast.expr) -> Any:
    """The type that an annotation means, with the bounds that are known. Raises NotCertain."""
    if isinstance(node, ast.Constant):
        if node.value is None:
            return None
        if isinstance(node.value, str):
            return _annotation(module, ast.parse(node.value, mode="eval").body)
        raise NotCertain
    if isinstance(node, ast.Name) and node.id not in module.names:
        if node.id in _SIMPLE:
            return _SIMPLE[node.id]
        raise NotCertain
    if isinstance(node, ast.Name | ast.Attribute):
        where, value = _evaluate(module, node)
        if not isinstance(value, ast.expr):
            raise NotCertain
        return _annotation(where, value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _UNION[_annotation(module, node.left), _annotation(module, node.right)]
    if isinstance(node, ast.Subscript):
        return _generic(module, _last_name(node.value), node.slice)
    raise NotCertain


def _generic(module: _Module, name: str, inside: ast.expr) -> Any:
    """Like `_annotation`, for Literal[...], Optional[...], Union[...] and Annotated[..., Field(...)]."""
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name == "Literal":
        return _LITERAL[tuple(_literal(part) for part in parts)]
    if name == "Annotated":
        annotation = _annotation(module, parts[0])
        for part in parts[1:]:
            if not (isinstance(part, ast.Call) and _last_name(part.func) == "Field"):
                raise NotCertain
            annotation = _bounded(annotation, _read_field(module, part)[0])
        return annotation
    if name in ("Optional", "Union"):
        return _UNION[(*(_annotation(module, part) for part in parts), *((None,) if name == "Optional" else ()))]
    raise NotCertain


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


def _constant(module: _Module, node: ast.expr) -> Any:
    """A plain value: a literal, a constant by its name, or the length of a constant list. Raises NotCertain."""
    if isinstance(node, ast.Name | ast.Attribute):
        where, value = _evaluate(module, node)
        if not isinstance(value, ast.expr):
            raise NotCertain
        return _constant(where, value)
    if isinstance(node, ast.Call) and _last_name(node.func) == "len" and len(node.args) == 1:
        return len(_constant(module, node.args[0]))
    return _literal(node)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise NotCertain from None


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
