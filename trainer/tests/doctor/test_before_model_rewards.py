"""Checks of rewards that need no model: an environment's own perfect transcripts, cheap ones, and faults put into its reward."""

import itertools
import json
import logging
import re

import pytest
import verifiers.v1 as vf
from plumbob.testing.examinations import all_findings, causes, changed, lookup_tasks, loud
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor.before_model import cheap, task_sets, transcripts
from plumbob.trainer.rollouts.tasks import load_tasks
from vf_gsm8k import taskset
from vf_gsm8k.taskset import GSM8KTask
from vf_lookup.taskset import LookupTask


def accepts_parts(task, trace, right):
    return float(task.data.answer in (trace.last_reply or ""))


def accepts_nothing_at_all(task, trace, right):
    return float((trace.last_reply or "") in task.data.answer)


def accepts_anything_short(task, trace, right):
    return float(0 < len(trace.last_reply or "") < 12)


def accepts_what_a_tool_said(task, trace, right):
    said = (str(node.message.content) for node in trace.nodes if node.message.role == "tool")
    return float(any(task.data.answer in text for text in said))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "quoted"),
    [
        (accepts_what_a_tool_said, "the oracle's calls with another task's answer"),
        (accepts_parts, "several answers joined by or"),
        (accepts_nothing_at_all, "an empty reply"),
        (accepts_anything_short, "another task's answer"),
        (lambda task, trace, right: right + 0.2 * trace.num_turns, "the oracle's first call again and again"),
    ],
)
def test_rewards_that_a_cheap_transcript_earns_are_exploitable(examined, reward, function, quoted):
    reward(function)
    findings = list(cheap.checks(examined(env_args=("num_examples=200",))))
    assert causes(findings) == ["reward-exploitable"]
    assert findings[0].evidence.startswith(quoted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda task, trace, right: 0.05 * right,
        lambda task, trace, right: 0.4 * right,
        lambda task, trace, right: 100 * right - 50,
        lambda task, trace, right: right if right or trace.last_reply else 0.0,
        lambda task, trace, right: right - (0 if right or not trace.last_reply else 1),  # -1 wrong, 0 silent, 1 right
        lambda task, trace, right: 0.3 * bool(trace.last_reply) + 0.7 * right,  # a bonus for any reply
        lambda task, trace, right: right - 1e-5 * len(trace.last_reply or ""),  # a price of length
        lambda task, trace, right: right * (0.2 + 0.1 * len(task.data.chain)),  # harder tasks are worth more
    ],
    ids=["small", "0.4", "-50 to 50", "plain", "abstaining", "bonus", "length", "by difficulty"],
)
def test_healthy_rewards_of_any_range_raise_no_alarm(examined, reward, function):
    reward(function)
    environment = examined(env_args=("num_examples=200",))
    assert loud([*transcripts.checks(environment), *cheap.checks(environment)]) == []


def test_one_answer_to_all_questions_is_exploitable(examined):
    tasks = changed(lookup_tasks(), lambda i, data: data.model_copy(update={"answer": "amber"}))
    (finding,) = (f for f in cheap.checks(examined(tasks=tasks)) if f.cause)
    assert finding.cause == "reward-exploitable" and "one reply, 'amber', earns 1 in 24 tasks" in finding.evidence


def test_a_reward_of_two_answers_is_no_more_exploitable_than_chance(examined):
    """Yes or no: the other answer is always wrong, and a constant one right half of the time."""
    tasks = changed(lookup_tasks(), lambda i, data: data.model_copy(update={"answer": "yes" if i % 2 else "no"}))
    environment = examined(tasks=tasks)
    assert {task.data.answer for task in environment.sample} == {"yes", "no"}
    assert loud([*task_sets.checks(environment), *cheap.checks(environment)]) == []


