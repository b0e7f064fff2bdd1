"""Our loss and gradient against TRL 1.16's `GRPOTrainer`, for each loss that both have: one tiny model, the same samples.

Run with `uv run --group trl pytest -m trl`. Where TRL means something else by a name, or is wrong, the test says so and
pins ours to the paper.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from plumbob.rollout import Sample
from plumbob.trainer.algorithm.importance_weights import importance_corrections
from plumbob.trainer.algorithm.losses import LossInputs, Objective, policy_loss, row_weights

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.trl

MAX_TOKENS = 64

CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}

# Ours, with CLIP -> TRL's settings. cispo: TRL's epsilon_high is the cap itself; in the paper (arXiv:2506.13585, eq. 5),
# and here, the cap is 1 + epsilon_high.
SAME = {
    "grpo": {**CLIP, "loss_type": "grpo"},
    "bnpo": {**CLIP, "loss_type": "bnpo"},
    "dr_grpo": {**CLIP, "loss_type": "dr_grpo"},
    "dapo": {**CLIP, "loss_type": "dapo"},
    "cispo": {**CLIP, "loss_type": "cispo", "epsilon_high": 1 + CLIP["epsilon_high"]},
    "gspo": {**CLIP, "loss_type": "grpo", "importance_sampling_level": "sequence"},
}


@dataclass
class Case:
    """Rows of one optimizer step, and per sampled token of each what both trainers are told."""

    rows: list[Sample]
    advantages: torch.Tensor
    drift: list[torch.Tensor]
    """Per row: old minus current log-probability [n]; zeros on-policy."""
    reference: list[torch.Tensor]
    """Per row: reference minus current log-probability [n]."""
    corrections: list[torch.Tensor]
    masked: tuple[int, ...] = ()
    """Rows taken out of the loss."""

    @property
    def lengths(self) -> list[int]:
        return [0 if i in self.masked else row.num_sampled for i, row in enumerate(self.rows)]


@pytest.fixture
def case(random_rows) -> Case:
    """Eight multi-turn rows; the policy has moved by about 0.2 a token since they were drawn: some are clipped."""
    g = torch.Generator().manual_seed(1)
    rows = random_rows(8)

    def per_token(scale):
        return [scale * torch.randn(row.num_sampled, generator=g) for row in rows]

    corrections = [
        importance_corrections(noise, torch.zeros_like(noise), torch.zeros(len(noise)).long(), "token_truncate", 1.1)
        for noise in per_token(0.1)
    ]
    return Case(rows, torch.randn(8, generator=g), per_token(0.2), per_token(0.2), [c.weights for c in corrections])


@pytest.fixture
def trl_trainer(qwen2, tokenizer, tmp_path):
    from datasets import Dataset

    def make(**settings):
        config = trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=MAX_TOKENS,
            **settings,
        )
        trainer = trl.GRPOTrainer(
            model=copy.deepcopy(qwen2),  # it patches the model's forward
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 8),
            processing_class=tokenizer,
        )
        trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        trainer.model.train()
        return trainer

    return make


def dense(case: Case, indices, values, width, starts) -> torch.Tensor:
    """Per-token values of rows -> [B, T], 0 where nothing was sampled."""
    out = torch.zeros(len(indices), width)
    for k, i in enumerate(indices):
        positions = [t for t, m in enumerate(case.rows[i].loss_mask) if m]
        out[k, torch.tensor(positions) - starts[k]] = values[k]
    return out


def trl_inputs(trainer, case: Case, indices, *, on_policy=False) -> dict[str, torch.Tensor]:
    """As TRL's own `_generate_and_score_completions` lays them out: prompts padded on the left, completions on the right."""
    rows = [case.rows[i] for i in indices]
    starts = [row.loss_mask.index(True) for row in rows]
    left, width = max(starts), max(len(row.token_ids) - start for row, start in zip(rows, starts, strict=True))
    prompts, completions = torch.zeros(len(rows), left).long(), torch.zeros(len(rows), width).long()
    prompt_mask, completion_mask = torch.zeros_like(prompts), torch.zeros_like(completions)
    for k, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids, size = torch.tensor(row.token_ids), len(row.token_ids) - start
        prompts[k, left - start :], prompt_mask[k, left - start :] = ids[:start], 1
        completions[k, :size], completion_mask[k, :size] = ids[start:], 1
    ones = [torch.ones(row.num_sampled) * (i not in case.masked) for i, row in zip(indices, rows, strict=True)]
    result = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
        "tool_mask": dense(case, indices, ones, width, starts).long(),
        "advantages": case.advantages[list(indices)],
        "num_items_in_batch": torch.tensor(float(sum(case.lengths))),
        "importance_sampling_ratio": dense(case, indices, [case.corrections[i] for i in indices], width, starts),
    }
    with torch.no_grad():
        current, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, torch.cat([prompts, completions], 1), torch.cat([prompt_mask, completion_mask], 1), width
        )
    if not on_policy:
        drift = dense(case, indices, [case.drift[i] for i in indices], width, starts)
        result["old_per_token_logps"] = current + drift
    reference = dense(case, indices, [case.reference[i] for i in indices], width, starts)
    result["ref_per_token_logps"] = current + reference
    return result


