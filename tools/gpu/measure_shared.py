"""Rows that begin alike, with their beginnings computed once and for each row: whether both are right, and how fast they are.

    python tools/gpu/measure_shared.py [--model FOLDER] [--prompts 16] [--group 8] [--prompt-tokens 512] [--tokens 256]

Without `--model`, weights are random, in the shape of Qwen2.5-0.5B. Printed as JSON lines, on a GPU with weights in bfloat16:

- kernel: the largest difference of torch's FlashAttention over pieces from attention in float32, output and gradients. The
  mask of a piece that has other pieces above it must end at the last key (lower right);
- full, lora: tokens that are computed; the mean and largest difference of log-probabilities, and 1 - cosine of the gradient,
  of `shared` and of `apart` rows from apart rows in float32, and of both from each other; median seconds of all forward and
  backward passes, in turns; peak memory; graphs that torch.compile made, in total.

The last line says whether `shared` is as near to float32 as `apart` is, within a factor of 1.5. Exit code 1 if not. If it is not,
`SHARES_WITH_FLASH = False` in policy/packed_attention.py turns it off on GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import sys
import time
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.packed_attention import packed_attention, piece_bounds
from plumbob.trainer.policy.policy import Policy
from shapes import qwen_config
from transformers import AutoModelForCausalLM, PreTrainedModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = DEVICE.type == "cuda"
"""Without a GPU the script runs in float32, to try it out: then it measures nothing that matters."""


def make_model(folder: str | None) -> PreTrainedModel:
    if folder:
        return load_model(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(qwen_config("0.5b"), dtype=torch.float32)
    with torch.no_grad():  # doubled weights, because the attention of freshly initialised ones is nearly uniform
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.dim() == 2 else 1.0)
    return model


def make_rows(args: argparse.Namespace, num_ids: int) -> list[Sample]:
    """Groups of rows with one prompt each; all prompts begin with the same 64 ids, and completions have any length."""
    draw = random.Random(0)

    def ids(n: int) -> list[int]:
        return [draw.randrange(num_ids) for _ in range(n)]

    system, rows = ids(min(64, args.prompt_tokens // 2)), []
    for _ in range(args.prompts):
        prompt = system + ids(args.prompt_tokens - len(system))
        for _ in range(args.group):
            rest = ids(draw.randint(max(args.tokens // 4, 1), args.tokens))
            mask = [False] * len(prompt) + [True] * len(rest)
            rows.append(Sample(prompt + rest, mask, [0.0] * len(mask), 0.0, "g", "", False))
    draw.shuffle(rows)
    return rows


def check_kernel() -> dict[str, float]:
    """Three levels of pieces, 4 query heads on 2 key heads: FlashAttention in bfloat16 against attention in float32."""
    lengths = [150, 40, 33, 70, 1, 200]
    above = [(), (0,), (0, 1), (0, 1), (0,), (0,)]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, sum(lengths), 64, generator=generator).bfloat16() for h in (4, 2, 2))
    weights = torch.randn(1, sum(lengths), 4, 64, generator=generator)
    found = []
    for flash in (False, True):
        device, dtype = (DEVICE, torch.bfloat16) if flash else (torch.device("cpu"), torch.float32)
        given = [x.to(device, dtype).requires_grad_() for x in (query, key, value)]
        bounds = piece_bounds(lengths, above, device, flash)
        out, _ = packed_attention(torch.nn.Module(), *given, None, **bounds)
        (out * weights.to(device, dtype)).sum().backward()
        found.append([x.detach().float().cpu() for x in (out, *(x.grad for x in given))])
    names = ("output", "gradient of queries", "gradient of keys", "gradient of values")
    return {name: ((a - b).norm() / a.norm()).item() for name, a, b in zip(names, *found, strict=True)}


def all_passes(policy: Policy, rows: list[Sample], tokens: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Log-probabilities [N] of all rows, the gradient of a weighted sum of them, both on the CPU, and seconds."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(row.num_sampled, generator=generator).to(DEVICE) for row in rows]
    policy.model.zero_grad()
    if HALF:
        torch.cuda.synchronize()
    start, found = time.perf_counter(), {}
    for indices in policy.microbatches(rows, tokens):
        logprobs = policy.score([rows[i] for i in indices], 1.0).logprobs
        (logprobs * torch.cat([weights[i] for i in indices])).sum().backward()
        found.update(zip(indices, logprobs.detach().split([rows[i].num_sampled for i in indices]), strict=True))
    if HALF:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    gradient = torch.cat([p.grad.flatten().cpu() for p in policy.trainable.values() if p.grad is not None])
    return torch.cat([found[i] for i in range(len(rows))]).cpu(), gradient, seconds


def apart(a: tuple[torch.Tensor, torch.Tensor, float], b: tuple[torch.Tensor, torch.Tensor, float]) -> dict[str, float]:
    difference = (a[0] - b[0]).abs()
    cosine = torch.nn.functional.cosine_similarity(a[1].double(), b[1].double(), dim=0).item()
    norm = (a[1].norm() / b[1].norm()).item()
    return {"mean": difference.mean().item(), "max": difference.max().item(), "1 - cosine": 1 - cosine, "norm": norm}


def make_policy(args: argparse.Namespace, *, peft: bool, bf16: bool) -> Policy:
    policy = Policy(make_model(args.model), TrainConfig(bf16=bf16, peft=peft), DEVICE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable.items():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return policy


def compare(args: argparse.Namespace, peft: bool) -> tuple[dict[str, Any], bool]:
    policy = make_policy(args, peft=peft, bf16=False)
    rows = make_rows(args, policy.plan.num_ids)
    policy.plan = dataclasses.replace(policy.plan, shares=False)
    exact = all_passes(policy, rows, args.microbatch_tokens // 4)
    del policy
    gc.collect()
    policy = make_policy(args, peft=peft, bf16=HALF)
    assert policy.shares, "beginnings are not shared: was the plan of this model measured so, is SHARES_WITH_FLASH off?"
    counted = [0]
    policy.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: counted.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    plans = {"shared": policy.plan, "apart": dataclasses.replace(policy.plan, shares=False)}
    first: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    tokens, peak = {}, {}
    for k in range(args.repeats + 2):  # of which the first two compile
        for name, plan in plans.items():
            policy.plan, counted[:] = plan, []
            if HALF:
                torch.cuda.reset_peak_memory_stats()
            done = all_passes(policy, rows, args.microbatch_tokens)
            tokens[name] = sum(counted)
            peak[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2) if HALF else 0.0
            first.setdefault(name, done)
            if k >= 2:
                seconds[name].append(done[2])
    median = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    errors = {name: apart(first[name], exact) for name in plans}
    good = all(
        errors["shared"][what] <= 1.5 * errors["apart"][what] + floor
        for what, floor in (("mean", 1e-5), ("max", 1e-4), ("1 - cosine", 1e-5))
    )
    return {
        "case": "lora" if peft else "full",
        "tokens": tokens,
        "tokens, ratio": round(tokens["apart"] / tokens["shared"], 2),
        "from float32": errors,
        "shared from apart": apart(first["shared"], first["apart"]),
        "seconds": median,
        "seconds, ratio": round(median["apart"] / median["shared"], 2),
        "peak GiB": peak,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model, or a bundled one; by default random weights of 0.5B")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="rows of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument(
        "--tokens", type=int, default=256, help="most tokens after a prompt; the least are a quarter of it"
    )
    parser.add_argument("--microbatch-tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    good = []
    if HALF:
        kernel = check_kernel()
        good.append(max(kernel.values()) < 0.02)
        print(json.dumps({"case": "kernel", **kernel}), flush=True)
    for peft in (False, True):
        numbers, right = compare(args, peft)
        good.append(right)
        print(json.dumps(numbers), flush=True)
        gc.collect()
        if HALF:
            torch.cuda.empty_cache()
    print(json.dumps({"shared is as near to float32 as apart": all(good), "each": good}), flush=True)
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
