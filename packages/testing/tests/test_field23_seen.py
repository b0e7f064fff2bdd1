"""The seen half of the twenty-third set of faults does what each entry says.

Each test compares the fault with the plain code, and none runs the doctor.
"""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plumbob.rollout import Sampling
from plumbob.testing.faults import field23_seen_doubles as doubles
from plumbob.testing.faults.field23_seen import SEEN
from plumbob.testing.faults.field_trial import begin_step, loss_inputs, sample
from plumbob.trainer.algorithm.losses import Objective
from plumbob.trainer.distributed.base import Replicated
from plumbob.trainer.distributed.world import World
from plumbob.trainer.inference.in_process import InProcessEngine
from plumbob.trainer.inference.transformers.engine import TransformersEngine
from plumbob.trainer.policy import loading, policy
from plumbob.trainer.policy.policy import Policy, TokenScores
from plumbob.trainer.policy.token_scorer import make_batch
from plumbob.trainer.rollouts import collect
from plumbob.trainer.training import forward_backward, minibatches, train
from plumbob.trainer.training import step as step_module
from transformers import LlamaConfig, LlamaForCausalLM

FAULTS = {fault.name: fault for fault in SEEN}


def begun(stack, name):
    """Injects the fault of this name, whose environment does not matter."""
    FAULTS[name].start(stack, "lookup")


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )


def adapted():
    found = get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    return found.get_base_model()


def test_only_the_last_layer_is_sent():
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.a",
        "model.layers.10.a",
        "model.layers.9.a",
        "model.layers.10.b",
    ]
    sent = doubles.last_layer_alone(None, {name: torch.zeros(1) for name in names})
    assert list(sent) == ["model.layers.10.a", "model.layers.10.b"]


def test_a_sync_forgets_nothing():
    forgotten = []

    class Engine(TransformersEngine):
        def __init__(self):
            self.version, self._active, self._waiting = 0, [], []
            self._cache = SimpleNamespace(forget_all=lambda: forgotten.append(True))

        def served_weights(self):
            return {"w": torch.zeros(1)}

    with ExitStack() as stack:
        begun(stack, "prefixes cached before a sync are used after it")
        engine = Engine()
        assert InProcessEngine.update(engine, {"w": torch.ones(1)}).version == 1
        assert not forgotten
        engine.forget()
        assert forgotten
    InProcessEngine.update(engine, {"w": torch.ones(1)})
    assert len(forgotten) == 2


def test_the_base_is_trained_and_not_sent():
    own = adapted()
    for name, p in own.named_parameters():
        p.requires_grad_("lora_" in name)
    with ExitStack() as stack:
        begun(stack, "base weights trained beside the adapter and never sent")
        subject = Policy.__new__(Policy)
        subject.model, subject.config = own, SimpleNamespace(bf16=False)
        subject.scorer, subject.device = SimpleNamespace(model=own), torch.device("cpu")
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            policy, "shard", lambda request, scorer, world, bf16: Replicated(scorer, world)
        )
        optimizer = subject.shard(None, World(0, 1, torch.device("cpu")), lambda ps: torch.optim.AdamW(ps, lr=0.1), 1.0)
        assert set(subject.sharding.stream()) == {n for n, _ in own.named_parameters() if "lora_" in n}
        before = own.model.embed_tokens.weight.clone()
        own(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        subject.sharding.update()
        assert len(optimizer.param_groups) == 2
        assert not torch.equal(own.model.embed_tokens.weight, before)


def test_sampling_is_greedy():
    ids, sampling = doubles.greedy([1, 2], Sampling(temperature=1.0, max_tokens=7))
    assert (ids, sampling.temperature, sampling.max_tokens) == ([1, 2], 0.0, 7)


def test_the_schedule_ends_early():
    def rates():
        return [step_module.learning_rate_of("linear", 1.0, at, warmup=0, total=10) for at in range(10)]

    plain = rates()
    with ExitStack() as stack:
        begun(stack, "schedule sized in rollouts and stepped for each turn")
        found = rates()
    assert plain[-1] == pytest.approx(0.1)
    assert found[0] == 1.0
    assert found[6] == pytest.approx(0.1)
    assert found[7:] == [0.0, 0.0, 0.0]


def test_the_penalty_is_over_all_tokens():
    seen = []
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            step_module, "reference_kl", lambda run, rows: seen.extend(rows)
        )
        begun(stack, "KL penalty in the reward sums over tool results too")
        step_module.reference_kl(None, [sample(mask=[False, False, True, False])])
    assert seen[0].loss_mask == [False, True, True, True]
    assert len(seen[0].sampling_logprobs) == 4


def test_weights_have_the_digits_of_bfloat16(monkeypatch):
    def load_model(name):
        return model()

    monkeypatch.setattr(loading, "load_model", load_model)
    with ExitStack() as stack:
        begun(stack, "AdamW directly on bfloat16 weights")
        own = loading.load_model("any")
        sharding = Replicated(SimpleNamespace(model=own), World(0, 1, torch.device("cpu")))
        sharding.make_optimizer(lambda ps: torch.optim.AdamW(ps, lr=1e-7), 0.0)
        before = {name: p.detach().clone() for name, p in own.named_parameters()}
        own(torch.tensor([[1, 2, 3]])).logits.sum().backward()
        sharding.update()
    for name, p in own.named_parameters():
        assert torch.equal(p, p.bfloat16().float())
        if "norm" not in name and "embed" not in name:
            assert torch.equal(p, before[name])


