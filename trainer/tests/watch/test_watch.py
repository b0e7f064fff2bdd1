"""The watch: recorded runs get their cause and healthy ones none; a real run warns once; traces; the page; the docs."""

from __future__ import annotations

import dataclasses
import gzip
import importlib
import json
import math
import random
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.testing.page_reader import Page
from plumbob.testing.recorded_runs import FIRST, RUNS, config_of, rows_of
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.diagnosis.causes import CAUSES, stands_for
from plumbob.trainer.diagnosis.findings import Finding
from plumbob.trainer.doctor.page import render
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.training import train as loop
from plumbob.trainer.watch.history import NORMS
from plumbob.trainer.watch.paid_answers import correlation, parsing, value_of
from plumbob.trainer.watch.rules import RULES
from plumbob.trainer.watch.stored_rollouts import Part, Rollout, read_traces
from plumbob.trainer.watch.watch import WARNINGS, Warner, Watch, examine, read_metrics

DOCS = Path(__file__).parents[3] / "docs"


def replay(name: str) -> Watch:
    watch = Watch(config_of(name))
    if "before" in RUNS[name]:
        watch.evaluated(0, RUNS[name]["before"])
    for row in rows_of(name):
        watch.update(row)
    return watch


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run["cause"] is None])
def test_healthy_runs_raise_no_alarm(name: str) -> None:
    assert replay(name).failed == {}


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run["cause"] is not None])
def test_faulty_runs_get_one_cause_and_it_is_theirs(name: str) -> None:
    """By its own id, or by a cause that includes it."""
    (named,) = {finding.cause for finding in replay(name).failed.values()}
    assert RUNS[name]["cause"] in stands_for(named)


def test_a_rule_speaks_once_and_says_the_step() -> None:
    name = "learning rate 100 times too high"
    watch, told = Watch(config_of(name)), []
    for row in rows_of(name) * 2:
        told += watch.update(row)
    (finding,) = told
    assert finding.step == 4 and finding.verdict == "fail" and finding.cause == "learning-rate-too-high"
    assert re.search(r"step 1 changed the policy by \d", finding.evidence)


NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32) | st.integers(0, 10**6).map(float)
NAMES = sorted({name for run in RUNS.values() for name in run["metrics"]})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), NUMBERS, max_size=len(NAMES)), max_size=14), st.data())
def test_no_row_whatever_stops_a_watch(rows: list[dict[str, float]], data: st.DataObject) -> None:
    config = data.draw(
        st.sampled_from(
            [
                TrainConfig(learning_rate=1e-3),
                TrainConfig(kl_beta=1.0, kl_placement="reward", bf16=True, scale_rewards="group", num_iterations=2),
                TrainConfig(peft=True, lora_dropout=0.1, top_p=0.5, overlong="mask", max_grad_norm=0.0),
            ]
        )
    )
    watch = Watch(config)
    for step, row in enumerate(rows, 1):
        for finding in watch.update({**row, "reward/mean": row.get("reward/mean", 0.0), "step": step}):
            assert finding.cause in CAUSES and finding.step == step
    assert len(watch.findings()) <= len(RULES)


def test_a_watch_keeps_a_bounded_history() -> None:
    watch, row = Watch(TrainConfig()), rows_of(FIRST)[0]
    for step in range(1000):
        watch.update({**row, "step": step})
    kept = [v for v in vars(watch.history).values() if isinstance(v, list | deque)]
    assert max(map(len, kept)) <= NORMS


