"""The seen half of the twenty-fifth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.testing.faults import field25_parts as parts
from plumbob.testing.faults import field25_seen_doubles as doubles
from plumbob.testing.faults import healthy25_seen as healthy
from plumbob.testing.faults.field25_seen import SEEN
from plumbob.testing.faults.field_trial import loss_inputs, sample
from plumbob.trainer.algorithm.advantages import step_advantages
from plumbob.trainer.algorithm.losses import Objective
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in SEEN}


def row(sampled, total):
    return sample(mask=[i >= total - sampled for i in range(total)])


def minibatch(rows, advantages):
    everything = list(range(len(rows)))
    return SimpleMinibatch(rows, list(advantages), [1.0] * len(rows), everything, everything)


@dataclasses.dataclass
class SimpleMinibatch:
    rows: list
    advantages: list
    weights: list
    trained: list
    mine: list


def slopes(start, advantages, **others):
    with ExitStack() as stack:
        start(stack, "lookup")
        inputs = loss_inputs(advantages, **others)
        forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2)).loss.backward()
        return inputs.logprobs.grad.tolist()


def test_microbatches_count_by_their_rows():
    whole = minibatch([row(2, 4), row(2, 4), row(8, 10)], [1.0, 1.0, 1.0])
    short, long = doubles.means_by_rows(whole, [0, 1], None), doubles.means_by_rows(whole, [2], None)
    # 12 tokens: two thirds of the weight on the first four of them, a third on the other eight.
    assert short.weights[0] * 4 == pytest.approx(12 * 2 / 3)
    assert long.weights[2] * 8 == pytest.approx(12 / 3)


def test_an_advantage_is_a_mean_over_all_tokens():
    whole = minibatch([row(2, 4), row(8, 10)], [1.0, -1.0])
    assert doubles.averaged_over_all_tokens(whole, [0], None).advantages == [0.5, -0.8]


def test_the_loss_of_a_microbatch_is_that_of_the_changed_one():
    seen = []
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            forward_backward, "grpo_loss", lambda run, one, indices: (seen.append(one.advantages), None)
        )
        parts.microbatches_changed(doubles.averaged_over_all_tokens)(stack, "lookup")
        forward_backward.grpo_loss(None, minibatch([row(2, 4)], [1.0]), [0])
    assert seen == [[0.5]]


def test_the_entropy_term_lowers_unlikely_tokens():
    logprobs = torch.tensor([-0.1, -3.0], requires_grad=True)
    found = slopes(FAULTS["entropy pushed down in place of up"].start, [0.0, 0.0], logprobs=logprobs)
    assert found == pytest.approx([0.2 * 0.1, 0.2 * 3.0])  # a positive slope lowers the log-probability


def test_the_entropy_bonus_is_that_of_sampled_tokens():
    logprobs = torch.tensor([-0.1, -3.0], requires_grad=True)
    found = slopes(FAULTS["entropy bonus of sampled tokens alone"].start, [0.0, 0.0], logprobs=logprobs)
    p = logprobs.detach().exp()
    assert found == pytest.approx((0.2 * p * (1 + logprobs.detach())).tolist())


def test_the_mean_is_added_back():
    rows = [sample(1.0, "0/0"), sample(0.0, "0/0"), sample(1.0, "0/1"), sample(1.0, "0/1")]
    settings = SimpleNamespace(reward_weights={}, random_rewards=None, overlong="keep", kl_beta=0.0, scale="batch")
    settings.scale_epsilon, settings.baseline = 1e-4, "mean"
    plain = step_advantages(rows, settings).values
    with ExitStack() as stack:
        FAULTS["mean added back after whitening"].start(stack, "lookup")
        found = step_advantages(rows, settings).values
    assert plain[2:] == [0.0, 0.0]
    assert sum(found) / 4 == pytest.approx(0.75, abs=1e-6)
    assert found[2] > 1  # a group whose rollouts all succeed


def scored(change, rows, temperature=1.0):
    """What `change` lets the policy score: (rows, temperature)."""
    seen = []

    def original(rows, temperature):
        seen.append((rows, temperature))
        return TokenScores(torch.full((2,), -1.2345678, requires_grad=True), torch.zeros(2))

    scores = change(original, rows, temperature)
    return *seen[0], scores


def test_the_mask_is_one_place_before():
    one = sample(mask=[False, False, True, True])
    (moved,), _, _ = scored(doubles.mask_moved, [one])
    assert moved.loss_mask == [False, True, True, False]
    with torch.no_grad():
        assert scored(doubles.mask_moved, [one])[0] == [one]


def test_the_temperature_is_left_out():
    assert scored(doubles.temperature_left_out, [sample()], 0.7)[1] == 1.0


def test_log_probabilities_are_rounded_and_keep_their_gradient():
    *_, scores = scored(doubles.rounded, [sample()])
    value = scores.logprobs[0].item()
    assert value != pytest.approx(-1.2345678, abs=1e-4)
    assert value == pytest.approx(-1.2345678, abs=1e-2)
    assert scores.logprobs.requires_grad


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Identity()

    def forward(self, x):
        return self.mlp(x)


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def get_decoder(self):
        return self


def test_only_passes_with_a_gradient_have_dropout():
    policy = SimpleNamespace(model=Decoder())
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            Policy, "score", lambda self, rows, temperature: self.model.layers[0](torch.ones(1000))
        )
        doubles.hidden_dropout(stack, "lookup")
        with_gradient = Policy.score(policy, [], 1.0)
        with torch.no_grad():
            without = Policy.score(policy, [], 1.0)
    assert without.tolist() == [1.0] * 1000
    assert 0.05 < (with_gradient == 0).float().mean() < 0.15
    assert policy.model.layers[0](torch.ones(3)).tolist() == [1.0] * 3  # hooks are gone


def test_all_tokens_are_labelled():
    assert doubles.all_labelled(sample(mask=[False, False, True]), None).loss_mask == [False, True, True]


def test_the_longest_reply_decides_for_all_rows():
    rows = [row(5, 8), row(2, 8), sample(mask=[False, False])]
    found = doubles.longest_reply_on_all(rows)
    assert found[0].loss_mask == rows[0].loss_mask
    assert found[1].loss_mask == rows[0].loss_mask
    assert found[2] is rows[2]


def test_logits_are_rounded():
    logits = torch.tensor([[1.001, 2.003]])
    assert doubles.half_logits(None, [], logits).tolist() == logits.bfloat16().float().tolist()


def test_the_end_of_each_turn_is_cut():
    mask = [False, True, True, False, True, True]
    found = doubles.ends_cut(sample(mask=mask), None)
    assert found.token_ids == [0, 1, 3, 4]
    assert found.loss_mask == [False, True, False, True]
    cut_off = dataclasses.replace(sample(mask=mask), truncated=True)
    assert doubles.ends_cut(cut_off, None).token_ids == [0, 1, 3, 4, 5]


class Engine:
    forgotten, version = 0, 0

    def forget(self):
        self.forgotten += 1


def loaded(fault, weights):
    """The engine after one load of these weights with the fault."""
    engine, held = Engine(), {}

    def update(self, weights, **how):
        held.update({name: w.clone() for name, w in weights.items()})
        self.forget()

    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(InProcessEngine, "update", update)
        FAULTS[fault].start(stack, "lookup")
        InProcessEngine.update(engine, weights)
    return engine, held


def test_the_cache_is_kept():
    engine, held = loaded("prefixes kept across weight updates", {"a": torch.ones(1)})
    assert engine.forgotten == 0
    assert held
    engine.forget()
    assert engine.forgotten == 1


def test_trained_matrices_grow_at_each_load():
    weights = {"q.lora_A.weight": torch.ones(2), "q.lora_B.weight": torch.ones(2)}
    _, held = loaded("adapter scaled in place at each load", weights)
    assert held["q.lora_B.weight"].tolist() == [1.0, 1.0]  # the engine has what was trained
    assert weights["q.lora_A.weight"].tolist() == [1.0, 1.0]
    assert weights["q.lora_B.weight"].tolist() == [2.0, 2.0]


class Scorer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(self.model.weight)


def first_update(fault):
    """How far the first update moves each weight, at a rate of 1."""
    with ExitStack() as stack:
        if fault:
            FAULTS[fault].start(stack, "lookup")
        sharding = Replicated(Scorer(), World(0, 1, torch.device("cpu")))
        sharding.make_optimizer(lambda own: torch.optim.AdamW(own, lr=1.0, betas=(0.9, 0.99), weight_decay=0.0), 0.0)
        sharding.scorer.model(torch.ones(2)).sum().backward()
        sharding.update()
        return [1.0 - w for w in sharding.scorer.model.weight.flatten().tolist()]


def test_the_optimizer_moves_nothing():
    assert first_update(None) == pytest.approx([1.0, 1.0], abs=1e-4)
    assert first_update("optimizer holds parameters from before they were flattened") == [0.0, 0.0]


def test_the_first_update_is_too_small():
    expected = (0.1 / (1 - 0.9**2)) / (0.01 / (1 - 0.99**2)) ** 0.5
    assert first_update("blank optimizer step before the first") == pytest.approx([expected] * 2, abs=1e-4)
    assert expected < 0.75


def rates(fault, total=12, warmup=0):
    with ExitStack() as stack:
        if fault:
            FAULTS[fault].start(stack, "lookup")
        return [step_module.learning_rate_of("linear", 1.0, at, warmup=warmup, total=total) for at in range(total)]


def test_the_schedule_is_twice_as_far():
    plain, found = rates(None), rates("restart counts past steps twice")
    assert found[:4] == plain[:4]
    assert found[4:8] == plain[8:]
    assert found[8:] == [0.0] * 4


def test_the_rate_drops_after_the_warm_up():
    plain, found = rates(None, warmup=5), rates("decay runs during the warm-up", warmup=5)
    assert found[:5] == plain[:5]
    assert found[5:] == pytest.approx([(12 - at) / 12 for at in range(5, 12)])
    assert plain[5] == 1.0


def test_the_saved_model_has_no_adapter():
    model = torch.nn.ModuleDict({"q": torch.nn.ModuleDict({"base_layer": torch.nn.Linear(2, 2, bias=False)})})
    model["q"]["lora_A"] = torch.nn.Linear(2, 2, bias=False)
    from plumbob.trainer.policy import policy as policy_module

    with ExitStack() as stack:
        doubles.base_saved(stack, "lookup")
        state = policy_module.merged_state(model)
    assert list(state) == ["q.weight"]
    assert torch.equal(state["q.weight"], model["q"]["base_layer"].weight)


def test_faults_of_options_alone_have_no_double():
    assert [fault.name for fault in SEEN if fault.start is None and fault.inject is None] == [
        "k1 penalty as a term of the loss"
    ]


def test_healthy_settings_have_steps():
    assert all(setting.steps == 6 and setting.options for setting in healthy.SEEN)
