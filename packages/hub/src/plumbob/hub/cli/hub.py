"""`hub`: find, check, publish and index environments.

This process imports no environment. Each command imports its dependencies when it runs, so that `hub --help` is fast.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from plumbob.console import UserError, plain
from plumbob.console.help import Command, Group
from plumbob.console.text import fitted, table
from plumbob.console.version import version_option
from plumbob.hub.installed.loading import LOAD_SECONDS

app = typer.Typer(
    no_args_is_help=True,
    cls=Group,
    rich_markup_mode=None,
    help="Find, create, check and publish RL environments. To install environments, use vf-install.",
)

Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="FILE",
        help="Publish this file (a path, a name or a pattern) although it looks like a secret, is a link out of the "
        "project, or is not tracked by git; may be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
IndexOption = Annotated[
    str | None,
    typer.Option(
        "--index",
        help="URL, folder or name of an index. Default: $PLUMBOB_INDEX, else `plumbob` in pyproject.toml.",
    ),
]


@app.callback()
def hub(version: Annotated[bool, version_option("plumbob-hub")] = False) -> None:
    pass


@app.command("list", cls=Command)
def list_(
    as_json: AsJson = False,
    check: Annotated[bool, typer.Option("--check", help="Import each environment and report those that fail.")] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.1, help="Seconds that importing one environment may take, with --check."),
    ] = LOAD_SECONDS,
) -> None:
    """List the installed environments."""
    from plumbob.hub.installed.listing import show

    show(as_json=as_json, check=check, timeout=timeout)


@app.command(cls=Command)
def info(name: Annotated[str, typer.Argument()], index: IndexOption = None, as_json: AsJson = False) -> None:
    """Describe an environment: the installed one, or with --index (or if it is not installed) the one on the index."""
    from plumbob.hub.index.information import describe, from_index, from_installed

    found = from_installed(name) if index is None else None
    try:
        found = found or from_index(name, index, Path.cwd())
    except UserError as error:
        raise error if index is not None else UserError(f"{name} is not installed, and {error}") from None
    print(json.dumps(found, indent=2) if as_json else fitted(describe(found)))


@app.command(cls=Command)
def search(
    text: Annotated[
        list[str] | None, typer.Argument(help="Words to search for. Without words, all environments are listed.")
    ] = None,
    index: IndexOption = None,
    as_json: AsJson = False,
) -> None:
    """Search the environments on an index, without installing anything."""
    from plumbob.hub.index.information import search as search_index

    found, note = search_index(" ".join(text or []), index, Path.cwd())
    if note:
        print(note, file=sys.stderr)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    if not found:
        print("nothing found", file=sys.stderr)
        return
    yanked = [f"  YANKED: {e['yanked']}" if e["yanked"] else "" for e in found]
    lines = [f"{e['name']} {e['version']}  {e['summary']}{y}" for e, y in zip(found, yanked, strict=True)]
    print(table((", ".join(e["entry_points"]), line) for e, line in zip(found, lines, strict=True)))


@app.command("check", cls=Command)
def check_(
    target: Annotated[str, typer.Argument(metavar="[PATH|NAME]")] = ".",
    setting: Annotated[
        list[str] | None,
        typer.Option("--setting", "-a", metavar="KEY=VALUE", help="A setting of the environment; may be repeated."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", help="Time limit of each check in seconds. Importing and loading may each take half of it."
        ),
    ] = 60.0,
    as_json: AsJson = False,
) -> int:
    """Check whether an environment can be published. Give its project directory or installed name. Runs its code."""
    from plumbob.hub.check.check import read_settings, run_check

    report = run_check(target, read_settings(setting or []), timeout)
    print(report.as_json() if as_json else plain(report.text()))
    return 1 if report.failed else 0


@app.command(cls=Command)
def new(
    name: Annotated[str, typer.Argument()],
    tools: Annotated[
        bool,
        typer.Option(
            "--tools", help="Create a multi-turn environment with a stateful tool. Default: a single-turn environment."
        ),
    ] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder in which the environment's directory is created.")
    ] = Path("."),
) -> None:
    """Create the project of a small environment that works and passes `hub check`."""
    from plumbob.hub.publish.scaffold import create, next_commands

    directory = create(name, output, tools=tools)
    print(f"wrote {directory}; next:\n{next_commands(directory)}")


@app.command(cls=Command)
def publish(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", show_default=False)],
    index: IndexOption = None,
    publish_url: Annotated[
        str | None,
        typer.Option("--publish-url", help="URL to upload to. Default: the URL of the index without simple/."),
    ] = None,
    include: Include = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build, list what would be uploaded, and print uv's commands; no upload.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0.1, help="Time limit of each check of `hub check`, and of a build, in seconds."),
    ] = 60.0,
) -> None:
    """Check, build, list and upload environments, with credentials from $UV_PUBLISH_USERNAME and $UV_PUBLISH_PASSWORD.

    A keyring can hold the credentials as well. All files of an upload are listed on stderr before it begins.
    """
    from plumbob.hub.index.location import locate_target
    from plumbob.hub.publish.publish import default_gate, publishing_to, shown_plan
    from plumbob.hub.publish.publish import publish as publish_all

    location = publishing_to(locate_target(index, Path.cwd()), publish_url)
    if dry_run:
        print(shown_plan(paths, location, timeout=timeout, include=include or ()))
        return
    for done in publish_all(paths, location, default_gate(timeout), timeout, include=include or ()):
        status = "published" if done.uploaded else "already published, unchanged:"
        print(f"{status} {done.name} {done.version}")
        for name in done.environments:
            print(f"install it: vf-install {name}=={done.version} --index {location.url}")


@app.command("index", cls=Command)
def index_(
    wheels: Annotated[list[Path], typer.Argument(metavar="DIR", help="Wheels, or folders that contain wheels.")],
    output: Annotated[
        Path, typer.Option("--output", "--out", "-o", help="Folder of the index; created if it does not exist.")
    ] = Path("index"),
    include: Include = None,
) -> None:
    """Add wheels to a static index: a folder that is used from disk or served by any web server."""
    from plumbob.hub.index.static_index import add_files, distributions_in
    from plumbob.hub.publish.shipped import read_archive, refuse_private

    files = distributions_in(wheels)
    for file in files:
        refuse_private(file.name, [read_archive(file)], include or ())
    built = add_files(files, output)
    print(f"{built.directory}: {built.files} files, {len(built.added)} new")
    print(f"install from it: vf-install NAME --index {output}")


@app.command("yank", cls=Command)
def yank_(
    version: Annotated[str, typer.Argument(metavar="NAME==VERSION")],
    index: Annotated[str, typer.Option("--index", help="Folder of an index that `hub index` made.")],
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why the version is yanked; installers show this text.")
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Undo the yank of this version.")] = False,
) -> None:
    """Yank a version: installing by name alone skips it, and an exact version still installs it (PEP 592)."""
    from plumbob.hub.index.location import locate
    from plumbob.hub.index.static_index import yank

    name, _, number = version.partition("==")
    if not name or not number:
        raise UserError(f"{version!r} names no version; write NAME==VERSION, such as vf-gsm8k==0.1.0")
    if (reason is None) != undo:
        raise UserError("give either --reason to yank the version, or --undo to undo its yank")
    directory = locate(index, Path.cwd()).directory
    if directory is None:
        raise UserError(
            f"{index} is a server; yank with the server's own tools, or give the folder of an index that `hub index` "
            "made"
        )
    done = yank(directory, name, number, None if undo else reason)
    print(f"{'no longer yanked' if undo else 'yanked'}: {done}")
