"""Faulty doubles of the parts of a run, as the faults occurred in real trainers. Closing the stack removes a double."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import verifiers.v1 as vf
from peft.tuners.lora import Linear as LoraLinear
from plumbob.rollout import Chat, Sample, to_sample, verifiers_messages
from plumbob.rollout.chat import assistant_header
from plumbob.trainer.inference.engine import WeightUpdate
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.weight_sync import sync_weights
from plumbob.trainer.policy.policy import TokenScores
from plumbob.trainer.rollouts import collect as rollouts
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.run import Run

Inject = Callable[[ExitStack, Run], None]
"""Injects a fault into a run that is set up and not started; closing the stack undoes it."""


def put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of `owner`, which may be a frozen dataclass, by `value` until the stack is closed."""
    if dataclasses.is_dataclass(owner) and not isinstance(owner, type):
        stack.callback(object.__setattr__, owner, name, getattr(owner, name))
        object.__setattr__(owner, name, value)
    else:
        stack.enter_context(mock.patch.object(owner, name, value, create=not hasattr(owner, name)))


def after_set_up(stack: ExitStack, module: Any, *injects: Inject) -> None:
    """A run that `set_up`, as this module calls it, returns has these faults in it."""
    set_up = module.set_up

    def faulty(*args: Any, **kwargs: Any) -> Run:
        run = set_up(*args, **kwargs)
        for inject in injects:
            inject(stack, run)
        return run

    put(stack, module, "set_up", faulty)


def after_each_set_up(stack: ExitStack, modules: Sequence[Any], *injects: Inject) -> None:
    """Every run that one of these modules sets up has these faults in it, once: those of the run before it are undone.

    A fault that replaces a function would otherwise be there twice in a second run of the same process.
    """
    own = stack.enter_context(ExitStack())

    def inject(_: ExitStack, run: Run) -> None:
        own.close()
        for fault in injects:
            fault(own, run)

    for module in modules:
        after_set_up(stack, module, inject)


def syncs_unjudged(stack: ExitStack, run: Run) -> None:
    """The check of a weight sync measures the difference of engine and trainer, and ends no run."""
    check = run.engine.check_parity
    put(stack, run.engine, "check_parity", lambda token_ids, logprobs, limit: check(token_ids, logprobs, math.inf))


# Faults of the trained row


def rewritten(rewrite: Callable[[Run, vf.Trace, Sample], Sample]) -> Inject:
    """Every row is changed by `rewrite` between rollout and training."""

    def inject(stack: ExitStack, run: Run) -> None:
        put(stack, rollouts, "to_sample", lambda trace, group: rewrite(run, trace, to_sample(trace, group)))

    return inject


def _select(sample: Sample, keep: Sequence[bool]) -> Sample:
    """The row with only those tokens for which `keep` [T] is true."""

    def kept(values: Sequence[Any]) -> list[Any]:
        return [v for v, k in zip(values, keep, strict=True) if k]

    return dataclasses.replace(
        sample,
        token_ids=kept(sample.token_ids),
        loss_mask=kept(sample.loss_mask),
        sampling_logprobs=kept(sample.sampling_logprobs),
    )


