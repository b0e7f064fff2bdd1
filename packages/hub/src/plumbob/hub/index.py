"""Read an index: a server that speaks the simple API, or a folder that `hub index` wrote.

Nothing here follows a redirect to another host: some servers answer an unknown name with the public index, and a name
that the hub does not have must stay unknown.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import requests
import requests.auth
from plumbob.hub.errors import UserError
from plumbob.hub.location import Location
from plumbob.hub.masking import index_credentials, mask, publish_credentials
from plumbob.hub.names import normalise
from plumbob.hub.wheels import Wheel, read_wheel
from pypi_simple import ACCEPT_ANY, DistributionPackage, IndexPage, ProjectPage, UnsupportedContentTypeError

_TIMEOUT_S = (10, 60)
_REDIRECTS = 5


@dataclass
class Index:
    """An index that can be read. Its methods raise UserError if it cannot be reached or wants a password."""

    location: Location
    _wheels: dict[str, Wheel] = field(default_factory=dict)
    _files: dict[str, list[DistributionPackage]] = field(default_factory=dict)

    @cached_property
    def _session(self) -> requests.Session:
        session = requests.Session()
        session.auth = _SameOrigin(self.location)
        return session

    def names(self) -> list[str]:
        """The distributions on the index."""
        page = self._page(self.location.url)
        if page is None:
            raise UserError(f"{mask(self.location.url)} is no index: nothing is there")
        try:
            parsed = IndexPage.from_response(page) if isinstance(page, requests.Response) else IndexPage.from_html(page)
        except (ValueError, UnsupportedContentTypeError) as error:
            raise UserError(f"{mask(self.location.url)} is no index: {error}") from None
        return [normalise(name) for name in parsed.projects]

    def files(self, distribution: str) -> list[DistributionPackage]:
        """All files of a distribution; none if the index does not have it."""
        name = normalise(distribution)
        if name not in self._files:
            self._files[name] = self._read_files(name, urljoin(self.location.url, f"{name}/"))
        return self._files[name]

    def _read_files(self, distribution: str, url: str) -> list[DistributionPackage]:
        page = self._page(url)
        if page is None:
            return []
        try:
            if isinstance(page, requests.Response):
                return ProjectPage.from_response(page, distribution).packages
            return ProjectPage.from_html(distribution, page, url).packages
        except (ValueError, UnsupportedContentTypeError) as error:
            raise UserError(f"{mask(url)} is no page of an index: {error}") from None

    def wheel(self, package: DistributionPackage) -> Wheel:
        """The wheel, downloaded and compared with the hash that the index gives. Raises UserError if they differ."""
        if package.filename not in self._wheels:
            data = self.read(package.url)
            if data is None:
                raise UserError(f"{package.filename} is listed on {mask(self.location.url)} but not there")
            self._wheels[package.filename] = read_wheel(_verified(package, data), package.filename)
        return self._wheels[package.filename]

    def metadata(self, package: DistributionPackage) -> bytes:
        """The wheel's METADATA: its sidecar file (PEP 658) where there is one, else out of the wheel."""
        if package.has_metadata and "sha256" in (package.metadata_digests or {}):
            data = self.read(package.metadata_url)
            if data is not None:
                if hashlib.sha256(data).hexdigest() != (package.metadata_digests or {})["sha256"]:
                    raise UserError(f"the metadata of {package.filename} is refused: it is not what the index lists")
                return data
        return self.wheel(package).metadata

    def sha256(self, package: DistributionPackage) -> str:
        """The file's hash as the index lists it; of the file itself where the index lists none."""
        return package.digests.get("sha256") or self.wheel(package).sha256

    def catalog(self) -> list[dict[str, Any]] | None:
        """The catalog beside an index that `hub index` wrote; None where there is none."""
        url = urljoin(self.location.url, "../catalog.json")
        response = self._get(url, same_origin=True) if self.location.directory is None else None
        data = response.content if response is not None else self.read(url) if self.location.directory else None
        try:
            return json.loads(data)["packages"] if data else None
        except (ValueError, KeyError, TypeError):
            return None  # a server that answers every address with a page

    def read(self, url: str) -> bytes | None:
        """The bytes at an address; None if there is nothing."""
        parts = urlsplit(url)
        if parts.scheme == "file":
            # Only an index on this disk may send us to files of this disk, and only to its own.
            directory, path = self.location.directory, Path(unquote(parts.path)).resolve()
            if directory is None or not path.is_relative_to(directory.resolve()) or not path.is_file():
                return None
            return path.read_bytes()
        response = self._get(url, same_origin=False)
        return None if response is None else response.content

    def _page(self, url: str) -> requests.Response | bytes | None:
        if urlsplit(url).scheme == "file":
            return self.read(urljoin(url, "index.html"))
        return self._get(url, same_origin=True)

    def _get(self, url: str, *, same_origin: bool) -> requests.Response | None:
        """GET; None for what is not there. A page may not be answered from another host, a file may."""
        for _ in range(_REDIRECTS):
            try:
                response = self._session.get(
                    url, headers={"Accept": ACCEPT_ANY}, timeout=_TIMEOUT_S, allow_redirects=False
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
        raise UserError(f"{mask(url)} redirects without end")


class _SameOrigin(requests.auth.AuthBase):
    """Basic authentication for the index's own host only: a page may list files of any host."""

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
    """Credentials from the `keyring` program, asked as uv asks it, and only where uv is told to ask it."""
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
