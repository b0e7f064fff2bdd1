"""Evaluations of the bundled policy: complete, resumable, and scored as training scores."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plumbob.console import UserError
from plumbob.rollout import EngineError, ScriptedChat
from plumbob.testing.quick_runs import quick_config
from plumbob.trainer.cli import evaluate as cli
from plumbob.trainer.config.evaluate import EvaluateConfig
from plumbob.trainer.evaluation.benchmark import _folder
from plumbob.trainer.evaluation.results import read_records, rows_of
from plumbob.trainer.evaluation.run import run
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.run_directory import lock_directory
from plumbob.trainer.training.train import run as train
from transformers import PreTrainedModel

LOOKUP = EvaluateConfig(envs=("lookup",), num_examples=12, max_tokens=48, run_name="e")


def scores(directory: Path, env: str = "lookup") -> list[tuple]:
    """What must not depend on when and in which order the rollouts ran."""
    return [(r.key, r.rollout, r.ok, r.reward, r.scores) for r in rows_of(read_records(directory / f"{env}.jsonl"))]


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def go(config=LOOKUP, resume=None, **changes) -> Path:
        config = replace(config, output_dir=str(tmp_path), **changes)
        assert run(config, resume) == 0
        return resume or tmp_path / config.run_name

    return go


@pytest.mark.slow
def test_an_evaluation_leaves_everything_behind(evaluate, capsys):
    directory = evaluate(rollouts_per_example=2)
    rows = scores(directory)
    assert len(rows) == 24 and [r[1] for r in rows] == [0, 1] * 12
    assert [r[0] for r in rows[::2]] == [f"lookup-eval-0-{i}" for i in range(12)]
    summary = json.loads((directory / "summary.json").read_text())[0]
    assert summary["num_tasks"] == 12 and summary["num_rollouts"] == 24 and summary["num_failed"] == 0
    assert summary["scores"]["reward"]["mean"] == pytest.approx(sum(r[3] for r in rows) / 24)
    assert set(summary["pass_at"]) == {"1", "2"}
    assert sum(group["reward"]["n"] for group in summary["hops"].values()) == 12
    output = capsys.readouterr()
    assert "12 tasks x 2" in output.out and "pass@2" in output.out and "2 hops" in output.out
    assert str(directory) in output.out


@pytest.mark.slow
def test_the_same_settings_draw_the_same_rollouts(evaluate):
    assert scores(evaluate()) == scores(evaluate(run_name="again", max_concurrent=3))
    assert scores(evaluate(run_name="s1", temperature=1.0, seed=1)) != scores(evaluate(run_name="s2", temperature=1.0))


@pytest.mark.slow
def test_an_interrupted_evaluation_goes_on_where_it_was(evaluate):
    whole = scores(evaluate())
    directory = evaluate(run_name="cut")
    file = directory / "lookup.jsonl"
    lines = file.read_text().splitlines()
    failed = {**json.loads(lines[5]), "ok": False}
    file.write_text("\n".join([*lines[:5], json.dumps(failed), lines[6][:100]]))  # killed while it wrote
    assert scores(evaluate(resume=directory)) == whole
    kept = [json.loads(line)["id"] for line in file.read_text().splitlines()]
    assert kept[:5] == [json.loads(line)["id"] for line in lines[:5]]  # not rolled out again


def test_two_evaluations_do_not_write_into_one_directory(evaluate):
    directory = evaluate()
    with lock_directory(directory), pytest.raises(UserError, match=f"{directory} is in use by process "):
        evaluate(resume=directory)


def test_resuming_with_other_data_is_refused(evaluate):
    directory = evaluate()
    with pytest.raises(UserError, match="has rollouts of other tasks than this evaluation"):
        evaluate(resume=directory, env_args=("seed=7",))


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_keeps_what_is_finished(tmp_path):
    program = "from plumbob.trainer.cli.evaluate import main; import sys; sys.argv[0] = 'evaluate'; main()"
    command = [sys.executable, "-c", program]
    args = ["lookup", "-n", "200", "--max-concurrent", "2", "-o", str(tmp_path), "--run-name", "r"]
    process = subprocess.Popen([*command, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    file = tmp_path / "r" / "lookup.jsonl"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and not (file.exists() and file.read_text().count("\n") > 5):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and f"evaluate --resume {tmp_path / 'r'}" in output
    assert 5 < len(read_records(file)) < 200
    again = [*command, "--resume", str(tmp_path / "r"), "--max-concurrent", "64"]
    done = subprocess.run(again, capture_output=True, text=True, check=True)
    assert "200 tasks x 1" in done.stdout
    assert len(read_records(file)) == 200


def test_the_oracle_is_perfect(evaluate):
    directory = evaluate(oracle=True)
    assert {row[3] for row in scores(directory)} == {1.0}


@pytest.mark.slow
def test_a_replay_scores_a_stored_evaluation_alike(evaluate, capsys):
    directory = evaluate(rollouts_per_example=2)
    again = evaluate(run_name="replayed", replay=str(directory / "lookup.jsonl"), num_examples=None)
    assert "24 of 24 rewards equal the stored ones" in capsys.readouterr().out
    assert [row[3:] for row in scores(again)] == [row[3:] for row in scores(directory)]


def test_a_replay_takes_the_settings_of_the_transcripts_and_needs_no_data(evaluate, capsys, monkeypatch):
    """Scored under another answer style or retriever, equal transcripts would differ; the data are in the traces."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    musique = EvaluateConfig(
        envs=("musique", "lookup"), num_examples=4, oracle=True, run_name="m",
        env_args=("musique.datasets=synthetic", "musique.answer_style=complete", "lookup.min_hops=1"),
    )  # fmt: skip
    directory = evaluate(musique)
    again = replace(LOOKUP, envs=("musique",), replay=str(directory / "musique.jsonl"), num_examples=None)
    evaluate(again, run_name="again")
    assert "4 of 4 rewards equal the stored ones" in capsys.readouterr().out


