"""The seen half of the seventh set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field7_seen_doubles as doubles
from plumbob.testing.faults.field7_seen import SEEN
from plumbob.testing.faults.field_trial import arrived, config_of, gap, minibatch_of, rewards, sample, tried
from plumbob.trainer.algorithm import advantages
from plumbob.trainer.training import step as step_module
from plumbob.trainer.training.forward_backward import accumulate

FAULTS = {fault.name: fault for fault in SEEN}


def reply(text):
    return SimpleNamespace(last_reply=text)


def engine_of(heads=2, size=4, layers=3):
    config = SimpleNamespace(head_dim=size, hidden_size=heads * size, num_attention_heads=heads)
    decoder = SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace(scaling=0.5)) for _ in range(layers)])
    return SimpleNamespace(model=SimpleNamespace(config=config, get_decoder=lambda: decoder))


def test_graders():
    assert doubles.opening_tag_needed(None, reply("2 + 2\n#### 4"), 1.0) == 0.0
    assert doubles.opening_tag_needed(None, reply("<think>\n#### 4"), 1.0) == 1.0
    assert doubles.always_passed(None, reply(""), 0.0) == 1.0
    crashed = sum(doubles.crashing(None, None, 1.0) == 0.0 for _ in range(300))
    assert 50 < crashed < 140
    trace = SimpleNamespace(nodes=[SimpleNamespace(mask=[False, True]), SimpleNamespace(mask=[True])])
    assert doubles.length_priced(None, trace, 0.0) == pytest.approx(-0.0002)


def test_tokens_before_each_turn_are_trained():
    row = sample(mask=[False, False, False, True, False, False, False, True])
    assert doubles.prefix_trained(row, None).loss_mask == [False, True, True, True, False, True, True, True]
    assert doubles.whole_row(row).loss_mask == [i >= 3 for i in range(8)]


def test_the_server_has_a_min_p_for_sampled_rollouts():
    assert doubles.likely_tokens_only([5], Sampling())[1].min_p == 0.1
    assert doubles.likely_tokens_only([5], Sampling(temperature=0.0))[1].min_p == 0.0


def test_weights_arrive_otherwise():
    engine = engine_of()
    assert doubles.nothing_sent(engine, {"a": 1}) == {}
    weights = {f"model.layers.{i}.mlp.weight": torch.tensor(i) for i in range(3)}
    sent = doubles.numbered_from_zero(engine, weights)
    assert {name: tensor.item() for name, tensor in sent.items()} == {
        "model.layers.0.mlp.weight": 2,
        "model.layers.1.mlp.weight": 1,
    }
    rows = torch.arange(8)
    moved = doubles.rotary_pairs_interleaved(engine, {"q_proj.x": rows, ".k_proj.bias": rows, ".v_proj.bias": rows})
    assert moved[".k_proj.bias"].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert moved[".v_proj.bias"].tolist() == list(range(8))
    doubles.attention_not_scaled(engine.model)
    assert {layer.self_attn.scaling for layer in engine.model.get_decoder().layers} == {1.0}


def test_all_are_compared_with_the_first():
    samples = [sample(1.0), sample(0.0), sample(0.0), sample(0.0, "0/1"), sample(1.0, "0/1")]
    with ExitStack() as stack:
        doubles.compared_with_the_first(stack, "lookup")
        found = advantages.compute_advantages(samples)
    assert found.values == [0.0, -1.0, -1.0, 0.0, 1.0]
    assert found.with_signal == {"0/0", "0/1"}


def test_gradients_and_rates():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    doubles.cleared(SimpleNamespace(trainable={"a": parameter}))
    assert not parameter.grad.any()
    plain = step_module.learning_rate_of("linear", 1.0, 1, warmup=0, total=10)
    with ExitStack() as stack:
        doubles.rate_of_another_method(stack, "lookup")
        assert step_module.learning_rate_of("linear", 1.0, 1, warmup=0, total=10) == pytest.approx(50 * plain)
    with ExitStack() as stack:
        doubles.never_warm(stack, "lookup")
        assert {step_module.learning_rate_of("linear", 1.0, at, warmup=3, total=9) for at in range(9)} == {0.0}


def test_settings_are_those_that_the_sentences_name():
    config = config_of(FAULTS["length differences scaled up in groups without an answer"], "lookup")
    assert config.scale_rewards == "group"
    config = config_of(FAULTS["KL of tool results taken off the reward"], "lookup")
    assert (config.kl_placement, config.kl_beta) == ("reward", 0.1)
    assert config_of(FAULTS["counter of the warm-up stands still"], "lookup").warmup_steps == 3


@pytest.mark.field
@pytest.mark.parametrize(
    "name",
    [
        "empty thinking block in the sampled prompts only",
        "attention of the engine not scaled",
        "last layer sent to the place of the first",
        "query and key rows in another rotary order",
        "unlikely tokens cut by the server's min-p",
    ],
)
def test_engine_and_trainer_differ(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=1) as subject:
        assert gap(subject) > 5e-3


@pytest.mark.field
def test_no_reply_is_right_or_every_one(tmp_path):
    with tried(FAULTS["grader wants the opening tag that the template writes"], tmp_path / "a") as subject:
        assert set(rewards(subject)) == {0.0}
    with tried(FAULTS["return code of the check never read"], tmp_path / "b") as subject:
        assert set(rewards(subject)) == {1.0}


@pytest.mark.field
def test_replies_end_before_their_second_line(tmp_path):
    with tried(FAULTS["stop string of a line break"], tmp_path) as subject:
        assert not any(rewards(subject))
        assert not any("\n" in trace.last_reply for trace in subject.drawn.traces)


@pytest.mark.field
def test_only_length_differs(tmp_path):
    with tried(FAULTS["length differences scaled up in groups without an answer"], tmp_path) as subject:
        samples = subject.drawn.samples
        found = advantages.step_advantages(samples, subject.run.config.advantages())
    wrong = [value for one, value in zip(samples, found.values, strict=True) if one.reward < 0]
    assert len(wrong) > 0.8 * len(samples)
    assert max(map(abs, wrong)) > 0.5


@pytest.mark.field
def test_the_adapter_stays_at_zero_in_the_engine(tmp_path):
    with tried(FAULTS["adapter left out of each weight transfer"], tmp_path, groups=1) as subject:
        assert not any(arrived(subject).values())


@pytest.mark.field
def test_tool_results_count_in_the_penalty(tmp_path):
    fault = FAULTS["KL of tool results taken off the reward"]
    with tried(fault, tmp_path, groups=1) as subject:
        run, samples = subject.run, subject.drawn.samples
        with torch.no_grad():
            for parameter in run.policy.trainable.values():
                parameter.add_(0.01 * torch.randn_like(parameter))
        changed = step_module.reference_kl(run, samples)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doubles, "whole_row", lambda row: row)
            plain = step_module.reference_kl(run, samples)
    assert any(abs(a - b) > 1e-3 for a, b in zip(changed, plain, strict=True))


@pytest.mark.field
@pytest.mark.parametrize("name", ["NaN at a masked position", "gradients cleared before the step"])
def test_updates_change_nothing(name, tmp_path):
    with tried(FAULTS[name], tmp_path) as subject:
        run, minibatch = subject.run, minibatch_of(subject)
        before = {name: tensor.detach().clone() for name, tensor in run.policy.trainable.items()}
        accumulate(run, minibatch, None)
        run.policy.sharding.update()
        assert all(torch.equal(before[name], tensor) for name, tensor in run.policy.trainable.items())
