"""Does the reward tell right transcripts from wrong ones: the oracles' own, and empty ones?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from plumbob.rollout import ChatReply
from plumbob.rollout.scripted import ScriptedChat
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.swallowed_errors import swallowed
from plumbob.trainer.doctor.environment import Environment, Played, oracle_of, said, spread, tool_texts
from plumbob.trainer.evaluation.statistics import estimate
from plumbob.trainer.watch.trace_contents import says_failed

TWICE = 12
"""Number of transcripts that are scored twice."""
NAMED = 3
"""Most tasks that evidence names."""
_TOLERANCE = thresholds.REWARD_TOLERANCE


def checks(environment: Environment) -> Iterator[Finding]:
    yield (played := _play(environment))
    if played.verdict == "fail":
        return
    yield _deterministic(environment)
    yield from _oracles(environment)
    if environment.tasks.held_out:
        yield _scored_alike(environment)
        yield _held_out_fail(environment)
        if environment.has_oracle and (finding := _wrong_alike(environment)) is not None:
            yield finding


def _play(environment: Environment) -> Finding:
    """Can tasks be played and scored without errors, by the oracle and with an empty reply?"""
    check = "tasks can be played and scored without a model"
    every = [*environment.silent, *(environment.oracles if environment.has_oracle else ())]
    failed = [played for played in every if not played.trace.ok]
    if not failed:
        seconds = sum(played.seconds for played in every)
        return Finding(check, "pass", f"{len(every)} transcripts of {len(environment.sample)} tasks in {seconds:.1f} s")
    kinds = [played.trace.errors[-1].type for played in failed]
    first = failed[0].trace.errors[-1]
    evidence = (
        f"{len(failed)} of {len(every)} transcripts failed; the first, of task {failed[0].task.key}: "
        f"{first.type}: {' '.join(first.message.split())[:300]}"
    )
    if environment.hanging:
        return Finding(check, "fail", evidence, "environment-hangs")
    # A few failures of few transcripts may be chance: the lower end of the 95% interval counts.
    least = estimate([float(not played.trace.ok) for played in every]).low or 0.0
    if least <= thresholds.FAILED_ROLLOUTS / 4:
        return Finding(check, "unsure", evidence)
    return Finding(check, "fail", evidence, "reward-not-finite" if "NotFinite" in kinds else "environment-fails")


def _held_out_fail(environment: Environment) -> Finding:
    """Can held-out tasks be scored where training tasks can? What fails there leaves the evaluation's mean."""
    check, played = "held-out tasks can be scored like training tasks", environment.silent_held_out
    failed = [p for p in played if not p.trace.ok]
    evidence = f"{len(failed)} of {len(played)} empty transcripts of held-out tasks failed"
    if not failed:
        return Finding(check, "pass", evidence)
    error = failed[0].trace.errors[-1]
    evidence += f"; the first, of task {failed[0].task.key}: {error.type}: {' '.join(error.message.split())[:300]}"
    bad = len(failed) > thresholds.FAILED_ROLLOUTS * len(played)
    return Finding(check, "fail" if bad else "unsure", evidence, "environment-fails" if bad else None)


def perfect(environment: Environment) -> Finding | None:
    """Where oracles do not earn what the environment says that they earn: do their calls bring anything? Else None."""

    def imperfect(played: Sequence[Played]) -> list[Played]:
        return [p for p in played if p.reward < 1 - thresholds.NOT_PERFECT]

    # Those that earn 1 with the run's own settings need no others.
    if len(imperfect(environment.oracles)) <= len(environment.oracles) / 2:
        return None
    if not (own := environment.own_oracles):
        return None
    settings = ", ".join(f"{name}={value}" for name, value in environment.oracle_settings.items())
    evidence = f"with {settings} oracles of {len(own)} tasks earn {_range([p.reward for p in own])}"
    # A reward may have another scale; but calls that bring nothing do not find what the answer needs.
    low = imperfect(own)
    alone = [environment.play(p.task, ScriptedChat.of_messages(oracle_of(p.task)[-1:])) for p in low]
    vain = [p for p, bare in zip(low, alone, strict=True) if abs(bare.reward - p.reward) <= _TOLERANCE]
    bad = len(vain) > len(own) / 2
    if vain:
        keys = ", ".join(p.task.key for p in vain[:NAMED])
        evidence += f"; in {len(vain)}, such as {keys}, less than 1, and as much without their calls"
    check = "the calls of a perfect transcript find what its answer needs"
    # What pays these the same, whatever they find, is the reward.
    cause = "reward-wrong" if vain and _equal([p.reward for p in vain]) else "tool-results-wrong"
    results = [text for p in vain for text in tool_texts(p.trace)]
    if bad and (refused := [text for text in results if says_failed(text)]) and len(refused) > len(results) / 2:
        evidence += f"; {len(refused)} of {len(results)} results of their calls are errors, such as {refused[0][:60]!r}"
        cause = "tools-fail"
    return Finding(check, "fail" if bad else "pass", evidence, cause if bad else None)


