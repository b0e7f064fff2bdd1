"""A step leaves nothing behind: neither a microbatch's graph, nor what hooks, closures and records of a run hold."""

import gc
import threading
import weakref

import plumbob.trainer.policy.policy as policy_module
import pytest
import torch
from plumbob.testing.step_gradients import make_run, samples
from plumbob.trainer.algorithm.advantages import compute_advantages
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import World
from plumbob.trainer.policy import compiling
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import train as loop
from plumbob.trainer.training.minibatches import make_minibatches
from plumbob.trainer.training.train import run
from torch._subclasses.fake_tensor import FakeTensor


@pytest.mark.parametrize("settings", [{}, {"kl_beta": 0.1}, {"num_minibatches": 2}], ids=str)
def test_a_microbatch_is_gone_when_the_next_one_begins(tmp_path, monkeypatch, settings):
    """A hook on the log-probabilities that held them kept each microbatch's graph until the process ended: GiBs a step."""
    run_ = make_run(tmp_path, World(0, 1, torch.device("cpu")), peft=True, microbatch_tokens=200, **settings)
    with run_.lock:
        # With frozen embeddings, as `compile_layers` does: the graph begins with a leaf that receives a gradient.
        embeddings = run_.policy.model.get_input_embeddings()
        embeddings.register_forward_hook(lambda _, __, hidden: hidden.requires_grad_(torch.is_grad_enabled()))
        leaves: list[weakref.ref[torch.Tensor]] = []
        embeddings.register_forward_hook(lambda _, __, hidden: leaves.append(weakref.ref(hidden)))
        score, alive = run_.policy.score, []

        def counted(*args):
            alive.append(sum(leaf() is not None for leaf in leaves))
            return score(*args)

        monkeypatch.setattr(run_.policy, "score", counted)
        rows = samples()
        values = compute_advantages(rows, "none")
        (minibatch, *_) = make_minibatches(rows, values, run_.config, run_.world, count=run_.config.num_minibatches)
        forward_backward.accumulate(run_, minibatch, None)
        run_.engine.close()
    assert len(alive) > 3, "there are several microbatches"
    assert set(alive) == {0}
    assert all(leaf() is None for leaf in leaves)


@pytest.mark.slow
def test_live_tensors_stay_the_same_from_step_to_step(tmp_path, monkeypatch):
    """What grows by a little in each step ends a long run. Several turns, LoRA, bfloat16, paged engine, compiled layers."""
    placed, counts = policy_module.Policy._placed, []

    def compiled(self):
        placed(self)
        compiling.compile_layers(self.model, self.sharding.kind, "aot_eager")

    def count(*_):
        """Called when a step has been recorded."""
        for thread in [thread for thread in threading.enumerate() if thread.name == "behind"]:
            thread.join()  # it writes the step's traces, and holds them until then
        gc.unfreeze()  # what was there at the last collection is not listed otherwise
        kinds = [
            (o, type(o)) for o in gc.get_objects()
        ]  # `isinstance` asks what a weak proxy stands for, if it is gone too
        tensors = [o for o, kind in kinds if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        grads = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        held |= {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
        counts.append((len(tensors), sum(held.values())))

    monkeypatch.setattr(policy_module.Policy, "_placed", compiled)
    monkeypatch.setattr(loop, "judge", count)
    settings = {"batch_size": 16, "gradient_accumulation_steps": 1, "num_generations": 4, "microbatch_tokens": 1024}
    run_settings = {"max_steps": 12, "eval_examples": 0, "env": "lookup"}
    config = TrainConfig(output_dir=str(tmp_path), peft=True, bf16=True, engine="paged", **settings, **run_settings)
    # Off a GPU the layers are compiled for one set of row lengths, and rows of other lengths run uncompiled: enough here.
    with torch._dynamo.config.patch(recompile_limit=1):
        assert run(config) == 0
    torch._dynamo.reset()
    assert len(counts) >= 12
    assert len(set(counts[2:12])) == 1, counts
