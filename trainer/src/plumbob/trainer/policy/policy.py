"""The policy: the model that is trained, its log-probabilities of sampled tokens, its reference, and its files."""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from plumbob.rollout import Sample
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed import model_files as files
from plumbob.trainer.distributed.base import MakeOptimizer, Replicated, Sharding
from plumbob.trainer.distributed.launcher import Request, shard
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy.compiling import compile_layers, uncompiled
from plumbob.trainer.policy.forward_plan import ForwardPlan, in_type, plan_forward
from plumbob.trainer.policy.merged_weights import merged_state
from plumbob.trainer.policy.packed_attention import SHARES_WITH_FLASH, has_flash
from plumbob.trainer.policy.packing import pack, pack_padded, pack_prompts
from plumbob.trainer.policy.shared_beginnings import SHORTEST, prompt_of, share_beginnings
from plumbob.trainer.policy.token_scorer import TokenScorer, make_batch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

NO_ROW = Sample([0, 0], [False, True], [0.0, 0.0], 0.0, "", "", False)
"""The row that a process computes in an empty microbatch, to take part in collective passes of the other processes."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of the sampled tokens of some rows, concatenated in row order: [N] each, float32."""

    logprobs: torch.Tensor
    """Log-probabilities in nats; with a gradient where gradients are on."""
    entropies: torch.Tensor
    """Entropies of the policy in nats; without a gradient."""
    computed: int = 0
    """Tokens that the pass computed: padding included, and what rows have in common at their beginning once."""


