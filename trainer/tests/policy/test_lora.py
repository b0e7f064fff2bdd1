"""The lean LoRA layer against peft's own, and merging in float32."""

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from plumbob.console import UserError
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.policy import compiling
from plumbob.trainer.policy.lora import LeanLoraLinear, add_lora
from plumbob.trainer.policy.merged_weights import merged_state


def with_adapter(model, **settings):
    """The adapter's B is not 0, so that it matters."""
    add_lora(model, TrainConfig(peft=True, lora_r=4, **settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return model


def run(model):
    ids = torch.arange(24).view(1, 24) * 7 % 640
    model.zero_grad()
    logits = model(ids).logits
    logits.log_softmax(-1)[0, :, 5].sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_values_and_gradients_are_pefts(model):
    model = with_adapter(model)
    lean = run(model)
    layers = [m for m in model.modules() if isinstance(m, LeanLoraLinear)]
    assert len(layers) == 2 * 7
    for layer in layers:
        layer.__class__ = PeftLinear
    peft = run(model)
    assert torch.allclose(lean[0], peft[0], atol=1e-5)
    assert lean[1].keys() == peft[1].keys() and all("lora_" in name for name in lean[1])
    for name, grad in peft[1].items():
        assert (lean[1][name] - grad).norm() <= 1e-5 * grad.norm() + 1e-7


def test_with_dropout_in_training_it_is_pefts_own_forward(qwen2):
    model = with_adapter(qwen2, lora_dropout=0.5)
    layer = next(m for m in model.modules() if isinstance(m, LeanLoraLinear))
    x = torch.randn(5, 32)
    layer.train()
    torch.manual_seed(0)
    ours = layer(x)
    torch.manual_seed(0)
    assert torch.equal(ours, PeftLinear.forward(layer, x))
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.allclose(layer(x), PeftLinear.forward(layer, x), atol=1e-5)


def test_merged_and_disabled_adapters_and_variants_take_pefts_path(qwen2):
    model = with_adapter(qwen2)
    layer = next(m for m in model.modules() if isinstance(m, LeanLoraLinear))
    x = torch.randn(5, 32)
    applied, plain = layer(x), layer.base_layer(x)
    assert not torch.allclose(applied, plain, atol=1e-3)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), plain)
    layer.enable_adapters(True)
    layer.merge()
    assert torch.allclose(layer(x), applied, atol=1e-5)


def test_a_dora_adapter_keeps_its_own_class_and_forward(qwen2):
    qwen2.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
    layer = next(m for m in qwen2.modules() if isinstance(m, PeftLinear))
    expected = layer(torch.ones(2, 32))
    layer.__class__ = LeanLoraLinear
    assert torch.equal(layer(torch.ones(2, 32)), expected)


def test_merged_weights_compute_what_the_adapted_model_computes(model):
    adapted = with_adapter(model)
    expected, _ = run(adapted)
    state = merged_state(adapted)
    plain = adapted.__class__(adapted.config)
    missing, unexpected = plain.load_state_dict(state, strict=False)
    assert not missing and not unexpected
    assert torch.allclose(run(plain)[0], expected, atol=1e-4)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())


def test_targets_that_do_not_exist_or_are_the_output_embedding_are_refused(qwen2):
    for names, message in (("q_proj,nope", "no module of this model: nope"), ("lm_head", "lm_head"), (" ", "nothing")):
        with pytest.raises(UserError, match=message):
            add_lora(qwen2, TrainConfig(peft=True, lora_targets=names))


def test_all_linear_means_every_linear_layer_but_the_head(qwen2):
    names = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    add_lora(qwen2, TrainConfig(peft=True, lora_targets="all-linear"))
    adapted = {name.rsplit(".", 1)[-1] for name, module in qwen2.named_modules() if hasattr(module, "lora_A")}
    assert adapted == set(names.split(","))


@pytest.mark.slow
@pytest.mark.parametrize("peft", [False, True])
def test_layers_are_compiled_once_and_without_numbers_that_only_the_processor_can_compute(qwen2, peft):
    """Such a number makes inductor look for a C++ compiler in the first step: half a minute with LoRA on an H200."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    if peft:
        add_lora(qwen2, TrainConfig(env="gsm8k", peft=True))
    with torch._dynamo.config.patch(specialize_float=False, suppress_errors=False):
        compiling.compile_layers(qwen2, "replicated", keep)
        # As many tokens as a head has dimensions come first: the code must not be for so many alone.
        for length in (qwen2.config.hidden_size // qwen2.config.num_attention_heads, 7, 9, 12):
            qwen2(torch.arange(length)[None], use_cache=False).logits.sum().backward()
    torch._dynamo.reset()
    assert len(graphs) == 1, "the layers differ in weights only"
    assert [node for graph in graphs for node in graph.graph.nodes if node.target == "item"] == []


def test_a_pass_of_a_few_rows_without_gradients_compiles_nothing(qwen2):
    """With gradients and without are two compilations, and each takes seconds in the first step on a GPU."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    ids = torch.arange(7)[None]
    with torch.no_grad():
        expected = qwen2(ids, use_cache=False).logits
    with torch._dynamo.config.patch(suppress_errors=False):
        compiling.compile_layers(qwen2, "replicated", keep)
        with torch.no_grad(), compiling.uncompiled():
            assert qwen2(ids, use_cache=False).logits.equal(expected)
        assert not graphs
        qwen2(ids, use_cache=False).logits.sum().backward()
    torch._dynamo.reset()
    assert len(graphs) == 1
