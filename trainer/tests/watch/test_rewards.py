"""The watch on rewards: held-out against training, other ranges than 0 to 1, and how sure means are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from plumbob.testing.recorded_runs import FIRST, config_of, rows_of
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.watch.watch import Watch, evaluation_before, examine


def test_held_out_reward_against_training() -> None:
    watch = Watch(TrainConfig(eval_examples=256, eval_steps=5))
    # The first step again and again; only Adam's first update is as large as this one's.
    row = {name: value for name, value in rows_of(FIRST)[0].items() if name != "optimizer/update_rms"}
    before = {"eval/greedy": 0.4, "eval/sampled": row["reward/mean"] + 0.1, "eval/count": 256}
    assert watch.evaluated(0, before) == []
    told = []
    for step, (reward, held_out) in enumerate([(0.3, 0.4), (0.5, 0.6), (0.7, 0.5), (0.9, 0.3)], 1):
        for _ in range(5):
            told += watch.update({**row, "reward/mean": reward, "step": step * 5})
        told += watch.evaluated(step * 5, {"eval/greedy": held_out})
    assert [f.cause for f in told] == ["reward-hacked"] and told[0].step == 20

    # Two means differ by three standard errors or not: 4 tasks a step tell less than 16.
    # So do fewer held-out tasks than were asked for, and rewards that may be -1.
    different = ["evaluation-differs"]
    for groups, count, least, causes in (
        (16.0, 256, 0.0, different),
        (4.0, 256, 0.0, []),
        (16.0, 10, 0.0, []),
        (16.0, None, 0.0, []),
        (16.0, 256, -0.1, []),
    ):
        watch = Watch(TrainConfig(eval_examples=256))
        known = {} if count is None else {"eval/count": count}
        watch.evaluated(0, {"eval/greedy": least, "eval/sampled": row["reward/mean"] + 0.4, **known})
        assert [f.cause for f in watch.update({**row, "groups/count": groups})] == causes


@pytest.mark.parametrize(("count", "least", "names"), [(256, 0.0, True), (20, 0.0, False), (256, -0.01, False)])
def test_the_noise_of_an_evaluation_is_that_of_its_tasks_and_rewards(count: int, least: float, names: bool) -> None:
    """A fall of 0.3 tells something of 256 tasks with rewards of 0 and 1, and nothing of 20, or of rewards -1 and 1."""
    watch, row = Watch(TrainConfig(eval_examples=256)), {**rows_of(FIRST)[0], "reward/std": 0.4}
    told = []
    for step, (reward, held_out) in enumerate([(least, 0.5), (0.7, 0.6), (0.9, 0.3)], 1):
        for _ in range(5):
            told += watch.update({**row, "reward/mean": reward, "step": step * 5})
        told += watch.evaluated(step * 5, {"eval/greedy": held_out, "eval/count": count})
    assert ("reward-hacked" in {f.cause for f in told}) == names


def run_directory(folder: Path, rows: list[dict[str, Any]], **files: Any) -> Path:
    (folder / "config.toml").write_text("model = 'tiny'")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_the_evaluated_tasks_are_counted_in_the_summary(tmp_path: Path) -> None:
    row = {**rows_of(FIRST)[0], "groups/count": 16.0}
    for count, different in ((256, True), (10, False)):
        before = {how: {"mean": row["reward/mean"] + 0.4, "n": count} for how in ("greedy", "sampled")}
        folder = run_directory(tmp_path, [row], summary={"evaluations": {"before": before}})
        causes = [f.cause for f in examine(folder)]
        assert ("evaluation-differs" in causes) == different
    (tmp_path / "summary.json").write_text(json.dumps({"evaluations": {"after": {"greedy": {"mean": 0.5, "n": 7}}}}))
    assert evaluation_before(tmp_path) == {"eval/count": 7}


@pytest.mark.parametrize(
    ("rewards", "passed", "verdict"),
    [
        ((60.0, 60.0), 0.0, "unsure"),
        ((60.0, 60.0), 8.0, "pass"),
        ((40.0, 60.0), 0.0, "pass"),
        ((0.95, 0.95), 0.0, "pass"),
    ],
)
def test_a_flat_reward_is_judged_on_its_own_scale(
    rewards: tuple[float, float], passed: float, verdict: str, tmp_path: Path
) -> None:
    """60 of what may be 100 is solved only if whole groups have it."""
    changed = {"groups/count": 8.0, "groups/all_pass": passed, "groups/all_fail": 0.0}
    rows = [{**row, **changed, "reward/mean": rewards[i > 4]} for i, row in enumerate(rows_of(FIRST)[:10])]
    if passed:  # from the start, it would be a task that teaches nothing
        rows[:5] = [{**row, "groups/all_pass": 0.0} for row in rows[:5]]
    last = examine(run_directory(tmp_path, rows))[-1]
    assert (last.check, last.verdict) == ("the reward rises", verdict)
    assert f"mean reward {rewards[0]:.3f} -> {rewards[1]:.3f} from the first 5 of 10 steps" in last.evidence


def test_a_flat_reward_above_1_silences_no_rule() -> None:
    watch, causes = Watch(dataclasses.replace(config_of(FIRST), num_iterations=4)), []
    for step, row in enumerate(rows_of(FIRST)[:10], 1):
        changed = {"reward/mean": 60.0, "policy/clip_fraction": 0.6, "groups/all_pass": 0.0}
        causes += [f.cause for f in watch.update({**row, **changed, "step": step})]
    assert causes == ["ratio-clipped"]


def test_a_worse_held_out_reward_alone_is_no_hacking() -> None:
    """What the training reward was before the first step, nobody knows: it is not 0."""
    watch, row = Watch(TrainConfig(eval_examples=256)), {**rows_of(FIRST)[0], "reward/mean": 0.5}
    told = watch.evaluated(0, {"eval/greedy": 0.9, "eval/sampled": 0.5})
    for step in range(1, 11):
        told += watch.update({**row, "step": step})
    told += watch.evaluated(10, {"eval/greedy": 0.4})
    assert "reward-hacked" not in {f.cause for f in told}