def theirs(trainer, case: Case, batches=(range(8),), **how) -> tuple[float, torch.Tensor]:
    """Loss and gradient, summed over microbatches as its training loop does."""
    trainer.model.zero_grad()
    total = 0.0
    for indices in batches:
        loss = trainer._compute_loss(trainer.model, trl_inputs(trainer, case, indices, **how))
        loss.backward()
        total += loss.item()
    return total, flat(trainer.model)


def ours(policy, case: Case, what: Objective, *, on_policy=False, corrected=False, minibatch=None, temperature=1.0):
    """Loss and gradient of all rows, or of one of two minibatches, in one pass."""
    indices = list(minibatch or range(8))
    weights = row_weights(
        what.loss_type,
        [case.lengths[i] for i in indices],
        MAX_TOKENS,
        step_tokens=sum(case.lengths),
        num_minibatches=8 // len(indices),
    )
    weights = dict(zip(indices, weights, strict=True))
    indices = [i for i in indices if i not in case.masked]
    rows = [case.rows[i] for i in indices]
    policy.model.zero_grad()
    logprobs = policy.score(rows, temperature).logprobs
    of = torch.arange(len(rows)).repeat_interleave(torch.tensor([row.num_sampled for row in rows]))
    drift = torch.zeros(len(of)) if on_policy else torch.cat([case.drift[i] for i in indices])
    outputs = policy_loss(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() + drift,
            advantages=case.advantages[indices][of],
            weights=torch.tensor([weights[i] for i in indices])[of],
            rows=of,
            corrections=torch.cat([case.corrections[i] for i in indices]) if corrected else torch.ones(len(of)),
            ref_logprobs=logprobs.detach() + torch.cat([case.reference[i] for i in indices]),
        ),
        what,
    )
    outputs.loss.backward()
    return outputs.loss.item(), flat(policy.model)


def flat(model) -> torch.Tensor:
    """By name: the two models may hold their parameters in another order."""
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters())])


def assert_same(mine, other):
    (loss, gradient), (other_loss, other_gradient) = mine, other
    assert loss == pytest.approx(other_loss, rel=1e-4, abs=1e-6)
    assert gradient.norm() > 0
    assert torch.cosine_similarity(gradient, other_gradient, dim=0) > 0.9999
    assert gradient.norm().item() == pytest.approx(other_gradient.norm().item(), rel=1e-4)


@pytest.mark.parametrize("loss_type", SAME)
@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])
def test_the_same_loss_and_gradient(case, qwen2, trl_trainer, make_policy, loss_type, on_policy):
    trainer = trl_trainer(**SAME[loss_type])
    policy = make_policy(qwen2)
    mine = ours(policy, case, Objective(loss_type, **CLIP), on_policy=on_policy)
    assert_same(mine, theirs(trainer, case, on_policy=on_policy))


@pytest.mark.parametrize("loss_type", SAME)
def test_the_same_with_an_engine_correction(case, qwen2, trl_trainer, make_policy, loss_type):
    # gspo apart: in TRL each token's term has the gradient of the whole row, so that its correction weighs all tokens'
    # gradients; here it weighs its own (GSPO-token). With one correction for a row there is no difference.
    if loss_type == "gspo":
        case.corrections = [c.mean().expand_as(c) for c in case.corrections]
    trainer = trl_trainer(**SAME[loss_type])
    trainer.use_vllm = True  # set here: its constructor would start vLLM
    assert_same(ours(make_policy(qwen2), case, Objective(loss_type, **CLIP), corrected=True), theirs(trainer, case))


