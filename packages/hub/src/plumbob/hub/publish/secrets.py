"""Recognise what should not be published by its name or its content: keys, tokens, passwords.

The table below is our own. Of the libraries, detect-secrets (last release in May 2024) needs 2 to 8 seconds for a
megabyte of JSON lines, such as environments bring, and does not know the tokens of Hugging Face and Anthropic; those
that are fast bring programs of 25 to 50 MB, a thousand times the size of this package.
"""

from __future__ import annotations

import re

_NAMES = re.compile(
    r"\.env(\..+)?|.+\.env|\.?(netrc|pypirc|npmrc|htpasswd|git-credentials|bash_history|python_history)|_netrc"
    r"|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|.+\.(pem|key|p12|pfx|jks|keystore|kdbx|ovpn|ppk)|kubeconfig"
    r"|(.*[-_.])?(credentials?|secrets?|api[-_]?keys?|token|service[-_]account[^.]*)"
    r"(\.(json|toml|ya?ml|ini|cfg|txt|env|csv))?",
    re.IGNORECASE,
)
_FOLDERS = {".ssh", ".aws", ".gnupg", ".kube", ".azure", ".docker", ".git"}
# Names of examples, which are meant to be shared and hold nothing.
_EXAMPLES = re.compile(r".*\.(example|sample|template|dist|tmpl)|example\..*", re.IGNORECASE)

# What it is; a text with which it begins, which is found fast; and the whole of it from there on.
_TOKENS: tuple[tuple[str, bytes, str], ...] = (
    ("a private key", b"-----BEGIN ", r"(?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
    ("a token of Hugging Face", b"hf_", r"[A-Za-z0-9]{30,}"),
    ("a key of OpenAI", b"sk-", r"[\w-]{16,}T3BlbkFJ[\w-]{16,}|[A-Za-z0-9]{48}\b|(?:proj|svcacct|admin)-[\w-]{40,}"),
    ("a key of Anthropic", b"sk-ant-", r"[a-z0-9]+-[\w-]{20,}"),
    ("a key of OpenRouter", b"sk-or-v1-", r"[0-9a-f]{40,}"),
    ("a key of AWS", b"AKIA", r"[0-9A-Z]{16}\b"),
    ("a key of AWS", b"ASIA", r"[0-9A-Z]{16}\b"),
    *(("a token of GitHub", prefix, r"[A-Za-z0-9_]{22,}") for prefix in (b"ghp_", b"gho_", b"ghs_", b"ghu_", b"ghr_")),
    ("a token of GitHub", b"github_pat_", r"\w{22,}"),
    ("a token of GitLab", b"glpat-", r"[\w-]{20,}"),
    ("a key of Google", b"AIza", r"[\w-]{35}"),
    ("a token of Slack", b"xox", r"[abeposr]-[\w-]{10,}"),
    ("a token of PyPI", b"pypi-AgE", r"[\w-]{50,}"),
    ("a token of npm", b"npm_", r"[A-Za-z0-9]{36}"),
    ("a key of Stripe", b"sk_live_", r"[0-9A-Za-z]{20,}"),
    ("a JSON web token", b"eyJ", r"[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
)
_REST = {rest: re.compile(rest.encode()) for _, _, rest in _TOKENS}
_ASSIGNED = re.compile(
    rb"(?:api_?key|access_?key|secret|token|passwo?r?d)\w*[\"']?\s*[:=]\s*([\"']?)"
    rb"(?!/)(?=[^\s\"']*[0-9])(?=[^\s\"']*[a-z])[\w+/=.~-]{20,}\1(?=[\s\"',;)]|\Z)",
    re.IGNORECASE,
)
# Bytes. A value that is assigned to a name is looked for in code and settings, which are shorter than data.
_LONGEST_CODE = 2**20


def secret_in(path: str, content: bytes) -> str | None:
    """Return what in a file looks like a secret, without its value; None if nothing does.

    Example: secret_in("vf_x/.env", b"") == "its name"; secret_in("a.py", b"\\n'hf_...'") == "a token of Hugging Face in
    line 2".
    """
    *folders, name = path.split("/")
    if not _FOLDERS.isdisjoint(folders) or (_NAMES.fullmatch(name) and not _EXAMPLES.fullmatch(name)):
        return "its name"
    for what, begin, rest in _TOKENS:
        at = content.find(begin)
        while at >= 0:
            if not content[max(at - 1, 0) : at].isalnum() and _REST[rest].match(content, at + len(begin)):
                return f"{what} in line {_line(content, at)}"
            at = content.find(begin, at + 1)
    found = _ASSIGNED.search(content) if len(content) <= _LONGEST_CODE else None
    return f"a value like a password in line {_line(content, found.start())}" if found else None


def _line(content: bytes, at: int) -> int:
    return content.count(b"\n", 0, at) + 1
