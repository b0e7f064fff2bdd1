"""`vf-install`: resolve names to sources, pin first-party packages, install with uv, and test that they import.

`plan` is a pure function that returns uv's command line; `install` runs it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from plumbob.console import UserError
from plumbob.hub.index.location import Location, locate
from plumbob.hub.install.pins import Pin, installed, pin
from plumbob.hub.install.save import plan_save, save, saving_project
from plumbob.hub.install.sources import (
    Item,
    Target,
    default_item,
    from_folder,
    from_index,
    from_path,
    from_repository,
    parse_target,
)
from plumbob.hub.installed.loading import why_it_does_not_load
from plumbob.hub.installed.registry import scan
from plumbob.hub.names import environment_name, normalise
from plumbob.hub.uv.command import Command, Finished, excludes_newer, find_uv, run

if TYPE_CHECKING:
    from plumbob.hub.index.reader import Index


@dataclass(frozen=True)
class Options:
    """The command-line options of `vf-install`."""

    path: Path | None = None
    from_repo: bool = False
    branch: str | None = None
    repo: str | None = None
    index: str | None = None
    upgrade: bool = False
    prerelease: bool = False
    save: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result for one target.

    `status` is "installed", "already there", "planned" or "failed". `detail` is where it came from, or why it failed.
    `user_error`: it failed because of a mistake that the user can correct. `names`: the environments that it provides.
    """

    target: str
    status: str
    distribution: str = ""
    version: str = ""
    detail: str = ""
    user_error: bool = False
    names: tuple[str, ...] = ()


def plan(
    items: Iterable[Item], pins: Iterable[Pin], index: Location | None, *, uv: str, python: str, dated: bool = False
) -> Command:
    """Return uv's command line for these items and pins.

    uv accepts hashes only in a requirements file, so the pins are passed as one on standard input. `dated`: uv is set
    to ignore recent releases (see `excludes_newer`).

    Example: plan([item], [Pin("vf-gsm8k", "0.2.0", ("ab",))], Location("plumbob", URL), uv="uv", python="python").argv
    ends in ("--index", "plumbob=URL", "--index-strategy", "first-index", "--requirements", "-").
    """
    items, pins = list(items), list(pins)
    argv = [uv, "pip", "install", "--python", python]
    if index is not None:
        argv += ["--index", index.argument, "--index-strategy", "first-index"]
    if dated:  # `exclude-newer` hides every file of an index that gives no upload times
        argv += [f for p in pins if p.hashes for f in ("--exclude-newer-package", f"{p.name}=false")]
    argv += [argument for item in items for argument in item.arguments]
    return Command((*argv, "--requirements", "-") if pins else tuple(argv), "".join(f"{p.line()}\n" for p in pins))


def install(names: list[str], options: Options, cwd: Path) -> list[Outcome]:
    """Install the targets `names`, and return one outcome for each; a target that fails does not affect the others.

    Raises UserError if options contradict each other.
    """
    _check(options)
    index = _index(options, cwd)
    outcomes: dict[str, Outcome] = {}
    items: list[Item] = []
    for name in dict.fromkeys(names):
        try:
            target = parse_target(name, cwd)
            there = _already_there(target, options)
            if there is None:
                items.append(_decide(target, options, index, cwd))
                pin([d for item in items for d in item.demands], index, **_choice(options))
            else:
                outcomes[name] = there
        except UserError as error:
            items = [item for item in items if item.target != name]
            outcomes[name] = Outcome(name, "failed", detail=str(error), user_error=True)
    if items:
        outcomes |= {o.target: o for o in _install(items, options, index, cwd)}
    return [outcomes[name] for name in dict.fromkeys(names)]


def _check(options: Options) -> None:
    if options.branch and not options.from_repo:
        raise UserError("--branch has an effect only with --from-repo; add --from-repo or leave out --branch")
    if options.repo and not options.from_repo:
        raise UserError("--repo has an effect only with --from-repo; add --from-repo or leave out --repo")
    if options.path and not options.from_repo and not options.path.is_dir():
        raise UserError(f"--path {options.path} is not a directory; give a folder that contains environment projects")


def _index(options: Options, cwd: Path) -> Index | None:
    """Return the index, or None if none is set; that is an error only once a name has to be looked up on it."""
    try:
        location = locate(options.index, cwd)
    except UserError:
        if options.index is not None:
            raise
        return None
    from plumbob.hub.index.reader import (
        Index,  # imported here: it imports an HTTP client and parsers, which an installation from a path does not need
    )

    return Index(location)


def _choice(options: Options) -> dict[str, bool]:
    return {"upgrade": options.upgrade, "prerelease": options.prerelease}


