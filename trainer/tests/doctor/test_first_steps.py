"""The first training steps of a run, taken by `doctor ENV`, and the probes of a run's model, run by `doctor RUN_DIR`."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plumbob.console import INTERRUPTED
from plumbob.console.app import run_app
from plumbob.testing.faults.doubles import after_each_set_up, put
from plumbob.trainer.cli import doctor as cli
from plumbob.trainer.cli import examinations
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.doctor import first_steps as module
from plumbob.trainer.doctor import run_probes, subject
from plumbob.trainer.doctor.first_steps import CHECK, GROUPS, STEPS, first_steps, trial_config
from plumbob.trainer.run_files.run_directory import is_in_use, lock_directory
from plumbob.trainer.training import forward_backward, train
from plumbob.trainer.training import step as training_step
from plumbob.trainer.watch.watch import read_metrics

SETTINGS: dict[str, Any] = {
    "env": "lookup",
    "model": "tiny",
    "batch_size": 16,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "eval_examples": 4,
    "threads": 1,
}


def settings(**given: Any) -> TrainConfig:
    return TrainConfig(**{**SETTINGS, **given})


@pytest.fixture
def told(tmp_path, capsys, monkeypatch):
    """Run `doctor` in an empty folder; return its exit code, its report and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run_app("doctor", cli.app, [*args, "--json"])
        output = capsys.readouterr()
        return exit_.value.code, json.loads(output.out), output.err

    return run


def test_a_trial_takes_its_steps_and_saves_no_model(tmp_path):
    config = replace(trial_config(settings(eval_examples=6), tmp_path), eval_steps=2)
    assert train.run(config, trial_steps=3) == 0
    folder = tmp_path / "first-steps"
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3]
    # The schedule is that of the whole run, of which these are the first steps.
    rates = [row["optimizer/learning_rate"] for row in read_metrics(folder)]
    assert rates[0] > rates[1] > rates[2] > 0.8 * rates[0]
    assert not any(name.startswith("eval/") for row in read_metrics(folder) for name in row)
    written = {path.name for path in folder.iterdir()}
    assert not written & {"model", "checkpoints", "report.html", "summary.json"}


def test_a_run_of_fewer_steps_ends_at_its_end(tmp_path):
    assert train.run(trial_config(settings(max_steps=2, eval_examples=0), tmp_path), trial_steps=STEPS) == 0
    assert len(read_metrics(tmp_path / "first-steps")) == 2


def test_a_trial_is_smaller_than_the_run_and_otherwise_the_same(tmp_path):
    large = settings(batch_size=32, gradient_accumulation_steps=4, eval_examples=100, report_to="trackio")
    small = trial_config(large, tmp_path)
    assert small.rollouts_per_step(1) == GROUPS * 4
    assert (small.report_to, small.push_to_hub, small.report) == ("none", False, False)
    changed = {"batch_size", "gradient_accumulation_steps", "report_to", "report", "output_dir", "run_name"}
    assert {name for name, value in vars(small).items() if value != vars(large)[name]} == changed
    one = settings(batch_size=4)
    assert trial_config(one, tmp_path).rollouts_per_step(1) == 4
    many = trial_config(settings(batch_size=64, num_minibatches=8), tmp_path)
    assert many.rollouts_per_step(1) == 32, "each minibatch needs a group"


def test_a_healthy_run_has_nothing_wrong_in_its_first_steps(tmp_path):
    (finding,) = first_steps(settings(), tmp_path)
    assert finding.verdict == "pass" and finding.evidence.startswith(f"{STEPS} steps")


def test_what_goes_wrong_in_later_steps_alone_is_named(tmp_path, monkeypatch):
    """Advantages are those of the settings in the first step, and all of one sign from the second on."""
    right = training_step.step_advantages

    def later(samples, *args, **kwargs):
        found = right(samples, *args, **kwargs)
        later.calls += 1
        return found if later.calls < 3 else replace(found, values=[abs(v) for v in found.values])

    later.calls = 0
    monkeypatch.setattr(training_step, "step_advantages", later)
    first, *_ = first_steps(settings(), tmp_path)
    assert first.cause == "advantages-wrong" and first.step is not None and first.step > 1
    assert first.places == () and first.command == "", "the folder of these steps is deleted"