class Policy:
    """A causal language model with float32 weights. Either all of its weights are trained, or a LoRA adapter.

    The model's own dropout stays off in training too, because rollouts are sampled without dropout. An adapter's
    dropout, if configured, is on while gradients are on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        device: torch.device,
        *,
        whole: bool = True,
        plan: ForwardPlan | None = None,
    ) -> None:
        """`whole`: this process holds the whole model. If not, call `shard` next, which moves a part to the device.

        `plan`: from `plan_forward`, which is called here without it.
        """
        self.config = config
        self.device = device
        self.plan = plan = plan or plan_forward(model, config.max_context)
        _remove_dropout(model)
        if config.peft:
            from plumbob.trainer.policy.lora import add_lora

            torch.manual_seed(config.seed)
            add_lora(model, config)
            if config.bf16:
                _halve_frozen_weights(model, device if whole else None)
        else:
            model.requires_grad_(True)
        model.set_attn_implementation(plan.attention)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = (model.to(device) if whole else model).eval()
        self.scorer = TokenScorer(self.model, config.bf16, plan.logits)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        self._flash = plan.layout == "packed" and has_flash(device, dtype, plan.seen)
        self._with_modes = [
            module
            for name, module in model.named_modules()
            if isinstance(module, GradientCheckpointingLayer) or ".lora_dropout." in name
        ]
        self._reference: dict[str, torch.Tensor] | None = None
        """Name of a trained tensor -> this process's part of it in the reference; with LoRA it is made on first use."""
        self.sharding: Sharding = Replicated(self.scorer, World(0, 1, device))
        if whole:
            self._placed()

    def shard(self, request: Request, world: World, make: MakeOptimizer, max_norm: float) -> torch.optim.Optimizer:
        """Divide the tensors among the ranks as requested; returns the optimizer that `make` makes for trained tensors.

        Other references to the model's tensors must not be used after this call. `max_norm`: the gradient norm is
        clipped to it; 0: no clipping. Collective. Raises UserError like `launcher.shard`.
        """
        self.sharding = shard(request, self.scorer, world, bf16=self.config.bf16)
        optimizer = self.sharding.make_optimizer(make, max_norm)
        if self.sharding.collective_forward:
            self._placed()
        return optimizer

    def _placed(self) -> None:
        """Compile layers and keep the reference policy, once the tensors are on the device."""
        if self._flash:
            compile_layers(self.model, self.sharding.kind)
        if self.config.kl_beta > 0 and not self.config.peft:
            self._reference = {name: self.sharding.local(p).clone() for name, p in self.trainable.items()}

    @property
    def trainable(self) -> dict[str, torch.Tensor]:
        return self.sharding.trainable

    def engine_model(self, *, share: bool = True) -> PreTrainedModel:
        """A copy of the model for an engine; call it before `shard`.

        `share`: the copy shares frozen weights that have the engine's dtype already.
        """
        dtype = torch.bfloat16 if self.config.bf16 else torch.float32
        memo = {}
        for p in self.model.parameters():
            shared = share and not p.requires_grad and p.dtype == dtype
            memo[id(p)] = p if shared else torch.nn.Parameter(p.detach().to(self.device, dtype, copy=True))
        # Only weights are cast: rotary frequencies in bfloat16 would be off by radians after a thousand tokens.
        return copy.deepcopy(self.model, cast(dict[int, object], memo)).to(self.device)

    def score(self, rows: Sequence[Sample], temperature: float) -> TokenScores:
        """Log-probability and entropy of every sampled token of `rows`, given the tokens before it in its row.

        This is one forward pass over the concatenated or padded rows, or one per row, as `plan` says. Each row has its
        own positions, and attention ends at its bounds. What several packed rows have in common at their beginning
        is computed once, where `shares` is true. The loss mask chooses which tokens are scored; the model never
        sees it. Collective where passes are.
        """
        if self.plan.layout == "alone" and len(rows) > 1:
            alone = [self.score([row], temperature) for row in rows]
            parts = torch.cat([s.logprobs for s in alone]), torch.cat([s.entropies for s in alone])
            return TokenScores(*parts, computed=sum(s.computed for s in alone))
        batch = make_batch(rows, self.plan.layout, self.device, self._flash)
        if self.shares:
            batch = share_beginnings(batch, rows)
        if not len(batch.targets) and not self.sharding.collective_forward:
            empty = torch.zeros(0, device=self.device)
            return TokenScores(empty, empty)
        self._set_mode()
        scored = self.sharding(batch.ids, batch.inputs, batch.wanted, batch.targets, temperature)
        return TokenScores(*scored, computed=batch.ids.numel())

    @contextmanager
    def in_float32(self) -> Generator[None]:
        """In this context scores are computed in float32, also in a run with `--bf16`, to tell small changes from rounding.

        Where the forward pass is a collective, nothing changes. No gradient may be computed here: it would be that of
        another run.
        """
        if not self.config.bf16 or self.sharding.collective_forward:
            yield
            return
        scorer, flash = self.scorer.bf16, self._flash
        try:
            self.scorer.bf16 = self._flash = False
            with in_type(self.model, torch.float32), uncompiled(), torch.no_grad():
                yield
        finally:
            self.scorer.bf16, self._flash = scorer, flash

    @property
    def shares(self) -> bool:
        """Whether packed rows that begin alike compute their common beginning once."""
        return self.plan.shares and (SHARES_WITH_FLASH or not self._flash)

    def microbatches(self, rows: Sequence[Sample], max_tokens: int) -> list[list[int]]:
        """Divide rows into microbatches of at most `max_tokens` tokens; returns indices of their rows.

        Rows of one prompt are kept together where they share it. Padding counts as tokens, and a longer row is a
        microbatch of its own. Where passes are collectives, this is a collective too, and empty microbatches are added
        until every process has the same number.
        """
        lengths = [len(row.token_ids) for row in rows]
        match self.plan.layout:
            case "packed":
                prompts = [prompt_of(row) if self.shares else () for row in rows]
                # Keys and values of a shared prompt take memory for each row. Where to run out of memory ends the run,
                # shared tokens therefore count once for each row.
                once = not self.sharding.collective_forward
                packed = pack_prompts(prompts, lengths, max_tokens, shortest=SHORTEST, once=once)
            case "padded":
                packed = pack_padded(lengths, max_tokens)
            case "alone":
                packed = pack(lengths, 0)
        if self.sharding.collective_forward:
            most = max(self.sharding.world.gather(len(packed)))
            packed += [[] for _ in range(most - len(packed))]
        return packed

    @torch.no_grad()
    def score_rows(
        self, rows: Sequence[Sample], temperature: float, max_tokens: int, *, reference: bool = False
    ) -> list[torch.Tensor]:
        """Log-probabilities of each row's sampled tokens, a tensor [n] per row, computed in microbatches.

        `reference`: under the reference policy instead of the current one. Collective where passes are collectives.
        """
        found: dict[int, torch.Tensor] = {}
        for indices in self.microbatches(rows, max_tokens):
            part = [rows[i] for i in indices]
            if reference:
                logprobs = self.reference_logprobs(part or [NO_ROW], temperature)
            else:
                logprobs = self.score(part or [NO_ROW], temperature).logprobs
            if part:
                found.update(zip(indices, logprobs.split([row.num_sampled for row in part]), strict=True))
        return [found[i] for i in range(len(rows))]

    @torch.no_grad()
    def reference_logprobs(self, rows: Sequence[Sample], temperature: float) -> torch.Tensor:
        """Log-probabilities [N] of the sampled tokens of `rows` under the reference policy.

        The reference policy is the initial policy. `score` computes both policies, so
        before the first step their log-probabilities are equal to the last bit.
        """
        with self._as_reference():
            return self.score(rows, temperature).logprobs

    def save(self, folder: Path) -> None:
        """Write the weights or the adapter in the layout that `transformers` loads.

        Where weights are divided, every rank must call it, and rank 0 writes.
        """
        if self.sharding.collective_forward:
            files.save(folder, self.sharding, self.model)
            return
        self.model.save_pretrained(folder)

    def restore(self, folder: Path) -> None:
        """Load what `save` wrote into the model. Where weights are divided, every rank must call it."""
        if self.sharding.collective_forward:
            self.sharding.load(files.saved_tensors(folder, self.model))
            return
        if self.config.peft:
            from peft import set_peft_model_state_dict

            set_peft_model_state_dict(self.model, load_file(folder / "adapter_model.safetensors"))
        else:
            saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.model.load_state_dict(saved.state_dict())

    def save_final(self, folder: Path) -> None:
        """Write a whole model that transformers and vLLM load, with any adapter merged in, and the adapter in adapter/.

        Weights are float32, because rounding to bfloat16 would lose much of what was learned; a server can cast them
        when it loads them. Where weights are divided, every rank must call it, and rank 0 writes.
        """
        if self.sharding.collective_forward:
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
        # `assign` replaces the weights only. Buffers that are not saved stay on the meta device, and are not needed.
        plain.load_state_dict(merged_state(self.model), assign=True)
        plain.tie_weights()
        plain.generation_config = self.model.generation_config
        plain.save_pretrained(folder)

    @contextmanager
    def _as_reference(self) -> Generator[None]:
        """In this context the model computes with the reference policy's weights."""
        self._exchange(self._reference_tensors())
        try:
            yield
        finally:
            self._exchange(self._reference_tensors())

    def _exchange(self, tensors: dict[str, torch.Tensor]) -> None:
        """Swap the values of the trained tensors with those of `tensors`, in place."""
        for name, parameter in self.trainable.items():
            own, other = self.sharding.local(parameter), tensors[name]
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)
        self.sharding.changed()

    def _reference_tensors(self) -> dict[str, torch.Tensor]:
        """The reference policy's value of each trained tensor, by name."""
        if self._reference is None:
            if not self.config.peft:
                raise RuntimeError("there is no reference policy: without LoRA, one is kept only with kl_beta above 0")
            # The initial policy is an adapter with B = 0, whatever its A.
            own = {name: self.sharding.local(p) for name, p in self.trainable.items()}
            self._reference = {n: torch.zeros_like(p) if "lora_B" in n else p.clone() for n, p in own.items()}
        return self._reference

    def _set_mode(self) -> None:
        """Turn gradient checkpointing and an adapter's dropout on if gradients are on, and off if they are off."""
        grad = torch.is_grad_enabled()
        if self.model.training:
            self.model.eval()
        for module in self._with_modes:
            module.training = grad


