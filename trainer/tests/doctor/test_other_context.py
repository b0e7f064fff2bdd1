"""An engine that samples after another context than its prompt is told from one whose sampler changes the prompt's own logits."""

import dataclasses
from contextlib import ExitStack

import pytest
import torch
from plumbob.testing.faults import field3_seen
from plumbob.testing.faults.field8_seen_doubles import critique_added, other_prompts
from plumbob.testing.faults.field_parts import engine_logits
from plumbob.trainer.doctor import other_context
from plumbob.trainer.doctor.probes import parity
from plumbob.trainer.doctor.third_opinion import third_opinion

GSM8K = {"env": "gsm8k", "model": "tiny-gsm8k", "env_args": ("datasets=synthetic",), "max_tokens": 48}


def other_order(subject):
    return other_context.other_order(subject, third_opinion(subject, 1.0), subject.gap_limit)


def named(subject):
    return next(f for f in parity.probe(subject) if "sampled tokens" in f.check)


@pytest.mark.slow
def test_text_that_only_the_engine_sees_is_named(subject_of):
    subject = subject_of(**GSM8K)
    with ExitStack() as stack:
        critique_added(stack, subject.run)
        finding = named(subject)
    assert finding.cause == "prompt-replaced" and "other order of probability" in finding.evidence, finding.evidence


@pytest.mark.slow
def test_prompts_of_other_tasks_are_named(subject_of):
    with ExitStack() as stack:
        other_prompts(stack, "gsm8k")
        finding = named(subject_of(**GSM8K))
    assert finding.cause == "prompt-replaced" and "the prompt of another task" in finding.evidence, finding.evidence


@pytest.mark.slow
@pytest.mark.parametrize("change", [{}, {"temperature": 2.5}, {"top_k": 20}, {"min_p": 0.001}])
def test_no_sampler_changes_the_order_of_tokens(subject_of, monkeypatch, change):
    subject = subject_of(**GSM8K)
    assert subject.drawn.samples
    own = subject.run.engine.generate

    async def generate(ids, sampling):
        return await own(ids, dataclasses.replace(sampling, **change))

    monkeypatch.setattr(subject.run.engine, "generate", generate)
    assert not other_order(subject)


def penalised(engine, requests, logits):
    """A repetition penalty of 1.5 on the tokens of the prompt."""
    for row, request in zip(logits, requests, strict=True):
        seen = torch.tensor(sorted(set(request.prompt.tolist())))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.5, row[seen] * 1.5)
    return logits


def favoured(engine, requests, logits):
    """Four tokens get 3 more."""
    return logits + 3.0 * (torch.arange(logits.shape[-1]) % (logits.shape[-1] // 4) == 20)


def half_favoured(engine, requests, logits):
    """Every second token gets 3 more: too many to be left out one by one."""
    return logits + 3.0 * (torch.arange(logits.shape[-1]) % 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [lambda engine, requests, logits: 3 * (logits / 3).tanh(), penalised, favoured, half_favoured]
)
def test_no_change_of_the_prompt_s_own_logits_is_another_context(subject_of, change):
    with ExitStack() as stack:
        engine_logits(change)(stack, "gsm8k")
        subject = subject_of(**GSM8K)
        assert subject.drawn.samples and not other_order(subject)


@pytest.mark.slow
def test_wrong_arithmetic_is_no_other_context(subject_of):
    """A cache of eight bits turns some pairs of like tokens also after prompts of one token, of which nothing can be missing."""
    fault = next(f for f in field3_seen.SEEN if f.name == "keys and values cached in eight bits")
    with ExitStack() as stack:
        fault.start(stack, "gsm8k")
        subject = subject_of(**GSM8K)
        assert subject.drawn.samples and not other_order(subject)


@pytest.mark.slow
@pytest.mark.parametrize("env", [GSM8K, {"env": "lookup", "model": "tiny", "max_tokens": 48}])
def test_a_token_that_is_missing_inside_prompts_is_named(subject_of, monkeypatch, env):
    subject = subject_of(**env)
    assert subject.drawn.samples and not other_order(subject)
    own = subject.run.engine.generate

    async def generate(ids, sampling):
        middle = len(ids) // 2
        return await own(ids[:middle] + ids[middle + 1 :] if middle else ids, sampling)

    monkeypatch.setattr(subject.run.engine, "generate", generate)
    assert "first prompts it has" in other_order(subject)


@pytest.mark.slow
def test_a_special_token_that_is_missing_in_the_engine_s_prompts_is_named(subject_of, monkeypatch):
    subject = subject_of(**GSM8K)
    end = subject.run.sampler.chat.stop_token_ids[0]
    own = subject.run.engine.generate
    monkeypatch.setattr(
        subject.run.engine, "generate", lambda ids, sampling: own([i for i in ids if i != end], sampling)
    )
    finding = named(subject)
    name = subject.run.tokenizer.convert_ids_to_tokens(end)
    assert finding.cause == "prompt-replaced" and f"without the tokens {name!r} in prompts" in finding.evidence
