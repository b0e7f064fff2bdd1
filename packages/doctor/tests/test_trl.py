"""`attach` on real GRPOTrainers of TRL with a bundled model, on the CPU: it sees a run, changes nothing, and alarms rightly."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from plumbob.trainer.config.bundled_models import bundled_folder

trl = pytest.importorskip("trl")

import plumbob.doctor  # noqa: E402
from datasets import Dataset  # noqa: E402
from plumbob.doctor.environment.player import Message, Played, Task  # noqa: E402
from plumbob.doctor.record import read  # noqa: E402
from plumbob.doctor.trl.answers import Answers, said  # noqa: E402
from plumbob.doctor.trl.before import Before, columns_of, examine, of_their_rows, plain  # noqa: E402
from plumbob.doctor.trl.reading import of_folder  # noqa: E402

pytestmark = pytest.mark.trl

MODEL = str(bundled_folder("tiny-gsm8k"))


def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """A share of the text that is digits, and more for the right answer: it differs within nearly every group."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(c.isdigit() for c in t) / (len(t) + 1) + (a in t) for t, a in zip(texts, answer, strict=True)]


def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """A reward that some completions do not get."""
    return [None if len(ids) % 3 else len(ids) / 48 for ids in completion_ids]


def rows(count: int = 32) -> Dataset:
    asked = [[{"role": "user", "content": f"What is {i} + {i + 3}?"}] for i in range(count)]
    return Dataset.from_list([{"prompt": prompt, "answer": str(2 * i + 3)} for i, prompt in enumerate(asked)])


def make(
    folder: Path, *, kind: Any = None, reward: Any = rewards, data: Any = None, given: Any = None, **config: Any
) -> Any:
    """A GRPOTrainer. `given`: further arguments of it."""
    settings = {
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 48,
        "temperature": 1.5,
        "learning_rate": 1e-4,
        "max_steps": 3,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
        **config,
    }
    more = {"model": MODEL, **(given or {})}
    return (kind or trl.GRPOTrainer)(
        args=trl.GRPOConfig(output_dir=str(folder), **settings),
        reward_funcs=reward,
        train_dataset=rows() if data is None else data,
        **more,
    )


def lora(**changes: Any) -> dict[str, Any]:
    from peft import LoraConfig

    usual = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.0}
    return {"peft_config": LoraConfig(**{**usual, **changes})}


def lookup(key: str) -> str:
    """Look up a key in the table. Returns the next key or the value.

    Args:
        key: The key.
    """
    return "amber" if len(key) > 1 else "b7"


def tools() -> dict[str, Any]:
    """A bundled model that calls a tool, and TRL told how to read its calls, which have the form of Qwen3."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template

    tokenizer = AutoTokenizer.from_pretrained(str(bundled_folder("tiny")), padding_side="left")
    tokenizer.response_template = qwen3_template
    system = {
        "role": "system",
        "content": "Look up the start key. Each result gives the next key or the value. "
        "Follow the keys to the value, then reply with the value alone.",
    }
    asked = [[system, {"role": "user", "content": f"Start key: {'abcdefgh'[i % 8]}{i}"}] for i in range(32)]
    return {
        "given": {"model": str(bundled_folder("tiny")), "tools": [lookup], "processing_class": tokenizer},
        "data": Dataset.from_list([{"prompt": prompt, "answer": "amber"} for prompt in asked]),
        "max_completion_length": 488,
        "temperature": 1.0,
        "max_tool_calling_iterations": 2,
    }


HEALTHY: dict[str, Callable[[], dict[str, Any]]] = {
    "grpo, accumulated": lambda: {"loss_type": "grpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    "dr_grpo, no scaling": lambda: {"loss_type": "dr_grpo", "scale_rewards": "none", "temperature": 1.0},
    "bnpo, accumulated": lambda: {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    "dapo, several updates of a generation": lambda: {
        "loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
        "per_device_train_batch_size": 8, "max_steps": 5, "learning_rate": 1e-3, "mask_truncated_completions": True,
    },
    "cispo, batch scaling": lambda: {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch"},
    "gspo, two iterations": lambda: {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "learning_rate": 1e-3, "max_steps": 4,
    },
    "beta, two iterations": lambda: {"beta": 0.1, "num_iterations": 2, "learning_rate": 1e-3, "max_steps": 4, "delta": 2.0},
    "answers in a nested column": lambda: {"reward": weighted, "data": nested(), "temperature": 1.0},
    "settings that narrow the sampling": lambda: {"top_p": 0.98, "top_k": 100, "min_p": 0.01},
    "LoRA and beta": lambda: {"given": lora(), "beta": 0.05, "learning_rate": 1e-3},
    "LoRA with a little dropout": lambda: {"given": lora(lora_dropout=0.05), "learning_rate": 1e-3},
    "bfloat16, checkpointing, decay, warm-up": lambda: {
        "bf16": True, "gradient_checkpointing": True, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2,
    },
    "two rewards, some None": lambda: {"reward": [rewards, some], "reward_weights": [1.0, 0.5]},
    "plain texts": lambda: {"data": Dataset.from_list([{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(32)])},
    "tools": tools,
    "environments that forget": lambda: environment(Notes),
    "a loss of one's own": lambda: {"kind": Reinforce},
    "a form of its own": lambda: {"reward": [in_tags, by_length], "data": asks_for_tags(), "temperature": 1.0},
    "tests of programs": lambda: {"reward": passes, "data": rows().add_column("tests", [f"assert f({i})" for i in range(32)])},
    "rewards that compute, and of the form": lambda: {
        "reward": [countdown, of_form], "temperature": 1.0,
        "data": rows().map(lambda row, i: {"target": 2 * i + 5, "nums": [i, i + 5, 3]}, with_indices=True),
    },
}  # fmt: skip
"""Settings of runs without a fault."""


def attached(folder: Path, setting: dict[str, Any]) -> Any:
    trainer = make(folder, **setting)
    doctor = plumbob.doctor.attach(trainer, rescore=True)
    trainer.train()
    return doctor


FORMULAS: dict[str, Callable[[int, int, int], int]] = {
    "{} and {}, less {}": lambda a, b, c: a + b - c,
    "{} boxes of {}, and {} eaten": lambda a, b, c: a * b - c,
}


@given(st.lists(st.tuples(*[st.integers(2, 40)] * 3), min_size=40), st.sampled_from([*FORMULAS]), st.randoms())
def test_answers_are_of_other_rows_where_they_are_all_there_and_not_in_their_places(
    numbers: list[tuple[int, int, int]], words: str, random_: Any
) -> None:
    golds = [FORMULAS[words](*own) for own in numbers]

    def verdict(answers: list[int]) -> str:
        given_ = zip(numbers, answers, strict=True)
        rows_ = [Task("", "train", {}, words.format(*own), {"answer": f"#### {gold}"}) for own, gold in given_]
        return of_their_rows(rows_, "answer").verdict

    assert verdict(golds) in ("pass", "unsure")
    others, order = random_.sample(golds, len(golds)), random_.sample(range(40), 40)
    if sum(a == b for a, b in zip(golds, others, strict=True)) < 0.4 * len(golds):
        assert verdict(others) == verdict(golds).replace("pass", "fail")
    one = [Task("", "train", {}, f"Of {a} and {a + 9}?", {"answer": str(b)}) for a, b in enumerate(order)]
    assert of_their_rows(one, "answer").verdict == "pass"


def test_an_answer_is_read_where_it_is_marked() -> None:
    assert plain("1,200.0") == plain("$1200") == "1200"
    assert plain("Blue.") == plain("blue")
    assert said("12 + 5 = 17\n#### 18", "17") == "18"
    assert (
        said(r"so \boxed{17} of 20", "17") == said("<answer>\n17\n</answer>", "17") == said("It is 17.", "17") == "17"
    )
    assert said("first\nBlue.", "blue") == "blue"


def test_rows_with_pictures_are_not_told_apart_by_their_texts(tmp_path: Path) -> None:
    trainer = make(tmp_path, data=rows(1).repeat(64))
    for seen, causes in ((True, set()), (False, {"few-distinct-tasks"})):
        trainer._is_vlm, found = seen, Before()
        examine(trainer, None, found)
        assert {one.cause for one in found.findings if one.cause} == causes


REPLIES = ("7 + 5 = 12\n#### 12", "#### 12", "#### 13", "so 12, no\n#### 11")
"""Of what is 7 + 5: two right replies, a wrong one, and a wrong one with the right number in it."""


def test_a_reward_function_is_given_as_many_texts_at_once_as_in_training_of_several_prompts(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def counted(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        calls.append((len(completions), len({str(prompt) for prompt in prompts})))
        return rewards(completions, answer)

    trainer, found = make(tmp_path, reward=counted, steps_per_generation=2, gradient_accumulation_steps=2), Before()
    examine(trainer, plumbob.doctor.attach(trainer).watch.score, found)
    assert len(calls) > 4 and max(calls) == (32, 8)
    assert found.pays and found.columns == ["answer"]


@pytest.mark.parametrize(("header", "cause"), [(False, "prompt-incomplete"), (True, None)])
def test_prompts_that_the_user_has_rendered(header: bool, cause: str | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, trainer, found = AutoTokenizer.from_pretrained(MODEL), make(tmp_path), Before()
    trainer.train_dataset = rows().map(
        lambda row: {"text": tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=header)}
    )
    trainer.train_dataset = trainer.train_dataset.remove_columns("prompt").rename_column("text", "prompt")
    examine(trainer, None, found)
    assert [one.cause for one in found.findings if one.check.startswith("prompts that are rendered open")] == [cause]
    trainer.train_dataset, found = Dataset.from_list([{"prompt": "2 + 2 =", "answer": "4"}] * 8), Before()
    examine(trainer, None, found)
    assert not [one for one in found.findings if one.check.startswith("prompts that are rendered")]


class SavesTheFirst(trl.GRPOTrainer):
    """What is saved is a copy that was taken before training."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        bundled = type(self.model).from_pretrained(MODEL)
        bundled.save_pretrained(output_dir or self.args.output_dir)


