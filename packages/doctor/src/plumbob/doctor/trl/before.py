"""What a GRPOTrainer of TRL is examined for before its first step: data, reward functions, and the chat template.

Reward functions score a few transcripts that are written from the columns of the data, in place of completions, and what must hold
of an environment (`plumbob.doctor.environment.table`) is asked of what they earn.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from plumbob.doctor.environment.hands import Hand
from plumbob.doctor.environment.matrix import TOLERANCE, Matrix
from plumbob.doctor.environment.player import Given, Message, Played, RunSettings, Task, Turn, place_of
from plumbob.doctor.environment.table import judge
from plumbob.doctor.environment.texts import chosen, normalised, places, strings
from plumbob.doctor.environment.transcripts import CHEAP, ECHO, EMPTY, OTHERS, PERFECT, WRONG, Known
from plumbob.doctor.findings import Finding
from plumbob.doctor.trl.settings import tokenizer_of

FORMS = (
    "{}",
    "The answer is {}.",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "#### {}",
    "<think>\nThat takes a few steps.\n</think>\n<answer>\n{}\n</answer>",
    "<reasoning>\nThat takes a few steps.\n</reasoning>\n<answer>\n{}\n</answer>\n",
    "<think>\nThat takes a few steps.\n</think>\n\\boxed{{{}}}",
)
"""Forms in which reward functions look for an answer."""
KINDS = (
    ECHO,
    WRONG,
    "the form of an answer without content",
    "the best constant answer",
    "other words",
    "the answer alone",
)
"""Transcripts that are scored beside the right answer and an empty reply."""
ROUNDED = 0.05
"""Share of the range of rewards within which they count as equal."""
MOST_TASKS, MOST_ROWS, MOST_COLUMNS = 8, 4000, 3
"""Rows of the data with which transcripts are written, rows that are compared with each other, and columns that are tried."""
LEAST_STEPS = 30
"""Steps from which on a run is no trial."""
LONG = 8
"""Words from which on a text is a worked solution, which no model writes word for word."""
GIVEN = frozenset(
    {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
)
"""Arguments that TRL gives to every reward function; others are columns."""
PADDED = re.compile(r"-?\d{1,3}(,\d{3})+|-?\d+\.0+")
"""A whole number with separators, or as a table of floating-point numbers writes it."""
MARKED = re.compile(r"####\s*([^\n]+)|\\boxed\{([^{}]*)\}|<answer>\s*(.*?)\s*</answer>", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MARKS = ("####", "\\boxed", "<answer>")
"""How texts mark an answer."""
COPIES, LEAST_ROWS = 8, 32
"""Times that each row of the data stands in it on average, from which on these are few, and fewest rows that are judged."""
REPLY = "A reply."
AGAIN = "completions earn the same when they are scored again, in another order and in parts"
SILENCE = "a right answer earns more than an empty reply"
EXAMINED = {"not-overpaid", "enough", "apart", "near-copies", "prompted", "empty", "cheap"}
"""Rows of the table that these transcripts are enough for."""
PICTURES, OF_TEXTS = frozenset({"image", "images"}), {"enough", "apart", "near-copies"}
"""Columns of pictures, which are not read, and rows of the table that compare tasks by all that they say."""


@dataclass
class Before:
    """What was found, and what the columns of the data earn as completions."""

    findings: list[Finding] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    """Columns that reward functions name, and that may hold right answers."""
    namers: list[bool] = field(default_factory=list)
    """Of each reward function, whether it names one of them."""
    pays: bool | None = None
    """Whether these pay a text of the columns, in one of several forms, more than that of another row; None: it is not known."""
    form: str = ""
    """The form that is paid most, if it marks the answer."""
    silence: float = 0.0
    """What they pay an empty reply, on average."""


def shown(text: str) -> str:
    """The last answer that a text marks; "" if it marks none."""
    found = MARKED.findall(text)
    return next(filter(None, found[-1]), "").strip() if found else ""


def plain(text: str) -> str:
    """A text as it is compared: a number without separators, signs of money and decimals of 0; words without punctuation."""
    try:
        return f"{float(text.strip(' $%*.').replace(',', '')):.12g}"
    except ValueError:
        return normalised(text)


def examine(trainer: Any, score: Any, gold: str | None, found: Before) -> None:
    """Examine a trainer before its first step, and fill `found`. `gold`: the column with right answers, else looked for.

    `score(inputs, texts)`: what reward functions give the texts as completions of these rows, [B, F]; None if one fails.
    """
    args, steps = trainer.args, trainer.state.max_steps
    groups = steps * args.per_device_train_batch_size * args.gradient_accumulation_steps // args.num_generations
    taken = groups // args.num_iterations if steps >= LEAST_STEPS else 0  # a trial may take a few rows again and again
    code = {n: place_of(f) for n, f in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)}
    train, held_out = (_tasks(getattr(trainer, f"{kind}_dataset"), kind) for kind in ("train", "eval"))
    player = Given(train, held_out, RunSettings(taken=taken), code)
    tasks = [player.train[i] for i in chosen(len(player.train), MOST_TASKS)]
    if tasks:
        matrix = Matrix(player, Hand(tasks, [()] * len(tasks), [""] * len(tasks)))  # ty: ignore[invalid-argument-type]
        matrix.cells[EMPTY] = {i: _played(task, "", None, ()) for i, task in enumerate(tasks)}
        found.columns, found.namers = columns_of(trainer, tasks[0].handle)
        if gold:
            found.columns, found.namers = [gold], [True] * len(trainer.reward_funcs)
        if found.columns and score is not None:
            found.findings += _scored(trainer, matrix, score, found)
        found.findings += _data(train, found.columns)
        if player.held_out:
            held = [player.held_out[i] for i in chosen(len(player.held_out), MOST_TASKS)]
            cells = {EMPTY: {i: _played(task, "", None, ()) for i, task in enumerate(held)}}
            matrix.held_out = Matrix(player, Hand(held, [()] * len(held), [""] * len(held)), cells)  # ty: ignore
        known = EXAMINED - OF_TEXTS if PICTURES & tasks[0].handle.keys() else EXAMINED
        found.findings += judge(matrix, known)
    found.findings += _settings(args)
    if tasks:
        found.findings += _template(trainer, tasks[0])


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
            Task(f"row {i}", "train" if kind == "train" else "held-out", fields, text_of(row.get("prompt")), dict(row))
        )
    return found


def text_of(prompt: Any) -> str:
    return "\n".join(strings([m.get("content") for m in prompt] if isinstance(prompt, list) else prompt))


def _played(task: Task, text: str, parts: np.ndarray | None, names: Sequence[str]) -> Played:
    prompt = task.handle.get("prompt")
    given = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    messages = [Message(m["role"], "\n".join(strings(m.get("content")))) for m in given]
    reward = math.nan if parts is None else float(np.nansum(parts))
    components = {} if parts is None else dict(zip(names, np.nan_to_num(parts).tolist(), strict=True))
    return Played(task, reward, components, (*messages, Message("assistant", text, sampled=True)))


def columns_of(trainer: Any, row: dict[str, Any]) -> tuple[list[str], list[bool]]:
    """(columns that reward functions name, of each function whether it does); none if they name a column of lists, too."""
    # A number with a fraction is a weight or a difficulty more often than an answer; `gold` names it if it is one.
    texts = [n for n, v in row.items() if n != "prompt" and type(v) in (str, int)]
    named: list[set[str]] = []
    for function in trainer.reward_funcs:
        own: set[str] = set()
        with suppress(TypeError, ValueError, OSError):
            parameters = set(inspect.signature(function).parameters)
            if "trainer_state" in parameters:  # what it pays may change in the course of the run
                named.append(own)
                continue
            own |= parameters - GIVEN
            source = inspect.getsource(function)
            own |= {name for name in texts if f'"{name}"' in source or f"'{name}'" in source}
        named.append(own)
    every = set[str]().union(*named)
    # Numbers to be used or tests to be passed: no text of another column is a right completion by itself.
    if any(isinstance(value, list | dict) for name, value in row.items() if name in every and name != "prompt"):
        return [], [False] * len(named)
    known = [name for name in texts if name in every][:MOST_COLUMNS]
    return known, [bool(own & set(known)) for own in named]


def _data(train: list[Task], columns: Sequence[str]) -> list[Finding]:
    """What the rows say without a reward function."""
    found = list[Finding]()
    if columns and len(train) >= LEAST_ROWS and not PICTURES & train[0].handle.keys():
        different = len({(task.prompt, str(task.fields)) for task in train})
        few = COPIES * different <= len(train)
        told = f"{len(train)} rows, {different} of them different"
        found.append(Finding.of("rows of the data differ", ("few-distinct-tasks" if few else None, told), "tasks"))
    for name in columns:
        for other in [n for n, value in train[0].fields.items() if n != name and isinstance(value, str)]:
            pairs = [(str(task.fields.get(name)).strip(), str(task.fields.get(other))) for task in train]
            numbers = [(*pair, shown(pair[1])) for pair in pairs]
            numbers = [one for one in numbers if NUMBER.fullmatch(one[0]) and NUMBER.fullmatch(one[2])]
            known = [(gold, text, plain(gold) == plain(end)) for gold, text, end in numbers]
            wrong = [(gold, text) for gold, text, same in known if not same]
            inside = [gold for gold, text in wrong if places(gold, text)]
            if len(known) < MOST_TASKS:
                continue
            told = f"of {len(known)} rows {len(wrong)} have another number in {name!r} than the one that {other!r} marks at its end"
            bad = 2 * len(wrong) > len(known) and len(inside) >= 0.9 * len(wrong)
            told += ", but one that stands elsewhere in it" if bad else ""
            check = f"answers in {name!r} are those at the end of {other!r}"
            found.append(Finding.of(check, ("reward-wrong" if bad else None, told), "grading"))
    return found


def _scored(trainer: Any, matrix: Matrix, score: Any, found: Before) -> list[Finding]:
    """Fill the matrix with what transcripts of the tasks earn."""
    tasks, weights = matrix.hand.tasks, trainer.reward_weights.double().cpu().numpy()
    columns, own = found.columns, np.array(found.namers)

    if trainer.args.remove_unused_columns:
        told = (
            f"reward functions use {', '.join(map(repr, columns))}, and remove_unused_columns=True keeps it from them"
        )
        return [Finding.of("reward functions get the columns that they use", ("reward-wrong", told), "grading")]

    def earned(texts: Sequence[Sequence[str]], turned: bool = False) -> np.ndarray | None:
        """[tasks, kinds, F]. `texts`: of each task, one of each kind. A group is filled up with empty replies.

        `turned`: they are scored in the opposite order.
        """
        filled = [[*own, *[""] * (-len(own) % trainer.num_generations)] for own in texts]
        inputs = [task.handle for task, own in zip(tasks, filled, strict=True) for _ in own]
        flat, way = [text for own in filled for text in own], -1 if turned else 1
        given = score(inputs[::way], flat[::way])
        given = given if given is None else given[::way]
        return None if given is None else (given * weights).reshape(len(tasks), len(filled[0]), -1)[:, : len(texts[0])]

    ways = [(c, form, last) for c in columns for last in (False, True) for form in FORMS]
    asked = [["", *(_said(task, *way) for way in ways)] for task in tasks]
    first, turned = earned(asked), earned(asked, turned=True)
    if first is None or turned is None:
        return []
    if (ordered := order(first, turned, lambda: earned(asked))).verdict == "fail":
        return [ordered]
    names, sums = trainer.reward_func_names, np.nansum(first * own, 2)
    matrix.cells[EMPTY] = {i: _played(task, "", first[i, 0], names) for i, task in enumerate(tasks)}
    lifts = dict(zip(ways, (sums[:, 1:] - sums[:, :1]).mean(0).tolist(), strict=True))
    best, found.silence = max(lifts, key=lambda way: lifts[way]), float(sums[:, 0].mean())
    if trainer.tools or trainer.environments is not None:
        return []
    if lifts[best] <= TOLERANCE:
        found.pays = False
        paid = bool((sums[:, :1] > TOLERANCE).all() and np.isclose(sums[:, ways.index(best) + 1], sums[:, 0]).all())
        told = (
            f"an empty reply earns {found.silence:.3g}, and no text of {', '.join(map(repr, columns))} in any form more"
        )
        return [Finding.of(SILENCE, ("reward-wrong" if paid else None, told), "grading")]
    hand, k = matrix.hand, ways.index(best) + 1
    hand.turns = [(Turn(_said(task, *best)),) for task in tasks]
    hand.golds = [_said(task, best[0], "{}", best[2]) for task in tasks]
    cells = {PERFECT: {i: _played(t, hand.turns[i][0].text, first[i, k], names) for i, t in enumerate(tasks)}}
    known = Known(hand, {**matrix.cells, **cells})
    makes = {kind: {**CHEAP, **OTHERS}[kind] for kind in KINDS}
    made = {kind: [make(known, i) for i in range(len(tasks))] for kind, make in makes.items()}
    second = earned([[(own_[i] or (Turn(),))[-1].text for own_ in made.values()] for i in range(len(tasks))])
    if second is None:
        hand.golds = [""] * len(tasks)
        return []
    for j, (kind, turns) in enumerate(made.items()):
        texts = {i: own_[-1].text for i, own_ in enumerate(turns) if own_}
        cells[kind] = {i: _played(tasks[i], text, second[i, j], names) for i, text in texts.items()}
    others = {i: float(np.nansum(second[i, KINDS.index(WRONG)] * own)) for i in cells[WRONG]}
    found.pays = float(np.mean([sums[i, k] - value for i, value in others.items()])) > TOLERANCE if others else None
    said = [_worked(hand, lifts, best)] if found.pays is not False else []
    if all(PADDED.fullmatch(answer) for answer in hand.golds):
        pairs = [(turns[0].text, answer) for turns, answer in zip(hand.turns, hand.golds, strict=True)]
        short = earned([[text.replace(answer, answer.partition(".")[0].replace(",", ""))] for text, answer in pairs])
        lift = math.nan if short is None else float((np.nansum(short * own, 2)[:, 0] - sums[:, 0]).mean())
        told = (
            f"{pairs[0][1]!r} earns {lifts[best]:.3g} above an empty reply, without decimals and separators {lift:.3g}"
        )
        cause = "answers-not-parsed" if lift <= 0.1 * lifts[best] else None
        said.append(
            Finding.of("whole numbers may be written without decimals and separators", (cause, told), "grading")
        )
    if not found.pays:  # which of these texts are right is not known
        hand.golds = [""] * len(tasks)
        return said
    found.form = best[1] if any(mark in best[1] for mark in MARKS) else ""
    matrix.cells |= cells
    asked_for = [mark for mark in MARKS if all(mark in task.prompt for task in tasks)]
    if asked_for:
        most = max(lift for (_, form, _), lift in lifts.items() if any(mark in form for mark in asked_for))
        told = (
            f"prompts have {', '.join(asked_for)}, which earns at most {most:.3g}; {best[1]!r} earns {lifts[best]:.3g}"
        )
        cause = "answers-not-parsed" if most <= TOLERANCE else None
        said.append(Finding.of("the form that prompts ask for is paid", (cause, told), "grading"))
    return said


def tolerance(rewards: np.ndarray) -> float:
    """What two rewards of one text may differ by: a reward model computes it with other padding, or rounds it otherwise."""
    known = rewards[np.isfinite(rewards)]
    return 1e-6 + ROUNDED * float(np.ptp(known)) if known.size else 1e-6


def order(first: np.ndarray, turned: np.ndarray, again: Callable[[], np.ndarray | None]) -> Finding:
    """Whether the same texts earn the same ([..., F]) among others: `turned`, given in the order of `first`.

    If not, `again` scores them as at first, which shows whether the order decides or chance. None: it cannot.
    """

    def equal(one: np.ndarray | None) -> bool:
        return one is not None and np.allclose(first, one, 0, tolerance(first), equal_nan=True)

    if equal(turned):
        return Finding(AGAIN, "pass", f"{len(first)} completions", None, "grading")
    apart, same = float(np.nanmax(np.abs(first - turned))), equal(again())
    told = f"in another order, or in two parts, rewards differ by up to {apart:.3g}, as before {'not at all' if same else 'too'}"
    return Finding(AGAIN, "fail", told, "rewards-of-other-rollouts" if same else "reward-nondeterministic", "grading")


def _said(task: Task, column: str, form: str, last: bool) -> str:
    """The text of a column in one of the forms; `last`: its last word alone, as of a worked solution."""
    text = str(task.handle.get(column, "")).strip()
    return form.format(text.split()[-1] if last and text else text)


def _worked(hand: Hand, lifts: dict[Any, float], best: Any) -> Finding:
    """A worked solution marks its answer; other long texts, such as a program, may have to be given as they are."""
    check = "a right answer is paid without its worked solution word for word"
    marked = all(shown(gold) and len(gold.split()) >= LONG for gold in hand.golds)
    short = max(lift for (column, _, last), lift in lifts.items() if last and column == best[0])
    told = f"the text of column {best[0]!r} earns {lifts[best]:.3g} above an empty reply, its last word at most {short:.3g}"
    wrong = not best[2] and marked and short <= TOLERANCE
    return Finding.of(check, ("answers-not-parsed" if wrong else None, told), "grading")


def _template(trainer: Any, task: Task) -> list[Finding]:
    """What the chat template makes of the first row's prompt."""
    prompt = task.handle.get("prompt")
    if not isinstance(prompt, list) or trainer.environment_factories is not None:
        return []
    from transformers.utils import get_json_schema

    tokenizer = tokenizer_of(trainer)
    tools = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in trainer.tools or ()] or None
    found, names = [], [str(tool["function"]["name"]) for tool in tools or ()]
    whole, closed = (
        tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=open_)
        for open_ in (True, False)
    )
    missing = [name for name in names if not re.search(rf"\b{re.escape(name)}\b", whole)]
    lacks = "prompt-incomplete"
    if tools:
        told = (
            f"the template's prompt does not name {', '.join(missing)}" if missing else f"it names {', '.join(names)}"
        )
        found.append(Finding.of("prompts describe the tools", (lacks if missing else None, told), "rows"))
    texts = [(m["role"], m.get("content")) for m in prompt if m["role"] in ("system", "user")]
    lost = [role for role, text in texts if isinstance(text, str) and not _holds(whole, text)]
    told = f"messages of {', '.join(dict.fromkeys(lost))} are not in it" if lost else f"{len(texts)} messages are in it"
    found.append(Finding.of("prompts hold what the messages say", (lacks if lost else None, told), "rows"))
    reply = tokenizer.apply_chat_template(
        [*prompt, {"role": "assistant", "content": REPLY}], tools=tools, tokenize=False
    )
    header = reply.partition(REPLY)[0].removeprefix(closed) if reply.startswith(closed) else ""
    opens = whole != closed or not header.strip()  # some templates need no header
    told = f"the prompt ends with {whole[-40:]!r}; a turn begins with {header!r}"
    found.append(Finding.of("the template opens the assistant's turn", (None if opens else lacks, told), "rows"))
    # Of the special tokens those that the template writes around a text: others, such as an image's, may stand in a message.
    plain = tokenizer.apply_chat_template(
        [{"role": "user", "content": REPLY}], tokenize=False, add_generation_prompt=True
    )
    special = [token for token in tokenizer.all_special_tokens if len(token) > 2 and token in plain]
    twice = [token for token in special if any(isinstance(text, str) and token in text for _, text in texts)]
    told = f"of {', '.join(special) or 'no token'} {', '.join(twice) or 'none'} stands in a message"
    found.append(Finding.of("the template is applied once", (lacks if twice else None, told), "rows"))
    if tools:
        found.append(_call(trainer, tokenizer, prompt, tools))
    return found


