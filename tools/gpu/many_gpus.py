"""One run of `train` on random weights, with what many GPUs are judged by: seconds by phase, memory by rank, sync, parity.

    python3 tools/gpu/many_gpus.py model 7b /tmp/qwen7b           # random weights in a shape of Qwen2.5, bfloat16 on disk
    accelerate launch --num-processes 2 --config-file configs/zero3.yaml tools/gpu/many_gpus.py train \
        musique --datasets synthetic --model /tmp/qwen7b --peft --bf16 ...

`train` is the product's own command, but for two things. Random weights solve no task, and groups without signal are not
trained on: so rewards are drawn at random. And with SAVE=0 in the environment nothing is written at the end, where a
model's size on disk, not the GPUs, would be measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 640,
    },
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


def make_model(shape: str, folder: str) -> None:
    from plumbob.trainer.models import model_path
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    common = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
    config = Qwen2Config(
        **{**common, **SHAPES[shape]}, max_position_embeddings=32768, eos_token_id=2, bos_token_id=None
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_path("tiny")).save_pretrained(folder)


def train(arguments: list[str]) -> int:
    from plumbob.trainer import loop, rollouts
    from plumbob.trainer.cli import main

    original = rollouts.to_sample

    def to_sample(trace: Any, group: str) -> Any:
        sample = original(trace, group)
        seeded = random.Random(repr((group, sample.token_ids[-8:])))
        return dataclasses.replace(sample, reward=float(seeded.random() < 0.5))

    rollouts.to_sample = to_sample
    if os.environ.get("SAVE", "1") == "0":
        loop._save = lambda *_: None
        loop._finish = lambda *_: 0
    seen: list[Any] = []
    set_up = loop.set_up

    def timed_set_up(*args: Any) -> Any:
        start = time.perf_counter()
        run = set_up(*args)
        seen.append((run, time.perf_counter() - start))
        return run

    loop.set_up = timed_set_up
    sys.argv = ["train", *arguments]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    if seen:
        report(*seen[0])
    return code


def report(run: Any, set_up_seconds: float) -> None:
    """Memory of this rank; from rank 0 also the steps' seconds."""
    rank, device = run.ranks.rank, run.ranks.device
    held = {p.data_ptr(): run.policy.sharding.local(p) for p in run.policy.sharding.parameters.values()}
    own = sum(t.numel() * t.element_size() for t in held.values()) / 2**30
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    print(
        f"[rank {rank}] set-up {set_up_seconds:.1f} s, weights held {own:.2f} GiB, peak memory {peak:.2f} GiB",
        flush=True,
    )
    if rank:
        return
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    print(
        f"{run.policy.sharding.kind}: {run.ranks.size} ranks, {run.policy.num_trained:,} of {run.policy.num_parameters:,} trained"
    )
    names = ("time/rollout", "time/train", "time/sync", "train/passes", "train/tokens", "loss", "optimizer/grad_norm")
    names += ("sync/parity", "sync/sampling_gap", "time/train_tokens_per_second", "time/rollout_tokens_per_second")
    print("step  " + "  ".join(name.split("/")[-1].replace("_tokens_per_second", "_tok/s") for name in names))
    for row in rows:
        print(f"{row['step']:>4}  " + "  ".join(f"{row[name]:.4g}" for name in names), flush=True)
    Path(run.directory, "many_gpus.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    if sys.argv[1] == "model":
        make_model(*sys.argv[2:4])
    else:
        sys.exit(train(sys.argv[2:]))
