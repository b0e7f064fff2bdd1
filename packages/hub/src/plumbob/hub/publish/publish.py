"""`hub publish`: check environments, build them from source, refuse to change a published version, and upload.

Everything is checked, built and listed before anything is uploaded. If a publish is killed, the versions that were published
before are unchanged, and running it again completes it.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from plumbob.console import UserError
from plumbob.console.working import Working
from plumbob.hub.index.contents import foreign
from plumbob.hub.index.location import Location
from plumbob.hub.index.reader import Index
from plumbob.hub.index.static_index import add_files, sha256_of
from plumbob.hub.index.wheels import Wheel, read_wheel
from plumbob.hub.installed.registry import GROUP
from plumbob.hub.publish.shipped import links_to_folders, listing, read_archive, refuse_private
from plumbob.hub.uv.command import Command, find_uv, run
from plumbob.hub.uv.credentials import refuse_credentials
from plumbob.hub.uv.project import read_project

CREDENTIALS = ("UV_PUBLISH_TOKEN", "UV_PUBLISH_USERNAME", "UV_PUBLISH_PASSWORD")

# Returns what is wrong with the environment in a directory, one sentence each; an empty list if it may be published.
Gate = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Published:
    """One published distribution. `uploaded`: names of its new files; empty if the index already had the same bytes."""

    name: str
    version: str
    environments: tuple[str, ...]
    uploaded: tuple[str, ...]


def default_gate(timeout: float) -> Gate:
    """Return the check of `hub check`, each part of which may take `timeout` seconds."""
    from plumbob.hub.check.check import problems  # imported here because it imports what plays rollouts

    return partial(problems, timeout=timeout)


def publishing_to(location: Location, publish_url: str | None) -> Location:
    """Return the index with its upload URL: `publish_url`, else the project's setting, else its URL without `simple/`.

    Raises UserError if `publish_url` holds credentials.
    """
    if publish_url is not None:
        refuse_credentials(publish_url)
    url = publish_url or location.publish_url or location.url.removesuffix("simple/")
    return replace(location, publish_url=url)


def publish(
    paths: list[Path],
    location: Location,
    gate: Gate | None,
    timeout: float | None = None,
    *,
    include: Sequence[str] = (),
) -> list[Published]:
    """Publish the projects in these directories to `location`, which `publishing_to` has returned.

    `gate` is called for each environment; None publishes unchecked. `timeout` limits each build, in seconds. `include`:
    see `refuse_private`. Raises UserError if a project fails the gate or does not build, if it holds files that look
    private, if its version is already published with different bytes, or if the upload is refused.
    """
    index = _readable(location)
    for path in paths:
        if index is not None:  # a server that does not answer is told before minutes of checks
            index.files(read_project(path).name)
    for path in paths:
        _pass_gate(path, gate)
    with tempfile.TemporaryDirectory(prefix="hub-publish-") as temporary:
        built, results, uploads = [], [], []
        for number, path in enumerate(paths):
            built.append(_build(path, Path(temporary) / str(number), timeout, include))
        for wheel, files in built:
            missing = [file for file in files if not _is_published(file, wheel, index)]
            uploads += missing
            names = tuple(file.name for file in missing)
            results.append(Published(wheel.name, wheel.version, tuple(wheel.entry_points), names))
        if uploads:
            _upload(uploads, location)
    return results


def plan_build(path: Path, out: str, *, uv: str, python: str) -> Command:
    """Return uv's command that builds the project in `path`.

    `--no-sources`: tool.uv.sources exist on this machine only, so a published package must build without them.
    """
    return Command(
        (uv, "build", "--no-sources", "--no-create-gitignore", "--python", python, "--out-dir", out, str(path))
    )


def plan_upload(files: list[str], location: Location, *, uv: str) -> Command:
    # "automatic" makes uv request a trusted-publishing token from the server and wait for an answer that most servers
    # never send. It is used only where the CI service can prove its identity and no credentials are set.
    proven = "ACTIONS_ID_TOKEN_REQUEST_URL" in os.environ and not any(name in os.environ for name in CREDENTIALS)
    trusted = "automatic" if proven else "never"
    upload = ("--publish-url", location.publish_url or "", "--check-url", location.url, "--trusted-publishing", trusted)
    return Command((uv, "publish", *upload, *files))


def shown_plan(paths: list[Path], location: Location, *, timeout: float | None, include: Sequence[str] = ()) -> str:
    """Return the shell commands that a publish would run, after builds that list what it would upload.

    Raises UserError if a project does not build, or if it holds files that look private.
    """
    uv = find_uv()
    lines = ["out=$(mktemp -d)"]
    for path in paths:
        read_project(path)
        with tempfile.TemporaryDirectory(prefix="hub-publish-") as temporary:
            _build(path, Path(temporary), timeout, include)
        lines.append(plan_build(path, "OUT", uv=uv, python=sys.executable).shown().replace("OUT", '"$out"'))
    if location.directory is not None:
        return "\n".join([*lines, f'hub index "$out" --output {shlex.quote(str(location.directory))}'])
    return "\n".join([*lines, plan_upload(["FILES"], location, uv=uv).shown().replace("FILES", '"$out"/*')])


def _pass_gate(path: Path, gate: Gate | None) -> None:
    project = read_project(path)
    if project.name and gate is not None and project.entry_points(GROUP):
        problems = gate(path)
        if problems:
            raise UserError(f"{path} is not published: {'; '.join(problems)}")


def _readable(location: Location) -> Index | None:
    """Return the index for reading; None for a folder in which no index exists yet."""
    if location.directory is not None and not (location.directory / "simple").is_dir():
        return None
    return Index(location)


def _build(path: Path, out: Path, timeout: float | None, include: Sequence[str]) -> tuple[Wheel, list[Path]]:
    """Build a project, and list what is in its files, before anything else is done with them."""
    with Working(f"building {path}"):
        done = run(plan_build(path, str(out), uv=find_uv(), python=sys.executable), quiet=True, timeout=timeout)
    if done.returncode != 0:
        links = links_to_folders(path)
        told = f" ({', '.join(links)}: a link to a folder cannot be published; copy the folder)" if links else ""
        raise UserError(f"{path} is not published, because its build failed: {done.reason()}{told}")
    files = sorted(p for p in out.iterdir() if p.name.endswith((".whl", ".tar.gz")))
    # The sdist first: its paths are those of the project, and the wheel is built from it.
    archives = {file.name: read_archive(file) for file in reversed(files)}
    print("\n".join(listing(name, shipped) for name, shipped in archives.items()), file=sys.stderr)
    refuse_private(str(path), archives.values(), include, path)
    wheel = next(read_wheel(file) for file in files if file.suffix == ".whl")
    if problems := foreign(wheel):
        raise UserError(f"{path} is not published: {'; '.join(problems)}")
    for requirement in map(Requirement, wheel.fields.get_all("Requires-Dist", [])):
        if requirement.url:
            raise UserError(
                f"{path} is not published: it needs {requirement}, and a published package may not depend on a URL; "
                "depend on a release of it instead"
            )
    return wheel, files


def _is_published(file: Path, wheel: Wheel, index: Index | None) -> bool:
    """Whether the index already has this file. Raises UserError if it has a file of that name with different bytes."""
    listed = next((f for f in index.files(wheel.name) if f.filename == file.name), None) if index else None
    if listed is None or index is None:
        return False
    digest = listed.digests.get("sha256")
    data = index.read(listed.url) if digest is None else None
    same = data == file.read_bytes() if digest is None else digest == sha256_of(file)
    if not same:
        raise UserError(
            f"{wheel.name} {wheel.version} is on {index.location.url} with different bytes; give the changed package a "
            f"new version: `uv version --package {wheel.name} --bump patch --frozen`"
        )
    return True


def _upload(files: list[Path], location: Location) -> None:
    if location.directory is not None:
        add_files(files, location.directory)
        return
    done = run(plan_upload([str(file) for file in files], location, uv=find_uv()))
    if done.returncode != 0:
        raise UserError(f"{location.publish_url} refused the upload: {done.reason()}")
