"""Which tasks are the same task, so that none is both trained on and held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import verifiers.v1 as vf

_LABELS = {"idx", "id", "name", "description"}
"""Fields of a task's data that name it; all others are its content."""


def marks(task: vf.Task) -> frozenset[str]:
    """What tells tasks apart: two tasks that have a mark in common are the same task.

    The first mark is the content: prompt, answer, context and every other field of the data but its labels, so that the
    same row is recognised in two splits that number it differently. A task with an id (or a `key` of its own) has a
    second mark, id and prompt, so that a question whose documents are drawn anew is still the same task. Two tasks with
    the same question and different answers or contexts have no mark in common, unless they have the same id.
    """
    data = task.data
    found = {f"content {hashlib.sha256(_content(task)).hexdigest()}"}
    name = data.id
    if name is None and type(task).key is not vf.Task.key:  # verifiers' default key is made from all fields
        name = task.key
    if name is not None and data.prompt is not None:
        found.add(f"id {name}\n{data.prompt_text}")
    return frozenset(found)


def checksum(tasks: Iterable[vf.Task]) -> str:
    """A checksum of the contents of tasks, in order."""
    total = hashlib.sha256()
    for task in tasks:
        total.update(_content(task))
    return total.hexdigest()[:16]


def _content(task: vf.Task) -> bytes:
    """All data of a task but its labels. Objects that have no JSON form count by their type's name."""
    content = task.data.model_dump(
        mode="json", exclude=_LABELS, exclude_none=True, fallback=lambda value: type(value).__name__
    )
    return json.dumps(content, sort_keys=True).encode()


def marks_of(tasks: Iterable[vf.Task]) -> set[str]:
    """The marks of all these tasks together."""
    return {mark for task in tasks for mark in marks(task)}
