"""`vf-install`: decide what is meant, pin what is first-party, let uv install it, and load what came.

`plan` is pure: it turns decisions into uv's command line. `install` runs it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from plumbob.hub.errors import UserError
from plumbob.hub.location import Location, locate
from plumbob.hub.masking import mask
from plumbob.hub.names import environment_name, normalise
from plumbob.hub.pins import Pin, installed, pin
from plumbob.hub.registry import Environment, scan
from plumbob.hub.save import plan_save, save, saving_project
from plumbob.hub.sources import (
    Item,
    Target,
    default_item,
    from_folder,
    from_index,
    from_path,
    from_repository,
    parse_target,
)
from plumbob.hub.uv_command import Command, Finished, excludes_newer, find_uv, run

if TYPE_CHECKING:
    from plumbob.hub.index import Index

_LOAD_S = 300


@dataclass(frozen=True)
class Options:
    """The flags of `vf-install`."""

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
    """How one target ended: "installed", "already there", "planned" or "failed", and the version or the reason."""

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
    """uv's command line. Hashes can only be given in a requirements file, so the pins go in by standard input.

    Example: plan([item], [Pin("vf-gsm8k", "0.2.0", ("ab",))], Location("plumbob", URL), uv="uv", python="python").argv
    ends in ("--index", "plumbob=URL", "--index-strategy", "first-index", "--requirements", "-").
    """
    items, pins = list(items), list(pins)
    argv = [uv, "pip", "install", "--python", python]
    if index is not None:
        argv += ["--index", index.argument, "--index-strategy", "first-index"]
    if dated:  # an index without upload times is hidden as a whole by `exclude-newer`
        argv += [f for p in pins if p.hashes for f in ("--exclude-newer-package", f"{p.name}=false")]
    argv += [argument for item in items for argument in item.arguments]
    return Command((*argv, "--requirements", "-") if pins else tuple(argv), "".join(f"{p.line()}\n" for p in pins))


def install(names: list[str], options: Options, cwd: Path) -> list[Outcome]:
    """Install every target that can be installed; one that cannot harms no other. Raises UserError for wrong flags."""
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
        raise UserError("--branch is for --from-repo")
    if options.repo and not options.from_repo:
        raise UserError("--repo is for --from-repo")
    if options.path and not options.from_repo and not options.path.is_dir():
        raise UserError(f"--path {options.path} is no directory")


def _index(options: Options, cwd: Path) -> Index | None:
    """The index, if there is one: a path needs none. That a name needs one is told when a name needs it."""
    try:
        location = locate(options.index, cwd)
    except UserError:
        if options.index is not None:
            raise
        return None
    from plumbob.hub.index import Index  # it loads an HTTP client and parsers, which an installation by path needs not

    return Index(location)


def _choice(options: Options) -> dict[str, bool]:
    return {"upgrade": options.upgrade, "prerelease": options.prerelease}


def _already_there(target: Target, options: Options) -> Outcome | None:
    """What is installed and is what a name means, unless a source, a newer version or a record of it is asked for."""
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
    """Where a target comes from: a path, the repository, a folder, this disk, the index; in this order."""
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
        locate(options.index, cwd)  # raises what is missing
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
    if location is not None:  # an upgrade that found nothing newer
        unchanged = [o for o in outcomes if o.detail == location.url and o.version == before.get(o.distribution)]
        outcomes = [replace(o, status="already there") if o in unchanged else o for o in outcomes]
    if project is not None and done:
        # The pins of before: what has just come from the index now counts as installed.
        needed = {p.name for p in command(done)[1]}
        saved = save(done, [p for p in pins if p.name in needed], index, project, uv)
        outcomes = [
            o if saved is None else replace(o, status="failed", detail=f"installed, but {saved}") for o in outcomes
        ]
    return [*outcomes, *failed.values()]


def _run_uv(items: list[Item], command) -> dict[str, Outcome]:
    """Install all at once, so that they fit each other; if that fails, find out which of them cannot be installed."""
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
    """Load what came, in a process of its own: this one has not read the new .pth files."""
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


def why_it_does_not_load(environment: Environment) -> str | None:
    """Load an environment in a process of its own. The reason if it fails, however it fails; None if it loads."""
    point = environment.entry_point
    code = f"from importlib.metadata import EntryPoint; EntryPoint({point.name!r}, {point.value!r}, '').load()"
    try:
        # -P: a file in the current directory must not stand in for a package.
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LOAD_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {_LOAD_S} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return mask(lines[-1]) if lines else f"its import ended the process with code {done.returncode}"


def trainer_is_here() -> bool:
    return bool(entry_points(group="console_scripts", name="train"))
