"""Tables and comparisons: estimates against their formulas, and files as they are found on disk."""

import itertools
import json
import math
import random
import statistics
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.trainer.cli.analyze import app, compare
from plumbob.trainer.evaluation.results import Row, is_truncated, read_records, rows_of, summarize, table
from plumbob.trainer.evaluation.statistics import estimate, estimate_count, paired_bootstrap, pass_at_k


def record(key, reward, rollout=None, ok=True, **metrics):
    made = {
        "task": {"key": key},
        "nodes": [],
        "rewards": {"correct": {"score": reward, "weight": 1.0}} if ok else {"correct": None},
        "metrics": metrics,
        "ok": ok,
        "errors": [] if ok else [{"type": "EngineError", "message": "gone\nfor good"}],
    }
    return made if rollout is None else {**made, "rollout": rollout}


@given(
    st.sampled_from([None, "max_turns", "max_turn_tokens", "max_total_tokens", "compaction_failed", "done"]),
    st.lists(
        st.fixed_dictionaries(
            {"error": st.sampled_from([None, {}]), "finish_reason": st.sampled_from(["stop", "length"])}
        )
    ),
)
def test_what_was_cut_off_is_what_verifiers_says(stop, calls):
    trace = vf.Trace.model_construct(stop_condition=stop, calls=[SimpleNamespace(**call) for call in calls])
    assert is_truncated({"stop_condition": stop, "calls": calls}) == trace.is_truncated


@pytest.fixture
def results(tmp_path):
    def write(name, records):
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        return path

    return write


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(case):
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


@pytest.mark.parametrize("case", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_outside_its_domain(case):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*case)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_an_interval_of_rewards_holds_the_mean_and_stays_between_0_and_1(values):
    e = estimate(values)
    assert -1e-12 <= e.low <= e.mean + 1e-12 and e.mean - 1e-12 <= e.high <= 1 + 1e-12 and e.n == len(values)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.0]), min_size=1, max_size=30))
def test_a_count_has_no_interval_of_a_proportion(values):
    e = estimate_count(values)
    if len(set(values)) == 1:
        assert (e.mean, e.low, e.high, str(e)) == (values[0], None, None, f"{values[0]:.3f}")
    else:
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert (e.low, e.high) == pytest.approx((e.mean - 1.96 * error, e.mean + 1.96 * error), abs=1e-3 * error)


def test_only_rewards_and_declared_metrics_get_wilson_s_interval():
    def record(i):
        trace = {"task": {"key": str(i)}, "ok": True, "rewards": {"right": {"score": 1.0, "weight": 1.0}}}
        return {**trace, "metrics": {"rollout/turns": 1.0, "exact_match": 1.0}, "zero_one_metrics": ["exact_match"]}

    summary = summarize(rows_of([record(i) for i in range(4)]))
    wilson = "1.000 [0.510, 1.000]"
    assert {name: str(e) for name, e in summary.scores.items()} == {
        "reward": wilson, "right": wilson, "exact_match": wilson, "rollout/turns": "1.000"
    }  # fmt: skip
    json.dumps(summary.to_json(), allow_nan=False)


def test_the_bootstrap_interval_is_that_of_the_mean_of_differences():
    rng = random.Random(0)
    theirs = [rng.random() for _ in range(400)]
    ours = [x + rng.gauss(0.1, 0.5) for x in theirs]
    c = paired_bootstrap(ours, theirs)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = sum(differences) / 400
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 399 / 400)
    assert c.difference == pytest.approx(mean) and c.n == 400
    assert c.low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert c.high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)
    assert c.p_value < 0.01
    # Half of the resampled means of (1, -1) x n lie on either side of 0: the two-sided p is 1; 15 of 16 ones: about .0004.
    assert paired_bootstrap([1.0, -1.0] * 50, [0.0] * 100).p_value > 0.9
    few = paired_bootstrap([1.0] * 4 + [-1.0], [0.0] * 5)  # P(mean <= 0) = P(Binomial(5, .2) >= 3) = .05792
    assert few.p_value == pytest.approx(2 * 0.05792, abs=0.02)
    back = paired_bootstrap(theirs, ours)
    assert back.difference == pytest.approx(-mean)


