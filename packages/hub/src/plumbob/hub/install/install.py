"""`vf-install`: resolve names to sources, pin first-party packages, install with uv, and test that they import.

`plan` is a pure function that returns uv's command line; `install` runs it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from plumbob.console import UserError
from plumbob.console.system import told
from plumbob.console.working import Working, note
from plumbob.hub.index.location import Location, locate
from plumbob.hub.index.wheels import Wheel
from plumbob.hub.install import undo
from plumbob.hub.install.collisions import pinned_files, refuse_collisions
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
from plumbob.hub.install.verify import difference, is_from
from plumbob.hub.installed.interrupted import half_installed, undo_folder
from plumbob.hub.installed.loading import LOAD_SECONDS, why_it_does_not_load
from plumbob.hub.installed.registry import conflicts, find, scan
from plumbob.hub.names import distribution_names, environment_name, is_first_party, normalise
from plumbob.hub.uv.command import Command, excludes_newer, find_uv, planned_changes, run

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
    trust_index: bool = False
    """Let uv take every package from the index, not only environments and plumbob's own packages."""
    dry_run: bool = False
    timeout: float = LOAD_SECONDS
    """Seconds that importing each installed environment may take."""


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
    items: Iterable[Item],
    pins: Iterable[Pin],
    *,
    uv: str,
    python: str,
    wheels: Iterable[Path] = (),
    index: Location | None = None,
    dated: bool = False,
    again: Iterable[str] = (),
) -> Command:
    """Return uv's command line for these items and pins.

    uv accepts hashes only in a requirements file, so the pins are passed as one on standard input. `wheels`: folders
    that hold the wheels of the pins, so that uv needs no index for them; it takes all other packages from those that it
    is configured with. `index`: an index that is trusted for every package, which uv asks first for each name, also for
    what a build needs. `dated`: uv is set to ignore recent releases (see `excludes_newer`). `again`: distributions to
    install again, because the installed files are not those of the chosen version. uv runs in the root directory, so
    that it reads no configuration file of the directory that `vf-install` was called in, which may be somebody else's:
    uv.toml and pyproject.toml can replace indexes, versions and the place to install into. The user's own uv.toml still
    applies.

    Example: plan([item], [Pin("vf-gsm8k", "0.2.0", ("ab",))], wheels=[folder], uv="uv", python="python").argv ends
    in ("--find-links", folder, "--requirements", "-").
    """
    items, pins = list(items), list(pins)
    argv = [uv, "pip", "install", "--directory", Path(python).absolute().anchor, "--python", python, "--verify-hashes"]
    if index is not None:
        argv += ["--index", index.argument, "--index-strategy", "first-index"]
    argv += [argument for folder in wheels for argument in ("--find-links", str(folder))]
    if dated:  # `exclude-newer` hides every file of an index that gives no upload times
        argv += [f for p in pins if p.hashes for f in ("--exclude-newer-package", f"{p.name}=false")]
    argv += [flag for name in again for flag in ("--reinstall-package", name)]
    argv += [argument for item in items for argument in item.arguments]
    return Command((*argv, "--requirements", "-") if pins else tuple(argv), "".join(f"{p.line()}\n" for p in pins))


def install(names: list[str], options: Options, cwd: Path) -> list[Outcome]:
    """Install the targets `names`, and return one outcome for each; a target that fails does not affect the others.

    Raises UserError if options contradict each other.
    """
    _check(options)
    index = _index(options, cwd)
    if not options.dry_run:
        _recover()
    outcomes: dict[str, Outcome] = {}
    items: list[Item] = []
    for name in dict.fromkeys(names):
        try:
            target = parse_target(name, cwd)
            there = _already_there(target, options)
            if there is None:
                items.append(_decide(target, options, index, cwd))
                pins = pin([d for item in items for d in item.demands], index, **_choice(options))
                refuse_collisions(items, _wheels(items, pins, index))
            else:
                outcomes[name] = there
        except (UserError, OSError) as error:
            items = [item for item in items if item.target != name]
            why = told(error) if isinstance(error, OSError) else str(error)
            outcomes[name] = Outcome(name, "failed", detail=why, user_error=True)
    if items:
        outcomes |= {o.target: o for o in _install(items, options, index, cwd)}
    return [outcomes[name] for name in dict.fromkeys(names)]


def _recover() -> None:
    """Undo an earlier installation that was killed, before anything is decided by what is installed."""
    if undo_folder().exists():
        with undo.one_installation() as put_back:
            if put_back:
                print(f"put back after an installation that was cut off: {', '.join(put_back)}", file=sys.stderr)


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


def _wheels(items: Iterable[Item], pins: Iterable[Pin], index: Index | None) -> list[Wheel]:
    """Return the wheels that will be installed, as far as they are known: of the pins, and of items that are one.

    Those of the pins are downloaded and compared with their hashes.
    """
    pinned = [index.wheel(file) for file in pinned_files(pins, index)] if index is not None else []
    return [*pinned, *(item.wheel for item in items if item.wheel is not None)]


