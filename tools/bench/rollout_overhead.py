"""What one turn of a rollout costs around the model: plumbob.rollout against verifiers' own in-process path.

    uv run python tools/bench/rollout_overhead.py [--rollouts 200] [--concurrency 64] [--repeats 3] [--json]

Both play the same vf-lookup tasks in this process: three turns (call, call, answer), one tool, the same reward and
metrics. The model is a script that costs nothing and yields to the event loop once, as any engine does. Both render
and parse with the same code (`plumbob.rollout.Chat`), so the difference is what surrounds a turn. After every pass the
bench asserts that each rollout took three turns and has reward 1, and that both paths' traces carry the same ids, loss
mask and log-probabilities.

plumbob: `run_rollout(task, engine, chat)`.

verifiers: `Agent.run` on one shared `InterceptionServer`, the leanest form that is still verifiers' path:
- the harness runs in this process, as verifiers allows ("the interception is the contract, not the process"), and posts
  model calls to the server over keep-alive aiohttp, which is cheaper than httpx. `null` starts a process per rollout;
- it calls the toolset's method directly. A task that declares its toolset gets an MCP server process per rollout, so
  this path's tasks declare none;
- the runtime is one `SubprocessConfig` box, a directory that starts nothing and that all rollouts borrow;
- the client answers from the script. TrainClient would add HTTP to a model, and a thread for each rendering;
- `Env.run_slot`, which wraps each run in an episode, is left out.

CPU time is `time.process_time`: user and system time of all threads of this process, children excluded (neither path
starts any). Each figure is the median over the repeats; the paths take turns, and one untimed pass of each comes first.

Most of verifiers' share is one thing: to fill a default, pydantic 2.14's `model_construct` inspects the factory's
signature, and for `list` that copies `sys.modules`. A pydantic that remembers it would lower the ratio.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

LOCKED = "0.4."
INSTALLED = next((found.version for found in distributions(name="verifiers")), "none")
if not INSTALLED.startswith(LOCKED):
    print(f"This bench reaches into verifiers {LOCKED}x and found {INSTALLED}; run `uv sync` first.", file=sys.stderr)
    raise SystemExit(2)

import aiohttp
import verifiers.v1 as vf
from plumbob.rollout import Chat, Completion, Sampling, run_rollout
from plumbob.rollout.verifiers_adapter import new_trace, open_tools
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.interception import InterceptionServer
from vf_lookup import LookupTaskset
from vf_lookup.taskset import LookupConfig, LookupTask
from vf_lookup.tools import LookupToolset

__all__ = ["InProcessHarness"]  # verifiers finds a harness through its module's `__all__`

TURNS = 3
TOKENIZER = Path(__file__).resolve().parents[2] / "trainer/src/plumbob/trainer/policies/tiny"

Scripts = dict[str, list[Completion]]
"""Task id -> the completions of its rollout."""

Pass = Callable[[], Awaitable[list[vf.Trace]]]
"""All rollouts once, in the tasks' order."""


class ScriptedEngine:
    """plumbob's side of the model: one rollout's completions, in order."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.completions = iter(completions)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        return next(self.completions)


class ScriptedClient(vf.Client):
    """verifiers' side of the model: what its TrainClient does, with the script in place of the HTTP call."""

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
        reasoning, reply = self.chat.parse(completion.token_ids, has_tools=True)
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
    """A chat loop in this process: model calls go to the interception server, tool calls to the toolset's method."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    http: aiohttp.ClientSession
    tools: list[dict[str, Any]]

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        toolset = LookupToolset(vf.ToolsetConfig())
        await toolset.setup_task(data)
        trace.state = toolset.state
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        url, headers = f"{endpoint}/chat/completions", {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": ctx.model, "messages": messages, "tools": self.tools}
            async with self.http.post(url, json=body, headers=headers) as response:
                answer = await response.read()
            if response.status != 200:
                return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.decode())
            message = json.loads(answer)["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return vf.ProgramResult(exit_code=0, stdout="", stderr="")
            for call in message["tool_calls"]:
                function = call["function"]
                result = toolset.lookup(**json.loads(function["arguments"]))
                tool = {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": result}
                messages.append(tool)


class UnservedTask(LookupTask):
    """The same task for verifiers, which would start an MCP server process for each toolset it declares."""

    @classmethod
    def toolsets(cls, config: Any) -> list[vf.Toolset]:
        return []


@dataclass(frozen=True)
class Bench:
    """What both paths play."""

    tasks: list[LookupTask]
    chat: Chat
    scripts: Scripts
    concurrency: int

    @classmethod
    def make(cls, rollouts: int, concurrency: int) -> Bench:
        hops = TURNS - 1
        config = LookupConfig(id="vf_lookup", num_examples=rollouts, min_hops=hops, max_hops=hops)
        tasks = list(LookupTaskset(config))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
        return cls(tasks, Chat.of(tokenizer), {task.data.id: script(tokenizer, task) for task in tasks}, concurrency)

    async def gather(self, rollout: Callable[[Any], Awaitable[vf.Trace]], tasks: Sequence[vf.Task]) -> list[vf.Trace]:
        slots = asyncio.Semaphore(self.concurrency)

        async def one(task: vf.Task) -> vf.Trace:
            async with slots:
                return await rollout(task)

        return await asyncio.gather(*map(one, tasks))


def script(tokenizer: Any, task: LookupTask) -> list[Completion]:
    calls = [json.dumps({"name": "lookup", "arguments": {"key": key}}) for key in task.data.chain]
    texts = [*(f"<tool_call>{call}</tool_call>" for call in calls), task.data.answer]
    rows = [tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in texts]
    return [Completion(tuple(ids), tuple(-0.01 * i for i in range(len(ids))), "stop") for ids in rows]


def plumbob_path(bench: Bench) -> Pass:
    def rollout(task: vf.Task) -> Awaitable[vf.Trace]:
        return run_rollout(task, ScriptedEngine(bench.scripts[task.data.id]), bench.chat)

    return lambda: bench.gather(rollout, bench.tasks)


@asynccontextmanager
async def verifiers_path(bench: Bench) -> AsyncIterator[Pass]:
    tasks = [UnservedTask(task.data, task.config) for task in bench.tasks]
    endpoint = vf.TrainClientConfig(base_url="http://scripted.invalid/v1", api_key_var="NO_KEY")
    config = vf.AgentConfig(harness={"id": __name__}, runtime=vf.SubprocessConfig(), model="scripted", client=endpoint)
    async with InterceptionServer() as server, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        # verifiers has no way to register a client: this is where the server keeps the one of each endpoint.
        server.clients[endpoint.model_dump_json()] = ScriptedClient(bench.chat, bench.scripts)
        agent = vf.make_agent(config, interception=server)
        agent.harness.http = http
        agent.harness.tools = (await open_tools(bench.tasks[0], new_trace(bench.tasks[0]))).schemas
        async with agent.provision() as box:
            yield lambda: bench.gather(lambda task: agent.run(task, runtime=box), tasks)


async def timed(path: Pass) -> tuple[float, float, list[vf.Trace]]:
    """CPU and wall seconds of one pass."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    traces = await path()
    return time.process_time() - cpu, time.perf_counter() - wall, traces