@pytest.mark.slow
def test_resuming_goes_on_when_what_is_left_fails_again(evaluate, tmp_path, monkeypatch):
    directory = evaluate()
    file = directory / "lookup.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:4]))

    async def broken(*args):
        raise EngineError("no")

    monkeypatch.setattr("plumbob.trainer.inference.transformers.engine.TransformersEngine.generate", broken)
    evaluate(resume=directory)
    rows = scores(directory)
    assert len(rows) == 12 and sum(ok for _, _, ok, *_ in rows) == 4


@pytest.mark.slow
def test_a_replay_of_training_traces_scores_alike_and_notices_a_change(tmp_path, evaluate, capsys):
    """Evaluation and training score one transcript the same, and where they do not, it is seen."""
    assert train(quick_config(tmp_path, "run", max_steps=1, max_tokens=48)) == 0
    file = tmp_path / "run" / "traces" / "step_1.jsonl.gz"
    evaluate(run_name="replayed", replay=str(file), num_examples=None)
    assert "16 of 16 rewards equal" in capsys.readouterr().out

    records = [json.loads(line) for line in trace_files.read(file).splitlines()]
    records[3]["rewards"]["correct"]["score"] = 0.25
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(r) + "\n" for r in records))
    settings = replace(LOOKUP, replay=str(changed), num_examples=None, output_dir=str(tmp_path), run_name="differs")
    assert run(settings) == 1
    assert "15 of 16 rewards equal" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_directory_is_a_model(tmp_path, evaluate):
    """What `train` saved is evaluated by the run's name; an adapter is merged into its base."""
    for peft in (False, True):
        name = f"peft-{peft}"
        assert train(quick_config(tmp_path, name, max_steps=1, max_tokens=48, learning_rate=0.1, peft=peft)) == 0
        by_run = scores(evaluate(run_name=f"a-{name}", model=str(tmp_path / name)))
        step = tmp_path / name / "checkpoints" / "step_1"
        assert by_run == scores(evaluate(run_name=f"b-{name}", model=str(step / "model")))
        assert by_run == scores(evaluate(run_name=f"c-{name}", model=str(step)))
        assert by_run != scores(evaluate(run_name=f"d-{name}"))  # so large a step must show


def test_predictions_in_the_order_of_the_tasks(tmp_path, monkeypatch, ended):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "answers.jsonl"
    args = ["lookup", "-n", "5", "--max-tokens", "48", "--output-file", file, "--run-name", "p"]
    code, out, _ = ended("predict", cli.predict_app, *args)
    assert code == 0 and "5 predictions" in out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"lookup-eval-0-{i}" for i in range(5)]
    records = read_records(tmp_path / "evaluations" / "p" / "lookup.jsonl")
    assert [row["answer"] for row in rows] == [r["nodes"][-1]["message"]["content"] for r in records]


@pytest.mark.slow
def test_a_benchmark_fills_its_grid_and_goes_on(tmp_path, monkeypatch, ended):
    monkeypatch.chdir(tmp_path)

    def go(*args):
        code, out, _ = ended("benchmark", cli.benchmark_app, *args)
        assert code == 0
        return json.loads(out)

    args = ["lookup", "gsm8k", "-a", "gsm8k.datasets=synthetic", "-n", "4", "--max-tokens", "16", "--json"]
    first = go(*args, "--models", "tiny", "--run-name", "b")
    assert [cell["env"] for cell in first] == ["lookup", "gsm8k"]
    directory = tmp_path / "evaluations" / "b"
    (finished,) = directory.glob("tiny-gsm8k-*/summary.json")
    finished.unlink()
    # The engine is chosen once for each model, and cells that an earlier process began keep theirs.
    for cell in directory.glob("*/config.toml"):
        assert 'engine = "transformers"' in cell.read_text()
        cell.write_text(cell.read_text().replace('engine = "transformers"', 'engine = "paged"'))
    again = go("--resume", directory, "--json")
    assert [c["scores"] for c in again] == [c["scores"] for c in first]
    assert [", engine paged, " in c["heading"] for c in again] == [False, True]
    assert 'engine = "paged"' in (finished.parent / "config.toml").read_text()


