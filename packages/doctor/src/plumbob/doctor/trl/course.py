"""What the steps of a GRPOTrainer of TRL come to in numbers, by the names that `plumbob.doctor.trends` reads."""

from __future__ import annotations

import json
import re
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from plumbob.doctor import trends
from plumbob.doctor.environment.texts import says_failed, says_nothing, strings
from plumbob.doctor.findings import Finding, Verdict
from plumbob.doctor.measuring import AT_RANDOM, numbers
from plumbob.doctor.record import StepRecord
from plumbob.doctor.run_numbers import of_groups
from plumbob.doctor.trl.recording import cut_off, reward_of, trained
from plumbob.doctor.trl.rewards import Paid
from plumbob.doctor.trl.settings import narrowing
from plumbob.doctor.trl.watching import Round, loss_mask

LOGGED = {
    "entropy": "policy/entropy",
    "kl": "policy/kl",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "sampling/sampling_logp_difference/mean": "sync/sampling_gap",
}
"""Name in TRL's log -> name of the same number in the table of trends."""
LIMIT = "max_completion_length"
TAIL, DIFFERENT = 64, 0.5
"""A completion repeats itself if fewer than this share of the sequences of four tokens in its tail are different."""
TINY = 0.02
FAR = 3.0
"""Nats a token by which no step of a healthy run changes the policy: those of the bundled models, at high rates, reach 0.2."""


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
    cut = statistics.fmean(cut_off(trainer, ids) for ids in made.ids) if made.ids else 0.0
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
        "rollout/repetitive_share": statistics.fmean(map(_repeats, made.ids)) if made.ids else 0.0,
        "optimizer/updates": 1.0,
        "optimizer/update_rms": float(np.sqrt(np.mean(moved**2))),
        "optimizer/relative_update": float(np.linalg.norm(moved) / max(np.linalg.norm(before), 1e-30)),
        "optimizer/moved_share": float((moved != 0).mean()),
        "optimizer/still_tensors": float((moved == 0).all(1).mean()),
    }
    if trainer.tools and made.completions and isinstance(made.completions[0], list):
        turns = [[m for m in one if m.get("role") == "assistant"] for one in made.completions]
        row["rollout/tools"] = float(len(trainer.tools))
        row["rollout/turns"] = statistics.fmean(map(len, turns))
        row["rollout/tool_errors"] = sum(failed(result) for _, result in calls_of(made)) / max(len(turns), 1)
        row["rollout/tool_calls"] = statistics.fmean(sum(len(m.get("tool_calls") or ()) for m in own) for own in turns)
    return row


def _repeats(ids: Sequence[int]) -> bool:
    tail = ids[-TAIL:]
    fours = [tuple(tail[i : i + 4]) for i in range(len(tail) - 3)]
    return len(tail) == TAIL and len(set(fours)) < DIFFERENT * len(fours)


def calls_of(made: Round) -> Iterator[tuple[str, str]]:
    """(name and arguments of a tool call, what it was answered with) of the completions of a round."""
    for messages in made.completions:
        waiting: list[str] = []
        for message in messages if isinstance(messages, list) else ():
            if message.get("role") == "assistant":
                waiting = [
                    json.dumps(call.get("function", call), sort_keys=True) for call in message.get("tool_calls") or ()
                ]
            elif message.get("role") == "tool" and waiting:
                yield waiting.pop(0), "\n".join(strings(message.get("content")))


def failed(result: str) -> bool:
    """Whether a tool message says that the tool failed, as TRL or the tool writes it."""
    return result.startswith("{'error'") or says_failed(result)


SEVERAL, REPEATED, OFTEN, HANDFUL = 8, 0.5, 4, 8
"""Fewest groups, or tool results, of which something is said; share of the groups with different prompts up to which they repeat
although there are more; and times that each of fewer prompts than so many is taken, where there are no more."""


