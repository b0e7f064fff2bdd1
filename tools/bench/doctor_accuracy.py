"""Measure how the doctor names faults, and whether it stays silent in healthy settings: a third of the rows, by a fixed seed.

    uv run python tools/bench/doctor_accuracy.py --out runs/some.jsonl --only "end of each turn" --kind doctor
    uv run python tools/bench/doctor_accuracy.py --out runs/stages.jsonl --faults 63 --settings 20 --kind stages

Each row is examined by `doctor ENV`, and by `doctor RUN_DIR` after a few steps, in processes of their own. Two further kinds
examine a part: `stages` records two training steps and looks for the first stage that differs, and `environment` plays
transcripts without a model; both leave out faults of other stages. Results are appended to OUT, and what is there is not run
again. right: the first cause is one that the row accepts; general: it includes one of these; missed: nothing is named, or a
symptom that is not right.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

CONTEXT: Any = multiprocessing.get_context("forkserver")
LOCK = threading.Lock()
Item = tuple[bool, str, str]
"""Whether it is healthy, the row's name, and how it is examined: one of `KINDS`."""
KINDS = ("doctor", "run", "stages", "environment")
BEHIND = ("decoded", "parse", "prompt", "suffix")
"""Places between the model and the environment, which no transcript of a script passes."""
HEAVY = ("cli.train", "cli.doctor", "cli.gather", "training.train", "doctor.player")
"""What is imported once, before processes are forked."""
LIMIT = 600
"""Seconds after which an examination is ended."""


def row_of(healthy: bool, name: str) -> Any:
    catalogue = import_module("plumbob.testing.faulty.catalogue")
    return (catalogue.HEALTHY if healthy else catalogue.FAULTS)[name]


def seen_by(row: Any, kind: str) -> bool:
    """Whether an examination of this kind can see the row's fault, or is to be silent about its setting."""
    if kind in ("doctor", "run"):
        return row.seen_by(kind)
    recorded = import_module("plumbob.testing.faulty.first_stage").RECORDED
    parts = {"stages": recorded, "environment": ("tasks", "grading", "tools", "evaluation")}
    behind = kind == "environment" and getattr(row.at, "name", "") in BEHIND
    return row.seen_by("doctor") and getattr(row, "stage", parts[kind][0]) in parts[kind] and not behind


def items(args: argparse.Namespace) -> list[Item]:
    """A random choice of so many faults and settings, or those with one of the texts of --only in their name."""
    catalogue, drawn = import_module("plumbob.testing.faulty.catalogue"), random.Random(44)
    kinds = args.kind or ("doctor", "run")
    found: list[Item] = []
    for healthy, rows, count in ((False, catalogue.FAULTS, args.faults), (True, catalogue.HEALTHY, args.settings)):
        names = sorted(name for name, row in rows.items() if not getattr(row, "pretrained", False))
        if set(kinds) <= {"stages", "environment"}:
            names = [n for n in names if any(seen_by(rows[n], kind) for kind in kinds)]
        chosen = drawn.sample(names, min(count, len(names)))
        wanted = [n for n in names if any(part in n for part in args.only)] if args.only else chosen
        found += [(healthy, n, k) for n in wanted for k in kinds if seen_by(rows[n], k)]
    return found


def called(name: str, arguments: str, *more: str) -> tuple[str, str]:
    """(stdout, stderr) of `doctor` or `train` in this process."""
    out, err = io.StringIO(), io.StringIO()
    run_app, app = import_module("plumbob.console.app").run_app, import_module(f"plumbob.trainer.cli.{name}").app
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        run_app(name, app, [*arguments.split(), *more])
    return out.getvalue(), err.getvalue()


def by_part(row: Any, kind: str, seed: int) -> dict[str, Any]:
    """What the first stage of two training steps that differs says, or the table of the environment's transcripts."""
    first = import_module("plumbob.testing.faulty.first_stage")
    config = first.config_of(row.env, row.options, seed)
    if kind == "stages":
        found = first.first_stage(config)
        return {"named": [found.cause] if found else [], "evidence": f"{found.stage}: {found}" if found else ""}
    player, doctor = import_module("plumbob.trainer.doctor.player"), "plumbob.doctor.environment"
    tasks = import_module("plumbob.trainer.rollouts.tasks").load_environments(config)[0]
    with asyncio.Runner() as runner:
        matrix = import_module(f"{doctor}.matrix").play(player.VerifiersPlayer(config, tasks, runner), seed)
        found = list(import_module(f"{doctor}.table").judge(matrix))
    failed = [finding for finding in found if finding.verdict == "fail"]
    return {
        "named": [finding.cause for finding in failed],
        "evidence": " | ".join(f"{f.cause}: not true: {f.check}. {f.evidence} [{f.place}]" for f in failed),
        "error": any(finding.verdict == "error" for finding in found),
    }


