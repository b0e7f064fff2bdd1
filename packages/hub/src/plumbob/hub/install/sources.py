"""Resolve a name or path that the user typed to its source: a path, a git repository, or the hub's index."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from packaging.requirements import InvalidRequirement, Requirement
from plumbob.console import UserError
from plumbob.console.working import Working
from plumbob.hub.index.versions import choose_version, offered
from plumbob.hub.index.wheels import build_wheel, read_wheel
from plumbob.hub.install.collisions import refuse_collisions
from plumbob.hub.install.pins import Demand, Item, demands_of, project_demands
from plumbob.hub.installed.registry import GROUP
from plumbob.hub.names import distribution_names, environment_name, is_first_party, near
from plumbob.hub.uv.command import Command, run
from plumbob.hub.uv.credentials import mask, refuse_credentials
from plumbob.hub.uv.project import local_environment, local_environments, read_project

if TYPE_CHECKING:
    from plumbob.hub.index.reader import Index


@dataclass(frozen=True)
class Target:
    """One argument of `vf-install`: a requirement or a path.

    Example: Target("gsm8k==0.2.0", Requirement("gsm8k==0.2.0")).
    """

    text: str
    requirement: Requirement | None = None
    path: Path | None = None


def parse_target(text: str, cwd: Path) -> Target:
    """Parse one argument of `vf-install`.

    Raises UserError if it is neither a path nor a name with an optional version.
    """
    if "://" in text:
        raise UserError(f"{mask(text)} is a URL; give a name or a path, or use --from-repo with --repo")
    if "/" in text or text in (".", "..") or text.endswith(".whl"):
        return Target(text, path=(cwd / Path(text).expanduser()).resolve())
    try:
        return Target(text, requirement=Requirement(text))
    except InvalidRequirement:
        raise UserError(f"{text!r} is neither a name, like gsm8k or gsm8k==0.2.0, nor a path, like ./gsm8k") from None


def from_path(target: str, path: Path) -> Item:
    """Resolve a path: a project directory, which is installed editable, or a wheel file.

    Raises UserError if it is neither.
    """
    if path.is_file():
        wheel = read_wheel(path)
        _require_environment(wheel.entry_points, str(path))
        demands = demands_of(wheel.fields.get_all("Requires-Dist", []), wheel.name)
        own = str(path)
        return Item(target, wheel.name, own, (own,), tuple(demands), (own,), tuple(wheel.entry_points), wheel)
    if not path.is_dir():
        raise UserError(f"{target} does not exist; give the path of a project directory or of a wheel")
    project = read_project(path)
    _require_environment(project.entry_points(GROUP), str(path))
    editable = ("--editable", str(path))
    names = tuple(project.entry_points(GROUP))
    return Item(
        target, project.name, str(path), editable, project_demands(project), editable, names, scripts=project.scripts
    )


def from_folder(target: Target, folder: Path) -> Item:
    """Resolve a name within a folder of environment projects. Raises UserError if it is not there, or has a version."""
    if target.requirement is None or target.requirement.specifier:
        raise UserError(f"{target.text}: with --path, give a name without a version")
    known = local_environments(folder)
    name = environment_name(target.requirement.name)
    if name not in known:
        closest = near(name, known)
        hint = f"did you mean {closest!r}?" if closest else f"the folder has {', '.join(known) or 'none'}"
        raise UserError(f"there is no environment {name!r} in {folder}; {hint}")
    return from_path(target.text, known[name].resolve())


def from_repository(target: Target, repo: str | None, branch: str | None, folder: str) -> Item:
    """Resolve a name within a git repository, at the current commit of the branch or tag.

    The repository is cloned and its requirements are checked like those of any other source; uv then installs exactly
    that commit. Raises UserError if the repository cannot be read, or if the environment is not in `folder` of it.
    """
    url = _repository(repo)
    if branch is not None and branch.startswith("-"):
        raise UserError(f"{branch!r} is not a valid branch name; give --branch the name of a branch or tag")
    with tempfile.TemporaryDirectory(prefix="vf-install-") as temporary:
        clone = Path(temporary) / "repository"
        at = ("--branch", branch) if branch else ()
        with Working(f"cloning {mask(url)}", asks=not url.startswith("file:")):
            done = run(Command(("git", "clone", "--quiet", "--depth", "1", *at, "--", url, str(clone))), quiet=True)
        if done.returncode != 0:
            raise UserError(f"cannot read {mask(url)}{f' at {branch}' if branch else ''}: {done.reason()}")
        commit = run(Command(("git", "-C", str(clone), "rev-parse", "HEAD")), quiet=True).output.strip()
        directory = (clone / folder).resolve()
        if not directory.is_relative_to(clone.resolve()):
            raise UserError(f"--path {folder} leads out of the repository; give a folder inside it")
        try:
            item = from_folder(target, directory)
        except UserError as error:  # the clone is gone when this is read
            raise UserError(str(error).replace(str(clone.resolve()), mask(url))) from None
        if not Path(item.origin).is_relative_to(clone.resolve()):
            raise UserError(f"{item.target} is refused: it is a link that leads out of the repository")
        # The wheel is built as uv will when it installs the project, to see what it brings.
        refuse_collisions([], [build_wheel(Path(item.origin), Path(temporary) / "wheel", "--no-config")])
        subdirectory = Path(item.origin).relative_to(clone.resolve())
        requirement = f"{item.distribution} @ git+{url}@{commit}#subdirectory={quote(str(subdirectory))}"
        return replace(item, origin=f"{url}@{commit[:12]}", arguments=(requirement,), add=(requirement,))


def from_index(target: Target, index: Index, *, prerelease: bool) -> Item:
    """Resolve a name, with an optional version, on the hub's index. Raises UserError if the index does not have it."""
    assert target.requirement is not None
    wanted, url = target.requirement, index.location.url
    name = next((d for d in distribution_names(wanted.name) if index.files(d)), None) or _by_catalog(wanted.name, index)
    if name is None:
        closest = near(wanted.name, filter(is_first_party, index.names() or []))
        if closest in distribution_names(wanted.name):
            raise UserError(f"{url} lists {closest}, but has no file of it that can be read")
        hint = f"did you mean {environment_name(closest)!r}?" if closest else "see `hub search`"
        raise UserError(f"{wanted.name!r} is not on {url}; {hint}")
    files = index.files(name)
    version, wheels = choose_version(files, wanted.specifier, prerelease=prerelease)
    if version is None:
        raise UserError(f"{url} has no {name}{wanted.specifier}, only {offered(files) or 'files that are no wheels'}")
    wheel = index.wheel(wheels[0])  # read before uv runs, so that a damaged or altered wheel is refused here
    _require_environment(wheel.entry_points, f"{name} {version} on {url}")
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    pinned = f"{name}{extras}=={version}"
    saved = pinned if wanted.specifier else f"{name}{extras}>={version}"
    root = Demand(Requirement(pinned), target.text, root=True)
    arguments = (pinned,) if extras else ()
    return Item(target.text, name, url, arguments, (root,), (saved,), tuple(wheel.entry_points))


