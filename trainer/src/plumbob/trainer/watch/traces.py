"""Checks that need a run's traces: tasks of a group and of a run, rewards of equal tokens, parsing, tool results, and what
the reward depends on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from plumbob.rollout import StopReason
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.copied_rollouts import copied
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.watch.calibration import calibrated
from plumbob.trainer.watch.history import number
from plumbob.trainer.watch.paid_answers import MOST_PLACES, dominance, parsing, stands_in
from plumbob.trainer.watch.stored_rollouts import Part, Rollout, groups_of, read_traces, unselected
from plumbob.trainer.watch.trace_contents import DOWN, alike, answered, once, says_failed

STEPS_READ = 3
"""Number of steps whose traces are read at the start and at the end of a run: one step may be many megabytes."""

OTHER_TOKENS = (
    "rollout/unmatched",
    "rollout/changed",
    "rollout/copied",
    "rollout/other_logprobs",
    "rollout/sampled_untrained",
    "rollout/context_trained",
)
"""Metrics that are above 0 if a step's training rows are not its rollouts, token by token, or their masks or log-probabilities
are not."""
CUT = (StopReason.MAX_TURN_TOKENS, StopReason.MAX_CONTEXT)
"""Stop reasons of rollouts that were cut off within a turn."""
FEWEST_RESULTS = 10
"""Fewest different tool calls by which tools are judged."""
FEWEST_GROUPS = 16
"""Fewest groups by which the variety of tasks is judged."""


def examine_traces(
    run_dir: Path, config: TrainConfig, rollouts: Sequence[Rollout], rows: Sequence[Mapping[str, float]] = ()
) -> list[Finding]:
    """Findings over stored rollouts, those that `stored_rollouts` has read; an empty list without any.

    `rows`: the run's metrics.
    """
    if not rollouts:
        if config.keep_traces == "none":
            reason = "the run stored no rollouts (--keep-traces none), so their checks were left out"
            return [Finding("stored rollouts are there to be examined", "unsure", reason)]
        return []
    usable = [r for r in rollouts if r.ok and math.isfinite(r.reward)]
    # Rows with other tokens than their rollouts, or with others in the loss, have other log-probabilities for that reason.
    own = [row for row in rows if not any(number(row, name) for name in OTHER_TOKENS)]
    every = {int(row["step"]): number(row, "sync/sampling_gap", math.nan) for row in own}
    gaps = {step: gap for step, gap in every.items() if math.isfinite(gap)}
    scored = permuted(usable, gaps, config.updates_per_step)
    repeated = copies(usable)
    # What an engine cuts off is not drawn at random: the tokens that are missing are those that it was less sure of.
    whole = sum(r.stop in CUT for r in usable) <= len(usable) / 2
    # Of copies each counts as a draw of its own, so that chance looks like a sampler that prefers their tokens.
    drawn = calibrated(usable, config) if whole and (repeated is None or repeated.verdict != "fail") else None
    checks = (determinism, parsing, dominance, answered, tool_results, alike, distinct_tasks)
    return [
        _sample(rollouts, run_dir),
        grouping(rollouts),
        once(rollouts),
        *([scored] if scored is not None else []),
        *(f for f in (drawn, repeated) if f is not None),
        *(f for check in checks if (f := check(usable)) is not None),
    ]


def stored_rollouts(run_dir: Path, config: TrainConfig) -> tuple[list[Rollout], list[Finding]]:
    """(the rollouts of the first and the last steps that have traces, what could not be read)."""
    rollouts: list[Rollout] = []
    damaged: list[Finding] = []
    files = trace_files.stored_steps(run_dir)
    for step in sorted({*list(files)[:STEPS_READ], *list(files)[-STEPS_READ:]}):
        try:
            rollouts += read_traces(files[step], config.num_generations)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{files[step].name}: {type(error).__name__}: {error}"
            damaged.append(Finding("the traces can be read", "unsure", reason))
    return rollouts, damaged


def _sample(rollouts: Sequence[Rollout], run_dir: Path) -> Finding:
    """Which rollouts the following checks examine: only a part of a step's may be stored (--keep-traces)."""
    counts = trace_files.rollouts_of_steps(run_dir)
    steps = sorted({r.step for r in rollouts})
    # A step that failed has traces, but no metrics.
    total = sum(counts.get(step, sum(r.step == step for r in rollouts)) for step in steps)
    part = "all" if len(rollouts) >= total else f"{len(rollouts)} randomly drawn ones of the"
    evidence = f"examined {part} {total} rollouts of steps {', '.join(map(str, steps))}"
    return Finding("stored rollouts are there to be examined", "pass", evidence)


