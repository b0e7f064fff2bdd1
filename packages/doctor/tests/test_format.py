"""Records of a trainer of one's own: what a file must hold, a sentence for each mistake, and an example loop that writes them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plumbob.doctor import record as records
from plumbob.doctor.__main__ import main, takes
from plumbob.doctor.format import read_all
from plumbob.trainer.config.bundled_models import bundled_folder

Made = Callable[..., Any]
MODEL = str(bundled_folder("tiny-gsm8k"))
LOOP = Path(__file__).parents[3] / "docs/examples/own_loop.py"


def as_json(record: records.StepRecord) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(record), default=lambda array: array.tolist()))


def test_a_line_of_json_is_the_same_record(made_record: Made, tmp_path: Path) -> None:
    records.write(made_record(), tmp_path / "step_00001.npz")
    (tmp_path / "all.jsonl").write_text(json.dumps(as_json(made_record())) + "\n")
    ((_, packed),) = read_all(tmp_path)
    ((where, listed),) = read_all(tmp_path / "all.jsonl")
    assert where == "all.jsonl, line 1"
    assert isinstance(packed, records.StepRecord) and isinstance(listed, records.StepRecord)
    assert as_json(packed) == as_json(listed) == as_json(made_record())
    assert listed.rows[0].token_ids.dtype == np.int32 and listed.rows[0].loss_mask.dtype == bool


MISTAKES: tuple[tuple[Callable[[dict[str, Any]], object], str], ...] = (
    (lambda x: x["settings"].update(modle="x"), "settings.modle: Unexpected keyword argument"),
    (lambda x: x["rows"][2].pop("reward"), "rows[2].reward: Field required"),
    (lambda x: x["settings"].update(scale="grup"), "settings.scale: Input should be 'none', 'group', 'batch' or 'batch_rewards'"),
    (lambda x: x["rows"][1]["token_ids"].append(0.5), "rows[1].token_ids: holds numbers that are not of type int32"),
    (lambda x: x["rows"][1]["loss_mask"].pop(), "rows[1].loss_mask: has 18 entries, and token_ids 19"),
    (lambda x: x["rows"][0]["logprobs"].append(0.0), "rows[0].logprobs: has 7 entries, and loss_mask true for 6"),
    (lambda x: x["updates"][0]["trained"][0].update(row=99), "updates[0].trained[0].row: is 99, and there are 12 rows"),
    (lambda x: x["updates"][0]["tensors"][1]["before"].pop(), "updates[0].tensors[1].before: has 19 entries, and indices 20"),
    (lambda x: x["rollouts"][1].update(name="0.0"), "rollouts: 2 have the name '0.0'"),
    (lambda x: x["rows"][0].update(token_ids=[[1], [2, 3]]), "rows[0].token_ids: its lists have different lengths"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "said"), MISTAKES)
def test_a_mistake_is_one_sentence_with_line_and_field(
    change: Callable[[dict[str, Any]], object],
    said: str,
    made_record: Made,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, wrong = as_json(made_record()), as_json(made_record())
    change(wrong)
    file = tmp_path / "steps.jsonl"
    file.write_text(f"{json.dumps(right)}\n{json.dumps(wrong)}\n")
    assert main(["validate", str(file)]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == f"steps.jsonl, line 2: {said}"
    assert out.startswith("steps.jsonl, line 1: step 1, 12 rows")
    assert main([str(file)]) == 2
    assert said in capsys.readouterr().err
    file.write_text("[" * 100_000)
    assert main(["validate", str(file)]) == 2 and "line 1: it cannot be read: " in capsys.readouterr().err


def test_files_that_are_no_records_are_an_error_of_their_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(tmp_path)]) == 2
    assert "has no records" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text("{no")
    assert main(["validate", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("a.jsonl, line 1: it cannot be read: ")
    (tmp_path / "step_00001.npz").write_bytes(b"nothing")
    assert main(["validate", str(tmp_path)]) == 2
    assert "is no record of a training step" in capsys.readouterr().err


def test_what_the_trainer_s_command_leaves_to_records(made_record: Made, tmp_path: Path) -> None:
    assert takes(["validate", "x"]) and takes(["trl", "train.py"]) and not takes([]) and not takes(["lookup"])
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text("{}")
    assert not takes([str(tmp_path / "gsm8k")]) and takes([str(tmp_path / "gsm8k" / "train.jsonl")])
    records.write(made_record(), tmp_path / "step_00001.npz")
    assert takes([str(tmp_path)])
    (tmp_path / "config.toml").write_text("")
    assert not takes([str(tmp_path)])


def run_loop(script: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-c", script, MODEL, str(folder)], check=True)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    run_loop(LOOP.read_text(), folder)
    return folder


@pytest.mark.slow
def test_the_example_loop_writes_records_without_a_fault(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(healthy)]) == 0
    assert "step_00002.npz: step 2, 16 rows" in capsys.readouterr().out
    assert main([str(healthy)]) == 0, capsys.readouterr().out


FAULTS = {
    "rewards[m] - sum(rewards) / GROUP": ("rewards[m]", "advantages-wrong"),
    "(weights * ratio * row.advantage)": ("(ratio * row.advantage / len(own))", "loss-differs-from-settings"),
    "add_generation_prompt=True": ("add_generation_prompt=False", "prompt-incomplete"),
    "logits.log_softmax(-1)": ("(logits / 1.5).log_softmax(-1)", "engine-trainer-mismatch"),
    "torch.arange(len(ids)) >= len(prompt)": ("torch.arange(len(ids)) >= len(prompt) - 1", "loss-mask-wrong"),
    "optimizer.step()": ("optimizer.step(); optimizer.step()", "schedule-hides-rate"),
}
"""A line of the example loop -> (what it is replaced with, the cause)."""


@pytest.mark.slow
@pytest.mark.parametrize("line", FAULTS)
def test_a_fault_in_the_example_loop_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, (instead, cause) = LOOP.read_text(), FAULTS[line]
    assert script.count(line) == 1
    changed = script.replace(line, instead)
    if cause == "loss-mask-wrong":  # the row's other numbers follow the mask
        changed = changed.replace("sampling_logprobs=sampled", "sampling_logprobs=None")
    run_loop(changed, tmp_path)
    assert main([str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cause"] == cause
