"""Measure the CPU time of a rollout's turn outside the model: plumbob.rollout against verifiers' own in-process paths.

    uv run python tools/bench/rollout_overhead.py [--rollouts 200] [--group-size 8] [--concurrency 64] [--repeats 3]
                                                  [--json]

Three paths play the same vf-lookup tasks in one process: three turns (call, call, answer), one tool, the same reward
and metrics; each task is rolled out --group-size times, as in GRPO. The model is a script that costs nothing and yields
to the event loop once, as any engine does. All paths render and parse with the same code (`plumbob.rollout.Chat`),
whose cache is emptied before each repeat, so they differ only in what surrounds a turn. After every repeat the bench
asserts that each rollout took three turns and has reward 1 and its own tool state, and that the traces of all paths
have the same ids, loss mask and log-probabilities.

The path "plumbob" calls `run_rollout(task, engine, chat)`.

The path "verifiers (as documented)" is its single-agent Env as `load_environment` makes it, with one `Env.run_slot` per
rollout. So each rollout has its own `SubprocessConfig` box (a directory that is made and removed; no process is
started) and is wrapped in an episode.
- The harness runs in this process, which verifiers allows ("the interception is the contract, not the process"); the
  harness `null` starts a process per rollout. It calls the model through the OpenAI SDK without streaming, as the
  `browser_use` program does. One SDK client serves all rollouts, each with its own secret; a program makes a client of
  its own, which costs more.
- The harness calls the toolset's method directly. A task that declares its toolset gets an MCP server process per
  rollout, so these tasks declare none.
- The interception is one server (config type `server`); verifiers' default is a pool with one server for each 32
  rollouts in flight.
- The server's client answers from the script. It is put where the Env's own server (`env._interception`) keeps its
  clients, because verifiers has no way to register one. TrainClient would add HTTP requests to a model, and a thread
  for each rendering.

The path "verifiers (leanest)" is the least that still is verifiers' path. It differs from "as documented" in three
ways: `Agent.run` without an Env, so there is no episode; one box that all rollouts share; and model calls with aiohttp,
which is cheaper than the SDK.

CPU time is `time.process_time`: user and system time of all threads of this process, without child processes (no timed
repeat starts any). Each number is the median over the repeats. The paths alternate, and one untimed repeat of each
comes first. The ratios are ratios of CPU time per turn.

Part of verifiers' time could be saved without a change to verifiers: to fill a default, pydantic 2.14's
`model_construct` inspects the factory's signature each time, which copies `sys.modules` if the factory is `list`. A
pydantic that caches the signature would lower the ratios.
"""

# ruff: noqa: E402 (the version check stands before the imports that need the version)

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, ClassVar

LOCKED = "0.4."
INSTALLED = next((found.version for found in distributions(name="verifiers")), "none")
if not INSTALLED.startswith(LOCKED):
    print(f"This bench needs verifiers {LOCKED}x and found {INSTALLED}; run `uv sync` first.", file=sys.stderr)
    raise SystemExit(2)

import aiohttp
import openai
import verifiers.v1 as vf
from plumbob.rollout import Chat, Completion, Sampling, run_rollout
from plumbob.rollout.verifiers_adapter import new_trace, open_tools
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.interception import InterceptionServer, InterceptionServerConfig
from vf_lookup import LookupTaskset
from vf_lookup.taskset import LookupConfig, LookupTask
from vf_lookup.tools import LookupToolset

__all__ = ["InProcessHarness", "UnservedTaskset"]  # verifiers looks for a plugin's classes in its module's `__all__`

DOCUMENTED, LEANEST, PLUMBOB = "verifiers (as documented)", "verifiers (leanest)", "plumbob"
TURNS = 3
TOKENIZER = Path(__file__).resolve().parents[2] / "trainer/src/plumbob/trainer/bundled_models/tiny"

Scripts = dict[str, list[Completion]]
"""Task id -> the completions of each rollout of the task, turn by turn."""

Pass = Callable[[], Awaitable[list[vf.Trace]]]
"""Plays all rollouts once; the traces are in the order of the tasks, with the rollouts of a task next to each other."""

ENDPOINT = vf.TrainClientConfig(base_url="http://scripted.invalid/v1", api_key_var="NO_KEY")
"""The model's configuration for verifiers; a server keeps its clients under this key."""


