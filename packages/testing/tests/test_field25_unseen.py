"""The unseen half of the twenty-fifth set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import dataclasses
import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from plumbob.rollout import Sampling, derive_seed, runner
from plumbob.testing.faults import field25_unseen_doubles as doubles
from plumbob.testing.faults import healthy25_unseen as healthy
from plumbob.testing.faults.field25_unseen import UNSEEN
from plumbob.testing.faults.field_trial import loss_inputs, sample
from plumbob.trainer.algorithm.losses import Objective
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.policy.token_scorer import make_batch
from plumbob.trainer.training import forward_backward
from plumbob.trainer.training import step as step_module

FAULTS = {fault.name: fault for fault in UNSEEN}


def row(sampled, total, group="0/0"):
    return sample(mask=[i >= total - sampled for i in range(total)], group=group)


def loss_of(fault, advantages, objective, old=None, **others):
    """(loss, slopes) of one token a row."""
    with ExitStack() as stack:
        if fault:
            FAULTS[fault].start(stack, "lookup")
        inputs = loss_inputs(advantages, **others)
        if old is not None:
            inputs = dataclasses.replace(inputs, old_logprobs=torch.tensor(old))
        loss = forward_backward.policy_loss(inputs, objective).loss
        loss.backward()
        return loss.item(), inputs.logprobs.grad.tolist()


def test_the_kl_term_is_left_out():
    objective, reference = Objective("dr_grpo", 0.2, 0.2, kl_beta=0.5), torch.tensor([-2.0, -1.5])
    _, plain = loss_of(None, [1.0, -1.0], objective, ref_logprobs=reference)
    _, found = loss_of("reference never handed to the loss", [1.0, -1.0], objective, ref_logprobs=reference)
    assert plain == pytest.approx([-1.0 + 0.5, 1.0 + 0.25])
    assert found == pytest.approx([-1.0, 1.0])


def test_the_ratio_is_always_one():
    objective, old = Objective("dr_grpo", 0.2, 0.2), [-2.0, -1.5]
    _, plain = loss_of(None, [1.0, 1.0], objective, old)
    _, found = loss_of("ratio taken against itself in every pass", [1.0, 1.0], objective, old)
    assert plain == [0.0, 0.0]  # both are clipped
    assert found == pytest.approx([-1.0, -1.0])


@dataclasses.dataclass
class Rows:
    rows: list
    weights: list


def test_the_width_of_the_microbatch_divides():
    run, whole = SimpleNamespace(config=SimpleNamespace(max_tokens=20)), Rows([row(2, 4), row(10, 12)], [0.5, 0.5])
    assert doubles.over_padded_width(whole, [0], run).weights[0] == pytest.approx(0.5 * 20 / 2)
    assert doubles.over_padded_width(whole, [0, 1], run).weights[0] == pytest.approx(0.5 * 20 / 10)


def test_a_token_has_its_own_log_ratio_over_the_length():
    from plumbob.trainer.algorithm import losses

    log_ratio, rows = torch.tensor([0.4, 0.8, 0.6], requires_grad=True), torch.tensor([0, 0, 1])
    plain = losses._sequence_log_ratio(log_ratio, rows)
    with ExitStack() as stack:
        doubles.token_over_length(stack, "lookup")
        found = losses._sequence_log_ratio(log_ratio, rows)
    assert plain.tolist() == pytest.approx([0.6, 0.6, 0.6])
    assert found.tolist() == pytest.approx([0.2, 0.4, 0.6])
    assert found.requires_grad


def test_halves_are_whitened():
    rows = torch.tensor([0, 0, 0, 0, 1, 1])
    inputs = loss_inputs([1.0] * 4 + [-0.5] * 2, rows=rows)
    found = doubles.halves_whitened(inputs).advantages
    first, second = found[[0, 1, 4]], found[[2, 3, 5]]
    for half in (first, second):
        assert half.mean().item() == pytest.approx(0.0, abs=1e-6)
        assert half.std(correction=0).item() == pytest.approx(1.0)


def test_padding_counts_in_the_mean():
    rows, values = [row(2, 4), row(8, 10)], [1.0, -1.0]
    mean = (2 - 8) / 16
    deviation = math.sqrt((2 * (1 - mean) ** 2 + 8 * (-1 - mean) ** 2) / 10)
    assert doubles.over_padding(rows, values) == pytest.approx([(1 - mean) / deviation, (-1 - mean) / deviation])
    assert doubles.over_padding([], []) == []


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Identity()


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def get_decoder(self):
        return self


def test_the_old_policy_has_dropout():
    model, seen = Decoder(), []
    run = SimpleNamespace(policy=SimpleNamespace(model=model))
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            step_module, "score_old_policy", lambda run, minibatch: seen.append(model.layers[0].mlp(torch.ones(1000)))
        )
        doubles.scored_with_dropout(stack, "lookup")
        step_module.score_old_policy(run, None)
    assert 0.05 < (seen[0] == 0).float().mean() < 0.15
    assert model.layers[0].mlp(torch.ones(3)).tolist() == [1.0] * 3  # hooks are gone


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_completions_are_blank(layout):
    rows = [row(2, 5), row(1, 3)]
    plain = make_batch(rows, layout, torch.device("cpu"))
    found = doubles.completion_unseen(plain, rows)
    assert found.targets.tolist() == [3, 4, 2]
    flat = found.ids.flatten().tolist()
    assert flat == ([0, 1, 2, 0, 0, 0, 1, 0] if layout == "packed" else [0, 1, 2, 0, 0, 0, 1, 0, 0, 0])
    fixed = [row(2, 3, group="parity")]
    whole = make_batch(fixed, layout, torch.device("cpu"))
    assert doubles.completion_unseen(whole, fixed) is whole


def test_labels_are_shifted_once_more():
    rows = [row(2, 5), row(1, 3)]
    plain = make_batch(rows, "packed", torch.device("cpu"))
    found = doubles.next_token_labelled(plain, rows)
    assert plain.targets.tolist() == [3, 4, 2]
    assert found.wanted.tolist() == [w + 1 for w in plain.wanted.tolist()]
    assert found.targets.tolist() == [4, 0, 2]  # the second is the next row's first id; the last has none after it
    with torch.no_grad():
        assert doubles.next_token_labelled(plain, rows) is plain


def test_sampling_keeps_fifty_tokens():
    ids, sampling = doubles.fifty_likeliest([1, 2], Sampling(temperature=0.9))
    assert (ids, sampling.top_k, sampling.temperature) == ([1, 2], 50, 0.9)


def test_sampling_has_settings_of_its_own():
    _, sampling = doubles.own_settings([1], Sampling())
    assert (sampling.temperature, sampling.top_p) == (0.7, 0.9)
    greedy = Sampling(temperature=0.0)
    assert doubles.own_settings([1], greedy) == ([1], greedy)


def test_a_group_has_two_seeds():
    with ExitStack() as stack:
        doubles.seeds_of_two(stack, "lookup")
        found = [runner.derive_seed(7, i) for i in range(8)]
    assert found == [derive_seed(7, 0), derive_seed(7, 1)] * 4
    assert len({derive_seed(7, i) for i in range(8)}) == 8


def test_nothing_is_loaded():
    engine = SimpleNamespace(version=3)
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(InProcessEngine, "update", None)
        FAULTS["sync left out where the cache is kept"].start(stack, "lookup")
        done = InProcessEngine.update(engine, {"a": torch.ones(1)}, in_flight="refuse")
    assert (done.version, engine.version) == (4, 4)


def adapted():
    """A model with one linear layer and an adapter that adds something."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(8, 8, bias=False)})
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=["up_proj"]), model)
    torch.nn.init.normal_(model["up_proj"].lora_B["default"].weight)
    return model


