"""Every architecture, packed or padded as measured: scores and gradients of its own forward pass, row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.testing.small_models import ARCHITECTURES, VOCABULARY, WINDOW, small_model
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.policy import forward_plan
from plumbob.trainer.policy.forward_plan import ForwardPlan, in_type, measured_rows, own_logprobs, plan_forward
from plumbob.trainer.policy.packing import pack_padded
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.policy.token_scorer import LogitMap

RECURRENT = {"qwen3-next", "qwen3.5", "lfm2", "mamba"}
"""Models with a state that runs on over the bounds of packed rows."""

PADDED = RECURRENT | {"bloom"}
"""Bloom's positions are in its own attention, which packed rows do not reach."""

EAGER = {"gemma 2", "gpt-oss"}
"""transformers' default attention (sdpa) leaves their soft-capping and sinks out."""


def policy_of(name: str, **options) -> Policy:
    return Policy(small_model(name), TrainConfig(**options), torch.device("cpu"))


def own_scores(name: str, rows: list[Sample], temperature: float = 1.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities and the gradient of their sum by `model(row).logits`, without any code of plumbob."""
    model = small_model(name)
    if name in EAGER:
        model.set_attn_implementation("eager")
    scores = []
    for row in rows:
        logits = model(torch.tensor([row.token_ids])).logits[0].float() / temperature
        logprobs = logits.log_softmax(-1)
        scores += [logprobs[t - 1, row.token_ids[t]] for t, m in enumerate(row.loss_mask) if m]
    stacked = torch.stack(scores)
    stacked.sum().backward()
    return stacked.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_and_gradients_are_those_of_the_models_own_forward_pass(name, random_rows):
    policy = policy_of(name)
    rows = random_rows(5)
    assert max(len(row.token_ids) for row in rows) > 2 * WINDOW
    for temperature in (1.0, 0.7):
        expected, gradient = own_scores(name, rows, temperature)
        scores = policy.score(rows, temperature).logprobs
        assert (scores - expected).abs().max() < 1e-5
        scores.sum().backward()
        ours = {n: p.grad for n, p in policy.trainable.items() if p.grad is not None and p.grad.any()}
        theirs = {n: g for n, g in gradient.items() if g.any()}
        assert set(ours) == set(theirs)
        flat = [torch.cat([g[n].flatten() for n in theirs]) for g in (ours, theirs)]
        assert (flat[0] - flat[1]).norm() / flat[1].norm() < 1e-5
        policy.model.zero_grad()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_are_packed_wherever_that_is_exact(name):
    plan = policy_of(name).plan
    assert plan.layout == ("padded" if name in PADDED else "packed")
    assert plan.limit == pytest.approx(1e-5, rel=3)
    assert plan.differences[plan.layout] <= plan.limit
    lines = plan.lines()
    if name in PADDED:
        difference = plan.differences["packed"]
        assert difference > 0.01
        assert lines == [
            "rows of this model are padded instead of packed, because packed rows differ by "
            f"{difference:.2g} nats from rows alone"
        ]
    else:
        assert lines == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", LogitMap()),
        ("cohere", LogitMap(scale=0.25)),
        ("granite", LogitMap(scale=0.25)),
        ("gemma 2", LogitMap(cap=3.0)),
        ("gemma 3", LogitMap(cap=3.0)),
        ("phi", LogitMap()),
    ],
)
def test_scales_and_caps_of_logits_are_found(name, expected):
    """Cohere multiplies by its number and Granite divides by its own; another model multiplies under Granite's name."""
    assert policy_of(name).plan.logits == expected


def test_a_model_that_does_something_unknown_to_its_logits_computes_them_itself(random_rows):
    model = small_model("qwen2")
    head = model.lm_head.forward

    class Twisted(type(model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits - 0.1 * out.logits.sin().roll(1, dims=-1)
            return out

    model.__class__ = Twisted
    rows = random_rows(4)
    policy = Policy(model, TrainConfig(), torch.device("cpu"))
    assert model.lm_head.forward == head and policy.plan.logits is None and policy.plan.layout == "packed"
    assert "computed for whole microbatches" in policy.plan.lines()[0]
    scores = policy.score(rows, 0.7)
    logits = [model(torch.tensor([row.token_ids])).logits[0] / 0.7 for row in rows]
    at = [(i, t) for i, row in enumerate(rows) for t, m in enumerate(row.loss_mask) if m]
    distributions = torch.stack([logits[i][t - 1] for i, t in at]).log_softmax(-1)
    targets = torch.tensor([rows[i].token_ids[t] for i, t in at])
    assert torch.allclose(scores.logprobs, distributions.gather(1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(scores.entropies, -(distributions.exp() * distributions).sum(-1), atol=1e-5)


def test_rows_take_a_pass_each_if_neither_packed_nor_padded_rows_are_right():
    """A model that looks at what else is in its pass, as some choose rotary frequencies by their longest row."""
    model = small_model("llama")
    decoder = model.get_decoder()
    inner = decoder.forward

    def forward(input_ids, **kwargs):
        output = inner(input_ids=input_ids, **kwargs)
        if input_ids.numel() > 25:
            output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    decoder.forward = forward
    policy = Policy(model, TrainConfig(), torch.device("cpu"))
    assert policy.plan.layout == "alone"
    assert policy.microbatches(measured_rows(VOCABULARY, (5, 7, 3)), 100) == [[1], [0], [2]]
    (line,) = policy.plan.lines()
    assert line.startswith("rows of this model take one forward pass each, because packed rows differ by")
    rows = measured_rows(VOCABULARY, (9, 5, 20))
    alone = torch.cat([policy.score([row], 1.0).logprobs for row in rows])
    assert torch.equal(policy.score(rows, 1.0).logprobs, alone)
    assert torch.allclose(alone, own_scores("llama", rows)[0], atol=1e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma 3"])
def test_measuring_leaves_the_model_as_it_was(name):
    model = small_model(name)
    ids = torch.arange(3, 40)[None]
    before, windows = model(ids).logits, model.config.sliding_window
    attention = model.config._attn_implementation
    plan_forward(model, 4096)
    assert torch.equal(model(ids).logits, before)
    assert (model.config.sliding_window, model.config._attn_implementation) == (windows, attention)


def test_a_window_that_no_row_exceeds_is_not_measured():
    """With a window of 4,096 tokens and rows of 1,024, whether windows are respected is all the same."""
    for context, expected in ((WINDOW, False), (WINDOW + 1, True)):
        model = small_model("mistral")
        called = []
        inner = model.get_decoder().forward
        model.get_decoder().forward = lambda *a, inner=inner, called=called, model=model, **k: (
            called.append(model.config.sliding_window),
            inner(*a, **k),
        )[1]
        plan_forward(model, context)
        assert (4 in called) == expected


@pytest.mark.parametrize("name", ["qwen3 moe", "qwen3.5", "gemma 2", "gpt-oss"])
@pytest.mark.parametrize("peft", [False, True])
def test_saved_and_final_models_are_the_trained_ones(name, peft, tmp_path, random_rows):
    options = {"peft": peft, "lora_targets": "o_proj"} if peft else {}
    policy = policy_of(name, **options)
    rows = random_rows(3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        expected = policy.score(rows, 1.0).logprobs
        policy.save(tmp_path / "saved")
        policy.save_final(tmp_path / "final")
        restored = policy_of(name, **options)
        restored.restore(tmp_path / "saved")
        assert torch.allclose(restored.score(rows, 1.0).logprobs, expected, atol=1e-5)
        final = type(small_model(name)).from_pretrained(tmp_path / "final", dtype=torch.float32)
        whole = Policy(final, TrainConfig(), torch.device("cpu"))
        assert torch.allclose(whole.score(rows, 1.0).logprobs, expected, atol=1e-4)


@given(lengths=st.lists(st.integers(1, 40), max_size=20), max_tokens=st.integers(1, 150))
@settings(deadline=None)
def test_padded_microbatches_hold_every_row_once_and_no_more_than_they_may(lengths, max_tokens):
    microbatches = pack_padded(lengths, max_tokens)
    assert sorted(i for part in microbatches for i in part) == list(range(len(lengths)))
    for part in microbatches:
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= max_tokens
    longest = [max(lengths[i] for i in part) for part in microbatches]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.parametrize("name", ["llama", "gemma 3", "qwen3", "bloom"])
def test_in_float64_a_model_computes_as_its_float64_copy_and_is_left_as_it_was(name):
    model, copy = small_model(name), small_model(name).double()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    ids = measured_rows(VOCABULARY)[-1].token_ids
    in_float32 = own_logprobs(model, ids)
    with in_type(model, torch.float64):
        wide = own_logprobs(model, ids)
    assert (wide - own_logprobs(copy, ids)).abs().max() < 1e-6
    with pytest.raises(IndexError), in_type(model, torch.float64):
        own_logprobs(model, [VOCABULARY + 1] * 5)
    assert all(t.dtype == before[n].dtype and torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(own_logprobs(model, ids), in_float32)


def test_rows_that_differ_by_float32s_rounding_error_are_packed(monkeypatch):
    """On a GPU all passes of a large model may share a rounding error that packed rows do not share."""
    monkeypatch.setattr(forward_plan, "LIMIT", 0.0)
    monkeypatch.setattr(forward_plan, "_noise", lambda *_: 0.0)
    plan = plan_forward(small_model("llama"), 512)
    assert plan.layout == "packed"
    assert 0 < plan.differences["packed"] <= plan.limit < 1e-4


def test_ids_beyond_the_tokenizer_do_not_decide_how_rows_are_computed():
    """What a model makes of ids that it was never trained on means nothing. Here they make rows leak into each other."""
    model = small_model("llama")
    decoder, inner = model.get_decoder(), model.get_decoder().forward

    def forward(*args, input_ids=None, **more):
        output = inner(*args, input_ids=input_ids, **more)
        if input_ids is not None and (input_ids >= VOCABULARY // 2).any():
            output.last_hidden_state = output.last_hidden_state * input_ids.shape[1]
        return output

    decoder.forward = forward
    assert plan_forward(model, 512).layout == "alone"
    plan = plan_forward(model, 512, VOCABULARY // 2)
    assert (plan.layout, plan.num_ids) == ("packed", VOCABULARY // 2)
    assert plan_forward(model, 512, 10 * VOCABULARY).layout == "alone"


def test_the_sentence_about_padded_rows_after_every_layout_was_tried_with_and_without_a_logit_map():
    """Seen on an H200: rows alone were not exact with `LogitMap`, and padded rows were without."""
    differences = {"packed": 2e-3, "padded": 1e-6, "alone": 1.4e-3}
    (padded, logits) = ForwardPlan("padded", None, "sdpa", VOCABULARY, differences=differences).lines()
    assert padded == (
        "rows of this model are padded instead of packed, because packed rows differ by 0.002 nats from rows alone"
    )
    assert "logits" in logits
    (alone,) = ForwardPlan(
        "alone", LogitMap(), "sdpa", VOCABULARY, differences={"packed": "no", "padded": 1.0, "alone": 0.1}
    ).lines()
    assert alone == (
        "rows of this model take one forward pass each, because packed rows cannot be computed (no), and padded rows "
        "differ by 1 nats from rows alone"
    )
