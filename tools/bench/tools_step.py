"""Measure GRPO steps of three turns with a slow tool: plumbob and TRL, with the same policy, tool, prompts and limits.

    python tools/gpu/grow_model.py tiny 0.5b /tmp/lookup-0.5b
    python tools/bench/tools_step.py /tmp/lookup-0.5b --arms plumbob --steps 6
    python tools/bench/tools_step.py /tmp/lookup-0.5b --arms trl-rollouts --steps 6
    python tools/bench/tools_step.py /tmp/lookup-0.5b --arms trl-tools --steps 2 --limit 590
    python tools/bench/tools_step.py TINY --arms plumbob,trl-tools-transformers --float32 --tool-ms 0 --prompts 16 --engine auto

The task is the environment lookup with two hops, so that a rollout is two calls of `lookup`, each in a turn of its own, and an
answer. The policy is the bundled one in a shape of Qwen2.5 (tools/gpu/grow_model.py), which makes both calls in nearly every
rollout: pretrained models of this size do not. A step has 64 prompts x 8 rollouts of at most three turns, temperature 1. The
tool takes 200 ms (`--tool-ms`), and blocks its thread. Because nearly all rollouts are right, all arms train on rewards of 0 or
1 drawn by lot: plumbob would otherwise leave out most groups, and TRL compute on all of them. The learning rate is so small
(1e-8) that the policy stays what it is, so that every step of every arm has rollouts of the same length.

Arms: `plumbob` is `train lookup --engine auto`. `trl-tools` is TRL's own loop: GRPOTrainer with `environment_factory`, its
form of `tools` for tools with state, and vLLM in its process; the same with transformers' generation is
`trl-tools-transformers`. That loop calls the tools of a step one after the other, also if they are asynchronous: 512 calls
of 200 ms take 102 s, twice in a step. `trl-rollouts` is therefore the fastest loop that we could write for TRL's `rollout_func`:
the same, but all tools of a turn are called at once, in threads. TRL reads calls with its own parser of Qwen's format, and gets
plumbob's chat template with the tool's description as plumbob writes it, so that all prompts have the same token ids
(checked: `same prompt`). `--tool-ms 0` shows what is left without the tool. The last command compares both on a CPU, with the
bundled policy itself; TINY is its folder, which `python -c "from plumbob.trainer.run_files.model_path import *;
print(model_path('tiny'))"` prints.

Printed as JSON lines: see arms.py. Of each step also turns, calls and sampled tokens per rollout, and the share of rollouts
whose answer is right. "GPU busy" is nvidia-smi's utilisation while rollouts are sampled, of all arms; for plumbob also the time
between CUDA events around what the engine queues.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import arms
import trl_arm

ARMS = ("plumbob", "trl-tools", "trl-rollouts", "trl-tools-transformers", "trl-rollouts-transformers")
TURNS = 3
SPLIT = ("min_hops=2", "max_hops=2")
DESCRIPTIONS = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
"""The part of the bundled policies' chat template that describes the tools."""


def plumbob_arm(args: argparse.Namespace) -> arms.Arm:
    rollouts = args.prompts * args.group
    command = [
        *(
            sys.executable,
            str(Path(__file__).with_name("plumbob_arm.py")),
            "lookup",
            "--min-hops",
            "2",
            "--max-hops",
            "2",
        ),
        *("--model", str(args.model), "--engine", args.engine, "--max-steps", str(args.steps)),
        *(() if args.float32 else ("--bf16",)),
        *("--num-generations", str(args.group), "--batch-size", str(args.prompts)),
        *("--gradient-accumulation-steps", str(args.group), "--temperature", str(args.temperature)),
        *("--max-tokens", str(args.tokens), "--max-turns", str(TURNS), "--max-context", str(args.context)),
        *("--max-concurrent", str(rollouts), "--eval-examples", "0", "--trained-reward", "random"),
        *("--save-steps", "1000", "--output-dir", str(args.out)),
        *("--run-name", f"plumbob-{time.time():.0f}", "--slow-tool", str(args.tool_ms / 1e3)),
        *("--learning-rate", str(trl_arm.rate(args)), *(("--peft",) if args.lora else ())),
    ]
    return arms.Arm("plumbob", command, arms.PLUMBOB_STEP, about(args))


def about(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": str(args.model),
        "rollouts": f"{args.prompts} x {args.group} of {TURNS} turns",
        "tool ms": args.tool_ms,
        "trained": "lora" if args.lora else "all weights",
    }


