"""`vf-install`: the command line."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer
from plumbob.console import typed
from plumbob.console.help import Command
from plumbob.console.text import fitted
from plumbob.console.version import version_option
from plumbob.hub.installed.loading import LOAD_SECONDS
from plumbob.hub.uv.project import enclosing

app = typer.Typer(rich_markup_mode=None)

_HELP = """Install environments into the Python that runs this command.

NAME is a name (gsm8k, vf-gsm8k), a name with a version (gsm8k==0.2.0), or a path (./my-env, my_env.whl).

A name is looked up in this order: the installed environments; the projects in ./environments and in the uv workspace;
the index. With a version or with --index, only the index is used. A name that the index does not have is an error: it
is never taken from another index such as PyPI.
"""


@app.command(help=_HELP, cls=Command)
def vf_install(
    names: Annotated[list[str], typer.Argument(metavar="NAME", show_default=False)],
    path: Annotated[
        Path | None,
        typer.Option(
            "--path",
            "-p",
            help="Folder that contains the environments' projects. With --from-repo: a folder of the repository.",
        ),
    ] = None,
    from_repo: Annotated[
        bool, typer.Option("--from-repo", "-r", help="Install from the projects in a git repository.")
    ] = False,
    branch: Annotated[
        str | None, typer.Option("--branch", "-b", help="Branch or tag of the git repository, with --from-repo.")
    ] = None,
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo",
            help="URL or directory of the git repository, with --from-repo. Default: $PLUMBOB_REPO, else the checkout that "
            "the command runs in.",
        ),
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index",
            help="URL, folder or name of an index. Default: $PLUMBOB_INDEX, else `plumbob` in pyproject.toml.",
        ),
    ] = None,
    upgrade: Annotated[
        bool,
        typer.Option(
            "--upgrade",
            "-U",
            help="Install the newest versions, also of the plumbob libraries that the environments need.",
        ),
    ] = False,
    prerelease: Annotated[bool, typer.Option("--prerelease", help="Allow pre-releases.")] = False,
    save: Annotated[
        bool,
        typer.Option(
            "--save", help="Record environment and index in pyproject.toml, so that `uv sync` keeps the environment."
        ),
    ] = False,
    trust_index: Annotated[
        bool,
        typer.Option(
            "--trust-index",
            help="Take every package that the index has from there, not only environments and plumbob's own packages.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print uv's command without running it.")] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.1, help="Seconds that importing one installed environment, as a test, may take."
        ),
    ] = LOAD_SECONDS,
    version: Annotated[bool, version_option("plumbob-hub")] = False,
) -> int:
    from plumbob.hub.install.install import Options, Outcome, install

    options = Options(path, from_repo, branch, repo, index, upgrade, prerelease, save, trust_index, dry_run, timeout)
    outcomes = install(names, options, Path.cwd())
    done = [o for o in outcomes if o.status in ("installed", "already there")]
    failed = [o for o in outcomes if o.status == "failed"]
    if dry_run:
        for o in (*done, *failed):
            print(f"{o.status}: {o.target}: {o.detail or o.version}", file=sys.stderr)
        return _exit_code(failed)

    def line(o: Outcome) -> str:
        what = f"{o.distribution} {o.version}".strip() or o.target
        origin = f" from {o.detail}" if o.status == "installed" else ""
        return f"{o.status:<13}  {o.target}: {o.detail}" if o.status == "failed" else f"{o.status:<13}  {what}{origin}"

    print(fitted("\n".join(" ".join(line(o).splitlines()) for o in outcomes)))
    names_done = [name for o in done for name in o.names]
    if names_done:
        hint = (
            ""
            if entry_points(group="console_scripts", name="train")
            else "  (both need plumbob-trainer, which is not installed here)"
        )
        print()
        print(
            fitted(
                "\n".join(
                    f"train it: {typed(f'train {name}')}    evaluate it: {typed(f'evaluate {name}')}{hint}"
                    for name in names_done
                )
            )
        )
    if any(o.status == "installed" for o in done) and not save:
        _warn_if_not_recorded()
    return _exit_code(failed)


def _exit_code(failed: list) -> int:
    """Return 0 if nothing failed, 2 if every failure is a user error, else 1."""
    if not failed:
        return 0
    return 2 if all(o.user_error for o in failed) else 1


def _warn_if_not_recorded() -> None:
    """Warn if the next `uv sync` of the enclosing project will remove what was installed."""
    project = next(enclosing(Path.cwd()), None)
    if project is not None and (project.root / "uv.lock").exists() and Path(sys.prefix).is_relative_to(project.root):
        print(f"not recorded in {project.root}: `uv sync` will remove it; --save keeps it", file=sys.stderr)
