"""A decoder's weights, joined where one matrix product can do the work of several.

The tensors are those of a transformers model, which is read by the names of its modules, or copies of them. `Weights.named`
has a view of each under the name that the trainer's parameter has, so a weight sync is a copy in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from plumbob.console import UserError
from transformers import PreTrainedModel


class NotSupported(UserError):
    """The model has a part that this engine does not compute; the message names it."""


@dataclass
class Linear:
    """y = x W^T + b + s (x A^T) B^T, for one or several linear layers whose outputs follow each other."""

    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None
    lora_a: torch.Tensor | None = None
    """[r, in]: of all layers together, one after the other."""
    lora_b: torch.Tensor | None = None
    """[out, r]: zero where a layer's output does not depend on another layer's A."""
    scaling: float = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        # One kernel for the product with B, the scale and the sum.
        return y.addmm_(torch.nn.functional.linear(x, self.lora_a), self.lora_b.t(), alpha=self.scaling)


@dataclass
class Layer:
    """The weights of one decoder layer."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass
class Weights:
    """The weights of a Llama- or Qwen-like decoder, and the shape of its attention."""

    layers: list[Layer]
    embed: torch.Tensor
    """[V, H]"""
    head: torch.Tensor
    """[V, H]; the same tensor as `embed` if they are tied."""
    norm: torch.Tensor
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Factor of attention scores."""
    eps: float
    cos: torch.Tensor
    """[positions, head_dim] float32: the rotary embedding's cosines."""
    sin: torch.Tensor
    dtype: torch.dtype
    named: dict[str, torch.Tensor] = field(default_factory=dict)
    """The trainer's name of each tensor -> its place in the tensors above."""

    @classmethod
    def of(cls, model: PreTrainedModel, positions: int, *, take: bool = False) -> Weights:
        """Copy the weights of `model`. `positions`: the longest context, in tokens. Raises NotSupported.

        `take`: the model's matrices and biases become views of the joined tensors, so that there is one copy of them. What
        else holds these parameters, such as a trainer the frozen ones, computes with the views from then on.
        """
        return _Reader(model, take).read(positions)


class _Reader:
    """Reads a transformers model, and refuses what it does not know."""

    def __init__(self, model: PreTrainedModel, take: bool) -> None:
        self.model, self.take = model, take
        self.names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self.names.update({id(p): name for name, p in model.named_parameters()})  # tied: the trainer's name
        self.named: dict[str, torch.Tensor] = {}
        self.read_parameters: set[int] = set()

    def read(self, positions: int) -> Weights:
        model = self.model
        config: Any = model.config.get_text_config()
        decoder: Any = model.get_decoder()
        head: Any = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise NotSupported("its output embedding has a bias")
        try:
            layers = [self._layer(layer) for layer in decoder.layers]
            first = decoder.layers[0].self_attn
            norm, eps = self._norm(decoder.norm)
        except AttributeError as error:
            raise NotSupported(f"it is not a Llama- or Qwen-like decoder ({error})") from None
        embed = self._copy(decoder.embed_tokens.weight)
        tied = head.weight is decoder.embed_tokens.weight
        weights = Weights(
            layers=layers,
            embed=embed,
            head=embed if tied else self._copy(head.weight),
            norm=norm,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=first.head_dim,
            scale=first.scaling,
            eps=eps,
            cos=torch.empty(0),
            sin=torch.empty(0),
            dtype=embed.dtype,
            named=self.named,
        )
        left = [name for name, p in model.named_parameters() if id(p) not in self.read_parameters]
        if left:
            raise NotSupported(f"it has a weight that this engine does not know ({left[0]})")
        at = torch.arange(positions, device=embed.device)[None]
        cos, sin = decoder.rotary_emb(torch.zeros(1, dtype=torch.float32, device=embed.device), at)
        if cos.shape[-1] != weights.head_dim:
            raise NotSupported("its rotary embedding covers only a part of each head")
        weights.cos, weights.sin = cos[0].float(), sin[0].float()
        return weights

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        activation = getattr(mlp, "act_fn", None)
        if "silu" not in type(activation).__name__.lower() and "silu" not in getattr(activation, "__name__", ""):
            raise NotSupported(f"its activation is {type(activation).__name__}")
        q_norm, k_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return Layer(
            qkv=self._joined(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self._joined(attention.o_proj),
            gate_up=self._joined(mlp.gate_proj, mlp.up_proj),
            down=self._joined(mlp.down_proj),
            input_norm=self._norm(layer.input_layernorm)[0],
            post_norm=self._norm(layer.post_attention_layernorm)[0],
            q_norm=None if q_norm is None else self._norm(q_norm)[0],
            k_norm=None if k_norm is None else self._norm(k_norm)[0],
        )

    def _copy(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return self._place(parameter, parameter.detach() if self.take else parameter.detach().clone())

    def _place(self, parameter: torch.nn.Parameter, where: torch.Tensor) -> torch.Tensor:
        self.read_parameters.add(id(parameter))
        self.named[self.names[id(parameter)]] = where
        return where

    def _norm(self, norm: Any) -> tuple[torch.Tensor, float]:
        """The weight of an RMS norm, in float32, and its epsilon."""
        if not hasattr(norm, "variance_epsilon"):
            raise NotSupported(f"it has a norm of type {type(norm).__name__}")
        return self._place(norm.weight, norm.weight.detach().float().clone()), norm.variance_epsilon

    def _joined(self, *linears: Any) -> Linear:
        """Linear layers of the same input as one."""
        bases = [getattr(linear, "base_layer", linear) for linear in linears]
        weight = self._cat([base.weight for base in bases])
        bias = None
        if any(base.bias is not None for base in bases):
            if not all(base.bias is not None for base in bases):
                raise NotSupported("some of its attention projections have a bias and others do not")
            bias = self._cat([base.bias for base in bases])
        joined = Linear(weight, bias)
        adapted = [(i, linear) for i, linear in enumerate(linears) if hasattr(linear, "lora_A")]
        if adapted:
            self._adapt(joined, [len(base.weight) for base in bases], adapted)
        return joined

    def _cat(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """The rows of all parameters, one after the other."""
        if len(parameters) == 1:
            return self._copy(parameters[0])
        whole = torch.cat([p.detach() for p in parameters])
        for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            self._place(parameter, part)
            if self.take:
                parameter.data = part
        return whole

    def _adapt(self, joined: Linear, outputs: list[int], adapted: list[tuple[int, Any]]) -> None:
        """Add the LoRA adapters of some of the joined layers."""
        pairs = []
        for i, linear in adapted:
            (name,) = linear.active_adapters
            a, b = linear.lora_A[name].weight, linear.lora_B[name].weight
            pairs.append((i, a, b, linear.scaling[name]))
        rank = sum(len(a) for _, a, _, _ in pairs)
        weight = joined.weight
        joined.lora_a = weight.new_zeros(rank, weight.shape[1])
        joined.lora_b = weight.new_zeros(weight.shape[0], rank)
        joined.scaling = pairs[0][3]
        at = 0
        for i, a, b, scaling in pairs:
            if scaling != joined.scaling:
                raise NotSupported("its adapters have different scales")
            start = sum(outputs[:i])
            part_a = joined.lora_a[at : at + len(a)]
            part_b = joined.lora_b[start : start + len(b), at : at + len(a)]
            part_a.copy_(a.detach())
            part_b.copy_(b.detach())
            self._place(a, part_a)
            self._place(b, part_b)
            at += len(a)
