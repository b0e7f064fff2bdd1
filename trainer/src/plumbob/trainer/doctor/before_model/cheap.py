"""What do transcripts earn that solve nothing, and does a reward survive what a policy may write?"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, stdev

from plumbob.rollout import ChatReply
from plumbob.trainer.diagnosis import thresholds
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.before_model.answer_places import places
from plumbob.trainer.doctor.before_model.rewritten_turns import replaced, rewritten
from plumbob.trainer.doctor.environment import Environment, Played, normalised, said, spread, text_of, tool_texts

CHEAP_TASKS = 24
"""Number of tasks in which cheap transcripts are played."""
ODD_TASKS = 3
"""Number of tasks in which odd transcripts are played."""
CALLS = 8
"""How often a call is made whose result is known already: whoever pays for calls or turns pays for each of them."""
OPTIONS = 4
"""Number of answers that are joined by "or"."""
_TAGGED = re.compile(r"(<(\w+)>).*?(</\2>)", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{[^{}]*\}")

ODD: dict[str, str] = {
    "10,000 characters": "It follows that the number is not yet known. " * 223,
    "10,000 digits": "1" * 10_000,
    "unbalanced LaTeX": "\\frac{1}{\\sqrt{2 + \\left( \\boxed{3 $$ \\begin{align}",
    "a NUL character": "The answer\x00 is\x00 this.\x00",
    "emoji and other scripts": "👩‍👩‍👧‍👦 ١٢٣ 答案 \u202e321\u202c \U0001f9ee",
    "deep nesting": "(" * 3000 + "[" * 2000 + "{" * 2000,
    "deeply nested JSON": '{"a":' * 2000 + "1",
    "unclosed tags": "<think><answer><cite>" * 50,
    "a power tower": "\\boxed{9^{9^{9^{9^{9}}}}} #### 9**9**9**9",
    "infinity": "\\boxed{1e999} #### 1e999 <answer>NaN</answer>",
}
"""What a policy may write, by what is odd about it."""


def checks(environment: Environment) -> Iterator[Finding]:
    yield _cheap(environment)
    yield _odd(environment)


class _Logged(logging.Handler):
    """Keeps messages that were logged as errors, or with an exception."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            error = record.exc_info[1] if record.exc_info else None
            self.texts.append(f"{type(error).__name__}: {error}" if error else record.getMessage())


def _odd(environment: Environment) -> Finding:
    """Odd replies must be scored, quickly, and without an error that is only logged."""
    check = "odd replies are scored without errors or delay"
    logged = _Logged()
    played: list[tuple[str, Played]] = []
    logging.getLogger().addHandler(logged)
    try:
        for i in spread(len(environment.sample), ODD_TASKS):
            task = environment.sample[i]
            for name, text in ODD.items():
                before = len(logged.texts)
                played.append((name, environment.say(task, ChatReply(text))))
                if len(logged.texts) > before:
                    reason = " ".join(logged.texts[before].split())[:200]
                    evidence = f"a reply of {name} to task {task.key} earned {played[-1][1].reward:.3g}, and was logged as {reason}"
                    return Finding(check, "fail", evidence, "grader-swallows-errors")
                if environment.hanging or not played[-1][1].trace.ok:
                    return _of_error(check, environment, name, played[-1][1])
    finally:
        logging.getLogger().removeHandler(logged)
    name, slowest = max(played, key=lambda pair: pair[1].seconds)
    evidence = f"{len(played)} replies of {len(ODD)} kinds; the slowest, {name}, took {slowest.seconds:.2g} s"
    slow = slowest.seconds > thresholds.SLOW_SCORING
    return Finding(check, "unsure" if slow else "pass", evidence)


def _of_error(check: str, environment: Environment, name: str, played: Played) -> Finding:
    error = played.trace.errors[-1]
    evidence = f"a reply of {name} to task {played.task.key}: {error.type}: {' '.join(error.message.split())[:200]}"
    if error.type == "Stuck":
        return Finding(check, "fail", evidence, "environment-hangs")
    if error.type == "NotFinite":
        # What pays such a reply without bounds would pay others of its kind nearly as much.
        unbounded = error.message.endswith(" inf")
        return Finding(check, "fail", evidence, "reward-exploitable" if unbounded else "reward-not-finite")
    return Finding(check, "unsure", f"{evidence}. Such rollouts leave their groups")


