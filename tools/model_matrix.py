"""Print which models train packed or padded, which engine decodes them, and how far log-probabilities are apart.

    uv run python tools/model_matrix.py                     # small random models of many architectures
    uv run python tools/model_matrix.py FOLDER [FOLDER ...] # real models too

Every number is the largest difference over all tokens, in nats, in float32 on this machine. Trainer: scores of four rows
in one microbatch, as training computes them, against `model(row).logits` of each row. Engine: sampled log-probabilities
of four conversations of two turns against the trainer's scores of the same rows. Rows exceed the sliding windows of the
small models.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from plumbob.rollout import Sample, Sampling
from plumbob.testing.small_models import ARCHITECTURES, small_model
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.transformers import make_engine, measure
from plumbob.trainer.policy.forward_plan import measured_rows, own_logprobs, plan_forward
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.policy import Policy
from transformers import PreTrainedModel

HEADING = "| model | class | rows | packed differs by | trainer | engine in this process | engine |\n|---|---|---|---|---|---|---|"
TURN = 12
"""Sampled ids of a turn; the first prompt's length, and the length of the tool result between the turns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of real models")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, cpu, float32\n")
    print(HEADING)
    for name in ARCHITECTURES:
        print(row_of(name, small_model(name)), flush=True)
    for folder in arguments.folders:
        print(row_of(folder.name, load_model(str(folder))), flush=True)


def row_of(name: str, model: PreTrainedModel, max_context: int = 4096) -> str:
    """One row of the table."""
    plan = plan_forward(model, max_context)
    decoding = measure(model, plan, max_context)
    model.set_attn_implementation(plan.own_attention)
    rows = measured_rows(plan.num_ids, (40, 9, 64, 23))
    own = torch.cat([own_logprobs(model, row.token_ids) for row in rows])
    policy = Policy(model, TrainConfig(max_context=max_context), torch.device("cpu"), plan=plan)
    engine = make_engine(policy.engine_model(), decoding, max_slots=4, max_length=max_context)
    samples = asyncio.run(conversations(engine, [row.token_ids[:TURN] for row in rows]))
    with torch.no_grad():
        trainer = (policy.score(rows, 1.0).logprobs - own).abs().max().item()
        sampled = torch.tensor([lp for sample in samples for lp in sample.sampled_logprobs])
        parity = (policy.score(samples, 1.0).logprobs - sampled).abs().max().item()
    way = "cached" if decoding.cached else "whole rows"
    cells = (name, type(model).__name__, plan.layout, number(plan.differences["packed"]), f"{trainer:.1e}", way)
    return f"| {' | '.join(cells)} | {parity:.1e} |"


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
