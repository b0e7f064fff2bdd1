"""Measure how the matrix of an environment names faults: a random part of those of the environment's side, by a seed.

    uv run python tools/bench/environments.py --faults 40 --healthy 40 --seed 1 --out /tmp/matrix.jsonl
    uv run python tools/bench/environments.py --faults 40 --seed 1 --old          # `doctor ENV --without-model` on the same ones
    uv run python tools/bench/environments.py --only "one digit read"

Each examination has a process, forked from one that has imported everything; its `play_fresh` forks before anything is played.
A fault is named rightly if the first cause is one that its entry accepts, and by a general name if the cause stands for one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

OTHER_SIDE = ("batches_changed", "chat_method", "rows_changed")
"""Functions that inject a fault behind the environment: into rows, batches or the chat template."""
ENVIRONMENT = frozenset(
    """reward-not-finite reward-nondeterministic reward-constant oracle-fails answers-not-parsed reward-wrong reward-exploitable
    reward-format-dominated evaluation-parses-differently grader-swallows-errors answer-in-prompt few-distinct-tasks duplicate-tasks
    evaluation-differs evaluation-prompted-differently environment-fails environment-hangs held-out-in-training tools-fail
    tools-return-nothing tool-results-cut tool-results-wrong tool-results-mixed task-order-drifts tool-arguments-changed
    rewards-of-other-rollouts truncated-context tools-not-in-prompt""".split()
)
"""The causes that lie in an environment."""


def pool(kind: str) -> dict[str, Any]:
    """Name -> fault of the environment's side, or healthy setting that changes the environment."""
    from plumbob.testing.faults.field import entries

    found = [f for n in ("", *map(str, range(2, 28))) for half in ("seen", "unseen") for f in entries(kind, n, half)]
    if kind == "healthy":
        return {f.name: f for f in found if f.start is not None and not f.pretrained}
    own = [f for f in found if f.start is not None and f.probes and f.causes <= ENVIRONMENT]
    return {f.name: f for f in own if f.start.__qualname__.split(".")[0] not in OTHER_SIDE}


def forked(kind: str, name: str, old: bool) -> dict[str, Any]:
    """`examined` in a process of its own."""
    receive, send = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
        try:
            send.send(examined(kind, name, old))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))[-600:]
            send.send(
                {
                    "kind": kind,
                    "name": name,
                    "env": "",
                    "causes": [],
                    "named": [],
                    "evidence": text,
                    "code": 2,
                    "seconds": 0.0,
                }
            )

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(300) else {"kind": kind, "name": name, "env": "", "causes": [], "named": [], "evidence": "no end", "code": 2, "seconds": 300.0}  # fmt: skip
    finally:
        process.kill()


def examined(kind: str, name: str, old: bool) -> dict[str, Any]:
    """What one examination found."""
    from field_runs import called, options_of
    from plumbob.testing.faults.field import HealthySetting
    from plumbob.trainer.cli import doctor as command
    from plumbob.trainer.cli.train import configure

    what = HealthySetting("", name) if kind == "plain" else pool(kind)[name]
    env = what.env if isinstance(what, HealthySetting) else what.envs[0]
    arguments, began = options_of(env, what.options, 0), time.monotonic()
    with ExitStack() as stack:
        if what.start is not None:
            what.start(stack, env)
        if old:
            code, out, err = called("doctor", command.app, [*arguments, "--without-model", "--json"])
            report = json.loads(out) if out.startswith("{") else {"findings": [], "cause": None, "error": err[-300:]}
            named = [f["cause"] for f in report["findings"] if f["cause"]]
            evidence = next((f["evidence"] for f in report["findings"] if f["cause"]), report.get("error", ""))
            code = 2 if "error" in report else 0
        else:
            given: list[Any] = []
            command.configure = lambda options: given.append(configure(options)[0]) or sys.exit(0)
            called("doctor", command.app, arguments)
            named, evidence, code = of_matrix(given[0])
    causes = sorted(getattr(what, "causes", ()))
    return {"kind": kind, "name": name, "env": env, "causes": causes, "named": named, "evidence": evidence, "code": code, "seconds": time.monotonic() - began}  # fmt: skip


