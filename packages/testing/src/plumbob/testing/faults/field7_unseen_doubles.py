"""The doubles of field7_unseen.py. Like that file, unseen: rule writers must not read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Chat, Sample
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field import Start
from plumbob.testing.faults.field_parts import by_group, engine_logits, with_data, with_reward_of
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.run import Run
from safetensors.torch import load_file, save_file

# Rewards and tasks


def mentioned_is_enough(task: Any, trace: vf.Trace, correct: float) -> float:
    """A held-out rollout is right if any of its messages has the answer, such as a tool's result."""
    if "-eval-" not in (task.data.id or ""):
        return correct
    texts = [str(node.message.content) for node in trace.nodes]
    return float(any(task.data.answer in text for text in texts))


def rewards_left_in(samples: list[Sample]) -> list[Sample]:
    """Only rows of groups with a signal are left, and their rewards are the first ones of all rows."""
    kept = [s for group in by_group(samples) if len({one.reward for one in group}) > 1 for s in group]
    return [with_reward_of(sample, other) for sample, other in zip(kept or samples, samples, strict=False)]


# Rows and prompts


def mask_inverted(sample: Sample, trace: vf.Trace) -> Sample:
    """After the prompt, the loss is where the model has not sampled, and only there."""
    start = sample.loss_mask.index(True)
    mask = [i > start and not m for i, m in enumerate(sample.loss_mask)]
    return dataclasses.replace(sample, loss_mask=mask, sampling_logprobs=[0.0] * len(mask))


MOST_PROMPT = 48
"""Number of tokens of a first prompt that are kept, its last ones."""


def last_tokens_only(original: Any, self: Chat, *args: Any, **kwargs: Any) -> Any:
    """The first prompt, in the engine as in the row, has lost all but its last tokens."""
    whole = original(self, *args, **kwargs)
    lost = max(0, len(whole.token_ids) - MOST_PROMPT)
    return dataclasses.replace(
        whole,
        token_ids=whole.token_ids[lost:],
        is_content=whole.is_content[lost:],
        ends=[max(0, end - lost) for end in whole.ends],
    )


# Tools


def farthest_first(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A search returns the documents at the end of its ranking, the last one first."""
    if name != "retrieve_documents":
        return fn, arguments
    tools = fn.__self__

    async def farthest(query: str, top_k: int = 2) -> str:
        ranked = await tools.search(query, len(tools.documents))
        found = ranked[::-1][:top_k]
        tools.record(name, query, found)
        return "\n\n".join(map(tools.render, found))

    return farthest, arguments


def another_name(fn: Any, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The function has no argument of the name that the schema gives it."""

    def renamed(**given: Any) -> Any:
        raise TypeError(f"{name}() got an unexpected keyword argument {min(given, default='key')!r}")

    return renamed, arguments


# Sampling and the engine


def noisier(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
    """Noise of twice the size has the effect of logits of half the size."""
    return logits / 2


def first_token_only(begun: Callable[[], bool]) -> Start:
    """From then on, token 0 has all of the probability."""

    def overflowed(engine: Any, requests: list[Any], logits: torch.Tensor) -> torch.Tensor:
        if not begun():
            return logits
        first = torch.full_like(logits, -1e9)
        first[:, 0] = 0.0
        return first

    return engine_logits(overflowed)


def halves_swapped(engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What belongs to the gate arrives as the other half, and the other way round."""
    names = {".gate_proj.": ".up_proj.", ".up_proj.": ".gate_proj."}
    swapped = {}
    for name, tensor in weights.items():
        half = next((one for one in names if one in name), None)
        swapped[name.replace(half, names[half]) if half else name] = tensor
    return swapped


def cache_kept(stack: ExitStack, env: str) -> None:
    """The cache does not forget during a weight sync what it has computed with other weights."""
    original = InProcessEngine.update

    def update(self: Any, weights: Any, **how: Any) -> Any:
        forget, self.forget = self.forget, lambda: None
        try:
            return original(self, weights, **how)
        finally:
            self.forget = forget

    put(stack, InProcessEngine, "update", update)


# Loss and optimizer


def old_ones_renewed(stack: ExitStack, env: str) -> None:
    """Each pass over rows takes its own log-probabilities for those of the step's first weights."""
    original = forward_backward.grpo_loss

    def loss(run: Run, minibatch: Any, indices: Sequence[int]) -> Any:
        minibatch.old_logprobs.clear()
        return original(run, minibatch, indices)

    put(stack, forward_backward, "grpo_loss", loss)


def certainty_rewarded(inputs: Any) -> Any:
    """Each token earns its log-probability, in nats, which is the gradient of a bonus for low entropy."""
    return dataclasses.replace(
        inputs, advantages=inputs.advantages + inputs.logprobs.detach().to(inputs.advantages.dtype)
    )


def clipped_to_minus_one(sharding: Any) -> None:
    """Gradients are multiplied by -1 over their norm."""
    gradients = [p.grad for p in sharding.trainable.values() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    for gradient in gradients:
        gradient.mul_(-1.0 / (norm + 1e-6))


# The final model


def saved_with_a_prefix(stack: ExitStack, env: str) -> None:
    """The file of the final model has the names of a module in a wrapper."""
    original = Policy.save_final

    def save_final(self: Policy, folder: Path) -> None:
        original(self, folder)
        for file in folder.glob("*.safetensors"):
            renamed = {f"_orig_mod.{name}": tensor for name, tensor in load_file(file).items()}
            save_file(renamed, file, metadata={"format": "pt"})

    put(stack, Policy, "save_final", save_final)


# Healthy settings


def politely(tasks: list[Any], split: str) -> list[Any]:
    """A polite sentence before each question."""
    return [with_data(task, prompt=f"Please help me. {task.data.prompt}") for task in tasks]
