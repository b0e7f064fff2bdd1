"""What is found before the first step: reward functions, data and templates of a real GRPOTrainer that takes no step."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")

import plumbob.doctor  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from plumbob.doctor.trl import before, forms  # noqa: E402
from plumbob.trainer.config.bundled_models import bundled_folder  # noqa: E402

pytestmark = pytest.mark.trl

MODEL = str(bundled_folder("tiny-gsm8k"))
Rows = list[dict[str, Any]]


def rows(count: int = 32, system: str = "") -> Rows:
    told = [{"role": "system", "content": system}] if system else []
    return [
        {"prompt": [*told, {"role": "user", "content": f"What is {i} + {i + 3}?"}], "answer": str(2 * i + 3)}
        for i in range(count)
    ]


def texts(completions: list[Any]) -> list[str]:
    return [c if isinstance(c, str) else c[-1]["content"] for c in completions]


def reader(pattern: str, flags: int = 0) -> Callable[..., list[float]]:
    """A reward function that compares the first group of a pattern with the answer."""
    compiled = re.compile(pattern, flags)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        found = [compiled.search(text) for text in texts(completions)]
        return [float(f is not None and f[1].strip() == a) for f, a in zip(found, answer, strict=True)]

    return reward


def contains(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(a in text) for text, a in zip(texts(completions), answer, strict=True)]


def digits(completions: list[Any], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / (len(text) + 1) for text in texts(completions)]


def number_is_no_text(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """Compares a number with a text, and pays a little for digits."""
    last = [re.findall(r"\d+", text)[-1:] for text in texts(completions)]
    right = [bool(one) and int(one[0]) == a for one, a in zip(last, answer, strict=True)]
    return [r + 0.1 * d for r, d in zip(right, digits(completions), strict=True)]


def wrong_is_paid(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [1.0 - one for one in contains(completions, answer)]


def opposite(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [-one for one in contains(completions, answer)]


def longer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [c + len(t) / 20 for c, t in zip(contains(completions, answer), texts(completions), strict=True)]


def marker(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    pairs = zip(contains(completions, answer), texts(completions), strict=True)
    return [1.0 if "####" in text else right / 2 for right, text in pairs]


def above_mean(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    own = contains(completions, answer)
    return [one - sum(own) / len(own) for one in own]


def of_first(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(answer[0] in text) for text in texts(completions)]


def copies_question(completions: list[Any], question: list[str], **_: Any) -> list[float]:
    return [float(q in text) for text, q in zip(texts(completions), question, strict=True)]


def near(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Falls with the distance from the right number."""
    last = [re.findall(r"\d+", text)[-1:] for text in texts(completions)]
    return [1 / (1 + abs(int(one[0][:6]) - int(a)) / 4) if one else 0.0 for one, a in zip(last, answer, strict=True)]


