"""Probes of held-out rollouts, of the gradient's way through the layers, and of engines that have no choice or choose twice."""

import asyncio
import dataclasses
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plumbob.rollout import Sampling, derive_seed
from plumbob.testing.faults.field2_parts import losses
from plumbob.testing.faults.field6_unseen_doubles import call_forced, first_layers_cut, held_out_golds_moved
from plumbob.testing.faults.field7_seen_doubles import length_priced, one_not_a_number, stopped_at_line_break
from plumbob.testing.faults.field7_unseen_doubles import last_tokens_only, old_ones_renewed
from plumbob.testing.faults.field_parts import chat_method, graded
from plumbob.trainer.doctor.layers import layers_without_gradient
from plumbob.trainer.doctor.probes import data, gradient, held_out, parity, penalties, signal, tokens, training_step
from plumbob.trainer.doctor.probes.held_out import _fisher
from plumbob.trainer.doctor.probes.parity import forced_tokens


def test_fishers_test_gives_the_numbers_of_the_lady_who_tasted_tea():
    """Fisher, The Design of Experiments (1935), chapter 2: 1 and 17 of the 70 ways to choose four of eight cups."""
    assert _fisher(4, 4, 0, 4) == pytest.approx(1 / 70) and _fisher(3, 4, 1, 4) == pytest.approx(17 / 70)


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_fishers_test_is_a_probability_that_falls_with_the_difference(of_a, of_b, data):
    a, b = data.draw(st.integers(0, of_a)), data.draw(st.integers(0, of_b))
    assert 0 < _fisher(a, of_a, b, of_b) <= 1 + 1e-12
    if a < of_a and b > 0:
        assert _fisher(a + 1, of_a, b - 1, of_b) < _fisher(a, of_a, b, of_b)


@pytest.mark.slow
@pytest.mark.long
def test_held_out_answers_of_other_tasks_are_named_by_replies_that_are_right_for_others(subject_of):
    subject = subject_of(groups=8, eval_examples=16)
    (healthy,) = held_out.probe(subject)
    tasks = subject.run.tasks.held_out
    moved = held_out_golds_moved(list(tasks), "validation")
    subject.run = dataclasses.replace(subject.run, sampler=dataclasses.replace(
        subject.run.sampler, tasks=dataclasses.replace(subject.run.tasks, held_out=moved)))  # fmt: skip
    (finding,) = held_out.probe(subject)
    assert healthy.verdict == "pass" and finding.cause == "evaluation-parses-differently", finding.evidence


@pytest.mark.slow
@pytest.mark.long
def test_few_tasks_are_named_if_the_limit_on_prompts_leaves_them(subject_of):
    left = subject_of(env="gsm8k", env_args=("datasets=synthetic", "num_examples=400"), max_prompt_length=165)
    finding = data._tasks_left(left)
    assert left.run.tasks.too_long and any("--max-prompt-length 165 leaves" in note for note in left.run.tasks.notes)
    assert finding.cause == "few-distinct-tasks" and "of 400 training tasks" in finding.evidence
    assert data._tasks_left(subject_of(max_prompt_length=4000)).verdict == "pass"


NAMES = [f"model.layers.{i}.{part}.weight" for i in range(3) for part in ("attn.lora_A", "attn.lora_B")]


def test_a_layer_has_a_gradient_if_one_of_its_tensors_has():
    some, none = torch.tensor([0.0, 1e-9]), torch.zeros(2)
    at_start = {name: some if "lora_B" in name else none for name in NAMES}
    assert layers_without_gradient([*NAMES, "embed.weight"], at_start) == ([], 3)
    cut = {name: g for name, g in at_start.items() if "layers.2" in name}
    assert layers_without_gradient(NAMES, cut) == (["model.layers.0", "model.layers.1"], 3)
    assert layers_without_gradient(["embed.weight"], {}) == ([], 0)


@pytest.mark.slow
@pytest.mark.parametrize("peft", [True, False])
def test_a_gradient_that_does_not_reach_the_first_layers_is_named(subject_of, peft):
    with ExitStack() as stack:
        healthy = next(f for f in gradient.probe(subject_of(peft=peft)) if "every trained layer" in f.check)
        first_layers_cut(stack, "lookup")
        cut = next(f for f in gradient.probe(subject_of(peft=peft)) if "every trained layer" in f.check)
    assert healthy.verdict == "pass" and cut.cause == "no-gradient" and "1 of 3 layers" in cut.evidence


