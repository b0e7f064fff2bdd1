"""Run a script of TRL, unchanged, with every GRPOTrainer in it watched."""

from __future__ import annotations

import argparse
import functools
import json
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plumbob.console import UserError
from plumbob.doctor.confirm import TRIALS, metric_of
from plumbob.doctor.record import EVERY


def trl(words: Sequence[str], name: str) -> int:
    """Run SCRIPT.py with its arguments as `python SCRIPT.py` does, with `plumbob.doctor.attach` for every GRPOTrainer in it.

    Exit code 0: no check failed. 1: a cause or a symptom was found. 2: nothing was trained, the script failed, or a check was not
    completed.
    """
    parser = argparse.ArgumentParser(prog=name, description=trl.__doc__)
    parser.add_argument("--every", type=int, default=EVERY, help="record every so many steps after the first three")
    parser.add_argument(
        "--no-rescore", action="store_true", help="do not call reward functions more often than training does"
    )
    parser.add_argument("script", metavar="SCRIPT.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS").required = False
    given = parser.parse_args(words)
    if given.every < 1:
        raise UserError(f"--every must be at least 1, not {given.every}")
    doctors, failed = run(given.script, given.arguments, every=given.every, rescore=not given.no_rescore)
    codes = {doctor.examination.code for doctor in doctors}
    if not doctors:
        raise UserError(f"{given.script} has trained no GRPOTrainer, so nothing was examined")
    return 1 if 1 in codes else 2 if failed else max(codes)


def arm(words: Sequence[str], name: str) -> int:
    """One run of `--confirm`: the script of a run again, for a few steps, with other options, as a run directory that lab reads."""
    parser = argparse.ArgumentParser(prog=name, description=arm.__doc__)
    parser.add_argument("known", type=Path, help="run.json of the run's records")
    parser.add_argument("env")
    for option in ("--model", "--output-dir", "--run-name"):
        parser.add_argument(option, required=True)
    given, rest = parser.parse_known_args(words)
    changes = {o.removeprefix("--").replace("-", "_"): value_of(v) for o, v in zip(rest[::2], rest[1::2], strict=True)}
    script, folder = json.loads(given.known.read_text())["script"], Path(given.output_dir) / given.run_name
    folder.mkdir(parents=True, exist_ok=True)
    forced = {"output_dir": str(folder / "trainer"), "report_to": "none", "save_strategy": "no", "eval_strategy": "no"}
    sys.path.insert(0, str(Path(script[0]).parent))
    doctors, failed = run(script[0], script[1:], changes={**changes, **forced, "logging_steps": 1})
    if failed or not doctors:
        return 1
    x, rows = doctors[0].examination, doctors[0].reading.trends.numbers.rows
    told = {metric_of(cause): float(cause in x.causes) for cause in TRIALS}
    steps = [{**row, **told, "step": int(row["step"])} for row in rows]
    (folder / "config.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in changes.items()))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    (folder / "summary.json").write_text(json.dumps({"causes": x.causes}))
    return 0


def value_of(text: str) -> Any:
    """A number, `true`, `false` or `null` as such; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(
    script: str, arguments: Sequence[str], *, changes: Mapping[str, Any] | None = None, **how: Any
) -> tuple[list[Any], bool]:
    """Run a script; returns what `attach` has returned for its trainers, and whether the script failed.

    `changes`: fields of its GRPOConfigs that are replaced. `how`: arguments of `attach`. Raises UserError if it is no script.
    """
    try:
        compile(Path(script).read_bytes(), script, "exec")  # TRL takes seconds to import
    except OSError:
        raise UserError(f"there is no file {script}; name the script that trains") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{script}, line {getattr(error, 'lineno', 1)}: {error.args[0]}") from None
    from plumbob.doctor.trl.attach import Doctor, attach
    from trl import GRPOConfig, GRPOTrainer

    doctors: list[Any] = []
    train, checked, kept = GRPOTrainer.train, GRPOConfig.__post_init__, (sys.argv, sys.path[0])

    @functools.wraps(train)
    def watched(self: Any, *given: Any, **more: Any) -> Any:
        known = [one for one in self.callback_handler.callbacks if isinstance(one, Doctor)]
        doctors.extend(known or [attach(self, **how)])
        return train(self, *given, **more)

    def changed(self: Any) -> None:
        vars(self).update(changes or {})
        checked(self)

    GRPOTrainer.train, GRPOConfig.__post_init__ = watched, changed  # ty: ignore[invalid-assignment]
    sys.argv, sys.path[0], failed = [script, *arguments], str(Path(script).resolve().parent), False
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        failed = error.code not in (None, 0)
    except Exception:  # a script raises what it likes; what was found before is still told
        traceback.print_exc()
        failed = True
    finally:
        GRPOTrainer.train, GRPOConfig.__post_init__ = train, checked
        sys.argv, sys.path[0] = kept
    return doctors, failed