def copies(rollouts: Sequence[Rollout]) -> Finding | None:
    """Are rollouts of one group drawn independently? None without log-probabilities."""
    groups = [group for group in groups_of(unselected(rollouts)) if len(group) > 1]
    if not groups:
        return None
    equal = [r for g in groups for k, r in enumerate(g) if any(r.token_ids == o.token_ids for o in g[:k])]
    total = sum(map(len, groups))
    ratio = copied([(r.token_ids, r.logprob or 0.0) for r in group] for group in groups)
    check = "rollouts of one task are drawn independently"
    evidence = (
        f"{len(equal)} of {total} stored rollouts equal another one of their group; that they are copied is "
        f"10^{ratio / math.log(10):.1f} times as likely as that they are not"
    )
    if ratio <= math.log(thresholds.OTHER_SAMPLING):
        return Finding(check, "pass", evidence)
    places = tuple(r.place() for r in equal[:MOST_PLACES])
    return Finding(check, "fail", evidence, "groups-without-variety", equal[0].step, places)


def grouping(rollouts: Sequence[Rollout]) -> Finding:
    """Does each group hold rollouts of one task only?"""
    groups = groups_of(rollouts)
    mixed = [g for g in groups if len({r.task for r in g}) > 1]
    evidence = f"{len(mixed)} of {len(groups)} groups hold more than one task"
    check = "each group holds one task"
    return (
        Finding(
            check, "fail", evidence, "groups-mixed", mixed[0][0].step, tuple(r.place() for r in mixed[0][:MOST_PLACES])
        )
        if mixed
        else Finding(check, "pass", evidence)
    )


RENEWED, AFTER_UPDATES = 0.005, 0.1
"""Difference of the engine's log-probabilities and a step's old ones, in nats per token, that updates of the same step make."""


def permuted(rollouts: Sequence[Rollout], measured: Mapping[int, float], updates: int) -> Finding | None:
    """Do log-probabilities belong to the tokens that they stand at? None if few are stored, or if all agree.

    If engine and trainer differ in stored rollouts, and no more do once the numbers of each rollout are sorted, they belong
    to other tokens. So do those that a step trained with if engine and trainer differ in the step's own metric and not in
    its stored rollouts; unless a step has several updates and they are as far apart as updates take them. `measured`: step ->
    `sync/sampling_gap`. `updates`: number of updates of a step.
    """
    known = [(r.gap, r.sorted_gap) for r in rollouts if r.gap is not None and r.sorted_gap is not None]
    gap, in_order = (sum(pair[k] for pair in known) / max(len(known), 1) for k in (0, 1))
    steps = {r.step for r in rollouts if r.gap is not None} & measured.keys()
    trained = sum(measured[step] for step in steps) / max(len(steps), 1)
    if len(known) < FEWEST_GROUPS or max(gap, trained) <= RENEWED:
        return None
    evidence = (
        f"in {len(known)} stored rollouts the log-probabilities of engine and trainer differ by {gap:.2g} nats per token, "
        f"by {in_order:.2g} if those of each rollout are sorted, and by {trained:.2g} in the metrics of their steps"
    )
    if gap <= thresholds.PERMUTED * trained <= thresholds.PERMUTED * AFTER_UPDATES and updates > 1:
        evidence += "; so the old log-probabilities of a step's later updates are computed after its earlier ones"
        return Finding("log-probabilities belong to their tokens", "fail", evidence, "ratio-to-reference")
    if max(gap, trained) <= thresholds.PERMUTED_GAP:
        return None
    same = (
        in_order <= thresholds.PERMUTED * gap if gap > thresholds.PERMUTED_GAP else gap <= thresholds.PERMUTED * trained
    )
    check = "log-probabilities belong to their tokens"
    return Finding(check, "fail" if same else "pass", evidence, "logprobs-permuted" if same else None)


