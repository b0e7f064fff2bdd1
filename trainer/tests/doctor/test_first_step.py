"""Probes of the first step's tasks, of prompts that the engine has otherwise, and of the gradient that the optimizer gets."""

import dataclasses
from contextlib import ExitStack

import pytest
import torch
from plumbob.testing.faults.doubles import generating, rewritten, without_headers
from plumbob.testing.faults.field2_parts import before_updates, losses
from plumbob.testing.faults.field10_seen_doubles import adapter_at_random
from plumbob.testing.faults.field10_unseen_doubles import (
    begun_again,
    calls_encoded_twice,
    clipped_with_scale,
    same_tasks_twice,
)
from plumbob.testing.faults.field11_seen_doubles import last_row_everywhere, normalised_where_clipped
from plumbob.testing.faults.field11_unseen_doubles import BuffersLost, NotReset, failed_as_one_token
from plumbob.testing.faults.field_parts import (
    batches_changed,
    engine_logits,
    engine_prompts,
    engine_updates,
    rows_changed,
)
from plumbob.trainer.doctor.other_prompts import _called_by_strings
from plumbob.trainer.doctor.probes import data, empty_turns, movement, parity, penalties, sync, tokens, training_step


def found(findings, check):
    (finding,) = [f for f in findings if f.check == check]
    return finding


@pytest.mark.slow
def test_groups_that_have_the_same_task_are_named_and_each_rollout_keeps_its_own(subject_of):
    assert data._distinct(subject_of()).verdict == "pass"
    with ExitStack() as stack:
        same_tasks_twice(stack, "lookup")
        subject = subject_of(groups=4)
        finding = data._distinct(subject)
        drawn = subject.drawn
    assert finding.cause == "few-distinct-tasks" and "4 groups have 2 different tasks" in finding.evidence
    assert [task.hash for task in drawn.tasks] == [trace.task.hash for trace in drawn.traces]


@pytest.mark.slow
def test_a_batch_of_copies_of_one_row_is_not_taken_for_groups_of_several_tasks(subject_of):
    assert "rows are the rollouts that were sampled" not in [f.check for f in data.probe(subject_of())]
    with ExitStack() as stack:
        batches_changed(last_row_everywhere)(stack, "lookup")
        first = next(f for f in data.probe(subject_of(groups=4)) if f.verdict == "fail")
    assert first.cause == "groups-without-variety" and "rows are copies of another row" in first.evidence


@pytest.mark.slow
def test_rows_without_a_gradient_of_their_own_do_not_blame_the_mask(subject_of):
    """A single row has no advantage where advantages are normalised over the rows of a microbatch."""
    with ExitStack() as stack:
        normalised_where_clipped(stack, "lookup")
        findings = list(training_step.probe(subject_of(groups=4)))
    assert found(findings, "the loss is on the positions of the loss mask").verdict == "unsure"
    assert [f.cause for f in findings if f.verdict == "fail"] == ["loss-differs-from-settings"]


def test_arguments_of_calls_become_strings_and_other_texts_stay(tokenizer):
    def changed(text):
        ids = tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.decode(_called_by_strings(tokenizer, ids))

    assert changed('{"name": "f", "arguments": {"a": 1}}') == '{"name": "f", "arguments": "{\\"a\\": 1}"}'
    assert changed("no call here") == "no call here"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (engine_prompts(begun_again), "with the first token of prompts three times"),
        (None, "with the arguments of earlier calls as a string that holds their JSON"),
    ],
)
def test_a_prompt_that_the_engine_has_otherwise_is_named(subject_of, change, said):
    with ExitStack() as stack:
        if change:
            change(stack, "lookup")
        subject = subject_of(groups=4)
        if not change:
            calls_encoded_twice(stack, subject.run)
        first = next(f for f in parity.probe(subject) if f.check == "engine and trainer agree on sampled tokens")
    assert first.cause == "prompt-replaced" and said in first.evidence, first.evidence


@pytest.mark.slow
def test_a_gradient_that_is_lost_before_the_optimizer_is_named(subject_of):
    check = "the optimizer gets the gradient that was computed"
    assert found(movement.probe(subject_of()), check).verdict == "pass"
    with ExitStack() as stack:
        before_updates(clipped_with_scale)(stack, "lookup")
        finding = found(movement.probe(subject_of()), check)
    assert finding.cause == "gradient-clipped-to-nothing", finding.evidence


