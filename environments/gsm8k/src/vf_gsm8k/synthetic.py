"""Generate synthetic word problems in GSM8K's schema: millions of different ones, without network access.

They are easier and far more uniform than GSM8K. They serve to see a run learn without a download and to have unseen
test problems; they do not replace the benchmark.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Literal

from vf_gsm8k.templates import TEMPLATES, Problem

# One in this many problems is a test problem.
_SPLIT_MODULUS = 5


def split_of(problem: Problem) -> Literal["train", "test"]:
    """Return the only split that a problem can belong to.

    The split is a hash of the problem's template and numbers, so train and test are disjoint for all seeds and sizes.
    The names of people are left out of the hash, so that a test problem cannot be a training problem with another name.
    It is a hash because with, for example, the sum of the numbers, the answers of one split would share a remainder.
    """
    digest = hashlib.sha256(f"{problem.template}:{problem.numbers}".encode()).digest()
    return "test" if digest[0] % _SPLIT_MODULUS == 0 else "train"


def generate(split: Literal["train", "test"], *, seed: int, count: int) -> Iterator[dict[str, str]]:
    """Yield `count` different problems as {"question", "answer"}. Problem i does not depend on `count`.

    Example: {"question": "Mira puts 12 stamps on ...", "answer": "... 12 * 9 = 108 ...\\n#### 95"}
    """
    seen: set[str] = set()
    # random.Random hashes a string seed the same way in every process; a tuple's hash() would differ between processes.
    rng = random.Random(f"vf-gsm8k/{split}/{seed}")
    while len(seen) < count:
        problem = rng.choice(TEMPLATES)(rng)
        if split_of(problem) != split or problem.question in seen:
            continue
        seen.add(problem.question)
        yield {"question": problem.question, "answer": f"{problem.solution}\n#### {problem.answer}"}
