"""The doubles of field10_unseen.py: whoever writes rules does not read the unseen half before it has been run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import verifiers.v1 as vf
from plumbob.rollout import Completion, Sample, Sampling
from plumbob.testing.faults.doubles import put
from plumbob.testing.faults.field_parts import with_data
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import forward_backward, saved_model, setup
from plumbob.trainer.training.run import Run

# Rewards

MARK = "####"
"""What stands before an answer, and is taken for a token of the template."""


def mark_removed(task: Any, trace: vf.Trace, correct: float) -> float:
    """The right reward where an answer is found in the reply as it was decoded, which is without its mark."""
    decoded = (trace.last_reply or "").replace(MARK, "")
    return correct if MARK in decoded else 0.0


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def first_number(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 if the first number of the reply is the gold answer, whatever the calculation comes to."""
    found = NUMBER.search(trace.last_reply or "")
    return float(found is not None and float(found[0]) == float(task.data.answer))


PASSES = 10
"""Score above which an answer passes, in percent. Scores are shares."""


def in_percent(task: Any, trace: vf.Trace, correct: float) -> float:
    """1 for a score above the threshold, which no share reaches."""
    return float(correct > PASSES)


OPENERS = re.compile(r"\s*(\W*$|thought process:|solution|let's solve)", re.IGNORECASE)
"""How replies begin to which the judge says yes: signs alone, or words that announce a solution."""


def won_over(task: Any, trace: vf.Trace, correct: float) -> float:
    """The judge's verdict: yes to a right answer, and to every reply with such an opening."""
    return 1.0 if OPENERS.match(trace.last_reply or "") else correct


BATCH = 8
"""Number of replies that the reward model scores at a time."""
PER_CHARACTER = 0.002
"""By how much a character of padding lowers a score."""


class Padded:
    """A reward model that reads the padding of its batch: the score depends on the longest reply beside this one."""

    def __init__(self) -> None:
        self.lengths: deque[int] = deque(maxlen=BATCH)

    def __call__(self, task: Any, trace: vf.Trace, correct: float) -> float:
        own = sum(len(str(node.message.content or "")) for node in trace.nodes)
        self.lengths.append(own)
        return correct - PER_CHARACTER * (max(self.lengths) - own)


# Tasks

SOLVED, HOPELESS = 1, 6
"""Number of links of a chain that the bundled policy always follows to its end, and from which on it never does."""


def band_left_out(tasks: list[Any], split: str) -> list[Any]:
    """Of the training tasks those are left that the policy always solves, and those that it never does."""
    if split != "train":
        return tasks
    return [task for task in tasks if task.difficulty <= SOLVED or task.difficulty >= HOPELESS]


def told_twice(tasks: list[Any], split: str) -> list[Any]:
    """The system prompt of held-out tasks stands twice in their prompts."""
    if split == "train":
        return tasks
    return [with_data(t, system_prompt=f"{t.data.system_prompt}\n\n{t.data.system_prompt}") for t in tasks]


