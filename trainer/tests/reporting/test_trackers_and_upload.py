"""What leaves the machine: metrics to wandb and trackio, models to the hub. Each library runs for real, if it is there."""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard
from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.evaluation.statistics import Estimate
from plumbob.trainer.reporting.hub_upload import check_hub_access, push_to_hub
from plumbob.trainer.reporting.model_card import model_card
from plumbob.trainer.reporting.progress_table import Board
from plumbob.trainer.reporting.trackers import Reporter, make_reporter

REPORT = """
import sys
from pathlib import Path
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.reporting.trackers import make_reporter
from types import SimpleNamespace as Having

call = Having(name="lookup", arguments="{}")
said = Having(role="user", content="Start key: 17"), Having(role="assistant", content="", tool_calls=[call])
trace = Having(
    nodes=[Having(message=m, sampled=m.role == "assistant") for m in said],
    task=Having(key="t1"),
    reward=0.5,
    stop_condition="max_turns",
)
library, folder = sys.argv[1:]
for steps in ((1, 2), (2, 3)):  # a run, and what resumes it
    reporter = make_reporter(TrainConfig(report_to=library, env_args=("a=1",)), Path(folder))
    for step in steps:
        reporter.log(step, {"step": step, "reward/mean": step / 10, "nan": float("nan")})
        reporter.rollouts(step, [(trace, 0.25)])
        reporter.rollouts(step, [])
    reporter.close()
    reporter.close()
"""