def _cheap(environment: Environment) -> Finding:
    """Transcripts that solve nothing must earn less than half of what the oracle earns above an empty one."""
    check = "transcripts that solve nothing earn little"
    if (only := _only_answer(environment)) is not None:
        return Finding(check, "fail", only, "reward-exploitable")
    battery = list(_battery(environment))
    if not battery:
        return Finding(check, "unsure", "no transcript could be played")
    earned = [(name, fmean(p.reward for p in played), played) for name, played in battery]
    listed = "; ".join(f"{name} {mean:.3g}" for name, mean, _ in earned)
    if not environment.has_oracle:
        return Finding(check, "unsure", f"the environment has no oracle to compare with; mean rewards: {listed}")
    best = {id(p.task): p for p in environment.oracles if p.trace.ok}
    evidence = f"mean rewards, where the oracle earns {fmean(p.reward for p in best.values()):.3g}: {listed}"
    lowest = min(mean for _, mean, _ in earned)
    clean = _clean_components(list(best.values()), [p for _, _, played in earned for p in played])
    for name, mean, played in sorted(earned, key=lambda one: -one[1]):
        kept = [p for p in played if id(p.task) in best]
        if len(kept) < thresholds.CHEAP_PLAYED:
            continue
        floor = [lowest if name == EMPTY else environment.floors[id(p.task)] for p in kept]
        lift = fmean(best[id(p.task)].reward - f for p, f in zip(kept, floor, strict=True))
        gains = [p.reward - f for p, f in zip(kept, floor, strict=True)]
        error = stdev(gains) / math.sqrt(len(gains))
        share = thresholds.EXPLOITABLE_EMPTY if name == EMPTY else thresholds.EXPLOITABLE
        if lift > thresholds.REWARD_TOLERANCE and fmean(gains) - error > share * lift + thresholds.REWARD_TOLERANCE:
            example = max(kept, key=lambda p: p.reward)
            evidence = (
                f"{name} earns {mean:.3g}, {fmean(gains) / lift:.0%} of what the oracle earns above an empty reply, in "
                f"{len(kept)} tasks; in {example.task.key} {example.reward:.3g} for {_shown(example)}; {evidence}"
            )
            if clean:
                evidence += f". The component {', '.join(clean)} alone tells right answers from such replies"
                most = fmean(gains) - error >= thresholds.FORM_OUTWEIGHS * lift
                return Finding(
                    check, "fail" if most else "unsure", evidence, "reward-format-dominated" if most else None
                )
            given = name == ECHO and _given_away(environment, kept, battery)
            return Finding(check, "fail", evidence, "answer-in-prompt" if given else "reward-exploitable")
    return Finding(check, "pass", evidence)


def _given_away(
    environment: Environment, echoed: Sequence[Played], battery: Sequence[tuple[str, Sequence[Played]]]
) -> bool:
    """Whether prompts that earn the reward when they are sent back hold the answer in the form that is asked for.

    A reward that finds the answer anywhere in a reply pays for it among other answers, too: then the reward is at fault.
    """
    paid = [p for p in echoed if p.reward > environment.floors[id(p.task)] + thresholds.REWARD_TOLERANCE]
    held = [p for p in paid if environment.gold(p.task) and places(environment.gold(p.task), p.opening[-1][1])]
    hedged = next((played for name, played in battery if name == HEDGED), [])
    lenient = [p for p in hedged if p.reward > environment.floors[id(p.task)] + thresholds.REWARD_TOLERANCE]
    return bool(hedged) and 2 * len(held) > len(paid) and 2 * len(lenient) < len(hedged)


def _only_answer(environment: Environment) -> str | None:
    """Evidence that one reply is right in all tasks, though their prompts differ; None if there is none."""
    prompts = {tuple(played.opening) for played in environment.silent}
    finals = [turns[-1] for task in environment.sample if (turns := environment.turns_of(task))]
    if min(len(prompts), len(finals)) < CHEAP_TASKS or len(set(map(said, finals))) > 1 or not said(finals[0]).strip():
        return None
    played = [environment.say(environment.sample[i], finals[0]) for i in spread(len(environment.sample), CHEAP_TASKS)]
    best, earned = (fmean(p.reward for p in some) for some in (environment.oracles, played))
    if earned < best - thresholds.REWARD_TOLERANCE or best <= thresholds.REWARD_TOLERANCE:
        return None
    return f"one reply, {_shown(played[0])}, earns {earned:.3g} in {len(played)} tasks with different prompts: it solves them all"


def _clean_components(best: Sequence[Played], cheap: Sequence[Played]) -> list[str]:
    """Of several components of the reward, those that only the oracle earns: others then outweigh them."""
    names = list(best[0].trace.rewards) if best else []
    if len(names) < 2:
        return []

    def mean(played: Sequence[Played], name: str) -> float:
        return fmean(r.value if (r := p.trace.rewards.get(name)) else 0.0 for p in played)

    found = []
    for name in names:
        own = mean(best, name)
        if own > 0 and mean(cheap, name) < own / 10:
            found.append(name)
    return found


def _shown(played: Played) -> str:
    text = " ".join(said(ChatReply(text_of(played.trace.assistant_messages[-1]))).split())
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


EMPTY, ECHO, HEDGED = "an empty reply", "the prompt echoed", "several answers joined by or"


