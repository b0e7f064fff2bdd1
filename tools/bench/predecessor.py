"""Put the defects and settings of the predecessor's trainer back one at a time, on synthetic GSM8K and on synthetic MuSiQue.

    uv run python tools/bench/predecessor.py                              # all arms, both environments, seed 0
    uv run python tools/bench/predecessor.py --seeds 2 --steps 30 --out /tmp/predecessor
    uv run python tools/bench/predecessor.py --table                      # only print the table of what was run

Each arm is a run of `train` with one thing changed, and `doctor ENV` of the same command before it, so that the table says
what the run came to and what the doctor says of it before and after. The bundled policies are trained, on the CPU. A run
that is finished is not run again; a run that was interrupted has to be removed from the folder first.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbob.testing.faulty.catalogue import FAULTS
from plumbob.testing.faulty.fault import BASE
from plumbob.testing.faulty.sites import UNJUDGED

ENVS = ("gsm8k", "musique")
SIZE = "--batch-size 32 --gradient-accumulation-steps 1 --save-steps 1000"
LORA = "--peft"
THEIRS = "--learning-rate 1e-6 --max-grad-norm 0.01"


@dataclass(frozen=True)
class Arm:
    """A run with one thing changed."""

    name: str
    options: str = ""
    faults: tuple[str, ...] = ()
    """Rows of `plumbob.testing.faulty`."""
    only: tuple[str, ...] = ENVS
    """Environments in which it can change anything."""


BLIND = "loss mask as attention mask from the start"
HEADERS, TOOLS = "missing assistant header in the row", "tools absent from the trained prompt"
UNBOUND = "weights under another prefix skipped in the sync"
MULTI_TURN = ("musique",)

ARMS = (
    Arm("nothing changed"),
    Arm("nothing changed, LoRA", LORA),
    # What was found by reading verifiers' GRPOTrainer of July to October 2025
    Arm("loss mask given as the attention mask", faults=(BLIND,)),
    Arm("loss mask given as the attention mask, LoRA", LORA, (BLIND,)),
    Arm("assistant header missing from the trained row", faults=(HEADERS,), only=MULTI_TURN),
    Arm("tool descriptions missing from the trained row", faults=(TOOLS,), only=MULTI_TURN),
    Arm("all three of these", faults=(HEADERS, TOOLS, BLIND), only=MULTI_TURN),
    Arm("all three of these, LoRA", LORA, (HEADERS, TOOLS, BLIND), MULTI_TURN),
    Arm(
        "tool descriptions missing from every prompt",
        faults=("tools absent from both prompts from the start",),
        only=MULTI_TURN,
    ),
    Arm("tool calls in a form that is not read", faults=("calls as function_call tags",), only=MULTI_TURN),
    # The user's settings
    Arm("LoRA at 1e-6, gradients clipped to 0.01", f"{LORA} {THEIRS}"),
    Arm("all weights at 1e-6, gradients clipped to 0.01", THEIRS),
    Arm("advantages divided by the group's standard deviation", "--scale-rewards group"),
    Arm("KL coefficient of 0.04", "--kl-beta 0.04"),
    Arm("context of 400 tokens", "--max-context 400"),
    Arm("adapter never reaches the engine", LORA, (UNBOUND,)),
    # A control: rewards by lot teach nothing, so a lift that this arm also shows is none.
    Arm("rewards drawn by lot", "--trained-reward random"),
)


def one(arm: Arm, command: str, arguments: list[str]) -> None:
    """Run `train` or `doctor` in this process, with the arm's options and its faults in it."""
    from plumbob.console.app import run_app
    from plumbob.trainer.cli import doctor as doctor_command
    from plumbob.trainer.cli import train as train_command

    env = arguments[0]
    with ExitStack() as stack:
        for name in arm.faults:
            FAULTS[name].start(stack, env)
        for place, limit in (
            UNJUDGED if arm.faults else ()
        ):  # the predecessor had no check of its syncs: none ends a run here
            place.install(stack, env, limit)
        app = doctor_command.app if command == "doctor" else train_command.app
        own = arm.options.split() if env in ENVS else []  # a finished run has its options in its folder
        run_app(command, app, [*arguments, *own])


