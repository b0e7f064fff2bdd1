"""Measure how an environment's matrix names a random part of the faults of the environment's side, and of healthy settings.

    uv run python tools/bench/environments.py --faults 40 --healthy 40 --seed 1 --out /tmp/matrix.jsonl
    uv run python tools/bench/environments.py --faults 40 --seed 1 --old          # `doctor ENV --without-model` on the same ones
    uv run python tools/bench/environments.py --only "one digit read"

Each examination is in a process of its own, which another one is forked from for `play_fresh`. A fault is named rightly if
the first cause is one that its entry accepts, as the new catalogue calls it; "general" if the cause stands for one of them.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import plumbob.trainer.doctor.before_model.examine  # noqa: F401 - forked processes have it already
from field_runs import called, options_of
from plumbob.doctor.causes import CAUSES, stands_for
from plumbob.doctor.environment.player import Played
from plumbob.doctor.environment.table import examine, lines
from plumbob.testing.faults.field import HealthySetting, entries
from plumbob.testing.faulty.old_causes import NEW_IDS
from plumbob.trainer.cli import doctor as command
from plumbob.trainer.cli.train import configure
from plumbob.trainer.doctor.player import VerifiersPlayer
from plumbob.trainer.rollouts.tasks import load_environments

BEHIND = ("batches_changed", "chat_method", "rows_changed")
"""Functions that inject a fault behind the environment: into rows, batches or the chat template."""
OTHERS = "environment-fails environment-hangs reward-not-finite rewards-of-other-rollouts tools-not-in-prompt truncated-context"
"""Causes (of the old catalogue) that an environment may be to blame for, although their stage is another one."""
FORK = multiprocessing.get_context("fork")


def pool(kind: str) -> dict[str, Any]:
    """Name -> fault of the environment's side (`kind` "field"), or setting that changes the environment ("healthy")."""
    found = [f for n in ("", *map(str, range(2, 28))) for half in ("seen", "unseen") for f in entries(kind, n, half)]
    if kind == "healthy":
        return {f.name: f for f in found if f.start is not None and not f.pretrained}
    known = [f for f in found if f.start is not None and f.probes and all(map(_in_environment, f.causes))]
    return {f.name: f for f in known if f.start.__qualname__.split(".")[0] not in BEHIND}


def _in_environment(cause: str) -> bool:
    new = NEW_IDS.get(cause, "calls-not-read")
    own = CAUSES[new].stage in ("tasks", "grading", "tools", "evaluation") and new != "calls-not-read"
    return own or cause in OTHERS.split()


class Forked(VerifiersPlayer):
    """Its fresh process has the same faults injected, because it is forked before anything is played."""

    def play_fresh(self, scripts: Any) -> Any:
        def play(send: Any) -> None:
            with asyncio.Runner() as self.runner:
                send.send([vars(self.play(script)) | {"task": None} for script in scripts])

        receive = in_child(play)
        return lambda: [Played(**own | {"task": s.task}) for own, s in zip(receive(), scripts, strict=True)]


def in_child(run: Any, seconds: float = 300.0) -> Any:
    """Begin to run this in a forked process, with a connection to send its result to; returns a function that waits for it."""
    receive, send = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run, args=(send,))
    process.start()
    send.close()
    return lambda: receive.recv() if receive.poll(seconds) else process.kill()


def examined(kind: str, name: str, old: bool, send: Any) -> None:
    """Send what one examination found."""
    what = HealthySetting("", name) if kind == "plain" else pool(kind)[name]
    env = what.env if isinstance(what, HealthySetting) else what.envs[0]
    arguments, began = options_of(env, what.options, 0), time.monotonic()
    one = {"kind": kind, "name": name, "env": env, "causes": sorted(getattr(what, "causes", ())), "named": []}
    with contextlib.ExitStack() as stack, open(os.devnull, "w") as sink:
        stack.enter_context(contextlib.redirect_stdout(sink))
        stack.enter_context(contextlib.redirect_stderr(sink))
        try:
            if what.start is not None:
                what.start(stack, env)
            if old:
                report = json.loads(called("doctor", command.app, [*arguments, "--without-model", "--json"])[1])
                failed = [f for f in report["findings"] if f["cause"]]
                one |= {"named": [f["cause"] for f in failed], "evidence": failed[0]["evidence"] if failed else ""}
            else:
                given: list[Any] = []
                command.configure = lambda options: given.append(configure(options)[0]) or sys.exit(0)
                called("doctor", command.app, arguments)
                with asyncio.Runner() as runner:
                    found = examine(Forked(given[0], load_environments(given[0])[0], runner))
                broken = [why for why in found.not_examined.values() if why.startswith("the check failed")]
                one |= {"rows": [v.row.id for v in found.violations], "named": [v.row.cause for v in found.violations]}
                one |= {"evidence": " | ".join(lines(found)), "rollouts": found.rollouts, "error": " ".join(broken)}
        except BaseException as error:
            one["error"] = "".join(traceback.format_exception(error))[-600:]
    send.send(one | {"seconds": round(time.monotonic() - began, 1)})


def verdict(one: dict[str, Any]) -> str:
    """right, general, wrong or missed; healthy or ALARM; ERROR if something could not be examined."""
    accepted = {NEW_IDS[cause] for cause in one["causes"]}
    first = next((NEW_IDS.get(cause, cause) for cause in one["named"]), None)
    if one.get("error"):
        return "ERROR"
    if one["kind"] != "field" or first is None:
        return "ALARM" if first else "healthy" if one["kind"] != "field" else "missed"
    return "right" if first in accepted else "general" if stands_for(first) & accepted else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("faults", 0), ("healthy", 0), ("seed", 1), ("without-seed", 0), ("jobs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", action="append", default=[], help="names that begin so")
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("environments.jsonl"))
    given = parser.parse_args()
    chosen = [] if given.only else [("plain", env) for env in ("lookup", "gsm8k", "musique")]
    for kind, count in (("field", given.faults), ("healthy", given.healthy)):
        names = sorted(pool(kind))
        drawn = random.Random(given.without_seed).sample(names, min(count, len(names))) if given.without_seed else []
        left = [name for name in names if name not in drawn]
        chosen += [(kind, name) for name in random.Random(given.seed).sample(left, min(count, len(left)))]
        chosen += [(kind, name) for name in names if any(name.startswith(only) for only in given.only)]
    counts: Counter[str] = Counter()
    with ThreadPool(given.jobs) as threads, given.out.open("a") as file:
        run = lambda pair: in_child(lambda send: examined(*pair, given.old, send))()  # noqa: E731
        for pair, found in zip(chosen, threads.imap(run, chosen), strict=True):
            one = found or {"kind": pair[0], "name": pair[1], "env": "", "causes": [], "named": [], "error": "no end"}
            counts[verdict(one)] += 1
            file.write(json.dumps(one) + "\n")
            shown = one.get("error") or one.get("evidence", "")
            print(
                f"{verdict(one):8} {one['name']} ({one['env']}): {one['causes']} -> {one['named'][:4]} {shown[:300]}",
                flush=True,
            )
    print(dict(counts))


if __name__ == "__main__":
    main()