class SavesMerged(trl.GRPOTrainer):
    """The adapter is merged, or left out."""

    merged = True

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        import copy

        model = copy.deepcopy(self.accelerator.unwrap_model(self.model))
        (model.merge_and_unload() if self.merged else model.unload()).save_pretrained(
            output_dir or self.args.output_dir
        )


class LosesTheAdapter(SavesMerged):
    merged = False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        (lambda: {}, "pass"),
        (lambda: {"given": lora()}, "pass"),
        (lambda: {"kind": SavesTheFirst}, "fail"),
        (lambda: {"given": lora(), "kind": SavesMerged}, "pass"),
        (lambda: {"given": lora(), "kind": LosesTheAdapter}, "fail"),
        (lambda: {"model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-2}, "pass"),
    ],
)
def test_the_saved_model_is_compared_with_the_trained_one(
    changes: Callable[[], dict[str, Any]], verdict: str, tmp_path: Path
) -> None:
    doctor = attached(tmp_path, {"max_steps": 2, "learning_rate": 1e-3, **changes()})
    doctor.trainer.save_model()
    (saved,) = [f for _, f in doctor.examination.found if f.check == "what save_model writes is the trained model"]
    assert saved.verdict == verdict, saved
    assert [f for _, f in of_folder(tmp_path / "plumbob_records").examination().found if f.check == saved.check] == [
        saved
    ]
    assert ("saved-model-differs" in (tmp_path / "plumbob_records/report.html").read_text()) is (verdict == "fail")


def judged(
    question: str, replies: tuple[str, ...], earned: tuple[float, ...], before: Before, cut: bool = False
) -> list[Any]:
    """What is found after each of eight groups of these replies to a question whose answer is 12. `cut`: by a limit."""
    task = Task("7 + 5", "train", {"answer": "12"}, question)
    answers = Answers(["reward"], len(replies), before)
    asked = Message("user", question)
    played = [
        Played(task, reward, {"reward": reward}, (asked, Message("assistant", text, sampled=True)))
        for text, reward in zip(replies, map(float, earned), strict=True)
    ]
    return [answers.add([(one, cut) for one in played], k) for k in range(8)]


@pytest.mark.parametrize(
    ("earned", "pays", "cause"),
    [
        ((1, 1, 0, 0), True, None),
        ((0.9, 1, 0.1, 0.1), True, None),
        ((0, 0, 0.2, 0.2), None, "reward-wrong"),
        ((0.5, 0.5, 0.5, 0.5), False, "reward-wrong"),
        ((0.5, 0.5, 0.5, 0.5), True, None),  # another form than that of these replies is paid
        ((0, 1, 0, 0), True, "answers-not-parsed"),
        ((1, 1, 1, 1), True, None),
    ],
)
def test_what_right_answers_of_the_run_itself_earn(
    earned: tuple[float, ...], pays: bool | None, cause: str | None
) -> None:
    before = Before(columns=["answer"], namers=[True], pays=pays)
    found = judged("What is 7 + 5?", REPLIES, earned, before)
    assert found[-1].cause == cause
    assert {one.cause for one in found[:3]} <= {None, "reward-wrong" if not np.ptp(earned) else None}


TAGGED = ("<answer>12</answer>", "<answer>13</answer>", "so 12", "<answer>11</answer>")


@pytest.mark.parametrize(
    ("question", "earned", "known", "cause"),
    [
        ("Reply as <answer>N</answer>.", (1, 1, 0, 1), {"pays": False}, "reward-wrong"),  # min(1, form + right)
        ("Reply as <answer>N</answer>.", (1.5, 1, 0, 1), {"pays": False}, None),
        ("Reply as <answer>\\boxed{N}</answer>.", (0.2, 0.2, 0, 0.2), {"pays": False}, None),
        ("Reply as <answer>N</answer>.", (0, 0, 0, 0), {"pays": False}, "reward-wrong"),
        ("Reply as <answer>N</answer>.", (0, 0, 0, 0), {"pays": True}, "answers-not-parsed"),
        ("Reply as <answer>N</answer>.", (1, 0, 0, 0), {"pays": True}, None),
        ("What is 7 + 5?", (1, 1, 1, 1), {"columns": [], "namers": [False]}, None),
    ],
)
def test_a_reward_that_pays_the_form_alone_and_one_that_does_not_read_it(
    question: str, earned: tuple[float, ...], known: dict[str, Any], cause: str | None
) -> None:
    before = Before(**{"columns": ["answer"], "namers": [True], **known})
    assert judged(question, TAGGED, earned, before)[-1].cause == cause
    if cause == "answers-not-parsed":  # what a limit has cut off may lack the end of the form
        assert judged(question, TAGGED, earned, before, cut=True)[-1].cause is None


