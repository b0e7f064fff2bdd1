"""How the paged engine's cost grows with concurrency, context and group size, and what bounds it. One GPU, about 90 s.

    python tools/gpu/growth.py [--shape 0.5b] [--out /tmp/growth.jsonl] [--limit 150]
    python tools/gpu/growth.py --plot /tmp/growth.jsonl growth.svg          # no GPU; needs matplotlib

The model has random weights of a shape of Qwen2.5, in bfloat16, made on the spot. Three tables, one JSON line a point:

- `concurrency`: 1 to 1,024 rollouts at once with 1,024 tokens of context. The GPU's milliseconds of a decoding step (replays of
  the recorded step), and the same with the engine's scheduler: 128 tokens of each rollout, whose prompts are in the cache.
- `context`: 64 rollouts with 1k to 16k tokens of context: milliseconds of a decoding step, and tokens/s of reading one prompt.
- `group`: 512 rollouts of 128 tokens whose prompts of 1,024 tokens are shared by 4 to 64 of them, prompts included.

What bounds a step is named by time: bytes of weights, of keys and values and of logits that a step moves at least, divided by
the memory's bandwidth (`--bandwidth`, by default 4.3 TB/s as seen on an H200; a copy is measured at the start); FLOPs of the
matrix products divided by `--flops`; the rest of the GPU's time (launches, small kernels, padding to a power of two); and what
the scheduler, which is Python, adds to the GPU's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TOKENS = 128
"""Tokens that a rollout samples where the scheduler is measured."""
SIZES = {
    "gpu": {"lanes": (1, 4, 16, 64, 256, 1024), "context": (1024, 2048, 4096, 8192, 16384), "at": 64, "rollouts": 512,
            "groups": (4, 8, 16, 32, 64), "prompt": 1024},
    "cpu": {"lanes": (1, 4), "context": (64, 128), "at": 2, "rollouts": 8, "groups": (2, 4), "prompt": 64},
}  # fmt: skip


class Growth:
    """The measurements on one model. Each method yields the points of a table."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from plumbob.trainer.inference.paged.weights import Weights
        from shapes import qwen_config
        from transformers import Qwen2ForCausalLM

        self.args, self.torch = args, torch
        self.cuda = torch.cuda.is_available()
        self.sizes: dict[str, Any] = SIZES["gpu" if self.cuda else "cpu"]
        torch.manual_seed(0)
        config = qwen_config(args.shape, max_position_embeddings=32768)
        with torch.device("cuda" if self.cuda else "cpu"):
            model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
        self.weights = Weights.of(model.eval(), max(self.sizes["context"]) + 64)
        self.vocab = config.vocab_size

    def engine(self, slots: int, length: int, tokens: int) -> Any:
        """An engine with room for `tokens` tokens in all rollouts together."""
        from plumbob.trainer.inference.paged.engine import PAGE, PagedEngine

        return PagedEngine(self.weights, max_slots=slots, max_length=length, num_pages=-(-tokens // PAGE) + slots)

    def synchronise(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def step_ms(self, engine: Any, lanes: int, context: int) -> float:
        """The GPU's milliseconds of one decoding step, without the scheduler. All rollouts have pages of their own."""
        from plumbob.trainer.inference.paged.decoding import Lanes
        from plumbob.trainer.inference.paged.engine import PAGE, TOKENS_PER_RUN

        engine.forget()
        run = Lanes(engine._max_slots, engine._decoding.pages.shape[1])
        run.ids[:], run.positions[:], run.temperatures[:], run.uniforms[:], run.used[:] = 5, context, 1.0, 0.5, 0
        held = [engine.pool.take(-(-(context + TOKENS_PER_RUN) // PAGE)) for _ in range(lanes)]
        for lane, pages in enumerate(held):
            run.add_pages(lane, pages)
        took = self.milliseconds(lambda: engine._decoding.begin(run, lanes, TOKENS_PER_RUN)) / TOKENS_PER_RUN
        for pages in held:
            engine.pool.release(pages)
        engine.forget()
        return took

    def milliseconds(self, work: Callable[[], Any]) -> float:
        repeats = 10 if self.cuda else 1
        for _ in range(3 if self.cuda else 1):
            work()
        self.synchronise()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        self.synchronise()
        return (time.perf_counter() - start) / repeats * 1e3

    def prompts(self, count: int, length: int) -> list[list[int]]:
        generator = self.torch.Generator().manual_seed(length)
        return self.torch.randint(3, self.vocab, (count, length), generator=generator).tolist()

    def seconds(self, engine: Any, prompts: Iterable[list[int]], tokens: int) -> float:
        """Wall time of sampling `tokens` tokens for each prompt at the same time."""
        from plumbob.rollout import Sampling

        async def all_of() -> None:
            requests = (engine.generate(ids, Sampling(max_tokens=tokens, seed=i)) for i, ids in enumerate(prompts))
            await asyncio.gather(*requests)

        self.synchronise()
        start = time.perf_counter()
        asyncio.run(all_of())
        return time.perf_counter() - start

    def concurrency(self) -> Iterable[dict[str, Any]]:
        most, prompt = max(self.sizes["lanes"]), self.sizes["prompt"]
        engine = self.engine(most, prompt + TOKENS + 64, most * (prompt + TOKENS + 256))
        for lanes in self.sizes["lanes"]:
            middle = prompt + TOKENS // 2
            gpu = self.step_ms(engine, lanes, middle)
            prompts = self.prompts(lanes, prompt)
            read = self.seconds(engine, prompts, 1)
            wall = self.seconds(engine, prompts, TOKENS) / TOKENS * 1e3
            own = {"lanes": lanes, "context": middle, "with the scheduler, ms a step": round(wall, 3)}
            own |= {"tokens/s": round(lanes / wall * 1e3), "prompts, tokens/s": round(lanes * prompt / read)}
            yield {**own, **self.bounds(lanes, middle, gpu, wall)}

    def context(self) -> Iterable[dict[str, Any]]:
        lanes, longest = self.sizes["at"], max(self.sizes["context"])
        engine = self.engine(lanes, longest + 64, lanes * (longest + 64))
        for context in self.sizes["context"]:
            gpu = self.step_ms(engine, lanes, context - 16)
            self.seconds(engine, self.prompts(1, context - 16), 1)  # libraries choose their kernels by length
            engine.forget()
            read = self.seconds(engine, self.prompts(1, context - 16), 1)
            own = {"lanes": lanes, "context": context, "tokens/s": round(lanes / gpu * 1e3)}
            own |= {"prompt ms": round(read * 1e3, 1), "prompt, tokens/s": round(context / read)}
            yield {**own, **self.bounds(lanes, context, gpu, None)}

    def group(self) -> Iterable[dict[str, Any]]:
        rollouts, prompt = self.sizes["rollouts"], self.sizes["prompt"]
        engine = self.engine(rollouts, prompt + TOKENS + 64, rollouts * (prompt + TOKENS + 64))
        for size in (self.sizes["groups"][0], *self.sizes["groups"]):  # the first one twice: graphs are recorded
            engine.forget()
            prompts = [ids for ids in self.prompts(rollouts // size, prompt) for _ in range(size)]
            before = engine.prefilled_tokens
            took = self.seconds(engine, prompts, TOKENS)
            yield {
                "group": size, "rollouts": rollouts, "prompt": prompt, "seconds": round(took, 3),
                "tokens/s": round(rollouts * TOKENS / took), "prompt tokens read": engine.prefilled_tokens - before,
            }  # fmt: skip

    def bounds(self, lanes: int, context: int, gpu: float, wall: float | None) -> dict[str, Any]:
        """Least milliseconds of a step by part, and the largest part."""
        from plumbob.trainer.inference.paged.forward import bytes_of_page
        from plumbob.trainer.inference.paged.sampling import ROWS

        w, speed = self.weights, self.args.bandwidth * 1e9  # bytes in a millisecond
        size = w.embed.element_size()
        layers = sum(x.weight.numel() for layer in w.layers for x in (layer.qkv, layer.out, layer.gate_up, layer.down))
        read = (layers + w.head.numel() * -(-lanes // ROWS)) * size
        cache = bytes_of_page(w, 1) * lanes * context
        logits = lanes * len(w.head) * 8  # float32, written once and read once at least
        products = 2 * lanes * (layers + w.head.numel()) / self.args.flops * 1e3
        parts = {
            "weights read": read / speed, "cache read": cache / speed, "logits": logits / speed,
            "matrix products": max(products - read / speed, 0.0),
        }  # fmt: skip
        parts["rest of the GPU's time"] = max(gpu - sum(parts.values()), 0.0)
        if wall is not None:
            parts["Python"] = max(wall - gpu, 0.0)
        return {
            "GPU ms a step": round(gpu, 3),
            "GB a step": round((read + cache + logits) / 1e9, 3),
            "TB/s": round((read + cache + logits) / gpu / 1e9, 2),
            "ms by part": {name: round(value, 3) for name, value in parts.items()},
            "bound by": max(parts, key=lambda name: parts[name]),
        }

    def copy_rate(self) -> float:
        """TB/s, read and written, of copying 2 GB on the device."""
        source = self.torch.zeros(
            1 << (30 if self.cuda else 20), dtype=self.torch.int16, device=self.weights.embed.device
        )
        target = self.torch.empty_like(source)
        return 4 * len(source) / self.milliseconds(lambda: target.copy_(source)) / 1e9


def measure(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    growth = Growth(args)
    device = growth.torch.cuda.get_device_name() if growth.cuda else "cpu"

    def say(line: dict[str, Any]) -> None:
        text = json.dumps({**line, "after s": round(time.perf_counter() - start, 1)})
        print(text, flush=True)
        file.write(text + "\n")
        file.flush()

    with open(args.out, "w") as file:
        say({"table": "machine", "device": device, "shape": args.shape, "copy TB/s": round(growth.copy_rate(), 2),
             "bandwidth": args.bandwidth, "flops": args.flops})  # fmt: skip
        for name in args.tables.split(","):
            if time.perf_counter() - start > args.limit:
                say({"table": name, "skipped": "the time limit was reached"})
                continue
            try:
                for point in getattr(growth, name)():
                    say({"table": name, **point})
                    if time.perf_counter() - start > args.limit:
                        break
            except Exception as error:  # the other tables go on
                say({"table": name, "failed": f"{type(error).__name__}: {error}"})
            if growth.cuda:
                growth.torch.cuda.empty_cache()


def plot(source: Path, target: Path) -> None:
    """Draw the three tables. `target`: an .svg or .png file."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    points = [json.loads(line) for line in source.read_text().splitlines()]
    machine = next(p for p in points if p["table"] == "machine")
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    tables = (
        ("concurrency", "lanes", "rollouts at once"),
        ("context", "context", "tokens of context"),
        ("group", "group", "rollouts that share a prompt"),
    )
    for axis, (table, x, label) in zip(axes, tables, strict=True):
        own = {p[x]: p for p in points if p["table"] == table and x in p}  # of points measured twice, the later one
        places = [str(value) for value in own]
        axis.set(title=table, xlabel=label)
        speed = axis.twinx()
        speed.plot(places, [p["tokens/s"] for p in own.values()], "ko-", label="tokens/s")
        speed.set(ylabel="tokens/s", ylim=(0, None))
        if table == "group":
            axis.bar(places, [p["seconds"] for p in own.values()], color="tab:blue", label="seconds", alpha=0.6)
            axis.set(ylabel="seconds")
        else:
            bottom = [0.0] * len(places)
            for part in {name: None for p in own.values() for name in p["ms by part"]}:
                heights = [p["ms by part"].get(part, 0.0) for p in own.values()]
                axis.bar(places, heights, bottom=bottom, label=part, alpha=0.6)
                bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
            axis.set(ylabel="ms a step")
            axis.legend(loc="upper left", fontsize="small")
    figure.suptitle(
        f"Paged engine, {machine['shape']} on {machine['device']}: least time by part (bars), tokens/s (line)"
    )
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b", help="a shape in tools/gpu/shapes.py")
    parser.add_argument("--tables", default="concurrency,context,group", help="separated by commas")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the GPU's memory")
    parser.add_argument("--flops", type=float, default=750e12, help="FLOP/s of large matrix products in bfloat16")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no further point is measured")
    parser.add_argument("--out", type=Path, default=Path("/tmp/growth.jsonl"))
    parser.add_argument(
        "--plot", nargs=2, type=Path, metavar=("JSONL", "PICTURE"), help="draw a file of an earlier run"
    )
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    measure(args)


if __name__ == "__main__":
    sys.exit(main())
