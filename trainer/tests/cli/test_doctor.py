"""The `doctor` command: what it takes for a run directory, what it refuses, and what it says."""

import html
import json
from functools import partial

import pytest
from plumbob.doctor.causes import CAUSES
from plumbob.doctor.examine import Examination
from plumbob.doctor.findings import AREAS, STAGES, Finding
from plumbob.trainer.cli import doctor as cli
from plumbob.trainer.cli import gather


@pytest.fixture
def told(tmp_path, ended, monkeypatch):
    """Run `doctor` in an empty folder; return its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return partial(ended, "doctor", cli.app)


@pytest.fixture
def refused(told):
    """Run `doctor` in an empty folder; return its one line of complaint."""

    def run(*args: str) -> str:
        code, out, err = told(*args)
        assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("doctor: ")
        return err

    return run


def test_an_unknown_environment(refused):
    assert "did you mean 'lookup'?" in refused("lokup")


def test_train_s_options_are_checked_as_train_checks_them(refused):
    assert "--temperature must be above 0" in refused("lookup", "--temperature", "0")
    assert "--learning-rate" in refused("lookup", "--learning-rat", "1")


def test_a_path_that_is_no_run_directory(refused, tmp_path):
    assert "runs/x is not a run directory: it has no config.toml" in refused("runs/x")
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in refused(str(tmp_path / "empty"))


def test_a_run_directory_takes_no_settings(refused, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.toml").write_text("")
    assert "leave --learning-rate out" in refused("r", "--learning-rate", "1e-5")


def test_a_page_needs_its_folder(refused, tmp_path):
    assert "there is no folder" in refused("lookup", "--html", "nowhere/page.html")
    assert "is a folder; name a file in it" in refused("lookup", "--html", str(tmp_path))


def test_a_folder_named_as_an_environment_is_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lookup").mkdir()
    assert not cli._is_run_directory("lookup")
    (tmp_path / "lookup" / "config.toml").write_text("")
    assert cli._is_run_directory("lookup")


@pytest.fixture
def found(monkeypatch):
    """What the examination of an environment finds: (what was examined, finding) of each."""
    findings = []

    def examined(config, status, *, everything, model):
        x = Examination(config.env, config.model)
        for source, finding in findings:
            x.add(source, finding)
        return x

    monkeypatch.setattr(gather, "of_environment", examined)
    return findings


def test_a_failure_ends_in_one_cause_and_what_to_do(told, found, tmp_path):
    found += [
        ("environment", Finding("a", "pass", "1 of 2", stage="tasks")),
        ("records", Finding("b", "fail", "3 of 4", "advantages-wrong")),
        ("records", Finding("c", "fail", "5 of 6", "weights-not-synced")),
    ]
    page = tmp_path / "page.html"
    code, out, _ = told("lookup", "--html", str(page))
    assert code == 1 and out.startswith("ok     tasks")
    assert out.index("FAIL   advantages") < out.index("FAIL   weight sync") < out.index("\nCause: advantages-wrong\n")
    words = " ".join(out.split())
    assert CAUSES["advantages-wrong"].advice("lookup", "tiny") in words
    assert "Further failures, which may be consequences of this cause: - weights-not-synced" in words
    written = " ".join(html.unescape(page.read_text()).split())
    assert "advantages-wrong" in written and CAUSES["advantages-wrong"].sentence in written


def test_a_symptom_is_no_cause_and_comes_after_one(told, found):
    found.append(("trends", Finding("a", "fail", "1 of 2", "never-succeeds")))
    code, out, _ = told("lookup")
    assert code == 1 and "\nNo cause found, but a symptom: never-succeeds\n" in out and "\nCause:" not in out
    report = json.loads(told("lookup", "--json")[1])
    assert report["cause"] is None and report["symptoms"] == ["never-succeeds"]
    found.append(("records", Finding("b", "fail", "3 of 4", "engine-trainer-mismatch")))
    code, out, _ = told("lookup")
    assert "\nCause: engine-trainer-mismatch\n" in out and "Symptoms, which it may explain:" in out
    report = json.loads(told("lookup", "--json")[1])
    assert report["cause"] == "engine-trainer-mismatch"
    assert list(report["causes"]) == ["engine-trainer-mismatch", "never-succeeds"]


def test_json_holds_every_finding_and_each_cause(told, found):
    found += [
        ("environment", Finding("a", "pass", "1", stage="tasks")),
        ("records", Finding("b", "fail", "2", "rewards-of-other-rollouts")),
    ]
    code, out, _ = told("lookup", "--json")
    report = json.loads(out)
    assert code == 1 and report["title"] == "doctor lookup --model tiny"
    assert [(f["verdict"], f["source"], f["stage"]) for f in report["findings"]] == [
        ("pass", "environment", "tasks"),
        ("fail", "records", CAUSES["rewards-of-other-rollouts"].stage),
    ]
    assert report["causes"]["rewards-of-other-rollouts"]["sentence"] == CAUSES["rewards-of-other-rollouts"].sentence


def test_exit_codes(told, found):
    found.append(("environment", Finding("a", "pass", "1", stage="tasks")))
    code, out, _ = told("lookup")
    assert code == 0 and "No cause found: 1 check passed." in out
    found.append(("records", Finding("b", "error", "KeyError: 'x'", stage="rows")))
    code, out, _ = told("lookup")
    assert code == 2 and "No cause found, but 1 of 2 checks could not be completed." in out and "KeyError: 'x'" in out
    found.append(("records", Finding("c", "fail", "3", "weights-not-synced")))
    assert told("lookup")[0] == 1


def test_all_prints_every_check(told, found):
    found.append(("environment", Finding("tasks differ", "pass", "48 of 48", stage="tasks")))
    assert "tasks differ" not in told("lookup")[1]
    assert "  ok     tasks differ (48 of 48)\n" in told("lookup", "--all")[1]


def test_ctrl_c_ends_it_without_a_traceback(told, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(gather, "of_environment", interrupted)
    assert told("lookup", "--json") == (130, "", "  examining lookup\ndoctor: interrupted\n")


SMALL = ("--num-generations", "4", "--eval-examples", "4")


@pytest.mark.slow
def test_a_healthy_run_from_the_command_line(told, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = told("lookup", *SMALL, "--json", "--html", str(page))
    report = json.loads(out)
    assert code == 0 and report["cause"] is None
    assert {f["source"] for f in report["findings"]} == {"settings", "environment", "records", "trends"}
    assert {f["stage"] for f in report["findings"]} == set(STAGES) - {"trends"}  # these need more than three steps
    assert not [f for f in report["findings"] if f["verdict"] in ("fail", "error")]
    assert "setting up lookup and tiny" in err and "taking 3 training steps of 32 rollouts" in err
    assert "Loading" not in err and "Traceback" not in err
    assert all(area in page.read_text() for stage, area in AREAS.items() if stage != "trends")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_learning_rate_that_is_too_low_from_the_command_line(told):
    code, out, _ = told("lookup", *SMALL, "--peft", "--lr", "1e-6")
    words = " ".join(out.split())
    assert code == 1 and "\nCause: learning-rate-too-low\n" in out and "found learning rate 9.7e-07:" in words
    assert CAUSES["learning-rate-too-low"].advice("lookup", "tiny") in words
    assert out.count("FAIL") == 1


def test_without_a_model_only_settings_and_the_environment_are_examined(told, monkeypatch):
    monkeypatch.setattr(gather, "import_transformers", lambda: pytest.fail("torch was loaded"))
    code, out, _ = told("lookup", *SMALL, "--json", "--without-model")
    report = json.loads(out)
    assert code == 0 and {f["source"] for f in report["findings"]} == {"settings", "environment"}
    assert any("The model was not loaded" in limit for limit in report["limits"])


def test_what_train_would_refuse_is_refused(told):
    code, out, err = told("lookup", "--num-generations", "7")
    assert (code, out) == (2, "")
    assert "is not a multiple of --num-generations" in err.splitlines()[-1] and "Traceback" not in err
