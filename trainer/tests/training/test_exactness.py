"""The gradient of a step does not depend on how the step is computed: passes, ranks, packing, order of samples."""

from __future__ import annotations

import random

import pytest
import torch
from plumbob.rollout import Sample
from plumbob.testing import step_gradients
from plumbob.testing.processes import launch
from plumbob.testing.step_gradients import LOSS_TYPES, gradient, make_run, relative_difference, samples
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.run_files import trace_files
from plumbob.trainer.run_files.run_directory import read_metrics
from plumbob.trainer.training import train as loop

BOUND = 1e-4
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), ALONE, kl_beta=0.1)  # so that there is a reference


@pytest.fixture(scope="module")
def whole(run):
    """Everything in one pass."""
    return {loss_type: gradient(run, samples(), loss_type, microbatch_tokens=100_000) for loss_type in LOSS_TYPES}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("tokens", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (60, 333)), 200])
def test_the_gradient_does_not_depend_on_the_passes(run, whole, loss_type, tokens):
    """One row alone in its pass is unpacked and unpadded: so this is packed against plain rows, too."""
    cut = gradient(run, samples(), loss_type, microbatch_tokens=tokens)
    assert relative_difference(cut, whole[loss_type]) < BOUND


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nor_on_the_order_of_samples(run, whole, loss_type):
    shuffled = samples()
    random.Random(3).shuffle(shuffled)
    assert relative_difference(gradient(run, shuffled, loss_type, microbatch_tokens=500), whole[loss_type]) < BOUND


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nor_on_whether_rows_without_signal_are_computed(run, loss_type):
    """A group of equal rewards is left out of the passes. With a KL term of weight ~0 it is computed all the same."""
    rows = [s if s.group != "0/1" else Sample(**{**vars(s), "reward": 0.5}) for s in samples()]
    left_out = gradient(run, rows, loss_type)
    computed = gradient(run, rows, loss_type, kl_beta=1e-12)
    assert relative_difference(left_out, computed) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nor_on_whether_prompts_are_computed_once(run, loss_type):
    """In one pass each group's prompt is computed once, and what all prompts begin with as well; in passes of a row, never."""
    rows, tokens = samples(prompts=True), []
    hook = run.policy.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    shared = gradient(run, rows, loss_type, microbatch_tokens=100_000)
    (once,) = tokens
    shuffled = samples(prompts=True)
    random.Random(3).shuffle(shuffled)
    divided = gradient(run, shuffled, loss_type, microbatch_tokens=400)
    alone = gradient(run, rows, loss_type, microbatch_tokens=1)
    hook.remove()
    assert once == sum(len(row.token_ids) for row in rows) - 31 * 10 - 7 * (10 + 11 + 12 + 13)
    assert relative_difference(shared, alone) < BOUND
    assert relative_difference(divided, alone) < BOUND


@pytest.mark.slow
@pytest.mark.long
def test_nor_on_the_number_of_processes(run, whole, tmp_path):
    launch([step_gradients.__file__, str(tmp_path), str(tmp_path / "gradients.pt")], 2, tmp_path)
    shared = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for loss_type in LOSS_TYPES:
        assert relative_difference(shared[loss_type], whole[loss_type]) < BOUND
    with_prompts = gradient(run, samples(prompts=True), LOSS_TYPES[0])
    assert relative_difference(shared["prompts"], with_prompts) < BOUND


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    """A whole run: rollouts dealt to the ranks, gradients summed, held-out tasks shared, one run directory."""
    common = {"max_steps": 2, "num_generations": 4, "eval_examples": 8, "max_tokens": 48, "learning_rate": 1e-3}
    common |= {"gradient_accumulation_steps": 1, "num_minibatches": 2, "num_iterations": 2, "output_dir": str(tmp_path)}
    assert loop.run(TrainConfig(**common, run_name="one", batch_size=16)) == 0
    flags = [text for name, value in common.items() for text in ("--" + name.replace("_", "-"), str(value))]
    flags += ["--run-name", "two", "--batch-size", "8"]
    launch(["-c", "from plumbob.trainer.cli.train import main; main()", *flags], 2, tmp_path)
    one, two = read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two")
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        work = ("time/", "memory/", "train/computed_tokens", "train/largest_pass")
        same = [n for n in a if not n.startswith(work)]
        assert {n: b[n] for n in same} == pytest.approx({n: a[n] for n in same}, rel=1e-3, abs=1e-5)
    traces = [trace_files.read(tmp_path / name / "traces" / "step_2.jsonl.gz").splitlines() for name in ("one", "two")]
    assert len(traces[0]) == len(traces[1]) == 16
