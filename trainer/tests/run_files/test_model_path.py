"""Which folder a run directory stands for as a model."""

import json
import shutil
from pathlib import Path

import pytest
from plumbob.console import UserError
from plumbob.trainer.run_files.model_path import check_model_exists, model_path


def _model(folder: Path) -> Path:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    return folder


def _run_of_two_checkpoints(directory: Path) -> Path:
    for step in (2, 4):
        (_model(directory / "checkpoints" / f"step_{step}") / "state.json").write_text("{}")
    return directory


def test_a_run_that_has_not_ended_is_its_last_checkpoint(tmp_path: Path) -> None:
    run = _run_of_two_checkpoints(tmp_path / "r")
    assert model_path(str(run)) == str(run / "checkpoints/step_4/model")


def test_a_run_that_has_ended_is_its_final_model_whether_or_not_its_checkpoints_are_kept(tmp_path: Path) -> None:
    run = _model(_run_of_two_checkpoints(tmp_path / "r"))
    (run / "summary.json").write_text(json.dumps({"model_step": 4}))
    assert model_path(str(run)) == str(run / "model")
    shutil.rmtree(run / "checkpoints")
    assert model_path(str(run)) == str(run / "model")
    check_model_exists(str(run))


def test_a_run_without_checkpoints_that_has_not_ended_has_no_model(tmp_path: Path) -> None:
    run = _model(tmp_path / "r")  # its final model may be half written
    with pytest.raises(UserError, match="there is no model in"):
        check_model_exists(str(run))


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_weights_that_a_download_has_cut_off_are_refused_by_name(tmp_path: Path, kept: int) -> None:
    shutil.copytree(model_path("tiny"), tmp_path / "m")
    check_model_exists(str(tmp_path / "m"))
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors is cut off.*download it again"):
        check_model_exists(str(tmp_path / "m"))
