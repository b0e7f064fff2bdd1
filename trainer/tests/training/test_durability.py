"""What a run survives: kills, a full disk, gradients that are not finite, too little memory, Ctrl-C, damaged files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from plumbob.console import INTERRUPTED, UserError
from plumbob.testing import kill_driver
from plumbob.testing.kill_driver import metrics
from plumbob.testing.quick_runs import quick_config, resume
from plumbob.testing.step_gradients import make_run, relative_difference, samples
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.config.options import flag
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.rollouts.batch import RunFailed
from plumbob.trainer.rollouts.interruption import Interruption
from plumbob.trainer.run_files.behind import Behind
from plumbob.trainer.run_files.manifest import write_manifest
from plumbob.trainer.run_files.run_directory import MetricsLog, truncate_metrics
from plumbob.trainer.training import checkpoint, record, step, steps
from plumbob.trainer.training import train as loop
from plumbob.trainer.training.capacity.out_of_memory import remedies, wake_engine
from plumbob.trainer.training.forward_backward import accumulate
from plumbob.trainer.training.minibatches import make_minibatches
from plumbob.trainer.training.train import run
from safetensors.torch import load_file

config_of = partial(quick_config, batch_size=12, max_steps=4, save_steps=1, eval_examples=4, learning_rate=1e-3)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that was left alone."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(config_of(folder, "r")) == 0
    return folder / "r"


def before_each_step(monkeypatch, action: Callable[[int], None]) -> None:
    """Call `action` with each step's number, from 1, before it begins."""
    original = steps.train_step

    def train_step(run_, *args):
        action(run_.state.step + 1)
        return original(run_, *args)

    monkeypatch.setattr(steps, "train_step", train_step)


# Kills


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "kills"), [("lora", 4), ("full", 2)])
def test_a_run_killed_again_and_again_ends_as_if_it_had_been_left_alone(tmp_path, variant, kills):
    """The driver checks after every kill that the newest checkpoint is whole and at most the step under way is lost."""
    command = [sys.executable, kill_driver.__file__, str(tmp_path), "--variant", variant, "--kills", str(kills)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[0])
    assert len(report["kills"]) == kills and report["compared"] >= 1
    assert max(kill["lost"] for kill in report["kills"]) <= 1


def test_what_a_kill_left_of_a_checkpoint_is_tidied_up(tmp_path):
    root = tmp_path / "checkpoints"
    for name in (".step_4.old", ".step_3.old", "step_3", ".step_5.partial"):
        (root / name).mkdir(parents=True)
        (root / name / "state.json").write_text(name)
    checkpoint.tidy(tmp_path)
    assert sorted(path.name for path in root.iterdir()) == ["step_3", "step_4"]
    assert (root / "step_3" / "state.json").read_text() == "step_3"
    assert checkpoint.latest(tmp_path) == root / "step_4"


