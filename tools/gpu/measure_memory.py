"""A 7B with LoRA in the memory of a small card: peak and time of a step with and without --gpu-memory, and a gradient's cosine.

    python tools/gpu/measure_memory.py TOKENIZER_FOLDER GSM8K_FOLDER [--pretrained MODEL_FOLDER] [--steps 4] [--limit 200]

Steps are those of `tools/bench/grpo_step.py --shape 7b --lora` with 64 x 8 completions of up to 512 tokens: as they are, with
`--gpu-memory 24GB`, and with the base in 8 bits besides. Then, with `--pretrained`, the cosine of LoRA's gradient with the base
in 8 bits to that with 16, on rows that the model samples. A run whose memory was not enough ends without its steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

GRPO = Path(__file__).resolve().parents[1] / "bench" / "grpo_step.py"
ARMS = ("", "--gpu-memory 24GB", "--gpu-memory 24GB --base-bits 8")


def cosine(folder: str) -> float:
    import torch
    from plumbob.trainer.config.train import TrainConfig
    from plumbob.trainer.inference.weight_sync import parity_row
    from plumbob.trainer.policy.loading import load_model
    from plumbob.trainer.policy.policy import Policy
    from transformers import AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, found = [], []
    for bits in (16, 8):
        model = load_model(folder)
        if not rows:
            torch.manual_seed(0)
            start = AutoTokenizer.from_pretrained(folder)(
                "Question: Natalia sold 48 clips in April,", return_tensors="pt"
            )
            ids = start.input_ids.repeat(8, 1).to(device)
            model.to(device)
            rows = [parity_row(r) for r in model.generate(ids, do_sample=True, max_new_tokens=128, top_k=0).tolist()]
        policy = Policy(model, TrainConfig(env="lookup", peft=True, bf16=True, base_bits=bits), device)
        with torch.no_grad():  # B away from 0, so that A has a gradient too
            for i, p in enumerate(policy.trainable.values()):
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(device) * 0.01)
        scores = policy.score(rows, 1.0).logprobs
        (scores * torch.linspace(-1, 1, len(scores), device=device)).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in policy.trainable.values()]).double().cpu())
        del policy, model
    return torch.nn.functional.cosine_similarity(*found, dim=0).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("data")
    parser.add_argument("--pretrained", help="folder of a pretrained model, such as one of 1.5B")
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--steps", default="4")
    parser.add_argument("--limit", default="200", help="seconds of each run")
    args, rest = parser.parse_known_args()  # further options are grpo_step.py's, and come last there
    shape = ["--shape", args.shape, "--lora", "--engine", "paged", "--prompts", "64", "--group", "8", "--tokens", "512"]
    for options in ARMS:
        print(json.dumps({"options": options}), flush=True)
        command = [
            sys.executable,
            str(GRPO),
            args.tokenizer,
            args.data,
            *shape,
            "--arms",
            "plumbob",
            "--steps",
            args.steps,
        ]
        subprocess.run([*command, "--limit", args.limit, f"--plumbob-options= {options}", *rest], check=False)
    if args.pretrained:
        print(json.dumps({"model": args.pretrained, "cosine of 8 to 16 bits": cosine(args.pretrained)}))


if __name__ == "__main__":
    main()
