"""The `doctor` command: what it takes for a run directory, what it refuses, and what it says."""

import json

import pytest
from plumbob.hub.console import run_app
from plumbob.trainer.doctor import cli
from plumbob.trainer.doctor.findings import CAUSES, Finding
from plumbob.trainer.doctor.watch_causes import ALL_CAUSES


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


def test_a_page_needs_its_folder(refused):
    assert "there is no folder" in refused("lookup", "--html", "nowhere/page.html")


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
    monkeypatch.setattr(cli, "_probed", lambda config, everything: iter(found))
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as exit_:
        run_app("doctor", cli.app, ["lookup", "--all", "--html", str(page)])
    assert exit_.value.code == 1
    out = capsys.readouterr().out
    assert out.startswith("pass    a: 1 of 2\nFAIL    b: 3 of 4\nFAIL    c: 5 of 6\n\nCause: groups-mixed\n")
    assert CAUSES["groups-mixed"].fix in out and "may follow from it: engine-stale" in out
    assert "groups-mixed" in page.read_text()


def test_json_holds_every_finding_and_each_cause(capsys, monkeypatch):
    found = [("data", Finding("a", "pass", "1")), ("tokens", Finding("b", "fail", "2", "groups-mixed"))]
    monkeypatch.setattr(cli, "_probed", lambda config, everything: iter(found))
    with pytest.raises(SystemExit) as exit_:
        run_app("doctor", cli.app, ["lookup", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert exit_.value.code == 1 and report["cause"] == "groups-mixed"
    assert [f["verdict"] for f in report["findings"]] == ["pass", "fail"]
    assert report["findings"][1]["probe"] == "tokens"
    assert report["causes"]["groups-mixed"]["hypotheses"] == list(CAUSES["groups-mixed"].hypotheses)


def test_nothing_wrong_is_exit_code_0(capsys, monkeypatch):
    found = [("data", Finding("a", "pass", "1")), ("tokens", Finding("b", "unsure", "2"))]
    monkeypatch.setattr(cli, "_probed", lambda config, everything: iter(found))
    with pytest.raises(SystemExit) as exit_:
        run_app("doctor", cli.app, ["lookup"])
    assert exit_.value.code == 0
    assert "No cause found: 2 checks, 1 of them unsure." in capsys.readouterr().out


def test_a_finding_names_a_cause_exactly_if_it_failed():
    with pytest.raises(ValueError, match="exactly if it failed"):
        Finding("a", "fail", "1")
    with pytest.raises(ValueError, match="exactly if it failed"):
        Finding("a", "pass", "1", "groups-mixed")


def test_the_catalogue_says_why_and_what_to_do():
    assert CAUSES.items() <= ALL_CAUSES.items()
    for name, cause in ALL_CAUSES.items():
        assert name == cause.id and name == name.lower() and " " not in name
        assert cause.sentence.endswith(".") and cause.fix.endswith((".", ")"))
    covered = {hypothesis for cause in ALL_CAUSES.values() for hypothesis in cause.hypotheses}
    assert covered == {f"H0{i}" for i in range(1, 9)}
