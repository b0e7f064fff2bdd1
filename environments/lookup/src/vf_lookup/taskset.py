"""Procedural chain-of-lookups tasks.

The environment exists to tell "multi-step tool use does not learn" from "this dataset does not learn": every call but
the first needs the output of the one before, the reward is exact, and nothing else can go wrong.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Literal, cast

import verifiers.v1 as vf
from pydantic import Field, model_validator

from vf_lookup.tools import LookupState, LookupToolset

SYSTEM_PROMPT = (
    "Look up the start key. Each result gives the next key or the value. "
    "Follow the keys to the value, then reply with the value alone."
)

# Short common words, so that most tokenizers need one token for each.
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


def split_of(start_key: str) -> Literal["train", "eval"]:
    """Which split a task that starts at this key belongs to: a quarter of all keys start evaluation tasks only.

    Decided by the key alone, so that no train task can equal an evaluation task whatever the seeds and sizes.
    """
    return "eval" if sum(map(int, start_key)) % 4 == 0 else "train"


class LookupTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupConfig(vf.TasksetConfig):
    task: LookupTaskConfig = LookupTaskConfig()  # ty: ignore[incompatible-mutable-override]
    split: Literal["train", "eval"] = "train"
    """Train and evaluation tasks are disjoint by construction: they start at different keys."""
    num_examples: int = Field(4096, ge=1)
    """How many tasks; task i is the same whatever this is."""
    seed: int = 0
    """Another seed gives other tasks of the same split."""
    min_hops: int = Field(1, ge=1)
    """The fewest lookups that reach the value."""
    max_hops: int = Field(5, ge=1)
    """The most lookups that reach the value; each number from min_hops on is equally likely."""
    table_size: int = Field(16, ge=2)
    """Entries of the hidden table, those off the chain included."""
    distractors: int = Field(0, ge=0)
    """How many keys off the chain each result mentions besides the next one."""
    num_values: int = Field(len(VALUES), ge=2, le=len(VALUES))
    """How many different values there are to guess from."""

    @model_validator(mode="after")
    def _consistent(self) -> LookupConfig:
        if self.max_hops < self.min_hops:
            raise ValueError(f"max_hops ({self.max_hops}) is less than min_hops ({self.min_hops})")
        if self.table_size < self.max_hops + self.distractors:
            raise ValueError(
                f"table_size ({self.table_size}) cannot hold {self.max_hops} links and {self.distractors} distractors"
            )
        return self


class LookupData(vf.TaskData):
    table: dict[str, str]
    """Key -> the tool's whole reply."""
    chain: list[str]
    """The keys to look up, in order; the last one's entry holds the value."""
    answer: str


class LookupTask(vf.Task[LookupData, LookupState, LookupTaskConfig]):
    @classmethod
    def toolsets(cls, config: LookupTaskConfig) -> list[LookupToolset]:  # ty: ignore[incompatible-method-override]
        return [LookupToolset(config.tools)]

    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the last turn calls no tool and is exactly the value, else 0."""
        turns = trace.assistant_messages
        return float(bool(turns) and not turns[-1].tool_calls and trace.last_reply == self.data.answer)

    @vf.metric
    async def lookups(self, trace: vf.Trace) -> dict[str, float]:
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


def _is_wellformed(call: vf.ToolCall) -> bool:
    """Whether the call reached the tool: its name, and arguments that hold a key."""
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
    """Task `index` of the config's split: a chain of keys, and a table that holds it among decoys."""
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
        # A decoy points to a later decoy or holds a wrong value, so that wandering off the chain ends too.
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