class ScriptedEngine:
    """The scripted model for plumbob: answers with one rollout's completions, in order."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = iter(completions)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        return next(self.completions)


class ScriptedClient(vf.Client):
    """The scripted model for verifiers: what its TrainClient does, with the script in place of the HTTP call."""

    def __init__(self, chat: Chat, scripts: Scripts) -> None:
        self.chat, self.scripts = chat, scripts

    async def get_response(
        self, dialect: Any, body: dict, sampling: Any, session_id: Any = None, turn: Any = None, headers: Any = None
    ) -> vf.Response:
        messages = body["messages"]
        if previous := turn.previous_renderer_token_ids():
            before = [*previous[0], *previous[1]]
            rendered = self.chat.suffix(messages[turn.tail_start :])
        else:
            before = []
            rendered = self.chat.prompt(messages, body["tools"])
        prompt_ids = before + rendered.token_ids
        ends = [len(before) + end for end in rendered.ends]
        spans = [None] * turn.tail_start + list(zip([len(before), *ends], ends, strict=False))

        await asyncio.sleep(0)
        number = sum(message["role"] == "assistant" for message in messages)
        completion = self.scripts[turn.trace.task.data.id][number]
        reasoning, reply = self.chat.parse(completion.token_ids, body["tools"])
        calls = [
            vf.ToolCall(id=f"call_{number}_{i}", name=call.name, arguments=json.dumps(call.arguments))
            for i, call in enumerate(reply.calls)
        ]
        response = vf.Response(
            id="",
            created=0,
            model=body["model"],
            message=vf.AssistantMessage(content=reply.content, reasoning_content=reasoning, tool_calls=calls or None),
            finish_reason="tool_calls" if calls else completion.finish_reason,
            usage=vf.Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(completion.token_ids)),
            tokens=vf.TurnTokens.model_construct(
                prompt_ids=prompt_ids,
                completion_ids=list(completion.token_ids),
                completion_logprobs=list(completion.logprobs),
                bridged=bool(before),
                message_spans=spans,
                is_content=[False] * len(before) + rendered.is_content,
            ),
        )
        response.raw = serialize_completion(response, body["model"])
        return response


class InProcessHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop in this process: the interception server answers model calls, the toolset's method tool calls."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    # Attributes of the class, because verifiers makes a new harness for each episode.
    tools: ClassVar[list[dict[str, Any]]]
    client: ClassVar[openai.AsyncOpenAI]

    async def post(self, endpoint: str, headers: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        """Call the model once and return the assistant's message."""
        completion = await self.client.chat.completions.create(**body, extra_headers=headers)
        return completion.choices[0].message.model_dump(exclude_none=True)

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        toolset = LookupToolset(vf.ToolsetConfig())
        await toolset.setup_task(data)
        trace.state = toolset.state
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": ctx.model, "messages": messages, "tools": self.tools}
            message = await self.post(endpoint, headers, body)
            messages.append(message)
            if not message.get("tool_calls"):
                return vf.ProgramResult(exit_code=0, stdout="", stderr="")
            for call in message["tool_calls"]:
                function = call["function"]
                result = toolset.lookup(**json.loads(function["arguments"]))
                tool = {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": result}
                messages.append(tool)


class LeanHarness(InProcessHarness):
    """The in-process harness with aiohttp and kept-alive connections in place of the OpenAI SDK."""

    http: ClassVar[aiohttp.ClientSession]

    async def post(self, endpoint: str, headers: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        async with self.http.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
            answer = await response.read()
        if response.status != 200:
            raise RuntimeError(answer.decode())
        return json.loads(answer)["choices"][0]["message"]


class UnservedTask(LookupTask):
    """A lookup task without declared toolsets: verifiers would start an MCP server process for each of them."""

    @classmethod
    def toolsets(cls, config: Any) -> list[vf.Toolset]:
        return []


class UnservedTaskset(vf.Taskset[UnservedTask, LookupConfig]):
    def load(self) -> Iterator[UnservedTask]:
        return (UnservedTask(task.data, task.config) for task in LookupTaskset(self.config))


@dataclass(frozen=True)
class Bench:
    """The tasks and scripts that all paths play."""

    config: LookupConfig
    group_size: int
    concurrency: int
    tasks: list[LookupTask]
    chat: Chat
    scripts: Scripts

    @classmethod
    def make(cls, rollouts: int, group_size: int, concurrency: int) -> Bench:
        hops = TURNS - 1
        config = LookupConfig(id=__name__, num_examples=rollouts // group_size, min_hops=hops, max_hops=hops)
        tasks = list(LookupTaskset(config))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
        scripts = {task.data.id: script(tokenizer, task) for task in tasks}
        return cls(config, group_size, concurrency, tasks, Chat.of(tokenizer), scripts)

    def grouped(self, tasks: Sequence[Any]) -> list[Any]:
        """`tasks` with each entry repeated once per rollout of its group."""
        return [task for task in tasks for _ in range(self.group_size)]

    async def gather(self, rollout: Callable[[Any], Awaitable[vf.Trace]], tasks: Sequence[vf.Task]) -> list[vf.Trace]:
        """Roll out every task `group_size` times, at most `concurrency` rollouts at once."""
        slots = asyncio.Semaphore(self.concurrency)

        async def one(task: vf.Task) -> vf.Trace:
            async with slots:
                return await rollout(task)

        return await asyncio.gather(*map(one, self.grouped(tasks)))


def script(tokenizer: Any, task: LookupTask) -> list[Completion]:
    """The completions of a perfect rollout of `task`."""
    calls = [json.dumps({"name": "lookup", "arguments": {"key": key}}) for key in task.data.chain]
    texts = [*(f"<tool_call>{call}</tool_call>" for call in calls), task.data.answer]
    rows = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in texts]
    return [Completion(tuple(ids), tuple(-0.01 * i for i in range(len(ids))), "stop") for ids in rows]


def plumbob_path(bench: Bench) -> Pass:
    def rollout(task: vf.Task) -> Awaitable[vf.Trace]:
        return run_rollout(task, ScriptedEngine(bench.scripts[task.data.id]), bench.chat)

    return lambda: bench.gather(rollout, bench.tasks)


@asynccontextmanager
async def documented_path(bench: Bench) -> AsyncIterator[Pass]:
    agent = vf.AgentConfig(
        runtime=vf.SubprocessConfig()
    )  # verifiers takes the harness that the taskset's module exports
    env = vf.load_environment(
        vf.SingleAgentEnvConfig(taskset=bench.config, agent=agent, interception=InterceptionServerConfig())
    )
    tasks, context = list(env.taskset), vf.ModelContext("scripted", ENDPOINT)

    async def play() -> list[vf.Trace]:
        semaphore = asyncio.Semaphore(bench.concurrency)
        slots = [slot for task in tasks for slot in env.slots(task, bench.group_size)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context, semaphore) for slot in slots))
        for episode in episodes:
            assert not episode.errors, f"{DOCUMENTED}: {episode.errors}"
        return [trace for episode in episodes for trace in episode.traces]

    async with env.serving():
        server = env._interception
        server.clients[ENDPOINT.model_dump_json()] = ScriptedClient(bench.chat, bench.scripts)
        async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="each rollout's own") as client:
            InProcessHarness.client = client
            yield play