SIGNS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, float]]]] = {
    "engine-trainer-mismatch": ({}, lambda step: {"sync/sampling_gap": 0.02}),
    "weights-not-synced": ({}, lambda step: {"sync/sampling_gap": 1e-6 * 20.0**step}),
    "correction-mutes-rollouts": (
        {"importance_correction": "sequence_mask"},
        lambda step: {"correction/masked_share": 0.3, "correction/mean_weight": 0.57},
    ),
    "rollouts-too-old": (
        {"max_staleness": 1, "engine": "vllm", "peft": True},
        lambda step: {"rollout/stale": 0.6 * 128, "rollout/count": 128.0},
    ),
    "drops-are-biased": (
        {"max_staleness": 1, "engine": "vllm", "peft": True},
        lambda step: {
            "rollout/stale": 12.0,
            "rollout/count": 128.0,
            "rollout/stale_tokens": 90.0,
            "rollout/sampled_tokens": 45.0,
            "rollout/stale_seconds": 6.0,
            "rollout/kept_seconds": 5.0,
        },
    ),
    "environment-hangs": ({}, lambda step: {"rollout/stuck": 4.0, "rollout/errored": 4.0, "rollout/count": 128.0}),
    "truncated-context": ({}, lambda step: {"rollout/no_turn": 40.0, "rollout/count": 128.0}),
    "environment-fails": (
        {},
        lambda step: {"rollout/errored": 40.0, "rollout/engine_errors": 19.0, "rollout/count": 128.0},
    ),
    "engine-fails": (
        {},
        lambda step: {"rollout/errored": 40.0, "rollout/engine_errors": 21.0, "rollout/count": 128.0},
    ),
    "tools-fail": ({}, lambda step: {"rollout/tool_calls": 2.0, "rollout/tool_errors": 1.5 * (step > 5)}),
    "calls-malformed": ({}, lambda step: {"rollout/tool_calls": 0.1, "rollout/malformed_calls": 1.0}),
    "calls-in-unread-form": (
        {},
        lambda step: {
            "rollout/tool_calls": 0.1,
            "rollout/unread_calls": 0.9,
            "rollout/turns": 1.0,
            "rollout/count": 128.0,
        },
    ),
    "tools-never-used": ({}, lambda step: {"rollout/tools": 2.0, "rollout/tool_calls": 0.0}),
    "reward-constant": (
        {},
        lambda step: {
            "reward/mean": 0.2,
            "reward/std": 0.0,
            "groups/zero_signal_share": 1.0,
            "groups/all_fail": 0.0,
            "groups/all_pass": 8.0,
            "groups/count": 8.0,
            "advantage/mean_abs": 0.0,
            "train/rows": 0.0,
        },
    ),
    "tiny-std-scaling": ({"scale_rewards": "group"}, lambda step: {"groups/tiny_spread_share": 0.5}),
    "reward-format-dominated": ({}, lambda step: {"reward/format/variance_share": 0.95, "reward/mean": 0.4}),
    "gradient-not-finite": ({}, lambda step: {"optimizer/skipped": float(step % 2)}),
    "no-gradient": ({}, lambda step: {"optimizer/grad_norm": 0.0}),
    "signal-masked": ({"overlong": "mask"}, lambda step: {"train/rows": 0.0, "optimizer/updates": 0.0}),
    "weights-in-bf16": ({}, lambda step: {"optimizer/moved_share": 0.02}),
    "update-without-effect": ({}, lambda step: {"policy/step_kl": 1e-14}),
    "ratio-clipped": ({"num_iterations": 4}, lambda step: {"reward/mean": 0.5, "policy/clip_fraction": 0.6}),
    "entropy-collapse": ({}, lambda step: {"reward/mean": 0.5, "policy/entropy": 0.8 if step < 6 else 0.01}),
    "entropy-explosion": (
        {},
        lambda step: {"reward/mean": 0.5 if step < 6 else 0.1, "policy/entropy": 0.3 if step < 6 else 4.0},
    ),
}
"""Cause -> (settings, step -> metrics): what an otherwise healthy run's rows look like with it. Recorded runs show others."""


@pytest.mark.parametrize("cause", SIGNS)
def test_a_sign_in_an_otherwise_healthy_run_is_named(cause: str) -> None:
    overrides, change = SIGNS[cause]
    config = dataclasses.replace(config_of(FIRST), **{"learning_rate": 3e-4, **overrides})
    faulty, healthy = Watch(config), Watch(config)
    for step, row in enumerate(rows_of(FIRST)[:10], 1):
        healthy.update(row)
        faulty.update({**row, **change(step)})
    (named,) = {finding.cause for finding in faulty.failed.values()}
    assert cause in stands_for(named)
    assert healthy.failed == {}
    assert all(finding.step is not None and finding.step >= 3 for finding in faulty.failed.values())


