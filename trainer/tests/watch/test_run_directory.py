"""`doctor RUN_DIR`: real runs with and without a fault, on the command line, and directories that something happened to."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
import verifiers.v1 as vf
from plumbob.console.app import run_app
from plumbob.testing.page_reader import Page
from plumbob.trainer.cli import doctor as cli
from plumbob.trainer.cli.train import app as train_app
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes import CAUSES
from plumbob.trainer.diagnosis.findings import Place
from plumbob.trainer.training import step
from plumbob.trainer.training import train as loop
from plumbob.trainer.watch.watch import WARNINGS, read_lines, read_metrics, saved_model
from vf_lookup import taskset

EIGHT = [{"step": step} for step in range(1, 9)]
"""Metrics of a run of eight steps, without any metric."""
FAULTS = {
    "gradient-clipped-to-nothing": {"max_grad_norm": 1e-9},
    "learning-rate-too-low": {"learning_rate": 1e-9},
    "truncated-context": {"max_context": 190},
}

pytestmark = pytest.mark.slow


def train(folder: Path, name: str, **settings) -> Path:
    sizes = {"batch_size": 32, "gradient_accumulation_steps": 1, "num_generations": 4, "max_steps": 6, "threads": 1}
    config = TrainConfig(
        output_dir=str(folder),
        run_name=name,
        save_steps=1,
        save_total_limit=9,
        **{"eval_examples": 0, **sizes, **settings},
    )
    assert loop.run(config) == 0
    return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Cause -> run directory; "healthy" is evaluated as well."""
    folder = tmp_path_factory.mktemp("runs")
    found = {cause: train(folder, cause, **settings) for cause, settings in FAULTS.items()}
    return {**found, "healthy": train(folder, "healthy", eval_examples=8, eval_steps=3)}


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]):
    def run(*args: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run_app("doctor", cli.app, [*(str(arg) for arg in args), "--without-model"])
        output = capsys.readouterr()
        return int(exit_.value.code or 0), output.out, output.err

    return run


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path):
    def copy(name: str) -> Path:
        return Path(
            shutil.copytree(runs[name], tmp_path / "copy", ignore=shutil.ignore_patterns("model", "trainer.pt"))
        )

    return copy


@pytest.mark.parametrize("cause", FAULTS)
def test_a_run_with_a_fault(cause: str, runs: dict[str, Path], doctor, tmp_path: Path) -> None:
    code, text, _ = doctor(runs[cause])
    assert code == 1
    assert (
        f"\nCause: {cause}\n" in text and CAUSES[cause].advice("lookup", "tiny") in text and text.count("\nFAIL ") == 1
    )
    page = tmp_path / "a & b.html"
    code, said, errors = doctor(runs[cause], "--json", "--html", page)
    report = json.loads(said)
    assert code == 1 and errors == ""
    assert report["cause"] == cause and list(report["causes"]) == [cause]
    # Text, JSON and page say the same, each check on its own.
    read = Page(page.read_text())
    linked = [page.parent / unquote(value.partition("#")[0]) for name, value in read.attributes if name == "href"]
    assert {path.resolve() for path in linked} <= {(runs[cause] / "report.html").resolve()}
    assert bool(linked) == any(f["places"] for f in report["findings"] if f["verdict"] != "pass")
    assert read.open == [] and not {"script", "img", "link"} & read.tags
    assert read.text.index(cause) < read.text.index(report["findings"][0]["check"])
    assert len(read.cells) == 1 + len(report["findings"])
    for finding, cells in zip(report["findings"], read.cells[1:], strict=True):
        assert finding["evidence"] in text and cells[0] == finding["verdict"]
        assert cells[1].startswith(finding["check"]) and cells[2].startswith(finding["evidence"])
    # What was said during the run is what is found after it.
    (kept,) = read_lines(runs[cause] / WARNINGS)
    (failed,) = [f for f in report["findings"] if f["cause"]]
    # Only afterwards are stored rollouts at hand, and the run's own folder for a command.
    assert failed.pop("links") == [f"{runs[cause]}/report.html#{Place(**place).fragment}" for place in failed["places"]]
    assert {**kept, "probe": "watch"} == {**failed, "places": [], "command": ""} and failed["command"]


