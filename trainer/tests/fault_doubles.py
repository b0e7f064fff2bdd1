"""Doubles of the parts of a run, each wrong in the way of a real trainer. Each lives as long as the stack it is given."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Chat, Sample, to_sample
from plumbob.rollout import verifiers_adapter as adapter
from plumbob.trainer import rollouts, step
from plumbob.trainer.doctor.probes.tokens import header_text
from plumbob.trainer.engine import TransformersEngine
from plumbob.trainer.policy import TokenScores
from plumbob.trainer.setup import Run
from plumbob.trainer.sync import sync_weights

Inject = Callable[[ExitStack, Run], None]


def put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, value, create=not hasattr(owner, name)))


# The trained row


def rewritten(rewrite: Callable[[Run, vf.Trace, Sample], Sample]) -> Inject:
    """Every row is rewritten between rollout and training."""

    def inject(stack: ExitStack, run: Run) -> None:
        put(stack, rollouts, "to_sample", lambda trace, group: rewrite(run, trace, to_sample(trace, group)))

    return inject


def _select(sample: Sample, keep: Sequence[bool]) -> Sample:
    def kept(values: Sequence[Any]) -> list[Any]:
        return [v for v, k in zip(values, keep, strict=True) if k]

    return dataclasses.replace(
        sample,
        token_ids=kept(sample.token_ids),
        loss_mask=kept(sample.loss_mask),
        sampling_logprobs=kept(sample.sampling_logprobs),
    )


def without_headers(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The header before every turn but the first is dropped: verifiers' GRPOTrainer, July-October 2025."""
    length = len(run.tokenizer.encode(header_text(run.tokenizer), add_special_tokens=False))
    mask = sample.loss_mask
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    dropped = {i for start in starts[1:] for i in range(start - length, start)}
    return _select(sample, [i not in dropped for i in range(len(mask))])