def test_tokens_without_a_choice_are_told_from_other_differences():
    trainer = -torch.rand(200, generator=torch.Generator().manual_seed(0)) - 0.2
    engine = trainer.clone()
    assert forced_tokens(engine, trainer, 1e-4) == ""
    engine[:20] = 0.0
    assert "20 tokens with probability 1" in forced_tokens(engine, trainer, 1e-4)
    assert forced_tokens(engine + 0.01, trainer, 1e-4) == "", "the others differ, too"
    assert forced_tokens(engine[:25], trainer[:25] * 0, 1e-4) == "", "the model is as sure of them"


@pytest.mark.slow
def test_an_engine_that_must_call_a_tool_is_not_said_to_see_another_prompt(subject_of):
    subject = subject_of(groups=4, max_turns=3)
    with ExitStack() as stack:
        call_forced(stack, subject.run)
        subject.drawn  # noqa: B018 - sampled while the first tokens are forced
        finding = next(f for f in parity.probe(subject) if f.check == "engine and trainer agree on sampled tokens")
    assert finding.cause == "sampling-truncated" and "a single token" in finding.evidence, finding


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_that_returns_the_likelier_of_two_replies_is_named(subject_of, monkeypatch):
    subject = subject_of()
    engine = subject.run.engine
    original = engine.generate
    healthy = [f for f in penalties.probe(subject) if f.cause]

    async def likelier(prompt_ids, sampling: Sampling):
        seeds = (sampling.seed, derive_seed(sampling.seed, 1))
        both = await asyncio.gather(*(original(prompt_ids, dataclasses.replace(sampling, seed=s)) for s in seeds))
        return max(both, key=lambda reply: sum(reply.logprobs))

    monkeypatch.setattr(engine, "generate", likelier)
    named = [f for f in penalties.probe(subject) if f.cause]
    assert not healthy and [f.cause for f in named] == ["temperature-not-applied"], named


def test_a_stop_string_that_ends_turns_for_the_policy_is_named(subject_of):
    subject = subject_of(env="gsm8k", model="tiny-gsm8k", env_args=("datasets=synthetic",), max_tokens=96)
    with ExitStack() as stack:
        stopped_at_line_break(stack, subject.run)
        (finding,) = (f for f in data.probe(subject) if f.cause)
    assert finding.cause == "stop-token-wrong" and "below 1e-5" in finding.evidence


@pytest.mark.slow
def test_a_gradient_that_is_no_number_is_not_called_one_that_depends_on_microbatches(subject_of):
    with ExitStack() as stack:
        losses(one_not_a_number)(stack, "lookup")
        findings = list(gradient.probe(subject_of()))
    assert [f.cause for f in findings] == ["gradient-not-finite"]


@pytest.mark.slow
@pytest.mark.parametrize(("scaled", "cause"), [("group", ["tiny-std-scaling"]), ("none", [])])
def test_differences_that_are_small_against_a_right_answer_are_named_where_they_are_scaled(subject_of, scaled, cause):
    with ExitStack() as stack:
        graded(correct=length_priced)(stack, "lookup")
        hard = {"env_args": ("min_hops=9", "max_hops=12"), "max_tokens": 64, "max_turns": 3}
        subject = subject_of(scale_rewards=scaled, **hard)
        assert [f.cause for f in signal.probe(subject) if f.cause and f.check.startswith("advantages")] == cause


def test_prompts_that_lost_their_beginning_are_named(subject_of):
    with ExitStack() as stack:
        chat_method("prompt", last_tokens_only)(stack, "lookup")
        named = [f.cause for f in tokens.probe(subject_of(max_turns=2, max_tokens=32)) if f.cause]
    assert named[0] == "truncated-context"


@pytest.mark.slow
def test_old_log_probabilities_of_the_present_weights_are_not_called_permuted(subject_of):
    with ExitStack() as stack:
        old_ones_renewed(stack, "lookup")
        named = [f.cause for f in training_step.probe(subject_of(num_iterations=4)) if f.cause]
    assert named == ["ratio-to-reference"]
