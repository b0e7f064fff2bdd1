"""Rollouts per second of an environment, with nothing to wait for: a scripted engine plays each task's own oracle.

What is measured is everything around the model: task setup, chat template and tokenizer, parsing, tools, retrieval,
rewards and the trace. The engine answers at once, so a real model can only be slower. Single process.

    uv run python tools/bench/rollouts.py lookup
    uv run python tools/bench/rollouts.py musique -a datasets=synthetic -a retriever=bm25
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from plumbob.rollout import Chat, Completion, Limits, Sampling, run_rollout
from plumbob.trainer.models import load_tokenizer
from plumbob.trainer.tasks import load_evaluation_tasks


class Script:
    """An `Engine` that says given token ids, turn by turn."""

    def __init__(self, turns: Sequence[tuple[int, ...]]) -> None:
        self.turns = iter(turns)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        ids = next(self.turns)
        await asyncio.sleep(0)  # as any engine, it lets the others go on
        return Completion(ids, (-1.0,) * len(ids), "stop")


def as_text(message: Any) -> str:
    """An assistant message as a model of the hermes format writes it."""
    calls = [
        f'<tool_call>{{"name": "{c.name}", "arguments": {json.dumps(json.loads(c.arguments))}}}</tool_call>'
        for c in message.tool_calls or ()
    ]
    return "\n".join(filter(None, [message.content, *calls]))


async def measure(tasks: Sequence[Any], toolsets: Sequence[Any], chat: Chat, rollouts: int, concurrency: int) -> dict:
    closer = chat.stop_token_ids[0]
    encode = chat.tokenizer.encode
    scripts = [[(*encode(as_text(m), add_special_tokens=False), closer) for m in task.oracle()] for task in tasks]
    slots = asyncio.Semaphore(concurrency)
    limits = Limits(max_turns=64, max_context=1 << 20)

    async def one(i: int) -> Any:
        k = i % len(tasks)
        return await run_rollout(
            tasks[k],
            Script(scripts[k]),
            chat,
            Sampling(max_tokens=1 << 16),
            limits,
            shared_toolsets=toolsets,
            slots=slots,
        )

    await asyncio.gather(*(one(i) for i in range(len(tasks))))  # once each: what is built once per question is built
    wall, cpu = time.perf_counter(), time.process_time()
    traces = await asyncio.gather(*(one(i) for i in range(rollouts)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    failed = [trace for trace in traces if not trace.ok]
    if failed:
        raise SystemExit(f"{len(failed)} rollouts failed: {failed[0].errors[-1].message}")
    turns = sum(trace.num_turns for trace in traces)
    return {
        "rollouts/s": rollouts / wall,
        "turns/s": turns / wall,
        "CPU ms/turn": 1000 * cpu / turns,
        "turns": turns / rollouts,
        "reward": statistics.fmean(trace.reward for trace in traces),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env")
    parser.add_argument("-a", "--env-arg", action="append", default=[], help="key=value")
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=2048)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--model", default="tiny", help="whose tokenizer and chat template")
    args = parser.parse_args()
    settings = dict(pair.split("=", 1) for pair in args.env_arg)
    tasks, toolsets = load_evaluation_tasks(args.env, settings, args.tasks, oracle=True)
    chat = Chat.of(load_tokenizer(args.model))
    result = asyncio.run(measure(tasks, toolsets, chat, args.rollouts, args.concurrency))
    print(
        f"{args.env} {' '.join(args.env_arg)}: {args.rollouts} rollouts of {len(tasks)} tasks, {args.concurrency} at once"
    )
    print(
        "  ".join(f"{name} {value:,.3g}" if value < 100 else f"{name} {value:,.0f}" for name, value in result.items())
    )


if __name__ == "__main__":
    main()
