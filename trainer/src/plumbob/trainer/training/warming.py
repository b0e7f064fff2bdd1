"""Compile what a run on a GPU will need in processes of their own, while the run imports, loads its model and samples.

Compiled code goes to the folders in which torch and Triton keep it, where the run finds it: it then traces its layers, but
neither generates nor compiles code for them. Processes and not threads, because tracing is Python, as are imports and rollouts.
If something goes wrong here, the run compiles everything itself, as it does without them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.paged import fused
from plumbob.trainer.inference.paged.engine import PAGE, PagedEngine
from plumbob.trainer.inference.paged.opening import check_exact
from plumbob.trainer.inference.paged.sampling import BLOCK
from plumbob.trainer.inference.paged.weights import NotSupported, Weights
from plumbob.trainer.policy.forward_plan import ForwardPlan, measured_rows, plan_forward
from plumbob.trainer.policy.loading import cast_weights
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.policy.token_logprobs import compile_for
from plumbob.trainer.run_files.model_path import model_path
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL_VOCABULARY = 256
"""Ids of the model that is compiled: no code of a layer depends on how many there are."""


def warm(config: TrainConfig, device: torch.device, part: str, ready: Callable[[], object]) -> None:
    """Compile a part of what a run with these settings computes on `device`, by computing it for a model of one layer.

    `part`: "engine", which is the paged one, or "layers". `ready`: called when all is compiled that a step needs in most runs.
    """
    model, vocab = one_layer(config.model, device)
    plan = plan_forward(model, config.max_context, SMALL_VOCABULARY)
    if part == "layers":
        _train(Policy(model, config, device, plan=plan), config, vocab, ready)
    else:
        _sample(model, plan, config, vocab)


def one_layer(name: str, device: torch.device) -> tuple[PreTrainedModel, int]:
    """The model with random weights, a single layer and few ids, in float32; and how many ids it has in truth."""
    settings: Any = AutoConfig.from_pretrained(model_path(name))
    text = settings.get_text_config()
    vocab, text.vocab_size, text.num_hidden_layers, text.pad_token_id = text.vocab_size, SMALL_VOCABULARY, 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    with device:
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    for parameter in model.parameters():  # as the published weights of most models: see `_halve_frozen_weights`
        parameter.data = parameter.data.bfloat16().float()
    return model, vocab


def _train(policy: Policy, config: TrainConfig, vocab: int, ready: Callable[[], object]) -> None:
    """Forward and backward passes over a microbatch of the usual size, because code is chosen by sizes."""
    length = max(min(config.max_context, config.microbatch_tokens) // 2, 2)
    count, half = max(config.microbatch_tokens // length, 2), length // 2
    prompt, *ends = (row.token_ids for row in measured_rows(SMALL_VOCABULARY, (half, *[length - half] * count)))
    mask = [i >= half for i in range(length)]
    rows = [Sample(prompt + end, mask, [0.0] * length, 0.0, "warm", "", False) for end in ends]
    for _ in range(2):  # the second one finds the gradients of the first
        policy.sharding.backward(policy.score(rows, config.temperature).logprobs.sum(), last=True)
    compile_for(policy.device, vocab, config.temperature, config.bf16)
    ready()
    with torch.no_grad():  # last, because only a step with a reference or several updates needs it
        policy.score(rows[:1], config.temperature)


@torch.no_grad()
def _sample(model: PreTrainedModel, plan: ForwardPlan, config: TrainConfig, vocab: int) -> None:
    """The engine's kernels: in the run's precision, and in float32, in which it is compared with the model.

    In this order, because the run needs the second ones first, and has no time to wait for them. Nothing if the engine does not
    know the model, which is no reason to try it again in the next run.
    """
    exact = copy.deepcopy(model)
    cast_weights(model, torch.bfloat16 if config.bf16 else torch.float32)
    with suppress(NotSupported):
        engine = PagedEngine(Weights.of(model, 2 * PAGE), max_slots=2, max_length=256)
        for tokens in (PAGE, 2 * PAGE):  # several programs read more than a page
            engine.score(measured_rows(SMALL_VOCABULARY, (tokens,))[0].token_ids)
        fused.block_sums(torch.zeros(2, vocab, device=model.device), torch.ones(2, device=model.device), BLOCK)
        check_exact(exact, plan, config.max_context)
