"""The generated problems: true, deterministic, and never shared between train and test."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vf_gsm8k.answers import is_correct, is_well_formatted
from vf_gsm8k.sources import load_rows
from vf_gsm8k.synthetic import generate, split_of
from vf_gsm8k.templates import NAMES, TEMPLATES

seeds = st.integers(min_value=-(2**40), max_value=2**40)
sizes = st.integers(min_value=1, max_value=300)
template = pytest.mark.parametrize("template", TEMPLATES, ids=lambda function: function.__name__)


def story(question):
    """The question without its names: what must differ between train and test."""
    return re.sub(rf"\b({'|'.join(NAMES)})\b", "NAME", question)


@settings(deadline=None, max_examples=50)
@given(seeds, seeds, sizes, sizes)
def test_train_and_test_share_no_problem_even_with_other_names(train_seed, test_seed, train_size, test_size):
    train = {story(row["question"]) for row in generate("train", seed=train_seed, count=train_size)}
    test = {story(row["question"]) for row in generate("test", seed=test_seed, count=test_size)}
    assert not train & test


def test_a_template_small_enough_to_exhaust_is_split_completely():
    """Draw one template until nearly every problem of it has been seen: each still has one split."""
    relay = next(function for function in TEMPLATES if function.__name__ == "relay")
    splits = {}
    for seed in range(10_000):
        problem = relay(random.Random(seed))
        splits.setdefault(problem.question, set()).add(split_of(problem))
    assert len(splits) > 3000
    assert all(len(found) == 1 for found in splits.values())
    test_share = sum(found == {"test"} for found in splits.values()) / len(splits)
    assert 0.15 < test_share < 0.25


@settings(deadline=None, max_examples=30)
@given(seeds, sizes, sizes, st.sampled_from(["train", "test"]))
def test_a_seed_gives_the_same_problems_at_any_size(seed, first, second, split):
    short, long = sorted((first, second))
    rows = list(generate(split, seed=seed, count=long))
    assert rows[:short] == list(generate(split, seed=seed, count=short))
    assert len({row["question"] for row in rows}) == len(rows) == long


def test_the_stream_is_the_same_in_every_process_and_version():
    """A change here changes every synthetic run ever made: it must be meant."""
    (row,) = generate("train", seed=0, count=1)
    assert row["question"].startswith("Uma puts 24 stamps on each of the 16 pages")
    assert row["answer"].endswith("384 - 13 = 371\n#### 371")


def test_other_seeds_give_other_problems():
    first, second = ({row["question"] for row in generate("train", seed=seed, count=200)} for seed in (0, 1))
    assert len(first & second) < 10


@template
@settings(deadline=None, max_examples=60)
@given(seed=seeds)
def test_every_equation_of_a_solution_holds_and_the_last_is_the_answer(template, seed):
    problem = template(random.Random(seed))
    lines = problem.solution.split("\n")
    assert 2 <= len(lines) <= 4
    for line in lines:
        expression, result = line.rpartition(": ")[2].split(" = ")
        assert re.fullmatch(r"[0-9+*/() -]+", expression)
        assert eval(expression) == int(result) > 0
    assert int(result) == problem.answer
    assert problem.template == template.__name__


@template
@settings(deadline=None, max_examples=60)
@given(seed=seeds)
def test_the_question_states_every_number_the_solution_starts_from(template, seed):
    """A solution may use what the question says, what it has worked out, and how many days a week or two people are."""
    problem = template(random.Random(seed))
    known = set(re.findall(r"[0-9]+", problem.question)) | {"2", "7"}
    for line in problem.solution.split("\n"):
        expression, result = line.rpartition(": ")[2].split(" = ")
        assert set(re.findall(r"[0-9]+", expression)) <= known
        known.add(result)


def test_solutions_are_replies_that_score():
    for row in generate("test", seed=3, count=300):
        gold = row["answer"].rpartition("#### ")[2]
        assert is_correct(row["answer"], gold) and is_well_formatted(row["answer"])


def test_the_source_gives_a_thousand_unless_told():
    assert len(load_rows("synthetic", "train")) == 1000
    rows = load_rows("synthetic", "test", seed=5, num_examples=7)
    assert [row.id for row in rows] == [f"gsm8k-synthetic-test-5-{index}" for index in range(7)]
