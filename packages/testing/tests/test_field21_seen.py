"""The seen half of the twenty-first set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling
from plumbob.testing.faults import field21_seen_doubles as doubles
from plumbob.testing.faults.field21_seen import SEEN
from plumbob.testing.faults.field_trial import begin_step, config_of, gap, loss_inputs, sample, tried
from plumbob.trainer.algorithm.losses import Objective
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.distributed.world import World
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in SEEN}


@contextmanager
def injected(start):
    with ExitStack() as stack:
        start(stack, "lookup")
        yield


def sharding_of(count=2, rate=0.01):
    """A model of `count` numbers of 1, each a tensor of its own, with its optimizer."""
    scorer = torch.nn.Module()
    scorer.model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(count)])
    sharding = Replicated(scorer, World(0, 1, torch.device("cpu")))
    sharding.make_optimizer(lambda tensors: torch.optim.AdamW(tensors, lr=rate, weight_decay=0.0), 0.0)
    return sharding


def numbers(sharding):
    return [p.item() for p in sharding.trainable.values()]


def passes(sharding, factors):
    """One backward pass for each factor, of the sum of all numbers times the factor, and no update."""
    for i, factor in enumerate(factors):
        total = sum(p.sum() for p in sharding.trainable.values())
        sharding.backward(factor * total, last=i == len(factors) - 1)


def updates(sharding, count):
    """The changes of the first number in `count` updates along the same gradient."""
    found = []
    for _ in range(count):
        sharding.zero_grad()
        passes(sharding, [1.0])
        before = numbers(sharding)[0]
        sharding.update()
        found.append(before - numbers(sharding)[0])
    return found


def rates(kind="linear"):
    return [step_module.learning_rate_of(kind, 1.0, at, warmup=0, total=8) for at in range(4)]


def test_the_schedule_is_four_times_as_fast():
    assert rates() == pytest.approx([1.0, 0.875, 0.75, 0.625])
    with injected(doubles.stepped_per_batch):
        assert rates() == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_the_rate_is_always_zero():
    with injected(doubles.steps_unknown):
        assert rates() == [0.0] * 4
        assert rates("cosine") == pytest.approx([0.0] * 4)


def test_the_rate_is_cut_from_the_third_update_on():
    with injected(doubles.cut_again):
        sharding, found = sharding_of(), []
        for _ in range(4):
            sharding.optimizer.param_groups[0]["lr"] = 1.0
            sharding.update()
            found.append(sharding.optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([1.0, 1.0, 0.1, 0.01])


def test_moments_are_forgotten_once():
    with injected(doubles.moments_forgotten):
        sharding = sharding_of()
        counted = []
        for _ in range(8):
            updates(sharding, 1)
            counted.append(int(next(iter(sharding.optimizer.state.values()))["step"]))
    assert counted == [1, 2, 3, 4, 5, 1, 2, 3]


def test_half_of_the_tensors_stand_still():
    with injected(doubles.half_replaced):
        sharding = sharding_of(4)
    updates(sharding, 2)
    assert numbers(sharding)[:2] == [1.0, 1.0]
    assert all(number < 1.0 for number in numbers(sharding)[2:])


def gradient_after(start, factors):
    with injected(start):
        sharding = sharding_of()
        passes(sharding, factors)
        return next(iter(sharding.trainable.values())).grad.item()


def test_only_the_last_microbatch_is_left():
    assert gradient_after(lambda stack, env: None, [1.0, 2.0, 4.0]) == 7.0
    assert gradient_after(doubles.cleared_in_every_pass, [1.0, 2.0, 4.0]) == 4.0


def test_each_microbatch_has_an_update():
    with injected(doubles.stepped_in_every_pass):
        sharding = sharding_of(rate=0.01)
        passes(sharding, [1.0, 1.0, 1.0])
        assert numbers(sharding) == pytest.approx([0.98, 0.98])
        sharding.update()
    assert numbers(sharding) == pytest.approx([0.97, 0.97])


def test_unlikely_tokens_are_made_likelier_by_less():
    inputs = loss_inputs([0.5, 0.5])
    inputs.logprobs.data[1] = -3.0
    inputs.old_logprobs.data[1] = -3.0
    with injected(doubles.entropy_penalised):
        forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2)).loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-0.5 + 0.5 * 1, -0.5 + 0.5 * 3])


def test_the_reference_follows_from_the_second_step_on():
    reference, own = torch.zeros(2), torch.ones(2)
    run = SimpleNamespace(policy=SimpleNamespace(_reference_tensors=lambda: {"w": reference}, trainable={"w": own}))
    with ExitStack() as stack:
        doubles.reference_follows(stack, run)
        begin_step(0)
        assert reference.tolist() == [0.0, 0.0]
        begin_step(1)
    assert reference.tolist() == [1.0, 1.0]


def test_the_adapter_has_dropout():
    config = config_of(FAULTS["adapter dropout of three tenths"], "lookup")
    assert config.peft
    assert config.lora_dropout == 0.3


def test_rewards_are_those_of_the_batch_before():
    change = doubles.RewardsBefore()
    first, second, third = ([sample(float(10 * n + i)) for i in range(3)] for n in range(3))
    assert [s.reward for s in change(first)] == [0.0, 1.0, 2.0]
    assert [s.reward for s in change(second[:2])] == [0.0, 1.0]
    found = change(third)
    assert [s.reward for s in found] == [10.0, 11.0, 22.0]
    assert found[0].token_ids is third[0].token_ids


def test_requests_lose_their_temperature():
    assert doubles.own_temperature([1], Sampling(temperature=0.6))[1].temperature == 1.0
    assert doubles.own_temperature([1], Sampling(temperature=0.0))[1].temperature == 0.0


def test_no_token_ends_a_turn(tmp_path):
    assert doubles.without_end([1], Sampling(stop_token_ids=(3,)))[1].stop_token_ids == ()
    with tried(FAULTS["end token not given to the sampler"], tmp_path, groups=1) as subject:
        assert {s.num_sampled for s in subject.drawn.samples} == {160}


def test_the_context_cuts_rollouts(tmp_path):
    with tried(FAULTS["last turns squeezed by a full context"], tmp_path, groups=4) as subject:
        samples = subject.drawn.samples
    assert max(len(s.token_ids) for s in samples) <= 256
    assert sum(s.truncated for s in samples) > 0.3 * len(samples)


def test_a_layer_is_not_sent():
    sent = {
        "model.embed.weight": torch.zeros(1),
        "model.layers.0.a": torch.zeros(1),
        "model.layers.10.a": torch.zeros(1),
    }
    assert list(doubles.first_layer_missing(None, sent)) == ["model.embed.weight", "model.layers.10.a"]


def test_norms_lose_their_offset():
    found = doubles.without_offset(None, {"model.norm.weight": torch.ones(2), "head.weight": torch.ones(2)})
    assert found["model.norm.weight"].tolist() == [0.0, 0.0]
    assert found["head.weight"].tolist() == [1.0, 1.0]


def test_garbage_is_always_the_same():
    weights = {"a": torch.ones(3, 2), "b": torch.ones(4)}
    one, other = (doubles.unwritten_memory(None, weights) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in weights)
    assert one["a"].shape == (3, 2)
    assert not (one["a"] == 1.0).any()


@pytest.mark.parametrize("name", ["norms synced without their offset", "sync that loads memory nobody has written"])
def test_the_engine_serves_another_model(name, tmp_path):
    with tried(FAULTS[name], tmp_path, groups=1) as subject:
        assert gap(subject) > 0.1
