"""Run `train` with one of its parts replaced by a faulty double. tools/bench/watch.py starts this program.

    # Arguments: the name of a double, then options of train.
    uv run python tools/bench/watch_faults.py "stale engine" lookup --max-steps 6

The doubles come from plumbob.testing.faults; this file adds the faults that only show in a whole run.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from plumbob.console.app import run_app
from plumbob.testing.faults import doubles, rewards
from plumbob.testing.faults.doubles import Inject, after_set_up, put
from plumbob.trainer.cli.train import app
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.training import train as loop
from plumbob.trainer.training.run import Run
from vf_lookup.tools import Key, LookupToolset


def unchecked(inject: Inject) -> Inject:
    """The fault, without the parity check of a weight sync, which would end the run."""

    def both(stack: ExitStack, run: Run) -> None:
        doubles.syncs_unjudged(stack, run)
        inject(stack, run)

    return both


def tools_down(stack: ExitStack, run: Run) -> None:
    """Every call of lookup's tool raises an error."""

    def lookup(self: Any, key: Key) -> str:
        """Look up a key and return its value."""
        raise RuntimeError("the table is not there")

    put(stack, LookupToolset, "lookup", vf.tool(lookup))


def mild_judge(task: vf.Task, trace: vf.Trace, correct: float) -> float:
    """A reward of 0.9 for every reply, and up to 0.001 more for a long one."""
    return 0.9 + 1e-3 * min(len(trace.last_reply or "") / 100, 1)


def at_temperature_1(original: Any, rows: Any, temperature: float) -> TokenScores:
    """Score at temperature 1, whatever the sampling temperature was."""
    return original(rows, 1.0)


# Name on the command line -> how the fault is injected.
DOUBLES: dict[str, Inject] = {
    "stale engine": unchecked(doubles.stale_engine),
    "adapter bound to nothing": unchecked(doubles.adapter_unbound),
    "loss mask as attention mask": unchecked(doubles.scored(doubles.blind)),
    "assistant header missing": doubles.rewritten(doubles.without_headers),
    "tools not in the trained prompt": doubles.rewritten(doubles.without_tools),
    "temperature not applied": doubles.scored(at_temperature_1),
    "loss detached": doubles.scored(doubles.detached),
    "bf16 masters": doubles.bf16_masters,
    "optimizer of copies": doubles.optimizer_of_copies,
    "reward NaN": rewards.rewarded(correct=rewards.not_a_number),
    "reward raises": rewards.rewarded(correct=rewards.raises),
    "reward constant": rewards.rewarded(correct=lambda task, trace, correct: 0.3),
    "reward drawn by lot": rewards.rewarded(correct=rewards.lottery),
    "rewards nearly equal": rewards.rewarded(correct=mild_judge),
    "reward for style": rewards.rewarded(0.05, correct=lambda task, trace, correct: correct, style=rewards.style),
    "held-out tasks parsed differently": rewards.held_out_differs,
    "tools down": tools_down,
}


def main() -> None:
    name, arguments = sys.argv[1], sys.argv[2:]
    with ExitStack() as stack:
        after_set_up(stack, loop, DOUBLES[name])
        run_app("train", app, arguments)


if __name__ == "__main__":
    main()
