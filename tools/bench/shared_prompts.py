"""Measure what a training step saves by computing the common beginning of rows once.

    python tools/bench/shared_prompts.py [--steps 8] [--prompts 16] [--group 8] [--lora]

One process runs `train lookup` with two hops, as the arm `plumbob` of tools_step.py does: three turns of the bundled policy,
rewards drawn by lot, and a learning rate so small that every step has rollouts of the same length. Every second step computes
each row's prompt for itself. Printed as JSON lines: of each step `time/train` and the tokens that training passes computed; then
medians and ratios of both, and of the processor's seconds in optimizer steps, which other programs on the machine change less.
The first step of each kind is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from plumbob.trainer.training import step, steps

KINDS = ("each row's own", "shared")


def watch(kept: dict[str, list[dict[str, float]]]) -> None:
    """Alternate between both kinds, and add what each step measured to `kept`."""
    take, update, tokens, seconds = steps.train_step, step.optimizer_step, [0], [0.0]

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens[0] += kwargs["input_ids"].numel() if torch.is_grad_enabled() else 0

    def timed(*args: Any, **more: Any) -> Any:
        start = time.process_time()
        try:
            return update(*args, **more)
        finally:
            seconds[0] += time.process_time() - start

    def alternating(run: Any, *args: Any) -> Any:
        policy = run.policy
        if not run.state.step:
            assert policy.shares, "this policy does not share beginnings"
            policy.model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
        kind = KINDS[run.state.step % 2]
        policy.plan = dataclasses.replace(policy.plan, shares=kind == "shared")
        tokens[0], seconds[0] = 0, 0.0
        metrics, batch = take(run, *args)
        note = {"tokens": tokens[0], "time/train": metrics["time/train"], "processor": seconds[0]}
        kept[kind].append(note)
        print(json.dumps({"kind": kind, "rows": metrics["train/rows"], **note}), flush=True)
        return metrics, batch

    steps.train_step, step.optimizer_step = alternating, timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="in total, of both kinds in turns")
    parser.add_argument("--prompts", type=int, default=16, help="tasks of a step")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a task")
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    kept: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    watch(kept)
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [
            *("lookup", "--min-hops", "2", "--max-hops", "2", "--max-steps", str(args.steps), "--temperature", "1"),
            *("--num-generations", str(args.group), "--batch-size", str(args.prompts)),
            *("--gradient-accumulation-steps", str(args.group), "--max-tokens", "256", "--max-turns", "3"),
            *("--max-context", "512", "--max-concurrent", str(args.prompts * args.group), "--eval-examples", "0"),
            *("--random-rewards", "--learning-rate", "1e-8", "--save-steps", "1000"),
            *("--output-dir", folder, *(("--peft",) if args.lora else ())),
        ]
        from plumbob.trainer.cli.train import main as train

        try:
            train()
        finally:
            medians = {
                kind: {name: statistics.median(note[name] for note in notes[1:]) for name in notes[0]}
                for kind, notes in kept.items()
                if len(notes) > 1
            }
            print(json.dumps({"medians": medians}))
            if len(medians) == 2:
                own, shared = (medians[kind] for kind in KINDS)
                print(json.dumps({"ratios": {name: round(own[name] / shared[name], 2) for name in own}}), flush=True)


if __name__ == "__main__":
    main()
