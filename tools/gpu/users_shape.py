"""`train musique` in the shape of its users' runs: a 7B with LoRA, searches among real paragraphs, long contexts.

    python tools/gpu/shapes.py 7b TOKENIZER_FOLDER /tmp/random-7b
    python tools/gpu/users_shape.py /tmp/random-7b RECORDS.jsonl [--retriever bm25] [--max-steps 3] [more options of train]

Trains on MuSiQue's records, in a step on 6 questions x 8 rollouts. Prints JSON: each step, then medians without the first one.
Real: every prompt and turn is computed over the whole vocabulary, log-probabilities are the model's own, tools, retriever and
rewards are the environment's, and rows are trained on. Forced: *which* token is drawn. Random weights call no tool, and a bundled
policy in a large shape (grow_model.py) knows so few tokens that neither lengths nor the cost of the head would be the users'. So
a script plays each rollout, by random numbers of its own. A turn quotes a paragraph, and searches for a gold sub-question with
that paragraph's title in place of a word, five documents at a time: hardly a query comes twice. When the context has a length
drawn from LENGTHS, the gold answer or a wrong one follows. Ids reach the engine as 1 + id in place of the random numbers that
draw tokens: the GPU does what it always does, and then takes that id. `script` is the time that writing turns takes beside it.

Of the seconds of rollouts: `searching`, while a search was under way; `encoder`, while the retriever's thread worked, of which
`encode_document` and `encode_query` were embedding, each also with the processor's seconds of all threads but the main one;
`engine idle`, while no turn was computed. `a search` is a mean. bm25 has no thread of its own. Contexts: quartiles.
"""

import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from plumbob.retrieval import bm25, encoder, semantic
from plumbob.rollout import Completion, Sampling, runner
from plumbob.rollout.scripted import replies_of_messages, turn_ids
from plumbob.rollout.toolcalls import ParsedCall
from plumbob.trainer.cli.train import main as train
from plumbob.trainer.inference.paged import engine as paged
from plumbob.trainer.inference.paged import forward
from plumbob.trainer.training import steps

LENGTHS = (4000, 7200)  # tokens of a rollout before its last turn
OPTIONS = """--peft --bf16 --engine paged --num-generations 8 --batch-size 6 --gradient-accumulation-steps 8 --max-context 9344
    --eval-examples 0 --save-steps 1000 --retriever hybrid --max-steps 10"""
METRICS = """rollout/turns rollout/sampled_tokens rollout/errored reward/mean train/rows train/microbatch_tokens
    train/out_of_memory sync/sampling_gap memory/peak_gib"""
sums: Any = Counter()  # what was measured in a step
rows: list[dict[str, float]] = []  # what is told of each step


@dataclass(frozen=True)
class Scripted(Sampling):
    script: tuple[int, ...] = ()


class ForcedRequest(paged.PagedRequest):
    def next_uniforms(self, count: int) -> list[float]:
        drawn, start = super().next_uniforms(count), len(self.token_ids)
        forced = getattr(self.sampling, "script", ())[start : start + count]
        return [1.0 + i for i in forced] + drawn[len(forced) :]


def sample(draw: Any, logits: Any, temperature: Any, uniforms: Any) -> Any:
    """Draw as the engine does; where a number stands for an id, take this id with its own log-probability."""
    ids, logprobs = draw(logits, temperature, uniforms % 1)
    wanted = (uniforms - 1).long().where(uniforms >= 1, ids)
    apart = logits.gather(1, wanted[:, None]) - logits.gather(1, ids[:, None])
    return wanted, logprobs + apart[:, 0] / temperature


