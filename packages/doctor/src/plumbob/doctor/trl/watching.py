"""Listens to a GRPOTrainer of TRL: methods of the one object are wrapped, and give what they gave before.

What a step used and made is kept as the trainer's own tensors, and `recording` makes a record of it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from plumbob.doctor.measuring import APART, MOVED, keep_gradient, moved, numbers
from plumbob.doctor.record import LossTrial
from plumbob.doctor.run_numbers import narrowing
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

HOLDERS = (int, float, str, list, set, dict)
ROW = "plumbob_row"
"""Key of what the loss is given: the number of each row before they are shuffled."""


@dataclass
class Turn:
    """One call of the model to generate: for each prompt its ids, the sampled ids, and their log-probabilities if known."""

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[np.ndarray] | None


@dataclass
class Round:
    """Completions that were generated together, in the order in which they were, and what was made of them."""

    step: int
    inputs: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    completions: list[Any] = field(default_factory=list)
    tool_masks: list[list[int]] | None = None
    ids: list[list[int]] = field(default_factory=list)
    rewards: np.ndarray | None = None
    """[B, F] what each reward function gave; NaN for None."""
    reward_weights: np.ndarray | float = 1.0
    """[F]"""
    output: Mapping[str, Any] = field(default_factory=dict)
    """What the loss is given, before it is shuffled."""


@dataclass
class Microbatch:
    """One call of the loss."""

    inputs: Mapping[str, Any]
    logprobs: torch.Tensor | None = None
    """[B, C]"""
    slopes: list[torch.Tensor] = field(default_factory=list)
    """[B, C], once the backward pass has been."""
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """[B, C] the weight of each token in the loss of the step, whose gradient is the mean over processes."""
    trial: LossTrial | None = None


class Watch:
    """What happened since the last generation and the last optimizer step."""

    def __init__(self, trainer: Any, wants: Callable[[], bool]) -> None:
        """`wants`: whether tensors of the step that is under way are kept. Rewards and lengths are kept of every step."""
        self.trainer, self.wants = trainer, wants
        self.round: Round | None = None
        self.empty: list[set[str]] = []
        """Of each environment of this process, once it was reset, the attributes that are 0, or hold nothing."""
        self.microbatches: list[Microbatch] = []
        self.gradients_are_complete: Callable[..., None] = lambda: None
        self.model_is_saved: Callable[[str], None] = lambda folder: None
        self._inside: Microbatch | None = None
        wrappers: dict[str, Callable[..., Any]] = {
            "_generate_and_score_completions": self._score,
            "_generate": self._generate,
            "_generate_single_turn": self._turn,
            "_calculate_rewards": self._rewards,
            "compute_loss": self._loss,
            "_get_per_token_logps_and_entropies": self._logprobs,
            "training_step": self._pass,
            "save_model": self._save,
        }
        for name, wrapper in wrappers.items():
            setattr(trainer, name, functools.partial(wrapper, getattr(trainer, name)))

    @property
    def now(self) -> bool:
        """Whether the step that is under way is kept."""
        return self.trainer.model.training and self.wants()

    # Generation and rewards

    def _score(self, original: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if not self.trainer.model.training:
            return original(inputs, *rest, **more)
        self.round = Round(self.trainer.state.global_step, [dict(one) for one in inputs])
        output = self.round.output = original(inputs, *rest, **more)
        self.round = replace(self.round, **of_all_processes(self.trainer, vars(self.round)))
        start, device = self.trainer.accelerator.process_index * len(inputs), output["completion_ids"].device
        return {**output, ROW: torch.arange(start, start + len(inputs), device=device)}

    def _generate(self, original: Any, prompts: Any, *rest: Any, **more: Any) -> Any:
        if self.round is not None and self.trainer.model.training:
            state = [getattr(one, "__dict__", {}) for one in self.trainer.environments or ()]
            self.empty = [{n for n, of in own.items() if isinstance(of, HOLDERS) and not of} for own in state]
        result = original(prompts, *rest, **more)
        if self.round is not None and self.trainer.model.training:
            _, ids, masks, completions, *_ = result
            self.round.prompts, self.round.completions = list(prompts), list(completions)
            self.round.ids, self.round.tool_masks = [list(i) for i in ids], masks and [list(m) for m in masks]
        return result

    def _turn(self, original: Any, prompt_ids: Any, *rest: Any, **more: Any) -> Any:
        if self.round is None or not self.now:
            return original(prompt_ids, *rest, **more)
        prompts = [list(ids) for ids in prompt_ids]
        with drawn_from(self.trainer) as drawn:
            completions, logprobs = original(prompt_ids, *rest, **more)
        if logprobs is not None:
            known = [np.array(one, np.float32) for one in logprobs]
        elif narrowing(self.trainer.args):
            known = None  # what is noted is of the tokens that these settings leave, and training is of all
        else:
            known = drawn(completions)
        self.round.turns.append(Turn(prompts, [list(ids) for ids in completions], known))
        return completions, logprobs

    def _rewards(self, original: Any, *given: Any, **more: Any) -> Any:
        rewards = original(*given, **more)
        if self.round is not None and self.trainer.model.training:
            self.round.rewards, self.round.reward_weights = values(rewards), values(self.trainer.reward_weights)
        return rewards

    def score(self, inputs: Sequence[Any], texts: Sequence[str]) -> np.ndarray | None:
        """[B, F] what reward functions give texts as completions of these rows, in one call; None if one of them raises.

        Random numbers are drawn on from call to call, so that a reward by chance is not taken for one by the order. What reward
        functions log is forgotten.
        """
        trainer, rows = self.trainer, copy.deepcopy(list(inputs))
        prompts = [row["prompt"] for row in rows]
        talks = isinstance(prompts[0], list)
        said = [[{"role": "assistant", "content": text}] if talks else text for text in texts]
        ids = [[*one, *trainer.eos_token_ids[:1]] for one in trainer._tokenizer(list(texts))["input_ids"]]
        kept = {name: getattr(trainer, name) for name in ("_pending_metrics", "_pending_extra_logs")}
        vars(trainer).update(copy.deepcopy(kept))
        try:
            with alone(), suppress(Exception):  # a reward function raises what it likes
                return values(GRPOTrainer._calculate_rewards(trainer, rows, prompts, said, ids))
        finally:
            vars(trainer).update(kept)
        return None

    # Loss and gradient

    def complete(self) -> None:
        """The step has been taken: its microbatches get the rows of all processes. Each process has to call it."""
        processes = self.trainer.accelerator.num_processes
        for one in self.microbatches:
            one.weights = token_weights(self.trainer, one.inputs, self.round) / processes
            one.slopes = [slopes / processes for slopes in one.slopes[:1]]
            given = {"inputs": one.inputs, "logprobs": one.logprobs, "weights": one.weights}
            given |= {"slopes": one.slopes[0]} if one.slopes else {}
            whole = of_all_processes(self.trainer, given)
            one.slopes = [whole.pop("slopes")] if one.slopes else []
            vars(one).update(whole)

    def _loss(self, original: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        if not self.now:
            return original(model, inputs, *rest, **more)
        one = self._inside = Microbatch(inputs)
        try:
            loss = original(model, inputs, *rest, **more)
        finally:
            self._inside = None
        self.microbatches.append(one)
        if one.logprobs is not None and len(self.microbatches) == 1:
            with suppress(Exception):  # a loss of another form, which may raise what it likes
                one.trial = self._trial(original, model, one)
        return loss

    def _logprobs(self, original: Any, *given: Any, **more: Any) -> Any:
        result = original(*given, **more)
        one, logprobs = self._inside, result[0]
        if one is not None and one.logprobs is None and logprobs.requires_grad:
            one.logprobs = logprobs.detach()
            keep_gradient(logprobs, one.slopes)
        return result

    def _pass(self, original: Any, *given: Any, **more: Any) -> Any:
        result = original(*given, **more)
        if self.trainer.accelerator.sync_gradients and self.now:
            self.gradients_are_complete()
        return result

    def _save(self, original: Any, output_dir: Any = None, *rest: Any, **more: Any) -> Any:
        result = original(output_dir, *rest, **more)
        self.model_is_saved(output_dir or self.trainer.args.output_dir)
        return result

    def _trial(self, loss: Any, model: Any, one: Microbatch) -> LossTrial:
        """Ask the trainer's own loss for the slopes of made-up log-probabilities. What it notes of it is forgotten again."""
        trainer, inputs, own = self.trainer, dict(one.inputs), one.logprobs.detach().clone().requires_grad_()  # type: ignore
        mask = loss_mask(inputs)
        inputs["old_per_token_logps"] = moved(own, MOVED)
        if trainer.beta:
            inputs["ref_per_token_logps"] = moved(own, APART)
        signs = 1.0 - 2.0 * (torch.arange(len(own), device=own.device) % 2)
        given = inputs["advantages"]
        inputs["advantages"] = torch.where(given == 0, signs.reshape(-1, *[1] * (given.dim() - 1)), given)

        def scores(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
            return own, torch.zeros_like(own), None

        kept = dict(vars(trainer))
        trainer._metrics = copy.deepcopy(trainer._metrics)
        trainer._get_per_token_logps_and_entropies = scores
        try:
            with unchanged_randomness(), torch.enable_grad():
                (slopes,) = torch.autograd.grad(loss(model, inputs), own)
        finally:
            vars(trainer).update(kept)
        weights = token_weights(trainer, inputs, self.round)
        rows = torch.arange(len(own), device=own.device)[:, None].expand_as(own)
        advantages = inputs["advantages"] if inputs["advantages"].dim() == 2 else inputs["advantages"][:, None]

        def column(tensor: torch.Tensor) -> np.ndarray:
            return numbers(tensor.expand_as(own)[mask])

        return LossTrial(
            rows=rows[mask].cpu().numpy().astype(np.int32),
            logprobs=column(own),
            old_logprobs=column(inputs["old_per_token_logps"]),
            advantages=column(advantages),
            weights=column(weights),
            corrections=column(inputs.get("importance_sampling_ratio", torch.ones_like(own))),
            slopes=column(slopes),
            reference_logprobs=column(inputs["ref_per_token_logps"]) if trainer.beta else None,
        )


def of_all_processes(trainer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the rows of every process, in their order. Each process has to call it, with equal names.

    Rows of tensors are padded with zeros to one width, on the left where the name is of a prompt. What is neither a list nor
    a tensor with rows stays as it is.
    """
    return {name: _joined(trainer.accelerator, name, value) for name, value in given.items()}


def _joined(accelerator: Any, name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _joined(accelerator, key, one) for key, one in value.items()}
    if accelerator.num_processes == 1:
        return value
    if isinstance(value, torch.Tensor) and value.dim():
        value = value.long() if value.dtype == torch.bool else value.detach()
        return accelerator.gather(accelerator.pad_across_processes(value, 1, pad_first=name.startswith("prompt_")))
    if name == "turns":
        every = gather_object([value])
        return [_turn([turns[k] for turns in every if k < len(turns)]) for k in range(max(map(len, every)))]
    return gather_object(value) if isinstance(value, list) else value


def _turn(own: Sequence[Turn]) -> Turn:
    """A turn of all processes, from that of each."""
    logprobs = None if any(one.logprobs is None for one in own) else [p for one in own for p in one.logprobs or ()]
    return Turn([p for one in own for p in one.prompts], [c for one in own for c in one.completions], logprobs)


@contextmanager
def alone() -> Generator[None]:
    """In this context, rewards that TRL computes are those of this process, which waits for no other one."""
    given, grpo_trainer.gather = grpo_trainer.gather, lambda tensor: tensor
    try:
        yield
    finally:
        grpo_trainer.gather = given


def loss_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """[B, C] the tokens that TRL's loss counts."""
    mask = inputs["completion_mask"]
    return (mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]).bool()


def token_weights(trainer: Any, inputs: Mapping[str, Any], made: Round | None) -> torch.Tensor:
    """[B, C] the weight of each token in the loss of this process by TRL's documentation of `loss_type`.

    `made` has the completions of all processes, and the gradient of a step is the mean of those of their losses.
    """
    args, mask, processes = trainer.args, loss_mask(inputs).float(), trainer.accelerator.num_processes
    passes, rows, tokens = trainer.current_gradient_accumulation_steps, len(mask), mask.sum().clamp(min=1)
    match args.loss_type:
        case "dr_grpo":
            return mask / (rows * args.max_completion_length * passes)
        case "bnpo":
            return mask / (tokens * passes)
        case "dapo" | "cispo":
            every = tokens if made is None else loss_mask(made.output).sum().clamp(min=1) / processes
            return mask * args.steps_per_generation / (every * passes)
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / (rows * passes)


@contextmanager
def drawn_from(trainer: Any) -> Generator[Callable[[list[list[int]]], list[np.ndarray] | None]]:
    """In this context, transformers' generate() notes the log-probability of each token that it draws, whatever model draws it.

    Yields a function that gives them for the completions, [n] each; None if they are not known.
    """
    from transformers.generation import GenerationMixin

    calls = 0
    chosen: list[torch.Tensor] = []
    last: list[torch.Tensor] = []

    def of(ids: torch.Tensor) -> torch.Tensor:
        scores = last.pop()
        return scores.gather(1, ids[:, None].to(scores.device))[:, 0].float() - scores.float().logsumexp(-1)

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if last:
            chosen.append(of(input_ids[:, -1]))
        last.append(scores)  # the last of the processors made them, and nothing changes them
        return scores

    def given(completions: list[list[int]]) -> list[np.ndarray] | None:
        steps = len(chosen) + len(last)
        if calls != 1 or not last or max(map(len, completions), default=0) > steps:
            return None
        ends = torch.tensor([ids[steps - 1] if len(ids) == steps else 0 for ids in completions])
        every = torch.stack([*chosen, of(ends)], 1)
        return [numbers(row[: len(ids)]) for row, ids in zip(every, completions, strict=True)]

    make = getattr(GenerationMixin, "_get_logits_processor", None)
    if trainer.use_vllm or trainer.use_transformers_continuous_batching or make is None:
        yield lambda completions: None
        return

    @functools.wraps(make)
    def making(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        processors = make(*args, **more)
        processors.append(note)
        return processors

    GenerationMixin._get_logits_processor = making  # ty: ignore[invalid-assignment]
    try:
        yield given
    finally:
        GenerationMixin._get_logits_processor = make


@contextmanager
def unchanged_randomness() -> Generator[None]:
    """What is drawn at random after this context is what would have been drawn without it."""
    import random

    python, of_numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)


def values(rewards: torch.Tensor) -> np.ndarray:
    """A copy of rewards as float64."""
    return rewards.detach().to("cpu", torch.double, copy=True).numpy()
