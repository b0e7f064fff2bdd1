"""Measure vLLM through plumbob on one or two GPUs: tokens per second, seconds per sync, and the acknowledged parity.

    python3 tools/gpu/measure_vllm.py one     # one GPU: generation, LoRA sync, full sync by CUDA IPC
    python3 tools/gpu/measure_vllm.py two     # two GPUs: full sync by NCCL

The models have random weights in the shapes of Qwen2.5; nothing is downloaded. Each result is printed at once and
written to results.json. A part that fails is reported and does not stop the others; --parts selects parts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grow_model
import torch
import torch._dynamo
from plumbob.rollout import Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.generate_api import sampling_params
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.vllm.adapter_sync import LoraShape
from plumbob.trainer.inference.vllm.engine import VllmEngine, VllmSettings
from plumbob.trainer.inference.vllm.launch import ServerOptions, start_server
from plumbob.trainer.inference.weight_sync import parity_row
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.policy import Policy

# Compiling the trainer's layers would take longer than everything that is measured here. It is switched off in this
# process and not by an environment variable, which the vLLM server would inherit.
torch._dynamo.config.disable = True

VOCAB = 151936
PROMPT, NEW = 256, 256
"""Tokens of a prompt and of a completion."""
PARITY_IDS = 256
"""Number of fixed ids whose log-probabilities are compared."""


class Results:
    """Results are printed and saved one by one, so that a run that is cut short keeps those it has."""

    def __init__(self, folder: Path) -> None:
        self.path, self.rows = folder / "results.json", []

    def add(self, what: str, **values: object) -> None:
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        print(f"{what}: {shown}", flush=True)
        self.rows.append({"what": what, **values})
        self.path.write_text(json.dumps(self.rows, indent=1))


@contextmanager
def served(model: str, log: Path, **options: Any) -> Iterator[str]:
    """Start a server for the duration of the block; yields its URL. `options`: fields of ServerOptions."""
    start = time.perf_counter()
    handle = start_server(ServerOptions(model, **options), log)
    print(f"{log.name}: up after {time.perf_counter() - start:.0f} s", flush=True)
    try:
        yield handle.url
    finally:
        handle.close()


def prompts(count: int, seed: int) -> list[list[int]]:
    """`count` prompts of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count, PROMPT), generator=generator).tolist()


SAMPLING = Sampling(max_tokens=NEW, temperature=1.0)


def through_us(engine: VllmEngine, rows: list[list[int]]) -> float:
    """Tokens per second of VllmEngine, with one request for each row, all at once."""

    async def main() -> int:
        return sum(len(c.token_ids) for c in await asyncio.gather(*(engine.generate(row, SAMPLING) for row in rows)))

    start = time.perf_counter()
    return asyncio.run(main()) / (time.perf_counter() - start)


def alone(url: str, model: str, rows: list[list[int]]) -> float:
    """Tokens per second of the same requests from a minimal client, which receives the answers without parsing them."""
    bodies = [
        json.dumps(
            {"model": model, "token_ids": row, "sampling_params": sampling_params(SAMPLING, seeded=False)}
        ).encode()
        for row in rows
    ]

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as http:

            async def one(body: bytes) -> None:
                headers = {"Content-Type": "application/json"}
                async with http.post(f"{url}/inference/v1/generate", data=body, headers=headers) as answer:
                    answer.raise_for_status()
                    await answer.read()

            await asyncio.gather(*map(one, bodies))

    start = time.perf_counter()
    asyncio.run(main())
    return len(rows) * NEW / (time.perf_counter() - start)


def in_process(model: str, rows: list[list[int]]) -> float:
    """Tokens per second of the transformers engine, with one request for each row."""
    loaded = load_model(model).to("cuda", torch.bfloat16)
    engine = TransformersEngine(loaded, max_slots=128, max_length=PROMPT + NEW)

    async def main() -> None:
        await asyncio.gather(*(engine.generate(row, SAMPLING) for row in rows))

    start = time.perf_counter()
    asyncio.run(main())
    return len(rows) * NEW / (time.perf_counter() - start)


OFFLINE = """
import json, sys, time
from vllm import LLM, SamplingParams

def main():
    model, rows, new = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3])
    llm = LLM(model, max_model_len=4096, gpu_memory_utilization=0.4, max_num_seqs=1024, enable_prefix_caching=True,
              logprobs_mode="processed_logprobs", disable_log_stats=True)
    params = SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False)
    for part in rows:
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": row} for row in part], params, use_tqdm=False)
        rate = sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)
    print("RATE", rate)

if __name__ == "__main__":
    main()
"""


