"""Do rollouts finish without errors, does each group have one task, and do turns end with the model's end token?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from plumbob.rollout import EngineError
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.causes.rollouts import failure_cause
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.task_sets import enough_tasks
from plumbob.trainer.doctor.environment import spread
from plumbob.trainer.doctor.subject import Refused, Subject
from plumbob.trainer.policy.loading import load_chat
from plumbob.trainer.rollouts.batch import Batch, RunFailed
from plumbob.trainer.training.row_checks import surplus, unlikely_end

ORDER = 10

ASKED_AGAIN = 4
"""Number of refused requests that are sent to the engine again."""


def probe(subject: Subject) -> Iterator[Finding]:
    try:
        batch = subject.drawn.batch
    except RunFailed as error:
        check = "rewards are finite" if error.cause == "reward-not-finite" else "rollouts finish without errors"
        yield Finding(check, "fail", str(error), error.cause or "environment-fails")
        return
    share = batch.errored / batch.num_rollouts
    first = f"; the first reason: {batch.failures[0]}" if batch.failures else ""
    evidence = f"{batch.errored} of {batch.num_rollouts} rollouts failed, {batch.engine_failures} in the engine{first}"
    failed, check = share > thresholds.FAILED_ROLLOUTS, "rollouts finish without errors"
    if not failed and batch.engine_failures and (always := _always_refused(subject)):
        yield Finding(check, "fail", f"{evidence}; {always}", "engine-fails")
    else:
        verdict = "fail" if failed else "unsure" if share > thresholds.FAILED_ROLLOUTS / 4 else "pass"
        yield Finding(check, verdict, evidence, _cause_of_failures(batch) if failed else None)
    if subject.run.config.max_prompt_length is not None:
        yield _tasks_left(subject)
    if (copied := _copied(subject)) is not None:
        yield copied
    else:
        yield _grouping(subject)
        yield _distinct(subject)
    yield _stops(subject)
    if subject.run.tasks.held_out:
        yield _apart(subject)


def _apart(subject: Subject) -> Finding:
    """Is no task both trained on and held out, of those that the run has, and not only of those that were loaded before it?"""
    tasks = subject.run.tasks
    both = tasks.trained_and_held_out()
    evidence = f"{both} of the run's {len(tasks.held_out)} held-out tasks are among its training tasks"
    return Finding.of("held-out tasks are not trained on", ("held-out-in-training" if both else None, evidence))


def _tasks_left(subject: Subject) -> Finding:
    """Are there enough different tasks among those that --max-prompt-length leaves? Only a tokenizer can tell.

    Where it leaves out nearly all, more tasks than otherwise count as few: it selects the shortest ones.
    """
    config, tasks = subject.run.config, subject.run.tasks
    left, every = len(tasks.train), len(tasks.train) + tasks.too_long
    least = thresholds.FEW_TASKS * (4 if left < thresholds.LEFT_BY_LENGTH * every else 1)
    found = next(enough_tasks(config, tasks.train, least))
    check = "there are enough different tasks with prompts that are short enough"
    evidence = (
        f"--max-prompt-length {config.max_prompt_length} leaves {left:,} of {every:,} training tasks: {found.evidence}"
    )
    return dataclasses.replace(found, check=check, evidence=evidence)


def _always_refused(subject: Subject) -> str:
    """Evidence that the engine refuses requests for what they are, and not by chance; "" if it answers one the next time.

    Then few failures are enough: the same kinds of rollouts, such as long ones, are lost in every step, with their groups.
    """
    drawn = subject.drawn
    refused = sorted(drawn.refused, key=lambda request: len(request.prompt_ids))
    again = [refused[i] for i in spread(len(refused), ASKED_AGAIN)]
    if not again or any(_answered(subject, request) for request in again):
        return ""
    shortest = len(refused[0].prompt_ids)
    answered = [len(call.prompt_ids) for calls in drawn.calls for call in calls]
    longer = sum(length >= shortest for length in answered)
    return (
        f"{len(again)} of the refused requests were sent again, one at a time, and all were refused again; their prompts "
        f"have {shortest} to {len(refused[-1].prompt_ids)} tokens, as many as or more than all but {longer} of the "
        f"{len(answered)} that were answered; {drawn.batch.groups_broken} of {subject.groups} groups are left out for it"
    )


def _answered(subject: Subject, request: Refused) -> bool:
    try:
        subject.generate([request.prompt_ids], request.sampling)
    except EngineError:
        return False
    return True


def _cause_of_failures(batch: Batch) -> str:
    """The cause of most failed rollouts: what hangs, what raises, or the engine."""
    if 2 * batch.stuck > batch.errored:
        return "environment-hangs"
    return failure_cause(batch.errored, batch.engine_failures)


def _tasks_of_groups(subject: Subject) -> dict[str, list[str | None]]:
    """Group -> hash of the task of each of its rollouts."""
    drawn = subject.drawn
    groups: dict[str, list[str | None]] = {}
    for sample, trace in zip(drawn.samples, drawn.traces, strict=True):
        groups.setdefault(sample.group, []).append(trace.task.hash)
    return groups


def _copied(subject: Subject) -> Finding | None:
    """Are most rows copies of others, in place of the step's other rollouts? None if not; then rows tell their groups' tasks."""
    drawn = subject.drawn
    rollouts = [tuple(trace.branches[0].token_ids) for trace in drawn.batch.traces if trace.ok]
    count, rows = surplus((tuple(s.token_ids) for s in drawn.samples), rollouts), len(drawn.samples)
    if count <= thresholds.COPIED_ROWS * rows:
        return None
    evidence = (
        f"{count} of {rows} rows are copies of another row, in place of {len(set(rollouts))} different rollouts that were "
        "sampled"
    )
    return Finding("rows are the rollouts that were sampled", "fail", evidence, "groups-without-variety")


def _grouping(subject: Subject) -> Finding:
    size, groups = subject.run.config.num_generations, _tasks_of_groups(subject)
    mixed = sum(len(set(tasks)) > 1 for tasks in groups.values())
    oversize = sum(len(tasks) > size for tasks in groups.values())
    evidence = f"{len(groups)} groups of up to {max(map(len, groups.values()))}, {mixed} have more than one task"
    bad = mixed or oversize
    return Finding(
        "a group's rollouts share one task", "fail" if bad else "pass", evidence, "groups-mixed" if bad else None
    )


def _distinct(subject: Subject) -> Finding:
    """Does each group of the first step have a task of its own, where there are tasks enough?"""
    groups = _tasks_of_groups(subject)
    # What the data holds twice is named by the checks of the data.
    there = len({task.hash for task in subject.run.tasks.take(0, subject.groups)})
    used = len({tasks[-1] for tasks in groups.values()})
    evidence = f"{len(groups)} groups have {used} different tasks; the next {subject.groups} of the data have {there}"
    mixed = any(len(set(tasks)) > 1 for tasks in groups.values())  # then the last task of a group says nothing
    bad = used < min(len(groups), there) and not mixed
    return Finding(
        "groups of a step have different tasks",
        "fail" if bad else "pass",
        f"{evidence}: some processes or groups take the same ones" if bad else evidence,
        "few-distinct-tasks" if bad else None,
    )


def _stops(subject: Subject) -> Finding:
    """A turn must end with the chat template's end token, and must not contain it before that."""
    run = subject.run
    ends = set(load_chat(run.tokenizer, run.policy.model.generation_config).stop_token_ids)
    calls = [call.completion for turns in subject.drawn.calls for call in turns]
    early = [c for c in calls if c.finish_reason == "stop" and c.token_ids and c.token_ids[-1] not in ends]
    # Other special tokens inside a turn are those of a policy that rambles.
    run_on = [c for c in calls if ends.intersection(c.token_ids[:-1])]
    forced = [c for c in calls if c.finish_reason == "stop" and unlikely_end(c.token_ids, c.logprobs, ends)]
    count = max(len(calls), 1)
    bad = len(early) + len(run_on) + len(forced) > thresholds.RUN_ON_SHARE * count
    evidence = (
        f"of {len(calls)} turns, {len(run_on)} continue after an end token, {len(early)} stop at another token and "
        f"{len(forced)} end with an end token that has a probability below 1e-5 there"
    )
    if bad:
        wanted = ", ".join(repr(run.tokenizer.decode([i])) for i in sorted(ends))
        evidence += (
            f"; the chat template ends turns with {wanted}, this run with ids {list(run.sampler.chat.stop_token_ids)}"
        )
    return Finding(
        "turns end with the model's end token", "fail" if bad else "pass", evidence, "stop-token-wrong" if bad else None
    )
