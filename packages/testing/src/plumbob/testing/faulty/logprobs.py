"""Faults of what engine and trainer compute: other prompts, positions, attention, temperature or precision on one side."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from plumbob.rollout import Sample
from plumbob.testing.faulty import sites as at
from plumbob.testing.faulty.fault import WITH_TOOLS, Fault, table
from plumbob.testing.faulty.sites import UNJUDGED, since
from plumbob.trainer.policy.policy import TokenScores


def messages(change: Callable[[list[str]], list[str]]) -> Callable[[list[int], Any], list[int]]:
    """A change of a prompt's messages, each with its role; the last one is the header of the next turn."""

    def rewrite(ids: list[int], tokenizer: Any) -> list[int]:
        before, *found = tokenizer.decode(ids).split("<|im_start|>")
        changed = change(found) if found else found
        if changed == found:
            return ids
        text = before + "".join(f"<|im_start|>{message}" for message in changed)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return rewrite


def exchanges(found: list[str]) -> tuple[list[str], list[list[str]], list[str]]:
    """(the messages before the model's first turn, its turns with what follows each of them, the last header)."""
    *earlier, header = found
    starts = [i for i, message in enumerate(earlier) if message.startswith("assistant")]
    if not starts:
        return earlier, [], [header]
    parts = [earlier[i:until] for i, until in zip(starts, [*starts[1:], len(earlier)], strict=True)]
    return earlier[: starts[0]], parts, [header]


def earlier_turns_empty(found: list[str]) -> list[str]:
    return [re.sub(r"(?s)^assistant\n.*(?=<\|im_end\|>)", "assistant\n", one) for one in found[:-1]] + found[-1:]


def default_system_prompt(found: list[str]) -> list[str]:
    return [re.sub(r"(?s)^system\n.*(?=<\|im_end\|>)", "system\nYou are a helpful assistant", one) for one in found]


# The model that the engine computes with


def rotary(model: Any) -> Any:
    return model.get_decoder().rotary_emb


def embeddings_scaled(model: Any) -> None:
    rotary(model).attention_scaling *= 1.4159