@pytest.mark.slow
def test_a_policy_that_begins_beside_the_model_is_told_from_a_wrong_reference(subject_of):
    check = "the reference policy is the initial policy"
    with ExitStack() as stack:
        adapter_at_random(stack, "lookup")
        finding = found(training_step.probe(subject_of(peft=True, kl_beta=0.05)), check)
    assert finding.cause == "reference-is-another-policy"
    assert "the reference computes what the model does that the run began with" in finding.evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        (
            lambda values: values - values.mean(),
            "loss-differs-from-settings",
            "the loss takes the mean off the advantages",
        ),
        (lambda values: values.abs(), "gradient-backwards", "with an advantage of 0 its norm is 0"),
        (
            lambda values: values.clamp(min=0),
            "loss-differs-from-settings",
            "rollouts with a negative advantage have none",
        ),
        (
            lambda values: values.clamp(max=0),
            "loss-differs-from-settings",
            "rollouts with a positive advantage have none",
        ),
    ],
)
def test_advantages_whose_sign_is_lost_or_counts_alone_are_told_from_a_mask(subject_of, change, cause, said):
    with ExitStack() as stack:
        losses(lambda inputs: dataclasses.replace(inputs, advantages=change(inputs.advantages)))(stack, "lookup")
        first = next(f for f in training_step.probe(subject_of(groups=4)) if f.verdict == "fail")
    assert first.cause == cause and said in first.evidence, first


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "cause"), [(1e-8, None), (1e-2, "optimizer-moves-nothing")])
def test_an_epsilon_that_outweighs_the_gradient_is_named(subject_of, epsilon, cause):
    subject = subject_of(groups=4)
    for group in subject.run.optimizer.param_groups:
        group["eps"] = epsilon
    check = found(movement.probe(subject), "one update changes the weights in their own precision")
    assert check.cause == cause and ("epsilon outweighs" in check.evidence) == bool(cause)


@pytest.mark.slow
def test_a_banned_token_is_found_by_its_name(subject_of):
    with ExitStack() as stack:
        banned = torch.tensor([201])
        engine_logits(lambda engine, requests, logits: logits.index_fill(-1, banned, -1e9))(stack, "gsm8k")
        subject = subject_of(env="gsm8k", model="tiny-gsm8k", env_args=("datasets=synthetic",), max_tokens=48)
        first = next(f for f in parity.probe(subject) if f.check == "engine and trainer agree on sampled tokens")
    assert first.cause == "sampling-truncated" and "computes without '" in first.evidence, first.evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (torch.Tensor.neg_, "gradient-backwards"),
        (torch.Tensor.normal_, "does-not-overfit"),
        (lambda gradient: gradient.mul_(3.0), None),
    ],
)
def test_a_gradient_that_is_another_one_where_the_optimizer_sees_it_is_named(subject_of, change, cause):
    def before(sharding):
        for group in sharding.optimizer.param_groups:
            for parameter in group["params"]:
                change(parameter.grad)

    with ExitStack() as stack:
        before_updates(before)(stack, "lookup")
        check = found(movement.probe(subject_of(groups=4)), "the optimizer gets the gradient that was computed")
    assert check.cause == cause, check.evidence


@pytest.mark.slow
def test_an_engine_whose_other_prompts_make_turns_empty_is_named(subject_of):
    subject = subject_of(groups=4)
    space = subject.run.tokenizer.encode(" ", add_special_tokens=False)
    with ExitStack() as stack:
        engine_prompts(lambda ids, sampling: (ids + space, sampling))(stack, "lookup")
        (check,) = empty_turns.probe(subject_of(groups=4))
    assert check.cause == "prompt-replaced" and "are an end token alone" in check.evidence, check.evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "inject", "cause"),
    [
        (failed_as_one_token, None, "row-not-what-was-sampled"),
        (None, rewritten(without_headers), "assistant-header-missing"),
    ],
)
def test_a_reply_that_is_missing_is_told_from_a_header_that_is(subject_of, change, inject, cause):
    with ExitStack() as stack:
        if change:
            rows_changed(change)(stack, "lookup")
        subject = subject_of(groups=4)
        if inject:
            inject(stack, subject.run)
        check = found(tokens.probe(subject), "the trained row is what the engine saw and sampled")
    assert check.cause == cause, check.evidence


@pytest.mark.slow
def test_an_engine_that_has_the_weights_and_computes_otherwise_is_no_lost_sync(subject_of):
    with ExitStack() as stack:
        lost = BuffersLost()
        engine_updates(lost)(stack, "lookup")
        check = next(iter(sync.probe(subject_of(groups=4))))
    assert lost.syncs > 1 and check.cause == "engine-trainer-mismatch" and "38 of 38 tensors arrived" in check.evidence


@pytest.mark.slow
def test_another_request_before_the_prompt_is_not_taken_for_a_penalty(subject_of):
    subject = subject_of(groups=4)
    with ExitStack() as stack:
        generating(NotReset())(stack, subject.run)
        causes = [f.cause for f in penalties.probe(subject) if f.verdict == "fail"]
    assert causes in ([], ["prompt-replaced"]), causes