def without_tools(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The prompt is rendered again, without the tools: verifiers' GRPOTrainer, July-October 2025."""
    opening = list(itertools.takewhile(lambda node: not node.sampled, trace.nodes))
    prompt = run.chat.prompt([adapter.to_wire(node.message) for node in opening], tools=[]).token_ids
    start = sample.loss_mask.index(True)
    return dataclasses.replace(
        sample,
        token_ids=[*prompt, *sample.token_ids[start:]],
        loss_mask=[False] * len(prompt) + sample.loss_mask[start:],
        sampling_logprobs=[0.0] * len(prompt) + sample.sampling_logprobs[start:],
    )


def tools_trained(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    start = sample.loss_mask.index(True)
    return dataclasses.replace(sample, loss_mask=[i >= start for i in range(len(sample.loss_mask))])


def earlier_turns_masked(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """Only the last turn is trained on."""
    start = max(i for i in range(1, len(sample.loss_mask)) if sample.loss_mask[i] and not sample.loss_mask[i - 1])
    return dataclasses.replace(sample, loss_mask=[m and i >= start for i, m in enumerate(sample.loss_mask)])


def retokenised(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """Turns are parsed and rendered again, with the spaces that another JSON writer puts."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    rows = zip(sample.token_ids, sample.loss_mask, sample.sampling_logprobs, strict=True)
    for sampled, part in itertools.groupby(rows, key=lambda row: row[1]):
        span, _, drawn = (list(column) for column in zip(*part, strict=True))
        if sampled:
            text = run.tokenizer.decode(span).replace('": ', '":')
            span = run.tokenizer.encode(text, add_special_tokens=False)
            drawn = (drawn + [-1.0] * len(span))[: len(span)]
        ids, mask, logprobs = [*ids, *span], [*mask, *[sampled] * len(span)], [*logprobs, *drawn]
    return dataclasses.replace(sample, token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs)


def row_cut(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The trainer keeps the end of a row, as --max-prompt-length of other trainers does."""
    cut = _select(sample, [i >= len(sample.token_ids) // 2 for i in range(len(sample.token_ids))])
    return dataclasses.replace(cut, loss_mask=[False, *cut.loss_mask[1:]])


def groups_shuffled(stack: ExitStack, run: Run) -> None:
    """Rollouts are dealt to groups in turn: PeterGriffinJin/Search-R1#88."""
    count = itertools.count()

    def shuffled(trace: vf.Trace, group: str) -> Sample:
        groups = run.rollouts_per_step // run.config.num_generations
        return to_sample(trace, f"{group.split('/')[0]}/{next(count) % groups}")

    put(stack, rollouts, "to_sample", shuffled)


# What the model is shown


class HeaderlessChat(Chat):
    """Forgets to open the assistant's next turn."""

    def suffix(self, messages: list[dict[str, Any]]) -> Any:
        rendered = super().suffix(messages)
        end = rendered.ends[-1]
        return dataclasses.replace(rendered, token_ids=rendered.token_ids[:end], is_content=rendered.is_content[:end])


class ToollessChat(Chat):
    """A chat template that has no place for tools."""

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        return super().prompt(messages, [])


def chat_of(cls: type[Chat], **changes: Any) -> Inject:
    def inject(stack: ExitStack, run: Run) -> None:
        fields: dict[str, Any] = {f.name: getattr(run.chat, f.name) for f in dataclasses.fields(Chat)}
        fields.update(_memory={}, **changes)
        run.chat = cls(**fields)

    return inject


def stops_at(text: str) -> Inject:
    def inject(stack: ExitStack, run: Run) -> None:
        (token,) = run.tokenizer.encode(text, add_special_tokens=False)
        chat_of(Chat, stop_token_ids=(token,))(stack, run)

    return inject


# The trainer's scores


def scored(score: Callable[[Callable[..., TokenScores], Sequence[Sample], float], TokenScores]) -> Inject:
    def inject(stack: ExitStack, run: Run) -> None:
        original = run.policy.score
        put(stack, run.policy, "score", lambda rows, temperature: score(original, rows, temperature))

    return inject


def blind(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Whatever is not in the loss is not seen: the loss mask as attention mask."""
    blanked = [[t if m else 0 for t, m in zip(r.token_ids, r.loss_mask, strict=True)] for r in rows]
    return original([dataclasses.replace(r, token_ids=ids) for r, ids in zip(rows, blanked, strict=True)], temperature)


def one_row(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Packed rows attend across their bounds."""
    mask = [m and i > 0 for r in rows for i, m in enumerate(r.loss_mask)]
    ids = [t for r in rows for t in r.token_ids]
    joined = dataclasses.replace(rows[0], token_ids=ids, loss_mask=mask, sampling_logprobs=[0.0] * len(ids))
    return original([joined], temperature)


def detached(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    scores = original(rows, temperature)
    return TokenScores(scores.logprobs.detach(), scores.entropies)


# The engine


def generating(change: Callable[[list[int], Any], tuple[list[int], Any]]) -> Inject:
    """The engine draws for another prompt or with other sampling than it was asked."""

    def inject(stack: ExitStack, run: Run) -> None:
        original = run.engine.generate
        put(stack, run.engine, "generate", lambda ids, sampling: original(*change(list(ids), sampling)))

    return inject


def adapter_not_applied(stack: ExitStack, run: Run) -> None:
    """The engine's adapter takes every sync and counts for nothing: huggingface/trl#2856."""
    for module in lora_layers(run).values():
        put(stack, module, "scaling", dict.fromkeys(module.scaling, 0.0))


def adapter_unbound(stack: ExitStack, run: Run) -> None:
    """Names that the engine does not know are skipped without a word, and it knows none: verl-project/verl-omni#552."""
    original = run.engine.update
    put(stack, run.engine, "update", lambda weights: original({}))


def one_name_skipped(stack: ExitStack, run: Run) -> None:
    """The engine skips a name that it does not know, and one layer's is of another spelling."""
    original, skipped = run.engine.update, "layers.0.mlp.down_proj"
    put(stack, run.engine, "update", lambda weights: original({n: w for n, w in weights.items() if skipped not in n}))


def engine_of(run: Run) -> TransformersEngine:
    assert isinstance(run.engine, TransformersEngine)
    return run.engine


def lora_layers(run: Run) -> dict[str, Any]:
    return {name: m for name, m in engine_of(run).model.named_modules() if isinstance(m, LoraLinear)}


def published_in_bf16(run: Run) -> None:
    """Make the model one whose weights were published in bfloat16: rounding it then loses nothing."""
    with torch.no_grad():
        for parameter in run.policy.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
        for parameter in engine_of(run).model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    sync_weights(run.policy, run.engine, run.parity_row)


def merged_in_bf16(stack: ExitStack, run: Run) -> None:
    """Every sync merges the adapter into base weights that are kept in bfloat16: huggingface/trl#6688."""
    published_in_bf16(run)
    layers = lora_layers(run)
    bases = {name: m.base_layer.weight.detach().clone() for name, m in layers.items()}
    original = run.engine.update

    @torch.no_grad()
    def update(weights: Any) -> int:
        version = original(weights)
        for name, module in layers.items():
            (adapter_name,) = module.lora_A.keys()
            merged = (bases[name] + module.get_delta_weight(adapter_name)).bfloat16().float()
            module.base_layer.weight = torch.nn.Parameter(merged, requires_grad=False)  # the policy shares the old one
            for part in (module.lora_A, module.lora_B):  # an engine that merges has none
                part[adapter_name].weight.zero_()
        return version

    put(stack, run.engine, "update", update)


def rounded_weights_served(stack: ExitStack, run: Run) -> None:
    """Full weights go over in bfloat16."""
    published_in_bf16(run)
    original = run.engine.update
    put(
        stack,
        run.engine,
        "update",
        lambda weights: original({name: w.bfloat16().float() for name, w in weights.items()}),
    )


def stale_engine(stack: ExitStack, run: Run) -> None:
    """Each sync puts the weights of the one before in place."""
    original = run.engine.update
    held = [{name: w.clone() for name, w in run.policy.sharding.stream().items()}]

    def update(weights: Any) -> int:
        held.append({name: w.clone() for name, w in weights.items()})
        return original(held.pop(0))

    put(stack, run.engine, "update", update)


def stale_cache(stack: ExitStack, run: Run) -> None:
    """Keys and values of the old weights outlive a sync."""
    engine = engine_of(run)
    original, forget = engine.update, engine._cache.forget_all

    def update(weights: Any) -> int:
        engine._cache.forget_all = lambda: None
        try:
            return original(weights)
        finally:
            engine._cache.forget_all = forget

    put(stack, run.engine, "update", update)


# Loss and optimizer


def loss_of(change: Callable[..., Any]) -> Inject:
    return lambda stack, run: put(stack, step, "policy_loss", change)


def normalised_per_pass(stack: ExitStack, run: Run) -> None:
    """Each pass is divided by its own rows, and the passes are added up: huggingface/trl#6024."""
    original = step._backward

    def backward(run: Run, minibatch: Any, indices: Sequence[int], **kwargs: Any) -> Any:
        factor = len(minibatch.mine) / max(len(indices), 1)
        scaled = dataclasses.replace(minibatch, weights=[w * factor for w in minibatch.weights])
        return original(run, scaled, indices, **kwargs)

    put(stack, step, "_backward", backward)


def bf16_masters(stack: ExitStack, run: Run) -> None:
    """The trained weights have the precision of bfloat16, whatever they are computed in."""
    published_in_bf16(run)
    original = run.optimizer.step

    @torch.no_grad()
    def rounded_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for parameter in run.policy.trainable.values():
            parameter.copy_(parameter.bfloat16().float())
        return result

    put(stack, run.optimizer, "step", rounded_step)


def optimizer_of_copies(stack: ExitStack, run: Run) -> None:
    """The optimizer was built before the tensors were replaced."""
    put(stack, run.optimizer, "step", lambda *args, **kwargs: None)