def _already_there(target: Target, options: Options) -> Outcome | None:
    """Return the outcome if the target is already installed; None if it is not, or if an option asks for more.

    Raises UserError if two installed distributions claim its name.
    """
    if target.requirement is None or options.path or options.from_repo or options.upgrade or options.save:
        return None
    wanted = environment_name(target.requirement.name)
    environments = scan()[0]
    if wanted in conflicts(environments):
        find(wanted)  # raises the UserError that names both
    for found in environments:
        distribution = found.entry_point.dist
        if distribution is not None and half_installed(distribution):
            continue
        # A version, or an index, says which distribution is meant: one of another name is not it.
        named = normalise(found.distribution) in distribution_names(target.requirement.name)
        if not named and (target.requirement.specifier or options.index):
            continue
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
        named = options.repo or options.branch or os.environ.get("PLUMBOB_REPO")
        own = None if named or options.path else default_item(target, cwd)
        if own is not None:  # the command runs in the repository itself
            return own
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
    settings = _Settings(index, options, uv=find_uv(), dated=excludes_newer())
    whole = settings.attempt(items)
    if options.dry_run:
        saves = plan_save(items, whole.pins, location, saving_project(cwd).root, uv=settings.uv) if options.save else []
        print("\n".join(c.shown() for c in (whole.command, *saves)))
        return [Outcome(i.target, "planned", i.distribution, detail=i.origin) for i in items]
    project = saving_project(cwd) if options.save else None
    with undo.ended_cleanly(), undo.one_installation():
        before = {item.distribution: here.version for item in items if (here := installed(item.distribution))}
        outcomes = _run_uv(items, settings)
    done = [item for item in items if outcomes[item.target].names]
    if project is not None and done:
        # Use the pins from before the installation: pinning again would now find these packages installed, without
        # hashes.
        needed = {p.name for p in settings.attempt(done).pins}
        pins = [p for p in whole.pins if p.name in needed]
        saved = save(done, pins, index, project, settings.uv, trusted=options.trust_index)
        for item in done if saved is not None else ():
            outcome = outcomes[item.target]
            outcomes[item.target] = replace(outcome, status="failed", detail=f"installed, but {saved}")
    # The chosen version may be the one that was installed before, for example if --upgrade found no newer one.
    return [
        replace(o, status="already there")
        if o.status == "installed" and location and o.detail == location.url and o.version == before.get(o.distribution)
        else o
        for o in outcomes.values()
    ]


@dataclass(frozen=True)
class _Settings:
    """What every command of uv in one `vf-install` has in common."""

    index: Index | None
    options: Options
    uv: str
    dated: bool

    def attempt(self, items: list[Item]) -> Attempt:
        """Choose what to install for some items, and download what comes from the index."""
        pins = pin([d for item in items for d in item.demands], self.index, **_choice(self.options))
        wheels = _wheels(items, pins, self.index)
        here = {w.name for w in wheels if (old := installed(w.name)) is not None and old.version == w.version}
        again = sorted(name for name in here if difference(w for w in wheels if w.name == name))
        given: dict[str, Any] = {}
        if self.index is not None and self.options.trust_index:
            given["index"] = self.index.location
        elif self.index is not None:
            given["wheels"] = [self.index.keep(file) for file in pinned_files(pins, self.index)]
        command = plan(items, pins, uv=self.uv, python=sys.executable, dated=self.dated, again=again, **given)
        return Attempt(items, pins, wheels, command)

    def offered(self, names: Iterable[str]) -> list[str]:
        """Which of these packages, other than environments and plumbob's own, the index has."""
        index = self.index
        return sorted({n for n in map(normalise, names) if index and not is_first_party(n) and index.files(n)})

    def named(self, text: str) -> set[str]:
        """The names in a text of uv that the index lists."""
        with contextlib.suppress(UserError):
            listed = set((self.index.names() if self.index is not None else None) or ())
            return listed & {normalise(word) for word in re.findall(r"[A-Za-z0-9][\w.-]*\w", text)}
        return set()


@dataclass(frozen=True)
class Attempt:
    """What one command of uv installs: the items, the pins and wheels that were chosen for them, and the command."""

    items: list[Item]
    pins: list[Pin]
    wheels: list[Wheel]
    command: Command


@dataclass(frozen=True)
class _Failure:
    why: str
    user_error: bool = False


def _run_uv(items: list[Item], settings: _Settings) -> dict[str, Outcome]:
    """Install all items in one command, so that uv resolves them together, and test that they import.

    If the command fails, each item is tried alone (--dry-run), and those that resolve alone are installed. If an item
    does not import, and an older version of it was there, all is put back, and the others are installed without it.
    """
    decided, failure = _install_or_undo(settings.attempt(items), settings)
    if failure is not None:
        alone = {i: _planned(settings.attempt([i]), settings)[0] for i in items} if len(items) > 1 else {}
        decided = {i.target: _failed(i, f) for i, f in alone.items() if f is not None}
        decided = decided or {i.target: _failed(i, failure) for i in items}
    rest = [item for item in items if item.target not in decided]
    return decided | (_run_uv(rest, settings) if rest else {})


