"""Are there enough different tasks, is none both trained on and held out, and do prompts hide their answers?"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import correlation, fmean
from typing import Any

import verifiers.v1 as vf
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.answer_places import after, before, begins, others_stand, places
from plumbob.trainer.doctor.environment import Environment, Played, normalised, spread
from plumbob.trainer.rollouts.stream import TaskStream
from plumbob.trainer.watch.stored_rollouts import LABELS

FEWEST_ORDERED = 32
"""Smallest number of tasks of which an order is judged."""
SHOWN = 40
"""Most characters of a text that evidence quotes."""


def checks(environment: Environment) -> Iterator[Finding]:
    yield from enough_tasks(environment.config, environment.tasks.train)
    if (order := _order(environment)) is not None:
        yield order
    if environment.tasks.held_out:
        yield _apart(environment)
    yield _answers_hidden(environment)
    if environment.tasks.held_out:
        yield _prompted_alike(environment)


def enough_tasks(
    config: TrainConfig, train: Sequence[vf.Task], least: float = thresholds.FEW_TASKS
) -> Iterator[Finding]:
    """Number of different tasks against the number that the run takes, and tasks that occur more than once.

    Fewer than `least` tasks are few.
    """
    groups = config.rollouts_per_step(1) // config.num_generations
    taken = groups * config.max_steps if config.max_steps > 0 else math.ceil((config.num_epochs or 1) * len(train))
    endless = isinstance(train, TaskStream)
    tasks = list(train[: min(taken, 1000)]) if endless else list(train)
    different = len(_contents(tasks))
    check = "there are enough different tasks"
    times = taken / max(different, 1)
    known = f"{different:,} different tasks" + (f" among the first {len(tasks):,}" if endless else "")
    evidence = f"{known}; the run takes {taken:,} ({groups} per step), so each is seen {_times(times)}"
    few = different < least and times >= thresholds.SEEN_OFTEN
    yield Finding(check, "fail" if few else "pass", evidence, "few-distinct-tasks" if few else None)
    copies = 1 - different / len(tasks)
    bad = copies > thresholds.DUPLICATES and not few
    yield Finding(
        "training tasks differ from each other",
        "fail" if bad else "unsure" if copies > thresholds.DUPLICATES / 4 else "pass",
        f"{len(tasks) - different:,} of {len(tasks):,} training tasks equal another one but for case, spacing and names",
        "duplicate-tasks" if bad else None,
    )


def _order(environment: Environment) -> Finding | None:
    """Are tasks that are taken in the environment's order sorted by length? None in another order, or without oracles.

    Length is the number of turns of the oracle's transcript. In an order that says nothing of length, the rank
    correlation of length and place, times the root of the number of tasks less one, is about normal with deviation 1.
    """
    turns = [len(own) for own in environment.replies if isinstance(own, list)]
    endless = isinstance(environment.tasks.train, TaskStream)
    meant = any(pair.partition("=")[0] == "curriculum" for pair in environment.config.env_args)
    if environment.tasks.order != "as-given" or meant or endless or len(turns) < FEWEST_ORDERED:
        return None
    found = rank_correlation(turns)
    deviations = abs(found) * math.sqrt(len(turns) - 1)
    part = max(len(turns) // 6, 1)
    evidence = (
        f"--task-order as-given; oracles of {len(turns)} tasks, evenly spread, have {fmean(turns[:part]):.3g} turns at the "
        f"start and {fmean(turns[-part:]):.3g} at the end; rank correlation with the task's place {found:+.2f}"
    )
    check = "the order of tasks does not change how hard they are"
    if deviations <= thresholds.SORTED_TASKS:
        return Finding(check, "pass", evidence)
    return Finding(check, "fail", evidence, "task-order-drifts")


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman's correlation of values and their places; equal values have the mean of their ranks. 0 if all are equal."""
    order, places = sorted(values), range(len(values))
    ranks = [(bisect_left(order, v) + bisect_right(order, v) - 1) / 2 for v in values]
    return correlation(ranks, list(places)) if len(set(values)) > 1 else 0.0


def _times(times: float) -> str:
    if times < 1:
        return f"at most once ({times:.0%} of them are taken)"
    return f"about {times:.3g} times"


def _contents(tasks: Iterable[vf.Task]) -> dict[str, list[vf.Task]]:
    """Tasks by their content, without labels, case, punctuation and spacing.

    Contents are compared only among tasks with the same prompt, because they may be long.
    """
    by_prompt: dict[str, list[vf.Task]] = defaultdict(list)
    for task in tasks:
        by_prompt[_prompt(task)].append(task)
    found: dict[str, list[vf.Task]] = defaultdict(list)
    for prompt, alike in by_prompt.items():
        for task in alike:
            found[prompt if len(alike) == 1 else _content(task)].append(task)
    return found