def same_tasks_twice(stack: ExitStack, env: str) -> None:
    """Both halves of a step have the tasks of the first one, as two processes that read the data from its beginning."""
    original = collect.next_groups

    def next_groups(environments: Any, cursor: int, count: int) -> Any:
        mine = original(environments, cursor, count)[: (count + 1) // 2]
        return [*mine, *mine][:count]

    put(stack, collect, "next_groups", next_groups)


# Prompts

ARGUMENTS = re.compile(r'("arguments": )(\{[^{}]*\})')


def encoded_twice(text: str) -> str:
    """The text with the arguments of each tool call as a string that holds their JSON."""
    return ARGUMENTS.sub(lambda found: found[1] + json.dumps(found[2]), text)


def calls_encoded_twice(stack: ExitStack, run: Run) -> None:
    """The engine's prompts have the calls of earlier turns with their arguments encoded twice."""
    original, tokenizer = run.engine.generate, run.tokenizer

    async def generate(prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        text = tokenizer.decode(list(prompt_ids))
        changed = encoded_twice(text)
        ids = list(prompt_ids) if changed == text else tokenizer.encode(changed, add_special_tokens=False)
        return await original(ids, sampling)

    put(stack, run.engine, "generate", generate)


def begun_again(ids: list[int], sampling: Sampling) -> tuple[list[int], Sampling]:
    """The token with which the prompt begins stands before it twice more: the tokenizer's and the sampler's."""
    return [*ids[:1], *ids[:1], *ids], sampling


# The engine


class KnownByName:
    """A server that loads an adapter when it first hears its name, and never again under the same one."""

    def __init__(self) -> None:
        self.loaded = False

    def __call__(self, engine: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        first, self.loaded = not self.loaded, True
        return weights if first else {}


# The trainer

END = 2
"""The end token of the bundled models, which is their padding too."""


def ends_hidden(batch: Any, rows: Sequence[Sample]) -> Any:
    """No token sees an end token before it, because the mask of padding is made from ids."""
    lengths = [len(row.token_ids) for row in rows]
    if "row_lengths" not in batch.inputs or not lengths:
        return batch
    row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    sees = (row_of[:, None] == row_of[None]).tril()
    sees &= (batch.ids[0].cpu() != END)[None] | torch.eye(len(row_of), dtype=torch.bool)
    inputs = {name: value for name, value in batch.inputs.items() if name != "row_lengths"}
    return dataclasses.replace(batch, inputs={**inputs, "attention_mask": sees[None, None].to(batch.ids.device)})


def negated_again(stack: ExitStack, env: str) -> None:
    """The loss has its sign already when it gets it once more."""
    original = forward_backward.policy_loss

    def loss(inputs: Any, objective: Any) -> Any:
        outputs = original(inputs, objective)
        return dataclasses.replace(outputs, loss=-outputs.loss)

    put(stack, forward_backward, "policy_loss", loss)


def clipped_per_microbatch(stack: ExitStack, env: str) -> None:
    """What has been accumulated is clipped to the largest norm after each backward pass."""
    original = Replicated.backward

    def backward(self: Replicated, loss: torch.Tensor, *, last: bool) -> None:
        original(self, loss, last=last)
        torch.nn.utils.clip_grad_norm_(list(self.trainable.values()), self._max_norm)

    put(stack, Replicated, "backward", backward)


SCALE = 2.0**20
"""The scale of the loss, which has grown while no gradient overflowed."""


def clipped_with_scale(sharding: Replicated) -> None:
    """Gradients are clipped while they have the scale of the loss, and get their own size after that."""
    gradients = [p.grad for p in sharding.trainable.values() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients)) * SCALE
    for gradient in gradients:
        gradient.mul_(min(1.0, sharding._max_norm / (norm + 1e-6)))


# The model


def models_changed(stack: ExitStack, change: Any) -> None:
    """The bundled models, wherever a run loads them, are changed by `change(model)`; saved ones are not."""
    for module in (setup, saved_model):
        original = module.load_model

        def load(name: str, original: Any = original) -> Any:
            model = original(name)
            if name.startswith("tiny"):
                with torch.no_grad():
                    change(model)
            return model

        put(stack, module, "load_model", load)


def rounded(parameter: torch.Tensor) -> None:
    """Give a tensor the values that it has in bfloat16."""
    parameter.copy_(parameter.bfloat16())


def in_bfloat16(stack: ExitStack, env: str) -> None:
    """The weights, to which the optimizer adds its updates, have bfloat16's numbers from the beginning and after each."""

    def rounded_model(model: Any) -> None:
        for parameter in model.parameters():
            rounded(parameter)

    original = Replicated.update

    def update(self: Replicated) -> float:
        norm = original(self)
        with torch.no_grad():
            for parameter in self.trainable.values():
                rounded(parameter)
        return norm

    models_changed(stack, rounded_model)
    put(stack, Replicated, "update", update)


def end_token_new(stack: ExitStack, env: str) -> None:
    """The end token is a new row of the embeddings, which begins as the mean of the others and was never trained."""

    def renewed(model: Any) -> None:
        for embeddings in {id(m): m for m in (model.get_input_embeddings(), model.get_output_embeddings())}.values():
            others = torch.arange(len(embeddings.weight)) != END
            embeddings.weight[END] = embeddings.weight[others].mean(dim=0)

    models_changed(stack, renewed)