def test_of_a_run_that_never_succeeds_the_environment_is_asked_first(doctor, tmp_path, monkeypatch) -> None:
    """A grader that counts nothing as right looks in metrics like a task that the model cannot do."""

    async def wrong(self, trace):
        return 0.0

    monkeypatch.setattr(taskset.LookupTask, "correct", vf.reward(weight=1.0)(wrong))
    code, text, _ = doctor(train(tmp_path, "r"))
    assert code == 1 and "\nCause: oracle-fails\n" in text and "never-succeeds" in text


def test_of_a_run_that_shows_no_cause_the_environment_is_examined(runs, doctor, monkeypatch) -> None:
    """A reward that cheap transcripts earn too gives a run without any sign: the reward rises."""

    async def generous(self, trace):
        return 1.0 if trace.num_turns >= 1 else 0.0

    monkeypatch.setattr(taskset.LookupTask, "correct", vf.reward(weight=1.0)(generous))
    code, text, _ = doctor(runs["healthy"])
    assert code == 1 and "\nCause: reward-" in text


def test_a_healthy_run(runs: dict[str, Path], doctor) -> None:
    code, text, _ = doctor(runs["healthy"])
    assert code == 0 and "No cause found" in text and "FAIL" not in text
    assert "training and held-out rewards agree before training" in text and "the held-out reward follows" in text
    code, said, _ = doctor(runs["healthy"], "--json")
    assert code == 0 and json.loads(said)["cause"] is None
    assert not (runs["healthy"] / WARNINGS).exists()


def test_a_run_that_is_not_over(runs: dict[str, Path], doctor, copied) -> None:
    """Killed, or still at it: no summary, half a line at the end, and a checkpoint."""
    folder = copied("healthy")
    (folder / "summary.json").unlink()
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics[:-40])
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4, 5]
    code, text, _ = doctor(folder)
    assert (
        code == 0 and "training and held-out rewards agree before training" in text
    )  # the checkpoint knows what came before it
    (folder / "metrics.jsonl").write_text("".join(metrics.splitlines(keepends=True)[:2]))
    code, text, _ = doctor(folder)
    assert code == 0 and "2 of the 5 steps that most rules need" in text


def test_a_run_without_traces_or_with_half_of_one(runs: dict[str, Path], doctor, copied) -> None:
    folder = copied("truncated-context")
    last = folder / "traces" / "step_6.jsonl.gz"
    last.write_bytes(last.read_bytes()[:-100])
    code, text, _ = doctor(folder)
    assert (
        code == 1 and "unsure  the traces can be read: step_6.jsonl.gz" in text and "each group holds one task" in text
    )
    shutil.rmtree(folder / "traces")
    code, text, _ = doctor(folder)
    assert code == 1 and "Cause: truncated-context" in text and "each group holds one task" not in text


def test_a_resumed_run_has_the_warnings_of_an_uninterrupted_one(runs: dict[str, Path], doctor, tmp_path: Path) -> None:
    """Killed in step 7, or so it seems; the last checkpoint is that of step 3."""
    cause = "gradient-clipped-to-nothing"
    whole, folder = runs[cause], Path(shutil.copytree(runs[cause], tmp_path / "r"))
    for late in (4, 5, 6):
        shutil.rmtree(folder / "checkpoints" / f"step_{late}")
    shutil.rmtree(folder / "model")
    (folder / "summary.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "rewa')
    code, text, _ = doctor(folder)
    assert code == 1 and f"Cause: {cause}" in text
    with pytest.raises(SystemExit) as exit_:
        run_app("train", train_app, ["--resume", str(folder)])
    assert not exit_.value.code
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]
    (kept,), (wanted,) = read_lines(folder / WARNINGS), read_lines(whole / WARNINGS)
    assert (kept["cause"], kept["step"]) == (wanted["cause"], wanted["step"])
    measured = [[row.get("policy/step_kl") is not None for row in read_metrics(run)] for run in (folder, whole)]
    assert measured[0] == measured[1] == [True] * 5 + [False]
    code, text, _ = doctor(folder)
    assert code == 1 and f"Cause: {cause}" in text


