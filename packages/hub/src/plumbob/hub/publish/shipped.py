"""What a publish makes public for ever: the files in a wheel and an sdist, and which of them should not leave this machine.

A build takes whatever lies in the package's folder, and follows links. So all files are listed before an upload, and
those that look like secrets, that come from outside the project, or that git ignores or does not know stop it.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from plumbob.console import UserError, counted, first_line
from plumbob.hub.publish.secrets import secret_in

_SHOWN = 5
_MOST_OF_A_FOLDER = 20


@dataclass(frozen=True)
class Shipped:
    """A file in a wheel or an sdist.

    `path` is relative to the archive; in an sdist, to the project that it was built from, such as "src/vf_x/data.txt".
    """

    path: str
    content: bytes
    is_link: bool = False


def read_archive(file: Path) -> list[Shipped]:
    """Return the files of a wheel or an sdist, sorted. Raises UserError if it is neither, or cannot be read."""
    if not file.name.endswith((".whl", ".tar.gz")):
        raise UserError(f"{file} is neither a wheel (.whl) nor an sdist (.tar.gz)")
    try:
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                found = [Shipped(n, wheel.read(n)) for n in wheel.namelist() if not n.endswith("/")]
        else:
            with tarfile.open(file) as sdist:
                members = [(m, sdist.extractfile(m) if m.isfile() else None) for m in sdist if not m.isdir()]
                found = [
                    Shipped(m.name.partition("/")[2], content.read() if content else b"", is_link=not m.isfile())
                    for m, content in members
                ]
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise UserError(f"{file.name} cannot be read: {first_line(error)}") from None
    return sorted(found, key=lambda shipped: shipped.path)


def listing(name: str, shipped: Iterable[Shipped]) -> str:
    """Return a list of the files in an archive with their sizes; a folder of many files is one line."""
    folders: dict[str, list[Shipped]] = {}
    for file in shipped:
        folders.setdefault(str(PurePosixPath(file.path).parent), []).append(file)
    lines = [name]
    for folder, files in folders.items():
        if len(files) > _MOST_OF_A_FOLDER:
            lines.append(f"  {folder}/  {counted(len(files), 'file')}, {_size(files)}")
        else:
            lines += [f"  {file.path}  {_size([file])}" for file in files]
    return "\n".join(lines)


def refuse_private(
    what: str, archives: Iterable[list[Shipped]], include: Iterable[str], project: Path | None = None
) -> None:
    """Raise UserError if files that are about to be published look as if they should not be, naming them.

    `what` is published, such as a project's path. `include`: paths, names or patterns of files that are meant to be
    published all the same. `project`: what the archives were built from, if that is here.
    """
    include = list(include)
    kept = kept_in_git(project) if project is not None else None
    problems: dict[str, str] = {}
    for shipped in archives:
        for file in shipped:
            reason = _private(file, project, kept)
            told = any(known == file.path or known.endswith(f"/{file.path}") for known in problems)
            if reason is not None and not told and not _is_included(file.path, include):
                problems[file.path] = reason
    if problems:
        shown = [f"{path} ({reason})" for path, reason in list(problems.items())[:_SHOWN]]
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise UserError(
            f"{what} is not published, because what is published stays public: {', '.join(shown)}{more}; remove what is "
            f"private, or add --include {next(iter(problems))} if everybody may have that file"
        )


def kept_in_git(project: Path) -> set[str] | None:
    """Return the paths in a project that git tracks; None if the project is in no repository, or one that ignores it.

    A project that git does not track yet counts as a whole as what would be added to it.
    """
    tracked = _git_files(project, "--cached")
    if tracked is None or "pyproject.toml" in tracked:
        return tracked
    added = tracked | (_git_files(project, "--others", "--exclude-standard") or set())
    return added if "pyproject.toml" in added else None


def links_to_folders(project: Path) -> list[str]:
    """Return the symbolic links to folders in a project, which a build of uv cannot read."""
    found = []
    for folder, inside, _ in os.walk(project):
        inside[:] = [name for name in inside if not name.startswith(".")]
        found += [str(p.relative_to(project)) for name in inside if (p := Path(folder) / name).is_symlink()]
    return found


def _private(file: Shipped, project: Path | None, kept: set[str] | None) -> str | None:
    secret = (
        None if file.path.endswith((".dist-info/RECORD", ".dist-info/WHEEL")) else secret_in(file.path, file.content)
    )
    if secret is not None:
        return f"it looks like a secret by {secret}" if secret == "its name" else f"it holds {secret}"
    if file.is_link:
        return "it is a link"
    source = project / file.path if project is not None else None
    if project is None or source is None or not source.exists():  # such a file was made by the build
        return None
    if not source.resolve().is_relative_to(project.resolve()) and not _shares(project, source):
        return "it is a link out of the project"
    return "git does not track it" if kept is not None and file.path not in kept else None


def _shares(project: Path, link: Path) -> bool:
    """Whether a link leads to a file that the project's own repository tracks, such as a license of several packages."""
    root, target = next((f for f in project.resolve().parents if (f / ".git").exists()), None), link.resolve()
    return root is not None and target.is_relative_to(root) and bool(_git_files(root, "--", str(target)))


def _is_included(path: str, include: Iterable[str]) -> bool:
    return any(
        fnmatchcase(path, wanted) or path.endswith(f"/{wanted}") or wanted.endswith(f"/{path}") for wanted in include
    )


def _git_files(project: Path, *which: str) -> set[str] | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(project), "ls-files", "-z", *which], capture_output=True, stdin=subprocess.DEVNULL
        )
    except OSError:  # git is not installed
        return None
    if done.returncode == 0:
        return set(filter(None, os.fsdecode(done.stdout).split("\0")))
    if any((folder / ".git").exists() for folder in (project.resolve(), *project.resolve().parents)):
        reason = next(iter(done.stderr.decode(errors="replace").splitlines()), f"exit code {done.returncode}")
        raise UserError(f"{project} is not published: git cannot say which of its files it tracks: {reason}")
    return None


def _size(files: list[Shipped]) -> str:
    size = sum(len(file.content) for file in files)
    return f"{size} B" if size < 1000 else f"{size / 1000:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"
