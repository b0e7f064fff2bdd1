"""`--confirm`: the remedy of the first finding, tried beside the run as it was, for a few steps with several seeds.

The runs and the statistics are those of `lab`, which is started as a command.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.examine import Examination

STEPS, SEEDS = 8, 3
"""Training steps of each run, and seeds of each arm."""


@dataclass(frozen=True)
class Trial:
    """A remedy that is a value of an option."""

    option: str
    """In TRL's GRPOConfig."""
    value: Callable[[Any], Any]
    """From the value that the run has."""
    shows: str
    """What the remedy changes at once: a criterion of lab."""
    own: str = ""
    """The option of plumbob's `train`, if it has another name; "-" if it has none."""

    def name(self, trl: bool) -> str:
        return self.option if trl else self.own or self.option


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda value: float(f"{factor * value:.3g}")


TRIALS = {
    "learning-rate-too-low": Trial("learning_rate", _times(30), "mean(optimizer/relative_update) of treatment > control"),
    "learning-rate-too-high": Trial("learning_rate", _times(0.1), "mean(optimizer/relative_update) of treatment < control"),
    "tiny-std-scaling": Trial("scale_rewards", lambda v: "none", "mean(advantage/mean_abs) of treatment < control"),
    "truncated-rollouts": Trial("max_completion_length", lambda v: v * 8, "mean(rollout/truncated_share) of treatment < control",
                                "max_tokens"),
    "groups-without-variety": Trial("temperature", lambda v: max(v, 1.0), "mean(groups/zero_signal_share) of treatment < control"),
    "too-little-signal": Trial("num_generations", lambda v: v * 2, "mean(groups/zero_signal_share) of treatment < control"),
    "kl-too-large": Trial("beta", lambda v: 0.0, "mean(optimizer/relative_update) of treatment > control", "kl_beta"),
    "kl-term-wrong": Trial("sync_ref_model", lambda v: False, "last(policy/kl) of treatment > control", "-"),
    "policy-breaks": Trial("learning_rate", _times(0.1), "mean(optimizer/relative_update) of treatment < control"),
}  # fmt: skip
"""Id of a cause -> what can be tried. All others are in code, in data, or in the model."""


def trial_of(x: Examination, options: Mapping[str, Any], trl: bool = True) -> tuple[str, str, Any] | str:
    """(cause, option, value) of the first finding's remedy; a sentence if it cannot be tried. `options`: those of the run."""
    ranked = x.ranked()
    if not ranked:
        return "Nothing failed, so there is no remedy to try."
    finding = ranked[0][1]
    cause = finding.cause or ""
    trial = TRIALS.get(cause)
    option = trial.name(trl) if trial else "-"
    if trial is None or option not in options:
        where = f"it is in your code, {finding.place}" if finding.place else "it is no value of an option"
        return f"{cause}: cannot be tried: {where}. {x.advice(CAUSES[cause])}"
    value = trial.value(options[option])
    if value == options[option]:
        return f"{cause}: cannot be tried: {option} is {value!r} already."
    return cause, option, value


def metric_of(cause: str) -> str:
    """The metric of a run of `arm` that is 1 where the doctor has named the cause, else 0."""
    return f"doctor/{cause.replace('-', '_')}"


def confirm(
    tried: tuple[str, str, Any],
    folder: Path,
    *,
    env: str,
    model: str,
    flags: str = "",
    command: str = "train",
    trl: bool = True,
) -> Iterator[str]:
    """Run both arms through lab in `folder`; yields what came of it, line by line. Raises UserError without lab, or if runs fail.

    `command`: what takes an environment, `--model`, and options. `flags`: of both arms.
    """
    cause, option, value = tried
    if shutil.which("lab") is None and not (Path(sys.executable).parent / "lab").is_file():
        raise UserError("--confirm needs the command lab; install plumbob-lab, which brings it")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    own = f"--{option.replace('_', '-')} {shlex.quote(text)}"
    criteria = [TRIALS[cause].shows, *([f"every max({metric_of(cause)}) of treatment < 1"] if trl else [])]
    front = {
        "id": "H01", "title": f"{cause}: {option} {text}", "env": env, "model": model, "causes": [cause],
        "flags": f"--max-steps {STEPS} {flags}".strip(), "seeds": SEEDS, "changes": sorted({option, TRIALS[cause].name(False)}),
        "arms": {"control": {"command": command}, "treatment": {"command": command, "flags": own}},
        "validated_if": criteria, "invalidated_if": ["last(reward/mean) of treatment < control"],
    }  # fmt: skip
    (folder / "hypotheses").mkdir(parents=True, exist_ok=True)
    (folder / "hypotheses" / "h01-remedy.md").write_text(
        f"---\n{json.dumps(front, indent=1)}\n---\n\n# H01: {front['title']}\n"
    )
    (folder / "01-experiments-log.md").touch()
    program = Path(sys.executable).parent / "lab"
    done = subprocess.run([str(program) if program.is_file() else "lab", "run", "H01", "-C", str(folder)], stdout=subprocess.PIPE,
                          text=True, check=False)  # fmt: skip
    verdict = folder / "experimental-results" / "h01" / "verdict.json"
    if done.returncode not in (0, 1) or not verdict.is_file():
        raise UserError(f"--confirm: no run was finished in both arms; their output is in {verdict.parent / 'logs'}")
    told: dict[str, Any] = json.loads(verdict.read_text(encoding="utf-8"))
    yield f"{option} as it was, and {text}: {told['seeds']} seeds of {STEPS} steps each"
    yield f"  {told['evidence']}"
    yield f"{cause}: {'confirmed' if told['status'] == 'validated' else 'not confirmed'}"