def test_equal_results_do_not_differ():
    c = paired_bootstrap([0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    assert (c.difference, c.low, c.high, c.p_value) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="equal numbers"):
        paired_bootstrap([], [])


def test_the_task_is_the_unit_and_failures_count_as_0():
    rows = rows_of([record("a", 1.0), record("a", 0.0), record("b", 1.0), record("b", 1.0, ok=False)])
    assert [row.rollout for row in rows] == [0, 1, 0, 1]
    summary = summarize(rows)
    assert summary.scores["reward"].mean == 0.5 and summary.scores["reward"].n == 2
    assert summary.scores["correct"].mean == 0.75  # of those that were scored
    assert summary.num_failed == 1 and summary.failures == {"EngineError: gone": 1}
    assert summary.pass_at[1].mean == 0.5 and summary.pass_at[2].mean == 1.0


def test_pass_at_all_rollouts_is_always_told():
    assert set(summarize(rows_of([record("a", 1.0)] * 10)).pass_at) == {1, 2, 4, 8, 10}


def test_pass_at_needs_as_many_rollouts_of_every_task():
    rows = rows_of([record("a", 1.0), record("a", 0.0), record("b", 1.0)])
    assert set(summarize(rows).pass_at) == {1}


def test_scores_by_hops():
    rows = rows_of(
        [record("a", 1.0, hops=2, f1=0.5), record("b", 0.0, hops=3, f1=0.1), record("c", 1.0, hops=2, f1=0.7)]
    )
    summary = summarize(rows)
    assert summary.hops[2]["reward"].mean == 1.0 and summary.hops[3]["f1"].mean == pytest.approx(0.1)
    shown = table(summary)
    assert "2 hops (2)" in shown and "3 hops (1)" in shown
    assert len({len(line) for line in shown.splitlines()[1:2]}) == 1


def test_a_failed_rollout_counts_in_its_column_too():
    """Its hops are known from the task's other rollouts, or from its data."""
    lost = record("d", 0.0, ok=False)
    lost["task"]["data"] = {"hops": 3}
    rows = rows_of([record("a", 1.0, hops=2), record("a", 0.0, ok=False), record("c", 1.0, hops=3), lost])
    summary = summarize(rows)
    assert {h: scores["reward"].mean for h, scores in summary.hops.items()} == {2: 0.5, 3: 0.5}
    assert summary.scores["reward"].mean == 0.5


def test_what_a_group_lacks_is_left_out_of_it():
    rows = rows_of([record("a", 1.0, hops=2, f1=0.5), record("b", 1.0, hops=4)])
    summary = summarize(rows)
    assert set(summary.hops[4]) == {"reward", "correct"} and "f1" in summary.hops[2]
    json.dumps(summary.to_json(), allow_nan=False)


def test_weighted_rewards_sum_as_verifiers_sums_them():
    r = record("a", 0.5)
    r["rewards"] = {"x": {"score": 0.5, "weight": 2.0}, "y": {"score": 1.0, "weight": 0.25}}
    assert Row.of_record(r).reward == 1.25


def test_a_file_cut_while_it_was_written(results):
    path = results("r.jsonl", [record("a", 1.0), record("b", 0.0)])
    whole = path.read_text()
    for end in range(len(whole) - 2, len(whole) // 2 + 20, -1):  # wherever it was cut, also behind a brace
        path.write_text(whole[:end])
        assert [r["task"]["key"] for r in read_records(path)] == ["a"]


def test_upstream_s_episodes_are_read_trace_by_trace(results):
    path = results("traces.jsonl", [{"traces": [record("a", 1.0)], "errors": []}, {"traces": [record("a", 0.0)]}])
    assert [(r.key, r.rollout, r.reward) for r in rows_of(read_records(path))] == [("a", 0, 1.0), ("a", 1, 0.0)]


@pytest.mark.parametrize("text", ['{"x": 1}\n', "[]\n{}\n", "not json}\n", "\x00\n" + "{}\n"])
def test_a_file_of_something_else(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="line 1 is not a stored trace"):
        read_records(path)


def test_stored_text_that_no_tokenizer_reads_is_named_and_a_line_separator_in_a_text_ends_no_line(tmp_path):
    path = tmp_path / "x.jsonl"
    good, bad = record("a\u2028b", 1.0), record("a\ud83d", 1.0)
    path.write_text(json.dumps(good, ensure_ascii=False) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(UserError, match=r"line 2 holds half of a surrogate pair \('\\ud83d'\)"):
        read_records(path)


def test_comparison_on_shared_tasks_only(results):
    a = results("a.jsonl", [record(k, 0.0) for k in "abcd"])
    b = results("b.jsonl", [record(k, 1.0) for k in "cdef"])
    c = results("c.jsonl", [record("z", 1.0)])
    first, second, third = compare([a, b, c], "reward")
    assert first["mean"] == 0.0 and "against_baseline" not in first
    assert second["against_baseline"]["n"] == 2 and second["against_baseline"]["difference"] == 1.0
    assert "against_baseline" not in third


def test_analyze_prints_a_line_per_file(results, ended):
    a = results("a.jsonl", [record(str(i), float(i % 2), f1=0.1) for i in range(20)])
    b = results("b.jsonl", [record(str(i), 1.0, f1=0.3) for i in range(20)])
    code, out, _ = ended("analyze", app, a, b, "--metric", "f1")
    assert code == 0 and "+0.200 [+0.200, +0.200]" in out and "baseline" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.jsonl"], "there is no file or directory nowhere.jsonl"),
        (["."], "there is no result file in"),
        (["a.jsonl", "-m", "f2"], "it has reward, correct, f1"),
    ],
)
def test_mistakes_are_one_sentence(args, message, tmp_path, monkeypatch, ended, results):
    if args[0] == "a.jsonl":
        results("a.jsonl", [record("a", 1.0, f1=0.1)])
    monkeypatch.chdir(tmp_path)
    code, _, err = ended("analyze", app, *args)
    assert code == 2 and message in err
