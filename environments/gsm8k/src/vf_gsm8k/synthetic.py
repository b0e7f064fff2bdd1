"""Our own word problems: millions of them, offline, in GSM8K's schema.

They are easier and far more uniform than GSM8K. They are there to see a run learn without a download, and to have
fresh test problems; they do not replace the benchmark.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Literal

from vf_gsm8k.templates import TEMPLATES, Problem

# One problem in five is a test problem.
_SPLIT_MODULUS = 5


def split_of(problem: Problem) -> Literal["train", "test"]:
    """The one split that a problem can belong to.

    Train and test are disjoint by construction: the split is a function of the problem itself (its template and its
    numbers), so one problem cannot be in both, whatever the seeds and sizes. Names take no part, so that a test problem
    is not a train problem told of someone else. A hash and not, say, the sum of the numbers, because a sum would give
    the answers of one split a remainder of their own.
    """
    digest = hashlib.sha256(f"{problem.template}:{problem.numbers}".encode()).digest()
    return "test" if digest[0] % _SPLIT_MODULUS == 0 else "train"


def generate(split: Literal["train", "test"], *, seed: int, count: int) -> Iterator[dict[str, str]]:
    """`count` different problems as {"question", "answer"}; the first n are the same whatever `count` is.

    Example: {"question": "Mira puts 12 stamps on ...", "answer": "... 12 * 9 = 108 ...\\n#### 95"}
    """
    seen: set[str] = set()
    # A string seed is hashed by random itself, the same in every process; hash() of a tuple is not.
    rng = random.Random(f"vf-gsm8k/{split}/{seed}")
    while len(seen) < count:
        problem = rng.choice(TEMPLATES)(rng)
        if split_of(problem) != split or problem.question in seen:
            continue
        seen.add(problem.question)
        yield {"question": problem.question, "answer": f"{problem.solution}\n#### {problem.answer}"}
