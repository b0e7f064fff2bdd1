"""The checks that read metadata only, without importing the environment."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from plumbob.hub.check.report import Result, judged
from plumbob.hub.check.target import Subject
from plumbob.hub.installed.registry import GROUP
from plumbob.hub.names import normalise

_UPPER = {"<", "<=", "==", "~=", "==="}
_LOWER = {">", ">=", "==", "~=", "==="}
_PLACEHOLDER = re.compile(r"\b(?:todo|fixme|tbd)\b|add your description", re.IGNORECASE)
_FULL_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")

TEMPLATES = {
    "single": "Name the largest digit: a single-turn environment with an exact reward",
    "tools": "Draw balls until one is red: a multi-turn environment with one tool that keeps state",
}
"""Kind of a new environment -> the description that `hub new` gives it."""


def metadata(subject: Subject) -> Result:
    """Check that name, version, description, README, license and Python bounds are given and valid.

    A description that `hub new` wrote is no problem, because it may still be true, but it is told.
    """
    problems = []
    if not _FULL_NAME.fullmatch(subject.distribution):
        problems.append(f"the name {subject.distribution!r} is not valid; use letters, digits, '-', '_' and '.'")
    if not subject.version:
        problems.append('[project] has no version; give it one, such as version = "0.1.0"')
    elif subject.version != "dynamic" and _bad_version(subject.version):
        problems.append(f"version {subject.version!r} is not written as in PEP 440, such as 0.1.0")
    if not subject.summary.strip() or _PLACEHOLDER.search(subject.summary):
        problems.append("[project] has no description; say in one sentence what the environment asks of a model")
    if not subject.readme.strip():
        problems.append("there is no README; write one and name it in [project] readme")
    if not subject.license.strip():
        problems.append('[project] has no license; name it by its SPDX id, such as license = "Apache-2.0"')
    problems += _python_bounds(subject.requires_python)
    told = "; description (and README?) of `hub new`: say what your own environment asks"
    own = told if subject.summary in TEMPLATES.values() else ""
    return judged("metadata", f"{subject.distribution} {subject.version}, {subject.license}{own}", problems)


def _bad_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return True
    return False


def _python_bounds(requires: str) -> list[str]:
    advice = 'such as ">=3.11,<3.14"'
    try:
        specifiers = SpecifierSet(requires)
    except InvalidSpecifier:
        return [f"requires-python = {requires!r} cannot be read; write it {advice}"]
    if not _lacks(specifiers):
        return []
    # An upper bound is required because uv was seen to download a Python release on which verifiers does not run.
    return [f"requires-python {requires!r} has no {' and no '.join(_lacks(specifiers))} bound; write it {advice}"]


def _lacks(specifiers: SpecifierSet) -> list[str]:
    """Return which of the bounds "lower" and "upper" the specifiers do not have."""
    operators = {s.operator for s in specifiers}
    return [side for side, having in (("lower", _LOWER), ("upper", _UPPER)) if not operators & having]


def dependencies(subject: Subject) -> Result:
    """Check that every dependency has a lower and an upper bound, and that verifiers is among them."""
    problems, requirements = list(subject.faults), []
    for text in subject.requirements:
        try:
            requirements.append(Requirement(text))
        except InvalidRequirement as error:
            problems.append(f"the dependency {text!r} cannot be read: {str(error).splitlines()[0]}")
    bounded = {normalise(r.name) for r in requirements if not r.url and not _lacks(r.specifier)}
    for r in requirements:
        # An extra may repeat a dependency that is bounded elsewhere; URLs are reported by the check `direct_urls`.
        if r.url or normalise(r.name) in bounded | {normalise(subject.distribution)}:
            continue
        lacks = " and no ".join(_lacks(r.specifier))
        problems.append(
            f"{r.name}{r.specifier} has no {lacks} bound: a later release can break it; write {_suggestion(r)}"
        )
    if "verifiers" not in {normalise(r.name) for r in requirements} and not subject.faults:
        problems.append('verifiers is not among the dependencies; add "verifiers>=0.4,<0.5"')
    return judged("dependencies", f"{len(requirements)} dependencies, all bounded", problems)


def _suggestion(requirement: Requirement) -> str:
    """Return a requirement with bounds: below the next major release (for 0.x minor) after the installed one."""
    lower = next((s.version for s in requirement.specifier if s.operator in _LOWER), None)
    try:
        here = Version(version(requirement.name))
    except (PackageNotFoundError, InvalidVersion):
        return f"{requirement.name}>=A,<B"
    upper = f"{here.major + 1}" if here.major else f"0.{here.minor + 1}"
    return f"{requirement.name}>={lower or f'{here.major}.{here.minor}'},<{upper}"


def direct_urls(subject: Subject) -> Result:
    """Check that no dependency is a URL: packages on an index may not depend on URLs, and uv does not follow them."""
    problems = []
    for text in subject.requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # reported by `dependencies`
        if requirement.url:
            problems.append(
                f"{requirement.name} is taken from {requirement.url}; depend on a release of it, "
                f"and keep the URL in [tool.uv.sources], which is not published"
            )
    return judged("direct-urls", "no dependency is a URL", problems)


def names(subject: Subject) -> Result:
    """Check that there is one entry point, in the module named like the distribution, where verifiers looks for it."""
    problems, module = [], subject.module
    points = subject.entry_points
    if len(points) != 1:
        declared = f"has {len(points)} entries ({', '.join(points)})" if points else "has no entry"
        problems.append(
            f'[project.entry-points."{GROUP}"] {declared}; it needs one, such as '
            f'{module.removeprefix("vf_")} = "{module}:MyTaskset"'
        )
    for name, value in points.items():
        imported, _, attribute = value.partition(":")
        if not attribute.isidentifier():
            problems.append(f'the entry point {name} = "{value}" names no class; write "{module}:MyTaskset"')
        if imported != module:
            problems.append(
                f"the entry point {name} is in module {imported!r}, and verifiers looks for the distribution "
                f"{subject.distribution} in {module!r}; rename one of them"
            )
    root = next(iter(subject.import_roots), None)
    if root is not None and not ((root / module / "__init__.py").is_file() or (root / f"{module}.py").is_file()):
        problems.append(
            f"there is no module {module} in {root.name or root}; name the module like the distribution "
            f"{subject.distribution}"
        )
    return judged("names", ", ".join(f"{name} = {value}" for name, value in points.items()), problems)


CHECKS: tuple[Callable[[Subject], Result], ...] = (metadata, dependencies, direct_urls, names)
