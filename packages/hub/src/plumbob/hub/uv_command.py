"""uv as a program: which binary, in which environment, and its output without credentials."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plumbob.hub.errors import UserError
from plumbob.hub.masking import mask

# What would send an installation elsewhere than where this command says: another interpreter, another project, other
# files under the same name. The user's mirrors (UV_DEFAULT_INDEX, UV_INDEX, ...) stay: they serve third-party packages,
# and a first-party one is pinned to its hash.
_REDIRECTING = (
    "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
    "UV_PROJECT",
    "UV_PROJECT_ENVIRONMENT",
    "UV_WORKING_DIR",
    "UV_INDEX_STRATEGY",
    "UV_NO_VERIFY_HASHES",
    "UV_NO_SOURCES",
    "UV_NO_EDITABLE",
    "UV_OVERRIDE",
    "UV_FIND_LINKS",
    "UV_PUBLISH_INDEX",
    "UV_PUBLISH_URL",
)


@dataclass(frozen=True)
class Command:
    """A command line, with what it reads from standard input. Example: Command(("uv", "pip", "list"))."""

    argv: tuple[str, ...]
    stdin: str = ""

    def shown(self) -> str:
        """The command as one can paste it into a shell."""
        line = shlex.join(self.argv)
        return f"{line} <<'END'\n{self.stdin}END" if self.stdin else line


@dataclass(frozen=True)
class Finished:
    """How a command ended; `output` is masked."""

    returncode: int
    output: str

    def reason(self) -> str:
        """Why it failed, in one line: uv's own error and its innermost cause."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith(("error:", "cause:", "Caused by:", "fatal:", "×"))]
        parts = told[:1] + told[-1:] if len(told) > 1 else told or lines[-1:]
        text = "; ".join(
            part.partition(": ")[2] if part.startswith(("error", "cause", "Caused")) else part for part in parts
        )
        return text or f"exit code {self.returncode}"


def find_uv() -> str:
    """The uv binary: the one installed with this package, else the one on PATH. Raises UserError if there is none."""
    import uv

    try:
        return uv.find_uv_bin()
    except FileNotFoundError:
        found = shutil.which("uv")
        if found is None:
            raise UserError("uv is not installed; install it with `pip install uv`") from None
        return found


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that uv runs in: this one without what redirects it."""
    return {name: value for name, value in environ.items() if name not in _REDIRECTING}


def excludes_newer(cwd: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether uv is set, anywhere, to pass over recent releases (`exclude-newer`)."""
    if "UV_EXCLUDE_NEWER" in environ:
        return True
    config = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "uv" / "uv.toml"
    files = [config, Path("/etc/uv/uv.toml")]
    files += [d / name for d in (cwd, *cwd.parents) for name in ("uv.toml", "pyproject.toml")]
    return any("exclude-newer" in f.read_text(errors="replace") for f in files if f.is_file())


def run(command: Command, *, quiet: bool = False, cwd: str | os.PathLike | None = None) -> Finished:
    """Run a command. Its output goes to stderr line by line unless `quiet`, and is kept; both without credentials."""
    # Standard output too: what uv says is progress to the user of this command.
    process = subprocess.Popen(
        command.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(),
        cwd=cwd,
    )
    assert process.stdin is not None and process.stdout is not None
    lines = []
    with process:
        with contextlib.suppress(BrokenPipeError):  # it may have failed before it read anything
            process.stdin.write(command.stdin)
            process.stdin.close()
        for line in map(mask, process.stdout):
            lines.append(line)
            if not quiet:
                print(line, end="", file=sys.stderr, flush=True)
    return Finished(process.returncode, "".join(lines))