def test_what_a_reward_function_reads() -> None:
    def literal(completions: list[Any], **_: Any) -> list[float]:
        return [float(json.loads(text)["answer"] == "12") for text in completions]

    def option(completions: list[Any], language: str = "en", answer: Any = None, **_: Any) -> list[float]:
        return [0.0] * len(completions)

    def keywords(completions: list[Any], **given: Any) -> list[float]:
        return [float(a == b) for a, b in zip(given["answer"], given.get("level", []), strict=True)]

    class Judge:
        def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
            return [float(one in text) for one, text in zip(columns["answer"], completions, strict=True)]

    functions = [rewards, literal, option, keywords, Judge(), functools.partial(rewards, answer=["12"])]
    row = {"prompt": "a", "answer": "12", "level": "easy", "language": "en"}
    columns, namers = columns_of(SimpleNamespace(reward_funcs=functions), row)
    assert (columns, namers) == (["answer", "level"], [True, False, True, True, True, False])


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_for_a_healthy_run(name: str, tmp_path: Path) -> None:
    doctor = attached(tmp_path, HEALTHY[name]())
    x = doctor.examination
    assert not x.causes, [f for _, f in x.found if f.cause]
    assert not [f for _, f in x.found if f.verdict == "error"]
    checked = {f.check for _, f in x.found if f.verdict == "pass"}
    assert "the loss has the slopes of its formula" in checked
    assert "weights change as AdamW with the settings changes them" in checked


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["grpo, accumulated", "dapo, several updates of a generation", "LoRA and beta", "tools"]
)
def test_weights_are_equal_to_the_bit_with_and_without_it(name: str, tmp_path: Path) -> None:
    found = []
    for watched in (False, True):
        trainer = make(tmp_path / str(watched), **HEALTHY[name]())
        if watched:
            plumbob.doctor.attach(trainer, every=2)
        trainer.train()
        found.append(
            (trainer.model.state_dict(), torch.get_rng_state(), [log.get("loss") for log in trainer.state.log_history])
        )
    (plain, drawn, losses), (own, drawn_then, losses_then) = found
    assert all(torch.equal(tensor, own[key]) for key, tensor in plain.items())
    assert torch.equal(drawn, drawn_then)
    assert losses == losses_then


PROCESSES = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import plumbob.doctor
from test_trl import BETWEEN_PROCESSES, make
folder, name, attached = Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
trainer = make(folder, **BETWEEN_PROCESSES[name]())
doctor = plumbob.doctor.attach(trainer, every=2) if attached else None
trainer.train()
trainer.save_model(str(folder / str(attached)))
"""
BETWEEN_PROCESSES: dict[str, Callable[[], dict[str, Any]]] = {
    "tools": lambda: {**tools(), "loss_type": "bnpo", "beta": 0.04},
    "divided twice, a group of two processes": lambda: {
        **ACCUMULATED,
        "per_device_train_batch_size": 1,
        "kind": DividedTwice,
        "loss_type": "dapo",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
def test_a_step_of_two_processes_is_recorded_whole(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", tmp_path / "run.py"]
    for attached_ in ("False", "True"):
        done = subprocess.run(
            [*command, Path(__file__).parent, tmp_path, name, attached_], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    plain, own = (next((tmp_path / n).glob("*.safetensors")).read_bytes() for n in ("False", "True"))
    assert plain == own
    reading = of_folder(tmp_path / "plumbob_records")
    record = read(tmp_path / "plumbob_records" / "step_00001.npz")
    healthy = name == "tools"
    assert len(record.rows) == (32 if healthy else 4)
    assert all(len({r.rollout for r in record.rows}) == len(record.rows) == len(u.trained) for u in record.updates)
    found = {finding.check: finding.verdict for _, finding in reading.examination().found}
    assert found["the loss has the slopes of its formula"] == ("pass" if healthy else "fail")
    assert not healthy or found["the gradient is that of the loss in every tensor"] == "pass"
    assert not healthy or "fail" not in found.values()


class DividedTwice(trl.GRPOTrainer):
    """A trainer whose loss is divided by the number of accumulated passes once more."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        return super()._compute_loss(model, inputs) / self.args.gradient_accumulation_steps


def test_a_fault_is_printed_when_it_is_found_and_can_be_read_later_without_trl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accumulated = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    doctor = attached(tmp_path, {"kind": DividedTwice, **accumulated})
    folder = tmp_path / "plumbob_records"
    assert doctor.examination.causes == ["loss-differs-from-settings"]
    printed = capsys.readouterr().out
    at_once, page = printed.index("plumbob.doctor: loss-differs-from-settings in step 1"), printed.index("Cause: ")
    assert at_once < printed.index("'grad_norm'") < page
    assert sorted(path.name for path in folder.glob("*.npz")) == [f"step_0000{k}.npz" for k in (1, 2, 3)]
    assert "loss-differs-from-settings" in (folder / "report.html").read_text()
    record = read(folder / "step_00001.npz")
    assert record.trainer == f"trl {trl.__version__}"
    assert len(record.rows) == len(record.rollouts) == len(record.updates[0].trained) == 16
    code = "import sys; sys.modules['trl'] = None; from plumbob.doctor.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stderr
    told = json.loads(found.stdout)
    assert told["cause"] == "loss-differs-from-settings"
    assert "compute_loss" in told["causes"]["loss-differs-from-settings"]["fix"]


def test_a_folder_without_records_is_an_error_of_its_user(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "plumbob.doctor", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, "no records" in found.stderr) == (2, True)


@pytest.mark.slow
def test_an_error_of_the_doctor_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plumbob.doctor.trl import attach as module

    monkeypatch.setattr(module, "record_of", lambda *given: 1 / 0)
    doctor = attached(tmp_path, {})
    assert doctor.trainer.state.global_step == 3
    assert [f.evidence[:17] for _, f in doctor.examination.found if f.verdict == "error"] == ["ZeroDivisionError"]
    assert doctor.examination.code == 2


@pytest.mark.slow
def test_a_template_that_raises_before_the_first_step_does_not_end_the_records(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    refusal = "{%- if messages[-1].role == 'assistant' %}{{ raise_exception('no turns of the assistant') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    doctor = attached(tmp_path, {"given": {"processing_class": tokenizer}})
    assert "no turns of the assistant" in doctor.examination.limits[0]
    assert len(list((tmp_path / "plumbob_records").glob("*.npz"))) == 3
    assert doctor.examination.code == 0


def test_what_is_not_supported_is_said_and_not_recorded(tmp_path: Path) -> None:
    doctor = attached(
        tmp_path, {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 1, "num_iterations": 3}
    )
    assert "steps_per_generation" in doctor.examination.limits[0]
    assert not list((tmp_path / "plumbob_records").glob("*.npz"))
    with pytest.raises(TypeError, match="GRPOTrainer"):
        plumbob.doctor.attach(torch.nn.Linear(1, 1))


# Faults: subclasses as scripts and forks have them, reward functions, and settings


class CountsMaskedTokens(trl.GRPOTrainer):
    """The loss's denominator counts truncated completions, which are not in it."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["num_items_in_batch"] = torch.tensor(output["completion_ids"].numel())
        return output


class MaskFromPadding(trl.GRPOTrainer):
    """The mask is made from ids, and the pad token is the one that ends a turn."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["completion_mask"] = (output["completion_ids"] != self.eos_token_ids[0]).long() * output[
            "completion_mask"
        ]
        return output


