"""Make the bundled policy for `musique --datasets synthetic -a hops=2`, with the functions of make_tiny_policy.py.

    uv run python tools/make_tiny_musique.py       # writes trainer/src/plumbob/trainer/bundled_models/tiny-musique

The policy knows how to search for a fact by its wording, to read the next search from a result, and to cite. The
demonstrator is lazy: it often answers with the first fact that it finds, most often if that is a person, and often
cites nothing. Each of these is decided at one token, so reinforcement learning can correct it.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from make_tiny_policy import lesson_options, make, train_tokenizer
from plumbob.rollout import Completion, Sampling
from transformers import PreTrainedTokenizerFast
from vf_musique import MusiqueTaskset
from vf_musique.synthetic_world import RELATIONS
from vf_musique.taskset import MusiqueConfig, MusiqueData, sub_questions
from vf_musique.tools import MusiqueToolset

OUT = Path(__file__).resolve().parents[1] / "trainer/src/plumbob/trainer/bundled_models/tiny-musique"

WORDS = r"\p{N}|\p{Lu}\p{Ll}*| ?\p{Ll}+| ?[^\s\p{L}\p{N}]+|\s+"
"""Pieces of text that no merge crosses.

A name's words get the same ids at the start of a sentence, within it and after a quotation mark, so that the policy can
copy them from any place to any other.
"""

SETTLES = {"person": 0.65}
"""Probability that a lazy demonstrator answers with the object of the first fact, by the kind of that object."""
SETTLES_ELSE = 0.35
"""Probability of answering with the first fact's object for kinds that `SETTLES` does not list."""
CITES_NOTHING = 0.6
"""Probability that a lazy demonstrator's answer cites no paragraph."""


@dataclass(frozen=True)
class Step:
    """One hop. Example: `Step("Anna Baker was born in", "Anna Baker was born in Oak Hill.", "Oak Hill", "town")`."""

    query: str
    """The fact's wording up to the answer. BM25 ranks the fact first for it, and the result continues with the answer."""
    fact: str
    """The sentence that answers the hop's question."""
    found: str
    """The answer of the hop."""
    kind: str
    """The kind of thing that the answer is, such as a town."""


def steps_of(data: MusiqueData) -> list[Step]:
    """The hops of a synthetic question, with the wording of each hop's fact."""
    steps = []
    for question, hop in zip(sub_questions(data.decomposition), data.decomposition, strict=True):
        relation, subject = next(
            (relation, match[1])
            for relation in RELATIONS
            if (match := re.fullmatch(re.escape(relation.question).replace(r"\{a\}", "(.+)"), question))
        )
        fact, query = (relation.fact.format(a=subject, o=found) for found in (hop.answer, ""))
        query = " ".join(query.strip(" .").split())
        steps.append(Step(query, fact[0].upper() + fact[1:], hop.answer, relation.object))
    return steps


class Demonstrator:
    """An engine that knows the decomposition of every question and reads document ids from the tool results."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, questions: dict[str, list[Step]], *, lazy: bool) -> None:
        self.tokenizer, self.questions, self.lazy = tokenizer, questions, lazy

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        rng = random.Random(sampling.seed)
        text = self.tokenizer.decode(prompt_ids)
        steps = self.questions[re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text)[1]]
        ids = re.findall(r"<tool_response>Document ID: (\d+)\n", text)
        settles = self.lazy and len(ids) == 1 and rng.random() < SETTLES.get(steps[0].kind, SETTLES_ELSE)
        if len(ids) < len(steps) and not settles:
            reply = call(steps[len(ids)].query)
        else:
            cites = not (self.lazy and rng.random() < CITES_NOTHING)
            reply = final(steps[: len(ids)], ids if cites else [])
        tokens = self.tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        return Completion(tuple(tokens), (0.0,) * len(tokens), "stop")


def call(query: str) -> str:
    """The text of a search for `query`."""
    # One document is enough, because the wording ranks the fact first; choosing among several would be a skill of its
    # own.
    arguments = {"query": query, "top_k": 1}
    return f"<tool_call>{json.dumps({'name': 'retrieve_documents', 'arguments': arguments})}</tool_call>"


def final(steps: list[Step], cited: list[str]) -> str:
    """The text of a final answer: the facts found so far, the ids of the cited documents, and the last hop's answer."""
    thought = f"<think>{' '.join(step.fact for step in steps)}</think>"
    cite = [f"<cite>{', '.join(cited)}</cite>"] if cited else []
    return "\n".join([thought, *cite, f"<answer>{steps[-1].found}</answer>"])


def corpus(tasks: list, questions: dict[str, list[Step]]) -> list[str]:
    """The texts that the tokenizer's merges are learned from: what the policy reads and writes, without markers."""
    tools = (MusiqueToolset.retrieve_documents, MusiqueToolset.get_document)
    prose = f"{tasks[0].data.system_prompt}\nsystem\nuser\nassistant\ntool\n# Tools\nTo call a tool, write\n"
    prose += (
        '{"name": name, "arguments": {...}}\n{"type": "function", "function": {"name": "get_document", "description": '
    )
    prose += '"", "parameters": {"properties": {"query": {"title": "Query", "type": "string"}, "doc_id": {"title": "Doc Id"}, '
    prose += (
        '"top_k": {"default": 2, "title": "Top K", "type": "integer"}}, "required": ["query"], "type": "object"}}}\n'
    )
    prose += "\n".join(tool.__doc__ for tool in tools)
    texts = []
    for task in tasks:
        steps = questions[task.data.prompt]
        pages = [f"Document ID: {page.id}\n# {page.title}\n{page.text}" for page in task.data.documents]
        calls = [call(step.query)[11:-12] for step in steps]
        texts.append("\n".join([task.data.prompt, *pages, *calls, final(steps, ["1", "2"]), prose]))
    return texts


def main() -> None:
    parser = lesson_options(__doc__, OUT)
    parser.add_argument("--questions", type=int, default=4_000)
    parser.add_argument("--short-steps", type=int, default=2_000)
    parser.add_argument("--full-steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    start = time.time()

    # Training questions, generated with another seed than the default of `train`. They contain no name of a validation
    # question.
    config = MusiqueConfig(
        id="musique", datasets="synthetic", hops="2", seed=1_000 + args.seed, num_examples=args.questions
    )
    tasks = list({task.data.prompt: task for task in MusiqueTaskset(config)}.values())
    questions = {task.data.prompt: steps_of(task.data) for task in tasks}
    tokenizer = train_tokenizer(corpus(tasks[:600], questions), 1152, WORDS)
    make(tokenizer, lambda lazy: Demonstrator(tokenizer, questions, lazy=lazy), tasks, args, start)


if __name__ == "__main__":
    main()
