"""Procedurally generated tasks that need a chain of tool calls.

The environment serves to distinguish "multi-step tool use does not learn" from "this dataset does not learn": every
call except the first needs the previous call's result, the reward is exact, and there is no other source of failure.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, Literal, cast

import verifiers.v1 as vf
from pydantic import Field, model_validator

from vf_lookup.tools import LookupState, LookupToolset

SYSTEM_PROMPT = (
    "Look up the start key. Each result gives the next key or the value. "
    "Follow the keys to the value, then reply with the value alone."
)

# Short common words, because most tokenizers encode them as one token each.
VALUES = [
    "amber",
    "apple",
    "arrow",
    "basin",
    "beach",
    "berry",
    "bread",
    "brick",
    "bridge",
    "brush",
    "cabin",
    "candle",
    "canyon",
    "castle",
    "cedar",
    "chair",
    "cherry",
    "cloud",
    "clover",
    "copper",
    "coral",
    "cotton",
    "crane",
    "crown",
    "daisy",
    "desert",
    "dragon",
    "eagle",
    "ember",
    "falcon",
    "feather",
    "flame",
    "forest",
    "garden",
    "glass",
    "grape",
    "hammer",
    "harbor",
    "hazel",
    "honey",
    "island",
    "ivory",
    "jacket",
    "jewel",
    "kettle",
    "ladder",
    "lemon",
    "lily",
    "marble",
    "meadow",
    "mirror",
    "needle",
    "ocean",
    "olive",
    "orange",
    "panther",
    "pearl",
    "pepper",
    "planet",
    "prairie",
    "raven",
    "river",
    "saddle",
    "silver",
]

FIRST_KEY, LAST_KEY = 1000, 9999

Difficulty = Literal["trivial", "easy", "medium", "hard", "extreme"]

PRESETS: dict[Difficulty, dict[str, int]] = {
    "trivial": {"min_hops": 1, "max_hops": 1, "table_size": 8, "distractors": 0, "num_values": 16},
    "easy": {"min_hops": 1, "max_hops": 3, "table_size": 16, "distractors": 0, "num_values": 64},
    "medium": {"min_hops": 2, "max_hops": 6, "table_size": 24, "distractors": 0, "num_values": 64},
    "hard": {"min_hops": 4, "max_hops": 10, "table_size": 40, "distractors": 2, "num_values": 64},
    "extreme": {"min_hops": 8, "max_hops": 14, "table_size": 64, "distractors": 6, "num_values": 64},
}
"""The settings of each difficulty.

Even the longest chain and its reply fit the 16 turns that runners allow by default.
"""


def expected_reward(min_hops: int, max_hops: int, link_probability: float) -> float:
    """Return the expected reward, in [0, 1], of a policy that follows each link with probability `link_probability`.

    A policy that misses a link is assumed to fail. Chain lengths are uniform from `min_hops` to `max_hops`.
    Example: expected_reward(1, 3, 0.7) -> (0.7 + 0.49 + 0.343) / 3 = 0.511
    """
    lengths = range(min_hops, max_hops + 1)
    return sum(link_probability**hops for hops in lengths) / len(lengths)


def split_of(start_key: str) -> Literal["train", "eval"]:
    """Return the split of tasks that start at this key: a quarter of all keys are reserved for evaluation tasks.

    It depends on the key alone, so no training task can equal an evaluation task, for all seeds and sizes.
    """
    return "eval" if sum(map(int, start_key)) % 4 == 0 else "train"


class LookupTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupConfig(vf.TasksetConfig):
    task: LookupTaskConfig = LookupTaskConfig()  # ty: ignore[incompatible-mutable-override]
    split: Literal["train", "eval"] = "train"
    """The split to generate. Training and evaluation tasks are disjoint, because they start at different keys."""
    num_examples: int = Field(4096, ge=1)
    """Number of tasks; task i does not depend on it."""
    seed: int = 0
    """A different seed gives different tasks of the same split."""
    difficulty: Difficulty | None = None
    """Preset for the five settings below; values given explicitly override it. None: they keep their own defaults."""
    min_hops: int = Field(1, ge=1)
    """Smallest number of lookups needed to reach the value."""
    max_hops: int = Field(5, ge=1)
    """Largest number of lookups needed to reach the value; all numbers from min_hops to max_hops are equally likely."""
    table_size: int = Field(16, ge=2)
    """Number of entries of the hidden table, including those that are not on the chain."""
    distractors: int = Field(0, ge=0)
    """Number of keys that each result on the chain mentions besides the next one; none of them is on the chain."""
    num_values: int = Field(len(VALUES), ge=2, le=len(VALUES))
    """Number of different words that the value can be."""

    # Not a validator that runs before the fields are read: `train` could then not refuse a wrong value by the source
    # alone, and would have to import verifiers for it.
    @model_validator(mode="after")
    def _preset(self) -> LookupConfig:
        if self.difficulty is not None:
            for name in PRESETS[self.difficulty].keys() - self.model_fields_set:
                setattr(self, name, PRESETS[self.difficulty][name])
        return self

    @model_validator(mode="after")
    def _consistent(self) -> LookupConfig:
        chosen = f"; difficulty {self.difficulty} sets the settings that are not given" if self.difficulty else ""
        if self.max_hops < self.min_hops:
            raise ValueError(f"max_hops ({self.max_hops}) is less than min_hops ({self.min_hops}){chosen}")
        if self.table_size < self.max_hops + self.distractors:
            raise ValueError(
                f"table_size ({self.table_size}) cannot hold {self.max_hops} links and {self.distractors} distractors{chosen}"
            )
        return self


class LookupData(vf.TaskData):
    table: dict[str, str]
    """The tool's reply for each key."""
    chain: list[str]
    """The keys to look up, in order; the entry of the last one holds the value."""
    answer: str