@pytest.mark.slow
def test_right_answers_that_silently_earn_nothing_are_shown_with_their_task(examined, reward):
    bad = {
        task.key for i, task in enumerate(load_tasks(TrainConfig(env_args=("num_examples=200",))).train) if i % 4 == 0
    }
    reward(lambda task, trace, right: 0.0 if task.key in bad else right)
    findings = list(transcripts.checks(examined(env_args=("num_examples=200",))))
    assert causes(findings) == ["oracle-fails"]
    finding = next(f for f in findings if f.cause)
    assert any(key in finding.evidence for key in bad) and finding.command == "evaluate lookup --oracle"


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_right_answers_that_earn_nothing_after_an_error_that_is_caught_are_told_from_others(
    examined, reward, elsewhere
):
    """An error that is caught for other tasks as well is not why these earn nothing."""

    def caught(task, trace, right):
        bad = int(task.key.rsplit("-", 1)[1]) % 4 == 0
        try:
            return right / (0.0 if bad or elsewhere else 1.0)
        except ZeroDivisionError:
            return 0.0 if bad else right

    reward(caught)
    finding = next(f for f in transcripts.checks(examined(env_args=("num_examples=200",))) if f.cause)
    assert finding.cause == ("oracle-fails" if elsewhere else "grader-swallows-errors")
    assert elsewhere or "ZeroDivisionError in caught (test_before_model_rewards.py" in finding.evidence


@pytest.mark.parametrize(
    "paid",
    [
        lambda number, right: 1.0 if number % 3 == 0 else right,
        # Right answers of some other tasks earn ten times as much, so that this is not the most that any earns.
        lambda number, right: 1.0 if number % 3 == 0 else 0.1 if not right else 10.0 if number % 7 == 0 else 1.0,
    ],
)
def test_empty_replies_that_earn_all_in_some_tasks_are_no_oracles_that_fail(examined, reward, paid):
    reward(lambda task, trace, right: paid(int(task.key.rsplit("-", 1)[1]), right))
    finding = next(f for f in transcripts.checks(examined(env_args=("num_examples=200",))) if f.cause)
    assert finding.cause == "reward-exploitable" and "an empty reply earns as much" in finding.evidence


def test_one_failing_oracle_of_many_is_a_failure(examined, reward):
    environment = examined(env_args=("num_examples=200",))
    bad = environment.sample[17].key
    reward(lambda task, trace, right: 0.0 if task.key == bad else right)
    finding = next(f for f in transcripts.checks(environment) if f.cause)
    assert finding.cause == "oracle-fails" and bad in finding.evidence


@pytest.mark.slow
def test_where_no_oracle_earns_anything_the_reward_or_the_oracle_is_wrong(examined, reward):
    reward(lambda task, trace, right: 0.2 * (1 - right) if not trace.last_reply else 0.1 * (1 - right))
    assert causes(transcripts.checks(examined(env_args=("num_examples=200",)))) == ["reward-wrong"]


def test_a_parser_that_reads_another_part_of_the_reply_is_told_from_answers_that_never_count(examined, monkeypatch):
    """The grader takes the first number of a reply for its answer, which is one of the working."""

    def first_number(reply, gold, strict=False):
        found = re.search(r"-?\d+", reply or "")
        return found is not None and found[0] == gold

    monkeypatch.setattr(taskset, "is_correct", first_number)
    args = ("datasets=synthetic", "num_examples=200")
    finding = next(f for f in transcripts.working(examined("gsm8k", env_args=args)) if f.cause)
    assert finding.cause == "answers-not-parsed" and finding.check.startswith("numbers in the working")
    worked = GSM8KTask.oracle
    monkeypatch.setattr(
        GSM8KTask, "oracle", lambda self: [vf.AssistantMessage(content=f"1 + 1 = 2\n{worked(self)[0].content}")]
    )
    finding = next(f for f in transcripts.checks(examined("gsm8k", env_args=args)) if f.cause)
    assert finding.cause == "answers-not-parsed" and "the answer alone earns 1" in finding.evidence