def test_how_often_the_model_succeeds_is_not_judged_by_so_few_steps(tmp_path):
    solved, hopeless, pairs = {"env_args": ("max_hops=1",)}, {"max_turns": 2}, {"num_generations": 2}
    for number, given in enumerate((solved, hopeless, pairs)):
        assert [f.cause for f in first_steps(settings(**given), tmp_path / str(number))] == [None]


def test_a_run_that_fails_says_why_without_its_folder(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the kernel is missing")

    monkeypatch.setattr(forward_backward, "policy_loss", broken)
    (finding,) = first_steps(settings(), tmp_path)
    assert finding.verdict == "error" and "the kernel is missing" in finding.evidence
    assert str(tmp_path) not in finding.evidence


def test_a_run_that_cannot_be_set_up_is_an_error_and_no_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(module.train, "set_up", lambda *args: (_ for _ in ()).throw(RuntimeError("no kernel image")))
    (finding,) = first_steps(settings(), tmp_path)
    assert (finding.check, finding.verdict) == (CHECK, "error") and "no kernel image" in finding.evidence


def test_settings_with_which_no_run_starts_are_an_error(tmp_path):
    (finding,) = first_steps(settings(model=str(tmp_path / "nowhere")), tmp_path)
    assert (finding.check, finding.verdict) == (CHECK, "error")


def test_ctrl_c_ends_the_examination(tmp_path, monkeypatch):
    monkeypatch.setattr(module.train, "run", lambda *args, **kwargs: INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        list(first_steps(settings(), tmp_path))


def test_a_fault_is_in_each_run_once():
    """A double that replaces a function is undone before the next run gets it."""
    owner = type("Owner", (), {"value": 1})
    doubled = lambda stack, run: put(stack, owner, "value", 2 * owner.value)  # noqa: E731
    module_ = type("Module", (), {"set_up": staticmethod(lambda: "run")})
    with ExitStack() as stack:
        after_each_set_up(stack, (module_,), doubled)
        assert (module_.set_up(), module_.set_up(), owner.value) == ("run", "run", 2)
    assert owner.value == 1


def finished(folder: Path, **given: Any) -> Path:
    config = settings(**{"max_steps": 6, "output_dir": str(folder), "run_name": "r", "eval_examples": 0, **given})
    assert train.run(config) == 0
    return folder / "r"


@pytest.mark.slow
def test_a_run_whose_records_show_nothing_has_its_model_examined(told, tmp_path, monkeypatch):
    folder = finished(tmp_path, num_generations=8, batch_size=32)
    code, report, err = told(str(folder))
    assert code == 0 and {"watch", "tokens", "movement"} <= {f["probe"] for f in report["findings"]}
    assert "setting up lookup and tiny" in err and not any(
        "the model is not loaded" in text for text in report["limits"]
    )
    monkeypatch.setattr(run_probes, "PROBES", {"data": lambda subject: iter([wrong])})
    wrong = module.Finding("a", "fail", "b", "groups-mixed")
    code, report, err = told(str(folder))
    assert code == 1 and report["cause"] == "groups-mixed"


@pytest.mark.slow
def test_a_run_in_progress_and_a_cause_in_the_records_leave_the_model_alone(told, tmp_path, monkeypatch):
    monkeypatch.setattr(examinations, "_with_model", lambda *args: pytest.fail("the model was loaded"))
    folder = finished(tmp_path)
    with lock_directory(folder):
        assert is_in_use(folder)
        code, report, err = told(str(folder))
    assert not is_in_use(folder) and not is_in_use(tmp_path)
    assert code == 0 and "the run is in progress" in err and "the model is not loaded" in report["limits"][-1]
    code, report, err = told(str(folder), "--without-model")
    assert code == 0 and "in progress" not in err
    rows = [{**row, "rollout/failed_share": 1.0, "optimizer/grad_norm": 0.0} for row in read_metrics(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, report, err = told(str(folder))
    assert code == 1 and report["cause"] == "no-gradient" and "in progress" not in err


@pytest.mark.slow
def test_a_model_that_is_gone_is_told_in_one_line(told, tmp_path, monkeypatch):
    folder = finished(tmp_path)

    def gone(*args, **kwargs):
        raise OSError("no file named model.safetensors\nin this folder")

    monkeypatch.setattr(subject, "load_subject", gone)
    code, report, err = told(str(folder))
    assert code == 0 and "the run's model was not examined: no file named model.safetensors\n" in err
    assert "the model is not loaded" in report["limits"][-1]