def of_matrix(config: Any) -> tuple[list[str], str, int]:
    """(causes, evidence of the first, exit code) of the matrix."""
    from plumbob.doctor.environment.table import examine, lines
    from plumbob.trainer.doctor.player import VerifiersPlayer
    from plumbob.trainer.rollouts.tasks import load_environments

    class Forked(VerifiersPlayer):
        def play_fresh(self, scripts: Any) -> Any:
            def play(send: Any) -> None:
                with asyncio.Runner() as self.runner:
                    # A task has an environment's objects in it, which need not be picklable.
                    send.send([vars(self.play(script)) | {"task": None} for script in scripts])

            receive, send = multiprocessing.Pipe()
            process = multiprocessing.get_context("fork").Process(target=play, args=(send,))
            process.start()
            send.close()

            def wait() -> Any:
                from plumbob.doctor.environment.player import Played

                try:
                    return [Played(**own | {"task": s.task}) for own, s in zip(receive.recv(), scripts, strict=True)]
                except EOFError:
                    return None

            return wait

    with asyncio.Runner() as runner:
        found = examine(Forked(config, load_environments(config)[0], runner))
    failed = [why for why in found.not_examined.values() if why.startswith("the check failed")]
    return [v.row.cause for v in found.violations], " | ".join([*failed, " ".join(v.row.id for v in found.violations), *lines(found)])[:2000], 2 if failed else 0


def verdict(one: dict[str, Any]) -> str:
    """right, general, wrong, missed; healthy or ALARM; ERROR if something could not be examined."""
    from plumbob.doctor.causes import stands_for
    from plumbob.testing.faulty.old_causes import NEW_IDS

    if one["code"] == 2:
        return "ERROR"
    if one["kind"] != "field":
        return "ALARM" if one["named"] else "healthy"
    accepted = {NEW_IDS[cause] for cause in one["causes"]}
    first = next((NEW_IDS.get(cause, cause) for cause in one["named"]), None)
    if first is None:
        return "missed"
    return "right" if first in accepted else "general" if stands_for(first) & accepted else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("faults", 0), ("healthy", 0), ("seed", 1), ("skip", -1), ("jobs", 2)):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            help="--skip: leave out what this seed draws" if name == "skip" else None,
        )
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--old", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("environments.jsonl"))
    given = parser.parse_args()
    chosen = [("plain", env) for env in ("lookup", "gsm8k", "musique") if not given.only]
    for kind, count in (("field", given.faults), ("healthy", given.healthy)):
        names = sorted(pool(kind))
        left = names if given.skip < 0 else sorted(set(names) - set(random.Random(given.skip).sample(names, count)))
        chosen += [(kind, n) for n in (random.Random(given.seed).sample(left, min(count, len(left))))]
        chosen += [(kind, n) for n in names if any(n.startswith(only) for only in given.only)]
    import plumbob.doctor.environment.table
    import plumbob.trainer.doctor.before_model.examine
    import plumbob.trainer.doctor.player  # noqa: F401 - forked processes have it already
    import field_runs  # noqa: F401

    counts: Counter[str] = Counter()
    with ThreadPool(given.jobs) as threads, given.out.open("a") as file:
        for one in threads.imap(lambda pair: forked(*pair, given.old), chosen):
            counts[verdict(one)] += 1
            file.write(json.dumps(one) + "\n")
            print(
                f"{verdict(one):8} {one['name']} ({one['env']}, {one['seconds']:.0f} s): {one['causes']} -> {one['named'][:4]} {one['evidence'][:400]}",
                flush=True,
            )
    print(dict(counts))


if __name__ == "__main__":
    main()