class LookupTask(vf.Task[LookupData, LookupState, LookupTaskConfig]):
    @classmethod
    def toolsets(cls, config: LookupTaskConfig) -> list[LookupToolset]:  # ty: ignore[incompatible-method-override]
        return [LookupToolset(config.tools)]

    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @property
    def difficulty(self) -> int:
        """Number of lookups that the task needs, for trainers that take easy tasks first."""
        return len(self.data.chain)

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the last turn calls no tool and is exactly the value, else 0."""
        turns = trace.assistant_messages
        return float(bool(turns) and not turns[-1].tool_calls and trace.last_reply == self.data.answer)

    @vf.metric
    async def lookups(self, trace: vf.Trace) -> dict[str, float]:
        """Counts of what the rollout did; `malformed_calls` did not reach the tool."""
        state = cast(LookupState, trace.state)
        calls = [call for turn in trace.assistant_messages for call in turn.tool_calls or []]
        return {
            "hops": len(self.data.chain),
            "links_followed": state.links_followed,
            "calls": len(calls),
            "repeated_calls": state.repeated_calls,
            "unknown_keys": state.unknown_keys,
            "malformed_calls": sum(not _is_wellformed(call) for call in calls),
            "turns": trace.num_turns,
        }

    def oracle(self) -> list[vf.AssistantMessage]:
        """Return a perfect transcript, which scores 1: one call for each link, then the value."""
        calls = [
            vf.ToolCall(id=f"call_{index}", name="lookup", arguments=json.dumps({"key": key}))
            for index, key in enumerate(self.data.chain)
        ]
        turns = [vf.AssistantMessage(content="", tool_calls=[call]) for call in calls]
        return [*turns, vf.AssistantMessage(content=self.data.answer)]

    def prediction(self, trace: vf.Trace) -> dict[str, Any]:
        """Return the rollout's answer as a JSON row; null if the last turn called a tool or was empty.

        Example: {"id": "lookup-eval-0-17", "answer": "amber"}
        """
        turns = trace.assistant_messages
        replied = bool(turns) and not turns[-1].tool_calls
        return {"id": self.key, "answer": (trace.last_reply or None) if replied else None}


def _is_wellformed(call: vf.ToolCall) -> bool:
    """Whether the call reached the tool: its name is right and its arguments are a JSON object with a key."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    return call.name == "lookup" and isinstance(arguments, dict) and isinstance(arguments.get("key"), str | int)


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):  # ty: ignore[invalid-type-arguments]
    def load(self) -> Iterator[LookupTask]:
        for index in range(self.config.num_examples):
            yield LookupTask(make_data(self.config, index), self.config.task)


def make_data(config: LookupConfig, index: int) -> LookupData:
    """Return task `index` of the config's split: a chain of keys, and a table with the chain's entries and decoys."""
    rng = random.Random(f"{config.seed}/{config.split}/{index}")
    hops = rng.randint(config.min_hops, config.max_hops)
    start = _key(rng)
    while split_of(start) != config.split:
        start = _key(rng)
    keys = [start]
    while len(keys) < config.table_size:
        key = _key(rng)
        if key not in keys:
            keys.append(key)
    chain, decoys = keys[:hops], keys[hops:]
    answer, *others = rng.sample(VALUES[: config.num_values], config.num_values)

    entries = {key: f"next={following}" for key, following in itertools.pairwise(chain)}
    entries[chain[-1]] = f"value={answer}"
    for position, decoy in enumerate(decoys):
        # A decoy points to a later decoy or holds a wrong value, so that a path off the chain always ends.
        following = rng.choice(decoys[position + 1 :]) if position + 1 < len(decoys) and rng.random() < 0.5 else None
        entries[decoy] = f"next={following}" if following else f"value={rng.choice(others)}"
    if config.distractors:
        for key in chain:
            entries[key] += f" (see also: {', '.join(rng.sample(decoys, config.distractors))})"
    table = dict(sorted(entries.items()))
    return LookupData(
        id=f"lookup-{config.split}-{config.seed}-{index}",
        prompt=f"Start key: {start}",
        system_prompt=SYSTEM_PROMPT,
        table=table,
        chain=chain,
        answer=answer,
    )


def _key(rng: random.Random) -> str:
    return str(rng.randint(FIRST_KEY, LAST_KEY))
