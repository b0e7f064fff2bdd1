"""The model that is trained: log-probabilities of sampled tokens, its reference, and its files."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch._functorch.config
from peft import set_peft_model_state_dict
from plumbob.rollout import Sample
from plumbob.trainer import attention
from plumbob.trainer.config import TrainConfig
from plumbob.trainer.lora import add_lora, merged_state
from plumbob.trainer.packing import to_device
from plumbob.trainer.ranks import Ranks
from plumbob.trainer.scoring import score_tokens
from plumbob.trainer.sharding import MakeOptimizer, Replicated, Request, Sharding, files, shard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

REFERENCE_FILE = "reference.safetensors"


@dataclass(frozen=True)
class TokenScores:
    """Per sampled token of some rows, concatenated in row order: [N] each, float32."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    """In nats; without a gradient."""


class TokenScorer(torch.nn.Module):
    """Model and scoring as one module, whose forward is the only way in: what shards parameters wraps it whole."""

    def __init__(self, model: PreTrainedModel, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self.bf16 = bf16

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        bounds: dict[str, Any],
        wanted: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """ids, positions [1, T] of rows end to end, whose bounds `attention.row_bounds` gave -> [N] and [N].

        `wanted` [N]: the positions whose logits score `targets` [N].
        """
        # Here and not around it: DeepSpeed ends an autocast that it finds around a module's forward pass.
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.bf16):
            decoder = self.model.get_decoder()
            output = decoder(input_ids=ids, position_ids=positions, use_cache=False, **bounds)
            hidden = output.last_hidden_state[0][wanted]
            head = cast(Any, self.model.get_output_embeddings())
            weight = head.weight
            if getattr(head, "bias", None) is not None:  # a weight of a feature that is always 1
                weight = torch.cat([weight, head.bias[:, None]], dim=1)
                hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
            return score_tokens(hidden, weight, targets, temperature)


class Policy:
    """A causal language model with float32 weights, all of which or an adapter of which are trained.

    Its own dropout stays off in training too: what it drew was drawn without. Only an adapter's dropout, if one is
    configured, is on while gradients are.
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainConfig, device: torch.device, *, whole: bool = True
    ) -> None:
        """`whole`: this process holds all of the model. Else `shard` must follow, which puts its part onto the device."""
        self.config = config
        self.device = device
        if config.peft:
            torch.manual_seed(config.seed)
            add_lora(model, config)
            if config.bf16:
                _halve_frozen_weights(model)
        else:
            model.requires_grad_(True)
        model.set_attn_implementation(attention.NAME)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = (model.to(device) if whole else model).eval()
        self.scorer = TokenScorer(self.model, config.bf16)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        text = model.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._flash = attention.has_flash(device, torch.bfloat16 if config.bf16 else torch.float32, head_dim)
        self._with_modes = [
            module
            for name, module in model.named_modules()
            if isinstance(module, GradientCheckpointingLayer) or ".lora_dropout." in name
        ]
        self._reference: dict[str, torch.Tensor] | None = None
        """The reference's values of what is trained, by name; an adapter's are made when they are first wanted."""
        self._reference_moved = False
        self.sharding: Sharding = Replicated(self.scorer, Ranks(0, 1, device))
        if whole:
            self._placed()

    def shard(self, request: Request, ranks: Ranks, make: MakeOptimizer, max_norm: float) -> torch.optim.Optimizer:
        """Divide the tensors among the ranks as asked, with the optimizer that `make` makes of what is trained.

        Nothing that holds one of the tensors from before may be used after it.
        """
        self.sharding = shard(request, self.scorer, ranks, bf16=self.config.bf16)
        optimizer = self.sharding.make_optimizer(make, max_norm)
        if self.sharding.lockstep:
            self._placed()
        return optimizer

    def _placed(self) -> None:
        if self._flash:
            _compile_layers(self.model, self.sharding.kind)
        if self.config.kl_beta > 0 and not self.config.peft:
            self._reference = {name: self.sharding.local(p).clone() for name, p in self.trainable.items()}

    @property
    def trainable(self) -> dict[str, torch.Tensor]:
        return self.sharding.trainable

    def engine_model(self, *, share: bool = True) -> PreTrainedModel:
        """A copy for the engine to own, made before `shard`. `share`: frozen weights of its dtype are not copied."""
        dtype = torch.bfloat16 if self.config.bf16 else torch.float32
        memo = {}
        for p in self.model.parameters():
            shared = share and not p.requires_grad and p.dtype == dtype
            memo[id(p)] = p if shared else torch.nn.Parameter(p.detach().to(self.device, dtype, copy=True))
        # Weights only: rotary frequencies in bfloat16 would be off by radians a thousand tokens on.
        return copy.deepcopy(self.model, cast(dict[int, object], memo)).to(self.device)

    def score(self, rows: Sequence[Sample], temperature: float) -> TokenScores:
        """Log-probability and entropy of every sampled token of `rows`, given all that stands before it in its row.

        One forward pass over all rows end to end, each with positions of its own; attention ends at a row's bounds. The
        loss mask chooses which positions are scored and is nothing the model ever sees.
        """
        lengths = [len(row.token_ids) for row in rows]
        ids = torch.tensor([t for row in rows for t in row.token_ids], dtype=torch.long)
        positions = torch.cat([torch.arange(n) for n in lengths]) if lengths else ids
        # The logits that score token t are computed at t - 1; a row's first token is nobody's prediction.
        sampled = torch.tensor([m for row in rows for m in row.loss_mask], dtype=torch.bool) & (positions > 0)
        at = sampled.nonzero()[:, 0]
        if not len(at) and not self.sharding.lockstep:
            empty = torch.zeros(0, device=self.device)
            return TokenScores(empty, empty)
        targets, wanted = ids[at], at - 1
        ids, positions, wanted, targets = (
            to_device(x, self.device) for x in (ids[None], positions[None], wanted, targets)
        )
        self._set_mode()
        bounds = attention.row_bounds(lengths, self.device, self._flash)
        return TokenScores(*self.sharding(ids, positions, bounds, wanted, targets, temperature))

    @torch.no_grad()
    def reference_logprobs(self, rows: Sequence[Sample], temperature: float) -> torch.Tensor:
        """[N], under the reference: the initial policy, or what `sync_reference` made of it.

        The same code on the same weights as `score`: before the first step the two are equal to the last bit.
        """
        with self._as_reference():
            return self.score(rows, temperature).logprobs

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> None:
        """reference += alpha (policy - reference), for each trained tensor; of an adapter, for A and B each."""
        reference = self._reference_tensors()
        for name, parameter in self.trainable.items():
            reference[name].lerp_(self.sharding.local(parameter), alpha)
        self._reference_moved = True

    def save(self, folder: Path) -> None:
        """Weights or adapter in the layout that `transformers` loads; a reference that has moved beside them.

        In lockstep every rank calls it and rank 0 writes; a moved reference is in each rank's `reference_state`.
        """
        if self.sharding.lockstep:
            files.save(folder, self.sharding, self.model)
            return
        self.model.save_pretrained(folder)
        if self._reference is not None and self._reference_moved:
            save_file({k: v.contiguous() for k, v in self._reference.items()}, folder / REFERENCE_FILE)

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote into the live model."""
        if self.sharding.lockstep:
            self.sharding.load(files.saved_tensors(folder, self.model))
            return
        if self.config.peft:
            set_peft_model_state_dict(self.model, load_file(folder / "adapter_model.safetensors"))
        else:
            saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.model.load_state_dict(saved.state_dict())
        if (folder / REFERENCE_FILE).is_file():
            self._reference = load_file(folder / REFERENCE_FILE, device=str(self.device))
            self._reference_moved = True

    def reference_state(self) -> dict[str, torch.Tensor]:
        """This rank's part of a reference that has moved."""
        return dict(self._reference or {}) if self._reference_moved else {}

    def restore_reference(self, state: dict[str, torch.Tensor]) -> None:
        if state:
            self._reference, self._reference_moved = {n: t.to(self.device) for n, t in state.items()}, True

    def save_final(self, folder: Path) -> None:
        """A whole model in float32 that transformers and vLLM load, an adapter merged into it; the adapter in adapter/.

        float32, because rounding to bfloat16 would lose much of what was learned; a server that wants bfloat16 casts it.
        In lockstep every rank calls it and rank 0 writes.
        """
        if self.sharding.lockstep:
            if self.config.peft:
                files.save(folder / "adapter", self.sharding, self.model)
            files.save_merged(folder, self.sharding, self.model)
            return
        if self.config.peft:
            self.model.save_pretrained(folder / "adapter")
        plain_config = copy.deepcopy(self.model.config)
        plain_config.dtype = torch.float32
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(plain_config)
        # The shell of it only: buffers that are not saved stay on the meta device, and nobody needs them.
        plain.load_state_dict(merged_state(self.model), assign=True)
        plain.tie_weights()
        plain.generation_config = self.model.generation_config
        plain.save_pretrained(folder)

    @contextmanager
    def _as_reference(self) -> Generator[None]:
        """The live model with the reference's values in the places of its own."""
        self._exchange(self._reference_tensors())
        try:
            yield
        finally:
            self._exchange(self._reference_tensors())

    def _exchange(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.trainable.items():
            own, other = self.sharding.local(parameter), tensors[name]
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)
        self.sharding.changed()

    def _reference_tensors(self) -> dict[str, torch.Tensor]:
        if self._reference is None:
            if not self.config.peft:
                raise RuntimeError("a policy of full weights keeps a reference only with kl_beta above 0")
            # No adapter is one with B = 0, whatever its A. With the policy's A, `sync_reference` gives alpha times the
            # policy's own update at its first call.
            own = {name: self.sharding.local(p) for name, p in self.trainable.items()}
            self._reference = {n: torch.zeros_like(p) if "lora_B" in n else p.clone() for n, p in own.items()}
        return self._reference

    def _set_mode(self) -> None:
        grad = torch.is_grad_enabled()
        if self.model.training:
            self.model.eval()
        for module in self._with_modes:
            module.training = grad


