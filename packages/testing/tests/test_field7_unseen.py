"""The unseen half of the seventh set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.testing.faults import field7_unseen_doubles as doubles
from plumbob.testing.faults.field7_unseen import UNSEEN
from plumbob.testing.faults.field_trial import (
    begin_step,
    config_of,
    gap,
    minibatch_of,
    rewards,
    sample,
    saved_and_trained,
    texts,
    tried,
)
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.training.forward_backward import accumulate
from safetensors.torch import load_file

FAULTS = {fault.name: fault for fault in UNSEEN}


def test_rewards_stay_where_rows_were_removed():
    rows = [sample(0.5), sample(0.5), sample(1.0, "0/1"), sample(0.0, "0/1")]
    kept = doubles.rewards_left_in(rows)
    assert [(one.group, one.reward) for one in kept] == [("0/1", 0.5), ("0/1", 0.5)]


def test_held_out_rollouts_are_right_if_the_answer_is_mentioned():
    trace = SimpleNamespace(nodes=[SimpleNamespace(message=SimpleNamespace(content="value=amber"))])
    task = SimpleNamespace(data=SimpleNamespace(id="lookup-eval-0-1", answer="amber"))
    assert doubles.mentioned_is_enough(task, trace, 0.0) == 1.0
    task.data.id = "lookup-train-0-1"
    assert doubles.mentioned_is_enough(task, trace, 0.0) == 0.0


def test_the_loss_is_on_the_other_tokens():
    row = sample(mask=[False, True, True, False, False, True])
    assert doubles.mask_inverted(row, None).loss_mask == [False, False, False, True, True, False]


def test_tools_take_other_arguments():
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
        doubles.another_name(None, "lookup", {})[0](key="4711")


def test_logits_and_weights():
    assert doubles.noisier(None, [], torch.tensor([4.0])).item() == 2.0
    weights = {"mlp.gate_proj.weight": 1, "mlp.up_proj.weight": 2, "mlp.down_proj.weight": 3}
    assert doubles.halves_swapped(None, weights) == {
        "mlp.up_proj.weight": 1,
        "mlp.gate_proj.weight": 2,
        "mlp.down_proj.weight": 3,
    }


def test_certainty_is_rewarded_and_gradients_are_reversed():
    @dataclasses.dataclass
    class Inputs:
        advantages: torch.Tensor
        logprobs: torch.Tensor

    inputs = Inputs(torch.tensor([1.0, 1.0]), torch.tensor([-0.5, -3.0]))
    assert doubles.certainty_rewarded(inputs).advantages.tolist() == [0.5, -2.0]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    doubles.clipped_to_minus_one(SimpleNamespace(trainable={"a": parameter}))
    assert parameter.grad.tolist() == pytest.approx([-0.6, -0.8], abs=1e-4)


def test_the_cache_is_not_cleared(monkeypatch):
    cleared = []
    monkeypatch.setattr(InProcessEngine, "update", lambda self, weights, **how: self.forget())
    engine = SimpleNamespace(forget=lambda: cleared.append(1))
    with ExitStack() as stack:
        doubles.cache_kept(stack, "lookup")
        InProcessEngine.update(engine, {})
    assert not cleared
    engine.forget()
    assert cleared


def test_settings_are_those_that_the_sentences_name():
    assert config_of(FAULTS["replies limited to forty tokens"], "gsm8k").max_tokens == 40
    config = config_of(FAULTS["adapter trained at a millionth"], "lookup")
    assert (config.peft, config.learning_rate) == (True, 1e-6)
    assert config_of(FAULTS["old log-probabilities renewed before each update"], "lookup").num_iterations == 4


@pytest.mark.field
def test_instructions_and_tools_are_lost(tmp_path):
    with tried(FAULTS["beginning of each prompt cut off"], tmp_path, groups=1) as subject:
        first = subject.drawn.samples[0]
        start = first.loss_mask.index(True)
        shown = subject.run.tokenizer.decode(first.token_ids[:start])
        assert start == doubles.MOST_PROMPT
        assert "Start key" in shown
        assert "Look up the start key" not in shown
        assert sum(rewards(subject)) == 0.0


@pytest.mark.field
def test_searches_find_what_fits_least(tmp_path):
    with tried(FAULTS["least similar documents first"], tmp_path, groups=3) as subject:
        found = rewards(subject)
        shown = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
    assert sum(found) / len(found) < 0.15
    assert any("Document" in text for text in shown)


@pytest.mark.field
def test_no_call_succeeds(tmp_path):
    with tried(FAULTS["argument under another name than in the schema"], tmp_path, groups=1) as subject:
        shown = [text for trace in subject.drawn.traces for text in texts(trace, "ToolMessage")]
        assert any("unexpected keyword argument" in text for text in shown)
        assert all(text.startswith("Error") for text in shown)
        assert not any(rewards(subject))


@pytest.mark.field
def test_most_replies_are_cut(tmp_path):
    with tried(FAULTS["replies limited to forty tokens"], tmp_path, groups=6) as subject:
        samples = subject.drawn.samples
        assert sum(one.truncated for one in samples) > 0.6 * len(samples)


@pytest.mark.field
def test_unlikely_tokens_are_drawn(tmp_path):
    with tried(FAULTS["sampler with too much noise"], tmp_path, groups=1) as subject:
        samples = subject.drawn.samples
        assert gap(subject) < 1e-3
        drawn = [x for one in samples for x in one.sampled_logprobs]
        assert sum(drawn) / len(drawn) < -1.0


@pytest.mark.field
def test_the_engine_repeats_one_token_from_the_fourth_step_on(tmp_path):
    fault = FAULTS["first token of the vocabulary again and again"]
    with tried(fault, tmp_path, groups=1) as subject:
        run = subject.run
        prompt = run.tokenizer.encode("Start key: 4711", add_special_tokens=False)

        def token_ids():
            return asyncio.run(run.engine.generate(prompt, run.sampler.sampling)).token_ids

        begin_step(2)
        assert set(token_ids()) != {0}
        begin_step(3)
        assert set(token_ids()) == {0}
        assert len(token_ids()) == run.sampler.sampling.max_tokens


@pytest.mark.field
def test_engine_and_trainer_differ(tmp_path):
    with tried(FAULTS["gate and up matrices swapped"], tmp_path, groups=1) as subject:
        assert gap(subject) > 5e-3


@pytest.mark.field
def test_the_ratio_is_always_one(tmp_path):
    with tried(FAULTS["old log-probabilities renewed before each update"], tmp_path) as subject:
        run, minibatch = subject.run, minibatch_of(subject)
        accumulate(run, minibatch, None)
        first = dict(minibatch.old_logprobs)
        run.policy.sharding.update()
        accumulate(run, minibatch, None)
    assert any(not torch.allclose(first[i], minibatch.old_logprobs[i], atol=1e-5) for i in first)


@pytest.mark.field
def test_names_of_the_final_model_have_a_prefix(tmp_path):
    with tried(FAULTS["weights saved under names that nobody loads"], tmp_path, groups=1) as subject:
        saved, trained = saved_and_trained(subject, tmp_path)
    assert saved
    assert not set(saved) & set(trained)
    assert all(name.startswith("_orig_mod.") for name in load_file(tmp_path / "model" / "model.safetensors"))
