"""Checks that ask a second time under another condition: without a correction, far from the reference, with calls in vain."""

import copy
import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.testing.examinations import causes, lookup_tasks
from plumbob.testing.faults.field21_unseen_doubles import clipped_before, kl_by_itself, product_weights
from plumbob.testing.faults.field22_unseen_doubles import paid_by_the_call
from plumbob.testing.faults.field23_seen_doubles import sampled_at_all_times
from plumbob.testing.faults.field24_parts import rollout_results
from plumbob.testing.faults.field24_seen_doubles import calls_without_names, every_fourth_exchanged
from plumbob.testing.faults.field24_unseen_doubles import after_the_conversation
from plumbob.testing.faults.field_parts import chat_method
from plumbob.testing.faults.field_parts import graded as graded_as
from plumbob.testing.faults.field_unseen_environment import held_out_respaced
from plumbob.trainer.algorithm.importance_weights import CAPS
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.causes import stands_for
from plumbob.trainer.doctor import left_out
from plumbob.trainer.doctor.before_model import contradicted_answers, paid_calls, task_sets, tool_results, transcripts
from plumbob.trainer.doctor.evaluations import as_asked
from plumbob.trainer.doctor.held_weights import other_weights
from plumbob.trainer.doctor.loss_away import away
from plumbob.trainer.doctor.probes import held_out, tools
from plumbob.trainer.doctor.probes.conditioning import changed_by
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import train as training_loop

PROMPTED = "evaluation-prompted-differently"


def trained(subject):
    """Rows of the subject, and advantages of both signs for them."""
    rows = [s for s in subject.drawn.samples if s.num_sampled][:8]
    return rows, [(-1.0) ** i for i in range(len(rows))]


@pytest.mark.parametrize(
    "settings",
    [{}, {"kl_beta": 0.05}, {"loss_type": "gspo"}, {"loss_type": "cispo"}, {"num_iterations": 2, "loss_type": "dapo"}],
)
def test_the_loss_is_right_away_from_the_reference_too(subject_of, settings):
    subject = subject_of(**settings)
    found = away(subject, *trained(subject))
    assert found is not None and found.verdict == "pass", found


@pytest.mark.parametrize(
    ("double", "settings"), [(kl_by_itself, {"kl_beta": 0.02}), (clipped_before, {"epsilon": 0.05})]
)
def test_what_shows_only_where_the_policy_has_moved_is_named(subject_of, double, settings):
    with ExitStack() as stack:
        double(stack, "lookup")
        subject = subject_of(**settings)
        found = away(subject, *trained(subject))
    assert found is not None and found.cause == "loss-differs-from-settings"


def test_a_correction_that_masks_everything_is_named_whoever_computes_it(subject_of, monkeypatch):
    subject = subject_of(importance_correction="sequence_mask")
    rows, _ = trained(subject)
    original = forward_backward.importance_corrections

    def none(*args):
        found = original(*args)
        return dataclasses.replace(found, weights=torch.zeros_like(found.weights))

    assert left_out.without_gradient(subject, "check", rows, "norm 0").cause == "correction-mutes-rollouts"
    monkeypatch.setattr(forward_backward, "importance_corrections", none)
    assert left_out.without_gradient(subject, "check", rows, "norm 0").cause == "correction-mutes-rollouts"


def test_weights_products_are_seen_where_the_training_step_computes_them(subject_of, monkeypatch):
    monkeypatch.setitem(CAPS, "sequence_mask", 1 + 1e-9)
    with ExitStack() as stack:
        product_weights(stack, "lookup")
        subject = subject_of(importance_correction="sequence_mask", bf16=True)
        assert (found := left_out.correction(subject)) is not None and found.cause == "correction-mutes-rollouts"


def test_weights_of_low_precision_are_told_from_those_that_did_not_arrive(subject_of):
    subject = subject_of()
    served = subject.run.engine.served_weights()
    name = next(n for n, p in subject.run.policy.model.named_parameters() if n in served and p.ndim == 2)
    kept = served[name].clone()
    for change, low in ((1.01, True), (-1.0, False)):
        with torch.no_grad():
            served[name].copy_(kept * change)
        assert (found := other_weights(subject)) is not None and found[0] == "engine-trainer-mismatch"
        assert name in found[1] and ("as weights of low precision do" in found[1]) == low
    with torch.no_grad():
        served[name].copy_(kept)
    assert other_weights(subject) is None


def test_calls_must_be_what_the_policy_wrote(subject_of):
    for injected, cause in ((False, None), (True, "tool-arguments-changed")):
        with ExitStack() as stack:
            if injected:
                chat_method("parse", calls_without_names)(stack, "lookup")
            found = tools._as_written(subject := subject_of(), subject.drawn)
        assert found is not None and found.cause == cause


def test_texts_are_normalised_before_they_are_written_as_json(examined):
    with ExitStack() as stack:
        held_out_respaced(stack, "lookup")
        assert "held-out-in-training" in causes(task_sets.checks(examined()))
    assert causes(task_sets.checks(examined())) == []


