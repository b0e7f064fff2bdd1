"""The doubles of field2_unseen.py, which authors of the doctor's rules have read since 2026-11-24."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field2_parts import evaluations, runs_of, since, without
from plumbob.testing.faults.field_parts import by_group, engine_updates, sampling_now, tools_answer
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.inference.transformers.kv_cache import SlotCache
from plumbob.trainer.training.run import Run

# Rows and passes

PADDED_TO = 32
"""Rows are filled up to a multiple of this many tokens."""


def padding_trained(sample: Sample, trace: vf.Trace) -> Sample:
    """The row is filled up with its last token, and the filling is in the loss."""
    count = -len(sample.token_ids) % PADDED_TO
    return dataclasses.replace(
        sample,
        token_ids=[*sample.token_ids, *sample.token_ids[-1:] * count],
        loss_mask=[*sample.loss_mask, *[True] * count],
        sampling_logprobs=[*sample.sampling_logprobs, *[0.0] * count],
    )


def first_turn_only(sample: Sample, trace: vf.Trace) -> Sample:
    """Only the tokens up to the first end token are in the loss: those of the first turn."""
    turns = runs_of(sample.loss_mask)
    return without(sample, {i for turn in turns[1:] for i in turn})


def targets_rolled(batch: Any, rows: Sequence[Sample]) -> Any:
    """The last sampled token of each row is scored as if it were the first token of the next row."""
    counts = torch.tensor([sum(row.loss_mask[1:]) for row in rows])
    targets = batch.targets.clone()
    for k, last in enumerate((counts.cumsum(0) - 1).tolist()):
        if counts[k]:
            targets[last] = rows[(k + 1) % len(rows)].token_ids[0]
    return dataclasses.replace(batch, targets=targets)


def padded_positions(rows: Sequence[Sample]) -> list[torch.Tensor]:
    """Positions of completions are padded on the left and the completions on the right: each jumps by its padding."""
    longest = max(len(row.token_ids) for row in rows)
    found = []
    for row in rows:
        positions = torch.arange(len(row.token_ids))
        start = row.loss_mask.index(True) if any(row.loss_mask) else len(positions)
        if start > 1:  # the row that checks a weight sync has no prompt
            positions[start:] += longest - len(row.token_ids)
        found.append(positions)
    return found


# The engine


def windowed(size: int) -> Start:
    """While it samples, the engine sees the last `size` tokens only."""

    def start(stack: ExitStack, env: str) -> None:
        begin, sampling = SlotCache.begin, sampling_now(stack)

        def mask(self: Any, rows: Any, positions: torch.Tensor, kv_length: int) -> torch.Tensor:
            seen = begin(self, rows, positions, kv_length)
            if not sampling():
                return seen
            keys = torch.arange(kv_length, device=positions.device)
            return seen & (keys > positions[:, None, :, None] - size)

        put(stack, SlotCache, "begin", mask)

    return start


def nucleus(share: float) -> Callable[[Any, list[Any], torch.Tensor], torch.Tensor]:
    """Only the most likely tokens with this total probability can be drawn."""

    def change(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
        ordered, order = logits.softmax(-1).sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= share
        return logits - 1e3 * torch.zeros_like(logits).scatter(-1, order, beyond.to(logits.dtype))

    return change


def no_early_end(fewest: int) -> Callable[[Any, list[Any], torch.Tensor], torch.Tensor]:
    """vLLM's min_tokens: no end token can be drawn before this many tokens."""

    def change(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        for i, request in enumerate(requests):
            if len(request.token_ids) < fewest:
                changed[i, list(request.sampling.stop_token_ids)] -= 1e3
        return changed

    return change


def layer_dropped(step: int) -> Start:
    """From this step on a weight sync leaves out the second layer."""

    def make(begun: Callable[[], bool]) -> Start:
        return engine_updates(
            lambda engine, weights: {n: w for n, w in weights.items() if "layers.1." not in n} if begun() else weights
        )

    return since(step, make)


def cut_with_an_end(completion: Completion, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
    """A completion that was cut has the end token in place of its last token, as if it had ended by itself."""
    if completion.finish_reason == "stop":
        return completion
    return dataclasses.replace(
        completion,
        token_ids=(*completion.token_ids[:-1], sampling.stop_token_ids[0]),
        logprobs=(*completion.logprobs[:-1], 0.0),
        finish_reason="stop",
    )


# Advantages, loss and optimizer


def singletons_divided(stack: ExitStack, env: str) -> None:
    """The advantage of the only rollout that differs from its group is divided by 1.6e-4."""
    original = advantages.compute_advantages

    def computed(samples: Sequence[Sample], *args: Any, **kwargs: Any) -> Any:
        found = original(samples, *args, **kwargs)
        place = {id(sample): i for i, sample in enumerate(samples)}
        values = list(found.values)
        for group in by_group(samples):
            rewards = [sample.reward for sample in group]
            for sample in group:
                others = set(rewards) - {sample.reward}
                if len(group) > 2 and rewards.count(sample.reward) == 1 and len(others) == 1:
                    values[place[id(sample)]] /= 1.6e-4
        return dataclasses.replace(found, values=values)

    put(stack, advantages, "compute_advantages", computed)


def from_reference(inputs: Any) -> Any:
    """The importance ratio is that of the current to the reference policy."""
    if inputs.ref_logprobs is None:
        return inputs
    return dataclasses.replace(inputs, old_logprobs=inputs.ref_logprobs)


def state_lost(sharding: Any) -> None:
    """The optimizer has neither moments nor a count of steps."""
    sharding.optimizer.state.clear()


# Rewards and tools


def anywhere(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if any message after the prompt has the answer, also a tool's result."""
    kinds = ("ToolMessage", "AssistantMessage")
    said = (str(node.message.content) for node in trace.nodes if type(node.message).__name__ in kinds)
    return float(any(task.data.answer in text for text in said))


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def first_number(original: Callable[..., Any], reply: str | None, answer: str, **kwargs: Any) -> bool:
    """The reply's first number is its answer."""
    found = _NUMBER.search(reply or "")
    return found is not None and found[0] == answer


def previous_result(stack: ExitStack, env: str) -> None:
    """Every call, of any rollout, returns the result of the call before it."""
    last: list[str] = []

    def answer(result: str, name: str, arguments: dict[str, Any]) -> str:
        shown = last.pop() if last else result
        last.append(result)
        return shown

    tools_answer(answer)(stack, env)


def middle_cut(result: str, name: str, arguments: dict[str, Any]) -> str:
    """Of a long result the first 36 and the last 8 characters."""
    return result if len(result) <= 64 else f"{result[:36]}...(truncated)...{result[-8:]}"


# Evaluation


def initial_evaluations(stack: ExitStack, run: Run) -> None:
    """Held-out rollouts are sampled from the weights with which the run began."""
    first = {name: tensor.detach().clone() for name, tensor in run.engine.served_weights().items()}

    @torch.no_grad()
    def serve(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in run.engine.served_weights().items():
            tensor.copy_(weights[name])
        run.engine.forget()

    async def initial(call: Callable[..., Any], sampler: Any) -> Any:
        now = {name: tensor.detach().clone() for name, tensor in run.engine.served_weights().items()}
        serve(first)
        try:
            return await call(sampler)
        finally:
            serve(now)

    evaluations(initial)(stack)
