"""What the steps of a GRPOTrainer of TRL come to in numbers, by the names that `plumbob.doctor.trends` reads."""

from __future__ import annotations

import statistics
import zlib
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from plumbob.doctor import trends
from plumbob.doctor.findings import Finding
from plumbob.doctor.measuring import AT_RANDOM, numbers
from plumbob.doctor.run_numbers import of_groups
from plumbob.doctor.trl.before import tolerance
from plumbob.doctor.trl.recording import cut_off, reward_of, trained
from plumbob.doctor.trl.settings import narrowing
from plumbob.doctor.trl.watching import Round

LOGGED = {
    "entropy": "policy/entropy",
    "kl": "policy/kl",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "sampling/sampling_logp_difference/mean": "sync/sampling_gap",
}
"""Name in TRL's log -> name of the same number in the table of trends."""
LIMIT = "max_completion_length"
TINY = 0.02
LEAST, DIFFERENT_ENDS = 8, 3
"""Fewest completions without an end token, and different tokens at their ends, that no limit and no stop text explains."""


def plan_of(trainer: Any) -> trends.Plan:
    """What the table of trends must know of a trainer's settings."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    return trends.Plan(
        steps=trainer.state.max_steps,
        group_size=args.num_generations,
        temperature=args.temperature,
        exact=not args.bf16 and not args.use_vllm,
        narrowed=", ".join(f"{name}={value}" for name, value in narrowing(args).items()),
        scaled=args.scale_rewards == "group",
        learning_rate=args.learning_rate,
        adapter=hasattr(model, "peft_config"),
        warmup=args.get_warmup_steps(trainer.state.max_steps),
        max_norm=args.max_grad_norm or 0.0,
        kl_beta=float(trainer.beta),
        limits={LIMIT: f"{LIMIT}={args.max_completion_length}"},
    )


class WeightSample:
    """A few entries of each trained tensor, the same ones each time, read with one transfer."""

    def __init__(self, trainer: Any) -> None:
        self._tensors = trained(trainer)
        self._at = {
            name: torch.from_numpy(np.random.default_rng(zlib.crc32(name.encode())).integers(0, p.numel(), AT_RANDOM))
            for name, p in self._tensors.items()
        }
        self._at = {name: at.to(self._tensors[name].device) for name, at in self._at.items()}

    def take(self) -> np.ndarray:
        """[tensors, AT_RANDOM] float64"""
        own = [p.detach().reshape(-1)[self._at[name]].float() for name, p in self._tensors.items()]
        return numbers(torch.stack(own)).astype(float) if own else np.zeros((0, AT_RANDOM))


def row_of(trainer: Any, made: Round, before: np.ndarray, after: np.ndarray, step: int) -> dict[str, float]:
    """The numbers of a step (from 0). `before`, `after`: `WeightSample`s of the weights that it began with and left."""
    rewards = [reward_of(trainer, made, i)[1] for i in range(len(made.inputs))]
    finite = [r for r in rewards if np.isfinite(r)]
    groups = [
        np.array(rewards[i : i + trainer.num_generations]) for i in range(0, len(rewards), trainer.num_generations)
    ]
    groups = [g[np.isfinite(g)] for g in groups if np.isfinite(g).any()]
    live = [g for g in groups if np.ptp(g) > 0]
    most = max(map(len, made.ids), default=0)  # what ends earlier without an end token is cut off by no limit
    cut = statistics.fmean(cut_off(trainer, ids) and len(ids) == most for ids in made.ids) if made.ids else 0.0
    moved = after - before
    row = {
        "step": step + 1.0,
        **of_groups([g.tolist() for g in groups]),
        "reward/group_std": statistics.pstdev([float(g.mean()) for g in groups]) if groups else 0.0,
        "groups/tiny_spread_share": sum(np.ptp(g) < TINY * np.abs(g).max() for g in live) / max(len(live), 1),
        "advantage/mean_abs": float(made.output["advantages"].float().abs().mean()),
        "rollout/count": float(len(rewards)),
        "rollout/not_finite": float(len(rewards) - len(finite)),
        "rollout/sampled_tokens": statistics.fmean(map(len, made.ids)) if made.ids else 0.0,
        "rollout/truncated_share": cut,
        f"rollout/stopped/{LIMIT}": cut,
        "optimizer/updates": 1.0,
        "optimizer/update_rms": float(np.sqrt(np.mean(moved**2))),
        "optimizer/relative_update": float(np.linalg.norm(moved) / max(np.linalg.norm(before), 1e-30)),
    }
    if str(getattr(trainer.args.optim, "value", trainer.args.optim)).startswith(
        "adam"
    ):  # others may leave weights as they are
        row["optimizer/moved_share"] = float((moved != 0).mean())
        row["optimizer/still_tensors"] = float((moved == 0).all(1).mean())
    if trainer.tools and made.completions and isinstance(made.completions[0], list):
        turns = [[m for m in one if m.get("role") == "assistant"] for one in made.completions]
        row["rollout/tools"] = float(len(trainer.tools))
        row["rollout/turns"] = statistics.fmean(map(len, turns))
        row["rollout/tool_calls"] = statistics.fmean(sum(len(m.get("tool_calls") or ()) for m in own) for own in turns)
        # TRL's own count: results that do not fit any more stand in no completion.
        failures = trainer._metrics["train"].get("tools/failure_frequency") or [0.0]
        row["rollout/tool_errors"] = failures[-1] * row["rollout/tool_calls"]
    return row


ALIKE = "equal completions of a prompt earn equal rewards"


def alike(trainer: Any, made: Round, step: int) -> Finding:
    """Whether equal completions of one prompt have equal rewards: what differs there is no property of the completion."""
    seen: dict[Any, list[float]] = defaultdict(list)
    for i, ids in enumerate(made.ids):
        seen[i // trainer.num_generations, tuple(ids)].append(reward_of(trainer, made, i)[1])
    apart = [max(r) - min(r) for r in seen.values() if len(r) > 1]
    if not apart:
        return Finding(ALIKE, "unsure", "no two completions of a prompt were equal", None, "grading")
    rewards = [reward_of(trainer, made, i)[1] for i in range(len(made.ids))]
    wrong = [a for a in apart if a > tolerance(np.array(rewards))]
    said = f"{len(wrong)} of {len(apart)} sets of equal completions have different rewards, by up to {max(apart):.3g}"
    if wrong:
        return Finding(ALIKE, "fail", said, "reward-nondeterministic", "grading", step + 1)
    return Finding(ALIKE, "pass", said, None, "grading")


def ended(trainer: Any, made: Round) -> list[Finding]:
    """Whether completions end as sampled ones do, and those that a limit has cut off are trained as the settings say."""
    found, cut = [], [cut_off(trainer, ids) for ids in made.ids]
    if trainer.args.mask_truncated_completions:
        trained_ = [i for i, was in enumerate(cut) if was and made.output["completion_mask"][i].any()]
        told = f"of {sum(cut)} completions without an end token {len(trained_)} are trained"
        check = "mask_truncated_completions keeps completions that a limit cuts off from the loss"
        found.append(Finding.of(check, ("loss-mask-wrong" if trained_ else None, told), "rows"))
    if trainer.rollout_func is not None:
        most = max(map(len, made.ids), default=0)
        last = [ids[-1] for ids, was in zip(made.ids, cut, strict=True) if was and len(ids) < most]
        # A stop text would be the end of all of them.
        lost = all(cut) and len(last) >= LEAST and len(set(last)) >= DIFFERENT_ENDS
        told = f"{len(last)} of {len(cut)} completions end before the longest, with {len(set(last))} different tokens, and "
        told += "none with an end token: it is lost between sampling and training, or they are tokenised again"
        check = "completions of rollout_func keep the token that ends them"
        found.append(
            Finding.of(check, ("row-not-what-was-sampled", told) if lost else (None, f"{len(cut)} completions"), "rows")
        )
    return found