def by_command(row: Any, healthy: bool, kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """What `doctor ENV` says, or `doctor RUN_DIR` after some steps."""
    given = f"{row.env} {import_module('plumbob.testing.faulty.fault').BASE[row.env]}"
    if kind == "doctor":
        out, err = called("doctor", f"{given} {row.options} --seed {seed} --json")
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        own = f"{row.options} {getattr(row, 'run_options', '')}"
        size = "" if healthy and "--batch-size" in own else import_module("plumbob.testing.faulty.first_stage").SMALL
        settings = f"--eval-examples 0 {size} {own} --max-steps {row.steps} --seed {seed} --save-steps 1000"
        _, err = called("train", f"{given} {settings} --run-name run", "-o", str(folder))
        out, last = called("doctor", "--json", str(folder / "run"))
        err = err or last
    if "{" not in out:
        return {"named": [], "evidence": (err.strip() or "no output").splitlines()[-1], "error": True}
    report = json.loads(out[out.index("{") :])
    named = list(report["causes"])
    said = next((f"{f['check']}: {f['evidence']}" for f in report["findings"] if named and f["cause"] == named[0]), "")
    return {"named": named, "evidence": said}


def examine(send: Connection, item: Item, seed: int, folder: Path) -> None:
    """Send what the doctor says: {"named": ids of causes, "evidence": of the first one}."""
    healthy, name, kind = item
    import_module("torch").set_num_threads(1)
    row = row_of(healthy, name)
    with contextlib.ExitStack() as stack:
        row.start(stack, row.env)
        part = kind in ("stages", "environment")
        found = by_part(row, kind, seed) if part else by_command(row, healthy, kind, seed, folder)
    send.send(found | {"evidence": found["evidence"][:400]})


def in_process(item: Item, seed: int, folder: Path) -> dict[str, Any]:
    receive, send = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=examine, args=(send, item, seed, folder))
    with LOCK:  # a process that starts copies open pipes, and would keep another run's pipe open
        process.start()
        send.close()
    found: dict[str, Any] = {"named": [], "evidence": f"ended, or more than {LIMIT} s", "error": True}
    with contextlib.suppress(EOFError):
        found = receive.recv() if receive.poll(LIMIT) else found
    process.kill()
    process.join()
    return found


def verdict(item: Item, found: dict[str, Any]) -> str:
    healthy, name, kind = item
    causes, named = import_module("plumbob.doctor.causes"), found["named"]
    if healthy:
        return "alarm" if named else "not examined" if found.get("error") else "silent"
    accepted = row_of(healthy, name).accepts("run" if kind == "run" else "doctor")
    if named and {named[0], *causes.CAUSES[named[0]].includes} & accepted:
        return "right" if named[0] in accepted else "general"
    return "wrong" if named and not causes.is_symptom(named[0]) else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the results, a JSON object in each line")
    parser.add_argument("--faults", type=int, default=100, help="number of faults that are drawn")
    parser.add_argument("--settings", type=int, default=170, help="number of healthy settings that are drawn")
    parser.add_argument("--only", action="append", help="all rows with this text in their name instead; repeatable")
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: doctor and run")
    parser.add_argument("--seed", type=int, default=0, help="seed of every run")
    parser.add_argument("--jobs", type=int, default=2, help="number of examinations at the same time")
    args = parser.parse_args()
    wanted = {f"{'healthy' if item[0] else 'fault'}/{item[2]}/{item[1]}/{args.seed}": item for item in items(args)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {row["key"]: row for row in map(json.loads, lines)}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    CONTEXT.set_forkserver_preload([*(f"plumbob.trainer.{name}" for name in HEAVY), "plumbob.testing.faulty.catalogue"])

    def one(key: str) -> None:
        began, slug = time.monotonic(), "".join(c if c.isalnum() else "-" for c in key)
        found = in_process(wanted[key], args.seed, args.out.parent.absolute() / "accuracy-runs" / slug)
        done[key] = {"key": key, **found, "seconds": round(time.monotonic() - began, 1)}
        with LOCK, args.out.open("a") as file:
            file.write(json.dumps(done[key]) + "\n")
        print(f"{verdict(wanted[key], found)}: {key}: {', '.join(found['named'])}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, [key for key in wanted if key not in done]))
    for healthy, kind in dict.fromkeys((healthy, kind) for healthy, _, kind in wanted.values()):
        verdicts = [verdict(item, done[key]) for key, item in wanted.items() if (item[0], item[2]) == (healthy, kind)]
        for what, count in Counter(verdicts).most_common():
            low, high = binomtest(count, len(verdicts)).proportion_ci(method="wilson")
            print(f"{healthy=} {kind}: {what} {count} of {len(verdicts)} (95%: {low:.0%} to {high:.0%})")


if __name__ == "__main__":
    main()