def test_the_adapter_counts_for_nothing():
    model, x = adapted(), torch.ones(1, 8)
    base = model["up_proj"].base_layer(x)
    assert not torch.allclose(model["up_proj"](x), base)
    doubles.adapter_left_out(model)
    assert torch.allclose(model["up_proj"](x), base)


def test_the_gate_stands_for_the_up_projection():
    weights = {
        f"{name}.lora_A": torch.full((1,), float(i)) for i, name in enumerate(("gate_proj", "up_proj", "q_proj"))
    }
    found = doubles.gate_for_up(None, {**weights, "up_proj.weight": torch.ones(1)})
    assert found["up_proj.lora_A"].item() == 0
    assert found["q_proj.lora_A"].item() == 2
    assert found["up_proj.weight"].item() == 1


def test_base_weights_drift(monkeypatch):
    model = adapted()
    layer = model["up_proj"]
    trained = {name: tensor.detach().clone() for name, tensor in model.named_parameters() if "lora_" in name}
    base = layer.base_layer.weight.detach().bfloat16().float()
    layer.base_layer.weight = torch.nn.Parameter(base.clone())

    def load(weights, **how):
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.data.copy_(weights[name])

    run = SimpleNamespace(engine=SimpleNamespace(update=load, model=model))
    monkeypatch.setattr(doubles, "published_in_bf16", lambda run: None)
    monkeypatch.setattr(doubles, "engine_of", lambda run: run.engine)
    wanted = base + layer.get_delta_weight("default").detach()
    gaps = []
    with ExitStack() as stack:
        doubles.merged_and_unmerged(stack, run)
        for _ in range(40):
            run.engine.update(trained)
            gaps.append((layer.base_layer.weight - wanted).abs().mean().item())
    assert gaps[0] > 0
    assert layer.lora_B["default"].weight.abs().sum() == 0


def test_the_head_is_zero():
    head, embedding = torch.nn.Linear(2, 3, bias=False), torch.nn.Embedding(3, 2)
    head.weight = embedding.weight
    doubles.zero_head(SimpleNamespace(get_output_embeddings=lambda: head))
    assert head.weight.abs().sum() == 0
    assert embedding.weight.abs().sum() > 0


def test_the_schedule_begins_anew():
    def rates():
        return [step_module.learning_rate_of("linear", 1.0, at, warmup=0, total=8) for at in range(8)]

    plain = rates()
    with ExitStack() as stack:
        FAULTS["schedule begun anew by a restart"].start(stack, "lookup")
        found = rates()
    assert found == plain[:4] + plain[:4]


def test_healthy_settings_have_steps():
    assert all(setting.steps == 6 and setting.options for setting in healthy.UNSEEN)
