"""Golden numbers of the reference, worked out by hand or by torch's own implementations."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plumbob.doctor.explain import alternatives, explain, leaving_out
from plumbob.doctor.measuring import SampledTensors
from plumbob.doctor.record import Row, Settings, TensorSample
from plumbob.doctor.reference import formulas
from plumbob.doctor.reference import model as plain_model
from plumbob.doctor.reference.formulas import change, rate
from plumbob.doctor.reference.rows import load_tokenizer
from plumbob.doctor.stages import LIKELIER
from plumbob.trainer.config.bundled_models import bundled_folder

Made = Callable[..., Any]


def rows_with(rewards: list[float], groups: str, **fields: object) -> list[Row]:
    ids, mask = np.arange(3, dtype=np.int32), np.array([False, True, True])
    return [
        Row(str(i), g, 0, ids, mask, r, 0.0, **fields) for i, (r, g) in enumerate(zip(rewards, groups, strict=True))
    ]


def test_advantages() -> None:
    rows = rows_with([1, 0, 0, 3, 3, 3], "aaabbb")
    assert formulas.advantages(rows, Settings()) == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0, 0])
    left_out = formulas.advantages(rows, Settings(baseline="leave_one_out"))
    assert left_out == pytest.approx([1, -0.5, -0.5, 0, 0, 0])
    scaled = formulas.advantages(rows, Settings(scale="group", scale_epsilon=0.0))
    assert scaled == pytest.approx([2 / 3 * 3**0.5, -(3**0.5) / 3, -(3**0.5) / 3, 0, 0, 0])
    cut = rows_with([1, 0], "aa", truncated=True)
    assert formulas.advantages(cut, Settings(overlong="penalise", overlong_penalty=1.0)) == pytest.approx([0.5, -0.5])


@pytest.mark.parametrize("bound", ["clip", "cap"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_slopes_are_the_derivatives_of_the_loss(bound: str, ratio: str, estimator: str) -> None:
    """The loss as a formula of torch, whose derivative autograd takes."""
    random = torch.Generator().manual_seed(0)
    n, rows = 12, torch.tensor([0] * 5 + [1] * 7)
    lp, old, ref = (-torch.rand(n, generator=random, dtype=torch.float64) * 2 for _ in range(3))
    old, lp = lp + (old + 1) * 0.4, lp.requires_grad_()
    a = torch.where(rows == 0, 0.7, -0.4).double()
    w, c = torch.rand(n, generator=random, dtype=torch.float64), torch.rand(n, generator=random, dtype=torch.float64)
    s = Settings(bound=bound, ratio=ratio, kl_beta=0.3, kl_estimator=estimator, delta=1.5 if bound == "clip" else None)
    log_ratio = lp - old
    if ratio == "sequence":
        means = torch.stack([log_ratio[rows == k].mean() for k in (0, 1)])[rows].detach()
        log_ratio = means + log_ratio - log_ratio.detach()
    r = log_ratio.exp()
    if bound == "cap":
        gain = r.detach().clamp(max=1.2) * a * lp
    else:
        free = torch.where((a < 0) & (r > 1.5), torch.full_like(r, 1.5), r)
        gain = torch.minimum(free * a, r.clamp(0.8, 1.2) * a)
    apart = lp - ref
    kl = {"k1": apart, "k2": apart**2 / 2, "k3": (-apart).exp() - 1 + apart}[estimator]
    total = (w * (-c * gain + 0.3 * (lp - old).exp().detach() * kl)).sum()
    (wanted,) = torch.autograd.grad(total, lp)
    tokens = formulas.Tokens(*(t.detach().numpy() for t in (a, w, c, lp, old)), rows.numpy(), ref.numpy())
    assert formulas.slopes(tokens, s) == pytest.approx(wanted.numpy(), abs=1e-12)


def test_weights_of_the_reductions() -> None:
    rows = rows_with([0, 1], "aa")
    rows[1].loss_mask = np.array([False, False, True])
    assert formulas.weights(rows, rows, Settings(reduction="rows")) == [1 / 4, 1 / 2]
    assert formulas.weights(rows, rows, Settings(reduction="constant", max_tokens=10)) == [1 / 20, 1 / 20]
    assert formulas.weights(rows, rows, Settings(reduction="minibatch_tokens")) == [1 / 3, 1 / 3]
    assert formulas.weights(rows[:1], rows, Settings(reduction="step_tokens", num_minibatches=2)) == [2 / 3]


def test_three_updates_are_those_of_torch() -> None:
    s = Settings(
        learning_rate=0.1, beta1=0.8, beta2=0.9, weight_decay=0.2, max_norm=1.0, num_steps=10, schedule="cosine"
    )
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    theirs = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)
    weights, moments, at = parameter.detach().numpy().copy(), None, np.arange(3)
    for step, values in enumerate(([3.0, 1.0, -2.0], [0.1, 0.2, 0.1], [-5.0, 0.0, 1.0])):
        parameter.grad = torch.tensor(values, dtype=torch.float64)
        norm = float(np.linalg.norm(values))
        one = TensorSample(
            "w", at, weights, weights, np.array(values), norm, 0.1, moments_before=moments, updates=step + 1
        )
        weights = weights + change([one], norm, step, s)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        theirs.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * step / 10)) / 2
        theirs.step()
        assert weights == pytest.approx(parameter.detach().numpy(), abs=1e-12)
        state = theirs.state[parameter]
        moments = np.stack([state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()])


def test_the_schedule() -> None:
    s = Settings(learning_rate=1.0, warmup=2, num_steps=6, schedule="linear")
    assert [rate(s, k) for k in range(6)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda x, seen: x, ""),
        (lambda x, seen: x / 0.7, "temperature-not-applied"),
        (lambda x, seen: x / 1.4, "temperature-not-applied"),
        (lambda x, seen: x.masked_fill(x < x.amax(-1, keepdim=True) - 2.302, -1e9), "sampling-altered"),
        (lambda x, seen: x - 1.2 * seen, "sampling-altered"),
    ],
)
def test_draws_from_another_distribution_are_likelier_under_it(change: Any, cause: str) -> None:
    random = torch.Generator().manual_seed(0)
    logits, seen = torch.randn(2000, 30, generator=random) * 2, torch.rand(2000, 30, generator=random) < 0.3
    drawn = torch.multinomial(change(logits, seen).softmax(-1), 1, generator=random)[:, 0]
    plain = plain_model.of_tokens(logits, drawn).sum().item()
    found = {key: other.sum().item() - plain for key, other in alternatives(logits, drawn, seen, 1.0).items()}
    best = max(found, key=lambda key: found[key])
    assert (best[0] if found[best] > LIKELIER else "") == cause


def test_of_a_large_vocabulary_nothing_is_left_out_beyond_the_tokens_that_are_ranked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = torch.Generator().manual_seed(0)
    logits, tokens = torch.randn(200, 500, generator=random) * 3, torch.randint(0, 500, (200,), generator=random)
    whole, own = leaving_out(logits, tokens), plain_model.of_tokens(logits, tokens)
    monkeypatch.setattr("plumbob.doctor.explain.MOST_RANKED", 120)
    for what, found in leaving_out(logits, tokens).items():
        same = torch.isclose(found, whole[what], atol=1e-5)
        assert (same | torch.isclose(found, own)).all() and same.any(), what


def test_rows_computed_together_are_computed_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                         intermediate_size=64, vocab_size=50, attn_implementation="eager")  # fmt: skip
    plain = plain_model.Plain(Qwen2ForCausalLM(config).eval(), Settings(temperature=0.7))
    rows = [(list(range(1, n)), [i > n // 2 for i in range(1, n)]) for n in (6, 21, 9, 14, 3)]
    slopes = [np.linspace(-1, 1, sum(at), dtype=np.float32) for _, at in rows]
    alone = [plain.every([row])[0] for row in rows]
    each = [plain.gradient([(*row, s)]) for row, s in zip(rows, slopes, strict=True)]
    monkeypatch.setattr(plain_model, "MOST_TOKENS", 40)
    assert np.concatenate(plain.every(rows)) == pytest.approx(np.concatenate(alone), abs=1e-5)
    for name, found in plain.gradient([(*row, s) for row, s in zip(rows, slopes, strict=True)]).items():
        assert torch.allclose(found, sum(one[name] for one in each), atol=1e-5), name


def test_the_entries_of_a_tensor_with_the_largest_gradients_are_recorded() -> None:
    tensors = {
        name: torch.nn.Parameter(torch.randn(shape)) for name, shape in (("a", (3000, 200)), ("b", (7,)), ("c", ()))
    }
    optimizer = torch.optim.AdamW(tensors.values(), lr=0.1)
    for parameter in tensors.values():
        parameter.grad = torch.randn_like(parameter)
    seen = SampledTensors(tensors, optimizer)
    optimizer.step()
    seen.updated()
    for one in seen.samples:
        flat, weights = (t.detach().reshape(-1) for t in (tensors[one.name].grad, tensors[one.name]))
        largest = (
            flat.abs().topk(16).indices.tolist() if one.name == "a" else []
        )  # in small ones, random entries suffice
        assert set(largest) <= set(one.indices.tolist())
        assert (one.gradient == flat[one.indices].numpy()).all() and (one.after == weights[one.indices].numpy()).all()
        assert one.gradient_norm == pytest.approx(flat.norm().item()) and one.updates == 1
        assert one.moments_before is None


def test_only_what_leaves_a_twentieth_is_accepted() -> None:
    expected, observed = np.zeros(10), np.ones(10)

    def of(*shares: float) -> Any:
        return (("x", f"{share}", observed * share) for share in shares)

    assert explain(of(0.9), observed, expected) is None
    assert explain(of(0.9, 0.97, 1.0), observed, expected) == ("x", "1.0")
    one = observed * 0
    one[0] = 1000.0
    observed = observed + one  # a number that fits the one large gap explains no others
    assert explain(iter([("x", "one", one)]), observed, expected) is None


def test_a_made_record_is_right(made_record: Made) -> None:
    record = made_record()
    assert [row.advantage for row in record.rows] == pytest.approx(
        list(formulas.advantages(record.rows, record.settings))
    )


def test_no_rows_are_computed_in_no_parts() -> None:
    """A step on completions of an earlier one has no row whose sampling is known."""
    from plumbob.trainer.config.bundled_models import bundled_folder

    plain = plain_model.load(Settings(model=str(bundled_folder("tiny"))))
    assert list(plain.scored([])) == []


def test_a_folder_of_a_model_without_a_tokenizer_is_said_to_have_none(tmp_path):
    """transformers makes up an empty one, by which every prompt would be another one."""
    (tmp_path / "config.json").write_text((bundled_folder("tiny") / "config.json").read_text())
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(Settings(model=str(tmp_path)))
    assert load_tokenizer(Settings(model=str(bundled_folder("tiny")))).chat_template
