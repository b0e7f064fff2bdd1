"""Faults that are there before a run is set up: the probes go on where `train` stops, and find out which side is wrong."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plumbob.console import UserError
from plumbob.rollout import Sample
from plumbob.testing.faults.doubles import blind, engine_of, lora_layers, put
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.probes import conditioning, parity
from plumbob.trainer.doctor.run_probes import PROBES, examine
from plumbob.trainer.doctor.subject import Subject
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import policy
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training.train import run as train

Patch = pytest.MonkeyPatch


@pytest.fixture
def loaded(tmp_path, set_up_subject):
    with ExitStack() as stack:

        def make(**settings: Any) -> Subject:
            config = TrainConfig(**{"num_generations": 4, "eval_examples": 4, **settings})
            subject = set_up_subject(config, tmp_path)
            stack.callback(subject.close)
            return subject

        yield make


def trainer_blind(patch: Patch) -> None:
    """The loss mask is the attention mask, as in verifiers' GRPOTrainer from July to October 2025."""
    score = Policy.score
    patch.setattr(
        Policy, "score", lambda self, rows, temperature: blind(lambda r, t: score(self, r, t), rows, temperature)
    )


def temperature_ignored(patch: Patch) -> None:
    score = Policy.score
    patch.setattr(Policy, "score", lambda self, rows, temperature: score(self, rows, 1.0))


