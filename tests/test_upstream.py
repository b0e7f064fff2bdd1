"""Each environment's wheel alone, under upstream's own `vf-eval` against our server, scores as our rollouts do.

Per environment: a clean virtual environment with its wheel and what that declares, no uv and no git on the path, no
network but the loopback. `vf-eval` plays it with the bundled policy, and with an engine that recites the tasks' own perfect
transcripts. Every transcript it stores is then replayed through `run_rollout`: rewards, metrics and stop reasons must be
equal.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from plumbob.hub import find
from plumbob.rollout import Chat, Completion, ScriptedChat, run_rollout, tasksets
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.serving.server import Server, load_server, running

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = [
    "packages/rollout",
    "packages/retrieval",
    "environments/gsm8k",
    "environments/lookup",
    "environments/musique",
]
NOT_DECLARED = {"torch", "plumbob-trainer", "plumbob-hub", "plumbob-lab", "sentence-transformers"}
NUM_TASKS, NUM_ROLLOUTS = 3, 2


@dataclass(frozen=True)
class Case:
    """An environment and the settings that both sides load it with."""

    name: str
    settings: dict[str, Any]

    @property
    def module(self) -> str:
        return f"vf_{self.name}"

    def tasks(self) -> dict[str, Any]:
        """The first tasks, by id."""
        taskset = tasksets.make_taskset(find(self.name).load(), self.module, self.settings)
        return {task.data.id: task for task, _ in zip(taskset, range(NUM_TASKS), strict=False)}


CASES = [
    Case("gsm8k", {"datasets": "synthetic", "split": "test"}),
    Case("lookup", {"split": "eval"}),
    Case("musique", {"datasets": "synthetic", "num_examples": 20, "retriever": "bm25"}),
]

by_name = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


# --- the clean virtual environment ----------------------------------------------------------------------------------


def uv(*args: Any) -> None:
    done = subprocess.run(["uv", *map(str, args)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Distribution -> wheel, of everything here that an environment may declare."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        uv("build", "--wheel", "--quiet", "--out-dir", folder, package)
    uv("export", "--frozen", "--no-emit-workspace", "--no-hashes", "--quiet", "-o", folder / "locked.txt")
    return {wheel.name.split("-")[0].replace("_", "-"): wheel for wheel in folder.glob("*.whl")}


def with_declared(name: str, wheels: dict[str, Path]) -> dict[str, Path]:
    """The wheel, and those of ours that it declares, directly or not. Extras are not declared needs."""
    wheel = wheels[name]
    with ZipFile(wheel) as archive:
        (metadata,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    needs = [line for line in headers.get_all("Requires-Dist") or [] if "extra ==" not in line]
    ours = {re.match(r"[\w.-]+", line)[0] for line in needs} & wheels.keys()
    return {name: wheel} | {n: w for other in ours for n, w in with_declared(other, wheels).items()}


@dataclass(frozen=True)
class Clean:
    """A virtual environment and a home of its own."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "venv/bin"

    async def vf_eval(
        self, url: str, case: Case, harness: str = "", tasks: int = NUM_TASKS, **environment: str
    ) -> list[dict]:
        """Run the command that the READMEs give; returns the stored traces."""
        run = f"run{len(list(self.folder.glob('outputs/*')))}"
        command = [
            *(self.bin / "vf-eval", case.module, "-m", "tiny", "--client.base-url", f"{url}/v1"),
            *("--client.api-key-var", "NO_KEY", "-n", str(tasks), "-r", str(NUM_ROLLOUTS)),
            *("--sampling.temperature", "0", "--sampling.max-tokens", "64"),
            *("--no-push", "--no-rich", "-o", "outputs", "--run.name", run),
            *(("--env.agent.harness.id", harness) if harness else ()),
            *(f"--env.taskset.{name.replace('_', '-')}={value}" for name, value in case.settings.items()),
        ]
        nowhere = "http://127.0.0.1:9"
        alone = {"PATH": str(self.bin), "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_PROXY": "127.0.0.1"}
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.folder,
            env={"HOME": str(self.folder), **(environment or alone)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-4000:]
        lines = (self.folder / f"outputs/{run}/traces.jsonl").read_text().splitlines()
        episodes = [json.loads(line) for line in lines]
        assert not any(episode["errors"] for episode in episodes), output.decode()[-4000:]
        return [trace for episode in episodes for trace in episode["traces"]]


