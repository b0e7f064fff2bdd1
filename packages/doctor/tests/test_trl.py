"""`attach` on real GRPOTrainers of TRL with a bundled model, on the CPU: it sees a run, changes nothing, and alarms rightly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plumbob.trainer.config.bundled_models import bundled_folder

trl = pytest.importorskip("trl")

import plumbob.doctor  # noqa: E402
from datasets import Dataset  # noqa: E402
from plumbob.doctor.record import read  # noqa: E402

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
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"What is {i} + {i + 3}?"}], "answer": str(2 * i + 3)}
            for i in range(count)
        ]
    )


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

    return {
        "peft_config": LoraConfig(
            **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.0, **changes}
        )
    }


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
    "LoRA and beta": lambda: {"given": lora(), "beta": 0.05, "learning_rate": 1e-3},
    "LoRA with a little dropout": lambda: {"given": lora(lora_dropout=0.05), "learning_rate": 1e-3},
    "bfloat16, checkpointing, decay, warm-up": lambda: {
        "bf16": True, "gradient_checkpointing": True, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2,
    },
    "two rewards, some None": lambda: {
        "reward": [rewards, some],
        "reward_weights": [1.0, 0.5],
    },
    "plain texts": lambda: {"data": Dataset.from_list([{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(32)])},
    "tools": tools,
}  # fmt: skip
"""Settings of runs without a fault."""


def attached(folder: Path, setting: dict[str, Any]) -> Any:
    trainer = make(folder, **setting)
    doctor = plumbob.doctor.attach(trainer, rescore=True)
    trainer.train()
    return doctor


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


def test_what_is_not_supported_is_said_and_not_recorded(tmp_path: Path) -> None:
    doctor = attached(
        tmp_path, {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "max_steps": 1, "num_iterations": 3}
    )
    assert "steps_per_generation" in doctor.examination.limits[0]
    assert not list((tmp_path / "plumbob_records").glob("*.npz"))
    with pytest.raises(TypeError, match="GRPOTrainer"):
        plumbob.doctor.attach(torch.nn.Linear(1, 1))
