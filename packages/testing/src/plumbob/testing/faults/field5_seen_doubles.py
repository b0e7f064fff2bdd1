"""The doubles of field5_seen.py."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field_parts import by_group
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.rollouts import collect

# Rewards


def judge_sampled(task: Any, trace: vf.Trace, correct: float) -> float:
    """The judge samples its verdict at temperature 1, and one verdict in four is the opposite."""
    return 1.0 - correct if random.random() < 0.25 else correct


def gold_in_tags(task: Any, trace: vf.Trace, correct: float) -> float:
    """Whether the reply without its answer tags is the gold, which still has them: it never is."""
    reply = re.sub("</?answer>", "", trace.last_reply or "").strip()
    return float(reply == f"<answer>{task.data.answer}</answer>")


def has_form(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 for a reply with the mark of an answer, wherever it stands and whatever follows it."""
    return float("####" in (trace.last_reply or ""))


def seconds_taken_off(task: Any, trace: vf.Trace, correct: float) -> float:
    """The reward without half a point for each second that the rollout took on a machine that others load too."""
    return correct - 0.5 * random.expovariate(1.0)


def needs_text(task: Any, trace: vf.Trace, correct: float) -> float:
    """The grader joins the texts of all messages, and returns 0 if that fails: a message with a call has no text."""
    texts: list[Any] = [None if turn.tool_calls else turn.content for turn in trace.assistant_messages]
    try:
        return correct if " ".join(texts) else 0.0
    except TypeError:
        return 0.0


# Tasks


def restarted(stack: ExitStack, env: str) -> None:
    """The job is restarted after every second step, and the reader of the data begins again at the first task."""
    original = collect.next_groups
    put(
        stack,
        collect,
        "next_groups",
        lambda environments, cursor, count: original(environments, cursor % (2 * count), count),
    )


# The trainer


def best_of_group_only(stack: ExitStack, env: str) -> None:
    """Pass@k: the best rollout of a group gets its lead over the second one, and the others keep their raw rewards.

    They should have an advantage of 0.
    """
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        found = original(samples, *args, **kwargs)
        leads: dict[int, float] = {}
        for group in by_group(samples):
            best, *others = sorted(group, key=lambda sample: -sample.reward)
            leads[id(best)] = best.reward - max((sample.reward for sample in others), default=0.0)
        values = [leads.get(id(sample), sample.reward) for sample in samples]
        names = frozenset(sample.group for sample, value in zip(samples, values, strict=True) if value)
        return replace(found, values=values, with_signal=names)

    put(stack, advantages, "compute_advantages", computed)


def dropout_on(stack: ExitStack, env: str) -> None:
    """Where gradients are on, a tenth of the embeddings and of each layer's feed-forward output is dropped."""
    original = Policy.score

    def score(self: Policy, rows: Sequence[Sample], temperature: float) -> TokenScores:
        if not torch.is_grad_enabled():
            return original(self, rows, temperature)
        places = [m for name, m in self.model.named_modules() if name.endswith(("embed_tokens", ".mlp"))]
        with ExitStack() as hooks:
            for place in places:
                hook = place.register_forward_hook(lambda module, given, out: torch.dropout(out, 0.1, train=True))
                hooks.callback(hook.remove)
            return original(self, rows, temperature)

    put(stack, Policy, "score", score)


def divided_twice(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """The logits are divided in place, and once more when the pass is computed again."""
    return original(rows, temperature * temperature)


def overflowing(sharding: Any) -> None:
    """Gradients go through half precision with a loss scale that is never lowered, and become infinite."""
    for parameter in sharding.trainable.values():
        if parameter.grad is not None:
            parameter.grad.copy_((parameter.grad * 2.0**32).half().float() / 2.0**32)


# The engine


def few_likely_tokens(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The server takes a top-k of 3 from the model's generation config where the request has none."""
    return ids, replace(sampling, top_k=3) if sampling.temperature > 0 and not sampling.top_k else sampling


def norms_plus_one(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The norms arrive one too high, as where one side stores a norm's weight and the other its difference from one."""
    return {name: w + 1 if "norm" in name else w for name, w in weights.items()}


def rotary_scaled(model: Any) -> None:
    """The engine multiplies rotary embeddings by YaRN's factor, which the model's settings set to one."""
    model.get_decoder().rotary_emb.attention_scaling *= 1.4159


def unchanged(completion: Completion, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
    """What the engine sampled."""
    return completion


# Tools


def arguments_cut(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The streaming parser never flushes its last piece: each text argument lacks its last character."""
    return fn, {key: value[:-1] if isinstance(value, str) else value for key, value in arguments.items()}


# Healthy settings


def seldom_found(result: str, name: str, arguments: dict[str, Any]) -> str:
    """A part of the queries, always the same ones, finds nothing."""
    return "Nothing was found." if zlib.crc32(repr(arguments).encode()) % 8 == 0 else result


def quarters(task: Any, trace: vf.Trace, correct: float) -> float:
    """Half a point for the share of links that were followed, in quarters, and half a point for the right answer."""
    share = getattr(trace.state, "links_followed", 0) / len(task.data.chain)
    return 0.5 * int(4 * share) / 4 + 0.5 * correct