FEW_TOKENS = 0.1
"""Share of the tokens below which top_entropy_quantile leaves hardly a signal: half of the 0.2 of arXiv:2506.01939."""
DECAY = 0.01
"""Share of the weights that decay may take away in a step: usual settings take 1e-9 to 1e-5."""
ALTERS: dict[str, Any] = {
    **dict.fromkeys(("min_new_tokens", "min_tokens", "min_length", "no_repeat_ngram_size", "presence_penalty"), 0),
    **dict.fromkeys(("frequency_penalty", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("bad_words", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), None),
    **dict.fromkeys(
        ("logit_bias", "allowed_token_ids", "forced_bos_token_id", "forced_eos_token_id", "penalty_alpha"), None
    ),
    **dict.fromkeys(("typical_p", "repetition_penalty", "encoder_repetition_penalty", "num_beams"), 1),
    "do_sample": True,
}
"""Arguments of generate() and of vLLM that change how tokens are drawn, each with the value with which it does not. Others, such
as top_p, are settings of the trainer."""


def _settings(args: Any) -> list[Finding]:
    asked = {"repetition_penalty": args.repetition_penalty, **(args.generation_kwargs or {})}
    given = {k: v for k, v in asked.items() if k in ALTERS and v not in (None, [], {}, ALTERS[k])}
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    told = f"{told}: tokens are drawn otherwise than training computes" if given else "nothing does"
    drawn = "nothing but the settings of training decides how tokens are drawn"
    share = f"top_entropy_quantile={args.top_entropy_quantile:g}, the share of the tokens, the least certain ones, that is trained"
    decay = args.learning_rate * args.weight_decay
    taken = f"weight_decay x learning_rate takes {decay:.2g} of all weights away in a step"
    few = "signal-left-out" if args.top_entropy_quantile < FEW_TOKENS else None
    return [
        Finding.of(drawn, ("sampling-altered" if given else None, told), "sampling"),
        Finding.of(
            "weight decay keeps the weights", ("learning-rate-too-high" if decay > DECAY else None, taken), "optimizer"
        ),
        Finding.of("enough of the deciding tokens are trained", (few, share), "sampling"),
    ]


def _holds(whole: str, text: str) -> bool:
    """Whether a text stands in another one, white space aside, at least as it begins."""
    return "".join(text.split())[:60] in "".join(whole.split())


def _call(trainer: Any, tokenizer: Any, prompt: Any, tools: list[Any]) -> Finding:
    """A tool call as the template writes it is read as the same call."""
    from trl.chat_template_utils import parse_response

    check, tool = "a tool call in the template's form is read as that call", tools[0]["function"]
    arguments = {
        name: "a" for name, of in tool["parameters"].get("properties", {}).items() if of.get("type") == "string"
    }
    call = {"type": "function", "function": {"name": tool["name"], "arguments": arguments}}
    said = [*prompt, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        start = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template(said, tools=tools, tokenize=False)
        if not text.startswith(start):
            return Finding(check, "unsure", "the template writes earlier turns otherwise", None, "tools")
        ids, prefix = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text[len(start) :], start))
        read = parse_response(trainer._tokenizer, ids, prefix=prefix, tools=tools).get("tool_calls") or []
    except Exception as error:  # templates and parsers raise what they like
        return Finding(check, "unsure", f"{type(error).__name__}: {error}", None, "tools")
    same = [(one["function"]["name"], one["function"]["arguments"]) for one in read] == [(tool["name"], arguments)]
    told = f"of {text[len(start) :].strip()[:80]!r} {'it' if same else 'no such call'} is read"
    return Finding.of(check, (None if same else "calls-not-read", told), "tools")