def positions_back(patch: Patch) -> None:
    """In the trainer, what follows the first prompt has positions that are one too low."""
    make_batch = policy.make_batch

    def shifted(rows: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        batch = make_batch(rows, *args, **kwargs)
        places = [[i - (i >= row.loss_mask.index(True)) for i in range(len(row.token_ids))] for row in rows]
        batch.inputs["position_ids"] = torch.tensor([[i for row in places for i in row]])
        return batch

    patch.setattr(policy, "make_batch", shifted)


def prompted(change: Callable[[list[int]], list[int]]) -> Callable[[Patch], None]:
    """The engine samples after the prompt that `change` makes of the given one."""

    def put_in(patch: Patch) -> None:
        generate = TransformersEngine.generate
        patch.setattr(
            TransformersEngine, "generate", lambda self, ids, sampling: generate(self, change(list(ids)), sampling)
        )

    return put_in


@functools.cache
def system_prompt_ids() -> list[int]:
    """The token ids of the lookup task's system prompt, without those that its neighbours may change."""
    text = str(load_tasks(TrainConfig(env="lookup")).train[0].data.system_prompt)
    return load_tokenizer("tiny").encode(text, add_special_tokens=False)[2:-2]


def another_system_prompt(ids: list[int]) -> list[int]:
    """The words of the lookup task's system prompt are replaced, and nothing else."""
    own = system_prompt_ids()
    at = next((i for i in range(len(ids) - len(own)) if ids[i : i + len(own)] == own), None)
    return ids if at is None else [*ids[:at], *own[:4], *ids[at + len(own) :]]


def last_result_only(ids: list[int]) -> list[int]:
    """All tool results but the last are empty."""
    opening, closing = load_tokenizer("tiny").convert_tokens_to_ids(["<tool_response>", "</tool_response>"])
    starts = [i for i, token in enumerate(ids) if token == opening]
    inside = [range(start + 1, ids.index(closing, start)) for start in starts[:-1]]
    return [token for i, token in enumerate(ids) if not any(i in places for places in inside)]


def without_special_tokens(ids: list[int]) -> list[int]:
    special = set(load_tokenizer("tiny").all_special_ids) | set(load_tokenizer("tiny").get_added_vocab().values())
    return [token for token in ids if token not in special]


def repetition_penalty(patch: Patch) -> None:
    """Tokens that stand in the text are penalised: transformers' repetition penalty of 1.1."""
    draw = TransformersEngine._draw

    def penalised(self: Any, requests: list[Any], logits: torch.Tensor) -> None:
        if len(requests) == len(logits):
            logits = logits.clone()
            for i, request in enumerate(requests):
                seen = torch.tensor(sorted({*request.prompt.tolist(), *request.token_ids}))
                value = logits[i, seen]
                logits[i, seen] = torch.where(value > 0, value / 1.1, value * 1.1)
        draw(self, requests, logits)

    patch.setattr(TransformersEngine, "_draw", penalised)


def last_microbatch_only(patch: Patch) -> None:
    """The gradient is set to zero before each microbatch."""
    loss = forward_backward.grpo_loss

    def cleared(run: Any, *args: Any) -> Any:
        run.policy.sharding.zero_grad()
        return loss(run, *args)

    patch.setattr(forward_backward, "grpo_loss", cleared)


@pytest.mark.field
@pytest.mark.parametrize(
    ("fault", "cause", "evidence", "settings"),
    [
        (trainer_blind, "loss-mask-as-attention-mask", "other prompts move", {}),
        (temperature_ignored, "temperature-not-applied", "trainer computes at temperature 1 in place of 1.3", {"temperature": 1.3}),
        (positions_back, "positions-shifted", "first prompt moved by -1", {}),
        (prompted(lambda ids: ids[:-3]), "assistant-header-missing", "engine computes without the assistant header", {}),
        (prompted(lambda ids: [ids[0]] + [40] * (len(ids) - 9) + ids[-8:]), "prompt-replaced", "", {}),
        (prompted(another_system_prompt), "prompt-replaced", "system messages", {}),
        (prompted(last_result_only), "prompt-replaced", "without earlier tool results in prompts", {}),
        (prompted(without_special_tokens), "prompt-replaced", "without special tokens in prompts", {}),
        (repetition_penalty, "sampling-penalised", "", {}),
        (last_microbatch_only, "normaliser-depends-on-microbatches", "", {"microbatch_tokens": 2048}),
    ],
    ids=["mask", "temperature", "positions", "header", "prompt", "system", "results", "special tokens", "penalty", "microbatch"],
)  # fmt: skip
def test_a_bug_from_the_start_has_its_own_name(loaded, monkeypatch, fault, cause, evidence, settings):
    fault(monkeypatch)
    findings = [finding for _, finding in examine(loaded(**settings))]
    assert findings[-1].cause == cause, findings[-1]
    assert evidence in findings[-1].evidence


@pytest.mark.slow
@pytest.mark.parametrize("by", [1, -1])
def test_log_probabilities_of_neighbours_are_told_from_rows_that_see_each_other(loaded, monkeypatch, by):
    """Labels and masks are shifted differently; at the ends of turns, where nothing is left, stands 0."""
    score = Policy.score

    def moved(self: Policy, rows: Sequence[Any], temperature: float) -> Any:
        mask = [([False] * max(by, 0) + row.loss_mask + [False] * max(-by, 0))[max(-by, 0) :] for row in rows]
        mask = [m[: len(row.token_ids)] for m, row in zip(mask, rows, strict=True)]
        other = [dataclasses.replace(row, loss_mask=[False, *m[1:]]) for row, m in zip(rows, mask, strict=True)]
        scores = score(self, other, temperature)
        parts = [v.split([o.num_sampled for o in other]) for v in (scores.logprobs, scores.entropies)]
        short = [row.num_sampled - o.num_sampled for row, o in zip(rows, other, strict=True)]
        return type(scores)(
            *(torch.cat([torch.cat([p, p.new_zeros(n)]) for p, n in zip(part, short, strict=True)]) for part in parts)
        )

    monkeypatch.setattr(Policy, "score", moved)
    (found,) = conditioning.probe(loaded())
    assert found.cause == "logprobs-permuted" and f"1 place {'after' if by > 0 else 'before'} it" in found.evidence


@pytest.mark.slow
@pytest.mark.long
def test_a_fitted_temperature_is_the_best_and_not_the_first_that_fits(loaded, monkeypatch):
    """At 0.7 for 1 the gap is small, so that 0.6 leaves little as well."""
    generate = TransformersEngine.generate

    def at(self: Any, ids: Any, sampling: Any) -> Any:
        return generate(self, ids, dataclasses.replace(sampling, temperature=0.7))

    monkeypatch.setattr(TransformersEngine, "generate", at)
    found = [f for f in PROBES["parity"](loaded()) if f.cause]
    assert found[0].cause == "temperature-not-applied"
    assert "engine computes at temperature 0.7 in place of 1" in found[0].evidence


@pytest.mark.slow
def test_train_stops_and_names_the_command_that_finds_the_cause(tmp_path, monkeypatch):
    trainer_blind(monkeypatch)
    config = TrainConfig(output_dir=str(tmp_path), run_name="stopped", eval_examples=0)
    with pytest.raises(UserError, match="doctor --config .*stopped.config.toml"):
        train(config)
    assert (tmp_path / "stopped" / "config.toml").is_file()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_the_scale_of_an_adapter_in_the_engine_is_fitted(loaded, factor):
    subject = loaded(peft=True)
    with ExitStack() as stack:
        for module in lora_layers(subject.run).values():
            put(stack, module, "scaling", {name: s * factor for name, s in module.scaling.items()})
        found = [f for f in PROBES["sync"](subject) if f.cause]
    assert found[0].cause == "adapter-scale-differs"
    assert f"base + {factor:g} times" in found[0].evidence


@pytest.mark.slow
@pytest.mark.long
def test_the_scale_of_the_adapters_of_some_modules_is_fitted(loaded):
    subject = loaded(peft=True)
    with ExitStack() as stack:
        for name, module in lora_layers(subject.run).items():
            if name.endswith(("gate_proj", "up_proj")):
                put(stack, module, "scaling", {key: s / 2 for key, s in module.scaling.items()})
        found = [f for f in PROBES["sync"](subject) if f.cause]
    assert found[0].cause == "adapter-scale-differs"
    assert "base + 0.5 times what the adapters of gate_proj, up_proj add" in found[0].evidence


@pytest.mark.slow
@pytest.mark.long
def test_adapters_of_some_modules_that_add_nothing_are_not_applied(loaded):
    subject = loaded(peft=True)
    with ExitStack() as stack:
        for name, module in lora_layers(subject.run).items():
            if name.endswith(("gate_proj", "up_proj")):
                put(stack, module, "scaling", dict.fromkeys(module.scaling, 0.0))
        found = [f for f in PROBES["sync"](subject) if f.cause]
    assert found[0].cause == "adapter-not-applied" and "gate_proj, up_proj" in found[0].evidence


@pytest.mark.slow
@pytest.mark.parametrize("by", [1, -1])
def test_log_probabilities_of_the_next_sampled_token_are_no_look_ahead(loaded, monkeypatch, by):
    """Each sampled token has the trainer's log-probability of the one after it, or before it."""
    subject = loaded()
    own = Policy.score

    def moved(self, rows, temperature):
        scores = own(self, rows, temperature)
        parts = scores.logprobs.split([sum(row.loss_mask[1:]) for row in rows])
        return dataclasses.replace(scores, logprobs=torch.cat([part.roll(-by) for part in parts]))

    assert subject.drawn.samples
    monkeypatch.setattr(Policy, "score", moved)
    found = [f.cause for f in conditioning.probe(subject) if f.cause] + [
        f.cause for f in parity.probe(subject) if f.cause
    ]
    assert found[0] == "logprobs-permuted"


@pytest.mark.slow
def test_a_head_that_is_not_tied_is_named(loaded):
    subject = loaded()
    head: Any = engine_of(subject.run).model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    assert subject.began
    assert next(f for f in PROBES["sync"](subject) if f.cause).cause == "head-not-tied"


@pytest.mark.slow
def test_an_attention_mask_of_sampled_tokens_is_seen_although_each_turn_sees_its_last_context_token(
    loaded, monkeypatch
):
    make_batch = policy.make_batch

    def masked(rows: Sequence[Any], layout: Any, device: Any, flash: bool = False) -> Any:
        batch = make_batch(rows, "padded", device)
        mask = torch.zeros_like(batch.ids)
        for i, row in enumerate(rows):
            mask[i, : len(row.token_ids)] = torch.tensor(row.loss_mask)
        batch.inputs["attention_mask"] = mask
        return batch

    subject = loaded()
    subject.run.policy.model.set_attn_implementation("sdpa")
    monkeypatch.setattr(policy, "make_batch", masked)
    assert next(f for f in conditioning.probe(subject) if f.cause).cause == "loss-mask-as-attention-mask"


@pytest.mark.parametrize(("wrong", "others", "named"), [(5, 0.0, True), (2, 0.0, False), (5, 0.02, False)])
def test_end_tokens_that_nobody_sampled_are_told_from_other_differences(wrong, others, named):
    """Ten rows of three tokens and an end token; the engine's log-probability of some of these is that of another token."""
    end = 7
    rows = [Sample([1, 2, 3, 4, end], [False] + [True] * 4, [0.0] * 5, 0.0, "", "", False) for _ in range(10)]
    trainer = [torch.full((4,), -0.1) for _ in rows]
    engine = [torch.tensor([-0.1 - others] * 3 + [-0.1 - 5.0 * (k < wrong)]) for k in range(10)]
    run = SimpleNamespace(sampler=SimpleNamespace(chat=SimpleNamespace(stop_token_ids=(end,))))
    subject: Any = SimpleNamespace(run=run)
    found = parity._ends_alone(subject, rows, engine, trainer, 1e-4)
    assert (found is not None) == named
