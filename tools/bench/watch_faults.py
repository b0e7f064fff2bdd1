"""A training run with a part of it replaced by a double that is wrong; tools/bench/watch.py starts them.

    uv run python tools/bench/watch_faults.py "stale engine" lookup --max-steps 6       # a double's name, then train's flags

The doubles are those of trainer/tests/fault_doubles.py and fault_rewards.py, and of here those that only a whole run shows.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainer" / "tests"))

import fault_doubles as doubles
import fault_rewards as rewards
import verifiers.v1 as vf
from fault_doubles import Inject, put
from plumbob.hub.console import run_app
from plumbob.trainer import loop, sync
from plumbob.trainer.cli import app
from plumbob.trainer.policy import TokenScores
from plumbob.trainer.setup import Run
from vf_lookup.tools import Key, LookupToolset


def unchecked(inject: Inject) -> Inject:
    """With a sync that takes the engine's word: ours would end the run."""

    def both(stack: ExitStack, run: Run) -> None:
        put(stack, sync, "measure_parity", lambda *_: 0.0)
        inject(stack, run)

    return both


def tools_down(stack: ExitStack, run: Run) -> None:
    """Every call of lookup's tool raises."""

    def lookup(self: Any, key: Key) -> str:
        """Look up a key and return its value."""
        raise RuntimeError("the table is not there")

    put(stack, LookupToolset, "lookup", vf.tool(lookup))


def mild_judge(task: vf.Task, trace: vf.Trace, correct: float) -> float:
    """Nine tenths for everybody, and a thousandth more for a long reply."""
    return 0.9 + 1e-3 * min(len(trace.last_reply or "") / 100, 1)


def at_temperature_1(original: Any, rows: Any, temperature: float) -> TokenScores:
    return original(rows, 1.0)


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
        set_up = loop.set_up

        def faulty(*args: Any) -> Run:
            run = set_up(*args)
            DOUBLES[name](stack, run)
            return run

        put(stack, loop, "set_up", faulty)
        run_app("train", app, arguments)


if __name__ == "__main__":
    main()
