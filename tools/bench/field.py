"""Measure how the doctor names faults of the field, on which it was not built: field_seen.py and field_unseen.py.

With `--set 2` those of the second set, field2_seen.py and field2_unseen.py, with `--set 3` to `--set 27` those of the later ones.

    uv run python tools/bench/field.py --half seen                  # everything of the seen half, and the table
    uv run python tools/bench/field.py --half seen --kind probes --only "advantages over the batch"
    uv run python tools/bench/field.py --half seen --kind healthy --seed 3
    uv run python tools/bench/field.py --set 2 --half seen

Kinds: `probes` (doctor ENV), `watch` (train, then doctor RUN_DIR), `healthy` (settings without a fault, both ways),
`pairs` (two faults in one run, doctor ENV --all). Each result is appended to OUT/HALF.jsonl (OUT/set2-HALF.jsonl and so
on), and what is there is not run again; `--table` only prints the table. A fault is named rightly if the first cause is
one of those that its entry accepts, or stands for one of them, and a pair if the first cause is that of either fault. The
last columns list the metrics that TRL logs, and those that verifiers reports, of the same run, that leave the range of
plain healthy runs of that environment (from the lowest value / 1.5 to the highest x 1.5). Exit code 1 if anything was
named wrongly or a healthy run gave an alarm.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

KINDS = ("probes", "watch", "healthy", "pairs")


@dataclass(frozen=True)
class Item:
    """One run."""

    kind: str
    name: str
    env: str
    how: str
    """`probes` or `watch`."""
    what: Any
    """The faults, or the healthy setting."""
    accepted: frozenset[str]
    """The causes that are right; empty for a healthy run."""
    parts: tuple[frozenset[str], ...] = ()
    """For a pair, the causes that are right for each fault."""

    def key(self, seed: int) -> str:
        return f"{self.kind}/{self.how}/{self.name}/{self.env}/{seed}"


SETS = {"1": "", **{str(number): f"set{number}-" for number in range(2, 28)}}
"""Number of a set of faults and settings -> what precedes a half's name: with `--set 2`, halves are `set2-seen` and
`set2-unseen`."""


def modules_of(half: str) -> tuple[str, str]:
    """(what follows "field" and "healthy" in the names of a half's modules, seen or unseen).

    Examples: modules_of("seen") -> ("", "seen"); modules_of("set10-unseen") -> ("10", "unseen")
    """
    for number, prefix in SETS.items():
        if prefix and half.startswith(prefix):
            return number, half.removeprefix(prefix)
    return "", half


def items_of(half: str, all_envs: bool) -> list[Item]:
    """Every run of this half. `all_envs`: faults in each environment where they can happen, not in the first alone."""
    from plumbob.testing.faults.field import entries, pairs

    number, half = modules_of(half)
    faults, settings = entries("field", number, half), entries("healthy", number, half)
    items = []
    for fault in faults:
        for env in fault.envs if all_envs else fault.envs[:1]:
            for how in ("probes", "watch"):
                if getattr(fault, how):
                    items.append(Item(how, fault.name, env, how, [fault], fault.named_rightly_by(how)))
    for setting in settings:
        items.append(Item("healthy", setting.name, setting.env, "probes", setting, frozenset()))
        if setting.steps:
            items.append(Item("healthy", setting.name, setting.env, "watch", setting, frozenset()))
    for env, a, b in pairs(faults):
        both = (a.causes, b.causes)
        items.append(Item("pairs", f"{a.name} + {b.name}", env, "probes", [a, b], a.causes | b.causes, both))
    return items


def references(envs: set[tuple[str, str]]) -> list[Item]:
    """Plain healthy runs of these (environment, how), with two seeds: what TRL and verifiers show without a fault."""
    from plumbob.testing.faults.field import HealthySetting

    return [
        Item(
            "reference",
            f"plain {env}, seed {seed}",
            env,
            how,
            HealthySetting("", env, f"--seed {seed}", steps=8),
            frozenset(),
        )
        for env, how in sorted(envs)
        for seed in (11, 12)
    ]


def known(half: str, kind: str) -> list[Item]:
    """Every run of this half and kind that can be asked for."""
    if kind == "reference":
        return references({(env, how) for env in ("lookup", "gsm8k", "musique") for how in ("probes", "watch")})
    return items_of(half, True)


def verdict(item: Item, found: dict[str, Any]) -> str:
    """right, wrong, missed, healthy, false alarm; for a pair also "right, one missing".

    A cause that includes others is right if one of these is. What is named last, because it is only a symptom, is missed
    if it is not right.
    """
    from plumbob.trainer.diagnosis.causes import is_symptom, stands_for

    named = found["named"]
    if item.kind in ("healthy", "reference"):
        return "false alarm" if named else "healthy" if found["code"] == 0 else "not examined"
    if not named:
        return "missed"
    if not stands_for(named[0]) & item.accepted:
        return "missed" if is_symptom(named[0]) else "wrong"
    every = {cause for one in named for cause in stands_for(one)}
    return "right" if all(part & every for part in item.parts) else "right, one missing"


def _child(send: Connection, half: str, kind: str, key: str, seed: int, out: Path, log: Path) -> None:
    """The process of one run: its own output goes to `log`, and what was found to `send`.

    It looks the run up by its key, because faults are functions that cannot be sent to a process.
    """
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        import field_runs

        (item,) = (item for item in known(half, kind) if item.key(seed) == key)
        send.send(field_runs.record(item.what, item.how, item.env, seed, out))
        send.close()


def run(item: Item, half: str, seed: int, out: Path, limit: float) -> dict[str, Any]:
    """Run one item in a process of its own; ends it after `limit` seconds."""
    slug = "".join(c if c.isalnum() else "-" for c in item.key(seed))
    log = out / "logs" / f"{slug}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    receive, send = CONTEXT.Pipe(duplex=False)
    began = time.monotonic()
    process = CONTEXT.Process(
        target=_child, args=(send, half, item.kind, item.key(seed), seed, out / "runs" / slug, log)
    )
    with LOCK:  # a process that starts copies open pipes, and would keep another run's pipe open
        process.start()
        send.close()
    problem = f"it took more than {limit:g} s"
    try:
        if receive.poll(limit):
            return receive.recv()
    except EOFError:
        problem = f"the process ended: {(log.read_text().strip().splitlines() or ['without a word'])[-1]}"
    finally:
        process.terminate()
        process.join()
    seconds = time.monotonic() - began
    return {"named": [], "evidence": problem, "step": None, "seconds": seconds, "trl": {}, "verifiers": {}, "code": 3}


CONTEXT: Any = multiprocessing.get_context("forkserver")
LOCK = threading.Lock()


def run_all(
    items: Sequence[Item], half: str, seed: int, out: Path, name: str, jobs: int, limit: float
) -> dict[str, Any]:
    """Run what OUT/NAME.jsonl does not hold; returns all results by key."""
    file = out / f"{name}.jsonl"
    done = {row["key"]: row for row in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    left = [item for item in items if item.key(seed) not in done]
    write = threading.Lock()
    # The server from which runs are forked imports everything once. It finds modules by $PYTHONPATH alone.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    CONTEXT.set_forkserver_preload(["field_runs"])

    def one(item: Item) -> None:
        found = run(item, half, seed, out, limit)
        row = {"key": item.key(seed), "verdict": verdict(item, found), **found}
        with write:
            done[row["key"]] = row
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            first = ", ".join(row["named"]) or "nothing"
            print(
                f"[{len(done)}] {row['verdict']}: {row['key']}: {first} ({row['seconds']:.0f} s): {row['evidence'][:300]}",
                file=sys.stderr,
                flush=True,
            )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, left))
    return done


def outside(values: dict[str, float], healthy: Sequence[dict[str, float]]) -> str:
    """Names and values of the metrics that leave the range of healthy runs, widened by 1.5 on both sides."""
    if not values or not healthy:
        return "?"
    names = []
    for name, value in values.items():
        known = [row[name] for row in healthy if name in row]
        if known and not min(known) - abs(min(known)) / 3 <= value <= max(known) + abs(max(known)) / 2:
            names.append(f"{name} {value:.2g}")
    return ", ".join(names) or "none"


def table(items: Sequence[Item], seed: int, done: dict[str, Any], normal: Callable[[Item], list[Any]]) -> int:
    """Print the matrix and the totals; returns the number of wrong names and false alarms."""
    print(
        "| run | environment | by | named first | verdict | step | seconds | TRL's metrics show | verifiers' metrics show |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    counts: dict[str, dict[str, int]] = {}
    general, symptoms = 0, 0
    for item in items:
        row = done.get(item.key(seed))
        if row is None:
            continue
        said = verdict(item, row)
        counts.setdefault(item.kind, {}).setdefault(said, 0)
        counts[item.kind][said] += 1
        general += said.startswith("right") and row["named"][0] not in item.accepted
        symptoms += said == "missed" and bool(row["named"])
        others = normal(item)
        trl, own = (outside(row[name], [o[name] for o in others]) for name in ("trl", "verifiers"))
        named = f"`{row['named'][0]}`" if row["named"] else "nothing"
        step = "" if row["step"] is None else row["step"]
        shown = said if said in ("right", "healthy") else f"**{said}**"
        print(
            f"| {item.name} | {item.env} | {item.how} | {named} | {shown} | {step} | {row['seconds']:.0f} | {trl} | {own} |"
        )
    print()
    for kind, found in counts.items():
        total = sum(found.values())
        print(f"{kind}: {', '.join(f'{count} {what}' for what, count in sorted(found.items()))} of {total}")
    print(f"{general} of the right ones by a general cause; {symptoms} of the missed ones with a symptom")
    return sum(found.get("wrong", 0) + found.get("false alarm", 0) for found in counts.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--half", choices=("seen", "unseen"), required=True, help="which half of the faults and settings"
    )
    parser.add_argument("--set", choices=list(SETS), default="1", help="which set of faults and settings")
    parser.add_argument("--kind", action="append", choices=KINDS, help="what to run; may be repeated; default: all")
    parser.add_argument("--only", action="append", default=[], help="a name, or a part of it; may be repeated")
    parser.add_argument(
        "--env", choices=("lookup", "gsm8k", "musique"), help="only runs in this environment; implies --all-envs"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of every run")
    parser.add_argument("--all-envs", action="store_true", help="each fault in every environment where it can happen")
    parser.add_argument("--pretrained", action="store_true", help="also the settings that need $PLUMBOB_SMOLLM2")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/field"), help="folder of the results and run directories"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a run is ended")
    parser.add_argument(
        "--no-reference", action="store_true", help="skip the plain healthy runs with which metrics are compared"
    )
    parser.add_argument("--table", action="store_true", help="run nothing, print the table of what was run")
    parser.add_argument("--list", action="store_true", help="print what would be run, and run nothing")
    args = parser.parse_args()
    kinds, half = args.kind or KINDS, f"{SETS[args.set]}{args.half}"
    items = [
        item
        for item in items_of(half, args.all_envs or args.env is not None)
        if args.env in (None, item.env)
        if item.kind in kinds and (not args.only or any(part in item.name for part in args.only))
        if args.pretrained or not getattr(item.what, "pretrained", False)
    ]
    if not items:
        parser.error("nothing of this half has such a kind and name")
    if args.list:
        print("\n".join(item.key(args.seed) for item in items))
        return 0
    plain = references({(item.env, item.how) for item in items})
    args.out.mkdir(parents=True, exist_ok=True)
    out, limit = args.out.absolute(), args.limit
    jobs = 0 if args.table else args.jobs
    normal = run_all(plain if jobs and not args.no_reference else [], half, 0, out, "reference", max(jobs, 1), limit)
    done = run_all(items if jobs else [], half, args.seed, out, half, max(jobs, 1), limit)

    def healthy(item: Item) -> list[Any]:
        found = (normal.get(p.key(0)) for p in plain if (p.env, p.how) == (item.env, item.how))
        return [row for row in found if row is not None]

    return 1 if table(items, args.seed, done, healthy) else 0


if __name__ == "__main__":
    sys.exit(main())