@pytest.mark.parametrize("paid", [-1.0, 0.0, 0.4, 1.0])
def test_an_answer_that_is_not_read_after_long_working_is_told_from_one_that_is_paid_less(examined, reward, paid):
    reward(lambda task, trace, right: right * (paid if len(trace.last_reply or "") > 150 else 1.0), GSM8KTask)
    environment = examined("gsm8k", env_args=("datasets=synthetic", "num_examples=64"), max_tokens=160)
    finding = next(f for f in transcripts.working(environment) if "long working" in f.check)
    cause = {0.0: "reward-wrong", -1.0: "reward-format-dominated"}.get(paid)
    assert finding.cause == cause, finding.evidence


def test_an_oracle_method_that_raises_is_named(examined, monkeypatch):
    monkeypatch.setattr(LookupTask, "oracle", lambda self: [][0])
    (finding,) = [f for f in transcripts.checks(examined(env_args=("num_examples=64",))) if f.cause]
    assert finding.cause == "oracle-fails" and "IndexError" in finding.evidence


@pytest.mark.slow
def test_a_constant_and_a_random_reward_are_told_apart(examined, reward):
    reward(lambda task, trace, right: 0.5)
    assert causes(transcripts.checks(examined(env_args=("num_examples=64",)))) == ["reward-constant"]
    reward(lambda task, trace, right: 0.0)  # right answers fail; what wrong ones would earn is not known
    assert causes(transcripts.checks(examined(env_args=("num_examples=64",)))) == ["oracle-fails"]
    numbers = iter(range(10_000))
    reward(lambda task, trace, right: float(next(numbers)))
    assert causes(transcripts.checks(examined(env_args=("num_examples=64",))))[0] == "reward-nondeterministic"


def test_an_error_that_is_only_logged_is_found(examined, reward):
    def swallowing(task, trace, right):
        try:
            json.loads(trace.last_reply or "")
        except RecursionError as error:
            logging.getLogger("grader").warning("cannot grade", exc_info=error)
            return 0.0
        except ValueError:
            pass
        if "\x00" in (trace.last_reply or ""):
            logging.getLogger("grader").error("cannot grade a NUL")
        return right

    reward(swallowing)
    findings = list(cheap.checks(examined(env_args=("num_examples=64",))))
    assert causes(findings) == ["grader-swallows-errors"] and "cannot grade" in findings[-1].evidence


def test_a_reward_that_raises_ends_the_examination(examined, reward):
    def raising(task, trace, right):
        raise RuntimeError("the judge is not available")

    reward(raising)
    findings = all_findings(examined(env_args=("num_examples=64",)))
    assert causes(findings) == ["environment-fails"] and "judge" in findings[-1].evidence


def test_a_reward_that_is_no_number_ends_the_examination(examined, reward):
    reward(lambda task, trace, right: float("nan"))
    assert causes(all_findings(examined(env_args=("num_examples=64",)))) == ["reward-not-finite"]


def test_a_reward_that_sometimes_fails_is_not_one_that_changes(examined, reward):
    """A transcript whose scoring failed has no reward, so that it cannot be compared with another scoring of it."""
    calls = itertools.count()

    def seldom(task, trace, right):
        if next(calls) % 25 == 24:
            raise RuntimeError("the sandbox was lost")
        return right

    reward(seldom)
    named = set(causes(transcripts.checks(examined(env_args=("num_examples=64",)))))
    assert not named & {"reward-nondeterministic", "evaluation-parses-differently"}
    assert next(calls) > 100


def test_an_empty_reply_that_earns_everything_is_told_from_a_reward_that_is_constant(examined, reward):
    """A grader that looks for the reply in the gold answer finds an empty reply in every answer, and other words in none."""
    reward(lambda task, trace, right: float((trace.last_reply or "") in task.data.answer))
    finding = next(f for f in transcripts.checks(examined(env_args=("num_examples=200",))) if f.cause)
    assert finding.cause == "reward-exploitable" and "replies of other words 0" in finding.evidence