def default_item(target: Target, cwd: Path) -> Item | None:
    """Resolve a bare name to a project in ./environments or in the uv workspace; None if there is none."""
    if target.requirement is None or target.requirement.specifier:
        return None
    found = local_environment(target.requirement.name, cwd)
    return from_path(target.text, found.resolve()) if found else None


def _repository(repo: str | None, environ: Mapping[str, str] = os.environ) -> str:
    given = repo or environ.get("PLUMBOB_REPO")
    if not given:
        raise UserError("--from-repo needs a repository; give --repo URL or set PLUMBOB_REPO")
    if "://" not in given:
        if Path(given).expanduser().is_dir():
            return Path(given).expanduser().resolve().as_uri()
        short = re.fullmatch(r"([\w.-]+@[\w.-]+):([^:].*)", given)  # git's short form git@host:owner/name
        if short is None:
            raise UserError(
                f"{given!r} is neither the URL of a git repository nor a directory; give --repo one of the two"
            )
        return f"ssh://{short[1]}/{short[2]}"
    if given.split("://")[0] not in ("https", "http", "ssh", "file"):
        raise UserError(f"{mask(given)}: the URL of a repository must start with https, http, ssh or file")
    return refuse_credentials(given)


def _by_catalog(name: str, index: Index) -> str | None:
    """Return the distribution with an entry point of this name, if the index has a catalog that lists entry points."""
    for entry in index.catalog() or []:
        if environment_name(name) in map(environment_name, entry.get("entry_points", {})):
            return entry["name"]
    return None


def _require_environment(entry_points: Mapping[str, str], where: str) -> None:
    if not entry_points:
        raise UserError(f'{where} declares no environment: its metadata has no [project.entry-points."{GROUP}"]')
