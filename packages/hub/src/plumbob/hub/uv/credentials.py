"""Read credentials from environment variables, refuse them in URLs, and mask them in all output."""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote, urlsplit

from plumbob.console import UserError

_USERINFO = re.compile(r"(https?://)[^/\s@]+@")
_SECRET_NAME = re.compile(r"UV_(PUBLISH|INDEX)_(.*_)?(PASSWORD|TOKEN)$")


def refuse_credentials(url: str) -> str:
    """Return the URL.

    Raises UserError if it is none, or if it holds credentials, because URLs end up in shell histories and lock files.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # which is read now
    except ValueError as error:
        raise UserError(f"{mask(url)!r} is no address: {error}") from None
    if parts.password or (parts.scheme in ("http", "https") and parts.username):
        raise UserError(
            f"{mask(url)} holds credentials; leave them out and set UV_INDEX_<NAME>_USERNAME and "
            "UV_INDEX_<NAME>_PASSWORD (to publish, UV_PUBLISH_USERNAME and UV_PUBLISH_PASSWORD) instead"
        )
    return url


def index_credentials(name: str, environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return user name and password for the index `name`, from UV_INDEX_<NAME>_USERNAME and _PASSWORD, as uv does."""
    key = re.sub(r"[^A-Z0-9]", "_", name.upper())
    user, password = environ.get(f"UV_INDEX_{key}_USERNAME"), environ.get(f"UV_INDEX_{key}_PASSWORD")
    return (user or "", password or "") if user or password else None


def publish_credentials(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Return user name and password for uploads, as uv does: UV_PUBLISH_TOKEN, or UV_PUBLISH_USERNAME and _PASSWORD."""
    token = environ.get("UV_PUBLISH_TOKEN")
    if token:
        return "__token__", token
    user, password = environ.get("UV_PUBLISH_USERNAME"), environ.get("UV_PUBLISH_PASSWORD")
    return (user or "", password or "") if user or password else None


def mask(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace credentials in a text by ***: user:password in URLs, and secrets of `environ` in any encoding."""
    text = _USERINFO.sub(r"\1***@", text)
    for secret in _secrets(environ):
        text = text.replace(secret, "***")
    return text


def _secrets(environ: Mapping[str, str]) -> list[str]:
    found = set()
    for name, value in environ.items():
        if _SECRET_NAME.match(name) and value:
            user = environ.get(re.sub(r"(PASSWORD|TOKEN)$", "USERNAME", name), "__token__")
            found |= {value, quote(value, safe=""), b64encode(f"{user}:{value}".encode()).decode()}
        elif name.startswith("UV_") and "://" in value:
            with suppress(ValueError):  # it is no address
                found |= {part.password for part in map(urlsplit, value.split()) if part.password}
    # Longest first: a secret may contain another one, and replacing the inner one first would leave the rest visible.
    return sorted(found, key=len, reverse=True)