def _already_there(target: Target, options: Options) -> Outcome | None:
    """Return the outcome if the target is already installed; None if it is not, or if an option asks for more."""
    if target.requirement is None or options.path or options.from_repo or options.upgrade or options.save:
        return None
    wanted = environment_name(target.requirement.name)
    for found in scan()[0]:
        if wanted in (environment_name(found.name), environment_name(found.distribution)) and (
            target.requirement.specifier.contains(found.version, prereleases=True)
        ):
            return Outcome(target.text, "already there", found.distribution, found.version, names=(found.name,))
    return None


def _decide(target: Target, options: Options, index: Index | None, cwd: Path) -> Item:
    """Resolve a target, in this order: a path, the repository, the folder of --path, a project nearby, the index."""
    if target.path is not None:
        return from_path(target.text, target.path)
    if options.from_repo:
        return from_repository(target, options.repo, options.branch, str(options.path or "environments"))
    if options.path is not None:
        return from_folder(target, options.path)
    found = None if options.index else default_item(target, cwd)
    if found is not None:
        return found
    if index is None:
        locate(options.index, cwd)  # raises the UserError that says which setting is missing
    assert index is not None
    return from_index(target, index, prerelease=options.prerelease)


def _install(items: list[Item], options: Options, index: Index | None, cwd: Path) -> list[Outcome]:
    location = index.location if index else None
    uv, dated = find_uv(), excludes_newer(cwd)

    def command(some: list[Item]) -> tuple[Command, list[Pin]]:
        pins = pin([d for item in some for d in item.demands], index, **_choice(options))
        return plan(some, pins, location, uv=uv, python=sys.executable, dated=dated), pins

    whole, pins = command(items)
    if options.dry_run:
        saves = plan_save(items, pins, location, saving_project(cwd).root, uv=uv) if options.save else []
        print("\n".join(c.shown() for c in (whole, *saves)))
        return [Outcome(i.target, "planned", i.distribution, detail=i.origin) for i in items]
    project = saving_project(cwd) if options.save else None
    before = {item.distribution: here.version for item in items if (here := installed(item.distribution))}
    failed = _run_uv(items, lambda some: command(some)[0])
    done = [item for item in items if item.target not in failed]
    outcomes = [_loaded(item) for item in done]
    if (
        location is not None
    ):  # the chosen version may be the one that was installed before, for example if --upgrade found no newer one
        unchanged = [o for o in outcomes if o.detail == location.url and o.version == before.get(o.distribution)]
        outcomes = [replace(o, status="already there") if o in unchanged else o for o in outcomes]
    if project is not None and done:
        # Use the pins from before the installation: pinning again would now find these packages installed, without
        # hashes.
        needed = {p.name for p in command(done)[1]}
        saved = save(done, [p for p in pins if p.name in needed], index, project, uv)
        outcomes = [
            o if saved is None else replace(o, status="failed", detail=f"installed, but {saved}") for o in outcomes
        ]
    return [*outcomes, *failed.values()]


def _run_uv(items: list[Item], command) -> dict[str, Outcome]:
    """Install all items in one command, so that uv resolves them together. Return the outcomes of those that failed.

    If the command fails, each item is tried alone (--dry-run) and the items that resolve alone are installed.
    """
    done = run(command(items))
    if done.returncode == 0:
        return {}
    if len(items) == 1:
        return {items[0].target: _failed(items[0], done)}
    failed = {}
    for item in items:
        alone = command([item])
        tried = run(replace(alone, argv=(*alone.argv, "--dry-run")), quiet=True)
        if tried.returncode != 0:
            failed[item.target] = _failed(item, tried)
    good = [item for item in items if item.target not in failed]
    if failed and good:
        return failed | _run_uv(good, command)
    return failed or {item.target: _failed(item, done) for item in items}


def _failed(item: Item, done: Finished) -> Outcome:
    return Outcome(item.target, "failed", item.distribution, detail=done.reason())


def _loaded(item: Item) -> Outcome:
    """Test that the installed environment imports, in a new process: this one has not read the new .pth files."""
    importlib.invalidate_caches()
    found = [e for e in scan()[0] if normalise(e.distribution) == item.distribution]
    there = installed(item.distribution)
    outcome = Outcome(item.target, "installed", item.distribution, there.version if there else "?", item.origin)
    if not found:
        return replace(outcome, status="failed", detail="installed, but it declares no environment")
    for environment in found:
        reason = why_it_does_not_load(environment)
        if reason is not None:
            return replace(
                outcome, status="failed", detail=f"installed, but {environment.name} does not load: {reason}"
            )
    return replace(outcome, names=tuple(e.name for e in found))


def trainer_is_here() -> bool:
    """Whether plumbob-trainer, which provides the command `train`, is installed."""
    return bool(entry_points(group="console_scripts", name="train"))
