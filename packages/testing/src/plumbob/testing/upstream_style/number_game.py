"""Guess a number: the environment is the user, answers each guess with "higher" or "lower", and ends the game."""

import itertools
import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf


class GameConfig(vf.TasksetConfig):
    largest: int = 9
    guesses: int = 4
    """Most guesses of one game."""
    opens: bool = False
    """Whether the user opens the conversation; otherwise the task's prompt does."""
    many: int = 0
    """Number of tasks; 0 for a stream without end."""


class GameData(vf.TaskData):
    secret: int
    largest: int
    guesses: int


class GameTask(vf.Task[GameData]):
    @vf.reward(weight=0.1)
    async def guessed(self, trace: vf.Trace) -> float:
        return float(bool(re.search(r"\d", trace.last_reply)))

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages))


class GameEnv(vf.SingleAgentEnv):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        data, won = task.data, 0.0
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn(opening(data) if data.prompt is None else None)
            for left in reversed(range(data.guesses)):
                if segment.terminated:
                    break
                found = re.search(r"\d+", segment.last_reply)
                if found and int(found[0]) == data.secret:
                    won = (left + 1) / data.guesses
                    break
                if left:
                    segment = await interaction.turn(hint(found, data.secret))
        interaction.trace.record_reward("won", won)


def opening(data: GameData) -> str:
    return f"I think of a number from 1 to {data.largest}. Which is it?"


def hint(found: re.Match[str] | None, secret: int) -> str:
    if found is None:
        return "Say a number."
    return "It is higher." if int(found[0]) < secret else "It is lower."


class GameTaskset(vf.Taskset[GameTask, GameConfig]):
    INFINITE = True

    def load(self) -> Iterator[GameTask]:
        c = self.config
        for i in itertools.count() if not c.many else range(c.many):
            secret = random.Random(f"game/{i}").randint(1, c.largest)
            data = GameData(prompt=None, secret=secret, largest=c.largest, guesses=c.guesses)
            prompt = None if c.opens else opening(data)
            yield GameTask(data.model_copy(update={"prompt": prompt}), c.task)

    @property
    def bounded(self) -> bool:
        return bool(self.config.many) or super().bounded


__all__ = ["GameEnv", "GameTaskset"]