def test_metrics_of_steps_that_are_run_again_go_and_so_does_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 3}\n{"step": 4}\n{"ste')
    assert truncate_metrics(tmp_path, 3) == 1  # step 2 has no line
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    path.unlink()
    assert truncate_metrics(tmp_path, 3) == 3 and path.read_text() == ""


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_before_older_ones_go(tmp_path, monkeypatch):
    """What a power cut leaves depends on this order, and nothing but the order of the calls can show it here."""
    done = []

    def noted(name):
        original = getattr(os, name)

        def call(target, *more, **options):
            path = os.readlink(f"/proc/self/fd/{target}") if name == "fsync" else os.fspath(target)
            done.append((name, path.removeprefix(f"{tmp_path}/r/checkpoints"), *map(str, more[:1])))
            return original(target, *more, **options)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    assert run(config_of(tmp_path, "r", max_steps=2, save_steps=1, save_total_limit=1)) == 0
    root = tmp_path / "r" / "checkpoints"
    named = done.index(("replace", "/.step_2.partial", f"{root}/step_2"))
    first = done.index(("replace", "/.step_1.partial", f"{root}/step_1"))
    files = [path.relative_to(root / "step_2").as_posix() for path in (root / "step_2").rglob("*") if path.is_file()]
    flushed = {entry[1] for entry in done[first:named] if entry[0] == "fsync"}
    missing = {name for name in files if f"/.step_2.partial/{name}" not in flushed} - {"manifest.json"}
    assert (
        not missing
        and {"/.step_2.partial", "/.step_2.partial/model", "/.step_2.partial/manifest.json.partial"} <= flushed
    )
    gone = done.index(("replace", "/step_1", f"{root}/.step_1.partial"))
    assert ("fsync", "") in done[named:gone]


# A full disk


@pytest.mark.slow
def test_a_full_disk_costs_what_did_not_fit_but_not_the_run(tmp_path, monkeypatch, capfd, undisturbed):
    """Metrics and traces onto /dev/full in step 2; checkpoints beyond the largest file that is allowed from step 3 on."""
    directory = tmp_path / "r"
    log, kept = directory / "metrics.jsonl", directory / "kept"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # Python's own choice: the write fails instead

    def fill_the_disk(number: int) -> None:
        if number == 2:
            log.rename(kept)
            log.symlink_to("/dev/full")
            (directory / "traces" / "step_2.jsonl.gz.partial").symlink_to("/dev/full")
        if number == 3:
            log.unlink()
            kept.rename(log)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))

    before_each_step(monkeypatch, fill_the_disk)
    try:
        assert run(config_of(tmp_path, "r")) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    stderr = capfd.readouterr().err
    assert stderr.count("could not be written; a later step tries again: [Errno 28] No space left on device") == 1
    assert (
        stderr.count(
            "The traces of step 2 could not be written and are lost: OSError: [Errno 28] No space left on device"
        )
        == 1
    )
    assert stderr.count("The checkpoint of step 3 could not be saved: ") == 1
    assert stderr.count("The checkpoint of step 4 could not be saved: ") == 1
    assert f"The last step has no checkpoint. Free some space, then:  train --resume {directory}" in stderr
    assert metrics(directory) == metrics(undisturbed)
    assert {path.name for path in (directory / "traces").iterdir()} == {f"step_{n}.jsonl.gz" for n in (1, 3, 4)}
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"step_1", "step_2"}
    assert kill_driver.newest(directory) == 2

    (directory / "metrics.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match=f"cannot write to {directory}: No space left on device"):
        resume(directory)
    monkeypatch.undo()
    assert resume(directory) == 0
    kill_driver.compare(directory, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("peft", [False, True])
def test_a_final_model_that_does_not_fit_is_a_sentence_and_resuming_writes_it(tmp_path, monkeypatch, capfd, peft):
    original, limits = loop.finish, resource.getrlimit(resource.RLIMIT_FSIZE)

    def finish(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))  # what is printed is a file here, and fits
        return original(*args)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(loop, "finish", finish)
            assert run(config_of(tmp_path, "r", max_steps=1, eval_examples=0, peft=peft)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    stderr = capfd.readouterr().err
    assert "The final model could not be written: " in stderr and f"train --resume {tmp_path / 'r'}" in stderr
    assert resume(tmp_path / "r") == 0
    assert (tmp_path / "r" / "model" / "model.safetensors").is_file()


def test_lines_that_could_not_be_written_are_written_with_the_next(tmp_path):
    log = MetricsLog(tmp_path)
    log.append({"step": 1})
    log.path.rename(tmp_path / "kept")
    log.path.symlink_to("/dev/full")
    for number in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            log.append({"step": number})
    log.amend(3, {"eval/greedy": 0.5})
    log.path.unlink()
    (tmp_path / "kept").rename(log.path)
    log.append({"step": 4})
    log.amend(4, {"eval/greedy": 1.0})
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2}, {"step": 3, "eval/greedy": 0.5}, {"step": 4, "eval/greedy": 1.0}]


# Gradients that are not finite


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_skipped_and_too_many_end_the_run(tmp_path, monkeypatch, capfd):
    name, bad, now = "model.layers.1.mlp.up_proj.weight", {2, 4, 5}, [0]
    before_each_step(monkeypatch, lambda number: now.__setitem__(0, number))
    original = loop.set_up

    def set_up(*args, **named):
        run_ = original(*args, **named)
        parameter = run_.policy.trainable[name]
        parameter.register_hook(lambda gradient: gradient * float("nan") if now[0] in bad else gradient)
        return run_

    monkeypatch.setattr(loop, "set_up", set_up)
    settings = {"max_steps": 6, "save_total_limit": 9, "eval_examples": 0}
    monkeypatch.setattr(step, "MOST_SKIPPED", 2)
    monkeypatch.setattr(record, "MOST_SKIPPED", 2)
    # A KL term, so that every step has a gradient.
    assert run(config_of(tmp_path, "r", **settings, kl_beta=0.01)) == 1
    assert (
        "Stopped in step 5: 2 optimizer steps in a row had a gradient that is not finite "
        f"(first in {name}); none of them was applied" in capfd.readouterr().err
    )
    rows = metrics(tmp_path / "r")
    assert [row["optimizer/skipped"] for row in rows] == [0, 1, 0, 1]
    assert [row["optimizer/updates"] for row in rows] == [1, 0, 1, 0]
    folders = [tmp_path / "r" / "checkpoints" / f"step_{n}" / "model" / "model.safetensors" for n in (1, 2, 3, 4)]
    first, second, third, fourth = (load_file(folder) for folder in folders)
    assert all(torch.equal(first[n], second[n]) and torch.equal(third[n], fourth[n]) for n in first)
    assert any(not torch.equal(second[n], third[n]) for n in first)
    assert all(torch.isfinite(value).all() for value in fourth.values())


