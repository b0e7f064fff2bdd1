"""Run directories made by hand, whose every number a test knows: for tests of what reads run directories."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from plumbob.trainer.config.bundled_models import bundled_folder
from plumbob.trainer.config.train import TrainConfig
from tokenizers import Tokenizer

GROUP = 4
HOSTILE = "</script><img src=x onerror='window.hurt=1'><b>not bold</b>"
"""What a model may write, and what must stay a text."""


def tiny_tokenizer() -> Tokenizer:
    folder = bundled_folder("tiny")
    assert folder is not None
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def node(role: str, text: str, *, sampled: bool = False, advantage: float | None = None) -> dict[str, Any]:
    """A message with a template part of its header, as `train` stores it; the numbers of tokens grow with their place."""
    tokenizer = tiny_tokenizer()
    header = tokenizer.encode(f"<|im_start|>{role}\n", add_special_tokens=False).ids
    body = tokenizer.encode(text, add_special_tokens=False).ids
    n = len(body) if sampled else 0
    logprobs = [-0.1 * (i + 1) for i in range(n)]
    return {
        "message": {"role": role, "content": text},
        "sampled": sampled,
        "token_ids": [*header, *body],
        "mask": [False] * len(header) + [sampled] * len(body),
        "is_content": [False] * len(header) + [True] * len(body),
        "logprobs": logprobs,
        "trainer_logprobs": [round(lp + 0.01 * i, 4) for i, lp in enumerate(logprobs)] if n and advantage else None,
        "advantages": None if advantage is None or not n else [advantage] * n,
    }


def trace(
    task: str, reward: float, reply: str, *, advantage: float | None, errors: int = 0, stop: str = ""
) -> dict[str, Any]:
    """A stored rollout: system, user, a tool call, its result, an answer."""
    nodes = [
        node("system", "Look up the start key."),
        node("user", f"Start key: {task}"),
        node("assistant", f"call {task}", sampled=True, advantage=advantage),
        node("tool", "next=17"),
        node("assistant", reply, sampled=True, advantage=advantage),
    ]
    return {
        "id": f"{task}-{reply}",
        "ok": True,
        "task": {"type": "LookupTask", "key": task, "data": {"answer": "cedar"}},
        "nodes": nodes,
        "rewards": {"correct": {"score": reward, "weight": 1.0}},
        "metrics": {"rollout/tool_calls": 1.0, "rollout/tool_errors": float(errors)},
        "stop_condition": stop or "agent_completed",
        "is_timeout": False,
        "calls": [],
        "errors": [],
        "info": {} if advantage is None else {"training": {"advantage": advantage, "trained": advantage != 0}},
        "timing": {"agent": {"start": 1.0, "end": 3.5}},
    }


def metrics_of(step: int, **own: float) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": 0.25 + 0.125 * step,
        "reward/std": 0.5,
        "reward/largest": 1.0,
        "reward/correct": 0.25 + 0.125 * step,
        "groups/count": 4,
        "rollout/count": 2 * GROUP,
        "advantage/largest": 0.75,
        "sync/sampling_gap": 1e-7 * step,
        "time/rollout": 1.5,
        **own,
    }


def make_run(folder: Path, name: str, *, steps: int = 4, seed: int = 0, groups: int = 2) -> Path:
    """A run of `steps` steps of `groups` tasks; task "again" is in every step, and rollout 1 of it has an odd reply."""
    directory = folder / name
    (directory / "traces").mkdir(parents=True)
    (directory / "config.toml").write_text(TrainConfig(seed=seed, max_steps=steps, num_generations=GROUP).to_toml())
    rows = [metrics_of(step, **{"reward/mean": 0.25 + 0.125 * step + 0.0625 * seed}) for step in range(1, steps + 1)]
    rows[-1] |= {"eval/greedy": 0.75, "eval/count": 16}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "before": {"greedy": {"mean": 0.5, "low": 0.3, "high": 0.7, "n": 16}},
        "after": {"greedy": {"mean": 0.75, "low": 0.55, "high": 0.9, "n": 16}},
    }
    (directory / "summary.json").write_text(json.dumps({"seconds": 1.0, "evaluations": summary}))
    for step in range(1, steps + 1):
        lines = []
        for group in range(groups):
            task = "again" if group == 0 else f"task-{step}-{group}"
            for i in range(GROUP):
                right = i % 2 == 0
                reply = "cedar" if right else HOSTILE if group == 0 and i == 1 else f"pepper {step}"
                extra = {"errors": int(i == 3), "stop": "max_turns" if i == 3 else ""}
                lines.append(json.dumps(trace(task, float(right), reply, advantage=0.5 if right else -0.5, **extra)))
        (directory / "traces" / f"step_{step}.jsonl.gz").write_bytes(
            gzip.compress("".join(line + "\n" for line in lines).encode())
        )
    return directory


def stored(directory: Path, step: int) -> list[dict[str, Any]]:
    text = gzip.decompress((directory / "traces" / f"step_{step}.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]
