"""A run goes on, or ends with a true sentence, whatever its environment does; nothing finished is lost."""

import asyncio
import dataclasses
import gc
import math
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
import verifiers.v1 as vf
import vf_lookup.taskset
import vf_lookup.tools
from plumbob.console import INTERRUPTED, UserError
from plumbob.doctor.causes import CAUSES
from plumbob.rollout import Sample
from plumbob.testing import hanging
from plumbob.testing.quick_runs import quick_config
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.rollouts.batch import NOT_FINITE_LOGPROB, Batch, discard_stale, nothing_to_use
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training import train as training
from plumbob.trainer.training.finish import _warnings
from plumbob.trainer.training.metrics import batch_metrics
from plumbob.trainer.training.train import run

config_of = partial(quick_config, max_tokens=24, max_steps=2, max_seconds=2.5)


def train(folder, **settings):
    """Run training; returns the exit code and the rows of metrics."""
    code = run(config_of(folder, **settings))
    return code, read_metrics(folder / "r")


def sometimes(monkeypatch, owner, name, fault, chance=0.15, seed=1):
    """Make a method of the environment have one of these faults at random. `fault`: called in place of the method."""
    original, rng = getattr(owner, name), random.Random(seed)

    if asyncio.iscoroutinefunction(original):

        async def method(self, *args, **kwargs):
            return fault() if rng.random() < chance else await original(self, *args, **kwargs)
    else:

        def method(self, *args, **kwargs):
            return fault() if rng.random() < chance else original(self, *args, **kwargs)

    method.__dict__.update(vars(original))
    for kept in ("__name__", "__doc__", "__annotations__", "__signature__"):
        if hasattr(original, kept):
            setattr(method, kept, getattr(original, kept))
    method.__wrapped__ = original
    monkeypatch.setattr(owner, name, method)


TOOL = (vf_lookup.tools.LookupToolset, "lookup")
REWARD = (vf_lookup.taskset.LookupTask, "correct")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["sleep", "CancelledError", "SystemExit", "KeyboardInterrupt", "BaseException"])
@pytest.mark.parametrize("place", [TOOL, REWARD], ids=["tool", "reward"])
def test_a_run_goes_on_when_its_environment_hangs_or_exits_at_random(tmp_path, monkeypatch, capsys, fault, place):
    sometimes(monkeypatch, *place, hanging.SYNC[fault][0])
    code, rows = train(tmp_path)
    assert code == 0 and len(rows) == 2 and (tmp_path / "r" / "summary.json").is_file()
    assert (tmp_path / "r" / "model" / "model.safetensors").is_file()
    out, err = capsys.readouterr()
    name = place[1]
    failed = int(sum(row["rollout/errored"] for row in rows))
    assert 0 < failed < 32 and "Traceback" not in err and "Interrupted" not in err
    assert f"Of 32 training rollouts, {failed} failed" in out
    if fault == "sleep":
        assert sum(row["rollout/stuck"] for row in rows) == failed
        assert f"stuck in `{name}` for 0.5 s, left out of their groups" in err
        assert f"({failed} of them hung)" in out
    else:
        assert f"left out of their groups: `{name}` raised {hanging.SYNC[fault][1]}" in err


@pytest.mark.slow
@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf")])
def test_a_reward_that_is_not_finite_is_named(tmp_path, monkeypatch, capsys, value, shown):
    sometimes(monkeypatch, *REWARD, lambda: value)
    code, rows = train(tmp_path)
    lost = int(sum(row["rollout/not_finite"] for row in rows))
    out, err = capsys.readouterr()
    assert code == 0 and lost > 0 and sum(row["rollout/errored"] for row in rows) == 0
    assert f"cannot be used and are left out of their groups: reward `correct` is {shown}" in err
    assert f"Of 32 training rollouts, {lost} were not finite; they were left out." in out


@pytest.mark.slow
def test_a_step_without_a_finite_reward_ends_the_run_with_a_true_sentence(tmp_path, monkeypatch, capsys):
    sometimes(monkeypatch, *REWARD, lambda: math.nan, chance=1.0)
    code, rows = train(tmp_path)
    out, err = capsys.readouterr()
    assert code == 1 and rows == []
    assert "Stopped in step 1: all 16 rollouts cannot be used: reward `correct` is nan" in err
    assert "same reward" not in out + err


