"""The `doctor` command: what it takes for a run directory, what it refuses, and what it says."""

import json

import pytest
from plumbob.console.app import run_app
from plumbob.trainer.cli import doctor as cli
from plumbob.trainer.cli import examinations
from plumbob.trainer.diagnosis.causes import CAUSES
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.run_probes import PROBES


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Run `doctor` in an empty folder; return its one line of complaint."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> str:
        with pytest.raises(SystemExit) as exit_:
            run_app("doctor", cli.app, list(args))
        output = capsys.readouterr()
        assert exit_.value.code == 2
        assert output.out == ""
        assert output.err.count("\n") == 1 and output.err.startswith("doctor: ")
        return output.err

    return run


@pytest.fixture
def told(tmp_path, capsys, monkeypatch):
    """Run `doctor` in an empty folder; return its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            run_app("doctor", cli.app, list(args))
        output = capsys.readouterr()
        return exit_.value.code, output.out, output.err

    return run


def test_an_unknown_environment(refused):
    assert "did you mean 'lookup'?" in refused("lokup")


def test_train_s_options_are_checked_as_train_checks_them(refused):
    assert "--temperature must be above 0" in refused("lookup", "--temperature", "0")
    assert "--learning-rate" in refused("lookup", "--learning-rat", "1")
    assert "--min-hops: input should be a valid integer" in refused("lookup", "--min-hops", "three")


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


def test_a_failure_ends_in_one_cause_and_what_to_do(capsys, monkeypatch, tmp_path):
    found = [
        ("data", Finding("a", "pass", "1 of 2")),
        ("tokens", Finding("b", "fail", "3 of 4", "groups-mixed")),
        ("sync", Finding("c", "fail", "5 of 6", "engine-stale")),
    ]
    monkeypatch.setattr(cli, "of_environment", lambda config, everything, scope: (pair for pair in found))
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as exit_:
        run_app("doctor", cli.app, ["lookup", "--all", "--html", str(page)])
    assert exit_.value.code == 1
    out = capsys.readouterr().out
    assert out.startswith("pass    a: 1 of 2\nFAIL    b: 3 of 4\nFAIL    c: 5 of 6\n\nCause: groups-mixed\n")
    assert CAUSES["groups-mixed"].fix in out and "may be consequences of this one: engine-stale" in out
    assert "groups-mixed" in page.read_text()


def test_a_symptom_is_no_cause_and_comes_after_one(told, monkeypatch, tmp_path):
    symptom = ("environment", Finding("a", "fail", "1 of 2", "tools-never-used"))
    cause = ("tokens", Finding("b", "fail", "3 of 4", "prompt-replaced"))
    found = [symptom]
    monkeypatch.setattr(cli, "of_environment", lambda config, everything, scope: (pair for pair in found))
    page = tmp_path / "page.html"
    code, out, _ = told("lookup", "--html", str(page))
    assert code == 1 and "\nNo cause found, but a symptom: tools-never-used\n" in out and "\nCause:" not in out
    assert "No cause found, but a symptom: <strong>tools-never-used" in page.read_text()
    report = json.loads(told("lookup", "--json")[1])
    assert report["cause"] is None and report["symptoms"] == ["tools-never-used"]
    found = [symptom, cause]
    code, out, _ = told("lookup", "--html", str(page))
    assert "\nCause: prompt-replaced\n" in out and "Symptoms, which it may explain: tools-never-used" in out
    assert '<div class="answer fail"><p><strong>prompt-replaced' in page.read_text()
    report = json.loads(told("lookup", "--json")[1])
    assert report["cause"] == "prompt-replaced" and list(report["causes"]) == ["prompt-replaced", "tools-never-used"]


def test_a_cause_that_stands_for_others_names_them(told, monkeypatch, tmp_path):
    found = [("environment", Finding("a", "fail", "1 of 2", "reward-wrong"))]
    monkeypatch.setattr(cli, "of_environment", lambda config, everything, scope: (pair for pair in found))
    page = tmp_path / "page.html"
    code, out, _ = told("lookup", "--html", str(page))
    names = ", ".join(CAUSES["reward-wrong"].includes)
    assert code == 1 and f"\nCause: reward-wrong\n  {CAUSES['reward-wrong'].sentence}\n  One of: {names}\n" in out
    assert f"One of: {names}" in page.read_text()


def test_json_holds_every_finding_and_each_cause(capsys, monkeypatch):
    found = [("data", Finding("a", "pass", "1")), ("tokens", Finding("b", "fail", "2", "groups-mixed"))]
    monkeypatch.setattr(cli, "of_environment", lambda config, everything, scope: (pair for pair in found))
    with pytest.raises(SystemExit) as exit_:
        run_app("doctor", cli.app, ["lookup", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert exit_.value.code == 1 and report["cause"] == "groups-mixed"
    assert [f["verdict"] for f in report["findings"]] == ["pass", "fail"]
    assert report["findings"][1]["probe"] == "tokens"
    assert report["limits"][-1].startswith("Not examined") and report["findings"][1]["links"] == []
    assert report["causes"]["groups-mixed"]["hypotheses"] == list(CAUSES["groups-mixed"].hypotheses)


def test_nothing_wrong_is_exit_code_0(capsys, monkeypatch):
    found = [("data", Finding("a", "pass", "1")), ("tokens", Finding("b", "unsure", "2"))]
    monkeypatch.setattr(cli, "of_environment", lambda config, everything, scope: (pair for pair in found))
    with pytest.raises(SystemExit) as exit_:
        run_app("doctor", cli.app, ["lookup"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "No cause found in 2 checks.\n  Not certain: b (2)\n  Not examined, because nothing is trained" in out


def test_a_check_that_broke_off_is_no_pass(told, monkeypatch, tmp_path):
    found = [("data", Finding("a", "pass", "1")), ("tokens", Finding("b", "error", "KeyError: 'x'"))]
    monkeypatch.setattr(cli, "of_environment", lambda config, everything, scope: (pair for pair in found))
    page = tmp_path / "page.html"
    code, out, _ = told("lookup", "--html", str(page))
    assert code == 2
    assert "ERROR   b: KeyError: 'x'\n" in out
    assert "No cause found, but 1 of 2 checks could not be completed (ERROR)." in out
    assert "some could not be completed" in page.read_text() and "1 pass, 0 fail, 0 unsure, 1 error" in page.read_text()
    found.append(("sync", Finding("c", "fail", "3", "engine-stale")))
    assert told("lookup")[0] == 1


def test_ctrl_c_ends_it_without_a_traceback(told, monkeypatch):
    closed = []

    def probed(config, everything, scope):
        try:
            yield "data", Finding("a", "pass", "1")
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    monkeypatch.setattr(cli, "of_environment", probed)
    code, out, err = told("lookup", "--json")
    assert (code, out, closed) == (130, "", [True])
    assert err == "doctor: interrupted\n"


SMALL = ("--num-generations", "4", "--eval-examples", "4")


@pytest.mark.slow
def test_a_healthy_run_from_the_command_line(told, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = told("lookup", *SMALL, "--json", "--html", str(page))
    report = json.loads(out)
    assert code == 0 and report["cause"] is None
    assert report["title"] == "doctor lookup --model tiny"
    assert list(dict.fromkeys(f["probe"] for f in report["findings"])) == [*PROBES, "first_steps"]
    assert not [f for f in report["findings"] if f["verdict"] in ("fail", "error")]
    assert "setting up lookup and tiny" in err and "sampling 32 rollouts" in err
    assert "Loading" not in err and "Traceback" not in err
    assert page.read_text().count("<tr>") == len(report["findings"]) + 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_learning_rate_of_nothing_from_the_command_line(told):
    code, out, _ = told("lookup", *SMALL, "--peft", "--lr", "1e-9")
    assert code == 1
    *findings, _, cause, _, fix, _, more = out.splitlines()
    assert findings[-1].startswith("FAIL    ") and all(f.startswith(("pass ", "unsure ")) for f in findings[:-1])
    assert cause == "Cause: learning-rate-too-low"
    assert "Raise --learning-rate" in fix
    assert more == "The checks after this failure were not run; --all runs them too."


@pytest.mark.slow
def test_it_stops_at_the_first_cause_and_goes_on_with_all(told):
    args = ("lookup", *SMALL, "--lr", "1e-9", "--json")
    code, out, _ = told(*args)
    first = json.loads(out)
    assert code == 1 and first["cause"] == first["findings"][-1]["cause"] == "learning-rate-too-low"
    code, out, _ = told(*args, "--all")
    all_of_them = json.loads(out)
    assert code == 1 and all_of_them["cause"] == "learning-rate-too-low"
    assert len(all_of_them["findings"]) > len(first["findings"])
    assert {f["probe"] for f in all_of_them["findings"]} == {*PROBES, "first_steps"}


@pytest.mark.slow
def test_it_goes_on_after_a_symptom(told):
    code, out, _ = told("lookup", *SMALL, "--max-turns", "2", "--json")
    report = json.loads(out)
    assert code == 1 and report["cause"] is None and report["symptoms"][0] == "truncated-rollouts"
    assert {f["probe"] for f in report["findings"]} == {*PROBES, "first_steps"}


def test_without_a_model_only_the_environment_is_examined(told, monkeypatch):
    monkeypatch.setattr(examinations, "load_torch_libraries", lambda: pytest.fail("torch was loaded"))
    code, out, _ = told("lookup", *SMALL, "--json", "--without-model")
    report = json.loads(out)
    assert code == 0 and {f["probe"] for f in report["findings"]} == {"environment"}
    assert "because nothing is trained" in report["limits"][-1]


def test_what_train_would_refuse_is_refused(told):
    code, out, err = told("lookup", "--num-generations", "7")
    assert (code, out) == (2, "")
    assert "is not a multiple of --num-generations" in err.splitlines()[-1] and "Traceback" not in err


def test_a_finding_names_a_cause_exactly_if_it_failed():
    with pytest.raises(ValueError, match="if and only if it failed"):
        Finding("a", "fail", "1")
    with pytest.raises(ValueError, match="if and only if it failed"):
        Finding("a", "pass", "1", "groups-mixed")


def test_the_catalogue_says_why_and_what_to_do():
    assert CAUSES.items() <= CAUSES.items()
    for name, cause in CAUSES.items():
        assert name == cause.id and name == name.lower() and " " not in name
        assert cause.sentence.endswith(".") and cause.fix.endswith((".", ")"))
    covered = {hypothesis for cause in CAUSES.values() for hypothesis in cause.hypotheses}
    assert covered == {f"H0{i}" for i in range(1, 9)}