def check(bench: Bench, name: str, traces: list[vf.Trace]) -> list[tuple]:
    """Every rollout must have done the whole work; returns its rows, for comparison with the other path's."""
    rows = []
    for task, trace in zip(bench.tasks, traces, strict=True):
        assert trace.ok and trace.reward == 1.0, f"{name}: {task.data.id} failed: {trace.errors or trace.rewards}"
        assert trace.num_turns == TURNS, f"{name}: {task.data.id} took {trace.num_turns} turns, not {TURNS}"
        assert trace.metrics["links_followed"] == TURNS - 1, f"{name}: {task.data.id} did not reach the tool's state"
        [branch] = trace.branches
        sampled = [token for token, own in zip(branch.token_ids, branch.sampled_mask, strict=True) if own]
        scripted = [token for completion in bench.scripts[task.data.id] for token in completion.token_ids]
        assert sampled == scripted, f"{name}: {task.data.id} does not carry the sampled ids"
        rows.append((branch.token_ids, branch.sampled_mask, branch.logprobs))
    return rows


async def run(bench: Bench, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds per turn of each path."""
    times: dict[str, list[tuple[float, float]]] = {"verifiers": [], "plumbob": []}
    async with verifiers_path(bench) as theirs:
        for repeat in range(repeats + 1):  # the first pass warms up
            rows = {}
            for name, path in (("verifiers", theirs), ("plumbob", plumbob_path(bench))):
                cpu, wall, traces = await timed(path)
                rows[name] = check(bench, name, traces)
                if repeat:
                    times[name].append((cpu, wall))
            assert rows["verifiers"] == rows["plumbob"], "the two paths' traces differ"
    results, turns = {}, len(bench.tasks) * TURNS
    for name, passes in times.items():
        cpu, wall = (1000 * statistics.median(column) / turns for column in zip(*passes, strict=True))
        results[name] = {"rollouts": len(bench.tasks), "turns": turns, "cpu_ms_per_turn": cpu, "wall_ms_per_turn": wall}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=64, help="rollouts in flight at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if min(args.rollouts, args.concurrency, args.repeats) < 1:
        parser.error("--rollouts, --concurrency and --repeats must be at least 1")
    if not TOKENIZER.is_dir():
        parser.error(f"there is no tokenizer in {TOKENIZER}; make it with `uv run python tools/make_tiny_policy.py`")
    paths = asyncio.run(run(Bench.make(args.rollouts, args.concurrency), args.repeats))
    ratio = paths["verifiers"]["cpu_ms_per_turn"] / paths["plumbob"]["cpu_ms_per_turn"]
    if args.json:
        print(json.dumps({**vars(args), "paths": paths, "ratio": ratio}))
        return
    print(f"{'path':10} {'rollouts':>8} {'turns':>6} {'CPU ms/turn':>12} {'wall ms/turn':>13}")
    for name, row in paths.items():
        cpu, wall = row["cpu_ms_per_turn"], row["wall_ms_per_turn"]
        print(f"{name:10} {row['rollouts']:8} {row['turns']:6} {cpu:12.2f} {wall:13.2f}")
    print(f"ratio: verifiers / plumbob = {ratio:.1f} (CPU time per turn)")


if __name__ == "__main__":
    main()
