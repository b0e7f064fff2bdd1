"""Tokenizers, chat templates and engines that the tests share. Nothing here is fetched.

The templates are our own text (templates/). Each behaves like the one of the family it is named after where that
matters to a token-exact rollout: who gets a system turn, where tools are described, what becomes of a tool result, of
reasoning and of white space, and which token ends a turn.
"""

import asyncio
import importlib.util
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import verifiers.v1 as vf
from plumbob.rollout import Chat, Completion, Limits, Sampling, run_rollout
from pydantic import Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[3]

CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CALL_MARKERS = ["<tool_call>", "</tool_call>"]
LLAMA_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]
SENTENCES = [
    "You are a helpful assistant. Answer the question with the tools that you are given, one after another.",
    'Look up the key 1234 in the table. {"name": "kit_fetch", "arguments": {"index": 0}} {"name": "kit_fetch", "parameters": {}}',
    '{"type": "function", "function": {"name": "kit_fetch", "description": "Fetch a result.", "parameters": {"type": "object"}}}',
    "The capital of France is Paris; the river through it is the Seine, and the answer is forty-two.",
]


@dataclass(frozen=True)
class Family:
    """A tokenizer with its template, and what the tests need to know about both."""

    name: str
    tokenizer: PreTrainedTokenizerFast
    closer: str
    """Ends a turn."""
    header: str
    """Stands before every sampled turn."""
    other_stops: tuple[str, ...] = ()
    """Stop tokens of the generation config besides the closer."""

    @property
    def chat(self) -> Chat:
        return Chat.of(self.tokenizer, stop_token_ids=[self.id_of(token) for token in self.other_stops])

    def id_of(self, token: str) -> int:
        return self.tokenizer.convert_tokens_to_ids(token)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def call_text(self, name: str, arguments: dict[str, Any]) -> str:
        """A call exactly as the template would render it."""
        spoken = json.dumps(arguments, ensure_ascii=False)
        if self.name.startswith("llama"):
            return f'{{"name": "{name}", "parameters": {spoken}}}'
        if self.name == "bundled":
            return f'<tool_call>{{"name": "{name}", "arguments": {spoken}}}</tool_call>'
        return f'<tool_call>\n{{"name": "{name}", "arguments": {spoken}}}\n</tool_call>'


def template(name: str) -> str:
    return (Path(__file__).parent / f"templates/{name}.jinja").read_text()


def make_tokenizer(chat_template: str, special: list[str], markers: list[str], eos: str, bos: str | None = None):
    """Byte-level BPE over a few sentences, split as GPT-2 splits text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(SENTENCES * 4, trainer)
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    if bos:  # as Llama's: whoever encodes without saying otherwise gets a beginning
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=eos,
        bos_token=bos,
        pad_token=special[0],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@cache
def load_make_tiny_policy() -> Any:
    spec = importlib.util.spec_from_file_location("make_tiny_policy", ROOT / "tools/make_tiny_policy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_spaced_tokenizer(chat_template: str, special: list[str], eos: str):
    """BPE over words that begin with a visible space, its special tokens in the model's own vocabulary (as Mistral's)."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bpe.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback()])
    in_bytes = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", *special, *in_bytes],
        initial_alphabet=[*map(chr, range(33, 127)), "▁"],
        show_progress=False,
    )
    bpe.train_from_iterator([*SENTENCES * 4, *special * 4], trainer)
    state = json.loads(bpe.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in in_bytes]
    # As where a vocabulary is converted from SentencePiece: "</" and "s>" can be merged to the special token.
    for left, right in (("<", "/"), ("s", ">"), ("</", "s>")):
        state["model"]["vocab"].setdefault(left + right, len(state["model"]["vocab"]))
        state["model"]["merges"].append([left, right])
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token="<s>",
        eos_token=eos,
        unk_token="<unk>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