def command_of(env: str, seed: int) -> list[str]:
    return [env, *BASE[env].split(), "--seed", str(seed)]


def called(arm: Arm, *arguments: str) -> str:
    """Stdout of `one` in a process of its own."""
    command = [sys.executable, __file__, "--one", arm.name, "--", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout


def causes_in(output: str) -> list[str]:
    """The causes in the JSON that `doctor` printed, the first one first."""
    if "{" not in output:
        return ["not examined"]
    return list(json.loads(output[output.index("{") :])["causes"])


def play(arm: Arm, env: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """Run one arm, or read what it came to; None if it did not come to its end."""
    name = f"{env}-{ARMS.index(arm):02}-{seed}"
    kept = args.out / f"{name}.json"
    result = json.loads(kept.read_text()) if kept.is_file() else {}
    if result and not args.examine:
        return result
    began = time.monotonic()
    given = command_of(env, seed)
    before = causes_in(called(arm, "doctor", *given, "--json"))
    if not result:
        size = [*SIZE.split(), "--max-steps", str(args.steps), "--eval-examples", str(args.eval_examples)]
        called(arm, "train", *given, *size, "-o", str(args.out), "--run-name", name)
    if not (args.out / name / "summary.json").is_file():
        print(f"{arm.name}, {env}, seed {seed}: train did not finish; see {args.out / name}", file=sys.stderr)
        return None
    after = causes_in(called(arm, "doctor", str(args.out / name), "--json"))
    rows = [json.loads(line) for line in (args.out / name / "metrics.jsonl").read_text().splitlines()]
    result = {
        "arm": arm.name,
        "env": env,
        "seed": seed,
        "before": before,
        "after": after,
        "reward": [row["reward/mean"] for row in rows],
        "evaluations": json.loads((args.out / name / "summary.json").read_text())["evaluations"],
        "seconds": time.monotonic() - began,
    }
    kept.write_text(json.dumps(result))
    return result


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """A row for each arm: held-out rewards before -> after, seed by seed, and the causes named in the first seed."""
    heads = [f"{env}, {how}" for env in ENVS for how in ("greedy", "sampled")]
    yield f"| changed | {' | '.join(heads)} | doctor before | doctor after |"
    yield "|---" * (len(heads) + 3) + "|"
    for arm in ARMS:
        cells = []
        of_arm = sorted((r for r in results if r["arm"] == arm.name), key=lambda r: r["seed"])
        for env in ENVS:
            runs = [r["evaluations"] for r in of_arm if r["env"] == env]
            for how in ("greedy", "sampled"):
                cells.append(
                    "<br>".join(f"{e['before'][how]['mean']:.2f} -> {e['after'][how]['mean']:.2f}" for e in runs)
                )
        said = [
            "<br>".join(
                f"{r['env']}: {', '.join(f'`{c}`' for c in r[when][:2]) or 'none'}" for r in of_arm if not r["seed"]
            )
            for when in ("before", "after")
        ]
        if of_arm:
            yield f"| {arm.name} | {' | '.join([*cells, *said])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/predecessor"), help="folder of the runs")
    parser.add_argument("--steps", type=int, default=24, help="training steps of each run")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--eval-examples", type=int, default=64, help="held-out tasks")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--env", choices=ENVS, action="append", help="only this environment")
    parser.add_argument("--only", default="", help="only arms whose name has a match of this regular expression")
    parser.add_argument(
        "--examine", action="store_true", help="ask the doctor again, of runs that are finished as well"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        one(next(arm for arm in ARMS if arm.name == args.one), args.arguments[0], args.arguments[1:])
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.table:
        results = [json.loads(path.read_text()) for path in sorted(args.out.glob("*.json"))]
    else:
        chosen = [
            (arm, env, seed)
            for seed in range(args.seeds)
            for arm in ARMS
            for env in args.env or ENVS
            if env in arm.only and re.search(args.only, arm.name)
        ]
        with ThreadPoolExecutor(args.jobs) as pool:
            results = []
            for result in pool.map(lambda given: play(*given, args), chosen):
                if result is None:
                    continue
                results.append(result)
                print(
                    f"[{len(results)}/{len(chosen)}] {result['arm']}, {result['env']}: {result['seconds']:.0f} s",
                    flush=True,
                )
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