def _battery(environment: Environment) -> Iterator[tuple[str, list[Played]]]:
    """(name of a kind of cheap transcript, the tasks in which it was played)."""
    numbers = spread(len(environment.silent), CHEAP_TASKS)
    silent = [environment.silent[i] for i in numbers]
    kinds: dict[str, Callable[[int], tuple[ChatReply, ...] | None]] = {
        ECHO: lambda i: (ChatReply(environment.silent[i].opening[-1][1]),),
        "one word repeated": lambda i: (ChatReply("the " * 200),),
        "the form of an answer without content": lambda i: _skeleton(environment, i),
        "another task's answer": lambda i: _of_another(environment, i),
        HEDGED: lambda i: _hedged(environment, i),
        "the first tool result quoted": lambda i: _quoted(environment, i),
        "the oracle's calls with another task's answer": lambda i: _in_vain(environment, i, lambda before: before),
        "the oracle's first call again and again": lambda i: _in_vain(
            environment, i, lambda before: before[:1] * CALLS
        ),
    }
    yield EMPTY, [p for p in silent if p.trace.ok]
    for name, make in kinds.items():
        replies = {i: made for i in numbers if (made := make(i)) is not None}
        played = [environment.say(environment.sample[i], *turns) for i, turns in replies.items()]
        played = [p for p in played if p.trace.ok]
        if played:
            yield name, played


def _final(environment: Environment, number: int) -> ChatReply | None:
    """The last turn of a task's oracle."""
    turns = environment.turns_of(environment.sample[number])
    return turns[-1] if turns else None


def _skeleton(environment: Environment, number: int) -> tuple[ChatReply, ...] | None:
    """The oracle's last turn without its content: empty tags, an empty box, nothing where the answer stood."""
    final, gold = _final(environment, number), environment.gold(environment.sample[number])
    if final is None or not gold:
        return None

    def emptied(text: str) -> str:
        text = _BOXED.sub(r"\\boxed{}", _TAGGED.sub(r"\1\3", text))
        return re.sub(rf"(?<!\w){re.escape(gold)}(?!\w)", "", text)

    empty = rewritten(final, emptied)
    return (empty,) if said(empty) != said(final) and said(empty).strip() else None


def _of_another(environment: Environment, number: int) -> tuple[ChatReply, ...] | None:
    """The last turn of the oracle of a task with another answer."""
    own = environment.gold(environment.sample[number])
    for other in range(number + 1, number + len(environment.sample)):
        other %= len(environment.sample)
        final = _final(environment, other)
        if final is None:
            continue
        if own and _apart(environment.gold(environment.sample[other]), own):
            return (final,)
    return None


def _in_vain(
    environment: Environment, number: int, made: Callable[[tuple[ChatReply, ...]], tuple[ChatReply, ...]]
) -> tuple[ChatReply, ...] | None:
    """`made` of the oracle's turns up to the last, and then the last turn of another task's: what was read is not answered.

    Not where one of these turns names the answer, as in tasks that are solved by calls.
    """
    turns, other = environment.turns_of(environment.sample[number]), _of_another(environment, number)
    if other is None or len(turns) < 2:
        return None
    before, gold = made(tuple(turns[:-1])), environment.gold(environment.sample[number])
    return None if any(gold in said(turn) for turn in before) else (*before, *other)


def _apart(a: str, b: str) -> bool:
    """Whether two answers have no word in common, so that no reward may accept one for the other."""
    return bool(a) and bool(b) and set(normalised(a).split()).isdisjoint(normalised(b).split())


def _hedged(environment: Environment, number: int) -> tuple[ChatReply, ...] | None:
    """The oracle's last turn, with the answers of other tasks beside the right one."""
    final, gold = _final(environment, number), environment.gold(environment.sample[number])
    golds = dict.fromkeys(environment.gold(task) for task in environment.sample)
    others = [other for other in golds if gold and _apart(other, gold)]
    if final is None or len(others) < OPTIONS - 1:
        return None
    options = [others[(number + k) % len(others)] for k in range(OPTIONS - 1)]
    options.insert(number % OPTIONS, gold)
    return (rewritten(final, lambda text: replaced(text, gold, " or ".join(options))),)


def _quoted(environment: Environment, number: int) -> tuple[ChatReply, ...] | None:
    """The first call of a task's oracle, then its result as the answer, unless the result is about the answer itself."""
    turns = environment.turns_of(environment.sample[number])
    gold = environment.gold(environment.sample[number])
    played = next((p for p in environment.oracles if p.task is environment.sample[number]), None)
    if played is None or len(turns) < 2 or not gold:
        return None
    results = tool_texts(played.trace)
    if not results or len(results[0].split()) < 5 * len(gold.split()):
        return None
    final = rewritten(turns[-1], lambda text: replaced(text, gold, results[0]))
    return (turns[0], final)
