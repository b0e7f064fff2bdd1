"""An engine that samples after another context than its prompt is told from one whose sampler changes the prompt's own logits."""

import dataclasses
from contextlib import ExitStack

import pytest
from plumbob.testing.faults.field8_seen_doubles import critique_added, other_prompts
from plumbob.trainer.doctor import other_context
from plumbob.trainer.doctor.explanations import third_opinion
from plumbob.trainer.doctor.probes import parity

GSM8K = {"env": "gsm8k", "model": "tiny-gsm8k", "env_args": ("datasets=synthetic",), "max_tokens": 48}


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
    assert other_context.other_order(subject, third_opinion(subject, 1.0), subject.gap_limit) is None