# Too little memory


class SmallMemory:
    """Stands before a policy's `score`: out of memory in passes of more than `limit` tokens, or in the call numbered so.

    `unless`: whether memory suffices at the moment after all.
    """

    def __init__(
        self,
        score,
        *,
        limit: int = 10**9,
        call: int = 0,
        in_backward: bool = False,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        self.score, self.limit, self.call, self.in_backward, self.unless = score, limit, call, in_backward, unless
        self.calls = 0

    def __call__(self, rows, temperature):
        self.calls += 1
        full = sum(len(row.token_ids) for row in rows) > self.limit or self.calls == self.call
        full = full and not self.unless()
        if full and not self.in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more.")
        scores = self.score(rows, temperature)
        if full and scores.logprobs.requires_grad:
            scores.logprobs.register_hook(self.fail)
        return scores

    @staticmethod
    def fail(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), World(0, 1, torch.device("cpu")), num_iterations=2, kl_beta=0.1)


def gradients(real_run, memory: SmallMemory, monkeypatch) -> list[dict[str, torch.Tensor]]:
    """Of both iterations over a minibatch of 32 rows, in microbatches of about 400 tokens."""
    rows = samples()
    real_run.state.microbatch_tokens, real_run.state.out_of_memory = 400, 0
    (minibatch,) = make_minibatches(rows, compute_advantages(rows), real_run.config, real_run.world, count=1)
    with monkeypatch.context() as patch:
        patch.setattr(real_run.policy, "score", memory)
        result = []
        for _ in range(2):
            accumulate(real_run, minibatch, Interruption())
            result.append({n: p.grad.clone() for n, p in real_run.policy.trainable.items() if p.grad is not None})
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    # Of a microbatch, the first call is the reference's, the second the policy's.
    [{"limit": 150}, {"limit": 150, "in_backward": True}, {"call": 3}, {"call": 4}, {"call": 4, "in_backward": True}],
    ids=str,
)
def test_a_step_that_ran_out_of_memory_has_the_same_gradient_in_smaller_microbatches(real_run, monkeypatch, memory):
    score = real_run.policy.score
    whole = gradients(real_run, SmallMemory(score), monkeypatch)
    assert (real_run.state.microbatch_tokens, real_run.state.out_of_memory) == (400, 0)
    split = gradients(real_run, SmallMemory(score, **memory), monkeypatch)
    times = 2 if "limit" in memory else 1
    assert real_run.state.out_of_memory == times
    # Each time half of the largest microbatch that did not fit; these hold a little less than the limit allows.
    assert 0.8 * (400 >> times) <= real_run.state.microbatch_tokens <= 400 >> times
    for a, b in zip(split, whole, strict=True):
        assert relative_difference(a, b) < 1e-4


def test_before_a_run_is_given_up_the_engine_gives_back_what_it_holds(real_run, monkeypatch):
    """A row that fits beside an engine without its cache is trained on; one that does not fit either ends the run."""
    state = real_run.state
    score = real_run.policy.score
    whole = gradients(real_run, SmallMemory(score), monkeypatch)
    beside = gradients(real_run, SmallMemory(score, limit=50, unless=lambda: state.engine_asleep), monkeypatch)
    assert state.engine_rests and state.engine_asleep
    for a, b in zip(beside, whole, strict=True):
        assert relative_difference(a, b) < 1e-4
    wake_engine(real_run)
    with pytest.raises(RunFailed) as failed:
        gradients(real_run, SmallMemory(score, limit=50), monkeypatch)
    wake_engine(real_run)
    state.engine_rests = False
    said = str(failed.value)
    assert (
        "a single rollout of up to 8" in said and "use --gradient-checkpointing, --bf16, a --max-context below" in said
    )
    assert re.search(r"weights [\d.e-]+ GiB, the engine's copy of them [\d.e-]+ GiB", said)
    assert failed.value.unmoved and failed.value.resume_with == "--gradient-checkpointing"