def later_positions(model: Any) -> None:
    def shift(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        places = kwargs.get("position_ids")
        if places is not None and kwargs["input_ids"].shape[1] == 1:
            kwargs["position_ids"] = places + 1
        return args, kwargs

    model.get_decoder().register_forward_pre_hook(shift, with_kwargs=True)


def head_of(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """The output head becomes a tensor of its own: `change(the embeddings)`. It is a buffer, which no sync writes."""

    def untie(model: Any) -> None:
        head = copy.deepcopy(model.get_output_embeddings())
        del head._parameters["weight"]
        head.register_buffer("weight", change(model.get_input_embeddings().weight.detach().clone()))
        model.set_output_embeddings(head)
        # A tiny model's weights are joined to decode, which a buffer among them would end; a hook keeps its own passes.
        model.get_decoder().register_forward_pre_hook(lambda *_: None)

    return untie


def in_bf16(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def noise_of_version(values: torch.Tensor, requests: list[Any], engine: Any) -> torch.Tensor:
    size, changed = min(0.004 * 2.0 ** max(engine.version - 1, 0), 1.0), values.clone()
    for i, request in enumerate(requests):
        changed[i] += size * torch.randn(changed.shape[1], generator=torch.Generator().manual_seed(request.length))
    return changed


def at_one(logprobs: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor, temperature: float) -> torch.Tensor:
    """The log-probabilities that the tokens have before this temperature."""
    return torch.log_softmax(values * temperature, dim=-1).gather(-1, tokens)


# The trainer's forward pass


def blind(original: Any, policy: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    """The loss mask is used as attention mask: tokens that are not in the loss are replaced by id 0."""
    hidden = [[t if m else 0 for t, m in zip(r.token_ids, r.loss_mask, strict=True)] for r in rows]
    return original(policy, [replace(r, token_ids=ids) for r, ids in zip(rows, hidden, strict=True)], temperature)


def one_row(original: Any, policy: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Packed rows are one sequence."""
    ids = [token for row in rows for token in row.token_ids]
    mask = [m and i > 0 for row in rows for i, m in enumerate(row.loss_mask)]
    joined = replace(rows[0], token_ids=ids, loss_mask=mask, sampling_logprobs=[0.0] * len(ids))
    return original(policy, [joined], temperature)


def ones_after_the_first(rows: Sequence[Sample]) -> list[torch.Tensor]:
    first, *others = (len(row.token_ids) for row in rows)
    return [torch.arange(first), *(torch.ones(length, dtype=torch.long) for length in others)]


def parts(rows: Sequence[Sample], values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The values of each row's sampled tokens."""
    return values.split([sum(row.loss_mask[1:]) for row in rows])


def from_the_start(original: Any, policy: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    masks = ([0 < i <= row.num_sampled for i in range(len(row.token_ids))] for row in rows)
    return original(policy, [replace(row, loss_mask=mask) for row, mask in zip(rows, masks, strict=True)], temperature)


def with_dropout(original: Any, policy: Any, rows: Sequence[Sample], temperature: float) -> TokenScores:
    if not torch.is_grad_enabled():
        return original(policy, rows, temperature)
    with ExitStack() as hooks:
        for name, module in policy.model.named_modules():
            if name.endswith(("embed_tokens", ".mlp")):
                hook = module.register_forward_hook(lambda module, given, out: torch.dropout(out, 0.1, train=True))
                hooks.callback(hook.remove)
        return original(policy, rows, temperature)


# fmt: off
FAULTS = (
*table("logprobs",
    Fault("each turn sampled after the first prompt",
          "Every turn is sampled with the prompt of the first one, while the rows grow by what is said.",
          at.request_text, messages(lambda found: [*exchanges(found)[0], *exchanges(found)[2]]),
          "engine-trainer-mismatch row-not-what-was-sampled", "Gabesarch/grounded-rl#22", WITH_TOOLS,
          run_causes="engine-trainer-mismatch"),
    Fault("earlier turns taken out of later prompts",
          "The chat template takes what the assistant said in earlier turns out of the prompt, and the row has it.",
          at.request_text, messages(earlier_turns_empty),
          "engine-trainer-mismatch row-not-what-was-sampled",
          "verl-project/verl#6854, modelscope/ms-swift#4390", WITH_TOOLS),
    Fault("engine replaces the system prompt by its default",
          "The engine puts its chat template's default system prompt in place of the task's.", at.request_text,
          messages(default_system_prompt), "engine-trainer-mismatch",
          "the review's list, verl-project/verl#6854 (the served prompt is not the trained one)",
          run_causes="engine-trainer-mismatch"),
    Fault("special tokens removed from the engine's prompts",
          "Prompts are decoded without special tokens on their way to the engine, and the trainer's rows have them.",
          at.request_text, lambda ids, tokenizer: [i for i in ids if i not in tokenizer.get_added_vocab().values()],
          "prompt-incomplete engine-trainer-mismatch row-not-what-was-sampled", "unslothai/unsloth#2980",
          run_causes="engine-trainer-mismatch"),
    Fault("beginning token put before the prompt again",
          "Tokenizer and sampler each put the beginning token before a prompt that the template has begun with it.",
          at.request, lambda ids, how: [*ids[:1], *ids[:1], *ids], "engine-trainer-mismatch row-not-what-was-sampled",
          "google/tunix#822, verl-project/verl#3682", run_causes="engine-trainer-mismatch"),
    Fault("engine cuts the end of long prompts",
          "The engine keeps the first 230 tokens of a prompt and drops the rest without saying so.", at.request,
          lambda ids, how: ids[:230], "engine-trainer-mismatch truncated-rollouts",
          "huggingface/trl: max_prompt_length with vLLM; the review's list", ("lookup",),
          run_causes="engine-trainer-mismatch"),
    Fault("temperature of the generation config from the start",
          "The server samples at temperature 0.6, whatever the request says; the trainer scores at 1.", at.sampling,
          lambda how: replace(how, temperature=0.6 if how.temperature else 0.0), "temperature-not-applied",
          "huggingface/trl#4159; the review's table", run_causes="engine-trainer-mismatch"),
    Fault("server restarts with a temperature of 0.6 in mid-run",
          "After a restart in the sixth step the server samples at its generation config's temperature.",
          since(5, at.sampling), lambda how: replace(how, temperature=0.6) if how.temperature else how,
          "temperature-not-applied", "huggingface/trl#4159, NVIDIA-NeMo/RL#3497", steps=12, only="run",
          run_causes="engine-trainer-mismatch"),
    Fault("temperature left out of the trainer's scores",
          "Rollouts are sampled at a temperature by which the trainer does not divide the logits.", at.scores,
          lambda original, policy, rows, temperature: original(policy, rows, 1.0),
          "engine-trainer-mismatch temperature-not-applied", "huggingface/trl#3029", options="--temperature 0.7",
          also=UNJUDGED),
    Fault("raw log-probabilities from an engine below temperature one",
          "The engine samples at temperature 0.6 and reports the log-probabilities from before the temperature.",
          at.reported, lambda logprobs, tokens, values: at_one(logprobs, tokens, values, 0.6),
          "engine-trainer-mismatch temperature-not-applied",
          "thinking-machines-lab/tinker-feedback#148, huggingface/trl#4159", options="--temperature 0.6"),
    Fault("probabilities returned as log-probabilities",
          "The field of the log-probability holds the probability itself.", at.reported,
          lambda logprobs, tokens, values: logprobs.exp(), "engine-trainer-mismatch", "ggml-org/llama.cpp#10783"),
    Fault("requests of a batch leak into each other",
          "What the engine computes for a request depends on the other requests of its batch.", at.logits,
          lambda values, requests, engine: values.lerp(values.roll(1, 0), 0.35),
          "engine-trainer-mismatch attention-or-positions-wrong", "vllm-project/vllm#22103, vllm-project/vllm#17652"),
    Fault("mismatch grows with every sync",
          "The engine's logits differ from the trainer's by an error that doubles with every weight sync.", at.logits,
          noise_of_version, "engine-trainer-mismatch", "vllm-project/vllm#22103, OpenRLHF/OpenRLHF#1155", steps=10,
          only="run"),
    Fault("rotary embeddings scaled in the engine only",
          "The engine ignores the attention factor of the model's settings, and scales rotary embeddings by its "
          "own.", at.engine_model, embeddings_scaled, "engine-trainer-mismatch attention-or-positions-wrong",
          "PrimeIntellect-ai/prime-rl#2802"),
    Fault("decoded positions one too high in the engine",
          "While it decodes, the engine gives each token a position that is one too high; scoring of whole rows "
          "is right.", at.engine_model, later_positions, "attention-or-positions-wrong",
          "huggingface/transformers#44873 (stale position offsets between generation and training)",
          run_causes="engine-trainer-mismatch"),
    Fault("engine attends to the last 128 tokens only",
          "The engine has a sliding window that the trainer's attention does not have.", at.engine_mask,
          lambda mask, queries, keys: mask & (keys > queries - 128),
          "engine-trainer-mismatch truncated-rollouts",
          "vllm-project/vllm#3385, vllm-project/vllm#49202", WITH_TOOLS),
    Fault("loss mask as attention mask from the start",
          "The trainer passes the loss mask as attention mask, in the first weight sync's check too.", at.scores,
          blind, "loss-mask-as-attention-mask", "the predecessor; verifiers' GRPOTrainer, July-October 2025",
          run_causes="engine-trainer-mismatch", also=UNJUDGED),
    Fault("packed rows attend to each other",
          "The trainer's model is not told where packed rows begin, and computes them as one text.", at.scores,
          one_row, "attention-or-positions-wrong", "allenai/open-instruct#1642",
          run_causes="engine-trainer-mismatch"),
    Fault("trainer counts positions of sampled tokens only",
          "The trainer makes positions from the loss mask, as from left padding: context tokens share one position.",
          at.positions, lambda rows: [torch.tensor(row.loss_mask).long().cumsum(0) for row in rows],
          "attention-or-positions-wrong", "NVIDIA-NeMo/Megatron-Bridge#1776 (positions of packed rows)",
          run_causes="engine-trainer-mismatch"),
    Fault("all positions one from the second packed row on",
          "Positions are computed from a mask of ones; later rows of a pack have other numbers in it, and get "
          "position 1.", at.positions, ones_after_the_first, "attention-or-positions-wrong",
          "hiyouga/LlamaFactory#7754", run_causes="engine-trainer-mismatch"),
    Fault("labels shifted by one from the start",
          "The trainer scores each token by the logits of the position before the right one.", at.forward,
          lambda batch, rows: replace(batch, wanted=(batch.wanted - 1).clamp(min=0)),
          "engine-trainer-mismatch loss-differs-from-settings loss-mask-wrong attention-or-positions-wrong",
          "the review's list, pytorch/torchtune#2934", also=UNJUDGED),
    Fault("log-probabilities from the start of the row",
          "The trainer's model ignores which logits are wanted, and those of the first tokens are taken for the "
          "reply's.", at.scores, from_the_start, "engine-trainer-mismatch loss-differs-from-settings loss-mask-wrong",
          "huggingface/trl#3681"),
    Fault("dropout of the checkpoint on in training",
          "The checkpoint's settings have a dropout of a tenth, which is on in training passes and off in rollouts.",
          at.scores, with_dropout, "dropout-in-training", "huggingface/trl#3500",
          run_causes="engine-trainer-mismatch"),
    Fault("adapter dropout of three tenths",
          "The adapter's dropout, useful in other training, is on while gradients are computed and off in rollouts.",
          at.options, None, "dropout-in-training", "magenta/magenta#434, eLifePathways/sciencebeam-gym#10",
          options="--peft --lora-dropout 0.3", run_causes="engine-trainer-mismatch"),
),
*table("sync",
    Fault("tied head served as a copy that syncs never reach",
          "The engine's head is a copy of the first embeddings, and weight syncs write the embeddings only.",
          at.engine_model, head_of(lambda weight: weight), "engine-trainer-mismatch weights-not-synced",
          "NVIDIA-NeMo/labs-molt#26, vllm-project/vllm#9227"),
    Fault("weights served in bfloat16 from the start",
          "The engine holds float32 weights rounded to bfloat16, from its start and after each sync.",
          at.engine_model, in_bf16, "engine-trainer-mismatch weights-not-synced",
          "verl's FAQ, vllm-project/vllm#22103",
          also=(*UNJUDGED,
                (at.weights, lambda sent, engine: {name: tensor.bfloat16().float() for name, tensor in sent.items()}))),
),
)
