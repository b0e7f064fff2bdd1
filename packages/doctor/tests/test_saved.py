"""Rollouts that verifiers has saved, written by its own code: what is found in them, without verifiers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plumbob.doctor.__main__ import main
from plumbob.doctor.environment.player import Script, Turn

vf = pytest.importorskip("verifiers.v1")

from plumbob.trainer.config.train import TrainConfig  # noqa: E402
from plumbob.trainer.doctor.player import VerifiersPlayer  # noqa: E402
from plumbob.trainer.rollouts.tasks import load_environments  # noqa: E402
from verifiers.v1.episode import EnvInfo, Episode  # noqa: E402
from verifiers.v1.utils.trace_store import write_episode  # noqa: E402

Turns = Callable[[VerifiersPlayer, Any], tuple[Turn, ...]]


def saved(folder: Path, turns: Turns, times: int = 4) -> list[dict[str, Any]]:
    """Rollouts of six tasks of lookup, `times` of each, in `traces.jsonl` of the folder; returns its lines."""
    with asyncio.Runner() as runner:
        config = TrainConfig(env=["lookup"], env_args=("num_examples=200",), eval_examples=16)
        player = VerifiersPlayer(config, load_environments(config)[0], runner)
        for task in player.train[:6]:
            for _ in range(times):
                (trace,) = player.traces([Script(task, turns(player, task))])
                write_episode(folder, Episode(env=EnvInfo(id="lookup"), task=trace.task, traces=[trace], ok=trace.ok))
    return [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]


def mostly_right() -> Turns:
    """The perfect transcript, but for every fourth rollout."""
    count = itertools.count()

    def turns(player: VerifiersPlayer, task: Any) -> tuple[Turn, ...]:
        found = player.oracle(task) if next(count) % 4 else (Turn("I do not know."),)
        assert isinstance(found, tuple)
        return found

    return turns


def found(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main([str(folder), "--json"])
    return json.loads(capsys.readouterr().out)


def test_rollouts_that_are_mostly_right_show_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, mostly_right())
    told = found(tmp_path, capsys)
    assert told["cause"] is None and told["symptoms"] == []
    assert told["notes"] == ["24 rollouts of 6 tasks, mean reward 0.750."]
    checks = {one["check"] for one in told["findings"] if one["verdict"] == "pass"}
    assert {
        "equal rollouts of a task earn equal rewards",
        "Every rollout has a finite reward",
        "the tools work",
    } <= checks


def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = saved(tmp_path, lambda player, task: (Turn("I do not know."),))
    assert found(tmp_path, capsys)["symptoms"] == ["never-succeeds"]
    for k, line in enumerate(lines):
        for reward in line["traces"][0]["rewards"].values():
            reward["score"] = float(k % 2)
    (tmp_path / "traces.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert found(tmp_path, capsys)["cause"] == "reward-nondeterministic"


def test_a_line_that_is_no_rollout_is_an_error_of_its_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces.jsonl").write_text('{"a": 1}\n')
    assert main([str(tmp_path)]) == 2
    assert "traces.jsonl, line 1: is no rollout of verifiers" in capsys.readouterr().err
