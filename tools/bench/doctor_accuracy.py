"""Measure how the doctor names faults, and whether it stays silent in healthy settings: a third of the rows, by a fixed seed.

    uv run python tools/bench/doctor_accuracy.py --out runs/some.jsonl --only "end of each turn" --kind doctor

Each row is examined by `doctor ENV`, and by `doctor RUN_DIR` after a few steps, in processes of their own. Results are appended
to OUT, and what is there is not run again. right: the first cause is one that the row accepts; general: it includes one of
these; missed: nothing is named, or a symptom that is not right.
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
"""Whether it is healthy, the row's name, and how it is examined: "doctor" or "run"."""
HEAVY = (
    "cli.train",
    "cli.doctor",
    "training.train",
    "doctor.before_model.examine",
    "doctor.run_probes",
    "doctor.player",
    "watch.watch",
)
"""What is imported once, before processes are forked. What does not exist is skipped."""
LIMIT = 600
"""Seconds after which an examination is ended."""
SMALL = "--batch-size 32 --gradient-accumulation-steps 1"
"""Size of the steps of a run whose row says nothing of it."""


def row_of(healthy: bool, name: str) -> Any:
    catalogue = import_module("plumbob.testing.faulty.catalogue")
    return (catalogue.HEALTHY if healthy else catalogue.FAULTS)[name]


def items(args: argparse.Namespace) -> list[Item]:
    """A random choice of so many faults and settings, or those with one of the texts of --only in their name."""
    catalogue, drawn = import_module("plumbob.testing.faulty.catalogue"), random.Random(44)
    found: list[Item] = []
    for healthy, rows, count in ((False, catalogue.FAULTS, args.faults), (True, catalogue.HEALTHY, args.settings)):
        names = sorted(name for name, row in rows.items() if not getattr(row, "pretrained", False))
        wanted = [n for n in names if any(part in n for part in args.only)] if args.only else drawn.sample(names, count)
        found += [(healthy, n, k) for n in wanted for k in args.kind or ("doctor", "run") if rows[n].seen_by(k)]
    return found


def called(name: str, arguments: str, *more: str) -> tuple[str, str]:
    """(stdout, stderr) of `doctor` or `train` in this process."""
    out, err = io.StringIO(), io.StringIO()
    run_app, app = import_module("plumbob.console.app").run_app, import_module(f"plumbob.trainer.cli.{name}").app
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        run_app(name, app, [*arguments.split(), *more])
    return out.getvalue(), err.getvalue()


def played_in_fork(player: Any, scripts: Any) -> Any:
    """`VerifiersPlayer.play_fresh` by a process that has the row's change, too: it is forked, before anything is played."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)

    def play() -> None:
        with asyncio.Runner() as player.runner:
            send.send([vars(player.play(script)) | {"task": None} for script in scripts])

    process = fork.Process(target=play)
    process.start()
    send.close()

    def wait() -> Any:
        try:
            own = receive.recv() if receive.poll(120) else process.kill()
        except EOFError:
            return None
        kind = import_module("plumbob.doctor.environment.player").Played
        return own and [kind(**one | {"task": script.task}) for one, script in zip(own, scripts, strict=True)]

    return wait


def examine(send: Connection, item: Item, seed: int, folder: Path) -> None:
    """Send what the doctor says: {"named": ids of causes, "evidence": of the first one}."""
    healthy, name, kind = item
    import_module("torch").set_num_threads(1)
    row = row_of(healthy, name)
    import_module("plumbob.trainer.doctor.player").VerifiersPlayer.play_fresh = played_in_fork
    given = f"{row.env} {import_module('plumbob.testing.faulty.fault').BASE[row.env]}"
    with contextlib.ExitStack() as stack:
        row.start(stack, row.env)
        if kind == "doctor":
            out, err = called("doctor", f"{given} {row.options} --seed {seed} --json")
        else:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            small = "" if healthy and "--batch-size" in row.options else SMALL
            more = f"{small} {row.options} {getattr(row, 'run_options', '')} --max-steps {row.steps} --seed {seed}"
            settings = f"--eval-examples 0 {more} --threads 1 --save-steps 1000 --run-name run"
            _, err = called("train", f"{given} {settings}", "-o", str(folder))
            out, last = called("doctor", "--json", str(folder / "run"))
            err = err or last
    if "{" not in out:
        return send.send({"named": [], "evidence": (err.strip() or "no output").splitlines()[-1], "error": True})
    report = json.loads(out[out.index("{") :])
    named = list(report["causes"])
    said = next((f"{f['check']}: {f['evidence']}" for f in report["findings"] if named and f["cause"] == named[0]), "")
    return send.send({"named": named, "evidence": said[:400]})


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
    causes, old = import_module("plumbob.doctor.causes"), import_module("plumbob.testing.faulty.old_causes").NEW_IDS
    named = [old.get(cause, cause) for cause in found["named"]]
    if healthy:
        return "alarm" if named else "not examined" if found.get("error") else "silent"
    accepted = row_of(healthy, name).accepts(kind)
    if named and causes.stands_for(named[0]) & accepted:
        return "right" if named[0] in accepted else "general"
    return "wrong" if named and not causes.is_symptom(named[0]) else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the results, a JSON object in each line")
    parser.add_argument("--faults", type=int, default=100, help="number of faults that are drawn")
    parser.add_argument("--settings", type=int, default=170, help="number of healthy settings that are drawn")
    parser.add_argument("--only", action="append", help="all rows with this text in their name instead; repeatable")
    parser.add_argument("--kind", action="append", choices=("doctor", "run"), help="default: both")
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