@pytest.fixture(scope="module")
def warned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A real run of 6 steps whose gradient is clipped to nothing, and what it said."""
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    lines: list[str] = []
    patch.setattr("plumbob.trainer.reporting.progress_table.Board._print", lambda self, line: lines.append(line))
    config = TrainConfig(
        model="tiny",
        max_grad_norm=1e-9,
        batch_size=32,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_steps=6,
        eval_examples=0,
        output_dir=str(folder),
        run_name="r",
        threads=1,
        env_args=("max_hops=3",),
    )
    try:
        assert loop.run(config) == 0
    finally:
        patch.undo()
    return folder / "r", "\n".join(lines)


@pytest.mark.slow
def test_a_run_warns_in_its_table_and_keeps_the_warning(warned: tuple[Path, str]) -> None:
    run_dir, said = warned
    (kept,) = [json.loads(line) for line in (run_dir / WARNINGS).read_text().splitlines()]
    assert kept["cause"] == "gradient-clipped-to-nothing" and kept["step"] >= 5
    assert said.count("gradient-clipped-to-nothing") == 1 and CAUSES[kept["cause"]].fix in said
    rows = read_metrics(run_dir)
    assert all(row["optimizer/update_rms"] < 0.01 * row["optimizer/learning_rate"] for row in rows)
    assert [f.cause for f in examine(run_dir) if f.cause] == ["gradient-clipped-to-nothing"]
    # What the run said before it was interrupted is not said again when it goes on.
    told: list[str] = []
    warner = Warner(run_dir, TrainConfig(max_grad_norm=1e-9, learning_rate=3e-4), 6, told.append)
    warner.step({**rows[-1], "step": 7})
    assert told == [] and len((run_dir / WARNINGS).read_text().splitlines()) == 1
    Warner(run_dir, TrainConfig(), 3, told.append)  # steps 4 to 6 are run again
    assert (run_dir / WARNINGS).read_text() == "" and told == []


@pytest.mark.slow
def test_a_watch_that_fails_does_not_end_the_run(warned: tuple[Path, str], tmp_path: Path) -> None:
    told: list[str] = []
    warner = Warner(tmp_path, TrainConfig(), 0, told.append)
    warner.step([])  # ty: ignore[invalid-argument-type]
    warner.step({"reward/mean": 0.0})
    assert len(told) == 1 and "no longer checked" in told[0]


@pytest.mark.slow
def test_traces_show_mixed_groups_and_a_lottery(warned: tuple[Path, str], tmp_path: Path) -> None:
    """A real run's traces, before and after rollouts are dealt to other groups, or rewards drawn by lot."""
    healthy = warned[0]

    def changed(name: str, change) -> list[str]:
        copy = tmp_path / name
        shutil.copytree(healthy, copy, ignore=shutil.ignore_patterns("checkpoints", "model"))
        for path in (copy / "traces").iterdir():
            path.write_bytes(
                gzip.compress("".join(json.dumps(record) + "\n" for record in change(_records(path))).encode())
            )
        return [f.cause for f in examine(copy) if f.cause]

    def shuffle(records: list[dict]) -> list[dict]:
        return random.Random(0).sample(records, len(records))

    def lottery(records: list[dict]) -> list[dict]:
        for i, record in enumerate(records):
            record["rewards"]["correct"]["score"] = float(i % 2)
        return records

    assert changed("same", lambda records: records) == ["gradient-clipped-to-nothing"]
    assert changed("mixed", shuffle)[0] == "groups-mixed"
    assert changed("lottery", lottery)[0] == "reward-nondeterministic"


def _records(path: Path) -> list[dict]:
    return [json.loads(line) for line in trace_files.read(path).splitlines()]


def rollouts_that_earn_nothing(replies: Sequence[tuple[str, str]]) -> list[Rollout]:
    """One rollout for each (right answer, last message), with reward 0."""
    parts = [(Part("assistant", reply, True, 0, 1),) for _, reply in replies]
    return [
        Rollout(1, i, i, f"task-{i}", 0, True, (i,), 0.0, {}, parts[i], (gold,), "", ())
        for i, (gold, _) in enumerate(replies)
    ]


@given(st.integers(16, 64), st.randoms())
def test_right_answers_that_earn_nothing_are_told_from_those_by_chance(count, random):
    """A quarter of all replies is right in one case; in the other, each says "yes" or "no" without looking."""
    names = [f"name{i}" for i in range(64)]
    right = [(name, f"It is {name}." if i < count else "unknown") for i, name in enumerate(names)]
    found = parsing(rollouts_that_earn_nothing(right))
    assert found and found.cause == "reward-wrong"
    guessed = [(random.choice(["yes", "no"]), random.choice(["yes", "no"])) for _ in range(64)]
    agree = sum(gold == reply for gold, reply in guessed)
    assume(abs(agree - 32) < 6)  # one and a half standard deviations of a fair coin
    assert (found := parsing(rollouts_that_earn_nothing(guessed))) and found.verdict == "pass"


