"""Processor time that a step's rollouts of GSM8K take beside the engine, by stage.

    python tools/bench/rollout_host.py TOKENIZER GSM8K [--groups 128] [--steps 6]

TOKENIZER is a folder with a tokenizer and its chat template, GSM8K one with train.jsonl. The tasks, prompts, traces and
rewards are those of `train gsm8k`; the engine answers at once with solutions of other tasks, as ids of random
log-probability. To compare two commits, run it in both by turns: it prints a digest of all rows, which must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from plumbob.rollout import Chat, Completion, Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.rollouts.collect import Sampler, collect
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.rollouts.limits import limits_of
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.run_files.trace_files import write_traces
from plumbob.trainer.training.train import OBJECTS_BEFORE_COLLECTION, SWITCH_SECONDS
from transformers import AutoTokenizer


class InstantEngine:
    """Answers `expected` requests at once when all of them wait. What it draws depends on a request's seed alone."""

    version = generated_tokens = 0

    def __init__(self, expected: int, solutions: Sequence[Sequence[int]], stop: int) -> None:
        self.expected, self.solutions, self.stop = expected, solutions, stop
        self.waiting: list[tuple[Sampling, asyncio.Future[Completion]]] = []
        self.began = self.answered = 0.0
        """Processor time when the last request came, and when the answers were made."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting.append((sampling, future))
        if len(self.waiting) == self.expected:
            self.began = time.process_time()
            answers = [(waiting, self.draw(settings)) for settings, waiting in self.waiting]
            self.waiting = []
            self.answered = time.process_time()
            for waiting, completion in answers:
                waiting.set_result(completion)
        return await future

    def draw(self, sampling: Sampling) -> Completion:
        rng = random.Random(sampling.seed)
        ids = list(rng.choice(self.solutions))
        while rng.random() < 0.5:
            ids += rng.choice(self.solutions)
        ends = len(ids) < sampling.max_tokens
        ids = [*ids, self.stop] if ends else ids[: sampling.max_tokens]
        return Completion(tuple(ids), tuple(-rng.expovariate(2.0) for _ in ids), "stop" if ends else "length")


def digest(samples: Sequence[Any]) -> str:
    """Of everything in rows that does not tell the time or a trace's random id."""
    rows = [{k: v for k, v in vars(s).items() if k not in ("seconds", "trace_id", "tool_seconds")} for s in samples]
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("data")
    parser.add_argument("--groups", type=int, default=128, help="groups of 8 rollouts in a step")
    parser.add_argument("--steps", type=int, default=6, help="the first of which is not counted")
    given = parser.parse_args()
    config = TrainConfig(
        env="gsm8k", datasets=given.data, env_args=["answer_style=boxed"], max_tokens=320, max_context=1024, num_generations=8,
        max_concurrent=8 * given.groups, eval_examples=0, max_steps=given.steps + 1,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    chat = Chat.of(tokenizer)
    lines = (Path(given.data) / "train.jsonl").read_text().splitlines()[:1000]
    texts = [json.loads(line)["answer"].replace("#### ", "The answer is \\boxed{") + "}." for line in lines]
    solutions = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    engine: Any = InstantEngine(8 * given.groups, solutions, chat.stop_token_ids[0])
    sampler = Sampler(
        config, load_tasks(config), engine, chat, Sampling(max_tokens=320), limits_of(config), given.groups
    )
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION)
    sys.setswitchinterval(SWITCH_SECONDS)
    torch.set_num_threads(1)
    rows: list[dict[str, float]] = []
    with Interruption() as interruption, asyncio.Runner() as runner:
        for step in range(given.steps):
            marks = [time.process_time()]
            whole = collect(sampler, step, step * given.groups, World(0, 1, torch.device("cpu")))
            batch = interruption.run(runner, whole)
            marks.append(time.process_time())
            with tempfile.TemporaryDirectory() as folder:
                write_traces(Path(folder), step + 1, batch.records, 8, seed=0, steps=48)
            marks.append(time.process_time())
            rows.append({
                "begin": engine.began - marks[0], "end and score": marks[1] - engine.answered,
                "traces": marks[2] - marks[1],
            })  # fmt: skip
            print(f"step {step}: rows {digest(batch.drawn)}, " + ", ".join(f"{k} {v:.3f}" for k, v in rows[-1].items()))
            batch.release()
    print("medians: " + ", ".join(f"{name} {median(row[name] for row in rows[1:]):.3f}" for name in rows[0]))


if __name__ == "__main__":
    main()
