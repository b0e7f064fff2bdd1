"""Collecting a step's rollouts: what is made before its step changes no row."""

import asyncio
import json
import random
import time
from dataclasses import replace

import pytest
import torch
from plumbob.rollout import Chat, Completion, EngineError, Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.rollouts.batch import RunFailed
from plumbob.trainer.rollouts.collect import Sampler, collect
from plumbob.trainer.rollouts.limits import limits_of
from plumbob.trainer.rollouts.processes import open_processes
from plumbob.trainer.rollouts.tasks import load_tasks
from plumbob.trainer.run_files.token_record import as_line

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


def steps_taken(numbers, chat):
    return [rows(asyncio.run(collect(sampler_of(chat), step, 3 * step, WORLD))) for step in numbers]


def test_the_next_step_s_prompts_are_rendered_ahead_and_its_rows_are_the_same():
    chat, alone = (Chat.of(load_tokenizer("tiny-gsm8k")) for _ in range(2))
    (first,) = steps_taken([0], chat)
    known = len(chat._memory)
    assert known == 6  # those of this step and of the next
    (second,) = steps_taken([1], chat)
    assert len(chat._memory) == 9
    (last,) = steps_taken([2], chat)
    assert len(chat._memory) == 9  # no step follows the last
    assert [second, last] == steps_taken([1, 2], alone)
    assert len(first) == len(second) == 12 and first != second


class Fails(Drawn):
    async def generate(self, prompt_ids, sampling):
        completion = await super().generate(prompt_ids, sampling)
        if len(completion.token_ids) == 19:
            raise EngineError("the server is gone")
        return completion


def test_another_process_plays_the_same_rollouts_and_its_death_ends_the_run():
    alone = sampler_of(Chat.of(load_tokenizer("tiny-gsm8k")), Fails)
    config = replace(CONFIG, rollout_processes=1)
    processes = open_processes(config, alone.environments, alone.rules, WORLD)
    while not processes.ready():
        time.sleep(0.1)
    beside = replace(alone, processes=processes)
    for recorded in (False, True):
        wanted, found = (asyncio.run(collect(one, 1, 3, WORLD, recorded=recorded)) for one in (alone, beside))
        assert rows(found) == rows(wanted) and sorted(found.failures) == sorted(wanted.failures)
        assert found.engine_failures and found.groups_broken == wanted.groups_broken
        tasks = [[json.loads(as_line(trace))["task"]["key"] for trace in one.records] for one in (wanted, found)]
        assert tasks[0] == tasks[1] and len(tasks[0]) == 12 and len(found.traces) == (12 if recorded else 4)
    requests = {name: own for by_trace in found.requests for name, own in by_trace().items()}
    assert {trace.id: trace.num_turns for trace in found.traces} == {name: len(own) for name, own in requests.items()}
    processes.processes[0].kill()
    with pytest.raises(
        RunFailed, match="a process that plays rollouts ended .exit code -9.; with --rollout-processes 0"
    ):
        asyncio.run(collect(beside, 2, 6, WORLD))
    again, wanted = (asyncio.run(collect(one, 2, 6, WORLD)) for one in (beside, alone))
    assert not processes.ready() and rows(again) == rows(wanted)  # it plays alone then