def test_only_what_is_not_on_is_named(real_run):
    """And nothing that --resume refuses is named as an option to resume with."""

    def named(**settings) -> list[str]:
        run_ = dataclasses.replace(real_run, config=dataclasses.replace(real_run.config, **settings))
        return [remedy.option for remedy in remedies(run_, 2863)]

    assert named() == ["--gradient-checkpointing", "--bf16", "--max-context 2147", ""]  # and --peft in a new run
    assert named(gradient_checkpointing=True, bf16=True, peft=True) == ["--max-context 2147"]
    assert named(engine="vllm")[0] == "--vllm-sleep" and "--vllm-sleep" not in named(
        engine="vllm", vllm_url=("http://h:1",)
    )
    fixed = {flag(name) for name in real_run.config.fixed_on_resume}
    assert not fixed & {option.split(" ")[0] for option in [*named(), *named(engine="vllm")]}


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
def test_a_run_that_is_out_of_memory_keeps_its_last_step_and_goes_on_with_less(tmp_path, monkeypatch, capfd, updates):
    """Out of memory in step 3: in its first update no weight has moved, so step 2 is saved; in its second it is too late."""
    original, directory = Policy.score, tmp_path / "r"
    settings = {"max_steps": 4, "save_steps": 100, "num_minibatches": updates, "eval_examples": 0, "kl_beta": 0.01}
    now, tried = [0, 0], []
    before_each_step(monkeypatch, lambda number: now.__setitem__(slice(None), [number, 0]))
    update = step.optimizer_step

    def optimizer_step(*args, **kwargs):
        now[1] += 1
        return update(*args, **kwargs)

    def score(self, rows, temperature):
        if torch.is_grad_enabled() and now == [3, updates] and not self.config.gradient_checkpointing:
            tried.append(len(rows))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(self, rows, temperature)

    monkeypatch.setattr(step, "optimizer_step", optimizer_step)
    monkeypatch.setattr(Policy, "score", score)
    assert run(config_of(tmp_path, "r", **settings)) == 1
    said = capfd.readouterr().err
    assert "Stopped in step 3: training on a single rollout" in said and tried[-1] == tried[-2] == 1
    again = f"train --resume {directory} --gradient-checkpointing"
    if updates == 2:
        assert "It has no checkpoint yet" in said and checkpoint.latest(directory) is None
        return
    assert f"Saved {directory}/checkpoints/step_2. Resume with:  {again}" in said
    assert resume(directory, gradient_checkpointing=True) == 0
    rows = metrics(directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["train/microbatch_tokens"] == TrainConfig().microbatch_tokens  # not what was too much without it
    whole = tmp_path / "whole"
    assert run(config_of(tmp_path, "whole", **settings, gradient_checkpointing=True)) == 0
    for a, b in zip(rows, metrics(whole), strict=True):
        assert a["reward/mean"] == b["reward/mean"]
        assert a["optimizer/grad_norm"] == pytest.approx(b["optimizer/grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_an_optimizer_without_memory_for_its_state_ends_the_run_with_the_same_sentence(tmp_path, monkeypatch, capfd):
    def update(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Replicated, "update", update)
    assert run(config_of(tmp_path, "r", max_steps=1, eval_examples=0)) == 1
    said = capfd.readouterr().err
    assert "Stopped in step 1: the step runs out of memory; use --gradient-checkpointing" in said
    assert "It has no checkpoint yet: start a new run with --gradient-checkpointing" in said


@pytest.mark.slow
def test_a_run_reports_that_it_ran_out_of_memory(tmp_path, monkeypatch, undisturbed):
    original = Policy.score

    def score(self, rows, temperature):
        if torch.is_grad_enabled() and sum(len(row.token_ids) for row in rows) > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, rows, temperature)

    monkeypatch.setattr(Policy, "score", score)
    assert run(config_of(tmp_path, "r", max_steps=1, lr_scheduler_type="constant")) == 0
    (row,) = metrics(tmp_path / "r")
    assert row["train/out_of_memory"] >= 1 and row["train/microbatch_tokens"] <= 1000
    assert row["optimizer/grad_norm"] == pytest.approx(metrics(undisturbed)[0]["optimizer/grad_norm"], rel=1e-4)


# Ctrl-C


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_anywhere_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch, capfd):
    """One run, interrupted in each kind of work in turn, with everything on that a lost state would show in."""
    settings = {"peft": True, "lora_dropout": 0.1, "num_minibatches": 2, "eval_steps": 2, "max_steps": 5}
    assert run(config_of(tmp_path, "whole", **settings)) == 0
    directory = tmp_path / "r"

    def interrupted(owner, name: str, call: int, *, after_step: int) -> None:
        """Ctrl-C as the `call`-th call of a function begins."""
        original, calls = getattr(owner, name), []

        def function(*args, **kwargs):
            calls.append(name)
            if len(calls) == call:
                os.kill(os.getpid(), signal.SIGINT)
            return original(*args, **kwargs)

        capfd.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, function)
            started = (directory / "config.toml").exists()
            assert (resume(directory) if started else run(config_of(tmp_path, "r", **settings))) == INTERRUPTED
        assert (
            f"Interrupted after step {after_step}; saved {directory}/checkpoints/step_{after_step}. "
            f"Resume with:  train --resume {directory}" in capfd.readouterr().err
        )
        assert len(metrics(directory)) == after_step

    interrupted(loop, "evaluate", 2, after_step=0)  # "before", sampled
    interrupted(TransformersEngine, "generate", 30, after_step=0)  # in the first rollouts, or the evaluation again
    interrupted(step, "accumulate", 1, after_step=0)  # no weight has moved yet: the step is given up
    interrupted(step, "accumulate", 2, after_step=1)  # half of its optimizer steps are done: it is finished first
    interrupted(step, "sync_weights", 1, after_step=2)
    interrupted(loop, "evaluate", 1, after_step=2)  # that of step 2, which the last one kept from being made
    interrupted(TransformersEngine, "generate", 20, after_step=2)
    interrupted(loop, "evaluate", 5, after_step=5)  # "after", greedy; step 4's are two, and so are step 2's
    assert resume(directory) == 0
    kill_driver.compare(directory, tmp_path / "whole")