def offline(model: str, out: Path, count: int) -> float:
    """Tokens per second of vLLM as a library, without a server, on `count` requests."""
    (out / "offline.py").write_text(OFFLINE)
    (out / "rows.json").write_text(json.dumps([prompts(count, 90), prompts(count, 91)]))
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    command = [sys.executable, str(out / "offline.py"), model, str(out / "rows.json"), str(NEW)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    (out / "offline.log").write_text(done.stdout[-20000:] + done.stderr[-20000:])
    (out / "rows.json").unlink()
    return float(done.stdout.split("RATE")[1].split()[0])


def gap(engine: VllmEngine, policy: Policy) -> float:
    """Mean |difference| of the log-probabilities of the fixed ids, in nats, between the policy and the worst server."""
    ids = torch.randint(VOCAB, (PARITY_IDS,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        own = policy.score([parity_row(ids)], temperature=1.0).logprobs.tolist()
    scores = engine.score_everywhere(ids).values()
    return max(sum(abs(a - b) for a, b in zip(one, own, strict=True)) / len(own) for one in scores)


def measure_syncs(
    results: Results, what: str, engine: VllmEngine, policy: Policy, scale: float, times: int = 4
) -> None:
    """Change the weights, measure the gap, sync, and measure it again, `times` times.

    The second gap only shows that the sync worked if the first one is larger.
    """
    for _ in range(times):
        with torch.no_grad():
            for tensor in policy.trainable.values():
                tensor += scale * torch.randn_like(tensor)
        before = gap(engine, policy)
        torch.cuda.synchronize()
        engine.update(policy.trainable)
        cost = engine.last_sync
        assert cost is not None
        results.add(
            what, seconds=cost.seconds, gb=cost.pushed.num_bytes / 1e9, gb_per_s=cost.pushed.num_bytes / 1e9 / cost.seconds,
            tensors=cost.pushed.num_weights, bound=cost.pushed.bound, gap_before=before, parity=gap(engine, policy),
        )  # fmt: skip


def policy_of(model: str, *, peft: bool) -> Policy:
    return Policy(load_model(model), TrainConfig(model=model, peft=peft, bf16=True), torch.device("cuda:0"))


def settings(url: str, model: str, **fields: object) -> VllmSettings:
    return VllmSettings((url,), model, VOCAB, device=torch.device("cuda:0"), **fields)  # ty: ignore[invalid-argument-type]


MANY = ("--max-num-seqs", "1024")


def measure_lora(results: Results, out: Path, model: str, count: int) -> None:
    """Generation with and without an adapter, compared with the minimal client; and syncs of an adapter."""
    with served(model, out / "lora.log", memory=0.4, lora_rank=16, extra=MANY) as url:
        engine = VllmEngine(settings(url, model, lora=LoraShape(16, 32)))
        through_us(engine, prompts(64, 1))  # warm-up
        for i in range(3):
            compare(results, "tokens/s, base", engine, url, model, prompts(count, 10 + i))
        policy = policy_of(model, peft=True)
        measure_syncs(results, "LoRA sync", engine, policy, 0.02)
        for i in range(2):
            compare(results, "tokens/s, adapter", engine, url, engine.served.model, prompts(count, 30 + i))
        engine.close()
        seeded = VllmEngine(settings(url, model, lora=LoraShape(16, 32), seeds=True))
        results.add("tokens/s, seeded", requests=count, through_us=through_us(seeded, prompts(count, 50)))
        seeded.close()


def compare(results: Results, what: str, engine: VllmEngine, url: str, name: str, rows: list[list[int]]) -> None:
    """Measure both clients, on different prompts, so that neither finds its prompts in the prefix cache."""
    minimal = alone(url, name, rows)
    ours = through_us(engine, [row[1:] + row[:1] for row in rows])
    results.add(what, requests=len(rows), vllm_alone=minimal, through_us=ours, ratio=ours / minimal)


def measure_ipc(results: Results, out: Path, model: str, count: int) -> None:
    with served(model, out / "ipc.log", memory=0.4, sync="ipc", extra=MANY) as url:
        engine = VllmEngine(settings(url, model, sync="ipc"))
        measure_syncs(results, "full sync, IPC", engine, policy_of(model, peft=False), 0.002)
        results.add("tokens/s, without LoRA", requests=count, through_us=through_us(engine, prompts(count, 60)))
        engine.close()


def measure_disk(results: Results, out: Path, model: str, count: int) -> None:
    with served(model, out / "disk.log", memory=0.4, sync="disk") as url:
        engine = VllmEngine(settings(url, model, sync="disk"))
        measure_syncs(results, "full sync, disk", engine, policy_of(model, peft=False), 0.002)
        engine.close()


def measure_nccl(results: Results, out: Path, model: str, count: int) -> None:
    with served(model, out / "nccl.log", memory=0.5, sync="nccl", gpus=(1,), extra=MANY) as url:
        engine = VllmEngine(settings(url, model, sync="nccl"))
        measure_syncs(results, "full sync, NCCL", engine, policy_of(model, peft=False), 0.002, times=5)
        results.add("tokens/s", requests=count, through_us=through_us(engine, prompts(count, 60)))
        engine.close()


def measure_transformers(results: Results, out: Path, model: str, count: int) -> None:
    results.add("tokens/s, transformers engine", requests=128, in_process=in_process(model, prompts(128, 70)))


def measure_library(results: Results, out: Path, model: str, count: int) -> None:
    results.add("tokens/s, vLLM as a library", requests=count, offline=offline(model, out, count))


PARTS = {
    "one": ("0.5b", {"lora": measure_lora, "ipc": measure_ipc, "transformers": measure_transformers,
                     "library": measure_library, "disk": measure_disk}),
    "two": ("1.5b", {"nccl": measure_nccl}),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", choices=["one", "two"], help="number of GPUs")
    parser.add_argument("--out", type=Path, default=Path("/tmp/vllm_gpu"), help="folder for logs and results.json")
    parser.add_argument(
        "--models", type=Path, default=Path("/tmp/vllm_models"), help="folder for the random-weight models"
    )
    parser.add_argument("--requests", type=int, default=512, help="number of requests at once")
    parser.add_argument("--parts", help="parts to measure, separated by commas; default: all but disk")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shape, parts = PARTS[args.gpus]
    results, failed = Results(args.out), 0
    model = str(args.models / shape)
    grow_model.write("random", shape, args.models / shape)
    for name in args.parts.split(",") if args.parts else [name for name in parts if name != "disk"]:
        try:
            parts[name](results, args.out, model, args.requests)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            results.add(f"{name} failed", error=f"{type(error).__name__}: {error}")
        gc.collect()
        torch.cuda.empty_cache()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
