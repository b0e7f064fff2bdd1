"""What is read from an environment's source agrees with what its imported class does: verifiers' own pydantic models."""

import importlib
import sys
import textwrap
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.hub import find
from plumbob.trainer.config import environment as config_environment
from plumbob.trainer.config.environment import _refusal, known_settings
from plumbob.trainer.config.environment_source import _parsed, read_settings
from plumbob.trainer.config.options import kind_of
from pydantic import ValidationError

OURS = ("lookup", "gsm8k", "musique")
UPSTREAM = [
    EntryPoint(name, f"verifiers.v1.tasksets.{name}:{cls}", "")
    for name, cls in [
        ("openenv", "OpenEnvTaskset"),
        ("nemo_gym", "NeMoGymTaskset"),
        ("harbor", "HarborTaskset"),
    ]
]
ENTRY_POINTS = [*(find(name).entry_point for name in OURS), *UPSTREAM]

WRITTEN = {
    "plain": """
        import verifiers.v1 as vf
        class Config(vf.TasksetConfig):
            size: int = 3
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
    "names imported one by one, and under an alias": """
        from __future__ import annotations
        from typing import Literal as L, Optional
        from verifiers.v1 import Task, Taskset as Base, TasksetConfig as Parent
        Kind = L["a", "b"]
        class Config(Parent):
            kind: Kind = "a"
            other: "Optional[int]" = None
        class T(Base[Task, Config]): ...
    """,
    "an inherited configuration, with bounds by name": """
        from typing import Annotated, ClassVar
        import verifiers.v1 as vf
        from pydantic import Field
        MOST = 7
        NAMES = ["x", "y", "z"]
        class Parent(vf.TasksetConfig):
            size: int = Field(3, ge=1, le=MOST)
            share: float = Field(default=0.5, gt=0, lt=1)
            LABEL: ClassVar[str] = "label"
        class Config(Parent):
            names: Annotated[int, Field(ge=1, le=len(NAMES))] = 2
            text: str | None = None
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
    "a taskset derived from another one": """
        import verifiers.v1 as vf
        class Config(vf.TasksetConfig):
            flag: bool = False
        class Parent(vf.Taskset[vf.Task, Config]): ...
        class T(Parent): ...
    """,
    "validators that convert and that check": """
        from typing import Annotated, Any
        import verifiers.v1 as vf
        from pydantic import BeforeValidator, field_validator
        class Config(vf.TasksetConfig):
            converted: int = 1
            checked: int = 1
            listed: Annotated[tuple[int, ...], BeforeValidator(lambda text: str(text).split())] = ()
            free: int = 1
            @field_validator("converted", mode="before")
            @classmethod
            def _word(cls, value: Any) -> Any:
                return {"three": 3}.get(value, value)
            @field_validator("checked")
            @classmethod
            def _even(cls, value: int) -> int:
                if value % 2:
                    raise ValueError("must be even")
                return value
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
    "a validator that converts everything": """
        import verifiers.v1 as vf
        from pydantic import model_validator
        class Config(vf.TasksetConfig):
            size: int = 3
            @model_validator(mode="before")
            @classmethod
            def _words(cls, data):
                return {k: 3 if v == "three" else v for k, v in data.items()}
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
    "arguments of Field that change what is accepted": """
        import verifiers.v1 as vf
        from pydantic import ConfigDict, Field
        class Config(vf.TasksetConfig):
            strict: int = Field(3, strict=True)
            short: str = Field("x", max_length=3)
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
    "a model_config": """
        import verifiers.v1 as vf
        from pydantic import ConfigDict
        class Config(vf.TasksetConfig):
            model_config = ConfigDict(str_max_length=2)
            label: str = "x"
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
}
NOT_CERTAIN = {
    "a class that is made by a call": """
        import verifiers.v1 as vf
        from pydantic import create_model
        Config = create_model("Config", __base__=vf.TasksetConfig, size=(int, 3))
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
    "fields under a condition": """
        import sys
        import verifiers.v1 as vf
        class Config(vf.TasksetConfig):
            if sys.platform:
                size: int = 3
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
    "a decorated class": """
        import verifiers.v1 as vf
        def same(cls): return cls
        @same
        class Config(vf.TasksetConfig):
            size: int = 3
        class T(vf.Taskset[vf.Task, Config]): ...
    """,
    "a base class of C code": """
        import verifiers.v1 as vf
        class T(vf.Taskset[vf.Task, vf.TasksetConfig], Exception): ...
        T = T
    """,
}
TEXTS = [
    *("three", "0", "1", "2", "3", "7", "8", "-1", "1.5"),
    *("nan", "true", "a", "b", "", "None", "train", "hash", "1,2"),
]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package that holds this source in a module of its own, and return its entry point."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> EntryPoint:
        folder = tmp_path / "vf_written"
        folder.mkdir()
        (folder / "__init__.py").write_text("from .taskset import T\n\n__all__ = ['T']\n")
        (folder / "taskset.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return EntryPoint("written", "vf_written:T", "")

    yield write
    for name in [name for name in sys.modules if name.startswith("vf_written")]:
        del sys.modules[name]
    _parsed.cache_clear()


def refuses(config_type, module: str, name: str, text: str) -> bool:
    """Whether the imported environment refuses this value of a setting on its own."""
    try:
        config_type.model_validate({"id": module, name: text})
    except ValidationError as error:
        return any(found["loc"][:1] == (name,) for found in error.errors())
    return False


def check_agreement(entry_point: EntryPoint) -> None:
    """Compare the settings that the source tells with those of the imported class."""
    found = read_settings(entry_point)
    assert found is not None
    id_ = entry_point.name if entry_point in UPSTREAM else entry_point.module  # verifiers' own have short ids
    fields = vf.taskset_config_type(id_).model_fields
    assert list(found) == list(fields)
    for name, setting in found.items():
        if name not in ("id", "task") and setting.annotation is not None:
            assert setting.kind == kind_of(fields[name].annotation), name
            assert setting.default in (None, fields[name].default), name


@pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=lambda point: point.name)
def test_the_source_of_an_installed_environment_agrees_with_its_class(entry_point):
    check_agreement(entry_point)


