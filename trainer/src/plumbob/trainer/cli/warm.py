"""The process that `loading.compile_meanwhile` starts; what it compiles is in training/warming.py."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from plumbob.trainer.cli.loading import fast_imports, import_torch_beside, import_transformers
from plumbob.trainer.inference.vllm.vf_vllm import die_with_parent

LEAST_MEMORY, PER_PARAMETER = 40 << 30, 24
"""Bytes of a GPU's memory from which on the one to four GiB that this process takes for seconds do not matter: at least, and
for each parameter of the model. The run plans its memory meanwhile by what is free."""


def main() -> None:
    """Read settings from stdin, and write the file that is named in the arguments, before the parent's id, when all is compiled."""
    die_with_parent(int(sys.argv[2]))
    config = pickle.load(sys.stdin.buffer)
    with fast_imports("what is compiled"):
        import_transformers(import_torch_beside())
        import torch
        from plumbob.trainer.policy.loading import empty_model
        from plumbob.trainer.training.warming import warm

    needed = max(LEAST_MEMORY, PER_PARAMETER * empty_model(config.model).num_parameters())
    if torch.cuda.get_device_properties(0).total_memory >= needed:
        warm(config, torch.device("cuda", 0))
        done = Path(sys.argv[1])
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


if __name__ == "__main__":
    main()
