"""Collecting a step's rollouts: what is made before its step changes no row."""

import asyncio
import random

import torch
from plumbob.rollout import Chat, Completion, Sampling
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy.loading import load_tokenizer
from plumbob.trainer.rollouts.collect import Sampler, collect
from plumbob.trainer.rollouts.limits import limits_of
from plumbob.trainer.rollouts.tasks import load_tasks

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


def steps_taken(numbers, chat):
    sampler = Sampler(CONFIG, load_tasks(CONFIG), Drawn(chat.stop_token_ids[0]), chat, Sampling(), limits_of(CONFIG), 3)
    world = World(0, 1, torch.device("cpu"))
    batches = [asyncio.run(collect(sampler, step, 3 * step, world)) for step in numbers]
    own = ("seconds", "trace_id", "tool_seconds")
    return [[{k: v for k, v in vars(s).items() if k not in own} for s in batch.drawn] for batch in batches]


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
