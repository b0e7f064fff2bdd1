"""Correctness and speed of `--engine paged` on a GPU.

    python tools/gpu/measure_paged.py MODEL_FOLDER GSM8K_FOLDER

Prints: the largest difference of log-probabilities from the model's own forward pass; whether completions drawn together equal
those drawn alone; seconds and tokens/s for 128 questions x 8 rollouts of at most 320 tokens; the time of one decoding step, and
of one layer's attention in Qwen2.5-0.5B's shape for 64 rollouts of up to 16,384 tokens, a third of them half as long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from plumbob.rollout import Sampling
from plumbob.trainer.inference.paged.decoding import Lanes
from plumbob.trainer.inference.paged.engine import PAGE, TOKENS_PER_RUN, PagedEngine
from plumbob.trainer.inference.paged.kernels import decode_attention
from plumbob.trainer.inference.paged.weights import Weights
from plumbob.trainer.policy.loading import cast_weights, load_model, load_tokenizer

LENGTH = 1024


def milliseconds(work: Callable[[], Any], repeats: int = 20) -> float:
    """Mean time of `work` on the GPU, after three calls to warm up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def prompts(tokenizer: Any, data: Path, count: int) -> list[list[int]]:
    lines = (data / "train.jsonl").read_text().splitlines()[:count]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["question"]}], add_generation_prompt=True, tokenize=True
        )["input_ids"]
        for line in lines
    ]


async def all_of(engine: PagedEngine, requests: list[tuple[list[int], Sampling]]) -> list[Any]:
    return await asyncio.gather(*(engine.generate(ids, sampling) for ids, sampling in requests))


def correctness(folder: str, rows: list[list[int]]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = cast_weights(load_model(folder), dtype).cuda().eval()
        engine = PagedEngine(Weights.of(model, LENGTH + 8), max_slots=64, max_length=LENGTH)
        ids = [t for row in rows[:3] for t in row][:400]
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device="cuda")).logits[0, :-1].float()
        own = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:], device="cuda")[:, None])[:, 0].cpu()
        gap = (torch.tensor(engine.score(ids)) - own).abs()
        print(f"{dtype}: engine against the model's own pass: mean {gap.mean():.2e}, largest {gap.max():.2e} nats")
        if dtype == torch.float32:
            requests = [(row, Sampling(max_tokens=40, seed=i)) for i, row in enumerate(rows[:24] * 2)]
            together = asyncio.run(all_of(engine, requests))
            same = 0
            for request, completion in zip(requests, together, strict=True):
                engine.forget()
                same += asyncio.run(all_of(engine, [request]))[0].token_ids == completion.token_ids
            print(f"{same} of {len(requests)} completions in float32 are the same alone and together")
        del model, engine
        torch.cuda.empty_cache()


def speed(folder: str, rows: list[list[int]], eos: tuple[int, ...]) -> PagedEngine:
    model = cast_weights(load_model(folder), torch.bfloat16).cuda().eval()
    engine = PagedEngine(Weights.of(model, LENGTH + 8), max_slots=1024, max_length=LENGTH)
    del model
    for repeat, stops in enumerate((eos, eos, ())):
        requests = [
            (row, Sampling(max_tokens=320, seed=8 * i + j, stop_token_ids=stops))
            for i, row in enumerate(rows)
            for j in range(8)
        ]
        engine.forget()
        before, start = engine.generated_tokens, time.perf_counter()
        asyncio.run(all_of(engine, requests))
        seconds = time.perf_counter() - start
        tokens = engine.generated_tokens - before
        what = "with stop tokens" if stops else "without stop tokens"
        print(f"128 x 8 x 320 {what}, run {repeat}: {seconds:.2f} s, {tokens} tokens, {tokens / seconds:,.0f} tokens/s")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return engine


def steps(engine: PagedEngine) -> None:
    for lanes in (64, 256, 1024):
        for context in (200, 900):
            engine.forget()
            pages = [engine.pool.take(-(-(context + 8) // PAGE)) for _ in range(lanes)]
            run = Lanes(1024, engine._decoding.pages.shape[1])
            run.ids[:], run.positions[:], run.temperatures[:], run.uniforms[:], run.used[:] = 5, context, 1.0, 0.5, 0
            for lane, own in enumerate(pages):
                run.add_pages(lane, own)

            took = milliseconds(lambda: engine._decoding.begin(run, lanes, TOKENS_PER_RUN).settle()) / TOKENS_PER_RUN  # noqa: B023
            print(f"{lanes} lanes, context {context}: {took:.2f} ms a step, {lanes / took * 1e3:,.0f} tokens/s")
            for p in pages:
                engine.pool.release(p)


def attention(device: str = "cuda", contexts: tuple[int, ...] = (1088, 4096, 16384)) -> None:
    for context in contexts:
        keys, query = (torch.randn(*s, 64, device=device).bfloat16() for s in ((64 * context, 2), (64, 14)))
        pages, last = torch.randperm(64 * context // PAGE).view(64, -1).int(), torch.full((64,), context - 1)
        last[::3] = context // 2
        args = (query, keys, keys, pages.to(device), last.to(device), PAGE, 1 / 8)
        print(f"attention over {context} tokens: {1e3 * milliseconds(lambda: decode_attention(*args)):.0f} us")  # noqa: B023


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    args = parser.parse_args()
    attention()
    tokenizer = load_tokenizer(args.model)
    rows = prompts(tokenizer, args.data, 128)
    correctness(args.model, rows)
    eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    steps(speed(args.model, rows, tuple(eos)))


if __name__ == "__main__":
    main()