def in_json(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    def right(text: str, a: str) -> bool:
        try:
            return str(json.loads(text)["answer"]) == a
        except (ValueError, KeyError, TypeError):
            return False

    return [float(right(text, a)) for text, a in zip(texts(completions), answer, strict=True)]


def of_sums(completions: list[Any], answer: list[str], task: list[str], **_: Any) -> list[float | None]:
    return [r if t == "sum" else None for r, t in zip(contains(completions, answer), task, strict=True)]


def of_words(completions: list[Any], answer: list[str], task: list[str], **_: Any) -> list[float | None]:
    return [r if t == "word" else None for r, t in zip(contains(completions, answer), task, strict=True)]


def of_length(completion_ids: list[list[int]], target_length: list[int], **_: Any) -> list[float]:
    return [-abs(len(ids) - t) / 50 for ids, t in zip(completion_ids, target_length, strict=True)]


def tagged(completions: list[Any], **_: Any) -> list[float]:
    form = r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"
    return [0.5 * bool(re.fullmatch(form, text, re.DOTALL)) for text in texts(completions)]


def shuffled() -> Rows:
    answers = [row["answer"] for row in rows()]
    random.Random(1).shuffle(answers)
    return [{**row, "answer": answer} for row, answer in zip(rows(), answers, strict=True)]


def mixed() -> Rows:
    words = ["amber", "blue", "coral", "delta"]
    told = [{"prompt": [{"role": "user", "content": f"Say word {i}."}], "answer": words[i % 4]} for i in range(32)]
    pairs = zip(rows(), told, strict=True)
    return [{**row, "task": kind} for pair in pairs for row, kind in zip(pair, ("sum", "word"), strict=True)]


def rendered(header: bool, as_message: bool = False) -> Rows:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    made = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=header) for r in rows()]
    prompts = [[{"role": "user", "content": text}] if as_message else text for text in made]
    return [{**row, "prompt": prompt} for row, prompt in zip(rows(), prompts, strict=True)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = trl.GRPOConfig(
        str(tmp_path_factory.mktemp("trainer")), max_steps=5, per_device_train_batch_size=16, num_generations=4, bf16=False,
        use_cpu=True, report_to="none", learning_rate=1e-5,
    )  # fmt: skip
    made = trl.GRPOTrainer(MODEL, contains, config, train_dataset=Dataset.from_list(rows()))
    made.state.max_steps = 5
    return made


def found(trainer: Any, rewards: Any, data: Rows, weights: list[float] | None = None, **args: Any) -> list[str]:
    """Ids of the causes, the first one first."""
    functions = rewards if isinstance(rewards, list) else [rewards]
    trainer.reward_funcs, trainer.reward_processing_classes = functions, [None] * len(functions)
    trainer.reward_func_names = [f.__name__ for f in functions]
    trainer.reward_weights = torch.tensor(weights or [1.0] * len(functions))
    trainer.train_dataset = Dataset.from_list(data)
    kept = dict(vars(trainer.args))
    vars(trainer.args).update(args)
    try:
        doctor = plumbob.doctor.attach(trainer)
        findings = before.examine(trainer, doctor.watch.score).findings
    finally:
        vars(trainer.args).update(kept)
        trainer.remove_callback(doctor)
    return [f.cause for f in findings if f.cause]


def unanswered() -> Rows:
    return [{**row, "answer": row["answer"] if i % 3 else ""} for i, row in enumerate(rows())]


def growing() -> Rows:
    return [{"prompt": "Add " + "1 + " * i + "1."} for i in range(40)]


TAGS = "Use <think></think> <answer></answer>."
BOXED = "Put the final answer into \\boxed{}."
FAULTS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "thinking on several lines": ("answers-not-parsed", (reader(r"<think>.*</think>\s*<answer>(.*)</answer>$"), rows()), {}),
    "text before the answer": ("answers-not-parsed", (reader(r"\A#### (\d+)"), rows()), {}),
    "the first number": ("answers-not-parsed", (reader(r"(\d+)"), rows()), {}),
    "another form than asked for": ("answers-not-parsed", (reader(r"#### (\d+)"), rows(system=BOXED)), {}),
    "a number is no text": ("reward-wrong", (number_is_no_text, rows()), {}),
    "wrong answers are paid": ("reward-wrong", (wrong_is_paid, rows()), {}),
    "a weight of 0": ("reward-wrong", ([contains, digits], rows()), {"weights": [0.0, 1.0]}),
    "two that cancel": ("reward-wrong", ([contains, opposite], rows()), {}),
    "the question is paid": ("reward-wrong", (copies_question, [{**r, "question": r["prompt"][0]["content"]} for r in rows()]), {}),
    "length is paid more": ("reward-exploitable", (longer, rows()), {}),
    "a marker is paid": ("reward-exploitable", (marker, rows()), {}),
    "less the mean of the batch": ("rewards-of-other-rollouts", (above_mean, rows()), {}),
    "the first row's answer": ("rewards-of-other-rollouts", (of_first, rows()), {}),
    "answers of other rows": ("reward-wrong", (contains, shuffled()), {}),
    "rows without answers": ("oracle-fails", (contains, unanswered()), {}),
    "prompts without the question": ("few-distinct-tasks", (contains, [{**r, "prompt": rows()[0]["prompt"]} for r in rows()]), {}),
    "a handful of rows": ("few-distinct-tasks", (contains, rows(4)), {}),
    "rendered without the header": ("prompt-incomplete", (digits, rendered(False)), {}),
    "rendered twice": ("prompt-incomplete", (digits, rendered(True, as_message=True)), {}),
    "rows that become longer": ("task-order-drifts", (digits, growing()), {"shuffle_dataset": False}),
    "weight decay": ("learning-rate-too-high", (contains, rows()), {"weight_decay": 1000.0}),
    "a warm-up that never ends": ("learning-rate-too-low", (contains, rows()), {"warmup_steps": 1000}),
}  # fmt: skip
"""Name -> (cause, arguments of `found`)."""
HEALTHY: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "tags": (([reader(r"<answer>\s*(\d+)\s*</answer>"), tagged, digits], rows(system=TAGS)), {}),
    "the last number": ((reader(r"(\d+)\D*\Z"), rows()), {}),
    "the answer alone": ((reader(r"\A(\d+)\Z"), rows()), {}),
    "distance": ((near, rows()), {}),
    "JSON": ((in_json, rows()), {}),
    "mixed tasks": (([of_sums, of_words, digits], mixed()), {}),
    "target lengths": ((of_length, [{"prompt": f"Write about topic {i}.", "target_length": 10 + i % 20} for i in range(32)]), {}),
    "a penalty for wrong answers": (([wrong_is_paid, digits], rows()), {"weights": [-1.0, 1.0]}),
    "rendered with the header": ((contains, rendered(True)), {}),
    "without answers": ((digits, rows()), {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_before_the_first_step(name: str, trainer: Any) -> None:
    cause, given, more = FAULTS[name]
    assert found(trainer, *given, **more)[:1] == [cause]


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_before_the_first_step(name: str, trainer: Any) -> None:
    given, more = HEALTHY[name]
    assert found(trainer, *given, **more) == []


@pytest.mark.parametrize(
    "pattern",
    [
        r"^<think>.*</think>\s*<answer>(.*)</answer>$",
        r"#### (\-?[0-9\.\,]+)",
        r"\\boxed\{([^}]*)\}",
        r"(?i)final answer is\s*:?\s*(.+)",
        r"<answer>\s*(\d+(?:,\d{3})*)\s*</answer>",
    ],
)
def test_a_form_is_made_of_a_pattern_in_a_reward_function(pattern: str) -> None:
    made = forms.forms([reader(pattern)], [])
    read = [found for form in made if (found := re.search(pattern, form.replace("{}", "72")))]
    assert any(match[1].strip() == "72" for match in read)


def test_lines_stand_before_an_answer_or_where_a_form_has_a_place_for_them() -> None:
    assert forms.with_lines("#### {}").splitlines()[-1] == "#### {}"
    assert forms.with_lines(f"<think>{forms.WORKING}</think>{{}}") == f"<think>{forms.LINES}</think>{{}}"


SCRIPT = f"""
import hashlib, sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def reward(completions, answer, **_):
    return [sum(c.isdigit() for c in t) / (len(t) + 1) + (a in t) for t, a in zip(completions, answer)]

rows = [{{"prompt": f"What is {{i}} + 3?", "answer": str(i + 3)}} for i in range(64)]
config = GRPOConfig("out", max_steps=2, per_device_train_batch_size=4, num_generations=4, bf16=False, use_cpu=True,
                    max_completion_length=12, report_to="none", temperature=1.0, save_strategy="no")
trainer = GRPOTrainer({MODEL!r}, reward, config, train_dataset=Dataset.from_list(rows))
if "attach" in sys.argv:
    import plumbob.doctor
    plumbob.doctor.attach(trainer)
trainer.train()
weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
if trainer.accelerator.is_main_process:
    print("SUM", trainer.accelerator.num_processes, hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.slow
def test_several_processes_train_as_without_it_and_the_first_one_says_that_steps_are_not_recorded(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    call = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "train.py"]
    told = [
        subprocess.run(
            [*call, word], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        ).stdout
        for word in ("plain", "attach")
    ]  # fmt: skip
    sums = [re.findall(r"SUM 2 \w+", one) for one in told]
    assert sums[0] == sums[1] != []
    assert told[1].count("training in several processes is not supported yet") == 2  # where it begins, and on the page