def test_few_tokens_pass_the_model_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the watch costs is one row's forward pass: in each of the first five steps, then in every other one."""
    again: list[int] = []
    measured = step.step_kl

    def counted(policy, rows, *args):
        again.append(sum(len(row.token_ids) for row in rows))
        return measured(policy, rows, *args)

    monkeypatch.setattr(step, "step_kl", counted)
    folder = train(tmp_path, "r", batch_size=32, num_generations=8, max_steps=9, env_args=("max_hops=2",))
    tokens = [row["rollout/row_tokens"] * row["rollout/count"] for row in read_metrics(folder)]
    assert [n > 0 for n in again] == [True] * 5 + [False, True, False, True]
    assert all(n <= 2 / 32 * whole for n, whole in zip(again, tokens, strict=True))
    assert sum(again[5:]) <= 2 / 64 * sum(tokens[5:])


def test_what_is_no_run_directory(doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").write_text(dataclasses.replace(TrainConfig()).to_toml())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.toml").write_text("model = ")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.toml").write_text("envs = ['lookup']\n")
    for target, reason in {
        "empty": "empty is neither an environment nor a run directory: it has no config.toml",
        tmp_path / "empty": "is not a run directory: it has no config.toml",
        "nowhere/x": "nowhere/x is not a run directory",
        "begun": "begun has no finished training step yet, so there is nothing to examine",
        "broken": "broken/config.toml is not valid TOML",
        "other": "other/config.toml has an unknown key 'envs'",
    }.items():
        code, said, errors = doctor(target)
        assert (code, said) == (2, "") and errors.startswith("doctor: ") and errors.count("\n") == 1
        assert reason in errors, errors


@pytest.mark.parametrize(
    ("summary", "verdict", "cause"),
    [
        ({"model_step": 3, "saved_gap": 1e-7}, "pass", None),
        ({"model_step": 3, "saved_gap": 0.02}, "fail", "saved-model-differs"),
        # Rounding errors of a model that float32 is coarse for.
        ({"model_step": 3, "saved_gap": 2.7e-5, "saved_limit": 5e-4}, "pass", None),
        ({"model_step": 3, "saved_gap": 2.7e-5}, "fail", "saved-model-differs"),
        ({"model_step": 3, "saved_gap": 6e-4, "saved_limit": 5e-4}, "fail", "saved-model-differs"),
        ({"model_step": 3, "saved_gap": math.nan}, "fail", "saved-model-differs"),
        ({"model_step": 3}, "unsure", None),
        ({"model_step": 3, "saved_not_compared": "it is divided"}, "unsure", None),
    ],
)
def test_a_saved_model_is_judged_by_what_the_runs_end_measured(tmp_path, summary, verdict, cause):
    assert saved_model(tmp_path, TrainConfig(), EIGHT) == []  # it has not ended
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (found,) = saved_model(tmp_path, TrainConfig(), EIGHT)
    assert (found.verdict, found.cause) == (verdict, cause)


@pytest.mark.parametrize(
    ("metric", "kept", "cause"),
    [
        ("policy/entropy", 1, "saved-model-differs"),
        ("policy/entropy", 8, None),  # it is the last one all the same
        ("reward/mean", 1, None),
        ("env/correct", 1, None),  # what it means is the environment's own matter
    ],
)
def test_a_checkpoint_chosen_by_no_reward_is_not_the_trained_model(tmp_path, metric, kept, cause):
    (tmp_path / "summary.json").write_text(json.dumps({"model_step": kept, "saved_gap": 0.0}))
    (found,) = saved_model(tmp_path, TrainConfig(keep_best=metric), EIGHT)
    assert found.cause == cause, found
