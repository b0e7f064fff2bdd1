"""`hub new`: create a small environment that works and passes `hub check`, as a starting point for another one."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from string import Template

from plumbob.console import UserError, typed
from plumbob.hub.check.metadata import TEMPLATES
from plumbob.hub.installed.registry import installed
from plumbob.hub.names import environment_name

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_LONGEST = 40


def create(name: str, output: Path, *, tools: bool = False) -> Path:
    """Write the environment `name` into the new directory OUTPUT/NAME, and return that directory.

    `tools`: multi-turn with one tool that keeps state; else single-turn. Raises UserError if the name is not valid or
    is taken, if the directory already exists, or if it cannot be created.

    Example: create("my-env", Path(".")) writes my-env/pyproject.toml, my-env/src/vf_my_env/taskset.py, ...
    """
    name = check_name(name)
    kind = "tools" if tools else "single"
    directory = output / name
    try:
        output.mkdir(parents=True, exist_ok=True)
        directory.mkdir()
    except FileExistsError:
        raise UserError(
            f"{directory} already exists, and `hub new` overwrites nothing; choose another name or --output"
        ) from None
    except OSError as error:
        raise UserError(f"{directory} cannot be created: {error.strerror}; choose another --output") from None
    for path, text in render(name, kind, author=_author()).items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="\n")
    return directory


def check_name(name: str) -> str:
    """Return the environment's short name, without "vf-". Raises UserError if it is not a valid name or is taken."""
    wanted = environment_name(name)
    if not _NAME.fullmatch(wanted) or len(wanted) > _LONGEST:
        raise UserError(
            f"{name!r} is not a valid environment name; use at most {_LONGEST} letters from a to z, digits and '-', a letter first"
        )
    taken = next((e for e in installed() if environment_name(e.name) == wanted), None)
    if taken is not None:
        raise UserError(f"environment {wanted!r} is already installed ({taken.distribution}); choose another name")
    plain = wanted.replace("-", "_")
    if keyword.iskeyword(plain) or keyword.issoftkeyword(plain):
        raise UserError(f"{wanted!r} is a Python keyword; choose another name")
    if plain in sys.stdlib_module_names:
        raise UserError(f"{wanted!r} is a module of Python's standard library; choose another name")
    for module in (plain, f"vf_{plain}"):
        if importlib.util.find_spec(module) is not None:
            raise UserError(f"{module!r} is already an installed module; choose another name")
    return wanted


def _author() -> str:
    """Return the name that git signs commits with; "" if it has none."""
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip()


def render(name: str, kind: str, author: str = "") -> dict[str, str]:
    """Return the text of each file of a new environment, by its path. `kind` is "single" or "tools".

    `author`: a person's name, for the metadata; "" leaves it out.
    """
    module = f"vf_{name.replace('-', '_')}"
    cls = "".join(part.capitalize() for part in name.split("-"))
    values = {
        "name": name,
        "distribution": f"vf-{name}",
        "module": module,
        "cls": cls,
        "summary": TEMPLATES[kind],
        "commands": "\n".join(_learning(name)),
        # A TOML basic string escapes what a JSON string does.
        "authors": f"authors = [{{ name = {json.dumps(author)} }}]\n" if author else "",
        "exports": ", ".join(f'"{n}"' for n in sorted(("InProcessHarness", "LocalEnv", f"{cls}Taskset"))),
    }
    templates = files("plumbob.hub.publish") / "templates"
    found = {
        "pyproject.toml": templates / "pyproject.toml.tmpl",
        "README.md": templates / kind / "README.md.tmpl",
        "LICENSE": templates / "LICENSE.tmpl",
        f"src/{module}/__init__.py": templates / "init.py.tmpl",
        f"src/{module}/taskset.py": templates / kind / "taskset.py.tmpl",
        f"tests/test_{module.removeprefix('vf_')}.py": templates / kind / "test.py.tmpl",
    }
    if kind == "tools":
        found[f"src/{module}/tools.py"] = templates / kind / "tools.py.tmpl"
    texts = {path: Template(t.read_text(encoding="utf-8")).substitute(values) for path, t in found.items()}
    return texts | {f"src/{module}/py.typed": ""}


def next_commands(directory: Path) -> str:
    """Return the shell commands that a user runs next on a new environment, one per line."""
    where = directory if directory.is_absolute() or directory.parts[:1] == ("..",) else f"./{directory}"
    name = directory.name
    commands = [f"hub check {where}", f"vf-install {where}", f"evaluate {name} --oracle", *_learning(name)]
    return "\n".join(f"  {typed(command)}" for command in commands)


def _learning(name: str) -> list[str]:
    """The commands after which the bundled model `tiny` has learned the task of a new environment, in two minutes on a CPU.

    `tiny` writes noise about anything but its own task, so it imitates perfect transcripts first. Turns that solve the task
    have fewer than 40 tokens. At its default learning rate, three times this one, `train` forgets a part of what it imitated.
    """
    start = f"{name}-sft"
    return [
        f"sft {name} --max-steps 100 --batch-size 8 --max-tokens 40 --run-name {start}",
        f"train {name} --model runs/{start} --max-steps 10 --max-tokens 40 --learning-rate 1e-4",
    ]
