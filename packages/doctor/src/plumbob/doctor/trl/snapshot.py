"""The weights with which a training step of a GRPOTrainer begins, and the plain model with them."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from plumbob.doctor.measuring import numbers
from plumbob.doctor.record import Settings
from plumbob.doctor.reference.model import Plain, Rows, plain_name
from plumbob.doctor.trl.recording import trained
from plumbob.doctor.trl.watching import unchanged_randomness


class Snapshot:
    """A `Live` run as far as the stages of a record of TRL need one. It never writes to the trainer for longer than a call."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, model = trainer, trainer.accelerator.unwrap_model(trainer.model)
        # On the host, because a GPU that trains may have no room for a second set.
        self._all = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
        self._trained = set(trained(trainer))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {name: self._all[name] for name in self._trained}

    def plain(self, settings: Settings) -> Plain:
        """The model of the run in float32, with these weights, without adapter."""
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        # A copy: making a model of a configuration changes how every model of it computes attention.
        config = copy.deepcopy(self.trainer.accelerator.unwrap_model(self.trainer.model).config)
        with unchanged_randomness(), no_init_weights():  # weights drawn at random would take seconds
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        model.tie_weights()
        given = {plain_name(name): tensor for name, tensor in self._all.items()}
        for name, parameter in model.named_parameters():
            parameter.data = given[name].to(self.trainer.accelerator.device, torch.float32)
        return Plain(model.to(self.trainer.accelerator.device).eval(), settings)

    def score(self, rows: Rows, padding: int = 3, *, now: bool = False) -> list[np.ndarray]:
        """The trainer's log-probabilities with these weights, without dropout, in one batch padded on the left.

        `now`: with the weights that the trainer has now.
        """
        trainer, pad = self.trainer, self.trainer._tokenizer.pad_token_id or 0
        batches = [rows] if padding else [[row] for row in rows]
        found = []
        with self._weights({} if now else self._all), torch.no_grad():
            for batch in batches:
                width = max(len(ids) for ids, _ in batch) + padding
                ids = torch.tensor([[pad] * (width - len(ids)) + list(ids) for ids, _ in batch])
                mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in batch])
                given = (ids.to(trainer.accelerator.device), mask.to(trainer.accelerator.device))
                keep = max(len(at) - next((i for i in range(1, len(at)) if at[i]), len(at) - 1) for _, at in batch)
                scores = trainer._get_per_token_logps_and_entropies(trainer.model, *given, keep)[0]
                for own, (_, at) in zip(numbers(scores).astype(float), batch, strict=True):
                    last = np.array(at[1:], bool)[-keep:]
                    found.append(own[len(own) - len(last) :][last])
        return found

    def change(self, rows: Rows) -> float:
        """KL divergence of the policy now from that of these weights, in nats a token (Schulman's k3)."""
        log_ratio = np.concatenate(self.score(rows, now=True)) - np.concatenate(self.score(rows))
        return float((np.expm1(log_ratio) - log_ratio).mean())

    def pads_wrongly(self, rows: Rows, limit: float) -> bool:
        """Whether log-probabilities of rows depend on padding beside them."""
        pairs = zip(self.score(rows), self.score(rows, padding=0), strict=True)
        return max(float(np.abs(a - b).mean()) for a, b in pairs) > limit

    @contextmanager
    def _weights(self, weights: Mapping[str, torch.Tensor]) -> Generator[None]:
        parameters, modules = trained(self.trainer), list(self.trainer.model.modules())
        kept, modes = {name: p.data for name, p in parameters.items()}, [module.training for module in modules]
        try:
            self.trainer.model.eval()
            for name, parameter in parameters.items():
                if name in weights:
                    parameter.data = weights[name].to(parameter.device)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = kept[name]
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