def without_headers(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The assistant header is missing before every turn but the first: verifiers' GRPOTrainer, July-October 2025."""
    length = len(run.tokenizer.encode(assistant_header(run.tokenizer), add_special_tokens=False))
    mask = sample.loss_mask
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    dropped = {i for start in starts[1:] for i in range(start - length, start)}
    return _select(sample, [i not in dropped for i in range(len(mask))])


def without_tools(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The trained prompt is rendered without the tools: verifiers' GRPOTrainer, July-October 2025."""
    opening = list(itertools.takewhile(lambda node: not node.sampled, trace.nodes))
    prompt = run.sampler.chat.prompt([verifiers_messages.to_wire(node.message) for node in opening], tools=[]).token_ids
    start = sample.loss_mask.index(True)
    return dataclasses.replace(
        sample,
        token_ids=[*prompt, *sample.token_ids[start:]],
        loss_mask=[False] * len(prompt) + sample.loss_mask[start:],
        sampling_logprobs=[0.0] * len(prompt) + sample.sampling_logprobs[start:],
    )


def tools_trained(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """Everything after the prompt is in the loss, tool results and headers included."""
    start = sample.loss_mask.index(True)
    return dataclasses.replace(sample, loss_mask=[i >= start for i in range(len(sample.loss_mask))])


def earlier_turns_masked(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """All turns but the last are masked out of the loss."""
    start = max(i for i in range(1, len(sample.loss_mask)) if sample.loss_mask[i] and not sample.loss_mask[i - 1])
    return dataclasses.replace(sample, loss_mask=[m and i >= start for i, m in enumerate(sample.loss_mask)])


def retokenised(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """Sampled turns are tokenised again, with the spacing of another JSON writer."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    rows = zip(sample.token_ids, sample.loss_mask, sample.sampling_logprobs, strict=True)
    for sampled, part in itertools.groupby(rows, key=lambda row: row[1]):
        span, _, logprob_span = (list(column) for column in zip(*part, strict=True))
        if sampled:
            text = run.tokenizer.decode(span).replace('": ', '":')
            span = run.tokenizer.encode(text, add_special_tokens=False)
            logprob_span = (logprob_span + [-1.0] * len(span))[: len(span)]
        ids, mask, logprobs = [*ids, *span], [*mask, *[sampled] * len(span)], [*logprobs, *logprob_span]
    return dataclasses.replace(sample, token_ids=ids, loss_mask=mask, sampling_logprobs=logprobs)


def row_cut(run: Run, trace: vf.Trace, sample: Sample) -> Sample:
    """The trainer keeps only the second half of each row, as --max-prompt-length of other trainers cuts prompts."""
    cut = _select(sample, [i >= len(sample.token_ids) // 2 for i in range(len(sample.token_ids))])
    return dataclasses.replace(cut, loss_mask=[False, *cut.loss_mask[1:]])


def groups_shuffled(stack: ExitStack, run: Run) -> None:
    """Rollouts are assigned to the groups in turn, whatever their task: PeterGriffinJin/Search-R1#88."""
    count = itertools.count()

    def shuffled(trace: vf.Trace, group: str) -> Sample:
        return to_sample(trace, f"{group.split('/')[0]}/{next(count) % run.sampler.groups_per_step}")

    put(stack, rollouts, "to_sample", shuffled)


# Faults of the prompt


class HeaderlessChat(Chat):
    """A chat that leaves out the header of the next assistant turn."""

    def suffix(self, messages: list[dict[str, Any]]) -> Any:
        rendered = super().suffix(messages)
        end = rendered.ends[-1]
        return dataclasses.replace(rendered, token_ids=rendered.token_ids[:end], is_content=rendered.is_content[:end])


class ToollessChat(Chat):
    """A chat that ignores tools."""

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], variables: dict[str, Any] | None = None
    ) -> Any:
        return super().prompt(messages, [], variables)


def chat_of(cls: type[Chat], **changes: Any) -> Inject:
    """The run uses a chat of this class, with the run's own fields except for `changes`."""

    def inject(stack: ExitStack, run: Run) -> None:
        fields: dict[str, Any] = {f.name: getattr(run.sampler.chat, f.name) for f in dataclasses.fields(Chat)}
        fields.update(_memory={}, **changes)
        put(stack, run.sampler, "chat", cls(**fields))

    return inject


def stops_at(text: str) -> Inject:
    """Turns end at the token `text` instead of the end token of the chat template."""

    def inject(stack: ExitStack, run: Run) -> None:
        (token,) = run.tokenizer.encode(text, add_special_tokens=False)
        chat_of(Chat, stop_token_ids=(token,))(stack, run)

    return inject


# Faults of the trainer's scores


def scored(score: Callable[[Callable[..., TokenScores], Sequence[Sample], float], TokenScores]) -> Inject:
    """The policy scores rows by `score(original, rows, temperature)`."""

    def inject(stack: ExitStack, run: Run) -> None:
        original = run.policy.score
        put(stack, run.policy, "score", lambda rows, temperature: score(original, rows, temperature))

    return inject


def blind(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """The loss mask is used as attention mask: tokens that are not in the loss are replaced by id 0."""
    blanked = [[t if m else 0 for t, m in zip(r.token_ids, r.loss_mask, strict=True)] for r in rows]
    return original([dataclasses.replace(r, token_ids=ids) for r, ids in zip(rows, blanked, strict=True)], temperature)


def one_row(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """Packed rows attend to each other."""
    mask = [m and i > 0 for r in rows for i, m in enumerate(r.loss_mask)]
    ids = [t for r in rows for t in r.token_ids]
    joined = dataclasses.replace(rows[0], token_ids=ids, loss_mask=mask, sampling_logprobs=[0.0] * len(ids))
    return original([joined], temperature)


def detached(original: Callable[..., TokenScores], rows: Sequence[Sample], temperature: float) -> TokenScores:
    """The log-probabilities have no gradient."""
    scores = original(rows, temperature)
    return TokenScores(scores.logprobs.detach(), scores.entropies)


# Faults of the engine


def generating(change: Callable[[list[int], Any], tuple[list[int], Any]]) -> Inject:
    """The engine samples with the prompt and the sampling settings that `change(prompt ids, settings)` returns."""

    def inject(stack: ExitStack, run: Run) -> None:
        original = run.engine.generate
        put(stack, run.engine, "generate", lambda ids, sampling: original(*change(list(ids), sampling)))

    return inject


def adapter_not_applied(stack: ExitStack, run: Run) -> None:
    """The engine loads the adapter at every sync but does not compute with it: huggingface/trl#2856."""
    for module in lora_layers(run).values():
        put(stack, module, "scaling", dict.fromkeys(module.scaling, 0.0))


def adapter_unbound(stack: ExitStack, run: Run) -> None:
    """The engine silently skips names that it does not know, and it knows none of them: verl-project/verl-omni#552."""
    original = run.engine.update
    put(stack, run.engine, "update", lambda weights, **how: original({}, **how))


def one_name_skipped(stack: ExitStack, run: Run) -> None:
    """The engine silently skips one layer, as if that layer's name had another spelling."""
    original, skipped = run.engine.update, "layers.0.mlp.down_proj"

    def update(weights: Any, **how: Any) -> WeightUpdate:
        return original({n: w for n, w in weights.items() if skipped not in n}, **how)

    put(stack, run.engine, "update", update)


def engine_of(run: Run) -> TransformersEngine:
    """The run's engine. Raises AssertionError if it is not a TransformersEngine."""
    assert isinstance(run.engine, TransformersEngine)
    return run.engine


def lora_layers(run: Run) -> dict[str, Any]:
    """Name -> LoRA layer of the engine's model."""
    return {name: m for name, m in engine_of(run).model.named_modules() if isinstance(m, LoraLinear)}


def published_in_bf16(run: Run) -> None:
    """Round all weights to bfloat16, so that rounding the initial weights again changes nothing."""
    with torch.no_grad():
        for parameter in run.policy.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
        for parameter in engine_of(run).model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    sync_weights(run.policy, run.engine, run.parity_row)


def merged_in_bf16(stack: ExitStack, run: Run) -> None:
    """Every sync merges the adapter into base weights that are stored in bfloat16: huggingface/trl#6688."""
    published_in_bf16(run)
    layers = lora_layers(run)
    bases = {name: m.base_layer.weight.detach().clone() for name, m in layers.items()}
    original = run.engine.update

    @torch.no_grad()
    def update(weights: Any, **how: Any) -> WeightUpdate:
        done = original(weights, **how)
        for name, module in layers.items():
            (adapter_name,) = module.lora_A.keys()
            merged = (bases[name] + module.get_delta_weight(adapter_name)).bfloat16().float()
            # A new tensor replaces the old one, because the policy shares the old one.
            module.base_layer.weight = torch.nn.Parameter(merged, requires_grad=False)
            for part in (module.lora_A, module.lora_B):  # an engine that merges has no separate adapter
                part[adapter_name].weight.zero_()
        return done

    put(stack, run.engine, "update", update)


def rounded_weights_served(stack: ExitStack, run: Run) -> None:
    """All weights are rounded to bfloat16 when they are synced."""
    published_in_bf16(run)
    original = run.engine.update

    def update(weights: Any, **how: Any) -> WeightUpdate:
        return original({name: w.bfloat16().float() for name, w in weights.items()}, **how)

    put(stack, run.engine, "update", update)


def stale_engine(stack: ExitStack, run: Run) -> None:
    """Each sync loads the weights of the sync before."""
    original = run.engine.update
    held = [{name: w.clone() for name, w in run.policy.sharding.stream().items()}]

    def update(weights: Any, **how: Any) -> WeightUpdate:
        held.append({name: w.clone() for name, w in weights.items()})
        return original(held.pop(0), **how)

    put(stack, run.engine, "update", update)


def stale_cache(stack: ExitStack, run: Run) -> None:
    """The prefix cache keeps keys and values of the old weights after a sync."""
    engine = engine_of(run)
    original, forget = engine.update, engine._cache.forget_all

    def update(weights: Any, **how: Any) -> WeightUpdate:
        engine._cache.forget_all = lambda: None
        try:
            return original(weights, **how)
        finally:
            engine._cache.forget_all = forget

    put(stack, run.engine, "update", update)


# Faults of loss and optimizer


def loss_of(change: Callable[..., Any]) -> Inject:
    """The loss is computed by `change(inputs, objective)`."""
    return lambda stack, run: put(stack, forward_backward, "policy_loss", change)


def normalised_per_microbatch(stack: ExitStack, run: Run) -> None:
    """Each microbatch's loss is divided by that microbatch's rows, and the losses are added: huggingface/trl#6024."""
    original = forward_backward.grpo_loss

    def loss(run: Run, minibatch: Any, indices: Sequence[int]) -> Any:
        factor = len(minibatch.mine) / max(len(indices), 1)
        scaled = dataclasses.replace(minibatch, weights=[w * factor for w in minibatch.weights])
        return original(run, scaled, indices)

    put(stack, forward_backward, "grpo_loss", loss)


def bf16_masters(stack: ExitStack, run: Run) -> None:
    """The trained weights are rounded to bfloat16 after every update."""
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
    """The optimizer changes no trained weight, as if it had been built before the model's tensors were replaced."""
    put(stack, run.optimizer, "step", lambda *args, **kwargs: None)
