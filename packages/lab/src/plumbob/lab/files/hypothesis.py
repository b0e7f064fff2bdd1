"""One hypothesis: a Markdown file with typed front matter, whose results section lab writes."""

from __future__ import annotations

import difflib
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from plumbob.console import UserError
from plumbob.lab.criteria.grammar import DEFAULT_ARM, WORDS, Criterion, CriterionError, parse
from plumbob.lab.files import sections
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Status = Literal["pending", "testing", "partial", "validated", "invalidated", "inconclusive"]
Level = Literal["high", "medium", "low"]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Arm(BaseModel):
    """What one arm of an experiment adds to the settings that all arms share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flags: str = ""
    """Options of `train`, as on the command line."""
    command: str | None = None
    """The command in place of `train`; it must take train's options."""
    env: str | None = None
    model: str | None = None


class Hypothesis(BaseModel):
    """The front matter of a hypothesis file. README of the lab explains the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=r"^H\d{2,}$")]
    title: str
    status: Status = "pending"
    confidence: Level = "low"
    priority: Level = "medium"
    phase: int = 1
    order: int = 1
    """Place in the test order, over all phases."""
    minutes: float | None = None
    """Estimated time of all runs together."""
    cost: str = ""
    causes: tuple[str, ...] = ()
    """Causes of `doctor` that are this hypothesis, as in docs/reference/causes.md."""
    related: tuple[str, ...] = ()
    env: str = "lookup"
    model: str = "tiny"
    flags: str = ""
    """Options of `train` in every arm."""
    env_flags: str = ""
    """Options that only `env` knows, such as its data: of every arm but those with another `env`."""
    seeds: Annotated[int, Field(ge=1)] = 3
    changes: tuple[str, ...] = ()
    """Options in which the arms may differ, such as scale_rewards; `command`, if they run different commands."""
    arms: dict[str, Arm] = Field(default_factory=dict)
    """The first arm is the control."""
    validated_if: tuple[str, ...] = ()
    invalidated_if: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_arms(self) -> Hypothesis:
        for name in self.arms:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in WORDS:
                raise ValueError(
                    f"arm {name!r}: use small letters, digits and _, and no word of the criteria's language"
                )
        arms = {f"arms.{name}.flags": arm.flags for name, arm in self.arms.items()}
        for where, text in ({"flags": self.flags, "env_flags": self.env_flags} | arms).items():
            try:
                shlex.split(text)
            except ValueError as error:
                raise ValueError(f"{where}: {text!r} are no options, as in a shell: {error}") from None
        self.criteria()
        return self

    def criteria(self) -> tuple[list[Criterion], list[Criterion]]:
        """The parsed criteria (of `validated_if`, of `invalidated_if`)."""
        arms = self.arms or {DEFAULT_ARM: Arm(), "control": Arm()}
        try:
            both = [[parse(text, arms) for text in texts] for texts in (self.validated_if, self.invalidated_if)]
        except CriterionError as error:
            raise ValueError(str(error)) from None
        return both[0], both[1]

    @property
    def number(self) -> str:
        """The id in small letters, as in names of files."""
        return self.id.lower()


def read_hypothesis(path: Path) -> Hypothesis:
    """The front matter of a hypothesis file. Raises UserError with the field that is wrong."""
    front = sections.front_matter(sections.read(path))
    if front is None:
        raise UserError(f"{path} has no front matter: its first line must be ---, as in the other hypotheses")
    try:
        values: Any = yaml.load(front, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: the front matter is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: the front matter must be fields with values, such as `id: H01`")
    try:
        return Hypothesis.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = Arm.model_fields if where.startswith("arms.") else Hypothesis.model_fields
            near = difflib.get_close_matches(str(first["loc"][-1]), list(known), 1)
            message = f"there is no such field{f'; did you mean {near[0]}?' if near else ''}"
        raise UserError(f"{path}: front matter: {where + ': ' if where else ''}{message}") from None