def _deterministic(environment: Environment) -> Finding:
    """Empty transcripts, and the oracles' own, are scored twice; the two rewards must be equal."""
    check = "the same transcript of a script earns the same reward"
    pairs = [(p, environment.say(p.task, ChatReply(""))) for p in _some(environment.silent)]
    if environment.has_oracle:
        replies = environment.turns
        pairs += [(p, environment.play(p.task, ScriptedChat(replies[id(p.task)]))) for p in _some(environment.oracles)]
    pairs = [(a, b) for a, b in pairs if a.trace.ok and b.trace.ok]  # what failed has no reward: `_play` counts it
    gaps = [abs(a.reward - b.reward) for a, b in pairs]
    differ = sum(gap > _TOLERANCE for gap in gaps)
    evidence = f"{len(pairs)} transcripts were scored twice: {differ} got different rewards, by up to {max(gaps, default=0.0):.3g}"
    return Finding(check, "fail" if differ else "pass", evidence, "reward-nondeterministic" if differ else None)


def _some(played: Sequence[Played]) -> list[Played]:
    return [played[i] for i in spread(len(played), TWICE)] if played else []


def _oracles(environment: Environment) -> Iterator[Finding]:
    """Every task's own oracle against the same task's empty transcript: any task whose oracle earns no more is a fault."""
    check = "a perfect transcript earns more than an empty one, in every task"
    silent = environment.floors
    if not environment.has_oracle:
        rewards = list(silent.values())
        evidence = f"the environment has no oracle; empty transcripts of {len(rewards)} tasks earn {_range(rewards)}"
        yield Finding(check, "unsure", evidence)
        return
    raised = [
        (task, why) for task, why in zip(environment.sample, environment.replies, strict=False) if isinstance(why, str)
    ]
    played = [p for p in environment.oracles if p.trace.ok]
    rewards = [p.reward for p in played]
    nothing = [p for p in played if p.reward <= silent[id(p.task)] + _TOLERANCE]
    evidence = (
        f"oracles of {len(played)} tasks earn {_range(rewards)}, empty transcripts {_range(list(silent.values()))}"
    )
    if raised:
        evidence += (
            f"; the `oracle` method of {len(raised)} tasks failed, of {raised[0][0].key} with {raised[0][1][:200]}"
        )
    # If that is 0, right answers fail; whether wrong ones would earn something is not known.
    if played and len(nothing) == len(played) and _equal([*rewards, *silent.values()]) and abs(rewards[0]) > _TOLERANCE:
        other = [environment.say(p.task, ChatReply(OTHER_WORDS)).reward for p in _some(played)]
        constant = _equal([rewards[0], *other])
        evidence += f", and replies of other words {_range(other)}"
        yield Finding(check, "fail", evidence, "reward-constant" if constant else "reward-exploitable")
        return
    if nothing:
        keys = ", ".join(p.task.key for p in nothing[:NAMED])
        evidence += f"; in {len(nothing)} tasks the oracle earns no more than an empty reply, such as {keys}"
        if own := environment.own_oracles:
            # Where, for example, a retriever misses a document, the oracle cannot earn anything.
            settings = environment.oracle_settings
            missed = [p for p in own if p.reward <= environment.floor(p.task) + _TOLERANCE]
            evidence += f"; with {settings}, for which it is made, in {len(missed)} of {len(own)}"
            nothing, played = missed, own
    few = len(nothing) <= thresholds.SILENT_ZEROS * len(played)
    if nothing or raised:
        cause, unpaid = "oracle-fails", {id(p.task) for p in nothing}
        paid = [p for p in played if id(p.task) not in unpaid]
        error = swallowed(environment, nothing, paid) if few else ""
        if error:
            cause = "grader-swallows-errors"
            evidence += f"; whenever it does, and never otherwise, an error is raised and caught: {error}"
        # Where the oracle earns something in most tasks, its form can be read.
        unread = not error and not raised and 2 * len(nothing) > len(played)
        bare = _bare_answers(environment, nothing) if unread else []
        right = [p for p in bare if p.reward > environment.floor(p.task) + _TOLERANCE]
        if bare and len(right) > len(bare) / 2:
            cause = "answers-not-parsed" if len(right) == len(bare) else "reward-wrong"
            earned = _range([p.reward for p in right])
            evidence += f"; but in {len(right)} of {len(bare)} tasks the answer alone earns {earned}"
        elif sum(p.reward < environment.floor(p.task) - _TOLERANCE for p in nothing) > len(nothing) / 2:
            cause = "reward-wrong"  # something is taken from perfect transcripts, or paid for empty ones
        elif not error and paid and (over := _overpaid(environment, nothing, paid)):
            # Where right answers earn nothing in some tasks and wrong ones all in others, something else decides.
            cause = "reward-exploitable" if over > len(nothing) / 2 else "reward-wrong"
            evidence += f"; in {over} of these an empty reply earns as much as perfect transcripts of other tasks do"
        command = f"evaluate {environment.config.env} --oracle"
        yield Finding(check, "fail", evidence, cause, command=command)
        return
    yield Finding(check, "pass", evidence)