@pytest.mark.slow
def test_prompts_that_fill_the_context_are_called_that(tmp_path, capsys):
    with pytest.raises(UserError, match="--max-context 32 leaves no room for a reply"):
        train(tmp_path, max_context=32)
    code, rows = train(tmp_path / "tools", max_context=100)  # room for the prompt without its tools
    out, err = capsys.readouterr()
    assert code == 1 and rows == []
    assert "the prompt alone leaves no room for a reply within --max-context 100" in err
    assert "same reward" not in out + err and "stale" not in out + err


@pytest.mark.slow
def test_finished_steps_are_saved_when_no_rollout_of_a_step_can_be_used(tmp_path, monkeypatch, capsys):
    original, calls = vf_lookup.taskset.LookupTask.correct, []

    async def correct(self, trace: vf.Trace) -> float:
        calls.append(trace)
        return await original(self, trace) if len(calls) <= 32 else math.nan

    correct.__dict__.update(vars(original))
    monkeypatch.setattr(vf_lookup.taskset.LookupTask, "correct", correct)
    code, rows = train(tmp_path, max_steps=4, save_steps=100)
    assert code == 1 and [row["step"] for row in rows] == [1, 2]
    assert "Resume with:  train --resume" in capsys.readouterr().err
    assert (tmp_path / "r" / "checkpoints" / "step_2" / "trainer.pt").is_file()


def test_the_end_of_a_run_says_no_false_sentence():
    row = {"groups/count": 2, "groups/zero_signal": 2, "rollout/count": 8, "rollout/errored": 0}
    signal, empty = {**row, "groups/zero_signal": 1}, {**row, "groups/count": 0, "groups/zero_signal": 0}
    assert list(_warnings([row, signal])) == []
    assert [line.split(":")[0] for line in _warnings([row, row])] == ["No group had a signal"]
    assert list(_warnings([empty, empty])) == ["In 2 of 2 steps no rollout could be used, so they trained nothing."]
    lost = list(_warnings([{**signal, "rollout/errored": 3, "rollout/stuck": 2, "rollout/stale": 1}]))
    assert lost == [
        "Of 8 training rollouts, 3 failed (2 of them hung), 1 were older than --max-staleness allows, or in a group "
        "with one that was; they were left out."
    ]


# Staleness


def sample(group, version, tokens=4, seconds=1.0, reward=0.0):
    ids = list(range(tokens))
    return Sample(
        ids, [True] * tokens, [0.0] * tokens, reward, group, "", False, version, seconds, {"rollout/turns": 1}
    )


def test_a_group_with_one_old_rollout_is_discarded_whole_and_its_length_reported():
    """The old rollout is the group's longest: the others alone would be compared with too low a mean."""
    kept = [sample("0/0", 3), sample("0/0", None)]
    old = [sample("0/1", 3, 10, 5.0), sample("0/1", 1, 30, 15.0)]
    batch = Batch(samples=[*kept, *old], drawn=[*kept, *old], num_rollouts=4)
    discard_stale(batch, oldest=2)
    assert batch.samples == batch.drawn == kept and batch.stale == old
    row = batch_metrics(batch)
    assert row["rollout/stale"] == 2
    assert (row["rollout/stale_tokens"], row["rollout/sampled_tokens"]) == (20, 4)


@pytest.mark.slow
def test_a_run_all_of_whose_rollouts_are_too_old_three_times_ends(tmp_path, monkeypatch, capsys):
    original = TransformersEngine.generate

    async def generate(self, prompt_ids, sampling):
        return dataclasses.replace(await original(self, prompt_ids, sampling), policy_version=-1)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    code, rows = train(tmp_path, max_steps=5)
    assert code == 1 and [row["rollout/stale"] for row in rows] == [16, 16]
    assert "in 3 steps in a row every rollout was older than --max-staleness 0 allows" in capsys.readouterr().err


# Huge rewards


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("size", [1e300, 1.7e308])
def test_rewards_of_any_finite_size_give_finite_scaled_advantages(scale, size):
    rows = [
        dataclasses.replace(sample("g", 0, reward=r), rewards={"a": r}) for r in (size, size / 2, 0.0, 0.0, size, size)
    ]
    found = compute_advantages(rows, scale)
    assert all(map(math.isfinite, found.values)) and found.zero_signal_groups == 0
    if scale != "none":
        same = compute_advantages(
            [dataclasses.replace(r, reward=r.reward / size, rewards={"a": r.reward / size}) for r in rows],
            scale,
            epsilon=1e-300,
        )
        assert found.values == pytest.approx(same.values)


@pytest.mark.slow
def test_a_run_with_rewards_of_1e300_and_scaling_trains(tmp_path, monkeypatch):
    sometimes(monkeypatch, *REWARD, lambda: 1e300)
    code, rows = train(tmp_path, scale_rewards="group")
    assert code == 0 and all(math.isfinite(row["loss"]) and row["optimizer/skipped"] == 0 for row in rows)