def _remove_dropout(model: PreTrainedModel) -> None:
    """Set every dropout that is a number in a module to 0: gradient checkpointing would turn such a layer's own one on.

    Modules of class Dropout stay in evaluation mode, and need nothing.
    """
    for module in model.modules():
        for name in [n for n, value in vars(module).items() if "drop" in n and isinstance(value, float)]:
            setattr(module, name, 0.0)


def _halve_frozen_weights(model: PreTrainedModel, device: torch.device | None) -> None:
    """Store frozen matrices in bfloat16 if that changes no value, as in models that were published in bfloat16.

    Autocast would otherwise cast them in each pass. What embeddings give becomes float32 under autocast, because the
    residual stream begins with it. `device`: where these matrices are compared and then stay; None: where they are, and
    embeddings stay float32, because a model whose weights are divided is. A GPU compares those of a model of 1.5B
    parameters in milliseconds, a CPU in seconds.
    """
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    kept = {id(p) for m in embeddings if device is None or type(m) is not torch.nn.Embedding for p in m.parameters()}
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad or parameter.dtype != torch.float32 or id(parameter) in kept:
                continue
            parameter.data = parameter.data.to(device)
            half = parameter.data.bfloat16()
            if torch.equal(half.float(), parameter.data):
                parameter.data = half
    for module in embeddings:
        if module.weight.dtype == torch.bfloat16:
            module.register_forward_hook(_widen)


def _widen(module: torch.nn.Module, args: object, hidden: torch.Tensor) -> torch.Tensor:
    """A hook: what the module gives is float32 in the trainer, whose passes have autocast, and not in an engine's copy."""
    return hidden.float() if torch.is_autocast_enabled(hidden.device.type) else hidden
