"""A frozen base in 8 bits: the same for trainer and engine, close to the unrounded one, and said by what is saved."""

import os
from pathlib import Path

import pytest
import torch
from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.inference.paged.opening import open_paged
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.inference.weight_sync import parity_row, sync_weights
from plumbob.trainer.policy import compiling
from plumbob.trainer.policy.int8_base import Int8Linear, base_layers, product, round_as_int8, to_int8
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.lora import add_lora
from plumbob.trainer.policy.policy import Policy
from torch.nn.functional import cosine_similarity, linear

ROWS = [parity_row([(7 * i + k) % 60 + 3 for i in range(40)]) for k in range(4)]


def move(policy):
    with torch.no_grad():
        for i, p in enumerate(policy.trainable.values()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.02)


def gradient(policy, rows) -> torch.Tensor:
    """The gradient of a loss with both signs, of all trained weights."""
    scores = policy.score(rows, 1.0).logprobs
    (scores * torch.linspace(-1, 1, len(scores))).sum().backward()
    return torch.cat([p.grad.flatten().float() for p in policy.trainable.values()])


def test_a_product_is_that_of_the_rounded_matrix_and_keeps_no_float_copy_of_it():
    layer = torch.nn.Linear(40, 24)
    layer.weight.requires_grad_(False)[3] = 0  # a row without a scale
    given, x = layer.weight.clone(), torch.randn(5, 40, requires_grad=True)
    holder = torch.nn.Module()
    holder.layer, holder.get_output_embeddings = layer, lambda: None
    to_int8(holder)
    assert layer.weight.dtype == torch.int8 and ((layer.float_weight() - given).abs() <= layer.scale[:, None]).all()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = product(x, layer.weight, layer.scale)
    assert not [t for t in kept if t.shape == given.shape and t.is_floating_point()]
    assert torch.allclose(y, linear(x, layer.float_weight()), atol=1e-6)
    (ours,) = torch.autograd.grad(y.square().sum(), x)
    (theirs,) = torch.autograd.grad(linear(x, layer.float_weight()).square().sum(), x)
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_both_engines_hold_the_trainers_numbers_and_give_its_log_probabilities(model, make_policy, bf16):
    policy = make_policy(model, peft=True, base_bits=8, bf16=bf16)
    row = parity_row(list(range(5, 120)))
    engines = [TransformersEngine(policy.engine_model()), open_paged(policy.engine_model(), 4, 512, 0.4)]
    move(policy)
    for engine in engines:
        assert sync_weights(policy, engine, row).parity < (0.05 if bf16 else 1e-5)  # as with an unrounded base
    served = engines[1].served_weights()
    for name, layer in base_layers(policy.model).items():
        assert isinstance(layer, Int8Linear) and layer.weight.data_ptr() == served[f"{name}.weight"].data_ptr()


def test_an_engines_own_copy_stays_in_8_bits(model, make_policy):
    policy = make_policy(model, peft=True, base_bits=8)
    twin = dict(policy.engine_model(share=False).named_parameters())
    for name, p in policy.model.named_parameters():
        assert torch.equal(twin[name], p) and twin[name].data_ptr() != p.data_ptr()


def test_compiled_layers_give_the_same_gradients(model, make_policy, random_rows):
    policy, rows = make_policy(model, peft=True, base_bits=8), random_rows(3)
    move(policy)
    plain = gradient(policy, rows)
    policy.sharding.scorer.zero_grad()
    with torch._dynamo.config.patch(suppress_errors=False):
        compiling.compile_layers(policy.model, "replicated", "aot_eager")
        torch._dynamo.config.suppress_errors = False
        compiled = gradient(policy, rows)
    torch._dynamo.reset()
    assert torch.allclose(compiled, plain, atol=1e-5)


def test_what_is_saved_is_the_model_that_was_trained(make_policy, tmp_path):
    """The final model has the rounded base with the adapter added; an adapter alone says that its base is rounded."""
    policy, rows = make_policy(load_model("tiny"), peft=True, base_bits=8), ROWS
    move(policy)
    expected = policy.score(rows, 1.0).logprobs
    policy.save(tmp_path / "adapter")
    policy.save_final(tmp_path / "model")
    for folder in ("adapter", "model", "model/adapter"):
        again = make_policy(load_model(str(tmp_path / folder))).score(rows, 1.0).logprobs
        assert torch.allclose(again, expected, atol=1e-5), folder


@pytest.mark.parametrize("wrong", [{}, {"peft": True, "engine": "vllm"}, {"peft": True, "base_bits": 4}], ids=str)
def test_8_bits_are_refused_where_they_mean_nothing(wrong):
    with pytest.raises(UserError, match="--base-bits"):
        TrainConfig(env="lookup", **{"base_bits": 8, **wrong})


def cosine(name: str, make_policy, rows, bf16: bool) -> float:
    found = []
    for bits in (16, 8):
        policy: Policy = make_policy(load_model(name), peft=True, base_bits=bits, bf16=bf16)
        move(policy)
        found.append(gradient(policy, rows))
    return cosine_similarity(*(g.double() for g in found), dim=0).item()


@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_point_where_those_of_the_unrounded_base_do(make_policy, bf16):
    assert cosine("tiny", make_policy, ROWS, bf16) >= 0.995


@pytest.mark.pretrained
def test_gradients_of_a_pretrained_model_do_as_well(make_policy):
    """$PLUMBOB_SMOLLM2 names a folder of a small pretrained model."""
    folder = os.environ.get("PLUMBOB_SMOLLM2", "")
    if not (Path(folder) / "config.json").is_file():
        pytest.skip("PLUMBOB_SMOLLM2 names no folder of a pretrained model")
    from transformers import AutoTokenizer

    text = "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell? 48 + 24 = 72."
    rows = [parity_row(AutoTokenizer.from_pretrained(folder)(text).input_ids)]
    assert cosine(folder, make_policy, rows, bf16=True) >= 0.995


def test_rounding_twice_changes_nothing(model):
    add_lora(model, TrainConfig(env="lookup", peft=True))
    to_int8(model)
    plain = type(model)(model.config)
    with torch.no_grad():
        for name, layer in base_layers(model).items():
            plain.get_submodule(name.removesuffix(".base_layer")).weight.copy_(layer.float_weight())
    before = {n: p.clone() for n, p in plain.named_parameters()}
    round_as_int8(plain)
    assert all(torch.allclose(p, before[n], rtol=1e-2) for n, p in plain.named_parameters())
