"""The plain model: transformers' own forward pass, without packing, attention mask, cache or autocast, and the run beside it.

An adapter is computed by this file, from its definition (arXiv:2106.09685, eq. 3): W x + (alpha / rank) B A x.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from plumbob.doctor.record import Settings
from transformers import AutoModelForCausalLM

Rows = Sequence[tuple[Sequence[int], Sequence[bool]]]
"""(ids [T], which of them are scored [T]) of each row."""
MOST_TOKENS = 4096
"""Rows that are computed together have at most so many tokens, padding included."""


@dataclass(frozen=True)
class Plain:
    """A causal language model in float32."""

    model: Any
    settings: Settings

    def scored(self, rows: Rows, **inputs: Sequence[int]) -> Iterator[list[tuple[int, torch.Tensor, torch.Tensor]]]:
        """(number of a row, logits [n, V] of its scored ids at the settings' temperature, these ids [n]), some rows at a time.

        Rows of about the same length are computed together, padded on the right, which causal attention does not see.
        `inputs`: [T] others of the model's, such as position_ids, where there is one row.
        """
        order, part = sorted(range(len(rows)), key=lambda i: len(rows[i][0])), list[int]()
        for i, after in itertools.zip_longest(order, order[1:]):  # no rows, no parts
            part.append(i)
            if after is not None and (len(part) + 1) * len(rows[after][0]) <= MOST_TOKENS:
                continue
            places = {k: [t for t in range(1, len(rows[k][0])) if rows[k][1][t]] for k in part}
            width = len(rows[i][0])
            ids = torch.tensor([[*map(int, rows[k][0]), *[0] * (width - len(rows[k][0]))] for k in part])
            ids = ids.to(self.model.device)
            keep: dict[str, Any] = {name: ids.new_tensor([[*values]]) for name, values in inputs.items()}
            if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
                keep["logits_to_keep"] = width + 1 - min((p[0] for p in places.values() if p), default=width)
            logits = self.model(input_ids=ids, use_cache=False, **keep).logits
            left = width - logits.shape[1] + 1
            yield [
                (k, logits[j, [t - left for t in own]].float() / self.settings.temperature, ids[j, own])
                for j, (k, own) in enumerate(places.items())
            ]
            part = []

    @torch.no_grad()
    def every(self, rows: Rows, **inputs: Sequence[int]) -> list[np.ndarray]:
        """Log-probabilities [n] in nats of each row's scored ids, each given the ids before it. `inputs`: see `scored`.

        An id that is the first of its row has none.
        """
        parts = self.scored(rows, **inputs)
        found = {i: of_tokens(logits.double(), ids) for part in parts for i, logits, ids in part}
        return [found[i].cpu().numpy() for i in range(len(rows))]

    def trainable(self) -> list[str]:
        """The names of the tensors that the settings train, found from the model and the settings alone.

        Tensors of an adapter have the names MODULE.lora_A and MODULE.lora_B.
        """
        if not self.settings.adapter:
            return [name for name, _ in self.model.named_parameters()]
        linear = [name for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]
        head = next((n for n, m in self.model.named_modules() if m is self.model.get_output_embeddings()), "")
        targets = self.settings.lora_targets
        chosen = [n for n in linear if any(n == target or n.endswith(f".{target}") for target in targets)]
        chosen = [n for n in linear if n != head] if targets == ["all-linear"] else chosen
        return [f"{name}.{which}" for name in chosen for which in ("lora_A", "lora_B")]

    @contextmanager
    def having(self, tensors: Mapping[str, torch.Tensor]) -> Generator[dict[str, torch.Tensor]]:
        """In this context the model has these weights, given by the trainer's names, and computes with their adapter.

        Yields the tensors that a gradient can be asked of, by `plain_name`.
        """
        own = dict(self.model.named_parameters())
        given = {plain_name(name): tensor.detach().to(self.model.device) for name, tensor in tensors.items()}
        leaves: dict[str, torch.Tensor] = {}
        factor = self.settings.lora_alpha / max(self.settings.lora_rank, 1)
        with ExitStack() as undone:
            for name, tensor in given.items():
                if name in own:
                    undone.callback(setattr, own[name], "data", own[name].data)
                    own[name].data = tensor.to(own[name].dtype).clone()
                    leaves[name] = own[name]
                elif name.endswith(".lora_A"):
                    module = name.removesuffix(".lora_A")
                    a = leaves[name] = tensor.float().clone().requires_grad_()
                    b = leaves[f"{module}.lora_B"] = given[f"{module}.lora_B"].float().clone().requires_grad_()
                    undone.enter_context(self.model.get_submodule(module).register_forward_hook(_adapter(a, b, factor)))
            yield leaves

    def gradient(
        self,
        rows: Sequence[tuple[Sequence[int], Sequence[bool], np.ndarray]],
        adapter: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Gradient of sum_t slope_t logprob_t over rows, each (ids [T], which are scored [T], slopes [n]), by autograd.

        `adapter`: trained tensors by the trainer's names, with an adapter or where weights are not those of the file.
        """
        self.model.requires_grad_(not self.settings.adapter)
        self.model.zero_grad()
        with self.having(adapter or {}) as leaves:
            wanted = leaves if self.settings.adapter else dict(self.model.named_parameters())
            for part in self.scored([(ids, at) for ids, at, _ in rows]):
                sums = [of_tokens(logits, ids) @ torch.from_numpy(rows[i][2]).to(logits) for i, logits, ids in part]
                torch.stack(sums).sum().backward()
            return {name: p.grad for name, p in wanted.items() if p.grad is not None}


def of_tokens(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n] of `tokens` [n] under logits [n, V]."""
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def load(settings: Settings) -> Plain:
    """The model that the run began with, in float32. Raises OSError if it cannot be read."""
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, attn_implementation="eager")
    return Plain(model.eval(), settings)


def plain_name(name: str) -> str:
    """The name of a trained tensor without what libraries of adapters add to it."""
    return re.sub(r"(\.lora_[AB]).*", r"\1", re.sub(r"base_model\.model\.|\.base_layer", "", name))


def _adapter(a: torch.Tensor, b: torch.Tensor, factor: float) -> Any:
    return lambda module, inputs, output: output + factor * ((inputs[0] @ a.T) @ b.T)


class Live(Protocol):
    """A run between two training steps: what a trainer must offer, so that stages can be examined that no record shows."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> trained tensor. What is written into it takes effect with `changed`."""

    def changed(self) -> None:
        """Weights were written to."""

    def undone(self) -> AbstractContextManager[object]:
        """A context at whose end weights and the optimizer's state are as before."""

    def sync(self) -> None:
        """Send the weights to the engine as after a training step. A refusal for differing numbers is no error here."""

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, seed: int) -> list[tuple[list[int], list[float]]]:
        """(ids, log-probabilities) of one completion of each prompt by the engine, at the run's temperature."""

    def score(self, rows: Rows) -> list[np.ndarray]:
        """The trainer's log-probabilities, [n] each, of rows (ids [T], which of them are scored [T]), computed as in training."""

    def save(self, folder: Path) -> None:
        """Write the model that a run leaves at its end."""