def test_arithmetic_and_worked_solutions_have_their_value_as_the_answer() -> None:
    replies = [(f"{k + 20}", f"The sum is \\fbox{{{k} + 2 * 10}}") for k in range(24)]
    found = parsing(rollouts_that_earn_nothing(replies))
    assert found and found.cause == "reward-wrong"
    wrong = [(gold, f"\\fbox{{{k} + 7 * 31}}") for k, (gold, _) in enumerate(replies)]
    assert (found := parsing(rollouts_that_earn_nothing(wrong))) and found.verdict == "pass"
    assert value_of("12 + 13 * 2") == 38 and value_of("(1 + 2) / 4") == 0.75
    assert value_of("2 ** 9") is None and value_of("1 / 0") is None and value_of("print(1)") is None
    record = {"nodes": [], "rewards": {}, "metrics": {}, "ok": True}
    task = {"key": "a", "data": {"answer": "He has 2 and gets 3.\n2 + 3 = 5\n#### 5"}}
    assert Rollout.of({**record, "task": task}, 1, 0, 0, 0).gold == ("5",)


@pytest.mark.slow
def test_traces_show_answers_lost_in_parsing_and_a_reward_for_form(warned: tuple[Path, str], tmp_path: Path) -> None:
    config = "\n".join(("model = 'tiny'", "num_generations = 4"))
    rows = (warned[0] / "metrics.jsonl").read_text()
    for name, cause in (("parsing", "reward-wrong"), ("form", "reward-format-dominated")):
        (tmp_path / name / "traces").mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text(config)
        (tmp_path / name / "metrics.jsonl").write_text(rows)
        records = _records(warned[0] / "traces/step_1.jsonl.gz") + _records(warned[0] / "traces/step_2.jsonl.gz")
        for i, record in enumerate(records):
            right = record["rewards"]["correct"]["score"]
            tidy = float(i % 4 < 2)
            record["metrics"] |= {"correct": right, "format": tidy}
            # Real replies: to the right ones the reward is blind in the one case, and sees only form in the other.
            record["rewards"]["correct"]["score"] = 0.0 if name == "parsing" else tidy + 0.05 * right
        (tmp_path / name / "traces/step_1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        found = [f.cause for f in examine(tmp_path / name) if f.cause]
        assert cause in found, (name, found)
    rollouts = read_traces(tmp_path / "form/traces/step_1.jsonl", 4)
    assert len(rollouts) == 64 and {r.group for r in rollouts} == set(range(16)) and all(r.gold for r in rollouts)


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=20))
def test_correlation_is_bounded_and_symmetric(pairs: list[tuple[float, float]]) -> None:
    a, b = ([x - math.fsum(values) / len(values) for x in values] for values in zip(*pairs, strict=True))
    assert correlation(a, b) == correlation(b, a) and abs(correlation(a, b)) <= 1 + 1e-9
    assert correlation(a, a) == pytest.approx(1.0) or not any(a) or sum(x * x for x in a) < 1e-12


def test_examine_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.toml"):
        examine(tmp_path)
    (tmp_path / "config.toml").write_text("model = 'tiny'")
    with pytest.raises(UserError, match="no finished training step"):
        examine(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows_of(FIRST)[0]) + '\n{"step": 2, "rew')
    assert [f.verdict for f in examine(tmp_path) if f.verdict != "pass"] == ["unsure"]


def test_the_page_holds_everything_and_loads_nothing() -> None:
    findings = [
        Finding("Is <this> safe?", "pass", "1 < 2 & 3 > 2"),
        Finding("Do the weights move?", "fail", "1.2e-13 nats", "learning-rate-too-low", 7),
        Finding("Who knows?", "unsure", "too little"),
    ]
    page = Page(text := render(findings, "run <r>"))
    assert page.open == [] and not {"src", "href"} & {name for name, _ in page.attributes} and "http" not in text
    cause = CAUSES["learning-rate-too-low"]
    for part in ("run <r>", "Is <this> safe?", "1 < 2 & 3 > 2", cause.sentence, cause.fix, "step 7", "1 fail"):
        assert part in page.text, part
    assert page.text.index(cause.sentence) < page.text.index("Is <this> safe?")  # the answer comes first
    assert "Every check passed" in render(findings[:1], "t") and "some were inconclusive" in render(findings[::2], "t")


def test_watching_loads_no_torch() -> None:
    import subprocess

    code = "import plumbob.trainer.watch.watch, plumbob.trainer.doctor.page, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_bench_s_faults_have_their_doubles_and_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS.parent / "tools" / "bench"))
    watch, faults = importlib.import_module("watch"), importlib.import_module("watch_faults")
    assert {case.cause for case in watch.FAULTY} <= set(CAUSES)
    assert {case.double for case in watch.FAULTY} - {None} == set(faults.DOUBLES)
    names = [case.name for case in [*watch.FAULTY, *watch.healthy(0, 3)]]
    assert len(set(names)) == len(names)