def _prompt(task: vf.Task) -> str:
    prompt = task.data.prompt
    return normalised(prompt if isinstance(prompt, str) else str(task.data.prompt_text if prompt else task.hash))


def _content(task: vf.Task) -> str:
    content = task.data.model_dump(
        mode="json", exclude=set(LABELS), exclude_none=True, fallback=lambda value: type(value).__name__
    )
    return hashlib.sha256(json.dumps(_normalised(content), sort_keys=True).encode()).hexdigest()


def _normalised(value: Any) -> Any:
    """The value with every text in it normalised. JSON writes a line break as a backslash and a letter, so not after that."""
    if isinstance(value, str):
        return normalised(value)
    if isinstance(value, list):
        return [_normalised(part) for part in value]
    return {key: _normalised(part) for key, part in value.items()} if isinstance(value, dict) else value


def _apart(environment: Environment) -> Finding:
    """No held-out task may be a training task, also if case, spacing or labels differ."""
    tasks = environment.tasks
    read = tasks.train.read if isinstance(tasks.train, TaskStream) else tasks.train
    wanted = {_prompt(task) for task in tasks.held_out}
    trained = {_content(task) for task in read if _prompt(task) in wanted}
    alike = [task for task in tasks.held_out if _content(task) in trained]
    both = max(tasks.trained_and_held_out(), len(alike))
    example = f", such as {alike[0].key}" if alike else ""
    return Finding(
        "held-out tasks are not trained on",
        "fail" if both else "pass",
        f"{both} of {len(tasks.held_out)} held-out tasks are among {len(read):,} training tasks{example}",
        "held-out-in-training" if both else None,
    )


def _prompted_alike(environment: Environment) -> Finding:
    """Are training and held-out tasks put to the model in the same words? Their content may differ."""
    check = "held-out tasks are prompted as training tasks are"
    train, held_out = environment.silent, environment.silent_held_out
    if len(train) < thresholds.COMPARED_PROMPTS or len(held_out) < thresholds.COMPARED_PROMPTS:
        return Finding(check, "unsure", f"only {len(train)} training and {len(held_out)} held-out prompts to compare")
    if len(set(map(_whole, train))) >= thresholds.COMPARED_PROMPTS and len(set(map(_whole, held_out))) == 1:
        evidence = f"all {len(held_out)} held-out prompts are the same one, so that an evaluation is of a single task"
        return Finding(check, "fail", evidence, "few-distinct-tasks")
    tools = [{tool.name for tool in played.trace.tools or ()} for played in (train[0], held_out[0])]
    if tools[0] != tools[1]:
        only = ", ".join(sorted(tools[0] ^ tools[1]))
        return Finding(check, "fail", f"tools that only one of the two has: {only}", "evaluation-prompted-differently")
    for name, of, others in (("training", train, held_out), ("held-out", held_out, train)):
        if (text := _only_in(of, others)) is not None:
            evidence = f"every {name} prompt has {text!r}, and no prompt of the others has it"
            return Finding(check, "fail", evidence, "evaluation-prompted-differently")
    capitals = [fmean(_capitals(_whole(played)) for played in side) for side in (train, held_out)]
    if abs(capitals[0] - capitals[1]) > thresholds.CAPITALS:
        evidence = f"of the letters of training prompts {capitals[0]:.0%} are capitals, and of held-out prompts {capitals[1]:.0%}"
        return Finding(check, "fail", evidence, "evaluation-prompted-differently")
    evidence = f"{len(train)} training and {len(held_out)} held-out prompts have the same fixed parts"
    return Finding(check, "pass", evidence)


def _capitals(text: str) -> float:
    """Share of the letters that are capitals, of those that have both forms."""
    letters = [letter for letter in text if letter.lower() != letter.upper()]
    return sum(letter.isupper() for letter in letters) / max(len(letters), 1)


def _only_in(of: Sequence[Played], others: Sequence[Played]) -> str | None:
    """A text that is in all prompts of `of` and in no other: a line, or what all of them begin or end with."""
    prompts, rest = ([_whole(played) for played in side] for side in (of, others))
    lines = Counter(line for prompt in prompts for line in {line.strip() for line in prompt.splitlines()})
    fixed = [line for line, count in lines.items() if count == len(prompts) and len(line) > 1]
    for backwards in (False, True):
        fixed.append(_shared(prompts, backwards=backwards))
    for text in fixed:
        if _is_wording(text) and not any(_squeezed(text) in _squeezed(prompt) for prompt in rest):
            return text[:SHOWN]
    return None


def _whole(played: Played) -> str:
    return "\n".join(text for _, text in played.opening)


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _shared(texts: Sequence[str], *, backwards: bool) -> str:
    """What all texts begin with, or end with, up to a whole word."""
    texts = [text[::-1] if backwards else text for text in texts]
    low, high = min(texts), max(texts)
    length = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    shared = low[:length]
    if length < len(low):
        shared = re.sub(r"\S*$", "", shared)
    return (shared[::-1] if backwards else shared).strip()