def make_rows(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]:
    """TRL's data set of a run; the tool as plumbob describes it; and the token ids of plumbob's first prompt."""
    from plumbob.rollout import Chat
    from plumbob.rollout.environment_code import Caller
    from plumbob.rollout.verifiers_adapter import open_tools
    from plumbob.rollout.verifiers_messages import new_trace
    from plumbob.trainer.config.train import TrainConfig
    from plumbob.trainer.policy.loading import load_tokenizer
    from plumbob.trainer.rollouts.tasks import load_tasks

    tasks = load_tasks(TrainConfig(env="lookup", env_args=SPLIT, eval_examples=0)).take(0, args.prompts * args.steps)
    rows = []
    for task in tasks:
        data: Any = task.data
        table = json.dumps(data.table)
        asked = {"role": "user", "content": data.prompt, "table": table}  # templates do not read the table
        rows.append(
            {
                "prompt": [{"role": "system", "content": data.system_prompt}, asked],
                "answer": data.answer,
                "table": table,
            }
        )
    tools = asyncio.run(open_tools(tasks[0], new_trace(tasks[0]), (), Caller(10.0))).schemas
    messages = [{k: m[k] for k in ("role", "content")} for m in rows[0]["prompt"]]
    return rows, tools, Chat.of(load_tokenizer(str(args.model))).prompt(messages, tools).token_ids


class Table:
    """The tool of one rollout, as TRL's `environment_factory` takes it."""

    seconds = 0.0

    def reset(self, **row: Any) -> None:
        self._table = json.loads(row["table"])

    def lookup(self, key: str) -> str:
        """Look up a key in the table. Returns the next key or the value.

        Args:
            key: The key.
        """
        time.sleep(self.seconds)
        return self._table.get(str(key), f"unknown key: {key}")


def concurrent_rollouts(reader: Any, workers: int) -> Any:
    """A `rollout_func` for TRL that calls all tools of a turn at once. `reader`: a tokenizer that can parse responses."""
    from trl.chat_template_utils import parse_response

    pool = ThreadPoolExecutor(workers)

    def suffixes(results: list[str]) -> list[list[int]]:
        """What follows a turn with a call: the tool's result and the next turn's header, as the template writes them."""
        opening = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        texts = reader.apply_chat_template(
            [[*opening, {"role": "tool", "content": text}] for text in results],
            tokenize=False,
            add_generation_prompt=True,
        )
        start = texts[0].index(reader.eos_token, texts[0].index("!")) + len(reader.eos_token)
        return reader([text[start:] for text in texts], add_special_tokens=False)["input_ids"]

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tables = [Table() for _ in prompts]
        for table, prompt in zip(tables, prompts, strict=True):
            table.reset(table=prompt[-1]["table"])
        prompt_ids = reader.apply_chat_template(
            prompts, tools=[Table().lookup], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, trainer.num_generations)
        with_logprobs = logprobs is not None
        logprobs = logprobs or [[0.0] * len(x) for x in ids]
        ids, logprobs = [list(x) for x in ids], [list(x) for x in logprobs]
        mask, latest = [[1] * len(x) for x in ids], list(ids)
        active, calls, right = list(range(len(ids))), [0] * len(ids), [""] * len(ids)
        for turn in range(TURNS):
            asked: list[tuple[int, str]] = []
            for i in active:
                reply = parse_response(reader, latest[i], prefix=prompt_ids[i], tools=[Table().lookup])
                wanted = [call["function"] for call in reply.get("tool_calls") or []]
                right[i] = "" if wanted else reply["content"]
                if wanted and turn < TURNS - 1:
                    asked.append((i, str((wanted[0].get("arguments") or {}).get("key"))))
            if not asked:
                break
            results = list(pool.map(lambda one: tables[one[0]].lookup(one[1]), asked))
            active = []
            for (i, _), added in zip(asked, suffixes(results), strict=True):
                calls[i] += 1
                if len(ids[i]) + len(added) < trainer.max_completion_length:
                    ids[i] += added
                    logprobs[i] += [0.0] * len(added)
                    mask[i] += [0] * len(added)
                    active.append(i)
            sampled, more = trainer._generate_single_turn([prompt_ids[i] + ids[i] for i in active], None, {}, 1)
            for j, i in enumerate(active):
                latest[i] = list(sampled[j])[: trainer.max_completion_length - len(ids[i])]
                ids[i] += latest[i]
                logprobs[i] += list(more[j])[: len(latest[i])] if more is not None else [0.0] * len(latest[i])
                mask[i] += [1] * len(latest[i])
        said = [text.removesuffix(reader.eos_token).strip() for text in right]
        out = {"prompt_ids": prompt_ids, "completion_ids": ids, "env_mask": mask, "said": said, "calls": calls}
        return {**out, "logprobs": logprobs if with_logprobs else None}

    return rollouts


