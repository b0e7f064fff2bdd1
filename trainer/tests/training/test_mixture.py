"""Several environments in one run: their shares, settings, metrics and held-out tasks, and resuming."""

from __future__ import annotations

import base64
import gzip
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plumbob.console import UserError
from plumbob.testing import kill_driver
from plumbob.testing.quick_runs import quick_config, resume
from plumbob.trainer.cli.train import configure
from plumbob.trainer.report.rollouts import collect
from plumbob.trainer.rollouts.selection import schedule
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.metric_names import describe
from plumbob.trainer.training.train import run

BOTH = {
    "env": ("lookup:2", "gsm8k:1"), "env_args": ("gsm8k.datasets=synthetic", "lookup.max_hops=2"), "max_tokens": 24,
    "eval_examples": 3, "save_steps": 1, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
}  # fmt: skip


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_groups_are_divided_exactly(weights):
    turns = schedule(weights)
    assert len(turns) == sum(weights) // math.gcd(*weights)
    for number in range(1, len(turns) + 1):
        counts = [turns[:number].count(env) for env in range(len(weights))]
        assert all(abs(c - number * w / sum(weights)) < len(weights) for c, w in zip(counts, weights, strict=True))
    assert [turns.count(env) * sum(weights) for env in range(len(weights))] == [len(turns) * w for w in weights]


def test_settings_belong_to_one_environment():
    config, _ = configure({"env": ["lookup:2", "musique"], "unknown_options": ["musique.noise=0.5", "max-hops=2"]})
    assert config.members == [("lookup", 2), ("musique", 1)] and config.env == "lookup"
    lookup, musique = config.for_each_environment()
    assert lookup.env_args == ("max_hops=2",) and musique.env_args == ("noise=0.5",) and musique.env == "musique"


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"env": ["lookup", "gsm8k:0"]}, "a whole number from 1 to 1000, as in gsm8k:2, not 'gsm8k:0'"),
        ({"env": ["lookup", "vf-lookup"]}, "an environment is named twice"),
        ({"env": ["lookup", "gsm8k"], "datasets": "x"}, r"give -a ENV\.datasets=\.\.\. instead"),
        ({"env": ["lookup", "gsm8k"], "env_args": ["musique.noise=1"]}, "'musique', which is not an environment of"),
        (
            {"env": ["gsm8k", "musique"], "unknown_options": ["datasets=x"]},
            "setting of gsm8k and musique; write --gsm8k",
        ),
        ({"env": ["lookup", "gsm8k"], "unknown_options": ["nois=1"]}, "there is no option --nois"),
    ],
)
def test_what_is_not_clear_is_refused(given_, said):
    with pytest.raises(UserError, match=said):
        configure(given_)


def environments_of(directory: Path) -> list[list[str]]:
    """Of each step, the environment of each group, told by whether its rollouts have tools."""
    steps = []
    for path in trace_files.stored_steps(directory).values():
        rows = [json.loads(line) for line in trace_files.read(path).splitlines()]
        steps.append(["lookup" if "hops" in row["metrics"] else "gsm8k" for row in rows[::4]])
    return steps


@pytest.mark.slow
def test_a_run_of_two_environments_and_its_resumption(tmp_path):
    assert run(quick_config(tmp_path, "whole", **BOTH, max_steps=3)) == 0
    assert run(quick_config(tmp_path, "parts", **BOTH, max_steps=1)) == 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert resume(parts, max_steps=3) == 0
    rows = kill_driver.metrics(whole)
    assert [without_evaluations(row) for row in rows] == [
        without_evaluations(row) for row in kill_driver.metrics(parts)
    ]
    assert environments_of(whole) == environments_of(parts)

    groups = [env for step in environments_of(whole) for env in step]
    assert groups == ["lookup", "gsm8k", "lookup"] * 4
    # The report's command that plays a stored rollout again names its environment.
    chunks = [gzip.decompress(base64.b64decode(chunk)) for chunk in collect([whole]).chunks]
    stored = [rollout["env"] for chunk in chunks for rollout in json.loads(chunk)]
    assert stored == [env for env in groups for _ in range(4)]
    for row in rows:
        counts = {env: row[f"groups/count/{env}"] for env in ("lookup", "gsm8k")}
        assert sum(counts.values()) == row["groups/count"] == 4
        mean = sum(counts[env] * row[f"reward/mean/{env}"] for env in counts) / 4
        assert row["reward/mean"] == pytest.approx(mean)
        assert row["rollout/turns/gsm8k"] == 1.0 < row["rollout/turns/lookup"]
        assert all(describe(name) is not None for name in row)
    after = json.loads((whole / "summary.json").read_text())["evaluations"]["after"]
    assert {how: estimate["n"] for how, estimate in after.items() if "greedy" in how} == {
        "greedy": 6, "greedy/lookup": 3, "greedy/gsm8k": 3,
    }  # fmt: skip
    assert rows[-1]["eval/count"] == 6
    with pytest.raises(
        UserError, match="own environments and weights, lookup:2 gsm8k:1, so they cannot become lookup:1"
    ):
        configure({"resume": str(whole), "env": ["lookup:1", "gsm8k:1"]})


def without_evaluations(row: dict) -> dict:
    """A run that ends after one step is evaluated there, and an uninterrupted one is not."""
    return {name: value for name, value in row.items() if not name.startswith("eval/")}
