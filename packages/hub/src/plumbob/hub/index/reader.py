"""Read an index: a server with the simple repository API (PEP 503), or a folder that `hub index` wrote.

A redirect of an index page to another host counts as "not there": some servers redirect an unknown name to the public
index, and a name that the hub's index does not have must not be taken from there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import requests
import requests.auth
from plumbob.console import UserError
from plumbob.console.system import told
from plumbob.hub.index.entries import checked
from plumbob.hub.index.location import Location
from plumbob.hub.index.wheels import Wheel, read_wheel
from plumbob.hub.names import normalise
from plumbob.hub.uv.credentials import index_credentials, mask, publish_credentials
from pypi_simple import (
    ACCEPT_ANY,
    DistributionPackage,
    IndexPage,
    ProjectPage,
    UnsupportedContentTypeError,
    UnsupportedRepoVersionError,
)

# Beautiful Soup logs a page that is no text, which is said here in an error's sentence if it matters.
logging.getLogger("bs4").setLevel(logging.ERROR)
_TIMEOUT_S = (10, 60)
_REDIRECTS = 5
# Bytes: a list of some ten thousand names.
_MOST_NAMES = 2**20


@dataclass
class Index:
    """Reads one index and caches what it has read.

    Methods raise UserError if the index cannot be reached or wants a password.
    """

    location: Location
    _wheels: dict[str, tuple[Wheel, bytes]] = field(default_factory=dict)
    _files: dict[str, list[DistributionPackage]] = field(default_factory=dict)

    @cached_property
    def _session(self) -> requests.Session:
        session = requests.Session()
        session.auth = _SameOrigin(self.location)
        return session

    def names(self, most_bytes: int = _MOST_NAMES) -> list[str] | None:
        """Return the names of all distributions on the index; None if its list of them is longer than `most_bytes`.

        A public index lists hundreds of thousands of names; no more than `most_bytes` of such a list are downloaded.
        Raises UserError if the URL is not that of an index.
        """
        page = self._list_of_names(most_bytes)
        if page is None:
            raise UserError(
                f"{mask(self.location.url)} is not an index: there is no page at this URL; check the URL of the index"
            )
        content, is_json = page
        if len(content) > most_bytes:
            return None
        try:
            parsed = IndexPage.from_json_data(json.loads(content)) if is_json else IndexPage.from_html(content)
        except (ValueError, KeyError, TypeError, UnsupportedRepoVersionError) as error:
            raise UserError(f"{mask(self.location.url)} is not an index: {error}") from None
        return [normalise(name) for name in parsed.projects]

    def _list_of_names(self, most_bytes: int) -> tuple[bytes, bool] | None:
        """Return the first bytes of the list of names, more than `most_bytes` if it is longer, and whether it is JSON."""
        url = self.location.url
        if urlsplit(url).scheme == "file":
            content = self.read(urljoin(url, "index.html"))
            return None if content is None else (content, False)
        response = self._get(url, same_origin=True, stream=True)
        if response is None:
            return None
        content = b""
        try:
            with response:
                for part in response.iter_content(2**16):
                    content += part
                    if len(content) > most_bytes:
                        break
        except requests.RequestException as error:
            raise UserError(f"cannot read {mask(url)}: {_cause(error)}") from None
        return content, "json" in response.headers.get("Content-Type", "")

    def files(self, distribution: str) -> list[DistributionPackage]:
        """Return all files of a distribution; an empty list if the index does not have it."""
        name = normalise(distribution)
        if name not in self._files:
            self._files[name] = self._read_files(name, urljoin(self.location.url, f"{name}/"))
        return self._files[name]

    def _read_files(self, distribution: str, url: str) -> list[DistributionPackage]:
        local = self.location.directory is not None
        page = self.read(urljoin(url, "index.html")) if local else self._get(url, same_origin=True)
        if page is None:
            return []
        try:
            if isinstance(page, requests.Response):
                return ProjectPage.from_response(page, distribution).packages
            return ProjectPage.from_html(distribution, page, url).packages
        except (ValueError, UnsupportedContentTypeError) as error:
            raise UserError(f"{mask(url)} is not a page of an index: {error}") from None

    def wheel(self, package: DistributionPackage) -> Wheel:
        """Download a wheel and compare it with the hashes that the index lists. Raises UserError if they differ."""
        return self._read_wheel(package)[0]

    def keep(self, package: DistributionPackage) -> Path:
        """Keep a wheel, which is compared with its hashes, in a folder of its own, and return that folder.

        A wheel that is on this disk is kept as a link. The folder is always the same one for the same wheel, so that uv,
        whose cache goes by paths, unpacks it once. Raises UserError if it cannot be written.
        """
        data, parts = self._read_wheel(package)[1], urlsplit(package.url)
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plumbob" / "wheels"
        target = folder / hashlib.sha256(data).hexdigest()[:16] / package.filename
        part = target.with_name(f".{os.getpid()}.part")
        try:
            if not target.is_file() or target.read_bytes() != data:
                target.parent.mkdir(parents=True, exist_ok=True)
                part.symlink_to(unquote(parts.path)) if parts.scheme == "file" else part.write_bytes(data)
                part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise UserError(f"{package.filename} cannot be kept in {target.parent}: {told(error)}") from None
        return target.parent

    def _read_wheel(self, package: DistributionPackage) -> tuple[Wheel, bytes]:
        if package.filename not in self._wheels:
            data = self.read(package.url)
            if data is None:
                raise UserError(
                    f"{package.filename} is listed on {mask(self.location.url)}, but the file is missing there; "
                    "choose another version"
                )
            self._wheels[package.filename] = read_wheel(_verified(package, data), package.filename), data
        return self._wheels[package.filename]

    def metadata(self, package: DistributionPackage) -> bytes:
        """Return the wheel's METADATA, from its sidecar file (PEP 658) if the index has one, else from the wheel.

        Raises UserError if the sidecar file does not have the hash that the index lists.
        """
        if package.has_metadata and "sha256" in (package.metadata_digests or {}):
            data = self.read(package.metadata_url)
            if data is not None:
                if hashlib.sha256(data).hexdigest() != (package.metadata_digests or {})["sha256"]:
                    raise UserError(
                        f"the metadata of {package.filename} is refused: its sha256 is not the one that the index lists"
                    )
                return data
        return self.wheel(package).metadata

    def sha256(self, package: DistributionPackage) -> str:
        """Return the file's sha256 as the index lists it; if the index lists none, that of the downloaded file."""
        return package.digests.get("sha256") or self.wheel(package).sha256

    def catalog(self) -> list[dict[str, Any]] | None:
        """Return the entries of catalog.json, which `hub index` writes; None if the index has no such file."""
        url = urljoin(self.location.url, "../catalog.json")
        response = self._get(url, same_origin=True) if self.location.directory is None else None
        data = response.content if response is not None else self.read(url) if self.location.directory else None
        try:
            packages = json.loads(data)["packages"] if data else None
        except (ValueError, KeyError, TypeError, RecursionError):
            if self.location.directory is None:
                return None  # some servers answer every URL with an HTML page
            packages = ()
        return None if packages is None else checked(packages, mask(url))

    def read(self, url: str) -> bytes | None:
        """Return the bytes at a URL; None if there is nothing."""
        parts = urlsplit(url)
        if parts.scheme == "file":
            # A file: link is followed only if the index itself is a folder on this disk and the file is inside that
            # folder.
            directory, path = self.location.directory, Path(unquote(parts.path)).resolve()
            if directory is None or not path.is_relative_to(directory.resolve()) or not path.is_file():
                return None
            return path.read_bytes()
        response = self._get(url, same_origin=False)
        return None if response is None else response.content

    def _get(self, url: str, *, same_origin: bool, stream: bool = False) -> requests.Response | None:
        """GET a URL; None if it is not there (404, 410).

        `same_origin`: a redirect to another host counts as not there. Files, unlike index pages, may be on another
        host. `stream`: the caller reads the body, and closes the response.
        """
        for _ in range(_REDIRECTS):
            try:
                response = self._session.get(
                    url, headers={"Accept": ACCEPT_ANY}, timeout=_TIMEOUT_S, allow_redirects=False, stream=stream
                )
            except requests.RequestException as error:
                raise UserError(f"cannot reach {mask(url)}: {_cause(error)}") from None
            if response.is_redirect:
                url = urljoin(url, response.headers["Location"])
                if same_origin and _origin(url) != _origin(self.location.url):
                    return None
                continue
            if response.status_code in (404, 410):
                return None
            if response.status_code in (401, 403):
                variable = f"UV_INDEX_{self.location.name.upper().replace('-', '_')}"
                raise UserError(
                    f"{mask(url)} answers {response.status_code}; set {variable}_USERNAME and {variable}_PASSWORD"
                )
            if not response.ok:
                raise UserError(f"{mask(url)} answers {response.status_code} {response.reason}")
            return response
        raise UserError(f"{mask(url)} redirects more than {_REDIRECTS} times; check the URL of the index")


