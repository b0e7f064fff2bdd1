"""Run uv: find its binary, control its environment variables, and remove credentials from its output."""

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

from plumbob.console import UserError
from plumbob.hub.uv.credentials import mask

# Environment variables that would redirect an installation to another interpreter or project, or to other files of the
# same name; uv runs without them. The user's mirrors (UV_DEFAULT_INDEX, UV_INDEX, ...) are kept: they serve third-party
# packages, while first-party packages are pinned to their hashes.
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
    """A command line, and the text for its standard input. Example: Command(("uv", "pip", "list"))."""

    argv: tuple[str, ...]
    stdin: str = ""

    def shown(self) -> str:
        """Return the command as text that can be pasted into a shell."""
        line = shlex.join(self.argv)
        return f"{line} <<'END'\n{self.stdin}END" if self.stdin else line


@dataclass(frozen=True)
class Finished:
    """The exit code and the output of a command; `output` holds no credentials."""

    returncode: int
    output: str

    def reason(self) -> str:
        """Return in one line why the command failed: uv's error message and its innermost cause."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("error:", "cause:", "Caused by:", "fatal:", "×"))]
        parts = errors[:1] + errors[-1:] if len(errors) > 1 else errors or lines[-1:]
        text = "; ".join(
            part.partition(": ")[2] if part.startswith(("error", "cause", "Caused")) else part for part in parts
        )
        return text or f"exit code {self.returncode}"


def find_uv() -> str:
    """Return the path of uv: the one installed with this package, else the one on PATH.

    Raises UserError if there is none.
    """
    import uv

    try:
        return uv.find_uv_bin()
    except FileNotFoundError:
        found = shutil.which("uv")
        if found is None:
            raise UserError("uv is not installed; install it with `pip install uv`") from None
        return found


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables for uv: the current ones without those that redirect an installation."""
    return {name: value for name, value in environ.items() if name not in _REDIRECTING}


def excludes_newer(cwd: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether any of uv's settings for `cwd` makes it ignore recent releases (`exclude-newer`)."""
    if "UV_EXCLUDE_NEWER" in environ:
        return True
    config = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "uv" / "uv.toml"
    files = [config, Path("/etc/uv/uv.toml")]
    files += [d / name for d in (cwd, *cwd.parents) for name in ("uv.toml", "pyproject.toml")]
    return any("exclude-newer" in f.read_text(errors="replace") for f in files if f.is_file())


def run(command: Command, *, quiet: bool = False, cwd: str | os.PathLike | None = None) -> Finished:
    """Run a command and return its exit code and output. Unless `quiet`, print the output to stderr as it arrives."""
    # uv's standard output is merged into stderr too, because to the user of this command it is progress, not a result.
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
        with contextlib.suppress(BrokenPipeError):  # the command may have ended before it read its input
            process.stdin.write(command.stdin)
            process.stdin.close()
        for line in map(mask, process.stdout):
            lines.append(line)
            if not quiet:
                print(line, end="", file=sys.stderr, flush=True)
    return Finished(process.returncode, "".join(lines))
