"""Make the bundled policy for `musique --datasets synthetic -a hops=2`, as make_tiny_policy.py makes the one for lookup.

    uv run python tools/make_tiny_musique.py       # writes trainer/src/plumbob/trainer/policies/tiny-musique

It knows how to search for a fact by its wording, to find the next search in a result, and to cite. Its demonstrator is
lazy: it often takes the first fact that it finds for the answer, above all when that is a person, and often cites
nothing. Both are decisions at one token, which reinforcement learning can mend.
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
from vf_musique.oracle import sub_questions
from vf_musique.synthetic_world import RELATIONS
from vf_musique.taskset import MusiqueConfig, MusiqueData
from vf_musique.tools import MusiqueToolset

OUT = Path(__file__).resolve().parents[1] / "trainer/src/plumbob/trainer/policies/tiny-musique"

WORDS = r"\p{N}|\p{Lu}\p{Ll}*| ?\p{Ll}+| ?[^\s\p{L}\p{N}]+|\s+"
"""A name's words are the same ids at the start of a sentence, within it and after a quotation mark, so that they can be
copied from anywhere to anywhere."""

SETTLES = {"person": 0.65}
"""P(answer with the first fact's object), by what kind of thing that is."""
SETTLES_ELSE = 0.35
CITES_NOTHING = 0.6


@dataclass(frozen=True)
class Step:
    """Example: Step("Anna Baker was born in", "Anna Baker was born in Oak Hill.", "Oak Hill", "town")"""

    query: str
    """The fact's wording without what is asked for: BM25 finds it first, and the result goes on where it ends."""
    fact: str
    found: str
    kind: str


def steps_of(data: MusiqueData) -> list[Step]:
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
    """An engine that knows every question's decomposition, reads ids from the results, and is lazy if told so."""

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
    # One document: the wording finds the fact first, and to choose among several is another skill.
    arguments = {"query": query, "top_k": 1}
    return f"<tool_call>{json.dumps({'name': 'retrieve_documents', 'arguments': arguments})}</tool_call>"


def final(steps: list[Step], cited: list[str]) -> str:
    thought = f"<think>{' '.join(step.fact for step in steps)}</think>"
    cite = [f"<cite>{', '.join(cited)}</cite>"] if cited else []
    return "\n".join([thought, *cite, f"<answer>{steps[-1].found}</answer>"])


def corpus(tasks: list, questions: dict[str, list[Step]]) -> list[str]:
    """What the tokenizer's merges are learned from: what the policy will read and write, without the markers."""
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

    # Training questions, but others than `train` draws with its default seed. No validation name is among them.
    config = MusiqueConfig(
        id="musique", datasets="synthetic", hops="2", seed=1_000 + args.seed, num_examples=args.questions
    )
    tasks = list({task.data.prompt: task for task in MusiqueTaskset(config)}.values())
    questions = {task.data.prompt: steps_of(task.data) for task in tasks}
    tokenizer = train_tokenizer(corpus(tasks[:600], questions), 1152, WORDS)
    make(tokenizer, lambda lazy: Demonstrator(tokenizer, questions, lazy=lazy), tasks, args, start)


if __name__ == "__main__":
    main()