def test_models_of_one_name_are_two_cells_of_a_benchmark():
    assert _folder("org1/m", "gsm8k", None) != _folder("org2/m", "gsm8k", None)
    assert _folder("m", "a", "b") != _folder("m", "a-b", None)


def test_a_wrong_retriever_is_told_before_the_first_rollout(tmp_path, monkeypatch, ended):
    monkeypatch.chdir(tmp_path)
    args = ["musique", "--datasets", "synthetic", "--retrievers", "bm25,nosuch"]
    code, _, err = ended("benchmark", cli.benchmark_app, *args)
    assert code == 2 and "nosuch" in err
    assert not (tmp_path / "evaluations").exists()


def test_predictions_are_in_the_source_s_order_and_failures_can_be_filled(tmp_path, monkeypatch, ended):
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    ended("predict", cli.predict_app, "musique", "--oracle", "--datasets", "synthetic", "-n", "6", "--run-name", "a")
    answers = [json.loads(r)["id"] for r in (tmp_path / "evaluations/a/predictions.jsonl").read_text().splitlines()]
    assert answers == sorted(answers, key=lambda i: int(i.rsplit("-", 1)[1])) and len(answers) == 6

    calls, reply = [], ScriptedChat.reply

    async def fails_once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise EngineError("no")
        return await reply(*args)

    monkeypatch.setattr(ScriptedChat, "reply", fails_once)
    args = ["lookup", "--oracle", "-n", "3", "--output-file", rows]
    for extra, code in (["--run-name", "b"], 1), (["--run-name", "c", "--fill-failed"], 0):
        calls.clear()
        assert ended("predict", cli.predict_app, *args, *extra)[0] == code
        assert rows.exists() == (code == 0)
    assert [bool(json.loads(row)["answer"]) for row in rows.read_text().splitlines()] == [False, True, True]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name an environment"),
        (["lokup"], "did you mean 'lookup'?"),
        (["lookup", "lookup"], "named twice"),
        (["lookup", "-r", "0"], "--rollouts-per-example must be at least 1"),
        (["lookup", "-r", "2", "--temperature", "0"], "samples the same rollout every time"),
        (["lookup", "-n", "0"], "--num-examples must be at least 1"),
        (["lookup", "--top-p", "0"], "--top-p must be above 0 and at most 1"),
        (["lookup", "gsm8k", "--datasets", "x"], "give -a ENV.datasets="),
        (["lookup", "-a", "max_hop=3"], "did you mean 'max_hops'?"),
        (["lookup", "--oracle", "--replay", "x"], "give only one"),
        (["lookup", "--replay", "x", "-r", "2"], "scores each transcript once"),
        (["lookup", "-a", "gsm9k.datasets=synthetic"], "is for 'gsm9k', which is not evaluated here"),
        (["lookup", "--replay", "missing.jsonl"], "cannot read missing.jsonl"),
        (["lookup", "--resume", "nowhere"], "it has no config.toml"),
        (["lookup", "--model", "./nowhere"], "there is no model in './nowhere'"),
        (["lookup", "--engine", "openai", "--base-url", "http://127.0.0.1:1/v1"], "no server answers"),
        (["lookup", "--engine", "vlm"], "--engine"),
    ],
)
def test_mistakes_are_one_sentence(args, message, tmp_path, monkeypatch, ended):
    monkeypatch.chdir(tmp_path)
    code, out, err = ended("evaluate", cli.evaluate_app, *args)
    lines = [line for line in err.splitlines() if not line.startswith("  loading ")]
    assert code == 2 and out == "" and len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "evaluations").exists()


def test_settings_of_one_environment():
    config = EvaluateConfig(envs=("a", "b"), env_args=("seed=1", "b.seed=2", "b.split=x=y"))
    assert config.settings_of("a") == {"seed": "1"} and config.settings_of("b") == {"seed": "2", "split": "x=y"}


def test_a_gpu_without_room_for_the_model_is_one_sentence(monkeypatch, tmp_path, ended):
    def without_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 54.00 MiB. GPU 0 has none.")

    monkeypatch.setattr(PreTrainedModel, "to", without_room)
    code, _, err = ended("evaluate", cli.evaluate_app, "lookup", "-n", "2", "--output-dir", tmp_path)
    assert code == 2
    assert err.splitlines()[-1] == "evaluate: CUDA out of memory; other processes may hold a part of the memory"


HANGING = """
import threading, time
from plumbob.console import app

class OutOfMemoryError(RuntimeError):
    pass

def full(**_):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 54.00 MiB.")

app.ENDING_SECONDS = 0.1
app.run_app("train", full, [])
"""


def test_a_thread_that_hangs_does_not_keep_a_process_that_is_out_of_memory():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "train: CUDA out of memory; other processes may hold a part of the memory" in done.stderr
