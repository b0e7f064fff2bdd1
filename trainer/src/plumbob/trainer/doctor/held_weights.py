"""Which weights do engine and trainer hold, and is the output head tied to the embeddings where the model says so?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.policy.loading import load_model


def other_weights(subject: Subject, *, updated: bool = False) -> tuple[str, str] | None:
    """(cause, evidence) if engine and trainer hold other weights; None if not, or if the engine is a server.

    `updated`: whether the trainer's are those of an update. Then old ones are as near to them as those of low precision.

    All tensors are compared, not only the trained ones, and output embeddings with input embeddings where the model's
    configuration says that they are the same.
    """
    policy, served = subject.run.policy, subject.run.engine.served_weights()
    if (trainer := _untied(policy.model)) is not None:
        return "head-not-tied", f"in the trainer, {trainer}"
    if served is None:
        return None
    own = dict(policy.model.named_parameters())
    if (name := head_name(policy.model)) and name not in own and name in served:
        inputs: Any = policy.model.get_input_embeddings()
        if not _equal(served[name], inputs.weight):
            return "head-not-tied", (
                f"the engine computes logits with a tensor {name} of its own, and the trainer with the input embeddings"
            )
    differ = [n for n, p in own.items() if n in served and not _equal(served[n], p)]
    missing = [n for n in own if n not in served]
    if differ or missing:
        first = ", ".join([*differ, *missing][:3])
        if not missing and all(_equal(served[n], own[n].detach().bfloat16().float()) for n in differ):
            return "merged-in-bf16", f"{len(differ)} of {len(own)} tensors are rounded to bfloat16 in the engine"
        evidence = f"{len(differ) + len(missing)} of {len(own)} tensors differ, first {first}"
        if not missing and _of_the_trainer(subject, differ, own, served):
            return (
                "engine-trainer-mismatch",
                f"{evidence}; the engine's are those of the model on disk, and the trainer's are not",
            )
        apart = math.inf if missing or updated else max(_apart(served[n], own[n]) for n in differ)
        if apart <= thresholds.ROUNDED_WEIGHTS:
            evidence += f", by up to {apart:.2g} of their size, as weights of low precision do"
        # Whether they were loaded, divided, converted or sent otherwise, the tensors do not tell.
        return "engine-trainer-mismatch", evidence
    return None


def _of_the_trainer(
    subject: Subject, names: Sequence[str], own: Mapping[str, torch.Tensor], served: Mapping[str, torch.Tensor]
) -> bool:
    """Whether the engine holds these tensors as they are on disk, and the trainer holds none of them so."""
    disk = dict(load_model(subject.run.config.model).named_parameters())
    known = [(name, disk.get(name.replace(".base_layer.", "."))) for name in names]
    return all(
        tensor is not None and _equal(served[name], tensor) and not _equal(own[name], tensor) for name, tensor in known
    )


def head_name(model: Any) -> str | None:
    """Name of the weight of the model's output embeddings, whether or not it is tied; None if it has none."""
    head = model.get_output_embeddings()
    name = next((n for n, module in model.named_modules() if module is head), None)
    return None if name is None else f"{name}.weight"


def is_tied(model: Any) -> bool:
    """Whether the configuration says that output embeddings are the input embeddings."""
    return bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))


def _untied(model: Any) -> str | None:
    """What is wrong with a model whose configuration ties its embeddings; None if nothing is."""
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not is_tied(model) or head.weight is inputs.weight or _equal(head.weight, inputs.weight):
        return None
    return "output embeddings differ from input embeddings, which the model's configuration says are the same"


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference of two tensors, relative to that of the second; infinite if they have other shapes."""
    if a.shape != b.shape:
        return math.inf
    first, second = (x.detach().double().cpu() for x in (a, b))
    return ((first - second).norm() / second.norm().clamp(min=1e-30)).item()


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both hold the same numbers, in the precision of the first."""
    return a.shape == b.shape and torch.equal(a.detach().float().cpu(), b.detach().to(a.dtype).float().cpu())