@asynccontextmanager
async def leanest_path(bench: Bench) -> AsyncIterator[Pass]:
    tasks = [UnservedTask(task.data, task.config) for task in bench.tasks]
    config = vf.AgentConfig(harness={"id": __name__}, runtime=vf.SubprocessConfig(), model="scripted", client=ENDPOINT)
    async with InterceptionServer() as server, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        server.clients[ENDPOINT.model_dump_json()] = ScriptedClient(bench.chat, bench.scripts)
        LeanHarness.http = http
        agent = vf.make_agent(config, interception=server)
        agent.harness = LeanHarness(agent.harness.config)
        async with agent.provision() as box:
            yield lambda: bench.gather(lambda task: agent.run(task, runtime=box), tasks)


async def timed(bench: Bench, path: Pass) -> tuple[float, float, list[vf.Trace]]:
    """(CPU seconds, wall seconds, traces) of playing all rollouts once."""
    # A training step has new tasks, so nothing is cached when the first rollout of a group renders the prompt.
    bench.chat._memory.clear()
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    traces = await path()
    return time.process_time() - cpu, time.perf_counter() - wall, traces


def check(bench: Bench, name: str, traces: list[vf.Trace]) -> list[tuple]:
    """Assert that every rollout did all of its work; returns its row, to be compared with those of other paths."""
    rows = []
    for task, trace in zip(bench.grouped(bench.tasks), traces, strict=True):
        assert trace.ok and trace.reward == 1.0, f"{name}: {task.data.id} failed: {trace.errors or trace.rewards}"
        assert trace.num_turns == TURNS, f"{name}: {task.data.id} took {trace.num_turns} turns, not {TURNS}"
        state = (trace.metrics["links_followed"], trace.metrics["repeated_calls"])
        assert state == (TURNS - 1, 0), f"{name}: {task.data.id} did not reach a tool state of its own"
        [branch] = trace.branches
        sampled = [token for token, own in zip(branch.token_ids, branch.sampled_mask, strict=True) if own]
        scripted = [token for completion in bench.scripts[task.data.id] for token in completion.token_ids]
        assert sampled == scripted, f"{name}: {task.data.id} does not carry the sampled ids"
        rows.append((branch.token_ids, branch.sampled_mask, branch.logprobs))
    return rows