@pytest.mark.parametrize("source", WRITTEN.values(), ids=list(WRITTEN))
def test_the_source_of_a_written_environment_agrees_with_its_class(package, source):
    check_agreement(package(source))


@pytest.mark.parametrize("source", NOT_CERTAIN.values(), ids=list(NOT_CERTAIN))
def test_what_the_source_does_not_tell_is_not_guessed(package, source):
    assert read_settings(package(source)) is None


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=6), st.integers().map(str), st.floats().map(str)))
def test_what_is_refused_is_what_the_class_refuses(text):
    """A value that only a validator refuses is told when the environment loads."""
    for env in OURS:
        module = find(env).entry_point.module
        config_type = vf.taskset_config_type(module)
        for name, setting in known_settings(env).items():
            if _refusal(env, setting, text) is not None:
                assert refuses(config_type, module, name, text), (env, name)


def test_the_bounds_of_types_are_read():
    lookup, musique = known_settings("lookup"), known_settings("musique")
    assert _refusal("lookup", lookup["min_hops"], "0") == "Input should be greater than or equal to 1"
    assert _refusal("lookup", lookup["difficulty"], "hardest") is not None
    assert _refusal("musique", musique["noise"], "much") is not None


def test_a_value_that_a_validator_converts_is_accepted(package, monkeypatch):
    """The type alone refuses it."""
    point = package(WRITTEN["validators that convert and that check"])
    found = read_settings(point)
    assert found is not None
    environment = SimpleNamespace(module="vf_written", entry_point=point, load=lambda: None)
    monkeypatch.setattr(config_environment, "find", lambda env: environment)
    assert _refusal("written", found["converted"], "three") is None
    assert _refusal("written", found["free"], "three") is not None


def test_help_shows_the_defaults_and_kinds_of_the_class():
    from plumbob.trainer.config.environment import describe

    rows = dict(describe("lookup", []))
    assert rows["--min-hops <int>"] == "[default: 1]" and rows["--num-values <int>"] == "[default: 64]"
    assert "--difficulty <trivial|easy|medium|hard|extreme>" in rows
