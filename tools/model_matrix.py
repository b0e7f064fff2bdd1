"""Print which models train packed or padded, which engine decodes them, and how far log-probabilities are apart.

    uv run python tools/model_matrix.py                     # small random models of many architectures
    uv run python tools/model_matrix.py FOLDER [FOLDER ...] # real models too
    python tools/model_matrix.py --vllm --only llama        # on a GPU: one model, also through a server

Every number is the largest difference over all tokens, in nats, in float32 on this machine. Trainer: scores of four rows
in one microbatch, as training computes them, against `model(row).logits` of each row. Engine: sampled log-probabilities
of four conversations of two turns against the trainer's scores of the same rows. Rows exceed the sliding windows of the
small models. With `--vllm` each model is also served by vLLM in float32, and its heads are 64 wide, because vLLM has no
kernels for smaller ones; vLLM's column is then the same comparison with its log-probabilities, or why it failed.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from plumbob.rollout import Sample, Sampling
from plumbob.testing.small_models import ARCHITECTURES, WIDE, small_model
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.transformers import make_engine, measure
from plumbob.trainer.inference.vllm.engine import VllmEngine, VllmSettings
from plumbob.trainer.inference.vllm.launch import ServerOptions, start_server
from plumbob.trainer.policy.forward_plan import measured_rows, own_logprobs, plan_forward
from plumbob.trainer.policy.loading import load_model, load_tokenizer
from plumbob.trainer.policy.policy import Policy
from transformers import PreTrainedModel

COLUMNS = ("model", "class", "rows", "packed differs by", "trainer", "engine in this process", "engine")
SERVER = ("--enforce-eager", "--kv-cache-memory-bytes", "200000000")
"""A fixed cache: several servers on a GPU would otherwise measure each other's memory."""
TURN = 12
"""Sampled ids of a turn; the first prompt's length, and the length of the tool result between the turns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of real models")
    parser.add_argument("--only", action="append", choices=ARCHITECTURES, help="this small model; can be given again")
    parser.add_argument("--vllm", action="store_true", help="serve each model by vLLM too; needs a GPU")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, cpu, float32\n")
    columns = (*COLUMNS, "vLLM") if arguments.vllm else COLUMNS
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name in arguments.only or ([] if arguments.folders and arguments.vllm else ARCHITECTURES):
        model = small_model(name, sizes=WIDE if arguments.vllm else {})
        print(row_of(name, model, "tiny", arguments.vllm), flush=True)
    for folder in arguments.folders:
        print(row_of(folder.name, load_model(str(folder)), str(folder), arguments.vllm), flush=True)


def row_of(name: str, model: PreTrainedModel, tokenizer: str, vllm: bool, max_context: int = 4096) -> str:
    """One row of the table."""
    plan = plan_forward(model, max_context)
    decoding = measure(model, plan, max_context)
    model.set_attn_implementation(plan.own_attention)
    rows = measured_rows(plan.num_ids, (40, 9, 64, 23))
    own = torch.cat([own_logprobs(model, row.token_ids) for row in rows])
    policy = Policy(model, TrainConfig(max_context=max_context), torch.device("cpu"), plan=plan)
    engine = make_engine(policy.engine_model(), decoding, max_slots=4, max_length=max_context)
    prompts = [row.token_ids[:TURN] for row in rows]
    with torch.no_grad():
        trainer = (policy.score(rows, 1.0).logprobs - own).abs().max().item()
    way = "cached" if decoding.cached else "whole rows"
    packed = number(plan.differences["packed"])
    cells = [name, type(model).__name__, plan.layout, packed, f"{trainer:.1e}", way, parity(policy, engine, prompts)]
    if vllm:
        try:
            cells.append(served_parity(policy, model, tokenizer, prompts))
        except Exception as error:  # what vLLM cannot serve is a result too
            cells.append(str(error).strip().splitlines()[-1][:100].replace("|", " "))
    return f"| {' | '.join(cells)} |"


def parity(policy: Policy, engine: Any, prompts: Sequence[list[int]]) -> str:
    """The largest difference between the engine's sampled log-probabilities and the trainer's of the same ids, in nats."""
    samples = asyncio.run(conversations(engine, prompts))
    sampled = torch.tensor([lp for sample in samples for lp in sample.sampled_logprobs])
    with torch.no_grad():
        return f"{(policy.score(samples, 1.0).logprobs - sampled).abs().max().item():.1e}"


def served_parity(policy: Policy, model: PreTrainedModel, tokenizer: str, prompts: Sequence[list[int]]) -> str:
    """`parity` of the model in a vLLM server that starts and ends here."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        load_tokenizer(tokenizer).save_pretrained(folder)
        options = ServerOptions(folder, sync="disk", memory=0.05, max_length=512, bf16=False, extra=SERVER)
        server = start_server(options, Path(folder) / "server.log")
        vocabulary = model.config.get_text_config().vocab_size
        settings = VllmSettings((server.url,), folder, vocabulary, sync="disk", dtype=torch.float32)
        try:
            engine = VllmEngine(settings)
            try:
                return parity(policy, engine, prompts)
            finally:
                engine.close()
        finally:
            server.close()


def number(difference: float | str) -> str:
    return difference if isinstance(difference, str) else f"{difference:.1e}"


async def conversations(engine, prompts: Sequence[list[int]]) -> list[Sample]:
    """Two sampled turns after each prompt, all at once."""

    async def play(seed: int, ids: list[int]) -> Sample:
        tool_result = ids[::-1]
        mask, logprobs = [False] * len(ids), [0.0] * len(ids)
        for turn in range(2):
            completion = await engine.generate(ids, Sampling(max_tokens=TURN, seed=2 * seed + turn))
            ids = [*ids, *completion.token_ids, *tool_result]
            mask += [True] * TURN + [False] * len(tool_result)
            logprobs += [*completion.logprobs, *[0.0] * len(tool_result)]
        return Sample(ids, mask, logprobs, 0.0, "", "", False)

    return await asyncio.gather(*(play(seed, list(ids)) for seed, ids in enumerate(prompts)))


if __name__ == "__main__":
    main()
