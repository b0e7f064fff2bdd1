"""What a GRPOTrainer of TRL is examined for before its first step: data, reward functions, and the chat template.

Reward functions score a few transcripts that are written from the columns of the data, in place of completions, and what must hold
of an environment (`plumbob.doctor.environment.table`) is asked of what they earn.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from plumbob.doctor.environment.hands import Hand
from plumbob.doctor.environment.matrix import Matrix
from plumbob.doctor.environment.player import Given, RunSettings, Task, place_of
from plumbob.doctor.environment.table import judge
from plumbob.doctor.environment.tasks import FEW, SORTED, rank_correlation
from plumbob.doctor.environment.texts import chosen, normalised, strings
from plumbob.doctor.environment.transcripts import EMPTY
from plumbob.doctor.findings import Finding
from plumbob.doctor.trl import rewards, template
from plumbob.doctor.trl.settings import rate

MOST_TASKS, MOST_ROWS = 24, 4000
"""Rows of the data with which transcripts are written, and rows that are compared with each other."""
LEAST_STEPS, OFTEN, HANDFUL = 30, 4, 8
"""Steps from which on a run is no trial; times that a run takes each of fewer than so many rows, so that a trial counts as well."""
EXAMINED = {
    "parsed",
    "not-overpaid",
    "paid",
    "enough",
    "hidden",
    "apart",
    "near-copies",
    "prompted",
    "empty",
    "cheap",
    "near",
    "same-range",
}
"""Rows of the table that these transcripts are enough for."""
FEWEST, NEARLY = 6, 0.9
"""Fewest rows in which answers are compared with what rows say, and share of them that counts as nearly all."""
SHRINKS, REACHES, EPSILON, FEW_TOKENS = 0.5, 0.1, 1e-2, 0.1
"""Largest share of the weights that decay may take in a hundred updates, smallest share of the rate that a schedule must reach,
largest epsilon: gradients that are clipped to norm 1 are smaller than it in each single weight; and smallest share of the tokens:
half of the 0.2 of arXiv:2506.01939."""
LEVEL = re.compile(r"level|difficult|hard|grade|steps|hops", re.IGNORECASE)
"""What columns are named that say how hard a row is."""
SUM = re.compile(r"(-?\d+)\s*([-+*x×])\s*(-?\d+)")


def examine(trainer: Any, score: Any, gold: str | None = None) -> rewards.Paid:
    """Examine a trainer before its first step. `gold`: the column with right answers, which is else looked for.

    `score(inputs, texts)`: what reward functions give the texts as completions of these rows, [B, F]; None if one fails.
    """
    args, steps, found = trainer.args, trainer.state.max_steps, rewards.Paid()
    groups = steps * args.per_device_train_batch_size * args.gradient_accumulation_steps // args.num_generations
    taken = groups // args.num_iterations
    code = {n: place_of(f) for n, f in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)}
    train, held_out = (_tasks(getattr(trainer, f"{kind}_dataset"), kind) for kind in ("train", "eval"))
    trial = steps < LEAST_STEPS and not (len(train) < HANDFUL and taken >= OFTEN * len(train))
    player = Given(train, held_out, RunSettings(taken=0 if trial else taken), code)
    tasks = [player.train[i] for i in chosen(len(player.train), MOST_TASKS)]
    if not tasks:
        return found
    matrix = Matrix(player, _hand(tasks))  # ty: ignore[invalid-argument-type]
    matrix.cells[EMPTY] = _empty(tasks)
    if player.held_out:
        held = [player.held_out[i] for i in chosen(len(player.held_out), MOST_TASKS)]
        matrix.held_out = Matrix(player, _hand(held), {EMPTY: _empty(held)})  # ty: ignore[invalid-argument-type]
    if score is not None:
        found = rewards.examine(trainer, matrix, score, gold)
    known = EXAMINED if any(matrix.hand.golds) else EXAMINED - {"hidden"}
    columns = [gold] if gold else [c for f in trainer.reward_funcs for c in rewards.columns_of(f, tasks)]
    found.findings = [
        *_of_other_rows(player.train, list(dict.fromkeys(columns))),
        *found.findings,
        *judge(matrix, known),
        _different(player.train, columns),
        _missing(player.train, columns),
        *(_in_order(player.train) if args.shuffle_dataset is False else ()),
        *template.examine(trainer, tasks),
        *_settings(args, steps),
    ]
    return found


def _hand(tasks: list[Task]) -> Hand:
    return Hand(tasks, [()] * len(tasks), [""] * len(tasks))


def _empty(tasks: Sequence[Task]) -> dict[int, Any]:
    return {i: rewards.played(task, "", None, ()) for i, task in enumerate(tasks)}


def _tasks(data: Any, kind: str) -> list[Task]:
    if data is None:
        return []
    if isinstance(data, dict):
        return [task for part in data.values() for task in _tasks(part, kind)]
    found = []
    for i in range(min(len(data), MOST_ROWS)) if hasattr(data, "__len__") else ():  # a stream cannot be read twice
        row = data[i]
        fields = {
            name: value for name, value in row.items() if name not in ("prompt", "environment", "images", "image")
        }
        found.append(
            Task(f"row {i}", "train" if kind == "train" else "held-out", fields, _text(row.get("prompt")), dict(row))
        )
    return found


def _text(prompt: Any) -> str:
    return "\n".join(strings([m.get("content") for m in prompt] if isinstance(prompt, list) else prompt))


def _of_other_rows(tasks: Sequence[Task], columns: Sequence[str]) -> Iterator[Finding]:
    """Whether answers stand in the rows that they are the answers of: what rows say of them is that of other rows, if not.

    What a row says of its answer: the value of the one calculation in its prompt, or the last word of another column.
    """
    check = "answers stand in the rows that they answer"
    for column in columns:
        golds = [_number(str(task.handle.get(column, ""))) for task in tasks]
        for what, said in _says(tasks, column):
            known = [(own, gold) for own, gold in zip(said, golds, strict=True) if own]
            if len(known) < max(FEWEST, NEARLY * len(tasks)) or len({gold for _, gold in known}) < FEWEST:
                continue
            right = sum(own == gold for own, gold in known)
            both = Counter(own for own, _ in known) & Counter(gold for _, gold in known)
            told = f"in {right} of {len(known)} rows column {column!r} is {what}"
            if right < len(known) / 2 and both.total() >= NEARLY * len(known):
                told += f", in {both.total()} it is that of some row"
                yield Finding.of(check, ("reward-wrong", told), "grading")
                return
            wrong = len(known) - right
            if right >= len(known) / 2 and wrong:
                yield Finding.of(check, ("oracle-fails" if wrong > 0.05 * len(known) else None, told), "grading")
                return


def _says(tasks: Sequence[Task], column: str) -> Iterator[tuple[str, list[str]]]:
    """(what it is, of each row its text; "" if it has none)."""
    yield "the value of the calculation in the prompt", [_value(task.prompt) for task in tasks]
    for name, value in tasks[0].fields.items():
        if name != column and isinstance(value, str):
            last = [str(task.fields.get(name) or "").split()[-1:] for task in tasks]
            yield f"the last word of column {name!r}", [_number(one[0]) if one else "" for one in last]


def _value(prompt: str) -> str:
    found = SUM.findall(prompt)
    if len(found) != 1 or len(re.findall(r"\d+(?:\.\d+)?", prompt)) != 2:
        return ""
    a, sign, b = int(found[0][0]), found[0][1], int(found[0][2])
    return str(a + b if sign == "+" else a - b if sign == "-" else a * b)


def _number(text: str) -> str:
    """A text as it is compared: a number without separators and without decimals that are 0."""
    text = text.strip().strip(".$").replace(",", "")
    return re.sub(r"\.0+$", "", text)


def _different(tasks: Sequence[Task], columns: Sequence[str]) -> Finding:
    """Equal prompts have equal answers: where they have not, something of the question is missing in them."""
    check = "prompts with different answers are different"
    answers: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        answers[normalised(task.prompt)].add(str([task.handle.get(column) for column in columns]))
    mixed = [prompt for prompt, of in answers.items() if len(of) > 1]
    rows = sum(normalised(task.prompt) in mixed for task in tasks) if mixed else 0
    told = f"{rows} of {len(tasks)} rows have the prompt of another row with another answer"
    told += f", such as {mixed[0][:60]!r}" if mixed else ""
    wrong = bool(columns) and rows > math.ceil(0.5 * len(tasks)) and len(tasks) > 1
    return Finding.of(check, ("few-distinct-tasks" if wrong else None, told), "tasks")


def _in_order(tasks: Sequence[Task]) -> Iterator[Finding]:
    """Whether rows that are taken as they stand become longer, or higher in a column of numbers, from first to last."""
    check, part = "rows that are not shuffled do not become harder or easier", max(len(tasks) // 6, 1)
    columns = [n for n, v in tasks[0].fields.items() if LEVEL.search(n) and isinstance(v, int | float)]
    for what, values in (
        ("prompts have characters", [float(len(task.prompt)) for task in tasks]),
        *((f"column {c!r} has values", [float(task.handle.get(c) or 0) for task in tasks]) for c in columns),
    ):
        found, ends = rank_correlation(values), sorted((fmean(values[:part]), fmean(values[-part:])))
        told = f"{what} of {fmean(values[:part]):.3g} at the start and {fmean(values[-part:]):.3g} at the end"
        drifts = len(tasks) >= FEW and abs(found) * math.sqrt(len(tasks) - 1) > SORTED and ends[1] > 1.5 * ends[0]
        yield Finding.of(check, ("task-order-drifts" if drifts else None, told), "tasks")


def _missing(tasks: Sequence[Task], columns: Sequence[str]) -> Finding:
    """Whether rows have answers, where most of them have. None is no text: rows of other tasks have it on purpose."""
    empty = [task.key for task in tasks for c in columns if str(task.handle.get(c, "-")).strip().lower() in ("", "nan")]
    told = f"{len(empty)} of {len(tasks)} rows have no text in {', '.join(map(repr, columns)) or 'any column'}"
    told += f", such as {empty[0]}" if empty else ""
    return Finding.of(
        "rows have answers", ("oracle-fails" if len(empty) > 0.02 * len(tasks) else None, told), "grading"
    )


ALTERS: Mapping[str, Any] = {
    **dict.fromkeys(
        ("min_new_tokens", "min_tokens", "min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0
    ),
    **dict.fromkeys(
        ("bad_words", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"), None
    ),
    **dict.fromkeys(("forced_eos_token_id", "sequence_bias", "logit_bias", "allowed_token_ids", "penalty_alpha"), None),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "num_beams"), 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "epsilon_cutoff", "eta_cutoff"), 0),
}
"""Arguments of generate() and of vLLM that change how tokens are drawn, and the value with which each does not. Others, such as
top_p, are settings of the trainer."""


def _alters(name: str, value: Any) -> bool:
    return (name in ALTERS and value not in (None, [], {}, ALTERS[name])) or (name == "do_sample" and value is False)


def _settings(args: Any, steps: int) -> Iterator[Finding]:
    """Settings that alone decide how large updates are."""
    shrinks = 100 * args.weight_decay * args.learning_rate
    told = f"a hundred updates take {shrinks:.2g} of the weights away: weight_decay={args.weight_decay:g}"
    lost = "learning-rate-too-high" if shrinks > SHRINKS else None
    yield Finding.of("weight decay leaves the weights as they are", (lost, told), "optimizer")
    most = max(rates) if (rates := [rate(args, steps, k) for k in range(min(max(steps, 1), 1000))]) else 0.0
    told = f"of learning_rate={args.learning_rate:g} the schedule reaches {most:.2g} in {steps} steps"
    lost = "learning-rate-too-low" if steps <= 1000 and most < REACHES * args.learning_rate else None
    yield Finding.of("the schedule reaches the learning rate", (lost, told), "optimizer")
    told = f"top_entropy_quantile={args.top_entropy_quantile:g}: the share of the tokens, the least certain ones, that is trained"
    few = "signal-left-out" if args.top_entropy_quantile < FEW_TOKENS else None
    yield Finding.of("most deciding tokens are trained", (few, told), "sampling")
    other = {name: value for name, value in (args.generation_kwargs or {}).items() if _alters(name, value)}
    told = ", ".join(f"generation_kwargs[{name!r}]={value}" for name, value in other.items())
    found = (
        ("sampling-altered", f"{told}: tokens are drawn otherwise than training computes")
        if other
        else (None, "nothing")
    )
    yield Finding.of("nothing but the settings of training decides how tokens are drawn", found, "sampling")
    told = f"adam_epsilon={args.adam_epsilon:g}, to which gradients of single weights are added"
    lost = "learning-rate-too-low" if args.adam_epsilon > EPSILON else None
    yield Finding.of("Adam's epsilon is smaller than gradients", (lost, told), "optimizer")