class _SameOrigin(requests.auth.AuthBase):
    """Basic authentication for the index's own host only, because an index page may list files on any host."""

    def __init__(self, location: Location) -> None:
        self._origins = {_origin(location.url)}
        credentials = index_credentials(location.name) or _keyring(location.url)
        if credentials is None and location.publish_url and _origin(location.publish_url) == _origin(location.url):
            credentials = publish_credentials()
        self._basic = requests.auth.HTTPBasicAuth(*credentials) if credentials else None

    def __call__(self, r: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._basic is not None and _origin(r.url or "") in self._origins:
            return self._basic(r)
        return r


def _keyring(url: str) -> tuple[str, str] | None:
    """Return credentials from the `keyring` program; like uv, call it only if UV_KEYRING_PROVIDER is "subprocess"."""
    if os.environ.get("UV_KEYRING_PROVIDER") != "subprocess":
        return None
    try:
        answer = subprocess.run(
            ["keyring", "--mode", "creds", "get", url], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return (answer[0], answer[1]) if len(answer) == 2 else None


def _verified(package: DistributionPackage, data: bytes) -> bytes:
    """Return `data` if it has every hash that the index lists for the file. Raises UserError if not."""
    for algorithm, expected in package.digests.items():
        if algorithm in hashlib.algorithms_guaranteed and hashlib.new(algorithm, data).hexdigest() != expected:
            raise UserError(f"{package.filename} is refused: its {algorithm} is not the one that the index lists")
    return data


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _cause(error: Exception) -> str:
    reason: Any = error.args[0] if error.args else error
    reason = getattr(reason, "reason", reason)
    return mask(str(reason).split(": ", 1)[-1])
