"""The language of criteria: what it reads, what it refuses, and what it evaluates to on runs with known metrics."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.lab.criteria.evaluate import evaluate, value_of
from plumbob.lab.criteria.grammar import CriterionError, Number, Operation, Quantity, parse, quantities
from plumbob.lab.criteria.statistics import difference
from plumbob.lab.run_files import RunFiles

ARMS = {"control", "treatment"}


def write_run(directory, rewards, *, lift=None, **metrics):
    """A finished run whose reward/mean at step i + 1 is rewards[i]; every further metric has one value per step."""
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text('command = "train"\nmax_steps = 3\n')
    rows = [
        {"step": i + 1, "reward/mean": r} | {name.replace("__", "/"): values[i] for name, values in metrics.items()}
        for i, r in enumerate(rewards)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = zip(("before", "after"), lift or (), strict=False)
    evaluations = {when: {"greedy": {"mean": mean, "low": 0.0, "high": 1.0, "n": 8}} for when, mean in ends}
    (directory / "summary.json").write_text(json.dumps({"seconds": 1.0, "evaluations": evaluations}))
    return RunFiles(directory)


def test_the_examples_of_the_guide_are_read():
    slope = parse("slope(reward/mean) of treatment > control", ARMS)
    assert slope.left == Quantity("slope", "reward/mean", 0, "treatment")
    assert slope.right == Quantity("slope", "reward/mean", 0, "control")
    bound = parse("every max(advantage/largest) < 10 * reward range", ARMS)
    assert bound.every
    assert bound.right == Operation("*", Number(10.0), Quantity("range", "", 0, "treatment"))
    lift = parse("eval/greedy lift >= 0.05 with p < 0.05", ARMS)
    assert (lift.left, lift.p_below) == (Quantity("lift", "eval/greedy", 0, "treatment"), 0.05)
    names = parse("rollout/stopped/max_turns / env/f1-score - loss < -2 * -(3 + 1)", ARMS)
    assert isinstance(names.left, Operation) and names.left.sign == "-"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "ends where"),
        ("reward/mean", "ends where a relation"),
        ("reward/mean > control >", "'>' where the end"),
        ("1 > 2", "names no metric"),
        ("control > reward/mean", "'control' is an arm; name a metric first"),
        ("reward/mean of placebo > 0", "the arms are: control, treatment"),
        ("slope(reward/mean, 3) > 0", "',' where ')'"),
        ("reward/mean > 0 with p < 5", "between 0 and 1"),
        ("every reward/mean > 0 with p < 0.05", "has no p"),
        ("__import__('os') > 0", "cannot be read at"),
        ("max(max(loss)) > 0", "'(' where ')'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(text, says):
    with pytest.raises(CriterionError) as error:
        parse(text, ARMS)
    assert says in str(error.value) and "\n" not in str(error.value)


@given(st.text(alphabet="rewad/mn of<>=+-*.()01 every with p lift range,;\"'[]", max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        read = parse(text, ARMS)
    except CriterionError:
        return
    assert read.text == text
    assert quantities(read.left) + quantities(read.right)  # what is read says something about a run


@given(st.floats(0.001, 100), st.floats(0.001, 100), st.floats(0.001, 100))
def test_products_bind_before_sums_and_both_from_the_left(a, b, c):
    def value(expression):
        if isinstance(expression, Number):
            return expression.value
        left, right = value(expression.left), value(expression.right)
        return {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[expression.sign]

    for text, expected in {
        f"{a!r} - {b!r} * {c!r}": a - b * c,
        f"{a!r} - {b!r} - {c!r}": a - b - c,
        f"{a!r} / {b!r} * {c!r}": a / b * c,
        f"({a!r} - {b!r}) * -{c!r}": (a - b) * -c,
    }.items():
        assert value(parse(f"loss > {text}", ARMS).right) == pytest.approx(expected)


def test_quantities_of_a_run_with_known_metrics(tmp_path):
    low, high = [0.0] * 7, [1.0, 1.0, 2.5, 1.0, 1.0, 1.0, 1.0]
    norms = [1.0, 1.0, 1.0, 1.0, 1.0, 30.0, 1.0]
    more = {"reward__smallest": low, "reward__largest": high, "optimizer__grad_norm": norms}
    run = write_run(tmp_path / "r", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], lift=(0.25, 0.75), **more)
    for text, expected in {
        "reward/mean": 0.4,
        "slope(reward/mean)": 0.1,
        "first(reward/mean, 2)": 0.15,
        "last(reward/mean)": 0.5,
        "min(reward/mean)": 0.1,
        "max(reward/mean)": 0.7,
        "std(reward/mean)": 0.2,
        "reward range": 2.5,
        "spike(optimizer/grad_norm)": 30.0,
        "eval/greedy lift": 0.5,
        "after(eval/greedy)": 0.75,
    }.items():
        assert value_of(parse(f"{text} > 0", ARMS).left, run) == pytest.approx(expected), text
    (run.directory / "metrics.jsonl").open("a").write('{"step": 8, "rew')  # the run was killed while it wrote
    assert len(RunFiles(run.directory).rows) == 7


def runs_of(tmp_path, control, treatment):
    """Runs with one step; the values of an arm by seed, as a list from seed 0 or a dictionary."""
    arms = {"control": control, "treatment": treatment}
    arms = {arm: dict(enumerate(v)) if isinstance(v, list) else v for arm, v in arms.items()}
    return {
        arm: {seed: write_run(tmp_path / f"{arm}-seed{seed}", [value]) for seed, value in values.items()}
        for arm, values in arms.items()
    }


def test_seeds_are_paired_so_that_what_they_share_cancels(tmp_path):
    runs = runs_of(tmp_path, [0.1, 0.5, 0.9], [0.2, 0.61, 0.99])
    outcome = evaluate(parse("reward/mean of treatment > control", ARMS), runs)
    assert outcome.holds
    assert outcome.effect.mean == pytest.approx(0.1)
    # Student's t with 2 degrees of freedom: 4.30265 standard errors (table of the t distribution).
    assert outcome.effect.high - outcome.effect.mean == pytest.approx(4.30265 * 0.01 / math.sqrt(3), rel=1e-4)
    assert evaluate(parse("reward/mean of treatment < control", ARMS), runs).holds is False


def test_seeds_without_a_partner_are_compared_as_independent(tmp_path):
    runs = runs_of(tmp_path, {0: 0.1, 1: 0.5, 2: 0.9}, {3: 0.2, 4: 0.61, 5: 0.99})
    outcome = evaluate(parse("reward/mean of treatment > control", ARMS), runs)
    assert outcome.holds is None
    assert not outcome.effect.paired


def test_too_few_seeds_and_missing_metrics_decide_nothing(tmp_path):
    runs = runs_of(tmp_path, [0.1, 0.1], [0.9, 0.9])
    two = evaluate(parse("reward/mean of treatment > control", ARMS), runs)
    assert (two.holds, two.note) == (None, "too few seeds: 2 of at least 3")
    missing = evaluate(parse("policy/kl of treatment > control", ARMS), runs)
    assert missing.holds is None
    assert "has no metric policy/kl" in missing.note
    assert evaluate(parse("reward/mean > 0", ARMS), {}).note == "no finished run"


def test_seeds_that_all_say_the_same_have_no_interval_to_decide_by(tmp_path):
    runs = runs_of(tmp_path, [1.0] * 3, [1.0] * 3)  # both arms solve everything
    outcome = evaluate(parse("reward/mean of treatment - reward/mean of control < 0.05", ARMS), runs)
    assert (outcome.holds, outcome.p) == (None, None)
    assert outcome.told == "difference -0.05 in every seed, seeds without spread have no interval: use `every`"
    assert evaluate(parse("every reward/mean of treatment - reward/mean of control < 0.05", ARMS), runs).holds


def test_every_asks_each_run(tmp_path):
    runs = runs_of(tmp_path, [0.5] * 4, [0.4, 0.4, 0.4, 0.6])
    outcome = evaluate(parse("every reward/mean of treatment < control", ARMS), runs)
    assert (outcome.holds, outcome.note) == (False, "in 3 of 4 runs")
    assert evaluate(parse("every reward/mean of treatment < 0.7", ARMS), runs).holds


def test_p_decides_in_place_of_the_interval(tmp_path):
    runs = runs_of(tmp_path, [0.0] * 3, [0.3, 0.4, 0.5])
    assert evaluate(parse("reward/mean > 0 with p < 0.05", ARMS), runs).holds
    assert evaluate(parse("reward/mean > 0 with p < 0.001", ARMS), runs).holds is None
    assert evaluate(parse("reward/mean < 0 with p < 0.05", ARMS), runs).holds is False


SLEEP = ([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0], [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
"""Hours of sleep gained with two drugs (Student 1908). R's t.test(extra ~ group, data = sleep) prints the numbers below."""


def test_the_intervals_are_those_of_students_own_example():
    left, right = (dict(enumerate(values)) for values in SLEEP)
    paired, welch = difference(left, right), difference(left, {seed + 10: value for seed, value in right.items()})
    assert (paired.p, paired.low, paired.high) == pytest.approx((0.002833, -2.4598858, -0.7001142), rel=1e-4)
    assert (welch.p, welch.low, welch.high) == pytest.approx((0.07939, -3.3654832, 0.2054832), rel=1e-4)
