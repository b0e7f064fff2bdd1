"""`doctor`: the command line. torch and verifiers load only when work begins."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from plumbob.console import INTERRUPTED, UserError
from plumbob.console.app import run_app
from plumbob.console.version import version_option
from plumbob.hub import find
from plumbob.trainer.cli.examinations import of_environment, of_run
from plumbob.trainer.cli.loading import first_ctrl_c
from plumbob.trainer.cli.train import ENV_OPTION, UNKNOWN, check_before_loading, configure
from plumbob.trainer.cli.typer_command import command_class
from plumbob.trainer.config.options import UNKNOWN_OPTIONS, as_command, flag
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.scope import Scope

if TYPE_CHECKING:
    from plumbob.trainer.diagnosis.findings import Finding

app = typer.Typer(rich_markup_mode=None)

SWITCH = "PLUMBOB_DOCTOR"
"""Environment variable that says "new" while `plumbob.doctor` is measured beside the doctor of this package."""
MOST_PLACES = 3
"""Most places of a finding that the terminal shows."""

_HELP = """Find out why a training run does not learn.

`doctor ENV --model M`, with the options of `train`, first examines settings, tasks, rewards and tools, which takes
seconds and no model. It then runs controlled experiments (probes) on your model, environment and options, in minutes,
and stops at the first probe that finds a cause. If none does, it takes five training steps as `train` does, and watches
them. It names the cause, or, if it finds none, the symptoms that it saw.

`doctor RUN_DIR` examines the metrics and stored rollouts of a run, which may still be running. If they show no cause, or
only how the reward is distributed, it examines the run's environment as well, and then, if the run has ended, runs the
probes on its model with its settings.