async def run(bench: Bench, repeats: int) -> dict[str, dict[str, float]]:
    """Path -> number of rollouts and turns, and median CPU and wall milliseconds per turn."""
    # `open_tools` runs in an asyncio task of its own: it leaves state in the context, which the harness's toolsets
    # would find.
    box = await asyncio.create_task(open_tools(bench.tasks[0], new_trace(bench.tasks[0])))
    InProcessHarness.tools = box.schemas
    async with documented_path(bench) as documented, leanest_path(bench) as leanest:
        paths = {DOCUMENTED: documented, LEANEST: leanest, PLUMBOB: plumbob_path(bench)}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
        for repeat in range(repeats + 1):  # the first repeat is the warm-up
            rows = {}
            for name, path in paths.items():
                cpu, wall, traces = await timed(bench, path)
                rows[name] = check(bench, name, traces)
                if repeat:
                    times[name].append((cpu, wall))
            assert rows[DOCUMENTED] == rows[LEANEST] == rows[PLUMBOB], "the paths' traces differ"
    results, rollouts = {}, len(rows[PLUMBOB])
    turns = rollouts * TURNS
    for name, passes in times.items():
        cpu, wall = (1000 * statistics.median(column) / turns for column in zip(*passes, strict=True))
        results[name] = {"rollouts": rollouts, "turns": turns, "cpu_ms_per_turn": cpu, "wall_ms_per_turn": wall}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200, help="rollouts of each path in one repeat")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of each task")
    parser.add_argument("--concurrency", type=int, default=64, help="rollouts that run at the same time")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats, of which the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args = parser.parse_args()
    if min(args.group_size, args.concurrency, args.repeats) < 1:
        parser.error("--group-size, --concurrency and --repeats must be at least 1")
    if args.rollouts < args.group_size:
        parser.error("--rollouts must be at least --group-size")
    if not TOKENIZER.is_dir():
        parser.error(f"there is no tokenizer in {TOKENIZER}; make it with `uv run python tools/make_tiny_policy.py`")
    paths = asyncio.run(run(Bench.make(args.rollouts, args.group_size, args.concurrency), args.repeats))
    documented, leanest = (
        paths[name]["cpu_ms_per_turn"] / paths[PLUMBOB]["cpu_ms_per_turn"] for name in (DOCUMENTED, LEANEST)
    )
    if args.json:
        print(json.dumps({**vars(args), "paths": paths, "ratios": {DOCUMENTED: documented, LEANEST: leanest}}))
        return
    print(f"{'path':25} {'rollouts':>8} {'turns':>6} {'CPU ms/turn':>12} {'wall ms/turn':>13}")
    for name, row in paths.items():
        cpu, wall = row["cpu_ms_per_turn"], row["wall_ms_per_turn"]
        print(f"{name:25} {row['rollouts']:8} {row['turns']:6} {cpu:12.2f} {wall:13.2f}")
    print(f"ratio: verifiers as documented / plumbob = {documented:.1f}")
    print(f"ratio: verifiers leanest / plumbob = {leanest:.1f}")


if __name__ == "__main__":
    main()
