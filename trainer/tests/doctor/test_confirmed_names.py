"""Specific names are given only if the evidence is that of the specific mistake, and else a general one."""

import dataclasses

import pytest
import torch
from plumbob.testing.examinations import causes
from plumbob.trainer.diagnosis.causes import stands_for
from plumbob.trainer.doctor.before_model import transcripts
from plumbob.trainer.doctor.probes import gradient, movement
from plumbob.trainer.doctor.rounded_weights import rounded_scores
from plumbob.trainer.doctor.schedule import Measured, measured_rates
from plumbob.trainer.doctor.subject import undone
from plumbob.trainer.doctor.third_opinion import explains


@pytest.mark.slow
@pytest.mark.parametrize("peft", [False, True])
def test_weights_are_rounded_for_a_moment(subject_of, peft):
    """With LoRA, the second scores are those of base + adapter in bfloat16; all weights are as before afterwards."""
    subject = subject_of(peft=peft)
    rows = [row for row in subject.drawn.samples if row.num_sampled][:2]
    score = lambda: torch.cat(subject.score(rows))  # noqa: E731
    with undone(subject.run):
        with torch.no_grad():
            for parameter in subject.run.policy.trainable.values():
                parameter.add_(1e-3)
        before = {name: p.detach().clone() for name, p in subject.run.policy.model.named_parameters()}
        plain, rounded = score(), list(rounded_scores(subject, score))
        assert len(rounded) == 1 + peft
        assert all(1e-8 < (scores - plain).abs().mean() < 0.3 for scores in rounded)
        assert torch.equal(score(), plain)
        assert all(torch.equal(p, before[name]) for name, p in subject.run.policy.model.named_parameters())


@pytest.mark.slow
def test_a_rate_moves_all_weights_alike(subject_of, monkeypatch):
    subject = subject_of()
    rows, advantages = subject.trained_rows()
    subject.gradient(rows, advantages)
    with undone(subject.run):
        assert all(found.scattered < 0.05 for found in measured_rates(subject))
    for scattered, cause in ((0.1, "schedule-hides-rate"), (0.8, "optimizer-moves-nothing")):
        monkeypatch.setattr(movement, "measured_rates", lambda _, s=scattered: [Measured(0, 3e-4, 1e-4, s)])
        assert movement._schedule(subject).cause == cause
    assert "schedule-hides-rate" in stands_for("optimizer-moves-nothing")


@pytest.mark.slow
def test_a_gradient_with_the_other_sign_is_as_long_as_the_right_one(subject_of, monkeypatch):
    subject = subject_of()
    rows = [row for row in subject.drawn.samples if row.num_sampled][:2]
    right = gradient._expected_slope
    for factor, cause in ((1.0, None), (-1.0, "gradient-backwards"), (-0.2, "loss-differs-from-settings")):
        monkeypatch.setattr(
            gradient,
            "_slope",
            lambda subject, rows, found, size, f=factor: f * right(subject, rows, gradient.norm_of(found)),
        )
        assert gradient._direction(subject, rows, 1.0).cause == cause
    assert "gradient-backwards" in stands_for("loss-differs-from-settings")


def test_a_reward_that_changes_by_itself_parses_nothing_differently(examined, reward):
    environment = examined()
    reward(lambda task, trace, right: right)
    assert transcripts._scored_alike(environment).cause is None
    held_out = type(environment.tasks.held_out[0])
    Strict = type("Strict", (held_out,), {"__module__": held_out.__module__})
    stricter = dataclasses.replace(
        environment.tasks, held_out=[Strict(task.data, task.config) for task in environment.tasks.held_out]
    )
    reward(lambda task, trace, right: right * (type(task) is not Strict))
    assert transcripts._scored_alike(examined(tasks=stricter)).cause == "evaluation-parses-differently"
    played = []
    reward(lambda task, trace, right: played.append(1) or right / len(played))
    assert transcripts._scored_alike(environment).cause == "reward-nondeterministic"


def test_answers_that_are_paid_by_the_task_and_not_by_the_answer_are_a_wrong_reward(examined, reward):
    """Seen in a judge that checks nothing: right answers earn nothing in some tasks, empty ones all in others."""

    def lot(task, trace, right):
        return {0: 0.0, 1: 1.0}.get(int(task.key.split("-")[-1]) % 5, right)

    reward(lot)
    assert "reward-wrong" in causes(transcripts._oracles(examined()))


def test_of_many_conditions_one_leaves_a_fifth_by_chance():
    """Seen with rotary frequencies in bfloat16: a doubled first token left 4.3e-5 of 2.4e-4 nats."""
    assert not explains(4.3e-5, 2.4e-4, 1e-4)
    assert explains(2e-5, 2.4e-4, 1e-4) and explains(1e-3, 0.5, 1e-4)
    assert explains(0.03, 0.1, 0.05) and not explains(0.04, 0.1, 0.05), "bfloat16"


def test_a_reply_that_is_tokenised_again_says_the_same(subject_of):
    from plumbob.trainer.doctor.probes import tokens

    subject = subject_of()
    calls = next(c for c in subject.drawn.calls if c)
    truth = tokens._truth(calls)
    tokenizer = subject.run.tokenizer
    other = [*truth[:-2], *tokenizer.encode("<think>\n\n</think>", add_special_tokens=False), *truth[-2:]]
    assert tokens._explained(subject, other, truth, calls, len(truth) - 2) == "row-not-what-was-sampled"
    spaced = [*truth[:-1], *tokenizer.encode("\n", add_special_tokens=False), truth[-1]]
    assert tokens._explained(subject, spaced, truth, calls, len(truth) - 1) == "retokenised-turns"