def _planned(attempt: Attempt, settings: _Settings) -> tuple[_Failure | None, list[str]]:
    """Let uv plan an installation. Return why that fails, or None, and the distributions that it would replace."""
    planned, replaced, new = planned_changes(attempt.command)
    if planned.returncode == 0:
        pinned = {p.name for p in attempt.pins}
        taken = settings.offered(n for n in new if n not in pinned) if settings.options.trust_index else []
        if taken and settings.index is not None:
            note(f"also from {settings.index.location.url}: {', '.join(taken)}")
        return None, replaced
    needed = [Requirement(r).name for w in attempt.wheels for r in w.fields.get_all("Requires-Dist", [])]
    there = settings.offered([*needed, *settings.named(planned.output)])
    if not there or settings.index is None or settings.options.trust_index:
        return _Failure(planned.reason()), []
    return _Failure(
        f"{planned.reason()}; {settings.index.location.url} has {', '.join(there)}, but only environments and plumbob's own "
        "packages are taken from there; --trust-index takes all from there that it has",
        user_error=True,
    ), []


def _install_or_undo(attempt: Attempt, settings: _Settings) -> tuple[dict[str, Outcome], _Failure | None]:
    """Run uv, compare what it has installed with what was chosen, and test that it imports.

    Return the outcomes of all items; of those alone that did not import, if older versions were put back for them; or
    why nothing was installed.
    """
    asks = any(map(_may_ask, attempt.items))
    with Working(f"looking for what {', '.join(i.target for i in attempt.items)} needs", asks=asks):
        failure, replaced = _planned(attempt, settings)
    if failure is not None:
        return {}, failure
    older = {i.target for i in attempt.items if i.distribution in map(normalise, replaced) and not _is_the_same(i)}
    undo.keep(replaced, attempt.wheels)
    try:
        done = run(attempt.command)
        why = done.reason() if done.returncode != 0 else _not_as_chosen(attempt)
        outcomes = {} if why else {i.target: _loaded(i, settings.options.timeout) for i in attempt.items}
    except BaseException:
        _put_back()
        raise
    broken = {target: o for target, o in outcomes.items() if o.status == "failed" and target in older}
    if why is None and not broken:
        undo.forget()
        return outcomes, None
    told = _put_back()
    if why is not None:
        return {}, _Failure(why + told)
    return {
        target: replace(o, detail=f"{o.version} is not kept: {o.detail.removeprefix('installed, but ')}{told}")
        for target, o in broken.items()
    }, None


def _may_ask(item: Item) -> bool:
    """Whether uv fetches a git repository for an item, for which ssh or git may ask a passphrase or a password."""
    project = Path(item.origin) / "pyproject.toml"
    needs = project.read_text(errors="replace") if project.is_file() else ""
    fetched = " ".join((*item.arguments, needs)).replace("git+file:", "")
    return "git+" in fetched or re.search(r"\bgit *=", needs) is not None


def _is_the_same(item: Item) -> bool:
    """Whether an item is the directory that its distribution is installed from, so that no older version can be kept."""
    return Path(item.origin).is_dir() and is_from(item.distribution, item.origin)


def _put_back() -> str:
    """Undo what uv has done, and return in words what was put back, or why that was not possible."""
    try:
        put_back = undo.put_back(undo_folder(), unless_whole=False)
    except OSError as error:
        return (
            f"; the versions that were installed before could not be put back ({error}): free some space and run "
            "vf-install again, which begins with that"
        )
    verb = "was" if len(put_back) == 1 else "were"
    return f"; {', '.join(put_back)} {verb} put back" if put_back else ""


def _not_as_chosen(attempt: Attempt) -> str | None:
    """Return how the installed packages differ from the pinned wheels and from the items' sources; None if not."""
    by_name = {w.name: [v for v in attempt.wheels if v.name == w.name] for w in attempt.wheels}
    differences = [found for wheels in by_name.values() if (found := difference(wheels))]
    for item in attempt.items:
        if item.distribution not in by_name and not is_from(item.distribution, item.origin):
            differences.append(f"{item.distribution} is not installed from {item.origin}")
    if not differences:
        return None
    return f"uv did not install what was chosen: {'; '.join(differences)}; check your own uv.toml and UV_ variables"


def _failed(item: Item, failure: _Failure) -> Outcome:
    mistake = failure.user_error or "(os error" in failure.why
    return Outcome(item.target, "failed", item.distribution, detail=failure.why, user_error=mistake)


def _loaded(item: Item, timeout: float) -> Outcome:
    """Test that the installed environment imports, in a new process: this one has not read the new .pth files."""
    importlib.invalidate_caches()
    found = [e for e in scan()[0] if normalise(e.distribution) == item.distribution]
    there = installed(item.distribution)
    outcome = Outcome(item.target, "installed", item.distribution, there.version if there else "?", item.origin)
    if not found:
        return replace(outcome, status="failed", detail="installed, but it declares no environment")
    for environment in found:
        with Working(f"importing {environment.name}, as a test"):
            reason = why_it_does_not_load(environment, timeout)
        if reason is not None:
            return replace(
                outcome, status="failed", detail=f"installed, but {environment.name} does not load: {reason}"
            )
    return replace(outcome, names=tuple(e.name for e in found))