def test_calls_in_vain_that_earn_something_are_named(examined):
    assert causes(paid_calls.checks(examined())) == []
    with ExitStack() as stack:
        graded_as(correct=paid_by_the_call)(stack, "lookup")
        assert causes(paid_calls.checks(examined())) == ["reward-exploitable"]


def test_a_retriever_that_returns_all_evidence_at_once_gives_nothing_away(examined):
    given = {"env": "musique", "env_args": ("datasets=synthetic", "num_examples=60", "hops=2", "retriever=golden")}
    assert causes(tool_results.checks(examined(**given))) == []


def test_answers_that_neighbours_have_exchanged_are_named(examined):
    tasks = lookup_tasks()
    assert causes(contradicted_answers.checks(examined(tasks=tasks))) == []
    moved = dataclasses.replace(tasks, train=every_fourth_exchanged(list(tasks.train), "train"))
    assert causes(contradicted_answers.checks(examined(tasks=moved))) == ["oracle-fails"]


def evaluated(change):
    """The training loop's evaluation with a sampler that is another one."""
    original = training_loop.evaluate

    async def evaluate(sampler, world, how, *, temperature, rollouts=1):
        return await original(change(sampler), world, how, temperature=temperature, rollouts=rollouts)

    return evaluate


def told_more(sampler):
    """With a system message in front of every prompt."""
    chat, prompt = copy.copy(sampler.chat), sampler.chat.prompt

    def brief(messages, **how):
        return prompt([{"role": "system", "content": "Be brief."}, *messages[1:]], **how)

    object.__setattr__(chat, "prompt", brief)  # a chat is frozen
    return dataclasses.replace(sampler, chat=chat)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda s: s, None),
        (lambda s: dataclasses.replace(s, sampling=dataclasses.replace(s.sampling, top_k=5)), PROMPTED),
        (lambda s: dataclasses.replace(s, sampling=dataclasses.replace(s.sampling, max_tokens=8)), PROMPTED),
        (told_more, PROMPTED),
    ],
    ids=["as in training", "other settings", "fewer tokens", "another prompt"],
)
def test_evaluations_must_ask_for_what_training_asks_for(subject_of, monkeypatch, change, cause):
    subject = subject_of()
    traces = held_out._sampled(subject, subject.run.tasks.held_out)
    monkeypatch.setattr(training_loop, "evaluate", evaluated(change))
    assert as_asked(subject, traces).cause == cause


def test_greedy_evaluations_must_be_greedy(subject_of):
    with ExitStack() as stack:
        sampled_at_all_times(stack, "lookup")
        subject = subject_of()
        found = as_asked(subject, [])
    assert found.cause == PROMPTED and "temperature 1.0, not 0.0" in found.evidence


def test_rounding_of_one_token_in_thousands_is_no_sight_of_other_rows():
    """A real model in bfloat16, healthy, changed one token by 0.11 nats: Qwen2.5-Coder-0.5B on MuSiQue, an H200."""
    differences = [torch.full((500,), 0.01) for _ in range(8)]
    differences[3][7] = 0.11
    assert changed_by(differences, bf16=True) < thresholds.OTHER_TOKENS[True] < 0.11
    assert changed_by(differences, bf16=False) == pytest.approx(0.11)
    assert changed_by([torch.full((500,), 0.3)], bf16=True) > thresholds.OTHER_TOKENS[True]
    assert changed_by([], bf16=True) == 0.0


def test_results_that_hold_the_results_before_them_are_named(examined):
    with ExitStack() as stack:
        rollout_results(after_the_conversation)(stack, "lookup")
        assert causes(tool_results.checks(examined())) == ["tool-results-mixed"]
    assert causes(tool_results.checks(examined())) == []


@pytest.mark.parametrize(("failed", "cause"), [(0, None), (5, None), (20, "environment-fails")])
def test_a_few_failures_of_few_transcripts_may_be_chance(failed, cause):
    error = SimpleNamespace(type="TaskError", message="the sandbox was lost")
    played = [
        SimpleNamespace(
            trace=SimpleNamespace(ok=i >= failed, errors=[error]), seconds=0.0, task=SimpleNamespace(key=str(i))
        )
        for i in range(96)
    ]
    environment = SimpleNamespace(silent=played, has_oracle=False, sample=played, hanging=False)
    assert transcripts._play(environment).cause == cause


@pytest.mark.parametrize(
    ("general", "member"),
    [
        ("no-gradient", "correction-mutes-rollouts"),
        ("optimizer-moves-nothing", "no-gradient"),
        ("prompt-replaced", "truncated-context"),
        ("reward-exploitable", "reward-format-dominated"),
        ("evaluation-differs", "oracle-fails"),
    ],
)
def test_a_general_cause_stands_for_what_its_evidence_does_not_tell_apart(general, member):
    assert member in stands_for(general) and general not in stands_for(member)
