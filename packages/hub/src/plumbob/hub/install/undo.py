"""Make an installation all or nothing: keep what uv is about to replace, and put it back if uv does not finish.

uv removes the old version of a package before it writes the new one, so that a full disk or a kill in between leaves
neither. Before uv runs, hard links to all files of the packages that it will replace are kept in a folder of
site-packages: they need no space. After a failure they are moved back. After a kill, the next `vf-install` does that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sysconfig
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NoReturn

from plumbob.console import UserError
from plumbob.console.files import flush_to_disk, link_or_copy, write_whole
from plumbob.hub.index.wheels import Wheel
from plumbob.hub.install.pins import installed
from plumbob.hub.installed.interrupted import UNDO, missing_files, parse_record, read_journal, undo_folder
from plumbob.hub.names import normalise, own_packages


@contextmanager
def one_installation() -> Generator[list[str]]:
    """Hold the lock of this Python's installations, and yield what an earlier one that was killed made it put back.

    Raises UserError if site-packages cannot be written.
    """
    from filelock import FileLock

    folder = undo_folder()
    try:
        with FileLock(folder.with_name(f"{UNDO}.lock")):
            yield put_back(folder)
    except PermissionError as error:
        raise UserError(f"cannot install into {folder.parent}: {error.strerror}; use a virtual environment") from None


def keep(replaced: Iterable[str], wheels: Iterable[Wheel]) -> None:
    """Keep the files of the installed distributions `replaced`, and note the files that `wheels` are about to add.

    Raises UserError if that fails, for example because the disk is full; then nothing was changed.
    """
    folder, site = undo_folder(), undo_folder().parent
    new_wheels = {w.name: w for w in wheels}
    journal: dict[str, dict] = {}
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in sorted({*map(normalise, replaced), *new_wheels}):
            here = installed(name)
            files = _keep_files(here, folder, name) if here is not None else {}
            members = new_wheels[name].members if name in new_wheels else ()
            folders = [str(site / package) for package in own_packages(name) if name in new_wheels]
            journal[name] = {
                "version": here.version if here else None,
                "files": files,
                "new": [m for m in members if not os.path.lexists(site / m)],
                "folders": {f: os.path.exists(f) for f in folders},
                "infos": [info.name for info in _infos(site, name)],
            }
        flush_to_disk(folder)
        # Written last and renamed into its place: a journal means that everything that it names has been kept.
        write_whole(folder / "journal.json", json.dumps(journal))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"nothing was installed or changed: {folder.parent}: {error.strerror}") from None


def forget() -> None:
    """Remove what `keep` has kept: the installation is complete."""
    with suppress(OSError):
        os.unlink(undo_folder() / "journal.json")  # first, because without it the rest means nothing
    shutil.rmtree(undo_folder(), ignore_errors=True)


def put_back(folder: Path, *, unless_whole: bool = True) -> list[str]:
    """Restore what `keep` has kept in `folder`, and return what was restored, such as "vf-toy 0.1.0".

    A distribution that is not damaged is left as it is; with `unless_whole` false, also an undamaged one is taken back
    to what it was. Raises OSError if a file cannot be restored; the folder then stays for another attempt.
    """
    journal = read_journal(folder)
    restored = []
    for name, was in (journal or {}).items():
        if _is_as_before(was, folder) or (unless_whole and _is_whole(name)):
            continue
        _remove_new(name, was, folder.parent)
        for path, kept in was["files"].items():
            _restore(folder / kept, Path(path))
        restored += [f"{name} {was['version']}"] if was["version"] else []
    if journal is not None:
        forget()
    return restored


@contextmanager
def ended_cleanly() -> Generator[None]:
    """Turn the signals that ask this process to end into SystemExit, so that what is under way can be undone."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that is ignored, as SIGHUP is after `nohup`, stays ignored.
    wanted = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) == signal.SIG_DFL]
    before = {s: signal.signal(s, end) for s in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep_files(here: Distribution, folder: Path, name: str) -> dict[str, str]:
    kept = {}
    for number, listed in enumerate(parse_record(here.read_text("RECORD") or "")):
        path = os.path.normpath(str(here.locate_file(listed)))
        if os.path.isfile(path):
            kept[path] = f"{name}-{number}"
            link_or_copy(Path(path), folder / kept[path])
    return kept


def _is_as_before(was: Mapping, folder: Path) -> bool:
    """Whether all old files of a package are where they were. False for a package that was not installed before."""
    files = was["files"].items()
    return bool(files) and all(os.path.exists(p) and os.path.samefile(folder / kept, p) for p, kept in files)


def _is_whole(name: str) -> bool:
    copies = [d for d in distributions() if normalise(d.metadata["Name"] or "") == name]
    return len(copies) == 1 and bool(copies[0].read_text("RECORD")) and not missing_files(copies[0])


def _remove_new(name: str, was: Mapping, site: Path) -> None:
    """Remove what the unfinished installation has written of a package."""
    roots = (site, Path(sysconfig.get_path("scripts")))
    paths = [str(site / member) for member in was["new"]]
    for info in _infos(site, name):
        if info.name not in was["infos"]:
            with suppress(OSError, UnicodeDecodeError):
                listed = parse_record((info / "RECORD").read_text())
                paths += [os.path.normpath(site / n) for n in listed]
            shutil.rmtree(info, ignore_errors=True)
    for directory, was_there in was["folders"].items():
        if not was_there:
            shutil.rmtree(directory, ignore_errors=True)
        paths += map(str, Path(directory).rglob(".tmp*"))  # what uv was writing when it ended
    for path in paths:
        if path not in was["files"] and any(Path(path).is_relative_to(root) for root in roots):
            with suppress(OSError):
                os.unlink(path)
            with suppress(OSError):
                os.removedirs(os.path.dirname(path))  # as far as they are empty


def _infos(site: Path, name: str) -> list[Path]:
    """Return the metadata directories of a distribution, of any version."""
    found = site.glob("*.dist-info")
    return [i for i in found if normalise(i.name.removesuffix(".dist-info").rpartition("-")[0]) == name]


def _restore(kept: Path, path: Path) -> None:
    if path.exists() and kept.exists() and os.path.samefile(kept, path):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        path.unlink()  # makes room on a full disk
    link_or_copy(kept, path)
