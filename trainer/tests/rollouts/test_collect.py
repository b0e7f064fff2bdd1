"""Collecting a step's rollouts: whoever plays them, they are the same."""

import asyncio
import importlib
import json
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plumbob.rollout import Chat, Completion, EngineError, Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.rollouts.batch import RunFailed
from plumbob.trainer.rollouts.collect import Sampler, collect
from plumbob.trainer.rollouts.groups import Played, Unusable
from plumbob.trainer.rollouts.limits import limits_of
from plumbob.trainer.rollouts.processes import open_processes
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.run_files.token_record import as_line
from vf_gsm8k.taskset import GSM8KTask

CONFIG = TrainConfig(
    env="gsm8k", datasets="synthetic", model="tiny-gsm8k", num_generations=4, eval_examples=0, max_steps=3
)


class Drawn:
    """Draws what depends on a request's seed alone, after a few rounds of the event loop."""

    version = generated_tokens = 0

    def __init__(self, stop):
        self.stop = stop

    async def generate(self, prompt_ids, sampling):
        rng = random.Random(sampling.seed)
        for _ in range(rng.randrange(300)):
            await asyncio.sleep(0)
        ids = (*(rng.randrange(5, 100) for _ in range(rng.randrange(1, 30))), self.stop)
        return Completion(ids, tuple(-rng.random() for _ in ids), "stop")


WORLD = World(0, 1, torch.device("cpu"))
OWN = ("seconds", "trace_id", "tool_seconds")


def sampler_of(chat, engine=Drawn):
    engine = engine(chat.stop_token_ids[0])
    return Sampler(CONFIG, load_tasks(CONFIG), engine, chat, Sampling(), limits_of(CONFIG), 3)


def rows(batch):
    return [{k: v for k, v in vars(s).items() if k not in OWN} for s in batch.drawn]


class Fails(Drawn):
    async def generate(self, prompt_ids, sampling):
        completion = await super().generate(prompt_ids, sampling)
        if len(completion.token_ids) == 19:
            raise EngineError("the server is gone")
        return completion


def both(engine):
    """The same sampler, without and with another process."""
    alone, beside = (sampler_of(Chat.of(load_tokenizer("tiny-gsm8k")), engine) for _ in range(2))
    processes = open_processes(replace(CONFIG, rollout_processes=1), alone.environments, alone.rules, WORLD)
    while not processes.ready():
        time.sleep(0.1)
    return alone, replace(beside, processes=processes), processes


def test_another_process_plays_the_same_rollouts_and_its_death_ends_the_run():
    alone, beside, processes = both(Fails)
    for recorded in (False, True):
        wanted, found = (asyncio.run(collect(one, 1, 3, WORLD, recorded=recorded)) for one in (alone, beside))
        assert rows(found) == rows(wanted) and sorted(found.failures) == sorted(wanted.failures)
        assert found.engine_failures and found.groups_broken == wanted.groups_broken
        tasks = [[json.loads(as_line(trace))["task"]["key"] for trace in one.records] for one in (wanted, found)]
        assert tasks[0] == tasks[1] and len(tasks[0]) == 12 and len(found.traces) == (12 if recorded else 4)
    requests = {name: own for by_trace in found.requests for name, own in by_trace().items()}
    assert {trace.id: trace.num_turns for trace in found.traces} == {name: len(own) for name, own in requests.items()}
    processes.processes[0].kill()
    with pytest.raises(RunFailed, match="a process that plays rollouts ended .exit code -9.; --rollout-processes 0"):
        asyncio.run(collect(beside, 2, 6, WORLD))
    again, wanted = (asyncio.run(collect(one, 2, 6, WORLD)) for one in (beside, alone))
    assert not processes.ready() and rows(again) == rows(wanted)  # it plays alone then


ODD = """
import subprocess
from vf_gsm8k.taskset import GSM8KTask

class Odd(GSM8KTask):
    def _read(self, trace):
        trace.info["odd"] = object()
        return {**super()._read(trace), "pid": subprocess.Popen(["sleep", "600"]).pid}
"""


def test_odd_environments_in_another_process(tmp_path, monkeypatch, capfd):
    (tmp_path / "odd_tasks.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    alone, beside, processes = both(Drawn)
    for task in beside.tasks.train:
        task.__class__ = importlib.import_module("odd_tasks").Odd
    odd = asyncio.run(collect(beside, 0, 0, WORLD))
    assert sum(isinstance(one, str) and "unknown type" in one for one in odd.records) == 8
    for task in beside.tasks.train:
        task.__class__, vars(task)["lock"] = GSM8KTask, threading.Lock()
    found, wanted = (asyncio.run(collect(one, 1, 3, WORLD)) for one in (beside, alone))
    assert rows(found) == rows(wanted) and len(found.traces) == 12 and not processes.ready()
    assert "played in the trainer's process alone: a task cannot be sent to another" in capfd.readouterr().err
    here, there = ([int(s.metrics["pid"]) for s in odd.drawn if (s.group == "0/0") is own] for own in (True, False))
    assert len(there) == 8 and not any(Path(f"/proc/{pid}/exe").exists() for pid in there)
    for pid in here:
        os.kill(pid, 9)

    def failing(count: int) -> list[Played]:
        return [Played(0, ["{}"] * 4, [], [Unusable("errored", "a KeyError")] * count, False, dict)]

    for here, there in ((0, 2), (1, 4), (0, 3)):
        processes.compare(failing(here), failing(there))
        assert ("none in this one; the first: a KeyError" in capfd.readouterr().err) == ((here, there) == (0, 3))
