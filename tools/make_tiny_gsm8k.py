"""Make the bundled policy for `gsm8k --datasets synthetic`, with the functions of make_tiny_policy.py.

    uv run python tools/make_tiny_gsm8k.py         # writes trainer/src/plumbob/trainer/bundled_models/tiny-gsm8k

The policy knows every question template but cannot calculate: each line of its solution, and the answer, is an
arithmetic expression over the numbers of the question, which the environment's reward evaluates. The demonstrator is
lazy: it often leaves out the last step of a solution, most often if that step is a subtraction. Whether to write one
more step is decided at one token, so reinforcement learning can correct it.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from make_tiny_policy import lesson_options, make, train_tokenizer
from plumbob.rollout import Completion, Sampling
from transformers import PreTrainedTokenizerFast
from vf_gsm8k import GSM8KTaskset
from vf_gsm8k.synthetic import generate
from vf_gsm8k.taskset import GSM8KConfig
from vf_gsm8k.templates import NAMES

OUT = Path(__file__).resolve().parents[1] / "trainer/src/plumbob/trainer/bundled_models/tiny-gsm8k"

STOP_SHORT = {ast.Sub: 0.65}
"""Probability that a lazy demonstrator leaves out the last step, by that step's operator."""
STOP_SHORT_ELSE = 0.4
"""Probability of leaving out the last step for operators that `STOP_SHORT` does not list."""


Steps = list[tuple[str, ast.expr]]
"""One solution: (label, expression over the numbers of the question) of each step."""


def work_out(question: str, answer: str) -> tuple[Steps, bool]:
    """(the solution without intermediate results, whether it is doubtful).

    A solution is doubtful if an intermediate result equals another number of the problem: then it is ambiguous which of
    the two a later step uses, and the expression may be right by chance only.
    """
    # 2 and 7 occur in solutions without being in the question: two people, seven days.
    taken = {2, 7, *map(int, re.findall(r"[0-9]+", question))}
    results: dict[int, ast.expr] = {}
    worked, doubtful = [], False
    for line in answer.split("\n")[:-1]:
        label, _, equation = line.rpartition(": ")
        expression, result = equation.split(" = ")
        step = _Substitution(results).visit(ast.parse(expression, mode="eval").body)
        doubtful |= int(result) in taken
        taken.add(int(result))
        results[int(result)] = step
        worked.append((label, step))
    return worked, doubtful


def solve(rows: Iterable[dict[str, str]]) -> dict[str, Steps]:
    """Solutions by question. A doubtful solution is kept if a certain one equals it but for names and numbers."""
    worked = {row["question"]: work_out(row["question"], row["answer"]) for row in rows}
    shapes = {shape(steps) for steps, doubtful in worked.values() if not doubtful}
    return {question: steps for question, (steps, doubtful) in worked.items() if shape(steps) in shapes}


def shape(steps: Steps) -> str:
    """The text of a solution with placeholders for names and numbers: the same for all problems of one template."""
    return re.sub(r"[0-9]+", "n", re.sub("|".join(NAMES), "name", write(steps)))


class _Substitution(ast.NodeTransformer):
    """Replaces each intermediate result in an expression by the expression that computed it."""

    def __init__(self, results: dict[int, ast.expr]) -> None:
        self.results = results

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self.results.get(node.value, node)


class Demonstrator:
    """An engine that replies to a question with its solution; if `lazy`, it sometimes leaves out the last step."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, solutions: dict[str, Steps], *, lazy: bool) -> None:
        self.tokenizer, self.solutions, self.lazy = tokenizer, solutions, lazy

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Completion:
        rng = random.Random(sampling.seed)
        text = self.tokenizer.decode(prompt_ids)
        steps = self.solutions[re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", text)[1]]
        last = steps[-1][1]
        stops = rng.random() < STOP_SHORT.get(type(last.op), STOP_SHORT_ELSE)
        reply = write(steps[:-1] if self.lazy and stops else steps)
        ids = self.tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        return Completion(tuple(ids), (0.0,) * len(ids), "stop")


def write(steps: Steps) -> str:
    """The reply that states a solution: one line per step, then the answer."""
    lines = [f"{label}: {ast.unparse(step)}" for label, step in steps]
    return "\n".join([*lines, f"#### {ast.unparse(steps[-1][1])}"])


def main() -> None:
    parser = lesson_options(__doc__, OUT)
    parser.add_argument("--problems", type=int, default=7_000)
    parser.add_argument("--short-steps", type=int, default=2_400)
    parser.add_argument("--full-steps", type=int, default=600)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    start = time.time()

    # Problems of the training split, generated with another seed than the default of `train`. No test problem is among
    # them.
    config = GSM8KConfig(
        id="gsm8k", datasets="synthetic", split="train", seed=1_000 + args.seed, num_examples=args.problems
    )
    solutions = solve(generate("train", seed=config.seed, count=args.problems))
    tasks = [task for task in GSM8KTaskset(config) if task.data.prompt in solutions]
    prose = f"{tasks[0].data.system_prompt}\nsystem\nuser\nassistant\ntool\n# Tools\nTo call a tool, write"
    texts = [f"{question}\n{write(steps)}\n{prose}" for question, steps in itertools.islice(solutions.items(), 2_000)]
    tokenizer = train_tokenizer(texts, vocab_size=1024)
    make(tokenizer, lambda lazy: Demonstrator(tokenizer, solutions, lazy=lazy), tasks, args, start)


if __name__ == "__main__":
    main()