def reward(lots: random.Random) -> Any:
    """TRL's reward function: drawn by lot. It prints what the rollouts did."""

    def lot(completions: list[Any], answer: list[str], said: Any = None, calls: Any = None, **_: Any) -> list[float]:
        if said is None:  # TRL's own loop, whose completions are messages
            turns = [[m for m in messages if m["role"] == "assistant"] for messages in completions]
            calls = [sum(m["role"] == "tool" for m in messages) for messages in completions]
            said = ["" if own[-1].get("tool_calls") else own[-1]["content"].strip() for own in turns]
            counts = [len(own) for own in turns]
        else:
            counts = [n + 1 for n in calls]
        n = len(answer)
        right = sum(text == value for text, value in zip(said, answer, strict=True)) / n
        note = {"reward/mean": right, "rollout/turns": sum(counts) / n, "rollout/tool_calls": sum(calls) / n}
        print("NOTE " + json.dumps({name: round(value, 3) for name, value in note.items()}), flush=True)
        return [float(lots.random() < 0.5) for _ in answer]

    return lot


def run_trl(args: argparse.Namespace, name: str) -> None:
    """Train with TRL; prints a line `STEP n reward` at the end of each step."""
    from datasets import Dataset
    from trl import GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    rows, tools, expected = make_rows(args)
    described = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    tokenizer, reader = (trl_arm.tokenizer_of(args.model) for _ in range(2))
    for one in (tokenizer, reader):
        assert DESCRIPTIONS in one.chat_template, "the chat template of the bundled policies is needed"
        one.chat_template = one.chat_template.replace(DESCRIPTIONS, f"{{% raw %}}{described}{{% endraw %}}")
    # TRL sets this by itself for templates that it knows; the calls of the bundled policies have Qwen3's form.
    reader.response_template = qwen3_template
    ids = reader.apply_chat_template(
        rows[0]["prompt"], tools=[Table().lookup], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    print("NOTE " + json.dumps({"same prompt": list(ids) == list(expected), "prompt tokens": len(ids)}), flush=True)
    Table.seconds = args.tool_ms / 1e3
    own_loop = name.startswith("trl-tools")
    rollouts = args.prompts * args.group
    if own_loop:
        how: dict[str, Any] = {"environment_factory": Table, "processing_class": reader}
    else:
        how = {"rollout_func": concurrent_rollouts(reader, rollouts), "processing_class": tokenizer}
    vllm = not name.endswith("transformers")
    more = {"max_tool_calling_iterations": TURNS - 1} if own_loop else {}
    trainer = GRPOTrainer(
        model=str(args.model),
        reward_funcs=reward(random.Random(0)),
        args=trl_arm.grpo_config(args, vllm, rollouts, args.context, **more),
        train_dataset=Dataset.from_list(rows),
        peft_config=trl_arm.lora(args),
        callbacks=[trl_arm.printing()],
        **how,
    )
    trl_arm.announce_rollouts(trainer)
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model that tools/gpu/grow_model.py made of `tiny`")
    parser.add_argument("--arms", default="plumbob,trl-rollouts", help=f"of {', '.join(ARMS)}; separated by commas")
    parser.add_argument("--steps", type=int, default=6, help=f"of which the first {arms.WARM_UP} are not counted")
    parser.add_argument("--tool-ms", type=float, default=200.0, help="milliseconds that the tool takes")
    parser.add_argument("--prompts", type=int, default=64, help="tasks of a step")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a task")
    parser.add_argument(
        "--tokens", type=int, default=256, help="most tokens of a turn; TRL: of a completion with its tools"
    )
    parser.add_argument("--context", type=int, default=512, help="most tokens of a rollout")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--engine", default="auto", help="of the arm plumbob")
    trl_arm.add_options(parser)
    parser.set_defaults(rate=1e-8)
    arms.add_options(parser, "/tmp/tools_step")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only:
        run_trl(args, args.only)
        return
    chosen = []
    for name in args.arms.split(","):
        if name not in ARMS:
            parser.error(f"{name!r} is not one of {', '.join(ARMS)}")
        own = name == "plumbob"
        chosen.append(plumbob_arm(args) if own else arms.Arm(name, arms.itself(name), arms.TRL_STEP, about(args)))
    arms.run_arms(chosen, args.out, args.gpus, args.limit)


if __name__ == "__main__":
    main()