# The process

PROGRAM = """
import sys, time
import vf_lookup.tools
from plumbob.console.app import run_app
from plumbob.trainer.cli import doctor, train

def lookup(self, key: str) -> str:
    print("it hangs", flush=True)
    time.sleep(10**6)

lookup.__dict__.update(vars(vf_lookup.tools.LookupToolset.lookup))
vf_lookup.tools.LookupToolset.lookup = lookup
name, *args = sys.argv[1:]
run_app(name, {"train": train.app, "doctor": doctor.app}[name], args)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "doctor"])
def test_the_first_ctrl_c_ends_a_command_whose_tool_hangs(tmp_path, command):
    args = ["lookup", "--eval-examples", "0", "--batch-size", "16", "--num-generations", "4"]
    args += ["--max-seconds", "18000"]
    done = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, command, *args],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = ""
    while line != "it hangs\n":
        line = done.stdout.readline()
        assert line, done.stderr.read()
    time.sleep(0.5)
    done.send_signal(signal.SIGINT)
    _, err = done.communicate(timeout=600)  # the tool would hang for an hour, and then that of the next rollout
    assert done.returncode == INTERRUPTED, err
    assert "Interrupted after step 0" in err or "interrupted" in err


# --- memory ------------------------------------------------------------------------------------------------------------


async def fail():
    raise RuntimeError("at random")


@pytest.mark.slow
def test_rollouts_are_freed_once_the_task_that_their_environment_left_running_has_ended(tmp_path, monkeypatch):
    """The task belongs to the first step and ends in the second one: it must not be taken for something that stays."""
    original, calls, ends, alive = vf_lookup.taskset.LookupTask.correct, [], [], []

    async def correct(self, trace: vf.Trace) -> float:
        calls.append(trace.id)
        if len(calls) == 1:
            ends.append(asyncio.Event())
            await asyncio.gather(fail(), ends[0].wait())
        if len(calls) > 16:
            ends[0].set()
        return await original(self, trace)

    correct.__dict__.update(vars(original))
    monkeypatch.setattr(vf_lookup.taskset.LookupTask, "correct", correct)

    def count(*_):
        """Called when a step has been recorded. Rows are freed by then; the ended task's exception holds itself."""
        for thread in [thread for thread in threading.enumerate() if thread.name == "behind"]:
            thread.join()  # it writes the step's traces, and holds them until then
        rows_alive = sum(isinstance(o, Sample) for o in gc.get_objects())
        gc.collect()
        alive.append([sum(isinstance(o, vf.Trace) for o in gc.get_objects()), rows_alive])

    monkeypatch.setattr(training, "judge", count)
    code, rows = train(tmp_path, max_steps=3)
    assert code == 0 and [row["rollout/errored"] for row in rows] == [1, 0, 0]
    # The task that still runs holds the trace of its own rollout, and no other.
    assert alive[1:4] == [[1, 0], [0, 0], [0, 0]]  # the first is before the first step


@pytest.mark.slow
def test_the_model_of_a_run_is_freed_before_that_of_the_next_run_is_loaded(tmp_path, monkeypatch):
    engines, alive = [], []
    original = training.set_up

    def set_up(*args, **named):
        alive.append(sum(engine() is not None for engine in engines))
        run_ = original(*args, **named)
        engines.append(weakref.ref(run_.engine))
        return run_

    monkeypatch.setattr(training, "set_up", set_up)
    for seed in (0, 1):
        assert train(tmp_path / str(seed), seed=seed, max_steps=1)[0] == 0
    assert len(engines) == 2 and alive == [0, 0]


@pytest.mark.parametrize(
    ("failures", "counts", "cause"),
    [
        (["`lookup` did not return within 1 s"] * 4, {"stuck": 4}, "rollouts-fail"),
        (["KeyError: 'x'"] * 4, {}, "rollouts-fail"),
        (["the reward is NaN"] * 4, {"not_finite": 4}, "not-finite"),
        ([NOT_FINITE_LOGPROB] * 4, {"not_finite": 4}, "engine-trainer-mismatch"),
        (["the prompt is too long"] * 4, {"no_turn": 4}, "truncated-rollouts"),
    ],
)
def test_a_step_without_a_usable_rollout_ends_the_run_for_the_commonest_reason(failures, counts, cause):
    found = nothing_to_use(Batch(failures=failures, num_rollouts=4, **counts))
    assert found.cause == cause and cause in CAUSES and failures[0] in str(found)
