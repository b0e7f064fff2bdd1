"""`doctor`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from plumbob.hub import find
from plumbob.hub.console import run_app
from plumbob.hub.errors import UserError
from plumbob.trainer.cli import configure, quiet_libraries
from plumbob.trainer.command import command_class
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.settings import STRANGERS, as_command, flag

if TYPE_CHECKING:
    from plumbob.trainer.doctor.findings import Finding

app = typer.Typer(add_completion=False, rich_markup_mode=None)

INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""

_HELP = """Find out why a run does not learn.

`doctor ENV --model M` and train's own options: probes of data, reward, tokens, conditioning, engine, sync, gradient and
movement, on your model and environment, in minutes. It stops at the first failure and names its cause.

`doctor RUN_DIR`: the same questions to what a run left behind.

Exit code 0: nothing failed. 1: a cause was found. 2: it could not begin, or checks broke off and the others found none.
"""


def doctor(**given: Any) -> int:
    """The command. Its signature is made from TrainConfig's fields below."""
    everything, as_json, page = (given.pop(name) for name in ("everything", "as_json", "html"))
    target = given.get("env")
    if page is not None:
        _check_page(Path(page).absolute())
    if target is not None and _is_run_directory(target):
        others = [flag(name) for name, value in given.items() if name != "env" and value not in (None, [])]
        if others:
            raise UserError(f"doctor reads the settings of {target} from it; leave {others[0]} out")
        found, title = _watched(Path(target)), f"doctor {target}"
        everything = True
    else:
        config, _ = configure(given)
        find(config.env)  # a wrong name is told at once, before seconds of imports
        found, title = _probed(config, bool(everything)), f"doctor {config.env} --model {config.model}"
    findings: list[tuple[str, Finding]] = []
    try:
        with closing(found):
            for probe, finding in found:
                findings.append((probe, finding))
                if not as_json:
                    print(_line(finding), flush=True)
    except KeyboardInterrupt:
        print("doctor: interrupted", file=sys.stderr)
        return INTERRUPTED
    if as_json:
        print(json.dumps(_report(title, findings), indent=2))
    else:
        print(_conclusion([f for _, f in findings], bool(everything)))
    if page is not None:
        from plumbob.trainer.doctor.page import render

        try:
            Path(page).write_text(render([f for _, f in findings], title))
        except OSError as error:
            raise UserError(f"cannot write {page}: {error.strerror}") from None
    if any(f.cause for _, f in findings):
        return 1
    return 2 if any(f.verdict == "error" for _, f in findings) else 0


def _check_page(page: Path) -> None:
    """Before minutes of work. Raises UserError for a file that cannot be written."""
    if page.is_dir():
        raise UserError(f"--html {page} is a folder; name a file in it")
    if not page.parent.is_dir():
        raise UserError(f"--html {page}: there is no folder {page.parent}")


def _is_run_directory(target: str) -> bool:
    """Raises UserError for a path that leads nowhere."""
    path = Path(target).expanduser()
    if (path / "config.toml").is_file():
        return True
    if path.is_dir() and not path.is_absolute() and len(path.parts) == 1:
        try:
            find(target)
        except UserError:
            raise UserError(f"{target} is no environment, and no run directory: it has no config.toml") from None
        return False  # a folder that happens to be called as an environment
    if "/" in target or path.is_dir():
        raise UserError(f"{target} is not a run directory: it has no config.toml")
    return False


def _watched(directory: Path) -> Generator[tuple[str, Finding]]:
    from plumbob.trainer.doctor.watch import examine

    for finding in examine(directory.expanduser()):
        yield "watch", finding


def _probed(config: TrainConfig, everything: bool) -> Generator[tuple[str, Finding]]:
    quiet_libraries()
    _tell(f"setting up {config.env} and {config.model}")
    from plumbob.trainer import ranks
    from plumbob.trainer.doctor.findings import Finding
    from plumbob.trainer.doctor.run_probes import examine
    from plumbob.trainer.doctor.subject import load_subject
    from plumbob.trainer.sync import SyncError
    from transformers.utils import logging

    logging.disable_progress_bar()
    here = ranks.join()
    try:
        with tempfile.TemporaryDirectory() as folder:
            try:
                subject = load_subject(config, here, Path(folder), _tell)
            except SyncError as error:
                yield "sync", Finding("the engine takes the first weights", "fail", str(error), "weights-not-synced")
                return
            try:
                _tell(f"drawing {subject.run.rollouts_per_step} rollouts")
                yield from examine(subject, everything=everything)
            finally:
                subject.close()
    finally:
        ranks.leave()


def _tell(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _line(finding: Finding) -> str:
    loud = finding.verdict in ("fail", "error")
    step = f" (step {finding.step})" if finding.step is not None else ""
    return f"{finding.verdict.upper() if loud else finding.verdict:7} {finding.check}{step}: {finding.evidence}"


def _conclusion(findings: list[Finding], everything: bool) -> str:
    from plumbob.trainer.doctor.watch_causes import ALL_CAUSES

    causes = list(dict.fromkeys(f.cause for f in findings if f.cause is not None))
    if not causes:
        unsure, broken = (sum(f.verdict == verdict for f in findings) for verdict in ("unsure", "error"))
        if broken:
            return f"\nNo answer: {broken} of {len(findings)} checks broke off, and the others found no cause."
        return f"\nNo cause found: {len(findings)} checks, {unsure} of them unsure."
    first = ALL_CAUSES[causes[0]]
    lines = [f"\nCause: {first.id}", f"  {first.sentence}", f"  What to do: {first.fix}"]
    about = [", ".join(first.hypotheses), first.source and f"seen in {first.source}"]
    if any(about):
        lines.append(f"  ({'; '.join(part for part in about if part)})")
    if causes[1:]:
        lines.append(f"Later failures, which may follow from it: {', '.join(causes[1:])}")
    elif not everything:
        lines.append("What depends on it was not asked; --all goes on.")
    return "\n".join(lines)


def _report(title: str, findings: list[tuple[str, Finding]]) -> dict[str, Any]:
    from plumbob.trainer.doctor.watch_causes import ALL_CAUSES

    causes = dict.fromkeys(f.cause for _, f in findings if f.cause is not None)
    return {
        "title": title,
        "cause": next(iter(causes), None),
        "findings": [{"probe": probe, **dataclasses.asdict(finding)} for probe, finding in findings],
        "causes": {name: dataclasses.asdict(ALL_CAUSES[name]) for name in causes},
    }


_ARGUMENTS: dict[str, Any] = {
    "env": Annotated[
        str | None,
        typer.Argument(help="An installed environment (see `hub list`), or a run directory.", show_default="lookup"),
    ],
    "everything": Annotated[bool | None, typer.Option("--all", help="Go on after the first failure.")],
    "as_json": Annotated[bool | None, typer.Option("--json", help="The findings as JSON.")],
    "html": Annotated[str | None, typer.Option("--html", help="Write the findings to an HTML page.", metavar="<file>")],
    "env_option": Annotated[str | None, typer.Option("--env", "--env-id", help="The environment.", metavar="<text>")],
    "config_file": Annotated[
        str | None, typer.Option("--config", help="A TOML file of train's settings; flags win.", metavar="<file>")
    ],
    STRANGERS: Annotated[list[str] | None, typer.Option(flag(STRANGERS), hidden=True)],
}
app.command(help=_HELP, cls=command_class(TrainConfig), context_settings={"max_content_width": 110})(
    as_command(doctor, _ARGUMENTS, TrainConfig)
)


def main() -> None:
    run_app("doctor", app, sys.argv[1:])