Exit code 0: no check failed. 1: a cause or a symptom was found. 2: `doctor` could not start, or it found no cause but could not
complete some checks.
"""


def doctor(**given: Any) -> int:
    """The command. Its signature is made from TrainConfig's fields below."""
    from plumbob.trainer.report.write import REPORT

    everything, as_json, page, without_model = (
        given.pop(name) for name in ("everything", "as_json", "html", "without_model")
    )
    named = given.get("env") or []
    target = named[0] if len(named) == 1 else None
    if page is not None:
        _check_page(Path(page).absolute())
    config, directory = _settings(target, given)
    if os.environ.get(SWITCH) == "new":
        from plumbob.trainer.cli import verdict

        return verdict.show(
            config, directory, everything=bool(everything), model=not without_model, as_json=bool(as_json), html=page
        )
    scope = Scope(run=directory is not None, model=not without_model)
    report = (directory or Path()) / REPORT
    if directory is not None:
        found, title = of_run(directory, config, scope), f"doctor {target}"
    else:
        found, title = of_environment(config, bool(everything), scope), f"doctor {config.env} --model {config.model}"
    findings: list[tuple[str, Finding]] = []
    try:
        with closing(found), first_ctrl_c():
            for probe, finding in found:
                findings.append((probe, finding))
                if not as_json:
                    print(_line(finding, report), flush=True)
    except KeyboardInterrupt:
        print("doctor: interrupted", file=sys.stderr)
        return INTERRUPTED
    limits = scope.limits([finding for _, finding in findings])
    if as_json:
        print(json.dumps(_report(title, findings, limits, report), indent=2))
    else:
        from plumbob.trainer.training.sampling_warnings import reward_warnings

        for line in reward_warnings(config):
            print(f"\n{line}")
        print(_conclusion([f for _, f in findings], limits, scope, config, bool(everything)))
        if any(f.places for _, f in findings if f.verdict != "pass") and not report.expanduser().is_file():
            print(f"To look at rollouts, first write {report} with:  report {target}")
    if page is not None:
        from plumbob.trainer.doctor.page import render

        try:
            beside = os.path.relpath(report.expanduser(), Path(page).parent)
            Path(page).write_text(render([f for _, f in findings], title, limits, beside), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {page}: {error.strerror}") from None
    if any(f.cause for _, f in findings):
        return 1
    return 2 if any(f.verdict == "error" for _, f in findings) else 0


def _settings(target: str | None, given: dict[str, Any]) -> tuple[TrainConfig, Path | None]:
    """The settings that are examined, and the run directory if one is. Raises UserError."""
    if target is not None and _is_run_directory(target):
        others = [flag(name) for name, value in given.items() if name != "env" and value not in (None, [])]
        if others:
            raise UserError(f"doctor reads the settings of {target} from its config.toml; leave {others[0]} out")
        from plumbob.trainer.watch.watch import run_config

        return run_config(Path(target).expanduser()), Path(target)
    config, _ = configure(given)
    if config.mixture:
        names = [env for env, _ in config.members]
        raise UserError(f"doctor examines one environment at a time: name one of {', '.join(names)}")
    check_before_loading(config, None)
    return config, None


def _check_page(page: Path) -> None:
    """Raises UserError if the HTML page cannot be written there. Called before minutes of work."""
    if page.is_dir():
        raise UserError(f"--html {page} is a folder; name a file in it")
    if not page.parent.is_dir():
        raise UserError(f"--html {page}: there is no folder {page.parent}; create it first")


def _is_run_directory(target: str) -> bool:
    """Whether the argument is a run directory, not an environment. Raises UserError for a path that is neither."""
    path = Path(target).expanduser()
    if (path / "config.toml").is_file():
        return True
    if path.is_dir() and not path.is_absolute() and len(path.parts) == 1:
        try:
            find(target)
        except UserError:
            raise UserError(f"{target} is neither an environment nor a run directory: it has no config.toml") from None
        return False  # a folder that has the name of an environment
    if "/" in target or path.is_dir():
        raise UserError(f"{target} is not a run directory: it has no config.toml")
    return False


def _line(finding: Finding, report: Path) -> str:
    loud = finding.verdict in ("fail", "error")
    step = f" (step {finding.step})" if finding.step is not None else ""
    text = f"{finding.verdict.upper() if loud else finding.verdict:7} {finding.check}{step}: {finding.evidence}"
    for place in finding.places[:MOST_PLACES] if finding.verdict != "pass" else ():
        text += f"\n        look at: {report}#{place.fragment}"
    if finding.command and loud:
        text += f"\n        shown again by: {finding.command}"
    return text


def _conclusion(findings: list[Finding], limits: list[str], scope: Scope, config: TrainConfig, everything: bool) -> str:
    from plumbob.trainer.diagnosis.causes import CAUSES, is_symptom, named

    causes = named(findings)
    if not causes:
        broken = sum(f.verdict == "error" for f in findings)
        first = f"No cause found, but {broken} of {len(findings)} checks could not be completed (ERROR)."
        if not broken:
            first = f"No cause found in {len(findings)} checks."
        return "\n".join([f"\n{first}", *(f"  {limit}" for limit in limits)])
    first = CAUSES[causes[0]]
    answer = f"No cause found, but a symptom: {first.id}" if first.symptom else f"Cause: {first.id}"
    lines = [f"\n{answer}", f"  {first.sentence}"]
    if first.includes and not first.symptom:
        lines.append(f"  One of: {', '.join(first.includes)}")
    lines.append(f"  What to do: {first.advice(config.env, config.model)}")
    about = [", ".join(first.hypotheses), first.source and f"reported in {first.source}"]
    if any(about):
        lines.append(f"  ({'; '.join(part for part in about if part)})")
    symptoms = [cause for cause in causes[1:] if is_symptom(cause)]
    if reasons := [cause for cause in causes[1:] if cause not in symptoms]:
        lines.append(f"Causes of later failures, which may be consequences of this one: {', '.join(reasons)}")
    if symptoms:
        what = "Further symptoms" if first.symptom else "Symptoms, which it may explain"
        lines.append(f"{what}: {', '.join(symptoms)}")
    if scope.stopped and not everything:
        what = "that examine the model" if not scope.rollouts else "after this failure"
        lines.append(f"The checks {what} were not run; --all runs them too.")
    return "\n".join(lines)


def _report(title: str, findings: list[tuple[str, Finding]], limits: list[str], report: Path) -> dict[str, Any]:
    from plumbob.trainer.diagnosis.causes import CAUSES, is_symptom, named

    causes = named(f for _, f in findings)
    return {
        "title": title,
        "cause": next((cause for cause in causes if not is_symptom(cause)), None),
        "symptoms": [cause for cause in causes if is_symptom(cause)],
        "findings": [
            {
                "probe": probe,
                **dataclasses.asdict(finding),
                "links": [f"{report}#{place.fragment}" for place in finding.places],
            }
            for probe, finding in findings
        ],
        "causes": {name: dataclasses.asdict(CAUSES[name]) for name in causes},
        "limits": limits,
    }


_ARGUMENTS: dict[str, Any] = {
    "env": Annotated[
        list[str] | None,
        typer.Argument(
            help="An installed environment (see `hub list`), or a run directory.",
            show_default="lookup",
            metavar="[ENV]",
        ),
    ],
    "everything": Annotated[bool | None, typer.Option("--all", help="Run all probes, also those after a failure.")],
    "without_model": Annotated[
        bool | None,
        typer.Option(
            "--without-model", help="Load no model: examine settings, tasks, rewards, tools and records only."
        ),
    ],
    "as_json": Annotated[bool | None, typer.Option("--json", help="Print the findings as JSON.")],
    "html": Annotated[str | None, typer.Option("--html", help="Write the findings to an HTML page.", metavar="<file>")],
    "env_option": ENV_OPTION,
    "config_file": Annotated[
        str | None,
        typer.Option(
            "--config",
            help="TOML file with options of train; options on the command line override it.",
            metavar="<file>",
        ),
    ],
    "version": Annotated[bool | None, version_option("plumbob-trainer")],
    UNKNOWN_OPTIONS: UNKNOWN,
}
app.command(help=_HELP, cls=command_class(TrainConfig), context_settings={"max_content_width": 110})(
    as_command(doctor, _ARGUMENTS, TrainConfig)
)


def main() -> None:
    try:
        run_app("doctor", app, sys.argv[1:])
    finally:
        gc.freeze()  # Python would look through all that two models leave, for two seconds, before the process ends