def _is_wording(text: str) -> bool:
    """Whether a text is an instruction, and not a word or a number that all samples happen to have."""
    return len(re.findall(r"[^\W\d]{2,}", text)) >= 2


def _answers_hidden(environment: Environment) -> Finding:
    """Does the first prompt hold the answer at a place that a policy can learn to read it from?

    That the answer's words are in the prompt is no fault: in reading comprehension and multiple choice they must be. A
    place is a text that stands once in each prompt, such as "Answer:", or the end of a message. It gives answers away if
    what follows it is the task's own answer, and is not the answer of other tasks, almost wherever the place exists.
    """
    check = "prompts do not give the answers away"
    if environment.gold_field is None:
        return Finding(check, "unsure", "it is not known which field of a task's data is its answer")
    pairs = [(_whole(played), environment.gold(played.task)) for played in environment.silent]
    pairs = [(prompt, gold) for prompt, gold in pairs if gold]
    held = [bool(places(gold, prompt)) for prompt, gold in pairs]
    chance = _mean(others_stand(pairs))
    evidence = (
        f"the field {environment.gold_field!r} of a task occurs in {sum(held)} of {len(pairs)} first prompts; answers of "
        f"other tasks occur in {chance:.0%} of them"
    )
    least = max(thresholds.GIVEN_AWAY_TASKS, thresholds.GIVEN_AWAY_SHARE * len(pairs))
    place, given, seen, others = _best_place(pairs)
    if given >= least and given >= thresholds.GIVEN_AWAY * seen and others < given / seen / 2:
        evidence += f"; after {place!r} stands the answer in {given} of {seen}"
        return Finding(check, "fail", evidence, "answer-in-prompt")
    asked = sum(
        _answered_before(prompt, gold, [other for j, (other, _) in enumerate(pairs) if j != i])
        for i, (prompt, gold) in enumerate(pairs)
    )
    if asked >= least:
        evidence += f"; in {asked} the question stands a second time, before its end, with the answer right after it"
        return Finding(check, "fail", evidence, "answer-in-prompt")
    return Finding(check, "pass", evidence)


QUESTION = 40
"""Number of characters at a prompt's end by which its question is found again."""
AFTER_QUESTION = 60
"""Number of characters after it in which the answer is looked for."""
MOST_ENDS, LONGEST_END = 20, 2000
"""Most places with the same end that are looked at, and most characters that are compared there."""
LABEL = r"\W*(?:(?:the\s+)?(?:final\s+|correct\s+|right\s+)?(?:answer|a|solution|output)\b(?:\s+is)?)?\W*"
"""What may stand between a worked example's question and its answer."""


def _answered_before(prompt: str, gold: str, others: Sequence[str]) -> bool:
    """Whether what a prompt ends with, and none of `others` does, stands in it before, followed by the answer at once.

    So does a worked example that is the question itself. Options and passages that follow a question are none.
    """
    prompt = prompt.rstrip()
    end, at = prompt[-QUESTION:], -1
    if len(set(end)) < QUESTION / 5:
        return False
    for _ in range(MOST_ENDS):
        at = prompt.find(end, at + 1)
        if not 0 <= at < len(prompt) - len(end):
            return False
        size = len(end)
        while size < min(at + len(end), LONGEST_END) and prompt[at + len(end) - size - 1] == prompt[-size - 1]:
            size += 1
        told = prompt[at + len(end) :][: AFTER_QUESTION + len(gold)]
        answered = re.match(LABEL + re.escape(gold) + r"(?!\w)", told, re.IGNORECASE)
        if answered and not any(other.rstrip().endswith(prompt[-size:]) for other in others):
            return True
    return False


def _best_place(pairs: Sequence[tuple[str, str]]) -> tuple[str, int, int, float]:
    """(a place, prompts in which the answer follows it, prompts that have it, share in which another's answer does)."""
    counts: Counter[str] = Counter()
    for prompt, gold in pairs:
        counts.update(before([gold], prompt))
    best = ("", 0, 1, 0.0)
    golds = [gold for _, gold in pairs]
    for left, count in counts.most_common(200):
        if count < thresholds.GIVEN_AWAY_TASKS:
            break
        follows = [(i, text) for i, (prompt, _) in enumerate(pairs) if (text := after(left, prompt)) is not None]
        own = sum(begins(text, golds[i]) for i, text in follows)
        if follows and (own / len(follows), own) > (best[1] / best[2], best[1]):
            other = _mean([begins(text, golds[j]) for i, text in follows for j in spread(len(golds), 16) if j != i])
            best = (left, own, len(follows), other)
    return best


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
