"""Rows that begin alike: what they have in common is computed once, and their scores and gradients stay the same."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plumbob.rollout import Sample
from plumbob.testing.small_models import ARCHITECTURES, small_model
from plumbob.trainer.config.train import TrainConfig
from plumbob.trainer.distributed.world import balanced_shares
from plumbob.trainer.policy import compiling, flash_attention, packed_attention, token_scorer
from plumbob.trainer.policy import policy as policy_module
from plumbob.trainer.policy.forward_plan import plan_forward
from plumbob.trainer.policy.loading import load_model
from plumbob.trainer.policy.policy import Policy
from plumbob.trainer.policy.shared_beginnings import SHORTEST, balanced_by_prompt, find_pieces
from plumbob.trainer.policy.token_logprobs import score_tokens

WITH_WINDOWS = {"qwen2 with windows", "gemma 2", "gemma 3", "mistral", "phi 3", "gpt-oss"}
PADDED = {"qwen3-next", "qwen3.5", "lfm2", "mamba", "bloom"}


def row_of(prompt: list[int], rest: list[int], generator: random.Random | None = None) -> Sample:
    """A row whose first id after the prompt is sampled; of the others all, or some drawn by `generator`."""
    sampled = [i == 0 or generator is None or generator.random() < 0.6 for i in range(len(rest))]
    mask = [False] * len(prompt) + sampled
    return Sample(prompt + rest, mask, [0.0] * len(mask), 0.0, "g", "agent_completed", False)


def random_groups(generator: random.Random, longest: int = 30) -> list[Sample]:
    """Rows in random order whose prompts have all, a part or nothing in common; some are equal or another's beginning."""

    def ids(least: int, most: int) -> list[int]:
        return [generator.randrange(600) for _ in range(generator.randint(least, most))]

    rows: list[Sample] = []
    system = ids(0, longest)
    for _ in range(generator.randint(1, 3)):
        prompt = (system if generator.random() < 0.7 else []) + ids(1, longest)
        begun = ids(1, 20)  # how several replies begin, as those of a policy that is sure of its tokens
        for _ in range(generator.randint(1, 4)):
            kept = len(prompt) if generator.random() < 0.7 else generator.randint(1, len(prompt))
            reply = (begun[: generator.randint(1, len(begun))] if generator.random() < 0.5 else []) + ids(1, 12)
            rows.append(row_of(prompt[:kept], reply, generator))
    longer = generator.choice(rows)
    cut = generator.randint(1, len(longer.token_ids))
    rows.append(
        dataclasses.replace(
            longer, token_ids=longer.token_ids[:cut], loss_mask=longer.loss_mask[:cut], sampling_logprobs=[0.0] * cut
        )
    )
    rows.append(dataclasses.replace(generator.choice(rows)))
    generator.shuffle(rows)
    return rows


def computed(policy: Policy) -> list[int]:
    """A list that gets the number of tokens of each forward pass from now on."""
    tokens: list[int] = []
    policy.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return tokens


def gradient(policy: Policy) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in policy.trainable.values() if p.grad is not None])
    policy.model.zero_grad()
    return flat


def assert_as_alone(policy: Policy, rows: list[Sample]) -> None:
    """Log-probabilities, entropies and the gradient of `rows` in one pass are those of each row in a pass of its own."""
    factors = torch.rand(sum(row.num_sampled for row in rows), generator=torch.Generator().manual_seed(1)) - 0.5
    alone = [policy.score([row], 0.9) for row in rows]
    (torch.cat([s.logprobs for s in alone]) * factors).sum().backward()
    expected = gradient(policy)
    together = policy.score(rows, 0.9)
    (together.logprobs * factors).sum().backward()
    assert torch.allclose(together.logprobs, torch.cat([s.logprobs for s in alone]), atol=1e-5)
    assert torch.allclose(together.entropies, torch.cat([s.entropies for s in alone]), atol=1e-5)
    assert (gradient(policy) - expected).norm() <= 1e-4 * expected.norm()


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_the_pieces_of_a_row_are_the_row_and_few_tokens_are_computed_twice(seed):
    rows = random_groups(random.Random(seed))
    pieces, paths = find_pieces(rows)
    for row, path in zip(rows, paths, strict=True):
        assert [
            t for p in path for t in rows[pieces[p].row].token_ids[pieces[p].start : pieces[p].end]
        ] == row.token_ids
        for k, p in enumerate(path):
            assert pieces[p].above == path[:k]
            if sum(p in other for other in paths) > 1:
                assert pieces[p].end - pieces[p].start >= SHORTEST
    beginnings = {tuple(row.token_ids[: n + 1]) for row in rows for n in range(len(row.token_ids))}
    tokens = sum(piece.end - piece.start for piece in pieces)
    # What is left to save is less than SHORTEST tokens wherever a row parts from another.
    assert len(beginnings) <= tokens < len(beginnings) + SHORTEST * len(rows)
    again = find_pieces(rows[::-1])[0]
    assert sorted((p.start, p.end) for p in again) == sorted((p.start, p.end) for p in pieces)