def _halve_frozen_weights(model: PreTrainedModel) -> None:
    """Keep frozen matrices in bfloat16 where that loses nothing, as it does not for models published in bfloat16.

    Autocast would cast them so in each pass. Embeddings and norms stay float32: the residual stream begins there.
    """
    tied = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        for parameter in module.parameters(recurse=False):
            half = parameter.data.bfloat16()
            if not parameter.requires_grad and id(parameter) not in tied and torch.equal(half.float(), parameter.data):
                parameter.data = half


def _compile_layers(model: PreTrainedModel, kind: str) -> None:
    """Fuse norms, rotary embeddings, activations and casts of each decoder layer: at small widths they, not the matrix
    products, take most of the time, and launching them one by one most of the rest.

    All layers share one compilation, for any number of tokens. What cannot be compiled runs as it is. ZeRO-3 gathers
    each small module by hooks of its own, which no compiler looks through; FSDP2's are around a layer.
    """
    torch._dynamo.config.suppress_errors = True
    # For the backward pass keep what is expensive to compute again, not what follows from it by elementwise operations,
    # even if that is written to memory a second time: a third less memory, and no copies of the weights in bfloat16.
    for ban in ("ban_recompute_materialized_backward", "ban_recompute_used_far_apart"):
        setattr(torch._functorch.config, ban, False)
    for layer in getattr(model.get_decoder(), "layers", ()) if kind != "zero3" else ():
        if kind == "fsdp2":
            layer.forward = torch.compile(layer.forward, dynamic=True)
        else:
            layer.compile(dynamic=True)
