"""Run uv: find its binary, control its environment variables, and remove credentials from its output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plumbob.console import UserError, plain
from plumbob.hub.uv.credentials import mask

# The only variables of uv that uv sees: how to reach the network, where its cache is, which third-party releases the
# user wants, and credentials. All others could redirect an installation to another interpreter, project or
# configuration file, or to other files of the same name. The user's mirrors (UV_DEFAULT_INDEX, UV_INDEX, ...) are kept:
# they serve third-party packages, while first-party packages are pinned to their hashes.
_KEPT = re.compile(
    r"UV_(CACHE_DIR|NO_CACHE|LINK_MODE|COMPILE_BYTECODE|NO_PROGRESS|LOCK_TIMEOUT|CONCURRENT_\w+|BREAK_SYSTEM_PACKAGES"
    r"|OFFLINE|(UPLOAD_)?HTTP_\w+|REQUEST_TIMEOUT|SYSTEM_CERTS|NATIVE_TLS|INSECURE_HOST"
    r"|DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL|INDEX_\w+_(USERNAME|PASSWORD)|TORCH_BACKEND"
    r"|EXCLUDE_NEWER|CONSTRAINT|BUILD_CONSTRAINT|PRERELEASE|RESOLUTION"
    r"|PYTHON_DOWNLOADS|PYTHON_INSTALL_\w+|MANAGED_PYTHON|NO_MANAGED_PYTHON|KEYRING_PROVIDER|CREDENTIALS_DIR|PUBLISH_(USERNAME|PASSWORD|TOKEN|NO_ATTESTATIONS)|GITHUB_TOKEN)"
)


_PATHS = (
    *("UV_CACHE_DIR", "UV_CONSTRAINT", "UV_BUILD_CONSTRAINT", "UV_CREDENTIALS_DIR"),
    *("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL"),
)
_SYSTEM_CONFIG = Path("/etc/uv/uv.toml")


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
        if self.returncode < 0:
            return f"uv was ended by the signal {signal.Signals(-self.returncode).name}"
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
    """Return the environment variables for uv: the current ones without those that redirect an installation.

    Relative paths in them become absolute, because uv runs in another directory.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("UV_") or _KEPT.fullmatch(name)}
    return kept | {name: _absolute(kept[name]) for name in _PATHS if name in kept}


def _absolute(value: str) -> str:
    return " ".join(os.path.abspath(part) if os.path.exists(part) else part for part in value.split(" "))


def excludes_newer(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user's or the system's settings of uv make it ignore recent releases (`exclude-newer`)."""
    if "UV_EXCLUDE_NEWER" in environ:
        return True
    config = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "uv" / "uv.toml"
    return any("exclude-newer" in f.read_text(errors="replace") for f in (config, _SYSTEM_CONFIG) if f.is_file())


def run(command: Command, *, quiet: bool = False, timeout: float | None = None) -> Finished:
    """Run a command and return its exit code and output. Unless `quiet`, print the output to stderr as it arrives.

    After `timeout` seconds the command, and all that it has started, is killed; that counts as a failure.
    """
    # uv's standard output is merged into stderr too, because to the user of this command it is progress, not a result.
    process = subprocess.Popen(
        command.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(),
        start_new_session=timeout is not None,
    )
    late = threading.Event()

    def kill() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout or 0, kill)
    assert process.stdin is not None and process.stdout is not None
    lines = []
    with process:
        try:
            if timeout is not None:
                timer.start()
            with contextlib.suppress(BrokenPipeError):  # the command may have ended before it read its input
                process.stdin.write(command.stdin)
                process.stdin.close()
            for line in map(mask, process.stdout):
                lines.append(line)
                if not quiet:
                    print(plain(line), end="", file=sys.stderr, flush=True)
            process.wait()
        except BaseException:  # such as KeyboardInterrupt: without this, uv would go on while its work is undone
            process.terminate()
            raise
        finally:
            timer.cancel()
    if late.is_set():
        return Finished(1, f"error: it takes more than {timeout:g} s\n")
    return Finished(process.returncode, "".join(lines))


def planned_changes(command: Command) -> tuple[Finished, list[str], list[str]]:
    """Let uv plan a `uv pip install` without doing it. Return its exit code and messages, the names of the installed
    distributions that it would replace or remove, and the names of those that it would install.
    """
    argv = (*command.argv, "--dry-run", "--output-format", "json")
    done = subprocess.run(
        argv, input=command.stdin, capture_output=True, text=True, errors="replace", env=environment()
    )
    try:
        changes = json.loads(done.stdout or "{}").get("changes", [])
    except ValueError:
        changes = []
    out, new = ([c["name"] for c in changes if c["action"] == action] for action in ("uninstalled", "installed"))
    return Finished(done.returncode, mask(done.stderr)), out, new
