"""Make the bundled tiny policy from scratch: its own tokenizer, generated transcripts, random initial weights.

    uv run python tools/make_tiny_policy.py            # writes trainer/src/plumbob/trainer/bundled_models/tiny

make_tiny_gsm8k.py and make_tiny_musique.py make the other two bundled policies and import their shared functions from
here.

The transcripts come from a demonstrator that can solve vf-lookup but is lazy in a systematic way: the longer a chain
gets, the likelier it gives up. A policy that learns from them is a useful baseline: it solves about half of the tasks,
greedy or sampled. On the other half it decides to give up, and lacks no skill. Reinforcement learning can correct a
decision within a few steps, but could not teach a skill in so short a time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from plumbob.rollout import Chat, Completion, Engine, Limits, Sample, Sampling, run_rollout, to_sample
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from vf_lookup import LookupTaskset
from vf_lookup.taskset import VALUES, LookupConfig

OUT = Path(__file__).resolve().parents[1] / "trainer/src/plumbob/trainer/bundled_models/tiny"

# Links followed so far -> probability of giving up, with the reply SURRENDER, although the last result is a further
# key.
GIVE_UP = {1: 0.0, 2: 0.3, 3: 0.65, 4: 0.6}
SURRENDER = "unknown"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and tools -%}
<|im_start|>system
{% if message.role == 'system' %}{{ message.content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call a tool, write <tool_call>{"name": name, "arguments": {...}}</tool_call><|im_end|>
{% endif -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}<|im_start|>user
{% endif -%}
<tool_response>{{ message.content }}</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' -%}<|im_end|>
{% endif -%}
{%- elif not (loop.first and tools and message.role == 'system') -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


WORDS = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
"""Pieces of text that no merge crosses. Each digit is a token of its own, because keys are copied digit by digit."""


def train_tokenizer(texts: list[str], vocab_size: int, words: str = WORDS) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, which can encode any text. `words`: regex of the pieces that no merge crosses."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKERS),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class Demonstrator:
    """An engine that reads the conversation as text and writes the next turn, or gives up (see `GIVE_UP`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        rng = random.Random(sampling.seed)
        text = self.tokenizer.decode(prompt_ids)
        responses = re.findall(r"<tool_response>(.*?)</tool_response>", text)
        if not responses:
            reply = call(re.search(r"Start key: (\d+)", text)[1])
        elif value := re.fullmatch(r"value=(\w+)", responses[-1]):
            reply = value[1]
        elif rng.random() < GIVE_UP[len(responses)]:
            reply = SURRENDER
        else:
            reply = call(re.fullmatch(r"next=(\d+)", responses[-1])[1])
        ids = self.tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        return Completion(tuple(ids), (0.0,) * len(ids), "stop")


def call(key: str) -> str:
    """The text of a tool call that looks up `key`."""
    return f"<tool_call>{json.dumps({'name': 'lookup', 'arguments': {'key': key}})}</tool_call>"


async def demonstrate(tokenizer: PreTrainedTokenizerFast, engine: Engine, tasks: list, seed: int) -> list[Sample]:
    """Roll out each task once in the real environment, with `engine` (a demonstrator) in place of a model."""
    chat = Chat.of(tokenizer)
    samples = []
    for start in range(0, len(tasks), 512):
        batch = enumerate(tasks[start : start + 512], start)
        traces = await asyncio.gather(
            *(run_rollout(task, engine, chat, Sampling(seed=seed * 1_000_003 + i), Limits()) for i, task in batch)
        )
        samples += [to_sample(trace, trace.id) for trace in traces]
    return samples


def corpus(tasks: list) -> list[str]:
    """The texts that the tokenizer's merges are learned from: what the policy reads and writes, without markers."""
    schema = (
        '{"type": "function", "function": {"name": "lookup", "description": "Look up a key in the table. Returns the '
        'next key or the value.", "parameters": {"properties": {"key": {"title": "Key", "type": "string"}}, "required": '
        '["key"], "title": "lookupArguments", "type": "object"}}}'
    )
    words = [form for value in VALUES for form in (value, f"value={value}")]
    prose = "# Tools\nsystem\nuser\nassistant\ntool\nunknown unknown key: next= To call a tool, write "
    prose += '{"name": name, "arguments": {...}}'
    rows = [f"{task.data.system_prompt}\n{task.data.prompt}\n{call('1')[11:-12]}\n{prose}" for task in tasks]
    return rows + [schema] * len(tasks) + words * len(tasks)


def batches(samples: list[Sample], size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of rows in random order: ids [B, T] and labels [B, T], which are -100 where no token is to be predicted.

    Rows are not sorted by length: a transcript's length reveals its outcome, so the last few batches would bias the
    policy's decisions.
    """
    order = random.Random(seed).sample(range(len(samples)), len(samples))
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    for group in groups:
        width = max(len(samples[i].token_ids) for i in group)
        ids = torch.zeros(len(group), width, dtype=torch.long)
        labels = torch.full((len(group), width), -100)
        for row, i in enumerate(group):
            tokens, mask = torch.tensor(samples[i].token_ids), torch.tensor(samples[i].loss_mask)
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = torch.where(mask, tokens, -100)
        yield ids, labels


def exchanges(samples: list[Sample]) -> list[Sample]:
    """Each tool result of the successful transcripts with the reply to it, without the context before them.

    In a row of twenty ids a small model quickly learns which one to copy; in a row of two hundred it may never learn
    it.
    """
    cut = []
    for sample in (s for s in samples if s.reward == 1):
        mask = sample.loss_mask
        ends = [t + 1 for t in range(len(mask)) if mask[t] and not (t + 1 < len(mask) and mask[t + 1])]
        cut += [
            replace(sample, token_ids=sample.token_ids[a:b], loss_mask=mask[a:b], sampling_logprobs=[0.0] * (b - a))
            for a, b in itertools.pairwise(ends)
        ]
    return cut


def without_system(samples: list[Sample], start: int) -> list[Sample]:
    """The transcripts without their system message: short rows are learned faster. `start`: id that begins a message."""
    cut = []
    for sample in samples:
        a = sample.token_ids.index(start, 1)
        rest = {name: getattr(sample, name)[a:] for name in ("token_ids", "loss_mask", "sampling_logprobs")}
        cut.append(replace(sample, **rest))
    return cut


def copying_rows(vocab_size: int, count: int, size: int, seed: int):
    """`count` batches of `size` rows of random ids that repeat: a model that can copy predicts every repetition.

    Copying from context is the only hard part of lookup for a small model, and transcripts alone teach it slowly,
    because few of their ids are copies. These batches alternate with those of the short lessons, step by step. When the
    lessons followed one another instead, some seeds learned to copy keys and never learned to copy the value.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        period = int(torch.randint(6, 32, (1,), generator=generator))
        ids = torch.randint(vocab_size, (size, period), generator=generator).repeat(1, 96 // period)
        labels = ids.clone()
        labels[:, :period] = -100
        yield ids, labels


def learn(
    model: Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    name: str,
    lesson: Iterator[tuple[torch.Tensor, torch.Tensor]],
    rate: Callable[[int], float],
    until: float = 0.0,
) -> None:
    """Train on the batches of `lesson`, until they end or the mean loss of 20 steps falls below `until`.

    `rate(step)` is the learning rate of a step, from 1. The loss falls suddenly, after a plateau whose length depends
    on the seed. So a lesson with `until` ends when it is learned; if it never is, the program ends with an error
    (SystemExit).
    """
    start, recent = time.time(), deque(maxlen=20)
    for step, (ids, labels) in enumerate(lesson, 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        # No attention mask is needed: padding comes after every real token, so the causal mask hides it.
        loss = model(input_ids=ids.to(model.device), labels=labels.to(model.device)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        learned = len(recent) == 20 and sum(recent) / 20 < until
        if step % 50 == 0 or learned:
            print(
                f"{name}: step {step}  losses {' '.join(f'{x:.3f}' for x in list(recent)[-3:])}  {time.time() - start:.0f} s",
                flush=True,
            )
        if learned:
            return
    if until:
        raise SystemExit(f"the policy did not learn {name!r}: try another --seed")


def teach(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, diligent: list[Sample], lazy: list[Sample], args
) -> None:
    """Teach the skill first, on short diligent transcripts, and then the decisions, on whole lazy ones.

    At 2e-3, twice the default learning rate, the model kept confusing some names or numbers with others.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    short = without_system(diligent, tokenizer.convert_tokens_to_ids("<|im_start|>"))
    peak, size, steps = args.learning_rate, args.batch_size, args.full_steps

    def epochs(samples: list[Sample], count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rows = itertools.chain.from_iterable(batches(samples, size, epoch) for epoch in itertools.count())
        return itertools.islice(rows, count)

    learn(model, optimizer, "short", epochs(short, args.short_steps), lambda step: peak * min(1.0, step / 50))
    learn(model, optimizer, "whole", epochs(lazy, steps), lambda step: peak * min(1.0, 2 * (steps - step + 1) / steps))


def lesson_options(description: str, out: Path) -> argparse.ArgumentParser:
    """A parser with the options that the scripts that call `make` have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser


def describe(*curriculum: list[Sample]) -> None:
    """Print the size and the mean reward of each list of transcripts."""
    for samples in curriculum:
        tokens = sum(len(s.token_ids) for s in samples)
        reward = sum(s.reward for s in samples) / len(samples)
        print(f"{len(samples)} transcripts, {tokens} tokens, demonstrator's reward {reward:.3f}")


def new_model(tokenizer: PreTrainedTokenizerFast, **shape: int) -> Qwen2ForCausalLM:
    """A model of three layers with random weights. `shape`: the other sizes, as fields of Qwen2Config."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_hidden_layers=3,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        bos_token_id=None,
        **shape,
    )
    model = Qwen2ForCausalLM(config)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}")
    return model


def make(
    tokenizer: PreTrainedTokenizerFast,
    demonstrator: Callable[[bool], Engine],
    tasks: list,
    args: argparse.Namespace,
    start: float,
) -> None:
    """Teach a new model of the larger shape on diligent and on lazy transcripts, and save it.

    `demonstrator(lazy)` is the engine that writes the transcripts. `start`: time at which the program began, in
    seconds.
    """
    diligent, lazy = (
        asyncio.run(demonstrate(tokenizer, demonstrator(lazy), tasks, args.seed)) for lazy in (False, True)
    )
    describe(diligent, lazy)
    print(f"{time.time() - start:.0f} s")

    model = new_model(tokenizer, hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2)
    teach(model.to(args.device), tokenizer, diligent, lazy, args)
    save(model, tokenizer, args.out)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.cpu().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"wrote {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transcripts", type=int, default=8_000)
    parser.add_argument("--mixed-steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    # The tasks are generated with another seed than the default of `train`. Chains of one link come first: there the
    # answer, which is one token, is a larger part of the loss than among many calls.
    seed = 1_000 + args.seed
    configs = [
        LookupConfig(id="lookup", seed=seed, num_examples=args.transcripts, min_hops=1, max_hops=1),
        LookupConfig(id="lookup", seed=seed, num_examples=args.transcripts),
    ]
    tasks = [list(LookupTaskset(config)) for config in configs]
    tokenizer = train_tokenizer(corpus(tasks[1][:400]), vocab_size=1024)
    start = time.time()
    engine = Demonstrator(tokenizer)
    curriculum = [asyncio.run(demonstrate(tokenizer, engine, some, args.seed)) for some in tasks]
    describe(*curriculum)
    print(f"{time.time() - start:.0f} s")

    model = new_model(tokenizer, hidden_size=96, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1)
    answers, whole = curriculum
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    peak, size = args.learning_rate, args.batch_size
    steps = -(-len(whole) // size)
    short = exchanges(answers + whole)
    kinds = [
        copying_rows(len(tokenizer), args.mixed_steps, size, args.seed),
        itertools.chain.from_iterable(batches(short, size, epoch) for epoch in itertools.count()),
        itertools.chain.from_iterable(batches(answers, size, epoch) for epoch in itertools.count()),
    ]
    mixed = itertools.chain.from_iterable(zip(*kinds, strict=False))
    learn(model, optimizer, "mixed", mixed, lambda step: peak * min(1.0, step / 50))
    rows = itertools.chain.from_iterable(batches(answers, size, epoch) for epoch in range(8))
    learn(model, optimizer, "answers", rows, lambda step: peak, until=0.01)
    rows = batches(whole, size, args.seed)
    learn(model, optimizer, "transcripts", rows, lambda step: peak * min(1.0, 2 * (steps - step + 1) / steps))
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
