"""torch.compile for the policy's decoder layers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.fx.experimental._config
from plumbob.trainer.distributed.base import decoder_layers
from transformers import PreTrainedModel


@contextmanager
def uncompiled() -> Generator[None]:
    """In this context compiled layers run as they are written.

    For passes of a few rows without gradients: to compile the layers for these, beside those with gradients, takes seconds,
    which they never make up for.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def compile_layers(model: PreTrainedModel, kind: str, backend: Any = "inductor") -> None:
    """Compile each decoder layer, to fuse its norms, rotary embeddings, activations and casts.

    At small widths these operations take most of the time, not the matrix products, and launching them one by one takes
    most of the rest. All layers share one compilation, for any number of tokens. A layer that cannot be compiled runs
    uncompiled. With ZeRO-3 nothing is compiled, because it gathers each small module by hooks that a compiler cannot
    trace. FSDP2's hooks are around a layer, so the layer's forward method is compiled inside them.
    """
    dynamo: Any = torch._dynamo.config
    dynamo.suppress_errors = True
    # Otherwise each number of a layer (epsilon, scale of attention or LoRA) is a variable on the CPU, for which inductor
    # looks for a C++ compiler: half a minute in the first step.
    dynamo.specialize_float = True
    # Otherwise two sizes that are equal when a layer is compiled are one variable: a microbatch of 63 pieces, whose bounds are 64
    # numbers, got code for exactly as many pieces where a head has 64 dimensions, and the next one was compiled anew.
    shapes: Any = torch.fx.experimental._config
    shapes.use_duck_shape = False
    # Keep for the backward pass what is expensive to compute again, and recompute what follows from it by elementwise
    # operations, even if that is written to memory twice. This takes a third less memory, and keeps no copies of the
    # weights in bfloat16.
    for ban in ("ban_recompute_materialized_backward", "ban_recompute_used_far_apart"):
        setattr(torch._functorch.config, ban, False)
    # Otherwise the norms' backward pass has one kernel for many tokens and others for few, and a step whose last microbatch is
    # small compiles the layers once more: 9 s of a first step (docs/results/speed.md).
    inductor: Any = torch._inductor.config
    inductor.triton.mix_order_reduction_non_strict_mode = True
    if kind != "zero3":
        # With frozen embeddings, the first layer's input alone needs no gradient: it would be compiled once more.
        model.get_input_embeddings().register_forward_hook(
            lambda _, __, hidden: hidden.requires_grad_(hidden.requires_grad or torch.is_grad_enabled())
        )
    for layer in decoder_layers(model) if kind != "zero3" else ():
        if kind == "fsdp2":
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
        else:
            layer.compile(dynamic=True, backend=backend)
