"""How an environment's matrix names a random part of the faults of the environment's side, and healthy settings.

    uv run python tools/bench/environments.py --faults 40 --healthy 40 --seed 1 --out /tmp/matrix.jsonl
    uv run python tools/bench/environments.py --faults 40 --seed 1 --old          # `doctor ENV --without-model` on the same ones

A fault is named rightly if the first cause is one that its entry accepts, in the new catalogue's words, and generally if the
first cause stands for one of them. Each examination is in a process of its own, of which `play_fresh` is forked.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
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


def in_environment(cause: str) -> bool:
    new = NEW_IDS.get(cause, "calls-not-read")
    own = CAUSES[new].stage in ("tasks", "grading", "tools", "evaluation") and new != "calls-not-read"
    return own or cause in OTHERS.split()


def pool(kind: str) -> dict[str, Any]:
    """Name -> fault of the environment's side (`kind` "field"), or setting that changes the environment ("healthy")."""
    found = [f for n in ("", *map(str, range(2, 28))) for half in ("seen", "unseen") for f in entries(kind, n, half)]
    if kind == "healthy":
        return {f.name: f for f in found if f.start is not None and not f.pretrained}
    known = [f for f in found if f.start is not None and f.probes and all(map(in_environment, f.causes))]
    return {f.name: f for f in known if f.start.__qualname__.split(".")[0] not in BEHIND}


class Forked(VerifiersPlayer):
    """Its fresh process has the same faults injected, because it is forked before anything is played."""

    def play_fresh(self, scripts: Any) -> Any:
        def play(send: Any) -> None:
            with asyncio.Runner() as self.runner:
                send.send([vars(self.play(script)) | {"task": None} for script in scripts])

        receive = in_child(play)
        return lambda: [Played(**own | {"task": s.task}) for own, s in zip(receive(), scripts, strict=True)]


def in_child(run: Any) -> Any:
    """Begin to run this in a forked process, with a connection to send its result to; returns a function that waits for it."""
    receive, send = FORK.Pipe(duplex=False)
    FORK.Process(target=run, args=(send,)).start()
    send.close()
    return receive.recv


def examined(kind: str, name: str, old: bool, send: Any) -> None:
    """Send what one examination found."""
    what = HealthySetting("", name) if kind == "plain" else pool(kind)[name]
    env = what.env if isinstance(what, HealthySetting) else what.envs[0]
    one = {"kind": kind, "name": name, "env": env, "causes": sorted(getattr(what, "causes", ())), "named": []}
    arguments, began, given = options_of(env, what.options, 0), time.monotonic(), list[Any]()
    with contextlib.ExitStack() as stack:
        try:
            if what.start is not None:
                what.start(stack, env)
            if old:
                report = json.loads(called("doctor", command.app, [*arguments, "--without-model", "--json"])[1])
                failed = [f for f in report["findings"] if f["cause"]]
                one |= {"named": [f["cause"] for f in failed], "evidence": failed[0]["evidence"] if failed else ""}
            else:
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
    if one["kind"] != "field":
        return "ALARM" if first else "healthy"
    if first is None:
        return "missed"
    return "right" if first in accepted else "general" if stands_for(first) & accepted else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("faults", 0), ("healthy", 0), ("seed", 1), ("without-seed", 0), ("jobs", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("environments.jsonl"))
    given = parser.parse_args()
    chosen = [("plain", env) for env in ("lookup", "gsm8k", "musique")]
    for kind, count in (("field", given.faults), ("healthy", given.healthy)):
        names = sorted(pool(kind))
        drawn = random.Random(given.without_seed).sample(names, min(count, len(names))) if given.without_seed else []
        left = [name for name in names if name not in drawn]
        chosen += [(kind, name) for name in random.Random(given.seed).sample(left, min(count, len(left)))]
    counts: Counter[str] = Counter()
    with ThreadPool(given.jobs) as threads, given.out.open("a") as file:
        run = lambda pair: in_child(lambda send: examined(*pair, given.old, send))()  # noqa: E731
        for one in threads.imap(run, chosen):
            counts[verdict(one)] += 1
            file.write(json.dumps(one) + "\n")
            shown = one.get("error") or one["evidence"][:300]
            print(
                f"{verdict(one):8} {one['name']} ({one['env']}): {one['causes']} -> {one['named'][:4]} {shown}",
                flush=True,
            )
    print(dict(counts))


if __name__ == "__main__":
    main()
