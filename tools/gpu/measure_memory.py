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
from typing import Any

GRPO = Path(__file__).resolve().parents[1] / "bench" / "grpo_step.py"
ARMS = ("", "--gpu-memory 24GB", "--gpu-memory 24GB --base-bits 8")


def cosines(folder: str) -> dict[str, float]:
    """Of the gradient in bfloat16 to that in float32, which is rounding alone, and of the one with 8 bits to that with 16."""
    import torch
    from plumbob.rollout import Sample
    from plumbob.trainer.config.train import TrainConfig
    from plumbob.trainer.policy.loading import load_model
    from plumbob.trainer.policy.policy import Policy
    from transformers import AutoTokenizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Sample] = []
    found = {}
    for bits, bf16 in ((16, False), (16, True), (8, True)):
        model = load_model(folder)
        if not rows:
            torch.manual_seed(0)
            tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            ids = tokenizer("Question: Natalia sold 48 clips.", return_tensors="pt").input_ids
            ids, length = ids.repeat(8, 1).to(device), ids.shape[1]
            sampled = model.to(device).generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=128, top_k=0
            )
            for row in sampled.tolist():
                mask = [i >= length for i in range(len(row))]
                rows.append(Sample(row, mask, [0.0] * len(row), 0.0, "measured", "", False))
        policy = Policy(model, TrainConfig(env="lookup", peft=True, bf16=bf16, base_bits=bits), device)
        with torch.no_grad():  # B away from 0, so that A has a gradient too
            for i, (name, p) in enumerate(policy.trainable.items()):
                if "lora_B" in name:
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(device) * 0.01)
        scores = policy.score(rows, 1.0).logprobs.view(len(rows), -1).mean(dim=1)
        (scores * torch.tensor([1.0, -1, 0.5, -0.5, 1, -1, 0.5, -0.5], device=device)).sum().backward()
        found[bits, bf16] = (
            torch.cat([p.grad.flatten() for p in policy.trainable.values() if p.grad is not None]).double().cpu()
        )
        del policy, model

    def cosine(a: tuple[int, bool], b: tuple[int, bool]) -> float:
        return torch.nn.functional.cosine_similarity(found[a], found[b], dim=0).item()

    return {
        "cosine of bfloat16 to float32": cosine((16, True), (16, False)),
        "cosine of 8 to 16 bits": cosine((8, True), (16, True)),
    }


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
        print(json.dumps({"model": args.pretrained, **cosines(args.pretrained)}))


if __name__ == "__main__":
    main()
