"""The hypotheses that come with `lab` fit the trainer, which `lab` itself does not import."""

from pathlib import Path

import pytest
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import Finding
from plumbob.lab.criteria.grammar import quantities
from plumbob.lab.files.layout import lay_out
from plumbob.lab.files.workspace import Lab
from plumbob.lab.runs.plan import OTHER_NAMES, flags_of, options
from plumbob.trainer.config.options import spellings
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.run_files.metric_names import describe

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def shipped(tmp_path) -> list:
    lay_out(tmp_path / "lab", "lookup", "tiny", "--max-steps 50")
    return [entry.hypothesis for entry in Lab(tmp_path / "lab").entries]


def test_they_name_options_causes_and_metrics_that_exist(shipped):
    known = spellings(TrainConfig)
    for h in shipped:
        assert set(h.causes) <= CAUSES.keys(), h.id
        written = {name for arm in h.arms.values() for name in flags_of(options(h, arm))}
        assert written <= set(known), h.id
        assert set(h.changes) - {"command"} <= set(TrainConfig.__dataclass_fields__), h.id
        for criterion in [c for criteria in h.criteria() for c in criteria]:
            for quantity in [*quantities(criterion.left), *quantities(criterion.right)]:
                assert quantity.function == "range" or describe(quantity.metric), criterion.text


def test_other_names_of_options_are_those_of_the_trainer():
    known = spellings(TrainConfig)
    assert {name: known[name] for name in OTHER_NAMES} == OTHER_NAMES


def test_the_command_of_an_arm_exists_in_this_repository(shipped):
    scripts = [arm.command.split()[1] for h in shipped for arm in h.arms.values() if arm.command]
    assert scripts and all((ROOT / script).is_file() for script in scripts)


def test_the_report_of_doctor_has_the_keys_that_lab_probe_reads():
    x = Examination()
    x.add("records", Finding("c", "fail", "e", cause="tiny-std-scaling"))
    report = x.as_json("doctor lookup")
    assert {"check", "verdict", "evidence", "cause"} <= set(report["findings"][0])


def test_the_lab_that_is_documented_is_readable_and_its_eight_hypotheses_are_decided():
    entries = Lab(ROOT / "docs/results/lab").entries
    assert [note for entry in entries for note in entry.notes] == []
    decided = {e.hypothesis.id: e.status for e in entries if e.status in ("validated", "invalidated", "partial")}
    assert decided.keys() >= {f"H{i:02d}" for i in range(1, 9)}
    assert [e.path.name for e in entries if e.hypothesis.id in decided and "(What " in e.path.read_text()] == []