@given(st.integers(0, 2**32), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_shares_of_processes_are_about_as_even_as_without_prompts(seed, size):
    rows = random_groups(random.Random(seed))
    lengths = [len(row.token_ids) for row in rows]
    shares, apart = balanced_by_prompt(rows, size), balanced_shares(lengths, size)
    assert sorted(i for share in shares for i in share) == list(range(len(rows)))
    assert all(share == sorted(share) for share in shares)
    fullest = [max(sum(lengths[i] for i in share) for share in found) for found in (shares, apart)]
    assert fullest[0] <= 1.05 * fullest[1]


def test_a_process_gets_all_rows_of_a_prompt_or_half_of_them():
    prompts = [[i] * 20 for i in range(4)]
    rows = [row_of(prompts[i % 4], [i] * 10) for i in range(16)]
    for size, prompts_of_share in ((1, 4), (2, 2), (4, 1), (8, 1)):
        for share in balanced_by_prompt(rows, size):
            assert len(share) == 16 // size
            assert len({i % 4 for i in share}) == prompts_of_share


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def tiny(request):
    policy = Policy(load_model("tiny"), TrainConfig(peft=request.param), torch.device("cpu"))
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return policy


@pytest.mark.slow
@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_any_rows_score_as_alone(tiny, seed):
    assert_as_alone(tiny, random_groups(random.Random(seed)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_beginnings_are_shared_where_that_is_exact(name):
    policy = Policy(small_model(name), TrainConfig(), torch.device("cpu"))
    assert policy.shares == (name not in WITH_WINDOWS | PADDED)
    tokens = computed(policy)
    rows = random_groups(random.Random(3))
    policy.score(rows, 1.0)
    assert (tokens[0] < sum(len(row.token_ids) for row in rows)) == policy.shares
    assert_as_alone(policy, rows)


def test_a_prompt_is_computed_once_for_its_rows(tiny):
    generator = random.Random(0)
    prompts = [[generator.randrange(600) for _ in range(n)] for n in (30, 50)]
    rows = [row_of(prompts[i % 2], [i] * 10) for i in range(8)]
    tokens = computed(tiny)
    tiny.score(rows, 1.0)
    tiny.score(rows[:1], 1.0)
    tiny.score_rows(rows, 1.0, max_tokens=200)
    tiny.score_rows(rows, 1.0, max_tokens=70)
    one_pass, alone, *rest = tokens
    assert one_pass == 30 + 50 + 8 * 10 and alone == 40
    assert rest == [160, 70, 70, 70]  # 50 + 2 x 10 twice, and 30 + 4 x 10


def test_sampled_tokens_that_rows_share_are_scored_once(tiny, monkeypatch):
    """Not those that follow the same tokens and differ: their logits come from one place, and each has its own score."""
    sizes = []
    monkeypatch.setattr(
        token_scorer, "score_tokens", lambda hidden, *a: sizes.append(len(hidden)) or score_tokens(hidden, *a)
    )
    prompt, begun = list(range(20, 50)), list(range(100, 112))
    rows = [row_of(prompt, [*begun, i % 3, 7]) for i in range(6)]
    scores = tiny.score(rows, 1.0)
    assert len(scores.logprobs) == 6 * 14 and sizes == [12 + 3 + 6]
    tiny.score(rows[:1], 1.0)
    assert sizes[1:] == [14]


def test_what_is_before_a_shared_prompt_matters_to_every_row(tiny):
    """Each row has the gradient of its prompt: to change the prompt changes all of its rows and no others."""
    prompts = [[7 * i % 600 for i in range(n)] for n in (20, 25)]
    rows = [row_of(prompts[i % 2][::-1], [i + 3] * 5) for i in range(6)]
    before = tiny.score_rows(rows, 1.0, 1000)
    changed = [
        row_of([599, *row.token_ids[1:20]], row.token_ids[20:]) if i % 2 == 0 else row for i, row in enumerate(rows)
    ]
    after = tiny.score_rows(changed, 1.0, 1000)
    moved = [(a - b).abs().max().item() > 1e-4 for a, b in zip(before, after, strict=True)]
    assert moved == [True, False] * 3


@pytest.mark.parametrize("peft", [False, True])
def test_with_gradient_checkpointing_and_dropout_of_an_adapter(peft):
    options = {"peft": True, "lora_dropout": 0.5} if peft else {}
    policy = Policy(load_model("tiny"), TrainConfig(gradient_checkpointing=True, **options), torch.device("cpu"))
    rows = random_groups(random.Random(8))
    tokens = computed(policy)
    if not peft:
        assert_as_alone(policy, rows)
    policy.score(rows, 1.0).logprobs.sum().backward()
    assert tokens[-1] < sum(len(row.token_ids) for row in rows)
    assert gradient(policy).any()


def test_a_model_that_loses_what_is_above_a_piece_is_not_given_pieces():
    model = small_model("llama")
    inner = model.get_decoder().forward
    model.get_decoder().forward = lambda *args, above=None, **more: inner(*args, **more)
    plan = plan_forward(model, 512)
    assert plan.layout == "packed" and not plan.shares


def kernel(query, key, value, bounds, scale, window=None):
    """What FlashAttention promises for rows of any lengths: causal, with the last query at the last key, heads in groups."""
    ends_q, ends_k, longest_q, longest_k = bounds
    assert ends_q.dtype == ends_k.dtype == torch.int32 and len(ends_q) == len(ends_k) and window is None
    assert query.dtype == key.dtype == value.dtype and (ends_q[-1], ends_k[-1]) == (len(query), len(key))
    outs = []
    for i in range(len(ends_q) - 1):
        q = query[ends_q[i] : ends_q[i + 1]].transpose(0, 1)
        k, v = (x[ends_k[i] : ends_k[i + 1]].transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        n, m = q.shape[1], k.shape[1]
        assert n <= m and n <= longest_q and m <= longest_k
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        later = torch.arange(m) > torch.arange(n)[:, None] + m - n
        outs.append((scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def test_flash_attention_is_asked_for_the_same(tiny, monkeypatch):
    """Its bounds and keys, with the kernel replaced by what it promises; the kernel itself runs on GPUs only."""
    monkeypatch.setattr(flash_attention, "flash_attention", kernel)
    rows = random_groups(random.Random(5))
    expected = tiny.score(rows, 1.0).logprobs
    expected.sum().backward()
    wanted = gradient(tiny)
    tokens = computed(tiny)
    monkeypatch.setattr(tiny, "_flash", True)
    for shares in (True, False):
        monkeypatch.setattr(policy_module, "SHARES_WITH_FLASH", shares)
        scores = tiny.score(rows, 1.0).logprobs
        scores.sum().backward()
        assert torch.allclose(scores, expected, atol=1e-5)
        assert (gradient(tiny) - wanted).norm() <= 1e-4 * wanted.norm()
    assert tokens[0] < tokens[1] == sum(len(row.token_ids) for row in rows)


@pytest.mark.slow
def test_layers_that_are_compiled_compute_shared_rows_with_one_graph(monkeypatch):
    """The kernel stays one opaque operation, as torch's own is; rows of any number and lengths share its graph."""
    monkeypatch.setattr(flash_attention, "flash_attention", torch.compiler.disable(kernel))
    policy = Policy(load_model("tiny"), TrainConfig(), torch.device("cpu"))
    monkeypatch.setattr(policy, "_flash", True)
    batches = [random_groups(random.Random(seed)) for seed in (1, 2, 3)]
    expected = [policy.score(rows, 1.0).logprobs for rows in batches]
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(suppress_errors=False):
        compiling.compile_layers(policy.model, "replicated", keep)
        for k, rows in enumerate(batches):
            scores = policy.score(rows, 1.0).logprobs
            scores.sum().backward()
            assert torch.allclose(scores, expected[k], atol=1e-5)
            if k == 0:
                once = len(graphs)
    torch._dynamo.reset()
    assert once > 0 and len(graphs) == once
    assert policy.model.config._attn_implementation == packed_attention.NAME