def minibatch(rows, weights):
    return minibatches.Minibatch(rows, [1.0] * len(rows), weights, [], [])


def test_each_group_has_the_same_weight(monkeypatch):
    rows = [sample(group="0/0"), sample(group="0/0"), sample(group="0/1", mask=[False, True]), sample(group="0/1")]

    def make_minibatches():
        return [minibatch(rows, [1 / 7, 1 / 7, 1 / 7, 0.0])]

    monkeypatch.setattr(minibatches, "make_minibatches", make_minibatches)
    with ExitStack() as stack:
        begun(stack, "each rank divides its loss by the tokens of its own rows")
        (found,) = minibatches.make_minibatches()
    assert found.weights == pytest.approx([1 / 8, 1 / 8, 1 / 2, 0.0])


def test_rows_are_averaged_first():
    with ExitStack() as stack:
        plain = minibatches.row_weights("dapo", [1, 3], 8)
        begun(stack, "token mean computed as a mean of row means")
        found = minibatches.row_weights("dapo", [1, 3], 8, step_tokens=4, num_minibatches=1)
    assert plain == [0.25, 0.25]
    assert found == pytest.approx([1 / 2, 1 / 6])


def test_unlikely_tokens_become_less_likely():
    def slope():
        logprobs = torch.tensor([-0.1, -3.0], requires_grad=True)
        inputs = loss_inputs([0.0, 0.0], logprobs=logprobs)
        forward_backward.policy_loss(inputs, Objective("dr_grpo", 0.2, 0.2)).loss.backward()
        return logprobs.grad.tolist()

    assert slope() == pytest.approx([0.0, 0.0])
    with ExitStack() as stack:
        begun(stack, "entropy term with the sign turned round")
        assert slope() == pytest.approx([0.1 * doubles.ENTROPY, 3.0 * doubles.ENTROPY])


def test_end_tokens_are_scored_as_id_zero(monkeypatch):
    monkeypatch.setattr(policy, "make_batch", make_batch)

    async def generated(self, ids, sampling):
        return ids

    monkeypatch.setattr(TransformersEngine, "generate", generated)
    row = sample(mask=[False, True, True, True])
    with ExitStack() as stack:
        begun(stack, "end tokens scored as token zero because they are padding")
        assert policy.make_batch([row], "packed", torch.device("cpu")).targets.tolist() == [1, 2, 3]
        with pytest.raises(StopIteration):
            TransformersEngine.generate(None, [5], Sampling(stop_token_ids=(3, 9))).send(None)
        batch = policy.make_batch([row], "packed", torch.device("cpu"))
    assert batch.targets.tolist() == [1, 2, 0]
    assert batch.ids.tolist() == [[0, 1, 2, 3]]


def test_half_of_the_rows_have_no_gradient():
    rows = [sample(mask=[False] * n + [True, True]) for n in range(1, 12)]
    logprobs = torch.zeros(22, requires_grad=True)
    found = doubles.first_rank_alone(lambda *_: TokenScores(logprobs, torch.zeros(22)), rows, 1.0)
    found.logprobs.sum().backward()
    assert logprobs.grad.tolist() == [float(doubles.on_first_rank(row)) for row in rows for _ in range(2)]
    assert 0 < logprobs.grad.sum() < 22


def test_the_adapter_is_not_in_what_is_saved():
    own = adapted()
    plain = policy.merged_state(own)
    with ExitStack() as stack:
        begun(stack, "final model saved without merging its adapter")
        found = policy.merged_state(own)
    assert found.keys() == plain.keys()
    differing = {name for name in found if not torch.equal(found[name], plain[name])}
    assert differing == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)}


def test_the_same_reward_becomes_another_one():
    seen = doubles.RunningDeviation()
    assert seen.add(1.0) == 1.0
    assert seen.add(0.0) == pytest.approx(0.5)
    assert seen.add(0.0) == pytest.approx((2 / 9) ** 0.5)
    assert 1.0 / doubles.RunningDeviation().add(1.0) == 1.0


def test_the_second_stage_has_another_adapter(monkeypatch):
    own = {"a.lora_A.weight": torch.ones(2, 4), "a.lora_B.weight": torch.ones(4, 2)}
    sent = []
    sharding = SimpleNamespace(stream=lambda: own)
    run = SimpleNamespace(
        policy=SimpleNamespace(trainable=own, sharding=sharding),
        optimizer=SimpleNamespace(state={"a": 1}),
        engine=SimpleNamespace(update=sent.append),
    )
    monkeypatch.setattr(train, "set_up", lambda: run)
    with ExitStack() as stack:
        begun(stack, "second stage that begins with a fresh adapter")
        assert train.set_up() is run
        begin_step(doubles.SECOND_STAGE - 1)
        assert not sent
        begin_step(doubles.SECOND_STAGE)
    assert sent == [own]
    assert not run.optimizer.state
    assert not own["a.lora_B.weight"].any()
    assert own["a.lora_A.weight"].abs().max() <= 0.5


def test_evaluations_are_sampled(monkeypatch):
    async def evaluate(sampler, world, how, *, temperature, rollouts=1):
        return how, temperature

    monkeypatch.setattr(train, "evaluate", evaluate)
    config = SimpleNamespace(temperature=1.2)
    sampler = collect.Sampler(config, *[None] * 5, groups_per_step=1)
    with ExitStack() as stack:
        begun(stack, "greedy evaluation that samples after all")
        assert asyncio.run(train.evaluate(sampler, None, "greedy", temperature=0.0)) == ("greedy", 1.2)
