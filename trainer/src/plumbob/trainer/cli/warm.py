"""The processes that `loading.compile_meanwhile` starts; what they compile is in training/warming.py."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from plumbob.trainer.cli.loading import READY, fast_imports, import_torch_beside, import_transformers
from plumbob.trainer.inference.vllm.vf_vllm import die_with_parent

LEAST_MEMORY, PER_PARAMETER = 40 << 30, 24
"""Bytes of a GPU's memory from which on the one to four GiB that such a process takes for seconds do not matter: at least, and
for each parameter of the model. The run plans its memory meanwhile by what is free."""


def main() -> None:
    """Read settings from stdin, and write a file when all is compiled. Arguments: what to compile, the file, the parent's id."""
    part, done, parent = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    config = pickle.load(sys.stdin.buffer)
    with fast_imports("what is compiled"):
        import_transformers(import_torch_beside())
        import torch
        from plumbob.trainer.policy.loading import empty_model
        from plumbob.trainer.training.warming import warm

    needed = max(LEAST_MEMORY, PER_PARAMETER * empty_model(config.model).num_parameters())
    done.parent.mkdir(parents=True, exist_ok=True)
    if torch.cuda.get_device_properties(0).total_memory >= needed:
        warm(config, torch.device("cuda", 0), part, done.with_suffix(READY).touch)
    done.touch()


if __name__ == "__main__":
    main()
