"""How the stages of `plumbob.doctor` name single faults, and what they say of healthy settings.

    uv run python tools/bench/stages.py fault "reward normalised over the batch" --set 5
    uv run python tools/bench/stages.py catalogue "loss mask as attention mask" "merged in bf16"
    uv run python tools/bench/stages.py healthy lookup --options=--bf16 "--options=--peft --kl-beta 0.01"

Each is a process of its own: the run is set up with the fault in it, two training steps are recorded, and the stages are
examined until the first that differs (`--all`: all of them). One line of JSON for each.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock


class Parsed(Exception):
    """The command line has been read."""


def parse(arguments: list[str]) -> Any:
    """The settings that `doctor ARGUMENTS` would examine."""
    from plumbob.console.app import run_app
    from plumbob.trainer.cli import doctor
    from plumbob.trainer.cli.train import configure

    seen: dict[str, Any] = {}

    def keep(given: Any) -> Any:
        seen["config"] = configure(given)[0]
        raise Parsed

    silent = io.StringIO()
    with (
        mock.patch.object(doctor, "configure", keep),
        contextlib.redirect_stdout(silent),
        contextlib.suppress(Parsed, SystemExit),
    ):
        run_app("doctor", doctor.app, arguments)
    return seen["config"]


def examined(env: str, options: str, start: Any, inject: Any, *, every: bool, seed: int) -> dict[str, Any]:
    """What the stages say of one run."""
    import torch
    from plumbob.doctor import stages
    from plumbob.doctor.reference.model import load
    from plumbob.doctor.reference.rows import load_tokenizer
    from plumbob.testing.faults.doubles import after_each_set_up
    from plumbob.testing.faults.field import BASE
    from plumbob.trainer.distributed.world import join_world
    from plumbob.trainer.doctor import subject as subjects
    from plumbob.trainer.doctor.live import LiveRun, record_steps
    from plumbob.trainer.training import train as training

    torch.set_num_threads(1)
    found: dict[str, Any] = {"env": env, "options": options}
    with ExitStack() as stack:
        if start is not None:
            start(stack, env)
        if inject is not None:
            after_each_set_up(stack, (subjects, training), inject)
        config = parse([env, *BASE[env].split(), *options.split(), "--seed", str(seed), "--eval-examples", "0"])
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        began = time.time()
        subject = subjects.load_subject(config, join_world(torch.device("cpu")), Path(folder), lambda _: None)
        stack.callback(subject.close)
        began_step = time.time()
        kept = record_steps(subject, 2)
        found["seconds"] = {"set up": began_step - began, "two steps": time.time() - began_step}
        began = time.time()
        plain, outcomes = load(kept.records[0].settings), []
        tokenizer = load_tokenizer(kept.records[0].settings)
        for k, record in enumerate(kept.records):
            live = LiveRun(subject) if k == 0 else None
            with plain.having(kept.weights[k]) if k else contextlib.nullcontext():
                before = kept.records[k - 1] if k else None
                x = stages.Examined(record, plain, tokenizer, live, seed=seed, previous=before)
                outcomes += stages.examine(x, every=every)
            if stages.first(outcomes) is not None and not every:
                break
        found["seconds"]["stages"] = time.time() - began
    failed = stages.first(outcomes)
    found |= {"stage": failed and failed.stage, "cause": failed and failed.cause, "what": failed and failed.what}
    found["text"] = str(failed) if failed else ""
    found["places"] = failed.places if failed else {}
    found["gaps"] = {o.check[:48]: o.gap for o in outcomes if o.verdict != "not examined"}
    found["skipped"] = [f"{o.check[:40]}: {o.evidence}" for o in outcomes if o.verdict == "not examined"]
    if every:
        found["failed"] = [str(o) for o in outcomes if o.verdict == "fail"]
    return found


def forked(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call it in a process of its own, which a fault cannot leave changed."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)
            result = call()
        except BaseException as error:
            result = {"error": repr(error)[:300], "traceback": traceback.format_exc()[-1500:]}
        try:
            with os.fdopen(write, "w") as file:
                file.write(json.dumps(result, default=str))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "the process ended"}


def field_faults(number: str) -> dict[str, Any]:
    from plumbob.testing.faults.field import entries

    return {fault.name: fault for half in ("seen", "unseen") for fault in entries("field", number, half)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("fault", "catalogue", "healthy"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--set", default="")
    parser.add_argument("--options", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--full", action="store_true", help="print all numbers")
    given = parser.parse_args()
    import plumbob.trainer.training.train  # noqa: F401 - loaded once for all processes
    from plumbob.testing.faults import catalogue

    jobs: list[tuple[str, str, str, Any, Any, frozenset[str]]] = []
    if given.kind == "healthy":
        jobs = [(o, env, o, None, None, frozenset()) for env in given.names for o in given.options or [""]]
    elif given.kind == "catalogue":
        for fault in catalogue.FAULTS:
            if fault.name in given.names or not given.names:
                env = fault.envs[0]
                settings = fault.elsewhere.get(env, fault.settings)
                options = " ".join(
                    f"--{k.replace('_', '-')}" + ("" if v is True else f" {v}")
                    for k, v in settings.items()
                    if k != "env_args"
                )
                options += "".join(f" -a {pair}" for pair in settings.get("env_args", ()))
                jobs.append((fault.name, env, options, None, fault.inject, frozenset({fault.cause})))
    else:
        for name, fault in field_faults(given.set).items():
            if any(name.startswith(n) for n in given.names) or not given.names:
                jobs.append((name, fault.envs[0], fault.options, fault.start, fault.inject, fault.causes))
    for name, env, options, start, inject, accepted in jobs:
        result = forked(lambda: examined(env, options, start, inject, every=given.all, seed=given.seed))  # noqa: B023
        if not given.full:
            result = {
                k: v for k, v in result.items() if k in ("stage", "cause", "what", "text", "error", "seconds", "failed")
            }
        print(json.dumps({"name": name, "accepted": sorted(accepted), **result}), flush=True)


if __name__ == "__main__":
    main()