# Damaged files


def without(key: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        del state[key]
        (folder / "state.json").write_text(json.dumps(state))

    return edit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (without("skipped_in_a_row"), "it has no 'skipped_in_a_row'"),
        (without("config"), "another version of plumbob wrote it"),
        (lambda folder: (folder / "state.json").write_text(""), "Expecting value"),
        (lambda folder: (folder / "state.json").write_text("[]"), "list indices"),
        (lambda folder: torch.save([], folder / "trainer.pt"), "list indices"),
        (lambda folder: os.truncate(folder / "trainer.pt", 0), "EOFError|Ran out of input"),
        (lambda folder: os.truncate(folder / "trainer.pt", 1000), "central directory"),
        (lambda folder: os.truncate(folder / "model" / "model.safetensors", 1000), "."),
        (lambda folder: shutil.rmtree(folder / "model"), "."),
    ],
)
def test_a_checkpoint_of_another_version_is_one_sentence(tmp_path, undisturbed, damage, reason):
    directory = tmp_path / "r"
    shutil.copytree(undisturbed, directory)
    folder = checkpoint.latest(directory)
    assert folder is not None
    damage(folder)
    write_manifest(folder)  # so that these are files which were saved like this
    before = (directory / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=rf"cannot resume from {folder}: .*({reason})") as e:
        resume(directory)
    assert "\n" not in str(e.value)
    assert (directory / "metrics.jsonl").read_text() == before


def test_work_behind_a_run_is_done_in_order_while_it_goes_on() -> None:
    behind, may_go_on, done = Behind(), threading.Event(), []
    behind.start(lambda: (may_go_on.wait(), done.append(1)))
    assert not done  # the run is here, and the work is not done
    may_go_on.set()
    behind.start(lambda: done.append(2))
    behind.wait()
    assert done == [1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name == "behind"]


@pytest.mark.parametrize(
    ("save_steps", "size", "due"), [(None, 10**6, True), (None, 6 * 10**9, False), (1, 6 * 10**9, True)]
)
def test_the_first_checkpoint_waits_until_saving_it_takes_a_small_share_of_the_time(save_steps, size, due):
    schedule = checkpoint.Schedule(save_steps, size)
    schedule.last_end -= 60
    assert schedule.is_due(1) is due
    schedule.last_end -= 1000
    assert schedule.is_due(2)
