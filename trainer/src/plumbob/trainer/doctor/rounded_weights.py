"""What the trainer would compute with weights that were rounded to bfloat16 on their way to the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

import torch
from peft.tuners.lora import LoraLayer
from plumbob.trainer.doctor.subject import Subject


def rounded_scores(subject: Subject, score: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    """`score()` with the trained tensors rounded to bfloat16; with LoRA, also with each adapter merged into a rounded matrix."""
    policy = subject.run.policy
    with ExitStack() as stack:
        for parameter in policy.trainable.values():
            stack.enter_context(_replaced(policy.sharding.local(parameter), lambda t: t.bfloat16()))
        policy.sharding.changed()
        yield score()
    layers = [m for m in policy.model.modules() if isinstance(m, LoraLayer) and m.active_adapters]
    if layers:
        with ExitStack() as stack:
            for layer in layers:
                for name in layer.active_adapters:
                    delta = layer.get_delta_weight(name).detach()
                    base = layer.get_base_layer().weight
                    stack.enter_context(_replaced(base, lambda t, add=delta: (t + add).bfloat16()))
                    stack.enter_context(_replaced(layer.lora_B[name].weight, torch.zeros_like))
            policy.sharding.changed()
            yield score()
    policy.sharding.changed()


@contextmanager
def _replaced(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Generator[None]:
    """Hold `change(tensor)`, converted to the tensor's own precision, in the tensor."""
    kept = tensor.detach().clone()
    with torch.no_grad():
        tensor.copy_(change(kept).to(kept.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(kept)