def report(library: str, folder: Path, **environment: str) -> str:
    """Report five steps in a process of its own, as the libraries start threads and services; returns its stdout."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    path = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", REPORT, library, str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_no_report_goes_nowhere(tmp_path):
    reporter = make_reporter(TrainConfig(), tmp_path)
    reporter.log(1, {"step": 1})
    reporter.close()
    assert type(reporter) is Reporter and not list(tmp_path.iterdir())


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_missing_library_is_one_sentence_before_the_run(library, tmp_path):
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed")
    with pytest.raises(
        UserError, match=f"needs the package {library}: `uv sync --extra {library}`, or `pip install {library}`"
    ):
        make_reporter(TrainConfig(report_to=library), tmp_path)


def test_wandb_offline_continues_its_run(tmp_path):
    report("wandb", tmp_path, WANDB_MODE="offline")
    name = (tmp_path / "wandb_run.txt").read_text().strip()
    logs = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(logs) >= 1 and {log.stem for log in logs} == {f"run-{name}"}
    assert b"reward/mean" in b"".join(log.read_bytes() for log in logs)
    tables = [
        json.loads(file.read_text()) for file in tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json")
    ]
    assert len(tables) == 4
    (row,) = tables[0]["data"]
    assert dict(zip(tables[0]["columns"], row, strict=True)) | {"step": 1} == {
        "step": 1,
        "task": "t1",
        "prompt": "user: Start key: 17",
        "completion": "assistant: lookup({})",
        "reward": 0.5,
        "advantage": 0.25,
        "stop": "max_turns",
        "turns": 1,
    }


def test_tensorboard_has_each_step_once_after_resuming(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')  # the second run takes step 2 again
    report("tensorboard", tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, round(e.value, 6)) for e in read.Scalars("reward/mean")] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert "nan" not in read.Tags()["scalars"] and "completions/0/text_summary" in read.Tags()["tensors"]
    (shown, *_) = read.Tensors("completions/0/text_summary")
    assert (
        b"reward 0.5" in shown.tensor_proto.string_val[0]
        and b"assistant: lookup({})" in shown.tensor_proto.string_val[0]
    )


def test_the_model_card_says_what_was_trained_how_and_what_came_of_it():
    config = TrainConfig(
        env="gsm8k", model="Qwen/Qwen2.5-0.5B-Instruct", peft=True, learning_rate=5e-5, env_args=("a=1",)
    )
    warned = [{"step": 5, "cause": "reward-hacked", "evidence": "it falls"}]
    evaluations = {
        "before": {"greedy": Estimate(0.1, 0.05, 0.2, 64)},
        "after": {"greedy": Estimate(0.3, 0.2, 0.4, 64), "sampled": Estimate(0.25, None, None, 64)},
    }
    rows = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.4}]
    text = model_card(config, evaluations, rows, warned)
    card = ModelCard(text)
    assert card.data.base_model == "Qwen/Qwen2.5-0.5B-Instruct" and "grpo" in card.data.tags
    assert (
        "| greedy | 0.100 [0.050, 0.200] | 0.300 [0.200, 0.400] | 64 |" in text
        and "| sampled | - | 0.250 | 64 |" in text
    )
    assert "`reward/mean` by step: 0.100" in text and "--learning-rate 5e-05\n" in text and "--env-args a=1\n" in text
    assert "- step 5, reward-hacked: it falls" in text and "plumbob-trainer 0" in text and "--model" not in text
    empty = model_card(TrainConfig(), {}, [], [])
    assert "None." in empty and "Held-out" not in empty


def test_trackio_holds_every_step_once_more_after_resuming(tmp_path):
    (tmp_path / "r").mkdir()
    report("trackio", tmp_path / "r", TRACKIO_DIR=str(tmp_path / "store"))
    with sqlite3.connect(tmp_path / "store" / "plumbob.db") as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        traces = database.execute("select step, messages, metadata from traces order by step").fetchall()
    rows = [(name, step, own) for name, step, text in found if (own := json.loads(text))]
    assert [step for _, step, _ in rows] == [1, 2, 2, 3] and {name for name, _, _ in rows} == {"r"}
    assert rows[0][2] == {"reward/mean": 0.1}
    step, messages, about = traces[-1]
    assert len(traces) == 4 and step == 3
    assert [m["content"] for m in json.loads(messages)] == ["Start key: 17", "lookup({})"]
    assert json.loads(about) == {
        "step": 3,
        "task": "t1",
        "reward": 0.5,
        "advantage": 0.25,
        "stop": "max_turns",
        "turns": 1,
    }


# The hub


class Hub(ThreadingHTTPServer):
    """The few of the hub's endpoints that an upload of small files asks."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.role, self.failing, self.created, self.files = "write", False, [], {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # ty: ignore[incompatible-mutable-override]

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer hf_good":
            return self._answer(401, {"error": "Invalid username or password."})
        who = {"type": "user", "name": "me", "orgs": [{"name": "team"}]}
        return self._answer(200, {**who, "auth": {"accessToken": {"role": self.server.role}}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            given = json.loads(body)
            owner = given.get("organization") or "me"
            private = given.get("private") or given.get("visibility") == "private"
            self.server.created.append((f"{owner}/{given['name']}", private))
            return self._answer(200, {"url": f"{self.server.url}/{owner}/{given['name']}"})
        if self.server.failing:
            return self._answer(507, {"error": "Private storage is full."})
        if "/preupload/" in self.path:
            paths = [f["path"] for f in json.loads(body)["files"]]
            return self._answer(
                200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}
            )
        if "/commit/" in self.path:
            for line in body.decode().splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    self.server.files[item["value"]["path"]] = item["value"]["content"]
            return self._answer(200, {"commitUrl": f"{self.server.url}/me/mine/commit/1", "commitOid": "1"})
        return self._answer(200, {})

    def _answer(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def test_a_folder_is_uploaded(hub, folder):
    check_hub_access(TrainConfig(push_to_hub=True, hub_model_id="team/mine"), endpoint=hub.url)
    url = push_to_hub(folder, "team/mine", endpoint=hub.url)
    assert url.endswith("team/mine") and hub.created == [("team/mine", True)]
    assert set(hub.files) >= {"config.json"}
    push_to_hub(folder, "short", endpoint=hub.url)
    assert hub.created[-1] == ("me/short", True)


def test_a_failed_upload_says_how_to_try_again(hub, folder):
    hub.failing = True
    with pytest.raises(UserError) as error:
        push_to_hub(folder, "mine", endpoint=hub.url)
    assert f"`hf upload mine {folder}`" in str(error.value) and "\n" not in str(error.value)
    assert (folder / "config.json").exists()


@pytest.mark.parametrize(
    ("name", "token", "role", "complaint"),
    [
        ("me/mine", "hf_bad", "write", "rejects the token"),
        ("me/mine", "", "write", "there is no hub token; run `hf auth login`, or set HF_TOKEN"),
        ("me/mine", "hf_good", "read", "has no write access"),
        ("other/mine", "hf_good", "write", "can upload to me, team, not to other"),
        ("a/b/c", "hf_good", "write", "is not a valid model name on the hub"),
    ],
)
def test_what_could_not_be_uploaded_is_told_before_training(hub, monkeypatch, tmp_path, name, token, role, complaint):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    hub.role = role
    with pytest.raises(UserError) as error:
        check_hub_access(TrainConfig(push_to_hub=True, hub_model_id=name), endpoint=hub.url)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_a_hub_that_does_not_answer(monkeypatch, folder):
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    with pytest.raises(UserError, match="--push-to-hub cannot work"):
        check_hub_access(TrainConfig(push_to_hub=True), endpoint="http://127.0.0.1:9")
    with pytest.raises(UserError, match="hf upload mine"):
        push_to_hub(folder, "mine", endpoint="http://127.0.0.1:9")


# The board


def test_the_board_prints_each_step(capsys):
    with Board(3) as board:
        for step in range(1, 4):
            board.step({"step": step, "reward/mean": step / 10})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split()[:2] == ["step", "reward"]
    assert [line.split()[:3] for line in lines[1:]] == [["1", "0.100", "-"], ["2", "0.200", "-"], ["3", "0.300", "-"]]


def test_the_board_shows_rollouts(capsys):
    def node(sampled: bool, content: str, calls=()):
        message = SimpleNamespace(content=content, tool_calls=calls)
        return SimpleNamespace(sampled=sampled, message=message)

    call = SimpleNamespace(name="lookup", arguments='{"key": "[a]"}')
    nodes = [node(False, "You look up."), node(False, "x" * 300 + " the end?"), node(True, "I see\n", [call])]
    trace = SimpleNamespace(
        nodes=nodes,
        assistant_messages=[n.message for n in nodes if n.sampled],
        reward=0.5,
        stop_condition="max_turns",
    )
    with Board(1, completions=1) as board:
        board.step({"step": 1}, [trace, trace])
    _, _, head, turn = capsys.readouterr().err.splitlines()
    assert head.startswith("    reward 0.500, max_turns: ...x") and head.endswith("the end?") and len(head) < 200
    assert turn == '      > I see lookup({"key": "[a]"})'