class TrainsOnToolResults(trl.GRPOTrainer):
    def _tool_call_loop(self, *given: Any) -> Any:
        mask, *rest = super()._tool_call_loop(*given)
        return [[1] * len(one) for one in mask], *rest


class NoTemperature(trl.GRPOTrainer):
    """Log-probabilities are computed at temperature 1, and completions sampled at another one."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, keep: int, *_: Any, **more: Any
    ) -> Any:
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1]
        logps = logits.log_softmax(-1).gather(-1, ids[:, -keep:, None])[..., 0]
        return logps, torch.zeros_like(logps), None


class SeesPadding(trl.GRPOTrainer):
    """Attention sees the padding on the left."""

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(model, ids, torch.ones_like(mask), *rest, **more)


class ScaledByBatch(trl.GRPOTrainer):
    """Advantages are those of the whole batch, not of a prompt's completions."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        scores = torch.tensor(list(self._logs["rewards"]["rewards"]))[-len(output["advantages"]) :]
        output["advantages"] = (scores - scores.mean()) / (scores.std() + 1e-4)
        return output


class ShuffledRewards(trl.GRPOTrainer):
    """Advantages go to other completions than those that earned them."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["advantages"] = output["advantages"].roll(1)
        return output


class WrongKl(trl.GRPOTrainer):
    """The KL term's sign is wrong: it drives the policy away from the reference."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        self.beta = -abs(self.beta)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta = abs(self.beta)


class Unclipped(trl.GRPOTrainer):
    """Ratios are not clipped at all."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        kept, self.epsilon_low, self.epsilon_high = (self.epsilon_low, self.epsilon_high), 1e6, 1e6
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.epsilon_low, self.epsilon_high = kept


class Reinforce(trl.GRPOTrainer):
    """A right loss of the user's own: no ratio, and the mean over rows."""

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        mask, ids = inputs["completion_mask"], torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], mask], 1)
        logps = self._get_per_token_logps_and_entropies(model, ids, seen, mask.shape[1])[0]
        of_rows = (logps * mask).sum(1) / mask.sum(1)
        return -(of_rows * inputs["advantages"]).mean() / self.current_gradient_accumulation_steps


class Frozen(trl.GRPOTrainer):
    """Layers are frozen after the optimizer was made, as by a helper for another purpose."""

    def training_step(self, *given: Any, **more: Any) -> Any:
        loss = super().training_step(*given, **more)
        for name, parameter in self.model.named_parameters():
            if "layers.0" in name:
                parameter.grad = None
        return loss