def calls_read(rollouts: Sequence[Rollout]) -> Finding | None:
    """Do replies name a tool and its arguments outside the forms that are read? None if none does.

    Only the first stored steps count: the initial policy writes what it was taught.
    """
    begin = min((r.step for r in rollouts), default=0)
    first = [r for r in rollouts if r.step <= begin + STEPS_READ]
    seen = [r for r in first if r.unread]
    if not seen:
        return None
    check = "the model's tool calls are read"
    evidence = f"{len(seen)} of {len(first)} rollouts have a reply that names a tool and its arguments and was not read"
    if len(seen) <= thresholds.UNREAD_REPLIES * len(first):
        return Finding(check, "pass", evidence)
    return Finding(
        check, "fail", evidence, "calls-in-unread-form", seen[0].step, tuple(r.place() for r in seen[:MOST_PLACES])
    )


def determinism(rollouts: Sequence[Rollout]) -> Finding | None:
    """Do rollouts of one task with equal tokens earn equal rewards? None if no two rollouts have equal tokens."""
    earned: dict[tuple[str, tuple[int, ...]], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        earned[rollout.task, rollout.token_ids].append(rollout)
    repeated = [rows for rows in earned.values() if len(rows) > 1]
    if not repeated:
        return None
    check = "equal tokens earn equal rewards"
    unequal = [rows for rows in repeated if not math.isclose(rows[0].reward, _other(rows), abs_tol=1e-9)]
    evidence = (
        f"{len(unequal)} of {len(repeated)} token sequences that were sampled more than once earned different rewards"
    )
    if len(unequal) < max(2, 0.02 * len(repeated)):
        return Finding(check, "pass", evidence)
    first = unequal[0]
    other = next(row for row in first if not math.isclose(row.reward, first[0].reward, abs_tol=1e-9))
    places = (first[0].place(), other.place())
    return Finding(check, "fail", evidence, "reward-nondeterministic", first[0].step, places)


def _other(rows: Sequence[Rollout]) -> float:
    """The reward that differs most from that of the first row."""
    return max((row.reward for row in rows), key=lambda reward: abs(reward - rows[0].reward))


EMPTY = ("", "null", "none", "[]", "{}", '""', "''")
"""Tool results that say nothing, in lower case."""


def tool_results(rollouts: Sequence[Rollout]) -> Finding | None:
    """Do tool results say anything, in all steps that are read and in the last of them? None if there are few."""
    steps = sorted({r.step for r in rollouts})
    found = _tool_results(rollouts)
    if found is None or found.verdict == "fail" or len(steps) < 2:
        return found
    since = steps[-min(STEPS_READ, len(steps) // 2)]
    said: dict[str, set[str]] = defaultdict(set)
    for name, _, part in (result for r in rollouts if r.step < since for result in r.results):
        said[name].add(part.text)
    late = _tool_results(
        [r for r in rollouts if r.step >= since], {name for name, texts in said.items() if len(texts) > 1}
    )
    if late is None or late.verdict != "fail":
        return found
    return dataclasses.replace(late, evidence=f"from step {since} on, {late.evidence}")


def _tool_results(rollouts: Sequence[Rollout], spoke: Collection[str] | None = None) -> Finding | None:
    """Do the tool results of these rollouts say anything? None if there are few, or tools were asked for one thing only.

    A tool may rightly answer "ok" to everything, so the same result is a fault only if no tool ever gives another.
    `spoke`: names of the tools that gave several results before, and may therefore be blamed for giving one; None: all.
    """
    found = [(name, arguments, part, r) for r in rollouts for name, arguments, part in r.results]
    if len({(name, arguments) for name, arguments, _, _ in found}) < FEWEST_RESULTS:
        return None
    check = "tool results say something"
    judged = [result for result in found if spoke is None or result[0] in spoke]
    by_tool: dict[str, list[tuple[Part, Rollout]]] = defaultdict(list)
    for name, _, part, rollout in judged:
        by_tool[name].append((part, rollout))
    for name, results in by_tool.items():
        empty = [(part, r) for part, r in results if part.text.strip().lower() in EMPTY]
        if len(results) >= FEWEST_RESULTS and len(empty) > thresholds.EMPTY_IN_A_RUN * len(results):
            evidence = f"{len(empty)} of {len(results)} results of the tool {name!r} are empty"
            places = tuple(r.place(part) for part, r in empty[:MOST_PLACES])
            return Finding(check, "fail", evidence, "tools-return-nothing", empty[0][1].step, places)
    down = [(part, r) for _, _, part, r in found if DOWN.search(part.text[:200])]
    if len(down) > thresholds.DOWN_RESULTS * len(found):
        evidence = f"{len(down)} of {len(found)} tool results are errors of a server, as {down[0][0].text[:60]!r}"
        places = tuple(r.place(part) for part, r in down[:MOST_PLACES])
        return Finding(check, "fail", evidence, "tools-fail", down[0][1].step, places)
    if not judged:
        return None
    texts = Counter(part.text for _, _, part, _ in judged)
    text, count = texts.most_common(1)[0]
    different = len({(name, arguments) for name, arguments, part, _ in judged if part.text == text})
    quoted = text if len(text) <= 60 else f"{text[:60]}..."
    evidence = f"{len(judged)} results of {len(by_tool)} tools have {len(texts)} different texts"
    # The policy's mistakes get other texts, so that not all results of a broken tool are equal.
    if different >= FEWEST_RESULTS and count > thresholds.EMPTY_IN_A_RUN * len(judged):
        evidence += f"; {count} are {quoted!r}, to {different} different calls"
        places = tuple(r.place(part) for _, _, part, r in judged if part.text == text)[:MOST_PLACES]
        cause = "tools-fail" if says_failed(text) else "tools-return-nothing"
        return Finding(check, "fail", evidence, cause, judged[0][3].step, places)
    told = [r for r in rollouts if r.gold and r.results]
    if told:
        right = sum(any(stands_in(gold, part.text) for gold in r.gold for _, _, part in r.results) for r in told)
        evidence += f"; the task's answer stands in those of {right} of {len(told)} rollouts"
    return Finding(check, "pass", evidence)


def distinct_tasks(rollouts: Sequence[Rollout]) -> Finding | None:
    """Are the tasks of the groups different? None if there are few groups.

    Tasks with the same prompt are one, unless the environment goes on to speak as the user: a game begins with its rules,
    and what differs, such as the word that is to be guessed, is in the task's data.
    """
    groups = groups_of(rollouts)
    if len(groups) < FEWEST_GROUPS:
        return None
    prompts: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        opening = itertools.takewhile(lambda p: not p.sampled, rollout.parts)
        prompts["\n".join(part.text for part in opening)].append(rollout)
    asked: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for prompt, told in prompts.items():
        game = any(r.spoken_to for r in told)
        for group in groups_of(told):
            asked[prompt, group[0].content if game else ""].append(group[0])
    evidence = f"{len(groups)} stored groups have {len(prompts)} different prompts"
    if len(asked) > len(prompts):
        evidence += f" and {len(asked)} different tasks, in which the environment goes on to speak"
    check = "the groups have different tasks"
    # Of N tasks drawn at random, a sample of 2N groups or more holds most of them.
    if len(asked) > thresholds.FEW_TASKS_SEEN or len(asked) > len(groups) / 2:
        return Finding(check, "pass", evidence)
    most = max(asked.values(), key=len)
    places = tuple(r.place() for r in most[:MOST_PLACES])
    return Finding(check, "fail", evidence, "few-distinct-tasks", groups[0][0].step, places)