class Course:
    """What no single step shows: prompts, masks and tool results of all rounds of completions."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self._groups, self._masked, self._trained = trainer, 0, 0, 0
        self._prompts: set[str] = set()
        self._results: dict[str, set[str]] = defaultdict(set)
        self._calls = self._empty = 0

    def add(self, made: Round, step: int) -> list[Finding]:
        """Take in a new round; returns what is known of all."""
        found = [self._repeated(made), *self._cut(made), *self._tools(made)]
        return [replace(one, step=step + 1) if one.cause else one for one in found]

    def _repeated(self, made: Round) -> Finding:
        self._groups += len(made.inputs) // self.trainer.num_generations
        self._prompts |= {json.dumps(row.get("prompt"), sort_keys=True, default=str) for row in made.inputs}
        data, count = self.trainer.train_dataset, len(self._prompts)
        there = len(data) if hasattr(data, "__len__") else count
        told = f"{self._groups} groups had {count} different prompts, and the data has {there} rows"
        again = there >= 2 * count or (count < HANDFUL and self._groups >= OFTEN * count)
        few = self._groups >= SEVERAL and made.step > 0 and count <= REPEATED * self._groups and again
        return Finding.of(
            "steps have other prompts than the steps before", ("few-distinct-tasks" if few else None, told), "tasks"
        )

    def _cut(self, made: Round) -> Iterator[Finding]:
        if not self.trainer.mask_truncated_completions:
            return
        cut = [i for i, ids in enumerate(made.ids) if cut_off(self.trainer, ids)]
        trained = loss_mask(made.output).any(1).tolist()
        self._masked, self._trained = self._masked + len(cut), self._trained + sum(trained[i] for i in cut)
        told = f"of {self._masked} completions that were cut off {self._trained} are in the loss"
        lost = "loss-mask-wrong" if self._trained else None
        yield Finding.of("completions that were cut off are not trained", (lost, told), "rows")

    def _tools(self, made: Round) -> Iterator[Finding]:
        if not self.trainer.tools:
            return
        for call, result in calls_of(made):
            self._calls, self._empty = self._calls + 1, self._empty + says_nothing(result)
            if not failed(result):
                self._results[call].add(result)
        mixed = [call for call, of in self._results.items() if len(of) > 1]
        told = f"{self._empty} of {self._calls} results are empty"
        wrong = self._calls >= SEVERAL and self._empty > self._calls / 2
        yield Finding.of("tools return something", ("tool-results-wrong" if wrong else None, told), "tools")
        for name in {json.loads(call)["name"] for call in self._results}:
            own = [result for call, of in self._results.items() if json.loads(call)["name"] == name for result in of]
            same = len(own) >= SEVERAL and len(set(own)) == 1
            told = f"{len(own)} different calls of {name} had {len(set(own))} different results"
            told += f", {own[0][:80]!r}" if same else ""
            content = re.search(r"\d|\S+\s+\S+\s+\S+", own[0]) if same else None  # "done" is the answer to any call
            yield Finding.of(
                "other calls have other results", ("tool-results-wrong" if content else None, told), "tools"
            )
        told = f"{len(mixed)} of {len(self._results)} calls had different results at different times"
        told += f", such as {mixed[0][:80]}" if mixed else ""
        yield Finding.of(
            "a call has the same result each time", ("tool-results-wrong" if len(mixed) > 1 else None, told), "tools"
        )


LEFT_OUT, EXTREME = 0.15, {"top_p": 0.6, "top_k": 10, "min_p": 0.2}
"""Nats a token by which settings that leave tokens out may raise the probability of those that are drawn; and values beyond which
it is a tenth of that, because a policy that is nearly sure draws few tokens that they leave out."""


def narrowed(made: Round, record: StepRecord, settings: Mapping[str, float]) -> list[Finding]:
    """How much of the probability the settings leave out, of the rows whose sampled tokens were noted."""
    pairs = [
        (own, row.logprobs)
        for own, row in zip(made.narrowed or (), record.rows, strict=False)
        if row.logprobs is not None
    ]
    gaps = [own - given for own, given in pairs if len(own) == len(given)]
    if not settings or not gaps:
        return []
    gap, named = float(np.concatenate(gaps).mean()), ", ".join(f"{name}={value}" for name, value in settings.items())
    told = f"{named}: drawn tokens are likelier by {gap:.2g} nats each than in training, which leaves none out"
    few = any(value > EXTREME[name] if name == "min_p" else value < EXTREME[name] for name, value in settings.items())
    lost = "sampling-altered" if gap > (LEFT_OUT / 10 if few else LEFT_OUT) else None
    return [Finding.of("settings leave little out of the sampling", (lost, told), "sampling")]


ALIKE = "equal completions of a prompt earn equal rewards"
RIGHT = "a right answer earns more than others"


def alike(trainer: Any, made: Round, step: int) -> Finding:
    """Whether equal completions of one prompt have equal rewards: what differs there is no property of the completion."""
    seen: dict[Any, list[float]] = defaultdict(list)
    for i, ids in enumerate(made.ids):
        seen[i // trainer.num_generations, tuple(ids)].append(reward_of(trainer, made, i)[1])
    apart = [max(r) - min(r) for r in seen.values() if len(r) > 1]
    if not apart:
        return Finding(ALIKE, "unsure", "no two completions of a prompt were equal", None, "grading")
    wrong = [a for a in apart if a > 1e-6]
    said = f"{len(wrong)} of {len(apart)} sets of equal completions have different rewards, by up to {max(apart):.3g}"
    if wrong:
        return Finding(ALIKE, "fail", said, "reward-nondeterministic", "grading", step + 1)
    return Finding(ALIKE, "pass", said, None, "grading")


def right(trainer: Any, made: Round, before: Paid) -> Finding:
    """Whether texts of the data's columns earn more than an empty reply, where completions of a prompt all earn the same."""
    rewards, size = np.array([reward_of(trainer, made, i)[1] for i in range(len(made.inputs))]), trainer.num_generations
    groups = rewards[: len(rewards) // size * size].reshape(-1, size)
    if not before.best or not len(groups) or np.ptp(groups, 1).any():
        verdict: Verdict = "pass" if before.best and len(groups) else "unsure"
        return Finding(RIGHT, verdict, "rewards of a prompt differ", None, "grading")
    earned = ", ".join(f"that of column {name!r} {value:.3g}" for name, value in before.best.items())
    said = (
        f"the completions of each of {len(groups)} prompts earn the same, {rewards.min():.3g} to {rewards.max():.3g}; as a "
        f"completion, a text of the data earns at most so much above an empty reply, in {before.forms} forms: {earned}"
    )
    return Finding.of(
        RIGHT, ("reward-wrong" if before.alike or max(before.best.values()) <= 1e-9 else None, said), "grading"
    )