class OldWeights(trl.GRPOTrainer):
    """Completions come from the weights with which training began, as with an engine that is never updated."""

    def _generate_single_turn(self, *given: Any, **more: Any) -> Any:
        parameters = dict(self.model.named_parameters())
        if not hasattr(self, "kept"):
            self.kept = {name: p.data.clone() for name, p in parameters.items()}
        own = {name: p.data for name, p in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self.kept[name]
            return super()._generate_single_turn(*given, **more)
        finally:
            for name, parameter in parameters.items():
                parameter.data = own[name]


class OtherPrecision(trl.GRPOTrainer):
    """What generates computes in bfloat16, and what trains in float32, without a correction for it."""

    def _generate_single_turn(self, *given: Any, **more: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super()._generate_single_turn(*given, **more)


class AdapterTwice(trl.GRPOTrainer):
    """What generates has the adapter twice: it was merged, and is applied as well."""

    def _generate_single_turn(self, *given: Any, **more: Any) -> Any:
        adapter = [p for name, p in self.model.named_parameters() if "lora_B" in name]
        for parameter in adapter:
            parameter.data *= 2
        try:
            return super()._generate_single_turn(*given, **more)
        finally:
            for parameter in adapter:
                parameter.data /= 2


class LosesTheEnd(trl.GRPOTrainer):
    """Completions are decoded and tokenised again, without the token that ends them."""

    def _generate_single_turn(self, *given: Any, **more: Any) -> Any:
        ids, logprobs = super()._generate_single_turn(*given, **more)
        texts = [self._tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        return [self._tokenizer(text)["input_ids"] for text in texts], logprobs


class PartedGroups(trl.GRPOTrainer):
    """A data loader of one's own gives each prompt once, so that groups hold different prompts."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


# Reward functions


def by_length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [len(ids) / 48 for ids in completion_ids]


def in_order_of_length(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Scored in batches of similar lengths, and returned in that order."""
    order = sorted(range(len(completions)), key=lambda k: len(completions[k][0]["content"]))
    return rewards([completions[k] for k in order], [answer[k] for k in order])


def without_column(completions: list[Any], **columns: Any) -> list[float]:
    """Compares with an empty default, where the column is not given."""
    answers = columns.get("answer", [""] * len(completions))
    texts = [c[-1]["content"] for c in completions]
    shares = [0.1 * len(set(t)) / (len(t) + 1) for t in texts]
    return [float(t.split(" ")[-1] == a) + s for t, a, s in zip(texts, answers, shares, strict=True)]


def contained(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Asks whether the answer contains what follows ####, where the reverse is meant."""
    said = [c[-1]["content"].partition("####")[2].strip() for c in completions]
    return [float(text in a) for text, a in zip(said, answer, strict=True)]


def swapped(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Looks for the completion in the answer."""
    return [float(c[-1]["content"] in a) for c, a in zip(completions, answer, strict=True)]


def any_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Right if there is a number at all: `answer` is read, and not used."""
    return [float(bool(answer) and any(ch.isdigit() for ch in c[-1]["content"])) for c in completions]


def never_text(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Looks for the answer in the list of messages, where it never is."""
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


def by_order(completions: list[Any], **_: Any) -> list[float]:
    """Depends on the place in the batch."""
    return [(i % 3) / 2 for i in range(len(completions))]


_calls = itertools.count()


def by_count(completions: list[Any], **_: Any) -> list[float]:
    """Depends on how often it was called before."""
    return [float(next(_calls) % 5) for _ in completions]


def nearly_equal(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1 + 1e-4 * (sum(ids) % 7) for ids in completion_ids]


def constant(completions: list[Any], **_: Any) -> list[float]:
    return [0.1] * len(completions)


def not_a_number(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float("nan") if sum(ids) % 3 else 1.0 * (sum(ids) % 2) for ids in completion_ids]


def log_rest(completions: list[Any], **_: Any) -> list[float]:
    """The logarithm of something that is 0 for a fifth of the completions."""
    rests = [sum(map(ord, c[-1]["content"])) % 5 for c in completions]
    return [math.log(rest) if rest else -math.inf for rest in rests]


def by_chance(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """A noisy judge: the same texts earn other rewards at each call, whatever their order."""
    return [reward + random.choice([0.0, 0.1, 0.2]) for reward in rewards(completions, answer)]


def once(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Pays the first of equal completions alone."""
    texts = [c[-1]["content"] for c in completions]
    own = rewards(completions, answer)
    return [reward * (text not in texts[:k]) for k, (reward, text) in enumerate(zip(own, texts, strict=True))]


def in_tags(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Answers in a form of its own, for which prompts ask."""
    return [float(f"<SOLUTION>{a}</SOLUTION>" in c[-1]["content"]) for c, a in zip(completions, answer, strict=True)]


def passes(completions: list[Any], tests: list[str], **_: Any) -> list[float]:
    """Programs are run: no text of a column is a right one."""
    return [0.01 * len(set(c[-1]["content"])) + ("assert" in t and "return" in c[-1]["content"])
            for c, t in zip(completions, tests, strict=True)]  # fmt: skip


def asks_for_tags() -> Dataset:
    told = {"role": "system", "content": "Put the answer in <SOLUTION></SOLUTION>."}
    return rows().map(lambda row: {"prompt": [told, *row["prompt"]]})


def asked(question: Callable[[int], str], answer: Callable[[int], str] = lambda i: str(2 * i + 3)) -> Dataset:
    """Rows of other tasks."""
    prompts = [[{"role": "user", "content": question(i)}] for i in range(48)]
    return Dataset.from_list([{"prompt": prompt, "answer": answer(i)} for i, prompt in enumerate(prompts)])


def first_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The first number of a reply, the more the nearer it is."""
    found = [re.search(r"\d+", c[-1]["content"]) for c in completions]
    return [1 / (1 + abs(int(f[0]) - int(a))) if f else 0.0 for f, a in zip(found, answer, strict=True)]


def letter(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(a in c[-1]["content"].upper()) for c, a in zip(completions, answer, strict=True)]


def graded(completions: list[Any], answer: list[str], right: Callable[[str, str], float]) -> list[float]:
    """A little for digits, and what is `right`; what cannot be read is not."""
    found = list[float]()
    for text, wanted in zip((c[-1]["content"].strip() for c in completions), answer, strict=True):
        found.append(sum(ch.isdigit() for ch in text) / (20 * len(text) + 20))
        with suppress(ValueError, TypeError, KeyError):
            found[-1] += right(text, wanted)
    return found


def object_(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Pays any object, and hardly its content."""
    return graded(completions, answer, lambda text, wanted: 1.0 + 0.05 * (json.loads(text) == json.loads(wanted)))


def text_in_object(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Compares a value of an object with a text, where prompts ask for a number."""
    return graded(completions, answer, lambda text, wanted: json.loads(text)["sum"] == wanted)


def day_first(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Reads another order of day, month and year than prompts ask for."""
    return graded(
        completions, answer, lambda text, day: datetime.strptime(text, "%d-%m-%Y") == datetime.fromisoformat(day)
    )


def turned(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Reads the two numbers of an answer the wrong way round, and pays its length."""
    texts = [c[-1]["content"].strip() for c in completions]
    right = [":".join(t.split(":")[::-1]) == a for t, a in zip(texts, answer, strict=True)]
    return [r + 0.3 / (1 + abs(len(t) - len(a))) for t, a, r in zip(texts, answer, right, strict=True)]


class Basket:
    """An environment that keeps what it remembers in a list of its class."""

    held: ClassVar[list[str]] = []

    def reset(self, **_: Any) -> None:
        self.held.clear()

    def lookup(self, key: str) -> str:
        """Look up a key in the table. Returns the next key or the value.

        Args:
            key: The key.
        """
        self.held.append(key)
        return "amber" if len(key) > 1 else "b7"

    def get_reward(self) -> float:
        return len(set(self.held)) / 8


class Diary(Basket):
    """Keeps what it remembers to itself, and from one rollout to the next."""

    def __init__(self) -> None:
        self.held = []  # ty: ignore[invalid-attribute-access]

    def reset(self, **_: Any) -> None:
        pass


class Notes(Diary):
    def reset(self, **_: Any) -> None:
        self.held.clear()


def environment(factory: Any) -> dict[str, Any]:
    given = tools()
    given["given"] = {**given["given"], "environment_factory": factory}
    del given["given"]["tools"]
    return given


def distance(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """How far the last number is from the right one, where nearness is meant."""
    found = [re.findall(r"\d+", c[-1]["content"])[-1:] for c in completions]
    return [min(abs(int(f[0]) - int(a)) / 100, 1.0) if f else 1.0 for f, a in zip(found, answer, strict=True)]


_grades: dict[str, float] = {}


def remembered(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Grades are kept by prompt alone."""
    own = zip(prompts, rewards(completions, answer), strict=True)
    return [_grades.setdefault(str(prompt), reward) for prompt, reward in own]


def brief(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Length costs more than a right answer earns."""
    texts = [c[-1]["content"] for c in completions]
    return [float(a in t) - 0.6 * len(t) for t, a in zip(texts, answer, strict=True)]


def whole(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Compares what follows #### with a column that holds the solution."""
    texts = [c[-1]["content"].rpartition("####")[2].strip() for c in completions]
    return [float(text == a) for text, a in zip(texts, answer, strict=True)]


class SortsRows(trl.GRPOTrainer):
    """Puts rows in the order of their length, and leaves advantages as they are."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        order = output["completion_mask"].sum(1).argsort()
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        return {name: value[order] if name in names else value for name, value in output.items()}


class TrainsTruncated(trl.GRPOTrainer):
    """The comparison that finds completions which the limit has cut off is off by one."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.mask_truncated_completions = False
        output = super()._generate_and_score_completions(inputs)
        self.mask_truncated_completions = True
        return output


def rendered() -> dict[str, Any]:
    """Prompts that hold what the template has made of them already."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def twice(row: dict[str, Any]) -> dict[str, Any]:
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        return {"prompt": [{"role": "user", "content": text}]}

    return {"data": rows().map(twice)}


def countdown(completions: list[Any], target: list[int], nums: list[list[int]], **_: Any) -> list[float]:
    """Pays a sum of the given numbers that is the target: no text of a column is a right completion."""
    found = [re.findall(r"\d+", c[-1]["content"]) for c in completions]
    right = [
        sum(map(int, one)) == t and set(map(int, one)) <= set(n) for one, t, n in zip(found, target, nums, strict=True)
    ]
    return [0.1 * bool(one) + r for one, r in zip(found, right, strict=True)]


def of_form(completions: list[Any], target: list[int], **_: Any) -> list[float]:
    """Names the column of answers, and needs it not."""
    return [len(set(c[-1]["content"])) / 100 for c in completions]


def _no_tools(given: dict[str, Any]) -> dict[str, Any]:
    """The chat template has no place for tools."""
    tokenizer = given["given"]["processing_class"]
    tokenizer.chat_template = tokenizer.chat_template.replace("loop.first and tools", "false")
    return given


def floats() -> Dataset:
    return Dataset.from_list([{**row, "answer": f"{row['answer']}.0"} for row in rows().to_list()])


def last_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The last word of a reply, and a little for each digit."""
    texts = [c[-1]["content"] for c in completions]
    return [
        float(t.split(" ")[-1] == a) + 0.001 * sum(c.isdigit() for c in t) for t, a in zip(texts, answer, strict=True)
    ]


def no_system() -> dict[str, Any]:
    """The chat template leaves system messages out."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role != 'system' %}<|im_start|>{{ message.role }}\n"
        "{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    told = {"role": "system", "content": "Answer with a number."}
    data = Dataset.from_list([{**row, "prompt": [told, *row["prompt"]]} for row in rows().to_list()])
    return {"given": {"processing_class": tokenizer}, "data": data}


def weighted(completions: list[Any], weight: list[float], reference: list[dict[str, Any]], **_: Any) -> list[float]:
    """Right answers stand in a nested column, and another column of numbers is used as well."""
    return [w * r for w, r in zip(weight, rewards(completions, [r["final"] for r in reference]), strict=True)]


def nested() -> Dataset:
    told = rows().to_list()
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "reference": {"final": row["answer"]}, "weight": 1.0 if k % 2 else 0.8}
            for k, row in enumerate(told)
        ]
    )


def no_header() -> dict[str, Any]:
    """The chat template does not open the assistant's turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.chat_template = tokenizer.chat_template.replace("if add_generation_prompt", "if false")
    return {"given": {"processing_class": tokenizer}}


def special(*markers: str) -> dict[str, Any]:
    """A tokenizer that leaves tokens with these texts out of what it decodes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    tokenizer.add_special_tokens({"additional_special_tokens": [m for m in markers if m in tokenizer.get_vocab()]})
    return {"processing_class": tokenizer}


def never_calls() -> dict[str, Any]:
    """A model that knows no tools, with tools."""
    given = tools()
    given["given"]["model"] = MODEL
    return {**given, "max_completion_length": 32, "max_steps": 6, "reward": by_length}


class Averages(transformers.TrainerCallback):
    """Copies a moving average of the weights over them after each step."""

    kept: dict[str, torch.Tensor] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        own = {name: p.data for name, p in model.named_parameters()}
        self.kept = self.kept or {name: p.clone() for name, p in own.items()}
        for name, average in self.kept.items():
            own[name].copy_(average.lerp_(own[name], 0.02))


def same_result(given: dict[str, Any]) -> dict[str, Any]:
    """A tool that remembers its first result for all calls."""

    def lookup(key: str) -> str:
        """Look up a key in the table. Returns the next key or the value.

        Args:
            key: The key.
        """
        return "the next key is b7"

    return {**given, "given": {**given["given"], "tools": [lookup]}}


def frozen_adapter() -> dict[str, Any]:
    """An adapter as PEFT loads it by default: none of its tensors is trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), LoraConfig(r=4, target_modules="all-linear"))
    return {"given": {"model": model.requires_grad_(False)}, "gradient_checkpointing": True}


def own_engine(*, stale: bool) -> dict[str, Any]:
    """A rollout_func with a model of its own, which is never updated, or one that writes into completions."""
    from transformers import AutoModelForCausalLM

    copy_ = AutoModelForCausalLM.from_pretrained(MODEL).eval()

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        model = copy_ if stale else trainer.accelerator.unwrap_model(trainer.model)
        ids = trainer._tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
        given = [
            model.generate(torch.tensor([i]), generation_config=trainer.generation_config)[0, len(i) :].tolist()
            for i in ids
        ]
        with torch.no_grad():
            logits = [
                model(torch.tensor([i + own])).logits[0, len(i) - 1 : -1] for i, own in zip(ids, given, strict=True)
            ]
        scores = [
            (of / trainer.temperature).log_softmax(-1)[range(len(own)), own].tolist()
            for of, own in zip(logits, given, strict=True)
        ]
        written = [] if stale else trainer._tokenizer("Zebra!")["input_ids"]
        given, scores = [written + own for own in given], [[0.0] * len(written) + own for own in scores]
        return {"prompt_ids": ids, "completion_ids": given, "logprobs": scores}

    return {"given": {"rollout_func": play}, "learning_rate": 1e-3}


@dataclass(frozen=True)
class Fault:
    name: str
    accepted: tuple[str, ...]
    """Causes of which the first that is found must be one."""
    source: str
    """Where it was reported; "" if it was made up for this table."""
    changes: Callable[[], dict[str, Any]]
    """Settings of the run."""


ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
LOSS = ("loss-differs-from-settings", "normaliser-depends-on-microbatches")
FAULTS = (
    Fault("an engine that is never updated", ("weights-not-synced",), "radixark/miles#2075", lambda: own_engine(stale=True)),
    Fault("what rollout_func writes is trained", ("loss-mask-wrong",), "unslothai/unsloth#5673", lambda: own_engine(stale=False)),
    Fault("the best model by loss", ("saved-model-differs",), "huggingface/trl#3384", lambda: {
        "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 2, "eval_steps": 2,
        "given": {"eval_dataset": rows().select(range(4))}, "data": rows().select(range(4, 32))}),
    Fault("completions cut off", ("truncated-rollouts",), "huggingface/trl#5697, #6219",
          lambda: {"max_completion_length": 6, "temperature": 1.0}),
    Fault("loss divided twice", LOSS, "modelscope/ms-swift#10117", lambda: {"kind": DividedTwice, **ACCUMULATED}),
    Fault("denominator counts masked tokens", LOSS, "huggingface/trl#6369, #6024",
          lambda: {"kind": CountsMaskedTokens, "loss_type": "dapo", "mask_truncated_completions": True}),
    Fault("mask from padding", ("loss-mask-wrong",), "huggingface/trl#4970, #6357", lambda: {"kind": MaskFromPadding}),
    Fault("tool results trained", ("loss-mask-wrong",), "unslothai/unsloth#5673", lambda: {"kind": TrainsOnToolResults, **tools()}),
    Fault("tools not in the prompt", ("prompt-incomplete",), "huggingface/trl#5366", lambda: _no_tools(tools())),
    Fault("temperature not applied", ("temperature-not-applied",), "huggingface/trl#3029", lambda: {"kind": NoTemperature}),
    Fault("temperature given twice", ("temperature-not-applied",), "huggingface/trl#4342",
          lambda: {"generation_kwargs": {"temperature": 0.85}}),
    Fault("tokens left out", ("sampling-altered",), "huggingface/trl#4342", lambda: {"generation_kwargs": {"top_k": 5}}),
    Fault("greedy", ("groups-without-variety", "temperature-not-applied", "sampling-altered"), "",
          lambda: {"generation_kwargs": {"do_sample": False}}),
    Fault("does not end at the turn's end", ("stop-token-wrong",), "huggingface/trl#7039",
          lambda: {"generation_kwargs": {"eos_token_id": 5}}),
    Fault("dropout in the model", ("dropout-in-training",), "huggingface/trl#3500, #3000",
          lambda: {"model_init_kwargs": {"attention_dropout": 0.3}}),
    Fault("much dropout in the adapter", ("dropout-in-training",), "huggingface/trl#3234",
          lambda: {"given": lora(lora_dropout=0.5), "learning_rate": 1e-3}),
    Fault("padding is seen", ("attention-or-positions-wrong",), "huggingface/trl#2708", lambda: {"kind": SeesPadding}),
    Fault("advantages of the batch", ("advantages-wrong",), "huggingface/trl#3991", lambda: {"kind": ScaledByBatch}),
    Fault("advantages of other completions", ("advantages-wrong", "rewards-of-other-rollouts"), "StarsfieldAI/R1-V#67",
          lambda: {"kind": ShuffledRewards}),
    Fault("reference follows the policy", ("kl-term-wrong",), "huggingface/trl#2908",
          lambda: {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0, "max_steps": 4}),
    Fault("KL term with the wrong sign", ("kl-term-wrong",), "", lambda: {"kind": WrongKl, "beta": 0.5}),
    Fault("ratios not clipped", LOSS, "StarsfieldAI/R1-V#187", lambda: {"kind": Unclipped}),
    Fault("layers frozen", ("no-gradient", "loss-differs-from-settings"), "huggingface/trl#3926", lambda: {"kind": Frozen}),
    Fault("adapter loaded for inference", ("no-gradient",), "huggingface/trl#6700", lambda: frozen_adapter()),
    Fault("weights in bfloat16", ("update-differs-from-settings",), "areal-project/AReaL#1634",
          lambda: {"model_init_kwargs": {"dtype": "bfloat16"}, "learning_rate": 1e-6}),
    Fault("rate for all weights with LoRA", ("learning-rate-too-low",), "huggingface/trl#4181",
          lambda: {"given": lora(), "learning_rate": 1e-6}),
    Fault("reward reads messages as a text", ("reward-wrong",), "huggingface/trl#3452",
          lambda: {"reward": never_text}),
    Fault("reward by place in the batch", ("rewards-of-other-rollouts",), "huggingface/trl#6680", lambda: {"reward": by_order}),
    Fault("rewards in the order of lengths", ("rewards-of-other-rollouts",), "", lambda: {"reward": in_order_of_length}),
    Fault("the answers are left out", ("reward-wrong",), "huggingface/trl#2644",
          lambda: {"reward": without_column, "remove_unused_columns": True}),
    Fault("silence is contained in every answer", ("reward-wrong", "reward-exploitable"), "", lambda: {"reward": contained}),
    Fault("reward by a counter", ("reward-nondeterministic", "rewards-of-other-rollouts"), "huggingface/trl#6680",
          lambda: {"reward": by_count}),
    Fault("nearly equal rewards", ("tiny-std-scaling",), "arXiv:2503.20783", lambda: {"reward": nearly_equal}),
    Fault("constant reward", ("reward-wrong",), "huggingface/trl#3857", lambda: {"reward": constant}),
    Fault("answers became floating-point numbers", ("answers-not-parsed",), "",
          lambda: {"reward": last_number, "data": floats(), "temperature": 1.0}),
    Fault("system messages left out", ("prompt-incomplete",), "", no_system),
    Fault("template without generation prompt", ("prompt-incomplete",), "", no_header),
    Fault("generation with the first weights", ("weights-not-synced",), "verl-project/verl#7495",
          lambda: {"kind": OldWeights, "learning_rate": 1e-3}),
    Fault("generation in another precision", ("engine-trainer-mismatch",), "vllm-project/vllm#42259",
          lambda: {"kind": OtherPrecision}),
    Fault("adapter applied twice", ("weights-not-synced",), "huggingface/trl#2872",
          lambda: {"kind": AdapterTwice, "given": lora(), "learning_rate": 1e-2}),
    Fault("completions lose their end", ("stop-token-wrong", "row-not-what-was-sampled"), "huggingface/trl#5224",
          lambda: {"kind": LosesTheEnd, "temperature": 1.0}),
    Fault("groups of different prompts", ("advantages-wrong",), "", lambda: {"kind": PartedGroups}),
    Fault("reward with swapped arguments", ("reward-wrong", "reward-exploitable"), "",
          lambda: {"reward": swapped, "temperature": 1.0}),
    Fault("reward pays for any number", ("reward-wrong", "reward-exploitable"), "",
          lambda: {"reward": any_number, "temperature": 1.0}),
    Fault("evaluation on training rows", ("held-out-in-training",), "",
          lambda: {"given": {"eval_dataset": rows().select(range(8))}}),
    Fault("tools never called", ("calls-not-read",), "", never_calls),
    Fault("rewards are no numbers", ("not-finite",), "huggingface/trl#3452", lambda: {"reward": not_a_number}),
    Fault("a logarithm of 0", ("not-finite",), "", lambda: {"reward": log_rest, "temperature": 1.0}),
    Fault("copies earn nothing", ("rewards-of-other-rollouts",), "", lambda: {"reward": once, "temperature": 0.7}),
    Fault("a least number of tokens", ("sampling-altered",), "", lambda: {"generation_kwargs": {"min_new_tokens": 24}}),
    Fault("rewards by chance", ("reward-nondeterministic",), "", lambda: {"reward": by_chance}),
    Fault("a penalty for repetition", ("sampling-altered",), "", lambda: {"repetition_penalty": 1.4}),
    Fault("few of the deciding tokens", ("signal-left-out",), "huggingface/trl#3727", lambda: {"top_entropy_quantile": 0.02}),
    Fault("rows in the order of their size", ("task-order-drifts",), "NVIDIA-NeMo/RL#3117",
          lambda: {"shuffle_dataset": False, "data": asked(lambda i: f"Add up {'1, ' * i}1.")}),
    Fault("environments share a list", ("rewards-of-other-rollouts",), "", lambda: environment(Basket)),
    Fault("environments keep what they found", ("rewards-of-other-rollouts",), "", lambda: environment(Diary)),
    Fault("one environment for all rollouts", ("rewards-of-other-rollouts",), "",
          lambda: environment(functools.cache(Notes))),
    Fault("answers of other rows", ("oracle-fails",), "", lambda: {
        "data": asked(lambda i: f"What is {i} + {i * i % 31}?", lambda i: str(7 * i % 48 + (7 * i % 48) ** 2 % 31))}),
    Fault("the distance is paid", ("reward-wrong",), "", lambda: {"reward": distance}),
    Fault("one grade for a prompt", ("reward-wrong",), "", lambda: {"reward": remembered, "max_steps": 6}),
    Fault("most completions are masked", ("truncated-rollouts", "signal-left-out"), "",
          lambda: {"mask_truncated_completions": True, "max_completion_length": 14, "temperature": 1.0}),
    Fault("a number that must be a text", ("answers-not-parsed",), "", lambda: {
        "reward": text_in_object, "data": asked(lambda i: f'What is {i} + {i + 3}? Reply with an object as {{"sum": 5}}.')}),
    Fault("a date in another form", ("oracle-fails",), "", lambda: {"reward": day_first, "data": asked(
        lambda i: f"Which day is {i} days after the first of May 2024?", lambda i: f"2024-{5 + i // 31:02}-{1 + i % 31:02}")}),
    Fault("brevity is worth more", ("reward-exploitable",), "", lambda: {"reward": brief}),
    Fault("the column is a solution", ("oracle-fails",), "", lambda: {"reward": [whole, by_length], "max_steps": 8, "data": asked(
        lambda i: f"What is {i} + {i + 3}? End with #### and it.", lambda i: f"{i} + {i + 3} = {2 * i + 3}\n#### {2 * i + 3}")}),
    Fault("the form shows the answer", ("answer-in-prompt",), "", lambda: {
        "reward": last_number, "data": asked(lambda i: f"What is {i} + {i + 3}? The last line must be '#### {2 * i + 3}'.")}),
    Fault("rows are sorted without their advantages", ("rewards-of-other-rollouts",), "", lambda: {"kind": SortsRows}),
    Fault("the first number counts, working is asked for", ("answers-not-parsed",), "modelscope/ms-swift#4570",
          lambda: {"reward": first_number, "data": asked(lambda i: f"Show the steps of {i} + {i + 3}, then the result.")}),
    Fault("any option is paid", ("reward-exploitable",), "", lambda: {
        "reward": letter, "temperature": 1.0,
        "data": asked(lambda i: f"A) {i} B) {i + 1} C) {i + 2} D) {i + 3}: which is it?", lambda i: "ABCD"[i % 4])}),
    Fault("an object without its content", ("reward-exploitable",), "Liuziyu77/Visual-RFT#176", lambda: {
        "reward": object_, "data": asked(lambda i: f"Write {i} as JSON.", lambda i: json.dumps({"number": i}))}),
    Fault("the answer is right where two agree", ("reward-wrong",), "",
          lambda: {"reward": turned, "data": asked(lambda i: f"Which time is {i}?", lambda i: f"{i}:{i + 50 * (i % 3 > 0)}")}),
    Fault("one search for all", ("tool-results-wrong",), "", lambda: same_result(tools())),
    Fault("an average is copied over the weights", ("update-differs-from-settings",), "",
          lambda: {"given": {"callbacks": [Averages()]}}),
    Fault("rendered prompts are cut", ("prompt-incomplete",), "", lambda: {
        "data": Dataset.from_list([{"prompt": f"<|im_start|>user\nWhat is {i} +", "answer": str(2 * i + 3)} for i in range(32)])}),
    Fault("four rows again and again", ("few-distinct-tasks",), "",
          lambda: {"data": Dataset.from_list(rows(4).to_list() * 16)}),
    Fault("truncated completions are trained", ("loss-mask-wrong",), "",
          lambda: {"kind": TrainsTruncated, "mask_truncated_completions": True, "max_completion_length": 20}),
    Fault("a template applied twice", ("prompt-incomplete",), "", rendered),
    Fault("one list of messages for all rows", ("few-distinct-tasks",), "",
          lambda: {"data": rows().map(lambda _: {"prompt": rows()[5]["prompt"]})}),
    Fault("calls are never carried out", ("tools-fail",), "", lambda: {**tools(), "max_tool_calling_iterations": 0}),
    Fault("a marker that is left out of texts", ("answers-not-parsed", "reward-wrong"), "", lambda: {
        "reward": last_number, "temperature": 1.0, "given": special("####")}),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(fault: Fault, tmp_path: Path) -> None:
    doctor = attached(tmp_path, fault.changes())
    x = doctor.examination
    assert x.causes[:1] and x.causes[0] in fault.accepted, [f for _, f in x.ranked()]
    assert not [f for _, f in x.found if f.verdict == "error"]
    assert of_folder(tmp_path / "plumbob_records").examination().causes == x.causes


GUIDE = Path(__file__).parents[3] / "docs/guides/trl.md"
SCRIPT = f"""
import sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def reward(completions, answer, **_):
    return [sum(c.isdigit() for c in t) / (len(t) + 1) + (a in t) for t, a in zip(completions, answer)]


if __name__ == "__main__":
    assert __file__.endswith("train.py") and sys.argv[1] == "--length"
    rows = [{{"prompt": f"What is {{i}} + 3?", "answer": str(i + 3)}} for i in range(64)]
    config = GRPOConfig("out", max_steps=3, per_device_train_batch_size=16, num_generations=4, bf16=False, use_cpu=True,
                        max_completion_length=int(sys.argv[2]), learning_rate=1e-5, report_to="none", temperature=1.0)
    GRPOTrainer({MODEL!r}, reward, config, train_dataset=Dataset.from_list(rows)).train()
"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "plumbob.doctor", *words]
    return subprocess.run(call, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.slow
@pytest.mark.long
def test_a_script_is_watched_without_a_change_and_its_remedy_is_tried(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    found = command(tmp_path, "trl", "train.py", "--length", "6")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "truncated-rollouts" in found.stdout
    assert "--confirm" in found.stdout
    tried = command(tmp_path, "out", "--confirm", "--html", "page.html")
    assert tried.returncode == 1
    assert "max_completion_length as it was, and 48: 3 seeds of 8 steps each" in tried.stdout, (
        tried.stdout + tried.stderr
    )
    assert tried.stdout.splitlines()[-1] == "truncated-rollouts: confirmed"
    assert "truncated-rollouts" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_scripts_that_do_not_train(tmp_path: Path) -> None:
    none = command(tmp_path, "trl", "none.py")
    assert (none.returncode, "there is no file none.py" in none.stderr) == (2, True)
    (tmp_path / "idle.py").write_text("print('idle')")
    idle = command(tmp_path, "trl", "idle.py")
    assert (idle.returncode, idle.stdout, "trained no GRPOTrainer" in idle.stderr) == (2, "idle\n", True)


def scripts() -> dict[str, tuple[str, str]]:
    """Each script of the guide with the bundled models -> what is said of it."""
    _, lost, twin, without = [part.partition("```")[0] for part in GUIDE.read_text().split("```python\n")[1:]]
    lost = lost.replace("Qwen/Qwen2.5-0.5B-Instruct", MODEL)
    without = without.replace("Qwen/Qwen3-0.6B", str(bundled_folder("tiny")))
    start, rest = lost.split("def reward")
    kept = [line for line in without.splitlines() if not line.startswith("tokenizer.chat_template")]
    return {
        "reward that never sees the answer": (lost, "Cause: reward-wrong"),
        "its healthy twin": (f"{start}{twin}\nrows = {rest.partition('rows = ')[2]}", "No cause found"),
        "template that drops the tools": (without, "Cause: prompt-incomplete"),
        "the twin of that": ("\n".join(kept), "No cause found"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", scripts())
def test_the_guide_s_scripts_and_their_healthy_twins(name: str, tmp_path: Path) -> None:
    script, told = scripts()[name]
    (tmp_path / "train.py").write_text(script)
    found = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told in found.stdout, found.stdout


@pytest.mark.slow
def test_the_tool_that_measures_its_cost_runs_both_arms_with_equal_weights(tmp_path: Path) -> None:
    row = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n#### 5"}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    words = ["--model", MODEL, "--data", str(tmp_path), "--out", str(tmp_path), "--float32", "--rate", "1e-5"]
    words += ["--steps", "4", "--prompts", "2", "--group", "4", "--tokens", "24"]
    command = [sys.executable, str(GUIDE.parents[2] / "tools/gpu/trl_cost.py"), *words]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    arms = [json.loads(line[4:]) for line in found.stdout.splitlines() if line.startswith("ARM ")]
    assert [arm["arm"] for arm in arms] == ["plain", "attached"]
    assert arms[0]["sha256"] == arms[1]["sha256"]
    assert [len(arm["steps"]) for arm in arms] == [4, 4]


@pytest.mark.slow
def test_weights_are_copied_where_the_exact_comparison_needs_them_and_nowhere_else(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from plumbob.doctor.trl import attach as module

    copied: list[int] = []

    class Counted(module.Snapshot):
        def __init__(self, trainer: Any) -> None:
            copied.append(trainer.state.global_step)
            super().__init__(trainer)

    monkeypatch.setattr(module, "Snapshot", Counted)
    trainer = make(tmp_path, max_steps=7, gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2,
                   per_device_train_batch_size=16, max_completion_length=12)  # fmt: skip
    plumbob.doctor.attach(trainer, every=6)
    trainer.train()
    assert copied == [0, 1, 4]  # the next completions are generated in the fifth step
    assert sorted(int(p.name[-6:-4]) for p in (tmp_path / "plumbob_records").glob("*.npz")) == [1, 2, 3, 5, 6]