@pytest.mark.parametrize("loss_type", SAME)
def test_the_same_with_k3_in_the_loss(case, qwen2, trl_trainer, make_policy, loss_type):
    trainer = trl_trainer(**SAME[loss_type], use_bias_correction_kl=False)
    trainer.beta = 0.1  # set here: its constructor would load a second model
    what = Objective(loss_type, **CLIP, kl_beta=0.1, kl_estimator="k3")
    assert_same(ours(make_policy(qwen2), case, what, on_policy=True), theirs(trainer, case, on_policy=True))


@pytest.mark.parametrize("loss_type", [name for name in SAME if name != "gspo"])
@pytest.mark.parametrize("on_policy", [True, False], ids=["on-policy", "off-policy"])
def test_k2_in_the_loss_has_the_gradient_of_trls_default(case, qwen2, trl_trainer, make_policy, loss_type, on_policy):
    # Its default differentiates ratio x k3 (arXiv:2512.02556): another value, the same gradient token by token (kl.py).
    # Not so in gspo, where it weighs a token's KL by its row's ratio, and says itself that this is biased.
    trainer = trl_trainer(**SAME[loss_type])
    trainer.beta = 0.1
    what = Objective(loss_type, **CLIP, kl_beta=0.1, kl_estimator="k2")
    _, mine = ours(make_policy(qwen2), case, what, on_policy=on_policy)
    _, other = theirs(trainer, case, on_policy=on_policy)
    assert (mine - other).norm() < 1e-4 * other.norm()


def test_the_same_at_another_temperature(case, qwen2, trl_trainer, make_policy):
    trainer = trl_trainer(loss_type="dr_grpo", temperature=0.7)
    mine = ours(make_policy(qwen2), case, Objective("dr_grpo", 0.2, 0.2), temperature=0.7)
    assert_same(mine, theirs(trainer, case))


@pytest.mark.parametrize("loss_type", SAME)
def test_the_same_with_masked_rows(case, qwen2, trl_trainer, make_policy, loss_type):
    # Both count a masked row as a row.
    case.masked = (1, 6)
    trainer = trl_trainer(**SAME[loss_type])
    assert_same(ours(make_policy(qwen2), case, Objective(loss_type, **CLIP)), theirs(trainer, case))


HALVES = (range(4), range(4, 8))


@pytest.mark.parametrize("loss_type", SAME)
def test_accumulation(case, qwen2, trl_trainer, make_policy, loss_type):
    trainer = trl_trainer(**SAME[loss_type], gradient_accumulation_steps=2)
    mine = ours(make_policy(qwen2), case, Objective(loss_type, **CLIP))
    accumulated = theirs(trainer, case, HALVES)
    if loss_type != "bnpo":
        assert_same(mine, accumulated)
        return
    # TRL's bnpo divides by the tokens of the microbatch, so a token weighs less in a microbatch of long rows, and the
    # gradient depends on how many rows fit into memory. Here it is the tokens of the optimizer step.
    assert (accumulated[1] - mine[1]).norm() > 0.01 * mine[1].norm()


@pytest.mark.parametrize("loss_type", SAME)
def test_two_optimizer_steps_for_one_generation(case, qwen2, trl_trainer, make_policy, loss_type):
    # dapo and cispo divide by the tokens of the whole generation in both, and weigh each half twice. (TRL before 1.16
    # did not, and its loss was off by a factor: huggingface/trl#6024.)
    trainer = trl_trainer(**SAME[loss_type], steps_per_generation=2)
    policy = make_policy(qwen2)
    for half in HALVES:
        assert_same(ours(policy, case, Objective(loss_type, **CLIP), minibatch=half), theirs(trainer, case, [half]))


def test_a_row_is_judged_by_another_mean(trl_trainer):
    # TRL's default correction masks a row if the product of its token ratios is above 3; see
    # test_corrections.py::test_a_rows_length_does_not_decide_whether_it_is_masked for why ours is the geometric mean.
    trainer = trl_trainer()
    assert trainer.vllm_importance_sampling_mode == "sequence_mask" and trainer.vllm_importance_sampling_clip_max == 3.0
