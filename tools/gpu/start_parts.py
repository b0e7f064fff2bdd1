"""`train` with all its options, which also prints how long each part of its start and of each weight sync takes.

    python tools/gpu/start_parts.py gsm8k --datasets GSM8K --model MODEL --bf16 --eval-examples 0 --max-steps 4 ...

Each line has the seconds since the command began. A part's time ends when the GPU has done what it queued, so the parts
take a little longer than without this. In a second run on the same machine torch finds the kernels of the first one in its
cache. `TORCH_LOGS=recompiles` says why layers are compiled again.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:7.2f}] {text}", file=sys.stderr, flush=True)


def timed(owner: Any, name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Say how long each call of a function takes. `counts`: whether a call with these arguments is told."""
    import torch

    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        if not counts(*args, **more):
            return function(*args, **more)
        start = time.perf_counter()
        try:
            return function(*args, **more)
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            say(f"{getattr(owner, '__name__', owner)}.{name}: {time.perf_counter() - start:.3f} s")

    setattr(owner, name, call)


def of_parity_row(policy: Any, rows: Sequence[Any], *_: Any, **__: Any) -> bool:
    """Whether `Policy.score` scores the fixed ids of a sync's acknowledgement."""
    return len(rows) == 1 and rows[0].group == "parity"


def main() -> None:
    import torch  # noqa: F401 - to see how long it takes

    say("torch is imported")
    from plumbob.rollout.verifiers_import import import_verifiers

    import_verifiers()
    say("verifiers is imported")
    from plumbob.trainer.inference.paged import opening
    from plumbob.trainer.inference.paged.engine import PagedEngine
    from plumbob.trainer.policy.policy import Policy
    from plumbob.trainer.training import setup, step

    say("the trainer is imported")
    for name in ("load_tokenizer", "load_environments", "load_model", "plan_forward", "Policy", "sync_weights"):
        timed(setup, name)
    timed(step, "sync_weights")
    timed(opening, "check_exact")
    timed(opening, "open_paged")
    timed(PagedEngine, "update")
    timed(PagedEngine, "score")
    timed(Policy, "score", of_parity_row)
    from plumbob.trainer.cli.train import main as train

    train()


if __name__ == "__main__":
    main()