def play(
    played: Any, plan: Any, driver: Any, slots: Any, engine: Any, chat: Any, sampling: Sampling, *rest: Any
) -> Any:
    """Run a rollout whose turns are those of a script."""
    task = plan.task
    number, oracle = random.Random(sampling.seed), replies_of_messages(task.oracle())
    enough = number.randint(*LENGTHS)

    async def generate(prompt_ids: Any, sampling: Sampling) -> Completion:
        start, reply = time.perf_counter(), oracle[-1]
        if len(prompt_ids) < enough:
            document, search = number.choice(task.data.documents), number.choice(oracle[:-1])
            words = vars(search.calls[0])["arguments"]["query"].split()
            words[number.randrange(len(words))] = document.title
            call = ParsedCall("retrieve_documents", {"query": " ".join(words), "top_k": 5})
            reply = replace(reply, content=" ".join(document.text.split()[: number.randint(20, 80)]), calls=(call,))
        elif number.random() < 0.5:
            reply = replace(reply, content=reply.content.replace("<answer>", "<answer>not "))
        ids = turn_ids(chat, reply, prompt_ids)
        sums["script s"] += time.perf_counter() - start
        return await engine.generate(prompt_ids, Scripted(**vars(sampling), script=tuple(ids)))

    return played(plan, driver, slots, SimpleNamespace(generate=generate), chat, sampling, *rest)


async def searching(search: Any, *args: Any) -> Any:
    start = time.perf_counter()
    hits = await search(*args)
    end = time.perf_counter()
    sums["searching s"] += end - max(start, sums["until"])  # searches end in the order in which they began
    sums.update({"a search s": end - start, "searches": 1, "until": end - sums["until"]})
    return hits


def encoding(function: Any, self: Any, *args: Any) -> Any:
    start, processor, name = time.perf_counter(), other_threads(), getattr(args[0], "__name__", "encoder")
    result = function(self, *args)
    sums.update({f"{name} s": time.perf_counter() - start, f"{name} CPU s": other_threads() - processor})
    sums.update({f"{name} batches": 1, f"{name} texts": len(args[-1])})
    return result


def other_threads() -> float:
    return time.process_time() - time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def take_step(train_step: Any, run: Any, *args: Any) -> Any:
    sums.clear()
    start, busy = time.perf_counter(), run.engine.busy_seconds
    metrics, batch = train_step(run, *args)
    assert sums["script s"], "the rollouts did not follow the script: plumbob.rollout plays them by another function"
    context = sorted(len(row.token_ids) for row in batch.samples)
    row = {"step s": time.perf_counter() - start, **sums, "a search s": sums["a search s"] / max(sums["searches"], 1)}
    row |= {f"{phase} s": metrics[f"time/{phase}"] for phase in ("rollout", "train", "sync")}
    row["engine idle s"] = row["rollout s"] - (run.engine.busy_seconds - busy)
    row |= {f"context at {i}/4": context[i * (len(context) - 1) // 4] for i in range(5)}
    row |= {name: metrics.get(name, 0) for name in METRICS.split()}
    rows.append({name: round(value, 4) for name, value in row.items() if name != "until"})
    print(json.dumps(rows[-1]), flush=True)
    return metrics, batch


def main() -> None:
    model, records, *more = sys.argv[1:]
    os.environ["PLUMBOB_CACHE"] = tempfile.mkdtemp()  # embeddings of an earlier run would be found in the usual one
    for owner, name, new in (
        (forward, "sample", sample), (runner, "_played", play), (steps, "train_step", take_step),
        (semantic.Semantic, "asearch", searching), (bm25.Lexical, "asearch", searching),
        (encoder.Encoder, "_run", encoding), (encoder.Encoder, "_encode", encoding),
    ):  # fmt: skip
        old = getattr(owner, name)
        setattr(owner, name, lambda *args, new=new, old=old, **more: new(old, *args, **more))
    paged.PagedEngine.request_type = ForcedRequest
    sys.argv[1:] = ["musique", "--model", model, "--datasets", records, *OPTIONS.split(), *more]
    try:
        train()
    finally:
        medians = {n: statistics.median(row.get(n, 0) for row in rows[1:] or rows) for row in rows[-1:] for n in row}
        print(json.dumps({"medians": medians}))


if __name__ == "__main__":
    main()
