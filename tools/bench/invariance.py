"""Measure how much a step's gradient depends on how it is computed: relative differences |a - b| / |b|, by loss type.

    uv run python tools/bench/invariance.py

The differences are those that trainer/tests/training/test_exactness.py asserts to be below 1e-4, measured with the
bundled policy in float32 on the CPU.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from plumbob.testing import step_gradients
from plumbob.testing.step_gradients import LOSS_TYPES, gradient, make_run, relative_difference, samples
from plumbob.trainer.distributed.world import World

SPLITS = [1, 60, 200, 333]
"""Values of `microbatch_tokens`; with 1, every row is a microbatch of its own."""


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), World(0, 1, torch.device("cpu")))
        file = Path(folder) / "gradients.pt"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run(
            [*launcher, "-m", step_gradients.__name__, str(Path(folder) / "two"), str(file)],
            check=True,
            capture_output=True,
        )
        two = torch.load(file, weights_only=True)
        shuffled = samples()
        random.Random(3).shuffle(shuffled)
        print(
            "| loss type | microbatches (largest of 4 splits) | one row each against packed | order of rows | 2 processes |"
        )
        print("|---|---|---|---|---|")
        for loss_type in LOSS_TYPES:
            whole = gradient(run, samples(), loss_type, microbatch_tokens=100_000)

            def differs(other: dict[str, torch.Tensor], whole: dict[str, torch.Tensor] = whole) -> float:
                return relative_difference(other, whole)

            cut = [differs(gradient(run, samples(), loss_type, microbatch_tokens=tokens)) for tokens in SPLITS]
            order = differs(gradient(run, shuffled, loss_type, microbatch_tokens=500))
            values = (max(cut), cut[0], order, differs(two[loss_type]))
            print(f"| {loss_type} | " + " | ".join(f"{v:.1e}" for v in values) + " |")


if __name__ == "__main__":
    main()
