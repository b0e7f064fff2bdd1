"""Read a wheel's metadata in memory: no archive member is ever written to disk."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from plumbob.console import UserError
from plumbob.hub.installed.interrupted import parse_record
from plumbob.hub.installed.registry import GROUP
from plumbob.hub.uv.command import Command, find_uv, run

# Bytes. A small archive can hold a huge member, so no more than this is decompressed.
_LARGEST_METADATA = 4 * 2**20
_SCRIPTS = ("console_scripts", "gui_scripts")


@dataclass(frozen=True)
class Wheel:
    """A wheel's metadata. `entry_points` holds its environments only, such as {"gsm8k": "vf_gsm8k:GSM8KTaskset"}."""

    filename: str
    name: str
    version: str
    metadata: bytes
    entry_points: dict[str, str]
    sha256: str
    scripts: tuple[str, ...] = ()
    """The commands that it installs. Example: ("vf-install", "hub")."""
    members: tuple[str, ...] = ()
    """The paths of all its files. Example: "vf_gsm8k/__init__.py"."""
    record: dict[str, str] = field(default_factory=dict)
    """RECORD: for each file its hash, such as "sha256=47DEQpj8...", "" for RECORD itself."""

    @property
    def fields(self) -> Message:
        """The parsed METADATA file."""
        return parse_metadata(self.metadata)


def parse_metadata(metadata: bytes) -> Message:
    """Parse a METADATA file: a message whose headers are the fields and whose payload is the README."""
    # Parsed as bytes, a field that is not all ASCII would be an object instead of its text.
    return Parser().parsestr(metadata.decode(errors="replace"))


def readme(fields: Message) -> str:
    """Return the README in a METADATA file; "" if there is none."""
    payload = fields.get_payload()
    return payload if isinstance(payload, str) else ""


def read_wheel(source: Path | bytes, filename: str | None = None) -> Wheel:
    """Read a wheel.

    Raises UserError if it is damaged, if its metadata does not match the name and version in its file name, or if a
    member would be unpacked outside the target directory.
    """
    filename = filename or (source.name if isinstance(source, Path) else "wheel")
    try:
        name, version, _, _ = parse_wheel_filename(filename)
        data = source.read_bytes() if isinstance(source, Path) else source
        with zipfile.ZipFile(BytesIO(data)) as archive:
            unsafe = next((n for n in archive.namelist() if not _is_inside(n)), None)
            if unsafe is not None:
                raise UserError(f"{filename} is refused: its member {unsafe!r} would be written outside the target")
            members = tuple(n for n in archive.namelist() if not n.endswith("/"))
            info = _info_directory(archive, str(name))
            metadata = _member(archive, f"{info}/METADATA")
            declared = _member(archive, f"{info}/entry_points.txt", missing=b"")
            record = parse_record(_member(archive, f"{info}/RECORD").decode(errors="replace"))
    except (InvalidWheelFilename, InvalidVersion, zipfile.BadZipFile, KeyError, OSError) as error:
        why = error.args[0] if isinstance(error, KeyError) else error
        raise UserError(f"{filename} is not a readable wheel: {why}") from None
    fields = parse_metadata(metadata)
    if canonicalize_name(fields["Name"] or "") != name or Version(fields["Version"] or "0") != version:
        raise UserError(f"{filename} is refused: its metadata says that it is {fields['Name']} {fields['Version']}")
    points = parse_entry_points(declared)
    return Wheel(
        filename,
        str(name),
        str(version),
        metadata,
        points.get(GROUP, {}),
        hashlib.sha256(data).hexdigest(),
        tuple(script for group in _SCRIPTS for script in points.get(group, {})),
        members,
        record,
    )


def build_wheel(project: Path, out: Path, *flags: str, timeout: float | None = None) -> Wheel:
    """Build a project's wheel in the folder `out`, as uv does with these flags. Raises UserError if that fails."""
    build = ("build", "--quiet", "--wheel", "--no-create-gitignore", "--python", sys.executable, "--out-dir", str(out))
    done = run(Command((find_uv(), *build, *flags, str(project))), quiet=True, timeout=timeout)
    if done.returncode != 0:
        raise UserError(f"the wheel of {project.name} cannot be built: {done.reason()}")
    return next(read_wheel(file) for file in out.glob("*.whl"))


def parse_entry_points(entry_points: bytes) -> dict[str, dict[str, str]]:
    """Return an entry_points.txt as {group: {name: value}}. Raises UserError if it cannot be parsed."""
    parser = _EntryPoints(delimiters=("=",), interpolation=None, strict=False)
    try:
        parser.read_string(entry_points.decode(errors="replace"))
    except ConfigParserError as error:
        raise UserError(f"the wheel's entry_points.txt cannot be read: {error}") from None
    return {group: dict(parser[group]) for group in parser.sections()}


class _EntryPoints(ConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr  # ConfigParser would make names lower case


def _is_inside(member: str) -> bool:
    path = PurePosixPath(member.replace("\\", "/"))
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and ":" not in path.parts[0]


def _info_directory(archive: zipfile.ZipFile, name: str) -> str:
    tops = {member.split("/")[0] for member in archive.namelist()}
    own = [
        t
        for t in tops
        if t.endswith(".dist-info") and canonicalize_name(t[: -len(".dist-info")].rsplit("-", 1)[0]) == name
    ]
    if len(own) != 1:
        raise KeyError("it has no .dist-info directory of its own name")
    return own[0]


def _member(archive: zipfile.ZipFile, name: str, missing: bytes | None = None) -> bytes:
    if missing is not None and name not in archive.namelist():
        return missing
    member: IO[bytes]
    with archive.open(name) as member:
        data = member.read(_LARGEST_METADATA + 1)
    if len(data) > _LARGEST_METADATA:
        raise UserError(f"{name} is refused: it is larger than {_LARGEST_METADATA // 2**20} MiB")
    return data