MISTRAL_TOKENS = ["<s>", "</s>"]
MISTRAL_TOKENS += [f"[{end}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for end in ("", "/")]


@cache
def load_family(name: str) -> Family:
    if name == "gemma":
        # Its turns' tokens are not flagged as special here, and runs of line breaks and spaces are added tokens.
        markers = ["<start_of_turn>", "<end_of_turn>", "\n\n", "\n\n\n", "  ", "<table>", "</table>"]
        tokenizer = make_tokenizer(template(name), ["<pad>", "<eos>", "<bos>"], markers, eos="<eos>", bos="<bos>")
        return Family(name, tokenizer, "<end_of_turn>", "<start_of_turn>model\n", ("<eos>",))
    if name == "mistral":
        return Family(name, make_spaced_tokenizer(template(name), MISTRAL_TOKENS, eos="</s>"), "</s>", "")
    chatml: dict[str, Any] = {"closer": "<|im_end|>", "header": "<|im_start|>assistant\n"}
    if name == "bundled":
        return Family(name, load_make_tiny_policy().train_tokenizer(SENTENCES * 4, 512), **chatml)
    if name.startswith("llama"):
        text = template("llama3.1")
        if name == "llama3.2":
            text = text.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
        tokenizer = make_tokenizer(text, LLAMA_TOKENS, [], eos="<|eot_id|>", bos="<|begin_of_text|>")
        header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
        return Family(name, tokenizer, "<|eot_id|>", header, ("<|eom_id|>", "<|end_of_text|>"))
    chatml["other_stops"] = ("<|endoftext|>",)
    if name == "smollm2":
        return Family(name, make_tokenizer(template(name), CHATML_TOKENS, [], eos="<|im_end|>"), **chatml)
    if name == "qwen2.5":
        return Family(name, make_tokenizer(template(name), CHATML_TOKENS, CALL_MARKERS, eos="<|im_end|>"), **chatml)
    text = template("qwen3")
    if name == "qwen3-nothink":
        # How a user turns thinking off for a whole run: in the template itself.
        text = "{%- set enable_thinking = false %}" + text
        chatml["header"] += "<think>\n\n</think>\n\n"
    markers = [*CALL_MARKERS, "<tool_response>", "</tool_response>", "<think>", "</think>"]
    return Family(name, make_tokenizer(text, CHATML_TOKENS, markers, eos="<|im_end|>"), **chatml)


FAMILIES = ["qwen2.5", "qwen3", "qwen3-nothink", "llama3.1", "llama3.2", "bundled"]
OTHER_FAMILIES = ["gemma", "mistral", "smollm2"]
"""Without tool calls that could be parsed, so that only the way from messages to tokens is tested on them."""


@pytest.fixture(params=FAMILIES, scope="session")
def family(request: pytest.FixtureRequest) -> Family:
    """Each template in turn."""
    return load_family(request.param)


@pytest.fixture(params=[*FAMILIES, *OTHER_FAMILIES], scope="session")
def any_family(request: pytest.FixtureRequest) -> Family:
    """Each template in turn, those without tool calls included."""
    return load_family(request.param)


@pytest.fixture(scope="session")
def families() -> Callable[[str], Family]:
    """One template by name."""
    return load_family


@dataclass
class Engine:
    """Remembers what it was asked and what it drew. `replies`: texts, or a function of (turn's prompt ids, sampling).

    A text gets the family's closer, unless it ends with another stop token or is cut by `max_tokens`.
    """

    family: Family
    replies: list[Any] | Callable[[list[int], Sampling], Any]
    versions: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    drawn: list[Completion] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        turn = len(self.prompts)
        prompt = list(prompt_ids)
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        reply = self.replies(prompt, sampling) if callable(self.replies) else self.replies[turn]
        if isinstance(reply, BaseException):
            raise reply
        ids = self.family.ids(reply) if isinstance(reply, str) else list(reply)
        if isinstance(reply, str) and (not ids or ids[-1] not in sampling.stop_token_ids):
            ids.append(self.family.id_of(self.family.closer))
        ids = ids[: sampling.max_tokens]
        # Log-probabilities that no other token has, so that a shifted one is seen.
        logprobs = tuple(-(turn + 1) - (i + 1) / 1000 for i in range(len(ids)))
        stopped = bool(ids) and ids[-1] in sampling.stop_token_ids
        version = self.versions[turn] if self.versions else 0
        completion = Completion(tuple(ids), logprobs, "stop" if stopped else "length", version)
        self.drawn.append(completion)
        return completion


@pytest.fixture(scope="session")
def scripted() -> type[Engine]:
    return Engine


@pytest.fixture(scope="session")
def random_ids() -> Callable[[Family, random.Random], Callable[[list[int], Sampling], list[int]]]:
    """Replies of any ids at all, special ones and one past the vocabulary included, with calls among them at times."""

    def make(family: Family, rng: random.Random) -> Callable[[list[int], Sampling], list[int]]:
        stops = family.chat.stop_token_ids
        anything = [i for i in range(len(family.tokenizer) + 1) if i not in stops]

        def reply(prompt_ids: list[int], sampling: Sampling) -> list[int]:
            noise = rng.choices(anything, k=rng.randrange(8))
            call = family.ids(family.call_text("kit_fetch", {"index": rng.randrange(4)}))
            ids = rng.choice([noise, call, noise + call, call + noise, call + call, call[: rng.randrange(len(call))]])
            return [*ids, rng.choice(stops)] if rng.random() < 0.9 else [*ids, anything[0]]

        return reply

    return make


# --- a small environment --------------------------------------------------------------------------------------------


# Upstream's server reads the annotations of a tool as they are: as text (`from __future__ import annotations`) it would
# not find `Literal`.
class KitState(vf.State):
    log: list[str] = Field(default_factory=list)
    threads: list[int] = Field(default_factory=list)


class Kit(vf.Toolset[vf.ToolsetConfig, KitState]):
    """Its class name gives the prefix `kit_`."""

    results: Sequence[Any] = ()

    async def setup_task(self, task: Any) -> None:
        self.results = task.results

    @vf.tool
    def fetch(self, index: int = 0) -> str:
        """Fetch a result."""
        return self.results[index]

    @vf.tool
    async def note(self, word: str, pause: float = 0.0) -> str:
        """Note a word.

        Returns all the words so far.
        """
        await asyncio.sleep(pause)
        self.state.log.append(word)
        return " ".join(self.state.log)

    @vf.tool
    def note_slowly(self, word: str, seconds: float = 0.02) -> str:
        time.sleep(seconds)
        self.state.log.append(word)
        self.state.threads.append(threading.get_ident())
        return " ".join(self.state.log)

    @vf.tool
    def count(self, colour: Literal["red", "blue"], sizes: list[int], scale: float | None = None) -> dict[str, Any]:
        """Count things of a colour."""
        return {"colour": colour, "total": sum(sizes) * (scale or 1)}

    @vf.tool(name="break")
    def break_(self, how: str = "error") -> str:
        """Break."""
        raise {
            "error": RuntimeError("the pipe burst"),
            "value": ValueError("no such pipe"),
            "timeout": TimeoutError("too slow"),
            "silent": KeyError(),
        }[how]


class KitData(vf.TaskData):
    results: list[str] = Field(default_factory=list)


class KitTask(vf.Task[KitData, KitState]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Kit(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def brevity(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.last_reply))

    @vf.metric
    async def words_noted(self, trace: vf.Trace) -> float:
        return len(trace.state.log)


class BareTask(vf.Task[KitData, KitState]):
    """As KitTask, without tools of its own."""

    brevity = KitTask.brevity
    words_noted = KitTask.words_noted


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The environment's classes, for tests to use and to subclass."""
    return SimpleNamespace(Toolset=Kit, Data=KitData, State=KitState, Task=KitTask, BareTask=BareTask)


@pytest.fixture
def qwen(families):
    return families("qwen2.5")


@pytest.fixture
def play(qwen, scripted, kit):
    """Play scripted replies; a (name, arguments) tuple is a call. Returns the trace and the engine."""

    def run(replies, task=None, family=qwen, sampling=None, shared=(), **limits):
        if not callable(replies):
            replies = [r if not isinstance(r, tuple) else family.call_text(*r) for r in replies]
        engine = scripted(family, replies)
        task = task or kit.Task(kit.Data(prompt="Go.", results=["a", "b"]))
        bounds = Limits(**{"max_context": 100_000, **limits})
        trace = asyncio.run(
            run_rollout(task, engine, family.chat, sampling or Sampling(max_tokens=400), bounds, shared_toolsets=shared)
        )
        return trace, engine

    return run