def _overpaid(environment: Environment, nothing: Sequence[Played], paid: Sequence[Played]) -> int:
    """In how many tasks of `nothing` an empty reply earns at least what most perfect transcripts of the tasks `paid` earn."""
    usual = median(p.reward for p in paid) - _TOLERANCE
    return sum(environment.floor(p.task) >= usual for p in nothing)


OTHER_WORDS = "I do not know."
"""A reply that answers no task, and is not empty."""
WORKING = ("That takes a few steps.\n", "That takes 2 or 3 steps.\n")
"""What is put before an oracle's last turn: working without numbers, and with some."""


def working(environment: Environment) -> Iterator[Finding]:
    """Neither numbers nor the length of what stands before the answer may take from a perfect transcript all that it earns.

    Nothing is asked where no text may stand there. The long text has as many characters as a turn may have tokens, which is a
    quarter to a half of what the model may write.
    """
    long = (WORKING[0] * (environment.config.max_tokens // len(WORKING[0]) + 1))[: environment.config.max_tokens]
    plain, numbered, longer, silent = [], [], [], []
    for p in _some([p for p in environment.oracles if p.trace.ok]):
        *before, last = environment.turns[id(p.task)]
        if last.calls or set(re.findall(r"\d+", last.content)) & {"2", "3"}:
            continue
        first, second, third = (
            environment.play(p.task, ScriptedChat([*before, ChatReply(text + last.content)])).reward
            for text in (*WORKING, f"{long}\n")
        )
        if abs(first - p.reward) <= _TOLERANCE:
            plain.append(first)
            numbered.append(second)
            longer.append(third)
            silent.append(environment.floors[id(p.task)])
    if len(plain) < TWICE / 2:
        return
    check = "numbers in the working are not taken for the answer"
    evidence = f"the oracles of {len(plain)} tasks earn {_range(plain)} with {WORKING[0].strip()!r} before the answer"
    lost = sum(second < first - _TOLERANCE for first, second in zip(plain, numbered, strict=True))
    gone = _lose_all(plain, numbered, silent)
    # A parser that takes the first number finds the answer in no task; who loses it in some only, or a part of it, is not known.
    bad = ("answers-not-parsed" if gone == len(plain) else "reward-wrong") if lost > len(plain) / 2 else None
    yield Finding.of(check, (bad, f"{evidence}, and {_range(numbered)} with {WORKING[1].strip()!r}"))
    check = "an answer after long working is read"
    # A reward may pay less for long replies; one that pays nothing does not read them.
    unread = _lose_all(plain, longer, silent)
    bad = "reward-wrong" if unread > len(plain) / 2 else None
    # Less than an empty reply earns is taken off for the form, whether the answer is read or not.
    taxed = sum(third < none - _TOLERANCE for third, none in zip(longer, silent, strict=True))
    if bad and taxed > len(plain) / 2:
        bad = "reward-format-dominated"
    yield Finding.of(check, (bad, f"{evidence}, and {_range(longer)} after {len(long)} characters of such sentences"))


def _lose_all(plain: Sequence[float], changed: Sequence[float], silent: Sequence[float]) -> int:
    """In how many tasks a changed transcript earns no more than an empty reply, where the plain one does."""
    return sum(now <= none + _TOLERANCE < own for own, now, none in zip(plain, changed, silent, strict=True))


def _bare_answers(environment: Environment, played: Sequence[Played]) -> list[Played]:
    """Some of these tasks, with the answer alone in place of the oracle's last turn; [] if answers are unknown."""
    return [
        environment.say(p.task, *turns[:-1], ChatReply(environment.gold(p.task)))
        for p in _some(played)
        if environment.gold(p.task) and (turns := environment.turns_of(p.task))
    ]


def _range(rewards: Sequence[float]) -> str:
    if not rewards:
        return "nothing"
    low, high = min(rewards), max(rewards)
    return f"{low:.3g}" if high - low <= _TOLERANCE else f"{low:.3g} to {high:.3g} (mean {fmean(rewards):.3g})"


def _equal(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) <= _TOLERANCE


def _scored_alike(environment: Environment) -> Finding:
    """Score transcripts of training tasks by the held-out tasks' class and settings, with the data of the training tasks."""
    check = "training and held-out tasks score a script alike"
    like = environment.tasks.held_out[0]
    differ, largest, count, untooled, unsteady = 0, 0.0, 0, 0, 0
    chosen = _some(environment.oracles) if environment.has_oracle else _some(environment.silent)
    for played in chosen:
        other = type(like)(played.task.data, like.config)
        replies = environment.turns_of(played.task) or [ChatReply("")]
        again = environment.play(other, ScriptedChat(replies, ending="max_turns"))
        if not (again.trace.ok and played.trace.ok):
            continue
        gap = abs(again.reward - played.reward)
        untooled += bool(played.trace.tools) and not again.trace.tools
        differ, largest, count = differ + (gap > _TOLERANCE), max(largest, gap), count + 1
        if gap > _TOLERANCE:
            same = environment.play(played.task, ScriptedChat(replies, ending="max_turns"))
            unsteady += same.trace.ok and abs(same.reward - played.reward) > _TOLERANCE
    evidence = f"{differ} of {count} transcripts earn another reward as held-out tasks, by up to {largest:.3g}"
    if untooled and not unsteady:  # then they score what they show, and what they show is another task
        evidence += f"; {untooled} of these have no tools as held-out tasks"
        return Finding(check, "fail", evidence, "evaluation-prompted-differently")
    return scored_otherwise(check, evidence, differ, unsteady)


def scored_otherwise(check: str, evidence: str, differ: int, unsteady: int) -> Finding:
    """The finding that `differ` transcripts earn another reward as held-out tasks than as training tasks.

    `unsteady`: how many of these earn another one as training tasks, too, when they are played again.
    """
    if unsteady:
        evidence += f"; {unsteady} of these earn another one as training tasks, too, when they are played again"
        return Finding(check, "fail", evidence, "reward-nondeterministic")
    return Finding.of(check, ("evaluation-parses-differently" if differ else None, evidence))


def _wrong_alike(environment: Environment) -> Finding | None:
    """Do wrong answers earn in held-out tasks what they earn in training tasks, after the calls of a perfect transcript?

    Data may tell the two kinds of tasks apart, so that a training task scored as a held-out one shows nothing.
    """
    means: list[float] = []
    for oracles in (environment.oracles, environment.held_out_oracles):
        played = [p for p in _some(oracles) if p.trace.ok]
        # Each with another wrong answer: what a reward gives for one of them may be chance.
        orders = [played[i:] + played[:i] for i in range(len(played))]
        pairs = zip(played, orders, strict=True)
        shares = [share for p, others in pairs if (share := _share_of_wrong(environment, p, others)) is not None]
        if len(shares) < thresholds.CHEAP_PLAYED:
            return None
        means.append(fmean(shares))
    check = "wrong answers earn as little in held-out tasks as in training tasks"
    evidence = (
        f"perfect transcripts that end with another task's answer earn {means[0]:.0%} of the right answer's reward in training "
        f"tasks and {means[1]:.0%} in held-out tasks"
    )
    # Wrong answers that earn so much in both are no matter of evaluations, and another check is for them.
    bad = abs(means[1] - means[0]) > thresholds.WRONG_ALIKE and min(means) < thresholds.EXPLOITABLE
    return Finding.of(check, ("evaluation-parses-differently" if bad else None, evidence))


def _share_of_wrong(environment: Environment, played: Played, others: Sequence[Played]) -> float | None:
    """What the oracle of a task earns if it ends with another task's answer, as a share of what it earns; None without one."""
    turns, gold = environment.turns_of(played.task), environment.gold(played.task)
    finals = [own[-1] for p in others if (own := environment.turns_of(p.task))]
    wrong = next((f for f in finals if gold and f.content and gold not in said(f)), None)
    if wrong is None or not turns or any(gold in said(turn) for turn in turns[:-1]):
        return None
    again = environment.say(played.task, *turns[:-1], wrong)
    return again.reward / played.reward if again.trace.ok and played.reward > _TOLERANCE else None