@pytest.fixture
def clean(case, wheels, tmp_path) -> Clean:
    uv("venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    made = Clean(tmp_path)
    installed = with_declared(f"vf-{case.name}", wheels)
    locked = next(iter(wheels.values())).parent / "locked.txt"
    uv("pip", "install", "--quiet", "--python", made.bin / "python", "--constraint", locked, *installed.values())
    script = "import importlib.metadata as m; print('\\n'.join(d.metadata['Name'] for d in m.distributions()))"
    listed = subprocess.run([made.bin / "python", "-c", script], capture_output=True, text=True, check=True)
    names = set(listed.stdout.split())
    assert not names & NOT_DECLARED
    assert {name for name in names if name.startswith(("plumbob-", "vf-"))} == set(installed)
    return made


# --- what it is served ----------------------------------------------------------------------------------------------


class Reciter:
    """An engine that finds the task in the prompt and draws the next turn of its `oracle()`."""

    def __init__(self, tasks: list[Any], chat: Chat) -> None:
        self.chat = chat
        self.scripts = {task.data.prompt_text: [self.text(message) for message in task.oracle()] for task in tasks}

    def text(self, message: Any) -> str:
        calls = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in message.tool_calls or ()]
        spoken = "".join(f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls)
        return f"{message.content or ''}{spoken}{self.chat.closer}"

    async def generate(self, prompt_ids, sampling) -> Completion:
        prompt = self.chat.tokenizer.decode(list(prompt_ids))
        (script,) = (turns for question, turns in self.scripts.items() if question in prompt)
        text = script[prompt.count("<|im_start|>assistant") - 1]
        ids = self.chat.tokenizer.encode(text, add_special_tokens=False)
        return Completion(tuple(ids), (0.0,) * len(ids), "stop")


def replay(record: dict[str, Any], task: Any) -> Any:
    trace = asyncio.run(run_rollout(task, ScriptedChat.of_record(record), None))
    assert trace.ok, trace.errors
    return trace


def check(records: list[dict[str, Any]], tasks: dict[str, Any]) -> None:
    """Every transcript is of one of these very tasks and scores here as it did there."""
    assert len(records) == NUM_TASKS * NUM_ROLLOUTS
    assert {record["task"]["data"]["id"] for record in records} == set(tasks)
    for record in records:
        assert record["ok"] and not record["errors"]
        task = tasks[record["task"]["data"]["id"]]
        ours = replay(record, task).to_record()
        assert type(task).data_type().model_validate(record["task"]["data"]) == task.data
        for name in ("rewards", "metrics", "stop_condition"):
            assert ours[name] == pytest.approx(record[name]) if name == "metrics" else ours[name] == record[name]
        said = [[node["message"].get(part) for part in ("role", "content")] for node in ours["nodes"]]
        assert said == [[n["message"]["role"], n["message"].get("content") or ""] for n in record["nodes"]]


# --- the tests ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
@by_name
def test_the_wheel_alone_scores_under_upstream_as_it_does_here(case, clean):
    tasks, chat = case.tasks(), Chat.of(load_tokenizer("tiny"))
    reciting = Server(Reciter(list(tasks.values()), chat), chat, model="tiny", max_length=1 << 20)

    async def main():
        async with running(load_server("tiny")) as url:
            drawn = await clean.vf_eval(url, case)
        async with running(reciting) as url:
            return drawn, await clean.vf_eval(url, case)

    drawn, recited = asyncio.run(main())
    check(drawn, tasks)
    check(recited, tasks)
    rewards = [sum(r["score"] * r["weight"] for r in record["rewards"].values()) for record in recited]
    assert rewards == pytest.approx([1.0] * len(rewards))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1:2], ids=["lookup"])
def test_upstream_s_own_harness_plays_it_through_its_tool_servers(case, clean):
    """Two processes and an MCP server for each rollout: slow, and the same scores. It needs uv, which gets its program."""

    async def main():
        async with running(load_server("tiny")) as url:
            return await clean.vf_eval(url, case, "null", tasks=1, **os.environ)

    tasks = case.tasks()
    for record in asyncio.run(main()):
        ours = replay(record, tasks[record["task"]["data"]["id"]])
        own = {name: value for name, value in ours.metrics.items() if not name.startswith("rollout/")}
        assert record["ok"] and own == record["metrics"]
        assert ours.to_record()["rewards"] == record["rewards"]
