"""`lab init` and `lab new`: files from templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from plumbob.console import UserError
from plumbob.lab.files import sections
from plumbob.lab.files.hypothesis import read_hypothesis
from plumbob.lab.files.tables import update_tables
from plumbob.lab.files.workspace import Lab, slug


def lay_out(root: Path, env: str, model: str, flags: str, env_flags: str = "") -> list[Path]:
    """Write the files of a new lab; returns their paths. Raises UserError if one of them exists, before any is written."""
    values = {"ENV": env, "MODEL": model, "FLAGS": flags, "ENV_FLAGS": env_flags}
    planned = [(root / name, _filled(text, values)) for name, text in _templates() if name != "new.md"]
    for path, _ in planned:
        if path.exists():
            raise UserError(f"{path} exists already; choose another folder, or remove it first")
    for path, text in planned:
        sections.write(path, text)
    lab = Lab(root)
    for path, _ in planned:
        if path.parent.name == "hypotheses":
            read_hypothesis(path)  # an environment or flags that YAML reads otherwise are a mistake to report now
    update_tables(lab)
    return [path for path, _ in planned]


def add_hypothesis(lab: Lab, title: str) -> Path:
    """Write the file of a new hypothesis, with the next free number and the settings of the first one; its path."""
    if not title.strip():
        raise UserError("a hypothesis needs a title, such as: lab new 'the tool returns nothing'")
    numbers = [int(entry.hypothesis.id[1:]) for entry in lab.entries]
    first = lab.entries[0].hypothesis if lab.entries else None
    name = f"H{max(numbers, default=0) + 1:02d}"
    values = {
        "ID": name,
        "TITLE": " ".join(title.split()),
        "ORDER": str(len(numbers) + 1),
        "ENV": first.env if first else "lookup",
        "MODEL": first.model if first else "tiny",
        "FLAGS": first.flags if first else "--max-steps 50",
        "ENV_FLAGS": first.env_flags if first else "",
    }
    path = lab.root / "hypotheses" / f"{name.lower()}-{slug(title)}.md"
    sections.write(path, _filled(dict(_templates())["new.md"], values))
    read_hypothesis(path)
    update_tables(lab)
    return path


def _filled(text: str, values: dict[str, str]) -> str:
    """The text with @NAME@ replaced by a value, and @"NAME"@ by the value in quotes, as YAML reads it."""
    for name, value in values.items():
        text = text.replace(f'@"{name}"@', json.dumps(value, ensure_ascii=False)).replace(f"@{name}@", value)
    return text


def _templates() -> Iterator[tuple[str, str]]:
    """(path in the lab, text) of every template."""
    folder = Path(__file__).parents[1] / "templates"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        yield (
            str(name.with_name({"gitignore": ".gitignore"}.get(name.name, name.name))),
            path.read_text(encoding="utf-8"),
        )
